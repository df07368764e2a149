"""Encode and decode messages of Kafka's protocol. `generated` is written by `tools/codec/generate.py`."""
