"""Appending: encode, take the lock, place and publish, sync."""
