"""A folder of topics that opens their partitions: names, ids, administration, background work."""
