"""Records being sent, in chunks, and the deliveries that report where each record was appended."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from segmentlog.errors import ProcessLimitError, SegmentlogError, ShipUnconfirmed, StoreClosed
from segmentlog.records import Appended, Headers
from segmentlog.storage import fork_safety
from segmentlog.storage.interrupt_check import is_interrupt

if TYPE_CHECKING:
    from segmentlog.log.partition import Partition

Options = tuple[Headers | None, int | None, int | None]
"""Headers, timestamp and partition of one record; None for each that the caller has not given."""


class ChunkSender(Protocol):
    """The interface of the accumulator that chunks use."""

    def send_unless_lingering(self, chunk: ProducerChunk) -> None:
        """Send a chunk now because a caller waits for it, unless a thread will send it when it has lingered."""

    def wait_for(self, chunk: ProducerChunk, timeout_s: float | None) -> bool:
        """Wait until a chunk was sent or has failed. Return False if ``timeout_s`` is exceeded."""

    def notify_waiting(self) -> None:
        """Wake the callers that wait for a chunk."""

    def mark_reported(self, topic: str, error: Exception) -> None:
        """Record that a call raises this failure, so that no later `send` raises it again."""


EVERY_PARTITION: Final = -1
"""Key for records that failed before their partitions were chosen."""


class ProducerChunk:
    """Records of one topic in the order in which they were sent, and later their partitions and offsets.

    Each record gets a number and is added by one `list.extend`, without a lock. A chunk is first sealed. Later the
    sending thread takes its records: it converts them to columns. A thread may add a record to a sealed chunk.
    Therefore it checks afterwards whether the chunk is sealed. If so, it checks under the producer's lock whether its
    record was taken. If not, it adds the record to the next chunk.
    """

    __slots__ = (
        "_partitions",
        "_positions",
        "_ranks",
        "_sender",
        "_triples",
        "add",
        "all_headers",
        "all_partition",
        "all_timestamps",
        "base_offsets",
        "begun_ms",
        "begun_ns",
        "error",
        "errors",
        "generation",
        "headers",
        "is_sent",
        "is_whole",
        "keys",
        "logs",
        "needs_keys",
        "number",
        "options",
        "partitions",
        "producer",
        "room",
        "room_bytes",
        "sealed",
        "sticky",
        "surely_fits",
        "taken",
        "timestamps",
        "topic",
        "values",
        "withheld",
    )  # fmt: skip

    def __init__(self, sender: ChunkSender, producer: object, topic: str, room: int, begun_ms: int) -> None:
        self._sender = sender
        self.producer = producer
        """The producer of the records. This reference keeps the producer alive while a delivery of the chunk exists."""
        self.topic = topic
        self.begun_ms = begun_ms
        """Timestamp for records without one, milliseconds since 1970."""
        self.begun_ns = time.monotonic_ns()
        self.room = self.room_bytes = room
        """Remaining bytes before the chunk is sent; approximate when several threads add records."""
        self.needs_keys = False
        self.surely_fits = 0
        """A record without headers fits into a batch if its value and its key each have at most this many bytes."""
        self.sealed = self.taken = False
        self.number = itertools.count().__next__
        self._triples: list[Any] = []
        self.add = self._triples.extend
        """Add the number, value and key of a record."""
        self.values: Sequence[bytes | None] = ()
        self.keys: Sequence[bytes | None] = ()
        self.options: dict[int, Options] = {}
        """By number of the record: its headers, timestamp and partition, if the caller has given any."""
        self.headers: dict[int, Headers] = {}
        self.timestamps: dict[int, int] = {}
        self.partitions: dict[int, int] = {}
        """``headers``, ``timestamps`` and ``partitions`` by index of the record, once the records are taken."""
        self.all_headers: Sequence[Headers] | None = None
        self.all_timestamps: npt.NDArray[np.int64] | None = None
        self.all_partition: int | None = None
        self.error: Exception | None = None
        self.errors: dict[int, Exception] = {}
        """By partition: the error of its append. ``error`` is the first of them."""
        self.withheld: dict[int, Exception] = {}
        """By partition: the error of an earlier chunk, because of which records of this chunk are not appended.

        The key is `EVERY_PARTITION` if the earlier chunk failed before its partitions were chosen.
        """
        self.sticky = -1
        """Partition of records without a key; -1 until it is chosen. After a failed chunk, that chunk's partition."""
        self.logs: dict[int, Partition] = {}
        self.base_offsets: dict[int, int] = {}
        self._positions: dict[int, int] | None = None
        self._partitions: npt.NDArray[np.int32] | None = None
        self._ranks: npt.NDArray[np.int64] | None = None
        self.is_sent = False
        self.is_whole = False
        """Whether it is the chunk of a `send_many`, whose caller waits for it."""
        self.generation = fork_safety.generation()
        """Fork generation of the process that sends the chunk. A forked child does not send its copy of the chunk."""

    @property
    def size_bytes(self) -> int:
        """Approximate bytes of the records; 0 for a chunk of `send_many`."""
        return self.room_bytes - self.room

    @property
    def record_count(self) -> int:
        """Number of records added so far."""
        return len(self._triples) // 3 or len(self.values)

    def take(self) -> None:
        """Convert the added records to columns, once. The caller holds the producer's lock."""
        if self.taken:
            return
        triples = self._triples
        if triples:
            self._take(triples)
        # Last, so that the next call repeats everything after an interrupt.
        self._triples, self.taken = [], True

    def _take(self, triples: list[Any]) -> None:
        numbers, self.values, keys = triples[::3], triples[1::3], triples[2::3]
        self.keys = keys if keys.count(None) < len(keys) else ()  # no column if all keys are null
        # Otherwise several threads have added records in another order than they numbered them, or a number is missing.
        if self.options or numbers != list(range(len(numbers))):
            positions = self._positions = {number: position for position, number in enumerate(numbers)}
            for number, (headers, timestamp, partition) in self.options.copy().items():
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
        """Return whether the record with this number was taken. Only the thread that added it may call this."""
        if self._positions is not None:
            return number in self._positions
        return number < len(self.values)

    def set_partitions(self, partitions: npt.NDArray[np.int32], ranks: npt.NDArray[np.int64] | None) -> None:
        """Set the partition of each record, and its rank: how many earlier records of this chunk have that partition.

        ``ranks`` is None if all records have the same partition. Then the rank is the index of the record.
        """
        self._partitions, self._ranks = partitions, ranks

    @property
    def assigned_partitions(self) -> npt.NDArray[np.int32] | None:
        """The partition of each record once they are chosen; None before."""
        return self._partitions

    def timestamp_column(self) -> npt.NDArray[np.int64] | None:
        """Return the timestamps of all records; None if all have the timestamp of the chunk."""
        if self.all_timestamps is not None or not self.timestamps:
            return self.all_timestamps
        column = np.full(len(self.values), self.begun_ms, np.int64)
        for row, timestamp in self.timestamps.items():
            column[row] = timestamp
        return column

    def header_column(self) -> Sequence[Headers] | None:
        """Return the headers of all records; None if no record has any."""
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
        """Index of the first record that was not appended; the number of records if all were."""
        if self._partitions is None:
            return 0
        missing = np.flatnonzero(~np.isin(self._partitions, list(self.base_offsets.copy())))
        return int(missing[0]) if len(missing) else len(self.values)

    def missing_partitions(self, error: Exception) -> dict[int, Exception]:
        """Return the partitions to which records of this chunk were not appended, with the reasons.

        ``error`` is the error of the chunk. The key is `EVERY_PARTITION` if the chunk failed before its partitions were
        chosen. A record in the log counts as appended, even if it is not on disk or not shipped yet.
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
        self._sender.notify_waiting()

    def wait(self, timeout_s: float | None) -> None:
        if not self.is_sent:
            if self.generation != fork_safety.generation():
                raise StoreClosed(
                    "record", "it was sent before fork(), so the parent process appends it; wait for it there"
                )
            self._sender.send_unless_lingering(self)
            if not self._sender.wait_for(self, timeout_s):
                raise TimeoutError(f"the record was not appended within {timeout_s} s; it may still be appended later")

    def places(self) -> list[tuple[int, int, int]]:
        """Return (partition, first offset, count) for each partition to which records were appended."""
        if self._partitions is None:  # an empty chunk
            return []
        counts = np.bincount(self._partitions)
        return [(partition, base, int(counts[partition])) for partition, base in sorted(self.base_offsets.items())]

    def result(self, number: int) -> Appended:
        if self._partitions is None:  # it failed before partitions were chosen
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
        """Return the error to raise for a record, and prevent `send` from raising it again."""
        error = error or StoreClosed("producer")
        self._sender.mark_reported(self.topic, error)
        return error


def _is_appended(error: Exception) -> bool:
    return isinstance(error, ShipUnconfirmed) or (isinstance(error, ProcessLimitError) and error.appended)


class Delivery(msgspec.Struct, frozen=True, gc=False, eq=False):
    """The outcome of one record that was sent. Thread-safe."""

    _chunk: ProducerChunk
    _number: int

    def done(self) -> bool:
        """Return whether the record was appended or has failed."""
        return self._chunk.is_sent

    def result(self, timeout_s: float | None = None) -> Appended:
        """Wait, and return (topic, partition, offset, timestamp). Raises the error of the record, or TimeoutError."""
        self._chunk.wait(timeout_s)
        return self._chunk.result(self._number)

    def exception(self, timeout_s: float | None = None) -> Exception | None:
        """Wait, and return the error of the record, or None if it was appended. Raises TimeoutError."""
        try:
            self.result(timeout_s)
        except (SegmentlogError, OSError) as error:
            if is_interrupt(error):
                raise
            return error
        return None

    def durable(self, timeout_s: float | None = None) -> Appended:
        """Return the result once the record is on disk. Runs an fsync unless one that covers the record is pending.

        Raises `LogTruncated` if the record was lost in a crash before it was on disk, or truncated.
        """
        result = self.result(timeout_s)
        self._chunk.logs[result.partition].sync_upto(result.offset + 1, result.offset)
        return result


class Deliveries:
    """The outcomes of the records of one `Producer.send_many`, in their order."""

    __slots__ = ("_chunk",)

    def __init__(self, chunk: ProducerChunk) -> None:
        self._chunk = chunk

    @property
    def chunk(self) -> ProducerChunk:
        """The chunk that has the records."""
        return self._chunk

    @property
    def first_missing(self) -> int:
        """Index of the first record that was not appended; the number of records if all were."""
        return self._chunk.first_missing

    def __len__(self) -> int:
        return len(self._chunk.values)

    def __getitem__(self, index: int) -> Delivery:
        return Delivery(self._chunk, range(len(self))[index])

    def places(self) -> list[tuple[int, int, int]]:
        """Return (partition, first offset, count) for each partition to which records were appended."""
        return self._chunk.places()

    def result(self) -> list[Appended]:
        """Return topic, partition, offset and timestamp of each record."""
        return [self._chunk.result(index) for index in range(len(self))]

    def durable(self) -> list[Appended]:
        """Return the result once all records are on disk. Raises `LogTruncated` as `Delivery.durable` does."""
        for partition, base_offset, count in self.places():
            self._chunk.logs[partition].sync_upto(base_offset + count, base_offset)
        return self.result()
