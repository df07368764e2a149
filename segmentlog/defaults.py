"""Defaults of `segmentlog.open`, in a module without imports: so importing the package takes no time.

The defaults of topics, and all settings with units or choices, are in `segmentlog.config`.
"""

CLEANER_BUFFER_BYTES = 128 << 20
"""Memory for the offset map of one compaction, like Kafka's `log.cleaner.dedupe.buffer.size`."""

SHIP_INTERVAL_MS = 1000
"""Time between uploads to an object store."""

HAND_OVER_WAIT_MS = 10_000
"""Longest wait for a new owner in a planned hand-over, while appends are stopped."""

HAND_OVER_SHIP_MS = 60_000
"""Longest upload before a planned hand-over stops appends."""

REMOTE_CACHE_BYTES = 1 << 30
"""Size of the local cache of a store that is opened by its URL in an object store."""

OFFSETS_RETENTION_MINUTES = 7 * 24 * 60
"""Like Kafka's `offsets.retention.minutes`."""
