"""Batches that many workers write to files, and that one process appends to the log, all of them or none."""
