"""Benchmarks: how far segmentlog is from what this machine's C code can do with the same bytes."""
