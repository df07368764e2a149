"""Metrics of a server and of its store for Prometheus, collected when they are requested and at no cost until then."""
