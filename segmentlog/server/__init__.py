"""A server that speaks Kafka's protocol over a store: one more process that has it open. It translates, and decides
nothing that the engine decides. Nothing imports it but who starts it.
"""
