"""Consumers: iterate, follow, seek."""
