"""One partition: appending, reading, recovering and compacting its segments."""
