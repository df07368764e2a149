"""Bytes <-> values: every byte that segmentlog writes is described and encoded in this folder, purely."""
