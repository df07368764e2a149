"""Serve a store to Kafka clients. A server is a process, or several, that has the store open, like any other program.

This package translates requests into calls of the engine, which decides what they do. Only code that starts a server
imports this package.
"""
