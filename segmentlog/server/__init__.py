"""Kafka's protocol over a store."""
