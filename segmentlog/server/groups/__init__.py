"""Consumer groups of Kafka's clients, of the classic protocol and of the consumer protocol (KIP-848).

`classic_group` and `consumer_group` are state machines, one a group, without clock, threads or files. `group_manager`
loads the groups and saves each change before a client is answered. `coordinator` lets the callers wait for an answer.
"""
