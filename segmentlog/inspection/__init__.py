"""Inspect a store that may be damaged, without changing it: verify, dump, scrub."""
