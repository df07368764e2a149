"""Defaults of `segmentlog.open`: alone in a file that loads nothing, so that importing the package takes no time.

Those of topics, and all that needs a unit or a choice, are in `segmentlog.config`.
"""

CLEANER_BUFFER_BYTES = 128 << 20
"""Memory for one compaction's offset map, as Kafka's `log.cleaner.dedupe.buffer.size`."""

SHIP_INTERVAL_MS = 1000
"""How often a store is shipped to an object store."""

REMOTE_CACHE_BYTES = 1 << 30
"""What of a store that is read from an object store may be here."""

OFFSETS_RETENTION_MINUTES = 7 * 24 * 60
"""Kafka's `offsets.retention.minutes`."""
