"""Open a partition, and recover its log if the shared state cannot be trusted."""
