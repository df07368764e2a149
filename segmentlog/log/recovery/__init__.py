"""Opening a partition after whatever happened to it, and repairing one."""
