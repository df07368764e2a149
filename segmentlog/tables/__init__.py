"""A topic as a table: the latest value of each key."""
