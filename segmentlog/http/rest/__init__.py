"""Confluent's REST Proxy API, versions 2 and 3, and endpoints of segmentlog."""
