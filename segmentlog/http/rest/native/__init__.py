"""What the REST Proxy does not have: records by offset, lines in and out, a stream of events."""
