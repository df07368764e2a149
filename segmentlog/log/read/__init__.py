"""Read a partition without taking a lock of appends."""
