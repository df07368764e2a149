"""Producers with a name: numbers, fences, decisions about their transactions."""
