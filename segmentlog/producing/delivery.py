"""Records on their way to a partition, and what becomes of them: chunks that fill, and deliveries that tell."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from segmentlog.errors import LocalError, NotShipped, SegmentlogError, StoreClosed
from segmentlog.records import Appended, Headers
from segmentlog.storage import fork_safety
from segmentlog.storage.interrupt_check import is_interrupt

if TYPE_CHECKING:
    from segmentlog.log.partition import Partition

Options = tuple[Headers | None, int | None, int | None]
"""Headers, timestamp and partition of one record, as far as it brings its own."""


class Sends(Protocol):
    """What sends chunks, as they know it."""

    def send_if_nobody_else_does(self, chunk: Chunk) -> None:
        """Somebody waits for this chunk."""

    def wait_for(self, chunk: Chunk, timeout_s: float | None) -> bool:
        """Wait for a chunk to be sent; False when it was not in time."""

    def tell_waiting(self) -> None:
        """A chunk was sent, or failed."""

    def note_reported(self, topic: str, error: Exception) -> None:
        """A call raises ``error``, which kept records of a topic from being appended."""


EVERY_PARTITION: Final = -1
"""In place of a partition's number, for records that failed before they had partitions."""


class Chunk:
    """Records of one topic on their way, in the order they were sent; then where they went.

    Records are numbered as they come and added by one `list.extend` each, without a lock.
    Whoever sends the chunk seals it first and takes its records later: a thread that finds it
    sealed right after it added a record asks under the producer's lock whether that was taken,
    and if not adds it to the next chunk.
    """

    __slots__ = (
        "_partitions", "_positions", "_ranks", "_sends", "_triples", "add", "all_headers", "all_partition",
        "all_timestamps", "base_offsets", "begun_ms", "begun_ns", "error", "errors", "generation", "headers", "is_sent",
        "is_whole", "keys", "logs", "needs_keys", "noted", "number", "partitions", "producer", "room", "room_bytes",
        "sealed", "sticky", "surely_fits", "taken", "timestamps", "topic", "values", "withheld",
    )  # fmt: skip

    def __init__(self, sends: Sends, producer: object, topic: str, room: int, begun_ms: int) -> None:
        self._sends = sends
        self.producer = producer
        """Whose records these are: as long as somebody has a delivery of it, it counts as not dropped."""
        self.topic = topic
        self.begun_ms = begun_ms
        """Timestamp of its records that have none, milliseconds since 1970."""
        self.begun_ns = time.monotonic_ns()
        self.room = self.room_bytes = room
        """Bytes that it still takes before it is sent; about, when threads fill it at the same time."""
        self.needs_keys = False
        self.surely_fits = 0
        """Bytes of a value, and of a key, up to which a record without headers is not too large for a batch."""
        self.sealed = self.taken = False
        self.number = itertools.count().__next__
        self._triples: list[Any] = []
        self.add = self._triples.extend
        """Takes the number, the value and the key of a record."""
        self.values: Sequence[bytes | None] = ()
        self.keys: Sequence[bytes | None] = ()
        self.noted: dict[int, Options] = {}
        """What single records bring beside value and key, by their numbers."""
        self.headers: dict[int, Headers] = {}
        self.timestamps: dict[int, int] = {}
        self.partitions: dict[int, int] = {}
        """The same by their positions, once they are taken."""
        self.all_headers: Sequence[Headers] | None = None
        self.all_timestamps: npt.NDArray[np.int64] | None = None
        self.all_partition: int | None = None
        self.error: Exception | None = None
        self.errors: dict[int, Exception] = {}
        """What failed in which partition; ``error`` is the first."""
        self.withheld: dict[int, Exception] = {}
        """Partitions that it is not appended to, since an earlier chunk was not: by number, what kept that one out.

        `EVERY_PARTITION` when the earlier chunk could have gone to any of them.
        """
        self.sticky = -1
        """Where its records without a key go; -1 until that is decided. The same as of an earlier chunk that failed."""
        self.logs: dict[int, Partition] = {}
        self.base_offsets: dict[int, int] = {}
        self._positions: dict[int, int] | None = None
        self._partitions: npt.NDArray[np.int32] | None = None
        self._ranks: npt.NDArray[np.int64] | None = None
        self.is_sent = False
        self.is_whole = False
        """Of `send_many`, whose caller waits for it."""
        self.generation = fork_safety.generation()
        """Of the process that sends it: a forked child has a copy, and nobody who would."""

    @property
    def size_bytes(self) -> int:
        """How much it has taken, about; 0 of one that was made as a whole."""
        return self.room_bytes - self.room

    @property
    def record_count(self) -> int:
        """How many records were added so far."""
        return len(self._triples) // 3 or len(self.values)

    def take(self) -> None:
        """Turn what was added into columns, once. The caller holds the producer's lock."""
        if self.taken:
            return
        triples = self._triples
        if triples:
            self._take(triples)
        # Last: after an interrupt all of it is done anew.
        self._triples, self.taken = [], True

    def _take(self, triples: list[Any]) -> None:
        numbers, self.values, keys = triples[::3], triples[1::3], triples[2::3]
        self.keys = keys if keys.count(None) < len(keys) else ()  # no column of nothing but nulls
        if self.noted or numbers != list(range(len(numbers))):  # in another order than they were numbered, or fewer
            positions = self._positions = {number: position for position, number in enumerate(numbers)}
            for number, (headers, timestamp, partition) in self.noted.copy().items():
                position = positions.get(number)
                if position is None:
                    continue
                if headers is not None:
                    self.headers[position] = headers
                if timestamp is not None:
                    self.timestamps[position] = timestamp
                if partition is not None:
                    self.partitions[position] = partition

    def has_taken(self, number: int) -> bool:
        """Whether the record was among those that were taken; only the caller who added it asks."""
        if self._positions is not None:
            return number in self._positions
        return number < len(self.values)

    def placed(self, partitions: npt.NDArray[np.int32], ranks: npt.NDArray[np.int64] | None) -> None:
        """Note for each record its partition and how many of the chunk come before it there (None: all of them)."""
        self._partitions, self._ranks = partitions, ranks

    @property
    def given_places(self) -> npt.NDArray[np.int32] | None:
        """The partition of each record if it was placed before; else None."""
        return self._partitions

    def timestamp_column(self) -> npt.NDArray[np.int64] | None:
        """The timestamps of all records; None when all are from when the chunk was begun."""
        if self.all_timestamps is not None or not self.timestamps:
            return self.all_timestamps
        column = np.full(len(self.values), self.begun_ms, np.int64)
        for row, timestamp in self.timestamps.items():
            column[row] = timestamp
        return column

    def header_column(self) -> Sequence[Headers] | None:
        """The headers of all records, or None when none has any."""
        if self.all_headers is not None or not self.headers:
            return self.all_headers
        none: Headers = ()
        return [self.headers.get(row, none) for row in range(len(self.values))]

    @property
    def is_appended(self) -> bool:
        """Whether every record has its offset."""
        if not self.taken or self._partitions is None:
            return self.taken and not self.values
        return self.base_offsets.keys() >= set(self._partitions.tolist())

    @property
    def first_missing(self) -> int:
        """The index of the first record without an offset; the number of records when all have theirs."""
        if self._partitions is None:
            return 0
        missing = np.flatnonzero(~np.isin(self._partitions, list(self.base_offsets.copy())))
        return int(missing[0]) if len(missing) else len(self.values)

    def not_appended(self, error: Exception) -> dict[int, Exception]:
        """The partitions that it should have been appended to and was not, each with the reason; it ended in ``error``.

        `EVERY_PARTITION` if it failed before its records had partitions. A record that is in the log and not yet on
        disk, or not yet shipped, counts as appended.
        """
        if self._partitions is None:
            return {EVERY_PARTITION: error}
        reasons = {
            partition: self.errors.get(partition, error)
            for partition in set(self._partitions.tolist())
            if partition not in self.base_offsets
        }
        return {partition: reason for partition, reason in reasons.items() if not _is_appended(reason)}

    def finish(self, error: Exception | None = None) -> None:
        self.error = error
        self.is_sent = True
        self._sends.tell_waiting()

    def wait(self, timeout_s: float | None) -> None:
        if not self.is_sent:
            if self.generation != fork_safety.generation():
                raise StoreClosed("record", "it was sent before fork(), so the parent process appends it; ask there")
            self._sends.send_if_nobody_else_does(self)
            if not self._sends.wait_for(self, timeout_s):
                raise TimeoutError(f"the batch was not sent within {timeout_s} s")

    def places(self) -> list[tuple[int, int, int]]:
        """(partition, offset of the first, how many) for each partition that records went to."""
        if self._partitions is None:  # there was nothing to place
            return []
        counts = np.bincount(self._partitions)
        return [(partition, base, int(counts[partition])) for partition, base in sorted(self.base_offsets.items())]

    def result(self, number: int) -> Appended:
        if self._partitions is None:  # it failed before any record had its place
            raise self._reported(self.error)
        index = number if self._positions is None else self._positions[number]
        partition = int(self._partitions[index])
        if partition not in self.base_offsets:
            raise self._reported(self.errors.get(partition) or self.error)
        offset = self.base_offsets[partition] + (index if self._ranks is None else int(self._ranks[index]))
        if self.all_timestamps is not None:
            timestamp = int(self.all_timestamps[index])
        else:
            timestamp = self.timestamps.get(index, self.begun_ms)
        return Appended(self.topic, partition, offset, timestamp)

    def _reported(self, error: Exception | None) -> Exception:
        """Return the error that a record failed with, for a call that raises it."""
        error = error or StoreClosed("producer")
        self._sends.note_reported(self.topic, error)
        return error


def _is_appended(error: Exception) -> bool:
    return isinstance(error, NotShipped) or (isinstance(error, LocalError) and error.appended)


class Delivery(msgspec.Struct, frozen=True, gc=False, eq=False):
    """What became of one record that was sent. Thread-safe."""

    _chunk: Chunk
    _number: int

    def done(self) -> bool:
        """Whether it was appended, or failed."""
        return self._chunk.is_sent

    def result(self, timeout_s: float | None = None) -> Appended:
        """(topic, partition, offset, timestamp) once it is appended; raises what kept it from being, TimeoutError."""
        self._chunk.wait(timeout_s)
        return self._chunk.result(self._number)

    def exception(self, timeout_s: float | None = None) -> Exception | None:
        """What kept it from being appended, or None; raises TimeoutError when neither is known by then."""
        try:
            self.result(timeout_s)
        except (SegmentlogError, OSError) as error:
            if is_interrupt(error):
                raise
            return error
        return None

    def durable(self, timeout_s: float | None = None) -> Appended:
        """The result, once the record is on disk; makes the fsync happen if nobody else does.

        Raises `LogTruncated` when the record was dropped since, by a recovery before it was on disk or by a truncation.
        """
        result = self.result(timeout_s)
        self._chunk.logs[result.partition].sync_upto(result.offset + 1, result.offset)
        return result


class Deliveries:
    """What became of the records of one `Producer.send_many`, in their order."""

    __slots__ = ("_chunk",)

    def __init__(self, chunk: Chunk) -> None:
        self._chunk = chunk

    @property
    def chunk(self) -> Chunk:
        """What they were sent in."""
        return self._chunk

    @property
    def first_missing(self) -> int:
        """How many records at the beginning of the list are appended: the index of the first that is not."""
        return self._chunk.first_missing

    def __len__(self) -> int:
        return len(self._chunk.values)

    def __getitem__(self, index: int) -> Delivery:
        return Delivery(self._chunk, range(len(self))[index])

    def places(self) -> list[tuple[int, int, int]]:
        """(partition, offset of the first, how many) for each partition that records went to."""
        return self._chunk.places()

    def result(self) -> list[Appended]:
        """Where each record went."""
        return [self._chunk.result(index) for index in range(len(self))]

    def durable(self) -> list[Appended]:
        """Where each record went, once all are on disk. Raises `LogTruncated` as `Delivery.durable` does."""
        for partition, base_offset, count in self.places():
            self._chunk.logs[partition].sync_upto(base_offset + count, base_offset)
        return self.result()
