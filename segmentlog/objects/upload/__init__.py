"""Ship a store. Each cycle scans, plans, uploads, and publishes the manifest."""
