"""Restore a store from an object store: whole, or to a point in time."""
