"""Confluent's Schema Registry API."""
