"""One partition: its lock, its offsets, its recovery, and reading it."""
