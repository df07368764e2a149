"""Consumer groups of Kafka's clients, of the classic protocol and of the consumer protocol.

`machine` and `consumer_group` decide, a group at a time, without a clock, a thread or a file; `keeper` has the groups,
and writes down what they decide before anybody is told; `coordinator` lets callers wait for it.
"""
