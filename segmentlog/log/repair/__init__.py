"""Repairing a partition: what is damaged goes to quarantine, what is whole stays where it is."""
