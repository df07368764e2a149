"""Read-only copies of a shipped store: a folder that follows it, or a store opened by its URL."""
