"""The codec of Kafka's protocol is generated: `condense` takes facts out of Kafka's schemas, `generate` writes code."""
