"""What a server is told when it starts, checked; and the defaults, once."""

from __future__ import annotations

from typing import Literal

import msgspec

from segmentlog.server.groups.classic_types import GroupSettings

AcksAll = Literal["durable", "written", "shipped"]


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What one client, or all of them, may take. Where Kafka has the limit, the name and the default are its."""

    request_bytes: int = 100 << 20
    """`socket.request.max.bytes`."""
    control_request_bytes: int = 8 << 20
    """Of a request that brings no records, which is every one but Produce. Kafka has one limit for all; but lists of
    names take many times the memory as objects that they took as bytes."""
    unauthenticated_request_bytes: int = 16 << 10
    """`sasl.server.max.receive.size`: of a request by who has not said who he is yet. Less than Kafka's 512 KiB, which
    is for mechanisms that are not there: so much each connection has room for anyway."""
    unauthenticated_requests: int = 32
    """Until a client has said who it is. Clients need four or five."""
    unauthenticated_connections: int = 1024
    """That have not said who they are, or are in the TLS handshake; of a worker. When there are more, the
    oldest of the address that has most of them is closed."""
    authentication_s: float = 30.0
    """From the connection to the end of the TLS handshake, and from there until it has said who it is."""
    connections: int = 4096
    """`max.connections`, of a worker. One that never sent a byte makes room for another."""
    connections_per_address: int = 4096
    """`max.connections.per.ip`."""
    idle_s: float = 600.0
    """`connections.max.idle.ms`: between two requests."""
    patience_s: float = 30.0
    """For a request that was begun to come, and for an answer to be taken, for each 64 KiB of it."""
    buffered_bytes: int = 256 << 20
    """`queued.max.request.bytes`: of large requests that are coming or being done, of a worker. Who has been sending
    for the longest is cut off when there is no room for another."""
    answered_bytes: int = 4 << 20
    """Of answers that wait for one client: no more requests of it are read until some have gone."""
    answer_elements: int = 250_000
    """Described in one answer: partitions, producers, resources with a configuration, members, positions. Each takes
    some 500 bytes as an object, and the request that asks for a thousand of them may have ten bytes."""
    answer_bytes: int = 32 << 20
    """Of texts in one answer that are not the request's own: what members say, metadata of positions, messages of
    errors, values of configurations of topics that were created."""
    answer_config_bytes: int = 64 << 20
    """Of configuration entries in one answer to DescribeConfigs. Kafka's tools ask about all topics at once: 10,000
    topics take 16 MB, with synonyms 32 MB."""
    fetch_bytes: int = 55 << 20
    """`fetch.max.bytes`."""
    fetch_wait_ms_max: int = 60_000
    """Longest a fetch waits for something to come."""
    rendered_bytes: int = 1 << 30
    """Of what the library wrote, as Kafka's clients read it, on disk: of all workers together, and no more than a
    quarter of what is free there."""
    rendered_memory_bytes: int = 128 << 20
    """Of the same in memory, with what answers hold until their clients have taken them; of a worker. When it is used
    up, an answer has no more than the one batch that it must have, and those that are on disk."""
    partitions_made: int = 10_000
    """By one request to create topics or partitions; Kafka's controller has the same limit, and no setting for it."""
    fetch_sessions: int = 1000
    """`max.incremental.fetch.session.cache.slots`."""
    fetch_session_partitions: int = 500_000
    """Of all sessions together, some 100 MB."""


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a server serves."""

    auto_create: bool = True
    """`auto.create.topics.enable`: who asks for a topic that there is not gets one."""
    default_partitions: int = 1
    """`num.partitions`: of a topic that is made without saying how many."""
    acks_all: AcksAll = "durable"
    """What ``acks=all`` waits for: the disk; as Kafka does that it is written; or that the object store has it."""
    durable_reads: bool = False
    """Consumers see only what no crash can take back."""
    allowed_hosts: tuple[str, ...] = ()
    """Names beside those of the machine itself by which metrics may be asked for."""
    limits: Limits = Limits()
    groups: GroupSettings = GroupSettings()
