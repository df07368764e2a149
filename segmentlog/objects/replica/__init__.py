"""Read-only copies: a folder that follows a shipped store, or a store opened by its URL."""
