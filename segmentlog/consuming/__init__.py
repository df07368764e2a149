"""Consumers: iterate over records, follow new ones, seek."""
