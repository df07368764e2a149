"""One partition: append, read, recover, compact and repair its segments."""
