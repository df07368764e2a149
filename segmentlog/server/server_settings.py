"""Settings and limits of a server, with their defaults."""

from __future__ import annotations

from typing import Literal

import msgspec

from segmentlog.server.groups.classic_types import GroupSettings

AcksAll = Literal["durable", "written", "shipped"]


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits for one client and for all clients. Names and defaults are Kafka's where Kafka has the limit."""

    request_bytes: int = 100 << 20
    """`socket.request.max.bytes`: size of a request."""
    control_request_bytes: int = 8 << 20
    """Size of a request other than Produce. Kafka has one limit for all requests; but decoded lists of names take many
    times the memory of their bytes."""
    unauthenticated_request_bytes: int = 16 << 10
    """`sasl.server.max.receive.size`: size of a request before authentication. Kafka's 512 KiB are for mechanisms that
    this server does not have. Each connection has a buffer of this size anyway."""
    unauthenticated_requests: int = 32
    """Requests of a client before it is authenticated. Clients need four or five."""
    unauthenticated_connections: int = 1024
    """Connections of a worker in the TLS handshake or before authentication. Above the limit, the worker
    closes the oldest of the address that has the most."""
    authentication_s: float = 30.0
    """Time for the TLS handshake, and then the same time for authentication."""
    connections: int = 4096
    """`max.connections` of a worker. At the limit, a new connection replaces a connection that never sent a byte."""
    connections_per_address: int = 4096
    """`max.connections.per.ip`."""
    idle_s: float = 600.0
    """`connections.max.idle.ms`: time between two requests."""
    patience_s: float = 30.0
    """Time for each 64 KiB of a request to arrive, and of a response to be received by the client."""
    buffered_bytes: int = 256 << 20
    """`queued.max.request.bytes`: bytes of a worker's large requests, arriving or in progress. At the limit, the worker
    closes the connection whose present request began first."""
    answered_bytes: int = 4 << 20
    """Bytes of unsent responses of one client. At the limit, the server reads none of its requests."""
    answer_elements: int = 250_000
    """Elements in one response: partitions, producers, resources, group members, committed offsets. Each takes about
    500 bytes as an object, and a request for a thousand of them may take ten bytes."""
    answer_bytes: int = 32 << 20
    """Bytes of text in one response that are not in the request: member metadata, offset metadata, error messages,
    configs of created topics."""
    answer_config_bytes: int = 64 << 20
    """Bytes of configuration entries in one response to DescribeConfigs. Kafka's tools request all topics at once. For
    10,000 topics these take 16 MB, with synonyms 32 MB."""
    fetch_bytes: int = 55 << 20
    """`fetch.max.bytes`: size of a response to Fetch."""
    fetch_wait_ms_max: int = 60_000
    """Longest time for which a fetch waits for records, in milliseconds."""
    rendered_bytes: int = 1 << 30
    """Size of the disk cache of batches converted to Kafka's format, for all workers together. It also uses at most a
    quarter of the free disk space."""
    rendered_memory_bytes: int = 128 << 20
    """Memory of a worker for converted batches, in the cache and in unsent responses. At the limit, a response includes
    only its first batch, and batches that are on disk."""
    partitions_made: int = 10_000
    """Partitions created by one request; Kafka's controller has the same limit as a constant."""
    fetch_sessions: int = 1000
    """`max.incremental.fetch.session.cache.slots`: fetch sessions of a worker."""
    fetch_session_partitions: int = 500_000
    """Partitions in all fetch sessions together, about 100 MB."""


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a server."""

    auto_create: bool = True
    """`auto.create.topics.enable`: create a topic when a client requests an unknown name."""
    default_partitions: int = 1
    """`num.partitions`: partitions of a topic that is created without a number."""
    acks_all: AcksAll = "durable"
    """Event after which a batch with ``acks=all`` is acknowledged: the fsync (``durable``); the write, as in Kafka
    (``written``); or the upload to the object store (``shipped``)."""
    durable_reads: bool = False
    """Return to consumers only records that no crash can lose."""
    allowed_hosts: tuple[str, ...] = ()
    """Host names accepted by the metrics endpoint, in addition to those of the machine."""
    limits: Limits = Limits()
    groups: GroupSettings = GroupSettings()
