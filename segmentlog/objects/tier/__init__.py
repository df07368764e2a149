"""Tiered storage: evict segments, recall them, read them through a block cache."""
