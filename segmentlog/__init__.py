"""segmentlog: Kafka's log, embedded. A store is a directory; see README and `segmentlog.open`.

Names are imported when they are first used, so that the command line starts without numpy.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from segmentlog.config import FsyncPolicy as FsyncPolicy, TopicConfig as TopicConfig
    from segmentlog.consumer import Consumer as Consumer
    from segmentlog.errors import (
        CorruptBatch as CorruptBatch,
        DiskFull as DiskFull,
        InvalidConfig as InvalidConfig,
        InvalidRecord as InvalidRecord,
        InvalidTopicName as InvalidTopicName,
        LogTruncated as LogTruncated,
        OffsetOutOfRange as OffsetOutOfRange,
        OutOfOrderSequence as OutOfOrderSequence,
        PartitionFailed as PartitionFailed,
        ProducerFenced as ProducerFenced,
        ReadOnlyStore as ReadOnlyStore,
        RecordTooLarge as RecordTooLarge,
        SegmentlogError as SegmentlogError,
        StoreClosed as StoreClosed,
        StoreVersionError as StoreVersionError,
        TopicExists as TopicExists,
        TransactionAborted as TransactionAborted,
        UnknownTopic as UnknownTopic,
    )
    from segmentlog.format.record_batch import RecordBatch as RecordBatch
    from segmentlog.partition.partition import Partition as Partition
    from segmentlog.policy.partitioner import HashPartitioner as HashPartitioner, RangePartitioner as RangePartitioner
    from segmentlog.producer import Delivery as Delivery, Producer as Producer
    from segmentlog.records import (
        Appended as Appended,
        EpochStart as EpochStart,
        LostRange as LostRange,
        Record as Record,
        RecoveryReport as RecoveryReport,
        SegmentInfo as SegmentInfo,
        TopicPartition as TopicPartition,
    )
    from segmentlog.store import LogStore as LogStore, Topic as Topic

_HOMES = {
    "segmentlog.config": ("FsyncPolicy", "TopicConfig"),
    "segmentlog.consumer": ("Consumer",),
    "segmentlog.errors": (
        "CorruptBatch", "DiskFull", "InvalidConfig", "InvalidRecord", "InvalidTopicName", "LogTruncated",
        "OffsetOutOfRange", "OutOfOrderSequence", "PartitionFailed", "ProducerFenced", "ReadOnlyStore",
        "RecordTooLarge", "SegmentlogError", "StoreClosed", "StoreVersionError", "TopicExists",
        "TransactionAborted", "UnknownTopic",
    ),
    "segmentlog.format.record_batch": ("RecordBatch",),
    "segmentlog.partition.partition": ("Partition",),
    "segmentlog.policy.partitioner": ("HashPartitioner", "RangePartitioner"),
    "segmentlog.producer": ("Delivery", "Producer"),
    "segmentlog.records": (
        "Appended", "EpochStart", "LostRange", "Record", "RecoveryReport", "SegmentInfo", "TopicPartition",
    ),
    "segmentlog.store": ("LogStore", "Topic"),
}  # fmt: skip
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = ["open", *_HOME_OF]  # noqa: PLE0604


def open(
    path: str | os.PathLike[str], *, create: bool = True, read_only: bool = False, background: bool = True
) -> LogStore:
    """Open the store in the folder ``path``, making it unless ``create=False``.

    read_only   change nothing, not even what a recovery would mend
    background  start threads for fsync policies and lingering; without, appends do what is due

    Raises `StoreVersionError` for a folder that is no store or one of another version, OSError
    for one that cannot be read.
    """
    from segmentlog.store import LogStore

    return LogStore(path, create=create, read_only=read_only, background=background)


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'segmentlog' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME_OF])
