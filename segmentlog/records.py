"""Basic values: records, names of partitions, and reports."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, Literal, NamedTuple

import msgspec

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    K = TypeVar("K", default=bytes | None)
    V = TypeVar("V", default=bytes | None)
else:  # Python has defaults of type variables since 3.13, and only type checkers need them
    from typing import TypeVar

    K, V = TypeVar("K"), TypeVar("V")

Headers = tuple[tuple[str, bytes | None], ...]
"""Headers of one record, in order. A name may occur several times, and a value may be null."""


# A msgspec struct, not a named tuple: C code creates it in 64 ns (through ``map``) instead of 270 ns.
class Record(msgspec.Struct, Generic[K, V], frozen=True, gc=False):
    """A record that was read.

    ``timestamp`` is in milliseconds since 1970 UTC; ``epoch`` is the leader epoch in which the record was appended. In
    a compacted topic, a null ``value`` is a tombstone. Key and value are bytes or None, or the objects of a consumer's
    deserializers.
    """

    topic: str
    partition: int
    offset: int
    timestamp: int
    key: K
    value: V
    headers: Headers
    epoch: int


class TopicPartition(NamedTuple):
    """A partition by the name of its topic."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}/{self.partition}"


class PartitionId(NamedTuple):
    """A partition by the id of its topic, which a rename of the topic does not change."""

    topic_id: str
    partition: int


class EpochStart(msgspec.Struct, frozen=True, gc=False):
    """A leader epoch of a partition, and the first offset that may have been appended in it."""

    epoch: int
    start_offset: int


class LostRange(msgspec.Struct, frozen=True, gc=False):
    """Offsets ``[base_offset, end_offset)`` that have no records, and will never have any.

    Records that had these offsets before a crash or a truncation are lost. Usually most offsets of a range never had a
    record, because after a crash the log continues far beyond the last one. ``epoch`` is the epoch in which the log
    continues at ``end_offset``.
    """

    base_offset: int
    end_offset: int
    epoch: int
    reason: str
    at_ms: int = 0


RecoveryMode = Literal["strict", "tail", "salvage"]
"""How opening a log handles damage.

strict   any damage raises, including a torn write at the end, and nothing is changed; reads the whole log
tail     a torn write at the end is truncated and moved to quarantine; damage elsewhere raises when it is read
salvage  like tail, but reading skips damage, logs a warning, and lists it in `Partition.damage`
"""


class RecoveryReport(msgspec.Struct, frozen=True):
    """The result of opening a partition.

    verdict          ``new``            an empty partition was created
                     ``live``           the machine has not restarted since the last process: nothing to do
                     ``clean``          closed cleanly before the machine was restarted: nothing to do
                     ``torn write``     a process died during an append; its bytes were truncated
                     ``machine death``  scanned from the recovery point; the log continues at its offset ceiling
                     ``restored``       first open after a restore from an object store; continues at its offset ceiling
                     ``failed fsync``   the unsynced end was written again and synced
                     ``no checkpoint``  scanned completely; continues far beyond offsets that may have been assigned
                     ``replicated``     a replicated log, scanned from the recovery point; continues at its end
                     ``incomplete``     a replicated log that lacks synced records: it must be copied again
    scanned_bytes    bytes of the log that were read and checked
    truncated_bytes  bytes removed at the end of the log, kept in ``quarantine_path``
    lost             the lost range that this recovery created, or None
    why              the reason for the verdict, as a sentence
    """

    verdict: str
    log_start_offset: int
    log_end_offset: int
    epoch: int
    scanned_bytes: int = 0
    truncated_bytes: int = 0
    quarantine_path: str | None = None
    lost: LostRange | None = None
    why: str = ""
    duration_ms: float = 0.0


class SegmentInfo(msgspec.Struct, frozen=True):
    """One segment: offsets ``[base_offset, end_offset)``, size, and largest timestamp (-1 while empty).

    ``remote``: its bytes are stored only in the object store (`remote.storage.enable`).
    """

    base_offset: int
    end_offset: int
    size_bytes: int
    max_timestamp: int
    active: bool
    path: str
    remote: bool = False


class Appended(NamedTuple):
    """Topic, partition, offset and timestamp of a produced record."""

    topic: str
    partition: int
    offset: int
    timestamp: int


class RetentionReport(msgspec.Struct, frozen=True):
    """Segments that retention removed from a partition, or with ``dry_run`` would remove, with the reasons."""

    topic: str
    partition: int
    log_start_offset: int
    """Log start offset after the call."""
    removed: tuple[tuple[SegmentInfo, str], ...] = ()
    rolled: bool = False
    """Whether the active segment was sealed because of its age."""
    busy: bool = False
    """Whether nothing was done because another thread or process has the partition locked."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the removed segments."""
        return sum(segment.size_bytes for segment, _ in self.removed)


class CompactionReport(msgspec.Struct, frozen=True):
    """Result of a compaction of a partition, or with ``dry_run`` the predicted result."""

    topic: str
    partition: int
    cleaned_offset: int = 0
    """Before this offset, no key has more records than `compaction.keep.last`."""
    passes: int = 0
    """Number of offset maps that were needed."""
    records_before: int = 0
    records_after: int = 0
    tombstones_removed: int = 0
    expired: int = 0
    """Number of records dropped because they have expired."""
    keyless: int = 0
    """Number of records without a key, from before the topic was compacted; they are kept."""
    unreadable: tuple[str, ...] = ()
    """Reasons why batches of Kafka clients cannot be read, one per batch; they are kept unchanged."""
    segments_before: int = 0
    segments_after: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    seconds: float = 0.0
    busy: bool = False
    """Whether nothing was done because another thread or process has the partition locked."""
