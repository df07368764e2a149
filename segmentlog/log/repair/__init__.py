"""Repair a partition: move damaged bytes to quarantine, and leave intact batches where they are."""
