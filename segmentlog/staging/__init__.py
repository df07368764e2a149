"""Batches written by many workers and appended by one, or not at all."""
