"""Upload a store. Each cycle scans the partitions, plans, uploads, and publishes the manifest."""
