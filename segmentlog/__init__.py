"""Kafka's log, embedded in a process: a store is a folder. See the README and `segmentlog.open`.

Names are imported at their first use, so that the command line starts without numpy.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from segmentlog.defaults import (
    CLEANER_BUFFER_BYTES,
    OFFSETS_RETENTION_MINUTES,
    REMOTE_CACHE_BYTES,
    SHIP_INTERVAL_MS,
)

__version__ = "0.1.0"

if TYPE_CHECKING:
    from segmentlog.codecs import Codec as Codec
    from segmentlog.codecs import Deserializer as Deserializer
    from segmentlog.codecs import Serializer as Serializer
    from segmentlog.codecs import json_codec as json_codec
    from segmentlog.codecs import msgpack_codec as msgpack_codec
    from segmentlog.codecs import text_codec as text_codec
    from segmentlog.config import FsyncPolicy as FsyncPolicy
    from segmentlog.config import TopicConfig as TopicConfig
    from segmentlog.consuming.async_consumer import AsyncConsumer as AsyncConsumer
    from segmentlog.consuming.consumer import Consumer as Consumer
    from segmentlog.consuming.decoding import Undecodable as Undecodable
    from segmentlog.errors import (
        ConditionIgnored as ConditionIgnored,
    )
    from segmentlog.errors import (
        ConsumerBusy as ConsumerBusy,
    )
    from segmentlog.errors import (
        ConsumerFenced as ConsumerFenced,
    )
    from segmentlog.errors import (
        CoordinatorRefused as CoordinatorRefused,
    )
    from segmentlog.errors import (
        CoordinatorUnreachable as CoordinatorUnreachable,
    )
    from segmentlog.errors import (
        CorruptBatch as CorruptBatch,
    )
    from segmentlog.errors import (
        DeserializationError as DeserializationError,
    )
    from segmentlog.errors import (
        DiskFull as DiskFull,
    )
    from segmentlog.errors import GrantExhausted as GrantExhausted
    from segmentlog.errors import GroupHeld as GroupHeld
    from segmentlog.errors import (
        GroupInUse as GroupInUse,
    )
    from segmentlog.errors import (
        GroupNotEmpty as GroupNotEmpty,
    )
    from segmentlog.errors import (
        HandOverInProgress as HandOverInProgress,
    )
    from segmentlog.errors import InputMismatch as InputMismatch
    from segmentlog.errors import (
        InvalidConfig as InvalidConfig,
    )
    from segmentlog.errors import (
        InvalidRecord as InvalidRecord,
    )
    from segmentlog.errors import (
        InvalidTopicName as InvalidTopicName,
    )
    from segmentlog.errors import (
        InvalidWireBatch as InvalidWireBatch,
    )
    from segmentlog.errors import LocalError as LocalError
    from segmentlog.errors import (
        LogTruncated as LogTruncated,
    )
    from segmentlog.errors import NotShipped as NotShipped
    from segmentlog.errors import (
        ObjectStoreError as ObjectStoreError,
    )
    from segmentlog.errors import (
        OffsetGrantExhausted as OffsetGrantExhausted,
    )
    from segmentlog.errors import (
        OffsetOutOfRange as OffsetOutOfRange,
    )
    from segmentlog.errors import (
        OutOfOrderSequence as OutOfOrderSequence,
    )
    from segmentlog.errors import (
        PartitionBusy as PartitionBusy,
    )
    from segmentlog.errors import (
        PartitionFailed as PartitionFailed,
    )
    from segmentlog.errors import (
        ProcessLimitError as ProcessLimitError,
    )
    from segmentlog.errors import (
        ProducerBusy as ProducerBusy,
    )
    from segmentlog.errors import (
        ProducerFenced as ProducerFenced,
    )
    from segmentlog.errors import ProducerHeld as ProducerHeld
    from segmentlog.errors import (
        ProducerNameInUse as ProducerNameInUse,
    )
    from segmentlog.errors import (
        ReadOnlyStore as ReadOnlyStore,
    )
    from segmentlog.errors import (
        RecordTooLarge as RecordTooLarge,
    )
    from segmentlog.errors import (
        SegmentGone as SegmentGone,
    )
    from segmentlog.errors import (
        SegmentlogError as SegmentlogError,
    )
    from segmentlog.errors import (
        SerializationError as SerializationError,
    )
    from segmentlog.errors import (
        ShippingRefused as ShippingRefused,
    )
    from segmentlog.errors import (
        ShipUnconfirmed as ShipUnconfirmed,
    )
    from segmentlog.errors import (
        StoreClosed as StoreClosed,
    )
    from segmentlog.errors import (
        StoreFenced as StoreFenced,
    )
    from segmentlog.errors import (
        StoreVersionError as StoreVersionError,
    )
    from segmentlog.errors import (
        TopicExists as TopicExists,
    )
    from segmentlog.errors import (
        TransactionAborted as TransactionAborted,
    )
    from segmentlog.errors import (
        UnknownTopic as UnknownTopic,
    )
    from segmentlog.errors import (
        UnreadableBatch as UnreadableBatch,
    )
    from segmentlog.format.record_batch import RecordBatch as RecordBatch
    from segmentlog.groups.committed_offsets import CommittedOffset as CommittedOffset
    from segmentlog.groups.group_admin import GroupDescription as GroupDescription
    from segmentlog.log.append.wire_append import WireAppended as WireAppended
    from segmentlog.log.partition import Partition as Partition
    from segmentlog.log.producer_state import ProducerStamp as ProducerStamp
    from segmentlog.logs.handler import LogHandler as LogHandler
    from segmentlog.objects.bucket.url import open_bucket as open_bucket
    from segmentlog.objects.replica.replica import Replica as Replica
    from segmentlog.objects.restore.restore import restore as restore
    from segmentlog.policy.partitioner import HashPartitioner as HashPartitioner
    from segmentlog.policy.partitioner import RangePartitioner as RangePartitioner
    from segmentlog.producing.async_producer import AsyncProducer as AsyncProducer
    from segmentlog.producing.async_sender import AsyncDelivery as AsyncDelivery
    from segmentlog.producing.delivery import Delivery as Delivery
    from segmentlog.producing.producer import Producer as Producer
    from segmentlog.records import (
        Appended as Appended,
    )
    from segmentlog.records import (
        CompactionReport as CompactionReport,
    )
    from segmentlog.records import (
        EpochStart as EpochStart,
    )
    from segmentlog.records import (
        LostRange as LostRange,
    )
    from segmentlog.records import (
        Record as Record,
    )
    from segmentlog.records import (
        RecoveryMode as RecoveryMode,
    )
    from segmentlog.records import (
        RecoveryReport as RecoveryReport,
    )
    from segmentlog.records import (
        RetentionReport as RetentionReport,
    )
    from segmentlog.records import (
        SegmentInfo as SegmentInfo,
    )
    from segmentlog.records import (
        TopicPartition as TopicPartition,
    )
    from segmentlog.server.embedded import Server as Server
    from segmentlog.server.server_settings import AcksAll
    from segmentlog.store import LogStore as LogStore
    from segmentlog.store import Topic as Topic
    from segmentlog.tables.table import Table as Table

_HOMES = {
    "segmentlog.codecs": ("Codec", "Deserializer", "Serializer", "json_codec", "msgpack_codec", "text_codec"),
    "segmentlog.config": ("FsyncPolicy", "TopicConfig"),
    "segmentlog.consuming.async_consumer": ("AsyncConsumer",),
    "segmentlog.consuming.consumer": ("Consumer",),
    "segmentlog.consuming.decoding": ("Undecodable",),
    "segmentlog.producing.delivery": ("Delivery",),
    "segmentlog.errors": (
        "ConditionIgnored", "ConsumerBusy", "ConsumerFenced", "CoordinatorRefused", "CoordinatorUnreachable",
        "CorruptBatch", "DeserializationError", "DiskFull", "GroupInUse", "GroupNotEmpty", "HandOverInProgress",
        "InputMismatch", "InvalidConfig", "InvalidRecord", "InvalidTopicName", "InvalidWireBatch", "LogTruncated",
        "ObjectStoreError", "OffsetGrantExhausted", "OffsetOutOfRange", "OutOfOrderSequence", "PartitionBusy",
        "PartitionFailed", "ProcessLimitError", "ProducerBusy", "ProducerFenced", "ProducerNameInUse",
        "ReadOnlyStore", "RecordTooLarge", "SegmentGone", "SegmentlogError", "SerializationError",
        "ShipUnconfirmed", "ShippingRefused", "StoreClosed", "StoreFenced", "StoreVersionError", "TopicExists",
        "TransactionAborted", "UnknownTopic", "UnreadableBatch",
    ),
    "segmentlog.format.record_batch": ("RecordBatch",),
    "segmentlog.groups.group_admin": ("GroupDescription",),
    "segmentlog.groups.committed_offsets": ("CommittedOffset",),
    "segmentlog.log.append.wire_append": ("WireAppended",),
    "segmentlog.log.partition": ("Partition",),
    "segmentlog.log.producer_state": ("ProducerStamp",),
    "segmentlog.logs.handler": ("LogHandler",),
    "segmentlog.objects.bucket.url": ("open_bucket",),
    "segmentlog.objects.replica.replica": ("Replica",),
    "segmentlog.objects.restore.restore": ("restore",),
    "segmentlog.policy.partitioner": ("HashPartitioner", "RangePartitioner"),
    "segmentlog.producing.async_producer": ("AsyncProducer",),
    "segmentlog.producing.producer": ("Producer",),
    "segmentlog.producing.async_sender": ("AsyncDelivery",),
    "segmentlog.records": (
        "Appended", "CompactionReport", "EpochStart", "LostRange", "Record", "RecoveryMode", "RecoveryReport",
        "RetentionReport", "SegmentInfo", "TopicPartition",
    ),
    "segmentlog.server.embedded": ("Server",),
    "segmentlog.store": ("LogStore", "Topic"),
    "segmentlog.tables.table": ("Table",),
}  # fmt: skip
_FORMER_NAMES = {
    "GrantExhausted": "OffsetGrantExhausted",
    "GroupHeld": "GroupInUse",
    "LocalError": "ProcessLimitError",
    "NotShipped": "ShipUnconfirmed",
    "ProducerHeld": "ProducerNameInUse",
}
"""Names of earlier versions, which still work."""
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = ["open", "replica", "serve", *_HOME_OF]


def open(
    path: str | os.PathLike[str],
    *,
    create: bool = True,
    read_only: bool = False,
    background: bool = True,
    recovery: RecoveryMode = "tail",
    scrub_bytes_per_s: int | None = None,
    cleaner_dedupe_buffer_bytes: int = CLEANER_BUFFER_BYTES,
    cleaner_io_max_bytes_per_second: int | None = None,
    offsets_retention_minutes: int = OFFSETS_RETENTION_MINUTES,
    ship: str | None = None,
    ship_topics: Iterable[str] = (),
    ship_interval_ms: int = SHIP_INTERVAL_MS,
    ship_bytes: int | None = None,
    ship_bytes_per_s: int | None = None,
    only_topics: Iterable[str] = (),
    cache_bytes: int = REMOTE_CACHE_BYTES,
    cache_dir: str | os.PathLike[str] | None = None,
    refresh_ms: int = SHIP_INTERVAL_MS,
) -> LogStore:
    """Open the store in the folder ``path``, creating it unless ``create=False``; or open the store at a URL read-only.

    read_only   change nothing, not even what a recovery would repair
    background  start threads for fsync policies, lingering, retention and compaction; without them, appends sync as
                the fsync policy requires, and the program calls `Partition.retain` and `Partition.compact`

    recovery    "tail" truncates a torn write at the end, and damage elsewhere raises when it is read; "strict" reads a
                whole partition when it is opened and raises for any damage, including a torn write; "salvage" skips
                damage while reading, logs a warning, and lists the damage in `Partition.damage`

    scrub_bytes_per_s  check the checksums of sealed segments in the background, at this many bytes per second;
                `LogStore.scrub_report` and the log report damage. None: off

    cleaner_dedupe_buffer_bytes      memory for the offset map of a compaction; less memory means more passes
    cleaner_io_max_bytes_per_second  limit for reads and writes of background compaction; None: no limit

    offsets_retention_minutes  how long a consumer group without members keeps its committed offsets

    ship        URL of an object store (``s3://bucket/path``, ``file:///folder``...). The store is uploaded to it in the
                background every ``ship_interval_ms``, or as soon as ``ship_bytes`` are pending, at most
                ``ship_bytes_per_s``. ``ship_topics`` are names and patterns; empty: those of the last time, or all at
                first. If several processes give a URL, one of them uploads. Extra: ``objects``

    path        a URL (``s3://bucket/path``, ``file:///folder``...) opens what was shipped there, and checks for new
                uploads every ``refresh_ms``. Up to ``cache_bytes`` of downloaded data are cached in a folder below
                ``cache_dir``, which is deleted when the store is closed. ``only_topics``, names and patterns, restricts
                the topics

    A replica is opened read-only. So is a store on a read-only file system, or in a folder that this user may not
    write, with a warning; and a single partition whose files this user may not write. Writing then raises
    `ReadOnlyStore`, which names the path and its permissions. ``read_only=True`` gives no warning.

    Raises `StoreVersionError` if the folder is not a store or has another version, and OSError if it cannot be read.
    """
    from segmentlog.store import LogStore

    return LogStore(
        path,
        create=create,
        read_only=read_only,
        background=background,
        recovery=recovery,
        scrub_bytes_per_s=scrub_bytes_per_s,
        cleaner_dedupe_buffer_bytes=cleaner_dedupe_buffer_bytes,
        cleaner_io_max_bytes_per_second=cleaner_io_max_bytes_per_second,
        offsets_retention_minutes=offsets_retention_minutes,
        ship=ship,
        ship_topics=ship_topics,
        ship_interval_ms=ship_interval_ms,
        ship_bytes=ship_bytes,
        ship_bytes_per_s=ship_bytes_per_s,
        only_topics=only_topics,
        cache_bytes=cache_bytes,
        cache_dir=cache_dir,
        refresh_ms=refresh_ms,
    )


def replica(
    url: str,
    path: str | os.PathLike[str],
    *,
    topics: Iterable[str] = (),
    interval_ms: int = SHIP_INTERVAL_MS,
    background: bool = True,
) -> Replica:
    """Keep a read-only copy of the store shipped to ``url`` in the folder ``path`` up to date, until it is closed.

    ``topics`` are names and patterns; empty: all topics. With ``background``, a thread checks for new uploads every
    ``interval_ms``. Any process may `open` the folder and follow its topics. Raises `ShippingRefused` (the URL has no
    store, the folder has something else, or another process maintains it), `ObjectStoreError`, `InvalidConfig`.
    """
    from segmentlog.objects.replica.replica import Replica

    return Replica(url, path, topics=topics, interval_ms=interval_ms, threads=background)


def serve(
    store: str | os.PathLike[str] | LogStore,
    *,
    host: str = "127.0.0.1",
    port: int = 9092,
    advertise: str | None = None,
    auto_create: bool = True,
    default_partitions: int = 1,
    acks_all: AcksAll = "durable",
    durable_reads: bool = False,
    tls_cert: str | None = None,
    tls_key: str | None = None,
    tls_client_ca: str | None = None,
    users: str | None = None,
    acls: str | None = None,
    insecure: bool = False,
    metrics: str | None = None,
    http: str | None = None,
    allow_writes: bool = False,
    allowed_hosts: Iterable[str] = (),
    ship: str | None = None,
    ship_interval_ms: int = SHIP_INTERVAL_MS,
) -> Server:
    """Serve a store to Kafka clients from threads of this process, until `Server.close`.

    store      a folder, which is opened (or created) and closed with the server; or an open store, which stays open
    port       0 chooses a free port; ``bootstrap_servers`` of the server returns it
    metrics    ``"127.0.0.1:9644"``: address for Prometheus; port 0 as above, ``metrics_address`` returns it
    http       ``"127.0.0.1:8080"``: address of the web console, REST and the schema registry (`docs/http.md`); with
               ``allow_writes`` the console can make changes; ``http_url`` returns the address. Extra: ``http``
    ship       as for `open`, if this call opens the store

    The other arguments are the options of ``segmentlog serve``, which runs one process per core. Needs the extra
    ``server``. Raises `SegmentlogError` if the store is served already, if files of users, rules or certificates cannot
    be used, or if an address beyond this machine is not protected; OSError if an address is in use.
    """
    from segmentlog.errors import InvalidConfig
    from segmentlog.security.security_settings import Security
    from segmentlog.server.embedded import Server
    from segmentlog.server.server_settings import ServerSettings
    from segmentlog.store import LogStore

    hosts = tuple(allowed_hosts)
    settings = ServerSettings(
        auto_create=auto_create, default_partitions=default_partitions, acks_all=acks_all, durable_reads=durable_reads,
        allowed_hosts=hosts,
    )  # fmt: skip
    security = Security(
        tls_cert=tls_cert, tls_key=tls_key, tls_client_ca=tls_client_ca, users=users, acls=acls, insecure=insecure
    )
    open_http = None
    if http is not None:
        from segmentlog.http.serving import HttpServer
        from segmentlog.http.settings import HttpSettings
        from segmentlog.security.listen_rules import parse_address

        http_host, http_port = parse_address(http, option="http")
        advertised = () if advertise is None else (parse_address(advertise, option="advertise")[0],)
        http_settings = HttpSettings(allow_writes=allow_writes, allowed_hosts=(*hosts, *advertised))

        def open_http(of: LogStore) -> HttpServer:
            return HttpServer(of, http_host, http_port, settings=http_settings, security=security)

    owns_store = not isinstance(store, LogStore)
    if ship is not None and not owns_store:
        raise InvalidConfig("ship", ship, "given when the store is opened: this one is open already")
    opened = store if isinstance(store, LogStore) else LogStore(store, ship=ship, ship_interval_ms=ship_interval_ms)
    try:
        return Server(
            opened, host=host, port=port, advertise=advertise, settings=settings, security=security,
            owns_store=owns_store, metrics=metrics, open_http=open_http,
        )  # fmt: skip
    except BaseException:
        if owns_store:
            opened.close()
        raise


def __getattr__(name: str) -> Any:
    if name in _FORMER_NAMES:
        return __getattr__(_FORMER_NAMES[name])
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'segmentlog' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME_OF])
