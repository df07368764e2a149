"""Verify a segment that may be damaged: report each intact batch and each damaged range of bytes.

Unlike `scan_batches`, `examine` continues after damage. Unlike a reader, it decodes the records of every intact
batch: ``IntactBatch.unreadable`` contains the error if they do not decode.
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
from segmentlog.format.scan import SegmentContext, certain_end, skip_damage
from segmentlog.format.wire import disagreement

_STEP = 1 << 20


class IntactBatch(msgspec.Struct, frozen=True):
    """A batch whose checksums are right.

    unreadable   the error of decoding its records, or None
    flaw         an impossible claim of a batch that can be read, or ""
    wrong_time   a wrong claim of a Kafka client's header about the timestamps of its records, or ""
    marker       the marker of a control batch; None for an unknown kind, and for any other batch
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


class DamagedRange(msgspec.Struct, frozen=True):
    """Bytes ``[position, end_position)`` that are not a batch, or are a batch whose offset or epoch does not fit there.

    ``following_offset`` is the base offset of the batch after these bytes; None at the end of the segment: the caller
    knows the next segment. ``blank`` is true if all bytes are zero.
    """

    position: int
    end_position: int
    expected_offset: int
    following_offset: int | None
    error: CorruptBatch
    blank: bool = False


def examine_segment(
    view: memoryview, position: int, end_position: int, path: str, *, expected_offset: int, epoch: int = 0,
    context: Callable[[], SegmentContext] = SegmentContext,
) -> Iterator[IntactBatch | DamagedRange]:  # fmt: skip
    """Yield intact batches and damaged ranges that together cover ``[position, end_position)``, in order.

    ``context`` is called only if there is damage.
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
            broken = _extent(window, position, expected_offset, error, context())
            yield broken
            position = broken.end_position
            if broken.following_offset is not None:
                expected_offset = broken.following_offset
            if broken.following_offset is None and position < end_position:
                yield DamagedRange(position, end_position, expected_offset, None, error, blank=True)
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
        yield IntactBatch(position, header, batch, flaw, marker, unreadable, wrong_time)
        position += header.size_bytes
        expected_offset, epoch = header.next_offset, max(epoch, header.partition_epoch)


def _check_marker(header: BatchHeader, payload: memoryview) -> tuple[Marker | None, str]:
    """Return (the marker or None, its flaw or "") of a control batch whose columns decode."""
    try:
        marker = decode_marker(header, payload)
    except ValueError as error:
        return None, str(error)
    if marker is None:
        return None, ""
    if header.producer_id < 0:
        return None, "a transaction marker without a producer id"
    if marker.first_offset > marker.offset:
        return None, f"a transaction marker whose transaction begins after it, at offset {marker.first_offset}"
    return marker, ""


def _extent(
    window: memoryview, position: int, expected_offset: int, error: CorruptBatch, context: SegmentContext
) -> DamagedRange:
    """Return the damaged range that begins at ``position``."""
    found, following = skip_damage(window, position, expected_offset, context)
    if following is not None:
        return DamagedRange(position, found, expected_offset, following, error)
    written = position + written_size(window[position:])
    if written == position:
        return DamagedRange(position, len(window), expected_offset, None, error, blank=True)
    # A payload may end in zeros: Kafka records without headers do.
    with contextlib.suppress(CorruptBatch):
        written = max(written, position + decode_header(window, position).size_bytes)
    certain = certain_end(window, position, expected_offset, context)
    written = max(written, min(certain or written, len(window)))
    return DamagedRange(position, written, expected_offset, None, error)


def written_size(view: memoryview) -> int:
    """Return the number of bytes up to and including the last byte that is not zero."""
    for start in range((len(view) - 1) // _STEP * _STEP, -1, -_STEP):
        nonzero = np.frombuffer(view[start : start + _STEP], np.uint8).nonzero()[0]
        if len(nonzero):
            return start + int(nonzero[-1]) + 1
    return 0


def _check_times(batch: RecordBatch) -> str:
    """Decode the batch and return a wrong claim of its header about timestamps, or "". Raise `UnreadableBatch`."""
    header = batch.header
    batch.check()
    timestamps = batch.timestamps
    if len(batch) and not header.attributes & LOG_APPEND_TIME:
        first, largest = int(timestamps[0]), int(timestamps.max())
        # The base timestamp of a Kafka batch need not be its first timestamp. Its largest timestamp may be that of a
        # record which compaction removed.
        if first != header.base_timestamp and header.delete_horizon_ms is None and not header.is_kafka:
            return f"the first timestamp is {first}, but the header claims {header.base_timestamp}"
        if largest > header.max_timestamp or (largest < header.max_timestamp and not header.is_kafka):
            return f"the largest timestamp is {largest}, but the header claims {header.max_timestamp}"
    return ""
