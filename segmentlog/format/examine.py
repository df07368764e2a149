"""Looking at a segment that may be broken: every batch that is whole, every stretch of bytes that is not.

Unlike `walk` this continues after damage, and unlike a reader it decodes everything: a batch that
is whole and not unreadable can be read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import msgspec
import numpy as np

from segmentlog.errors import CorruptBatch, UnreadableBatch
from segmentlog.format.batch import LOG_APPEND_TIME, BatchHeader, check_payload, decode_header
from segmentlog.format.control import Marker, decode_marker
from segmentlog.format.decoded_batch import record_batch
from segmentlog.format.record_batch import RecordBatch
from segmentlog.format.scan import Around, certain_end, step_over
from segmentlog.format.wire import disagreement

_STEP = 1 << 20


class Whole(msgspec.Struct, frozen=True):
    """A batch whose checksums are right.

    ``unreadable`` says why its records do not decode, if they do not. ``flaw`` is what is wrong
    with it all the same, if anything: it can be read, but claims something that cannot be.
    ``wrong_time`` is what a Kafka client's header says wrongly of the times of its records.
    ``marker`` is what a control batch says; None for one of a kind that this version does not
    know, and for any other batch.
    """

    position: int
    header: BatchHeader
    batch: RecordBatch
    flaw: str = ""
    marker: Marker | None = None
    unreadable: UnreadableBatch | None = None
    wrong_time: str = ""

    @property
    def end_position(self) -> int:
        return self.position + self.header.size_bytes


class Broken(msgspec.Struct, frozen=True):
    """Bytes ``[position, end_position)`` that are no batch, or not one that belongs there.

    ``following_offset`` is the base offset of the batch behind them; None at the end of the
    segment, where who asked knows what should follow. ``blank`` says that all are zero.
    """

    position: int
    end_position: int
    expected_offset: int
    following_offset: int | None
    error: CorruptBatch
    blank: bool = False


def examine(
    view: memoryview, position: int, end_position: int, path: str, *, expected_offset: int, epoch: int = 0,
    around: Callable[[], Around] = Around,
) -> Iterator[Whole | Broken]:  # fmt: skip
    """Everything in ``[position, end_position)``, in order and without a gap.

    ``around`` is asked once there is damage.
    """
    window = view[:end_position]
    while position < end_position:
        try:
            header = decode_header(window, position, path)
            payload = check_payload(window, position, header, path)
            if header.base_offset < expected_offset:
                found = str(header.base_offset)
                raise CorruptBatch(path, position, f"a base offset of {expected_offset} or more", found)
            batch = record_batch(header, payload, path=path, position=position)
            flaw = disagreement(header, payload) if header.is_kafka else ""
        except CorruptBatch as error:
            broken = _extent(window, position, expected_offset, error, around())
            yield broken
            position = broken.end_position
            if broken.following_offset is not None:
                expected_offset = broken.following_offset
            if broken.following_offset is None and position < end_position:
                yield Broken(position, end_position, expected_offset, None, error, blank=True)
                return
            continue
        unreadable, wrong_time = None, ""
        try:
            wrong_time = _check_times(batch)
            if not header.is_kafka:
                flaw, wrong_time = flaw or wrong_time, ""
        except UnreadableBatch as error:
            unreadable = error
        if header.partition_epoch < epoch:
            flaw = flaw or f"epoch {header.partition_epoch} comes after epoch {epoch}"
        marker = None
        if header.is_control and unreadable is None:
            marker, wrong = _check_marker(header, payload)
            flaw = flaw or wrong
        yield Whole(position, header, batch, flaw, marker, unreadable, wrong_time)
        position += header.size_bytes
        expected_offset, epoch = header.next_offset, max(epoch, header.partition_epoch)


def _check_marker(header: BatchHeader, payload: memoryview) -> tuple[Marker | None, str]:
    """(what a control batch says, what is wrong with that). Its columns decode."""
    try:
        marker = decode_marker(header, payload)
    except ValueError as error:
        return None, str(error)
    if marker is None:
        return None, ""
    if header.producer_id < 0:
        return None, "the end of a transaction of no producer"
    if marker.first_offset > marker.offset:
        return None, f"the end of a transaction that begins at offset {marker.first_offset}, behind it"
    return marker, ""


def _extent(window: memoryview, position: int, expected_offset: int, error: CorruptBatch, around: Around) -> Broken:
    """How far the damage at ``position`` reaches."""
    found, following = step_over(window, position, expected_offset, around)
    if following is not None:
        return Broken(position, found, expected_offset, following, error)
    written = position + written_size(window[position:])
    if written == position:
        return Broken(position, len(window), expected_offset, None, error, blank=True)
    # A payload may end in zeros, as records of Kafka's without headers do.
    with contextlib.suppress(CorruptBatch):
        written = max(written, position + decode_header(window, position).size_bytes)
    certain = certain_end(window, position, expected_offset, around)
    written = max(written, min(certain or written, len(window)))
    return Broken(position, written, expected_offset, None, error)


def written_size(view: memoryview) -> int:
    """Bytes up to the last one that is not zero."""
    for start in range((len(view) - 1) // _STEP * _STEP, -1, -_STEP):
        nonzero = np.frombuffer(view[start : start + _STEP], np.uint8).nonzero()[0]
        if len(nonzero):
            return start + int(nonzero[-1]) + 1
    return 0


def _check_times(batch: RecordBatch) -> str:
    """Decode the batch; what its header says wrongly of its timestamps. Raises `UnreadableBatch`."""
    header = batch.header
    batch.check()
    timestamps = batch.timestamps
    if len(batch) and not header.attributes & LOG_APPEND_TIME:
        first, largest = int(timestamps[0]), int(timestamps.max())
        # Of Kafka's batches the base is no more than that, and the largest may be of a record that compaction took.
        if first != header.base_timestamp and header.delete_horizon_ms is None and not header.is_kafka:
            return f"the first timestamp is {first}, and the header says {header.base_timestamp}"
        if largest > header.max_timestamp or (largest < header.max_timestamp and not header.is_kafka):
            return f"the largest timestamp is {largest}, and the header says {header.max_timestamp}"
    return ""
