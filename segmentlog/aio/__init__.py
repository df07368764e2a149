"""A few threads for blocking calls of asynchronous clients, and the bridge back to an event loop."""
