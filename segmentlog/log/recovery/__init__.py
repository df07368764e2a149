"""Opening a partition after whatever happened to it."""
