"""Endpoints that the REST Proxy does not have: records by offset, lines, event streams."""
