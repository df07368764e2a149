"""Asynchronous clients share a few threads for calls that may block, and the way back to an event loop."""
