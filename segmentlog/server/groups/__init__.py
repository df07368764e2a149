"""Consumer groups of Kafka's clients: the classic protocol.

`machine` decides, a group at a time, without a clock, a thread or a file; `coordinator` lets callers wait for what it
decides, and writes that down before they are told.
"""
