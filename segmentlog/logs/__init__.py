"""A handler for Python's logging that appends to a topic."""
