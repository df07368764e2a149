"""Append: encode, take the lock, place and publish, sync."""
