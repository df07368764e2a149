"""What the asynchronous clients share: a few threads for what may block, and the way back to an event loop."""
