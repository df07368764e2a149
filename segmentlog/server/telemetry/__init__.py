"""Metrics of a server and of its store for Prometheus. They cost nothing until a client requests them."""
