"""The schema registry's door: Confluent's API."""
