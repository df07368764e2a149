"""Definitions of all metrics: name, kind, labels and help text. `docs/server-metrics.md` contains the same table.

Names follow Prometheus' conventions: seconds and bytes as units, and counters end in ``_total``.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

Kind = Literal["counter", "gauge", "histogram"]


class Family(NamedTuple):
    """Definition of a metric with all its labels."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    help: str


_PARTITION: Final = ("topic", "partition")
_POSITION: Final = ("group", "topic", "partition")

# ---------------------------------------------------------------- one worker

BUILD_INFO: Final = Family(
    "segmentlog_build_info", "gauge", ("version", "python", "core", "worker"), "Always 1; the labels identify the build"
)
REQUEST_SECONDS: Final = Family(
    "segmentlog_request_duration_seconds", "histogram", ("api",),
    "Time from the last byte of a request to its response, including waits for the disk, for records (Fetch) and for"
    " other members (JoinGroup, SyncGroup)",
)  # fmt: skip
ERRORS: Final = Family(
    "segmentlog_errors_total", "counter", ("api", "error"),
    "Errors in responses, by Kafka's name of the error; each partition of a response counts",
)  # fmt: skip
CONNECTIONS: Final = Family("segmentlog_connections", "gauge", (), "Connected clients")
ACCEPTED: Final = Family("segmentlog_connections_accepted_total", "counter", (), "Accepted connections")
REFUSED: Final = Family(
    "segmentlog_connections_refused_total", "counter", (),
    "Connections closed at once because a limit was reached, or no descriptor or thread was available",
)  # fmt: skip
CUT: Final = Family(
    "segmentlog_connections_cut_total", "counter", (),
    "Connections closed because a request was malformed, too large, too slow, or missing",
)  # fmt: skip
AUTHENTICATION_FAILURES: Final = Family(
    "segmentlog_authentication_failures_total", "counter", ("by",), "Failed TLS handshakes and SASL authentications"
)
RECEIVED: Final = Family("segmentlog_received_bytes_total", "counter", (), "Bytes received, without TLS overhead")
SENT: Final = Family("segmentlog_sent_bytes_total", "counter", (), "Bytes sent, without TLS overhead")
FETCH_SESSIONS: Final = Family("segmentlog_fetch_sessions", "gauge", (), "Cached fetch sessions (KIP-227)")
LONG_POLLS: Final = Family("segmentlog_long_polls", "gauge", (), "Fetches that wait for records")
WAITING_FOR_DISK: Final = Family(
    "segmentlog_answers_waiting_for_disk",
    "gauge",
    (),
    "Responses with acks=all that wait for the start of an fsync, or of shipping",
)
RENDERED: Final = Family(
    "segmentlog_rendered_batches_total", "counter", ("cache",),
    "Batches written by local programs and converted for Kafka clients: found in the cache (hit) or converted (miss)",
)  # fmt: skip
RENDERED_BYTES: Final = Family(
    "segmentlog_rendered_bytes", "gauge", (), "Size on disk of the cache of converted batches, in unnamed files"
)
OPENED: Final = Family("segmentlog_opened_partitions", "gauge", (), "Partitions open in this process")
PROBLEMS: Final = Family(
    "segmentlog_problems",
    "gauge",
    (),
    "Problems that /readyz reports: failed partitions, failing background work",
)

SHIP_SECONDS: Final = Family(
    "segmentlog_ship_lag_seconds", "gauge", (),
    "Age of the newest state of the store that is completely in the object store; from the worker that ships",
)  # fmt: skip
SHIP_BYTES: Final = Family("segmentlog_ship_lag_bytes", "gauge", (), "Bytes appended since the last shipping cycle")
SHIP_FAILING: Final = Family(
    "segmentlog_ship_failing", "gauge", (), "1 while the store or a partition cannot be shipped; the log has the reason"
)

WORKER: Final = (
    BUILD_INFO, REQUEST_SECONDS, ERRORS, CONNECTIONS, ACCEPTED, REFUSED, CUT, AUTHENTICATION_FAILURES, RECEIVED, SENT,
    FETCH_SESSIONS, LONG_POLLS, WAITING_FOR_DISK, RENDERED, RENDERED_BYTES, OPENED, PROBLEMS, SHIP_SECONDS, SHIP_BYTES,
    SHIP_FAILING,
)  # fmt: skip
"""Metrics of each worker. Only the worker that ships the store has the metrics of shipping."""

# ---------------------------------------------------------------- the store

TOPICS: Final = Family("segmentlog_topics", "gauge", (), "Topics")
PARTITIONS: Final = Family("segmentlog_partitions", "gauge", (), "Partitions of all topics, internal ones included")
UNREAD: Final = Family(
    "segmentlog_unread_partitions", "gauge", (),
    "Partitions without metrics: no process has opened them since the machine started",
)  # fmt: skip
LOG_START: Final = Family("segmentlog_partition_log_start_offset", "gauge", _PARTITION, "Offset of the first record")
LOG_END: Final = Family("segmentlog_partition_log_end_offset", "gauge", _PARTITION, "Offset of the next record")
DURABLE: Final = Family("segmentlog_partition_durable_offset", "gauge", _PARTITION, "Records below it are on disk")
LAST_STABLE: Final = Family(
    "segmentlog_partition_last_stable_offset", "gauge", _PARTITION, "Records below it are in no open transaction"
)
BYTES: Final = Family("segmentlog_partition_size_bytes", "gauge", _PARTITION, "Size of the segments, without indexes")
SEGMENTS: Final = Family("segmentlog_partition_segments", "gauge", _PARTITION, "Segments, the active one included")
EPOCH: Final = Family(
    "segmentlog_partition_epoch",
    "gauge",
    _PARTITION,
    "Leader epoch; grows when records may have been lost",
)
LOST: Final = Family(
    "segmentlog_partition_lost_offsets_total", "counter", _PARTITION,
    "Offsets in ranges lost by crashes and truncations; most of them usually never had a record",
)  # fmt: skip
UNSYNCED_RECORDS: Final = Family(
    "segmentlog_partition_unsynced_records", "gauge", _PARTITION, "Offsets that a power cut would lose now"
)
UNSYNCED_SECONDS: Final = Family(
    "segmentlog_partition_unsynced_seconds", "gauge", _PARTITION,
    "Upper limit of the age of unsynced records: since the last fsync, or the last scrape without any",
)  # fmt: skip
SYNCS: Final = Family(
    "segmentlog_partition_syncs_total", "counter", _PARTITION, "fsyncs by all processes since the last recovery"
)
FAILED: Final = Family(
    "segmentlog_partition_failed", "gauge", _PARTITION, "1 after a failed fsync: no appends until it is reopened"
)
SHIPPED: Final = Family(
    "segmentlog_partition_shipped_offset", "gauge", _PARTITION, "Records below it are in the object store"
)
UNSHIPPED: Final = Family(
    "segmentlog_partition_unshipped_records",
    "gauge",
    _PARTITION,
    "Offsets that would be lost with this machine now",
)
GROUP_STATE: Final = Family(
    "segmentlog_group_state", "gauge", ("group", "state"), "1 for the group's state, 0 for all others"
)
GROUP_MEMBERS: Final = Family(
    "segmentlog_group_members", "gauge", ("group", "kind"), "Members: of the library, or Kafka clients (kafka)"
)
GROUP_GENERATION: Final = Family("segmentlog_group_generation", "gauge", ("group",), "Grows with every rebalance")
COMMITTED: Final = Family("segmentlog_group_committed_offset", "gauge", _POSITION, "Committed offset of the group")
LAG: Final = Family(
    "segmentlog_group_lag", "gauge", _POSITION, "Log end offset minus committed offset, without lost ranges"
)
ROLE: Final = Family(
    "segmentlog_role", "gauge", ("role",),
    "1 for what this machine is to the shipped store, 0 for all others: owner, standby, or taking over",
)  # fmt: skip
OWNER_EPOCH: Final = Family(
    "segmentlog_owner_epoch", "gauge", (), "Epoch of the store's owner; each takeover increases it"
)
STANDBY_RECORDS: Final = Family(
    "segmentlog_standby_lag_records", "gauge", (), "Offsets in the object store that this standby has not downloaded"
)
STANDBY_SECONDS: Final = Family(
    "segmentlog_standby_lag_seconds", "gauge", (), "Time since this standby was up to date with the object store"
)
STANDBY_BLOCKED: Final = Family(
    "segmentlog_standby_blocked", "gauge", (),
    "1 while this standby could not take over if the owner failed; /readyz has the reason",
)  # fmt: skip
LAST_TAKEOVER: Final = Family(
    "segmentlog_last_takeover_timestamp_seconds", "gauge", (), "When the present owner took the store over"
)
STORE_SECONDS: Final = Family(
    "segmentlog_store_scrape_duration_seconds", "gauge", (), "Time to read the metrics of the store"
)

PARTITION: Final = (
    LOG_START, LOG_END, DURABLE, LAST_STABLE, BYTES, SEGMENTS, EPOCH, LOST, UNSYNCED_RECORDS, UNSYNCED_SECONDS, SYNCS,
    FAILED,
)  # fmt: skip
"""Metrics of each partition, in the order of `store_metrics._values`."""
STORE: Final = (
    TOPICS, PARTITIONS, UNREAD, *PARTITION, SHIPPED, UNSHIPPED, GROUP_STATE, GROUP_MEMBERS, GROUP_GENERATION, COMMITTED,
    LAG, ROLE, OWNER_EPOCH, STORE_SECONDS,
)  # fmt: skip
"""Metrics of the store, from the first worker only. The metrics of shipping and of the role exist only if the store is
shipped, or a standby."""
STANDBY: Final = (STANDBY_RECORDS, STANDBY_SECONDS, STANDBY_BLOCKED, LAST_TAKEOVER)
"""Metrics that only a standby has, and after a takeover the last one, on both machines."""
