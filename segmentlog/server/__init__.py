"""Serve a store over Kafka's protocol, from one more process that has the store open.

This package translates requests into calls of the engine, which makes all decisions. Only the code that starts a server
imports it.
"""
