"""Topics of a store and their partitions: names and ids, administration, background work."""
