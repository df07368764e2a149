"""Tiered storage: evict segments, recall them, and read them through a block cache."""
