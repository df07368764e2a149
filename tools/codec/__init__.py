"""Generator of the message classes of Kafka's protocol: `condense` reads Kafka's schemas, `generate` writes classes."""
