"""Reading a partition, without any lock."""
