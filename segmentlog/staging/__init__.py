"""Batches that many workers write and one process appends together, or not at all."""
