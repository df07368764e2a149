"""File and wire formats: pure functions that encode and decode every byte that segmentlog writes."""
