"""The words of the log: a record, and the small frozen values that the floors hand to each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, Literal, NamedTuple

import msgspec

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    K = TypeVar("K", default=bytes | None)
    V = TypeVar("V", default=bytes | None)
else:  # defaults come with Python 3.13, and only a checker of types asks for them
    from typing import TypeVar

    K, V = TypeVar("K"), TypeVar("V")

Headers = tuple[tuple[str, bytes | None], ...]
"""Headers of one record, in order; a name may occur more than once, a value may be null."""


class Record(msgspec.Struct, Generic[K, V], frozen=True, gc=False):
    """One record as a reader gets it.

    ``timestamp`` is in milliseconds since 1970 UTC; ``epoch`` is the partition epoch it was
    appended in. A null ``value`` is a tombstone in a compacted topic. Key and value are bytes
    or None, or what a consumer's deserializers made of them. (A msgspec struct:
    built in C, 64 ns each through ``map``, against 270 ns for a named tuple.)
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
    """The name of one partition."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}/{self.partition}"


class PartitionId(NamedTuple):
    """A partition of the topic that has this id, whatever its name is now."""

    topic_id: str
    partition: int


class EpochStart(msgspec.Struct, frozen=True, gc=False):
    """A partition epoch and the first offset that may have been appended in it."""

    epoch: int
    start_offset: int


class LostRange(msgspec.Struct, frozen=True, gc=False):
    """Offsets ``[base_offset, end_offset)`` that hold no record and never will.

    Records that were handed those numbers before a crash (or a truncation) are gone; most
    of a range was usually never handed out at all. ``epoch`` is the epoch in which history
    resumes at ``end_offset``.
    """

    base_offset: int
    end_offset: int
    epoch: int
    reason: str
    at_ms: int = 0


RecoveryMode = Literal["strict", "tail", "salvage"]
"""What opening a log does about damage.

strict   any damage raises, a torn tail too, and nothing is changed: the whole log is read first
tail     a torn tail is cut off and kept in quarantine; damage elsewhere raises when it is read
salvage  as tail, but reading steps over damage and tells: a warning, and `Partition.damage`
"""


class RecoveryReport(msgspec.Struct, frozen=True):
    """What opening a partition found and did.

    verdict          ``new``            an empty partition was made
                     ``live``           the page cache is as the last process left it: nothing to do
                     ``clean``          closed cleanly under another boot: nothing to do
                     ``torn write``     a process died inside an append; its bytes were cut off
                     ``machine death``  scanned from the recovery point, resumed at the ceiling
                     ``restored``       the first open since a restore from an object store; resumed at the ceiling
                     ``failed fsync``   the unsynced tail was written anew and synced
                     ``no checkpoint``  scanned whole; resumed far beyond what may have been handed out
    scanned_bytes    how much of the log was read and checked
    truncated_bytes  how much was cut off its end, kept in ``quarantine_path``
    lost             the range of offsets that this recovery gave up, or None
    why              the evidence, as a sentence
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
    """One segment: offsets ``[base_offset, end_offset)``, its bytes, its largest timestamp (-1 while empty).

    ``remote``: its bytes lie in the object store alone (`remote.storage.enable`).
    """

    base_offset: int
    end_offset: int
    size_bytes: int
    max_timestamp: int
    active: bool
    path: str
    remote: bool = False


class Appended(NamedTuple):
    """Where a produced record lies."""

    topic: str
    partition: int
    offset: int
    timestamp: int


class RetentionReport(msgspec.Struct, frozen=True):
    """What retention removed from a partition, or with ``dry_run`` would: segments with the reason for each."""

    topic: str
    partition: int
    log_start_offset: int
    """As it is after."""
    removed: tuple[tuple[SegmentInfo, str], ...] = ()
    rolled: bool = False
    """Whether the active segment was sealed, for its age."""
    busy: bool = False
    """Another thread or process is at it: nothing was done."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the segments that went."""
        return sum(segment.size_bytes for segment, _ in self.removed)


class CompactionReport(msgspec.Struct, frozen=True):
    """What a compaction of a partition did, or with ``dry_run`` would do."""

    topic: str
    partition: int
    cleaned_offset: int = 0
    """Every key below it has no more records below it than `compaction.keep.last`."""
    passes: int = 0
    """One for each offset map that was needed."""
    records_before: int = 0
    records_after: int = 0
    tombstones_removed: int = 0
    expired: int = 0
    """Records dropped because their time was over."""
    keyless: int = 0
    """Records without a key, from before the topic was compacted: they are kept."""
    unreadable: tuple[str, ...] = ()
    """Why the records of a batch that a Kafka client sent cannot be read, for each: it is kept as it is."""
    segments_before: int = 0
    segments_after: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    seconds: float = 0.0
    busy: bool = False
    """Another thread or process is at it: nothing was done."""
