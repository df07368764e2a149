"""Version 2 of the Confluent REST Proxy's API: topics, produce, consumer instances."""
