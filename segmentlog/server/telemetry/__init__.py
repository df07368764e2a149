"""What a server tells of itself and of its store, for Prometheus. It reads what is there when somebody asks; until then
it costs nothing.
"""
