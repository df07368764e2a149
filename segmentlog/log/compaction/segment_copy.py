"""Write the compacted copy of segments: the remaining records, in batches without gaps between them.

A batch whose records all stay is copied unchanged. A batch in Kafka's format keeps that format. The remaining records
of other batches are decoded and joined to batches of about 64 KiB. Otherwise a thousand batches with a few remaining
records each would stay a thousand batches.

Each batch extends to the start of the next, so that every offset of the copy is in exactly one batch. A batch without
records fills a gap in two places only: before the first batch, and after a producer's batch, whose end must not change.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import msgspec
import numpy as np
from msgspec.structs import replace

from segmentlog.errors import DiskFull, RecordTooLarge
from segmentlog.format.batch import (
    CODEC_MASK,
    CONTROL,
    DELETE_HORIZON,
    HEADER_SIZE,
    KAFKA_LAYOUT,
    LOG_APPEND_TIME,
    TRANSACTIONAL,
    BatchHeader,
)
from segmentlog.format.batch_codecs import Compression
from segmentlog.format.columns import Int64Array, MalformedColumn, array_of, decode_blobs
from segmentlog.format.encode import EncodedBatch, join_batch
from segmentlog.format.header_edit import emptied_batch, extended_header, gap_batch
from segmentlog.format.record_batch import RecordBatch
from segmentlog.format.splice import (
    Flags,
    Table,
    as_table,
    cut_rows,
    encode_items,
    join_items,
    null_items,
    select_items,
)
from segmentlog.format.wire_batch import filter_wire_batch, stored_wire_batch
from segmentlog.format.wire_record_batch import WireRecordBatch
from segmentlog.log.compaction.survivors import UNDECIDED
from segmentlog.records import Headers
from segmentlog.storage.file_operations import write_all
from segmentlog.storage.fs import NO_ROOM, Buffer, FileSystem
from segmentlog.storage.interrupt_safe import interrupt_safe_context, store_result
from segmentlog.storage.segment_index import SegmentIndex

_TARGET_BYTES = 64 << 10
_WHOLE_BYTES = 16 << 10
"""A batch of at least this size, uncompressed, is copied unchanged if all its records stay."""
_WRITE_BYTES = 1 << 20


class _PendingRecords(msgspec.Struct):
    """Records that wait to become a batch: parts of columns, and the attributes that all records share."""

    attributes: int
    epoch: int
    horizon_ms: int | None
    keys: list[bytes] = []
    values: list[bytes] = []
    headers: list[Headers] = []
    timestamps: list[Int64Array] = []
    offsets: list[Int64Array] = []
    count: int = 0
    has_keys: bool = False
    has_headers: bool = False
    size_bytes: int = 0


class SegmentCopy:
    """The copy of some segments, written batch by batch. Without a ``path`` it is only measured.

    Raises `DiskFull` and OSError; the caller then deletes the file.
    """

    def __init__(
        self,
        fs: FileSystem,
        path: str | None,
        base_offset: int,
        index: SegmentIndex,
        batch_limit: int,
        compression: Compression,
    ) -> None:
        self.path = path
        self.index = index
        self.size_bytes = 0
        self.record_count = 0
        self._fs = fs
        self._fd = -1
        self._batch_limit = batch_limit
        self._compression = compression
        self._next_offset = base_offset
        self._epoch = 0
        self._held: tuple[BatchHeader, Buffer] | EncodedBatch | None = None
        self._held_base = base_offset
        self._pending: _PendingRecords | None = None
        self._buffers: list[Buffer] = []
        self._buffered_bytes = 0
        self._written_bytes = 0

    @interrupt_safe_context
    def opened(self, folder_locked: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
        """Keep the file open for the duration of the context. ``folder_locked`` is needed only to open it by name."""
        try:
            if self.path is not None:
                flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
                with folder_locked():
                    store_result(self, "_fd", self._fs.open, self.path, flags, 0o666)
            yield
        finally:
            fd, self._fd = self._fd, -1
            if fd >= 0:
                self._fs.close(fd)

    # ------------------------------------------------------------ input

    def add(
        self, batch: RecordBatch, payload: memoryview, kept: Flags | None, horizon_ms: int | None, *, whole: bool
    ) -> None:
        """Add the records of ``batch`` for which ``kept`` is true (None: all).

        ``horizon_ms`` is the delete horizon of the tombstones among them, `UNDECIDED`, or None if there are none.
        ``whole``: copy the batch unchanged, without decoding it, if all its records stay.
        """
        header = batch.header
        count = header.record_count if kept is None else int(np.count_nonzero(kept))
        if not count:
            return
        self.record_count += 0 if header.is_control else count
        unchanged = count == header.record_count and horizon_ms in (None, UNDECIDED, header.delete_horizon_ms)
        if isinstance(batch, WireRecordBatch) and self._add_wire(batch, payload, kept, unchanged, horizon_ms):
            return
        if header.attributes & CONTROL or (
            unchanged and (whole or header.raw_size >= _WHOLE_BYTES or header.producer_id >= 0)
        ):
            self._flush_pending()
            self._hold(header.base_offset, header.partition_epoch, (header, payload))
            return
        self._gather(batch, None if count == header.record_count else kept, count, horizon_ms)
        if header.producer_id >= 0:
            self._flush_pending(header)

    def _add_wire(
        self, batch: WireRecordBatch, payload: memoryview, kept: Flags | None, unchanged: bool, horizon_ms: int | None
    ) -> bool:
        """Add a batch in Kafka's format, which it keeps, with the record bytes unchanged.

        Return False if the remaining records, compressed again, exceed the batch limit: the client's compressor may be
        better than ours. The caller then stores the records as columns.
        """
        header = batch.header
        if unchanged:
            made = stored_wire_batch(header, payload)
        else:
            horizon_ms = None if horizon_ms == UNDECIDED else horizon_ms
            made = filter_wire_batch(header, batch.wire_records, kept, header.last_offset_delta, horizon_ms)
            if made.size_bytes - HEADER_SIZE > self._batch_limit:
                if header.producer_id < 0:
                    return False
                # A producer's batch is not split: all its records stay until compaction removes its producer's numbers.
                made = stored_wire_batch(header, payload)
        self._flush_pending()
        self._hold(header.base_offset, header.partition_epoch, made)
        return True

    def add_empty(self, header: BatchHeader) -> None:
        """Add a batch without records that keeps a producer's id, epoch and sequence."""
        self._flush_pending()
        self._hold(header.base_offset, header.partition_epoch, emptied_batch(header))

    def _gather(self, batch: RecordBatch, kept: Flags | None, count: int, horizon_ms: int | None) -> None:
        header = batch.header
        attributes = header.attributes & ~(CODEC_MASK | DELETE_HORIZON | KAFKA_LAYOUT)
        pending = self._pending
        size = header.raw_size * count // header.record_count
        if pending is not None and (
            pending.attributes != attributes
            or pending.epoch != header.partition_epoch
            or (horizon_ms is not None and pending.horizon_ms not in (None, horizon_ms))
            or pending.size_bytes + size > _TARGET_BYTES
            or header.producer_id >= 0
            or (attributes & LOG_APPEND_TIME and pending.timestamps[0][0] != header.max_timestamp)
        ):
            self._flush_pending()
            pending = None
        if pending is None:
            pending = self._pending = _PendingRecords(attributes, header.partition_epoch, horizon_ms)
        if horizon_ms is not None:
            pending.horizon_ms = horizon_ms
        table = _table_of(batch.values_column, header.record_count)
        pending.values.append(
            encode_items(select_items(batch.values, kept)) if table is None else cut_rows(table, kept)
        )
        pending.keys.append(_cut_keys(batch, kept, count))
        pending.has_keys |= batch.has_keys
        pending.headers += select_items(batch.headers, kept) if batch.has_headers else [()] * count
        pending.has_headers |= batch.has_headers
        pending.timestamps.append(batch.timestamps if kept is None else batch.timestamps[kept])
        pending.offsets.append(batch.offsets if kept is None else batch.offsets[kept])
        pending.count += count
        pending.size_bytes += size

    # ------------------------------------------------------------ output

    def _flush_pending(self, producer: BatchHeader | None = None) -> None:
        """Write the pending records as a batch.

        With ``producer``, give the batch the offset range, producer id, epoch and sequence of that header.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        count = pending.count
        keys, values = join_items(pending.keys, count), join_items(pending.values, count)
        offsets, timestamps = np.concatenate(pending.offsets), np.concatenate(pending.timestamps)
        try:
            self._join(pending, keys, values, pending.headers, offsets, timestamps, producer)
        except RecordTooLarge:  # explicit offsets and delete horizons have enlarged the batch
            if producer is not None:  # a producer's batch must not be split
                raise
            decoded = decode_blobs(memoryview(keys), count), decode_blobs(memoryview(values), count)
            self._join_part(pending, decoded, offsets, timestamps, slice(0, count))

    def _join_part(
        self,
        pending: _PendingRecords,
        decoded: tuple[list[bytes | None], list[bytes | None]],
        offsets: Int64Array,
        timestamps: Int64Array,
        part: slice,
    ) -> None:
        """Write the records of ``part`` as batches, halving the part until each batch is below the limit.

        A single record that exceeds the limit only with its delete horizon is written without the horizon.
        """
        keys, values = (array_of(items[part]) for items in decoded)
        headers, count = pending.headers[part], part.stop - part.start
        try:
            self._join(pending, keys, values, headers, offsets[part], timestamps[part], None)
        except RecordTooLarge:
            if count == 1:
                plain = replace(pending, horizon_ms=None)
                self._join(plain, keys, values, headers, offsets[part], timestamps[part], None)
                return
            middle = part.start + count // 2
            for half in (slice(part.start, middle), slice(middle, part.stop)):
                self._join_part(pending, decoded, offsets, timestamps, half)

    def _join(
        self,
        pending: _PendingRecords,
        keys: bytes,
        values: bytes,
        headers: list[Headers],
        offsets: Int64Array,
        timestamps: Int64Array,
        producer: BatchHeader | None,
    ) -> None:
        base = int(offsets[0]) if producer is None else producer.base_offset
        whole = int(offsets[-1]) - base == len(offsets) - 1
        batch = join_batch(
            keys if pending.has_keys else b"",
            values,
            array_of(headers) if pending.has_headers else b"",
            timestamps,
            None if whole else (offsets - base).astype(np.uint32),
            count=len(offsets),
            compression=self._compression,
            limit_bytes=self._batch_limit,
            attributes=pending.attributes,
            producer_id=-1 if producer is None else producer.producer_id,
            producer_epoch=-1 if producer is None else producer.producer_epoch,
            base_sequence=-1 if producer is None else producer.base_sequence,
            delete_horizon_ms=None if pending.horizon_ms == UNDECIDED else pending.horizon_ms,
        )
        if producer is not None:
            batch.extend_to(producer.last_offset_delta)
        self._hold(base, pending.epoch, batch)

    def _hold(self, base: int, epoch: int, batch: tuple[BatchHeader, Buffer] | EncodedBatch) -> None:
        """Write the held batch, extended to the start of ``batch``, and hold ``batch``."""
        self._write_held(base)
        if self._next_offset < base:
            self._fill(base, epoch)
        self._held, self._held_base, self._epoch = batch, base, epoch

    def _write_held(self, upto: int) -> None:
        """Write the held batch, which may extend up to ``upto``."""
        held, self._held = self._held, None
        base = self._held_base
        if held is None:
            return
        if isinstance(held, EncodedBatch):
            if self._may_extend(held.producer_id, held.attributes):
                held.extend_to(upto - base - 1)
            head: Buffer = bytes(held.placed_at(base, self._epoch))
            self._write(base, base + held.last_offset_delta + 1, held.max_timestamp, head, held.payload)
            return
        header, payload = held
        last = upto - base - 1 if self._may_extend(header.producer_id, header.attributes) else header.last_offset_delta
        self._write(base, base + last + 1, header.max_timestamp, extended_header(header, last), payload)

    @staticmethod
    def _may_extend(producer_id: int, attributes: int) -> bool:
        """Return whether the batch may be extended: neither a producer's sequence nor a transaction depends on its
        end.
        """
        return producer_id < 0 and not attributes & (CONTROL | TRANSACTIONAL)

    def _fill(self, upto: int, epoch: int) -> None:
        gap = gap_batch(self._next_offset, upto, epoch)
        self._write(self._next_offset, upto, 0, gap, b"")

    def _write(self, base: int, following: int, max_timestamp: int, head: Buffer, payload: Buffer) -> None:
        size = len(head) + len(payload)
        self.index.observe(self.size_bytes, base, following, max_timestamp, size)
        self.size_bytes += size
        self._next_offset = following
        if self._fd >= 0:
            self._buffers += (head, payload) if len(payload) else (head,)
            self._buffered_bytes += size
            if self._buffered_bytes >= _WRITE_BYTES:
                self._flush_buffers()

    def _flush_buffers(self) -> None:
        if not self._buffers:
            return
        assert self.path is not None
        try:
            write_all(self._fs, self._fd, self._buffers, self._written_bytes)
        except OSError as error:
            if error.errno in NO_ROOM:
                raise DiskFull(self.path, self._buffered_bytes) from error
            raise
        self._written_bytes += self._buffered_bytes
        self._buffers.clear()
        self._buffered_bytes = 0

    # ------------------------------------------------------------ end

    def finish(self, end_offset: int, epoch: int, modified_ns: int) -> None:
        """End the copy at ``end_offset`` and make its content durable. Its name is not durable yet."""
        self._flush_pending()
        self._write_held(end_offset)
        if self._next_offset < end_offset:
            self._fill(end_offset, max(epoch, self._epoch))
        if self._fd >= 0:
            self._flush_buffers()
            self._fs.set_modified(self._fd, modified_ns)
            try:
                self._fs.fsync(self._fd)
            except OSError as error:
                if error.errno in NO_ROOM:
                    raise DiskFull(self.path or "", self.size_bytes) from error
                raise


def _table_of(column: memoryview, count: int) -> Table | None:
    """Return the items as rows if they can be converted. Do not raise for a malformed column: the batch raises an error
    later, with its own offsets.
    """
    with contextlib.suppress(MalformedColumn):
        return as_table(column, count)
    return None


def _cut_keys(batch: RecordBatch, kept: Flags | None, count: int) -> bytes:
    header = batch.header
    if not batch.has_keys:
        return null_items(count)
    table = _table_of(batch.keys_column, header.record_count)
    return encode_items(select_items(batch.keys, kept)) if table is None else cut_rows(table, kept)
