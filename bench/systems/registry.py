"""The systems by name, in the order of the report; each is imported when it is asked for."""

from __future__ import annotations

import importlib

from bench.systems.base import System

OURS = "segmentlog"
OURS_UNCOMPRESSED = "segmentlog, uncompressed"
OURS_KAFKA = "segmentlog with Kafka's batches"
OURS_ALL = (OURS, OURS_UNCOMPRESSED, OURS_KAFKA)

_CLASSES = {
    OURS: "ours:Segmentlog",
    OURS_UNCOMPRESSED: "ours:SegmentlogUncompressed",
    OURS_KAFKA: "ours:SegmentlogKafkaBatches",
    "plain file": "plain_file:PlainFile",
    "SQLite": "sqlite:Sqlite",
    "LMDB": "lmdb_log:Lmdb",
    "RocksDB": "rocksdb:RocksDB",
    "persist-queue": "persist_queue:PersistQueue",
    "diskcache": "disk_cache:DiskCache",
    "Redis pages": "redis_pages:RedisPages",
    "NATS JetStream": "nats:NatsJetStream",
    "Kafka": "kafka:Kafka",
    "Kafka's log engine": "kafka_engine:KafkaEngine",
}

NAMES = tuple(_CLASSES)


def system_class(name: str) -> type[System]:
    """Return the class of that name. Raises `KeyError` for a name that is not in `NAMES`."""
    module, class_name = _CLASSES[name].split(":")
    found: type[System] = getattr(importlib.import_module(f"bench.systems.{module}"), class_name)
    return found
