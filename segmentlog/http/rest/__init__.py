"""REST: the Confluent REST Proxy's v2 and v3; and ours: records by offset, a stream of events, lines in and out."""
