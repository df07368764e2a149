"""Staging: many workers write batches to files, and one process appends all of them or none."""
