"""Every metric there is: its name, its kind, its labels and what it says. `docs/server-metrics.md` has the same table.

Names are as Prometheus wants them: seconds and bytes, counters end in ``_total``.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

Kind = Literal["counter", "gauge", "histogram"]


class Family(NamedTuple):
    """A metric with all its labels."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    help: str


_PARTITION: Final = ("topic", "partition")
_POSITION: Final = ("group", "topic", "partition")

# ---------------------------------------------------------------- of a worker

BUILD_INFO: Final = Family(
    "segmentlog_build_info", "gauge", ("version", "python", "core", "worker"), "1; the labels say what runs here"
)
REQUEST_SECONDS: Final = Family(
    "segmentlog_request_duration_seconds", "histogram", ("api",),
    "From the last byte of a request to its answer, the wait for the disk, for records (Fetch) or for other members"
    " (JoinGroup, SyncGroup) included",
)  # fmt: skip
ERRORS: Final = Family(
    "segmentlog_errors_total", "counter", ("api", "error"),
    "Errors that answers told, under Kafka's names, each partition of an answer by itself",
)  # fmt: skip
CONNECTIONS: Final = Family("segmentlog_connections", "gauge", (), "Clients that are connected")
ACCEPTED: Final = Family("segmentlog_connections_accepted_total", "counter", (), "Connections that were accepted")
REFUSED: Final = Family(
    "segmentlog_connections_refused_total", "counter", (),
    "Connections that were closed at once: there were as many as there may be, or no descriptor or thread was left",
)  # fmt: skip
CUT: Final = Family(
    "segmentlog_connections_cut_total", "counter", (),
    "Connections that were closed for what came over them: no request, one that is too large or too slow",
)  # fmt: skip
AUTHENTICATION_FAILURES: Final = Family(
    "segmentlog_authentication_failures_total", "counter", ("by",), "Clients that TLS or SASL did not let in"
)
RECEIVED: Final = Family("segmentlog_received_bytes_total", "counter", (), "From clients, without what TLS adds")
SENT: Final = Family("segmentlog_sent_bytes_total", "counter", (), "To clients, without what TLS adds")
FETCH_SESSIONS: Final = Family("segmentlog_fetch_sessions", "gauge", (), "Fetch sessions that are kept (KIP-227)")
LONG_POLLS: Final = Family("segmentlog_long_polls", "gauge", (), "Fetches that wait for records")
WAITING_FOR_DISK: Final = Family(
    "segmentlog_answers_waiting_for_disk",
    "gauge",
    (),
    "Answers to acks=all that wait for their fsync, or for being shipped, to begin",
)
RENDERED: Final = Family(
    "segmentlog_rendered_batches_total", "counter", ("cache",),
    "Batches that local programs wrote, as Kafka's clients asked for them: made (miss) or still there (hit)",
)  # fmt: skip
RENDERED_BYTES: Final = Family(
    "segmentlog_rendered_bytes", "gauge", (), "What of that takes room on disk, in files without a name"
)
OPENED: Final = Family("segmentlog_opened_partitions", "gauge", (), "Partitions that this process has opened")
PROBLEMS: Final = Family(
    "segmentlog_problems", "gauge", (), "What /readyz complains about: failed partitions, background work that fails"
)

SHIP_SECONDS: Final = Family(
    "segmentlog_ship_lag_seconds", "gauge", (),
    "How long ago everything was in the object store that was on disk then; of the worker that ships",
)  # fmt: skip
SHIP_BYTES: Final = Family("segmentlog_ship_lag_bytes", "gauge", (), "Appended since the last turn of shipping")
SHIP_FAILING: Final = Family(
    "segmentlog_ship_failing", "gauge", (), "1 while the store, or some partition, cannot be shipped: the log says why"
)

WORKER: Final = (
    BUILD_INFO, REQUEST_SECONDS, ERRORS, CONNECTIONS, ACCEPTED, REFUSED, CUT, AUTHENTICATION_FAILURES, RECEIVED, SENT,
    FETCH_SESSIONS, LONG_POLLS, WAITING_FOR_DISK, RENDERED, RENDERED_BYTES, OPENED, PROBLEMS, SHIP_SECONDS, SHIP_BYTES,
    SHIP_FAILING,
)  # fmt: skip
"""Each worker tells these of itself; of shipping the one that ships."""

# ---------------------------------------------------------------- of the store

TOPICS: Final = Family("segmentlog_topics", "gauge", (), "Topics")
PARTITIONS: Final = Family("segmentlog_partitions", "gauge", (), "Partitions of all topics, the store's own included")
UNREAD: Final = Family(
    "segmentlog_unread_partitions", "gauge", (),
    "Partitions that nothing is told of: no process has opened them since the machine started",
)  # fmt: skip
LOG_START: Final = Family("segmentlog_partition_log_start_offset", "gauge", _PARTITION, "The first record still there")
LOG_END: Final = Family("segmentlog_partition_log_end_offset", "gauge", _PARTITION, "What the next record gets")
DURABLE: Final = Family("segmentlog_partition_durable_offset", "gauge", _PARTITION, "Everything below it is on disk")
LAST_STABLE: Final = Family(
    "segmentlog_partition_last_stable_offset", "gauge", _PARTITION, "Everything below it belongs to no open transaction"
)
BYTES: Final = Family("segmentlog_partition_size_bytes", "gauge", _PARTITION, "Its segments, without their indexes")
SEGMENTS: Final = Family("segmentlog_partition_segments", "gauge", _PARTITION, "Segments, the active one included")
EPOCH: Final = Family(
    "segmentlog_partition_epoch", "gauge", _PARTITION, "Grows when a crash or a truncation may have taken records"
)
LOST: Final = Family(
    "segmentlog_partition_lost_offsets_total", "counter", _PARTITION,
    "Offsets in ranges that crashes and truncations took; most of a range was usually never handed out",
)  # fmt: skip
UNSYNCED_RECORDS: Final = Family(
    "segmentlog_partition_unsynced_records", "gauge", _PARTITION, "Offsets that a power cut would take now"
)
UNSYNCED_SECONDS: Final = Family(
    "segmentlog_partition_unsynced_seconds", "gauge", _PARTITION,
    "How long the oldest of those has been at risk: at most this; since the last fsync or the last scrape without any",
)  # fmt: skip
SYNCS: Final = Family(
    "segmentlog_partition_syncs_total", "counter", _PARTITION, "fsyncs of all processes since the last recovery"
)
FAILED: Final = Family(
    "segmentlog_partition_failed", "gauge", _PARTITION, "1 after a failed fsync: it takes no appends until opened anew"
)
SHIPPED: Final = Family(
    "segmentlog_partition_shipped_offset", "gauge", _PARTITION, "Everything below it lies in the object store"
)
UNSHIPPED: Final = Family(
    "segmentlog_partition_unshipped_records",
    "gauge",
    _PARTITION,
    "Offsets that the loss of this machine would take now",
)
GROUP_STATE: Final = Family(
    "segmentlog_group_state", "gauge", ("group", "state"), "1 for the state that it is in, 0 for the others"
)
GROUP_MEMBERS: Final = Family(
    "segmentlog_group_members", "gauge", ("group", "kind"), "Members: of the library, or clients of the server (kafka)"
)
GROUP_GENERATION: Final = Family("segmentlog_group_generation", "gauge", ("group",), "Grows with every rebalance")
COMMITTED: Final = Family("segmentlog_group_committed_offset", "gauge", _POSITION, "Where the group goes on")
LAG: Final = Family(
    "segmentlog_group_lag", "gauge", _POSITION, "Offsets from there to the end of the log, without lost ranges"
)
STORE_SECONDS: Final = Family(
    "segmentlog_store_scrape_duration_seconds", "gauge", (), "What it took to read all this of the store"
)

PARTITION: Final = (
    LOG_START, LOG_END, DURABLE, LAST_STABLE, BYTES, SEGMENTS, EPOCH, LOST, UNSYNCED_RECORDS, UNSYNCED_SECONDS, SYNCS,
    FAILED,
)  # fmt: skip
"""In the order of the values of `partitions.PartitionState.values`."""
STORE: Final = (
    TOPICS, PARTITIONS, UNREAD, *PARTITION, SHIPPED, UNSHIPPED, GROUP_STATE, GROUP_MEMBERS, GROUP_GENERATION, COMMITTED,
    LAG, STORE_SECONDS,
)  # fmt: skip
"""The first worker tells these, for all of the store, whoever writes and reads it; of shipping once it is shipped."""
