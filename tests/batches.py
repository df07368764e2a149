"""Batches for tests: as bytes, as Hypothesis strategies, read back whole, and forged."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import xxhash
from hypothesis import strategies as st

from segmentlog.format.batch import (
    CHECKED_SIZE,
    HEADER_SIZE,
    KAFKA_LAYOUT,
    PLACE_SIZE,
    check_payload,
    decode_header,
)
from segmentlog.format.batch_codecs import CODEC_NONE, CODECS, compression_of
from segmentlog.format.columns import Int64Array
from segmentlog.format.decoded_batch import record_batch
from segmentlog.format.encode import encode_batch as encode
from segmentlog.format.record_batch import RecordBatch
from segmentlog.records import Headers, Record

NOW_MS = 1_700_000_000_000

HEADER_FIELDS = {
    "magic": "4s", "attributes": "H", "producer_epoch": "h", "base_offset": "q", "partition_epoch": "I",
    "last_offset_delta": "I", "base_timestamp": "q", "max_timestamp": "q", "producer_id": "q", "base_sequence": "i",
    "record_count": "I", "payload_size": "I", "raw_size": "I", "timestamps_size": "I", "keys_size": "I",
    "values_size": "I", "headers_size": "I", "payload_checksum": "Q", "header_checksum": "Q",
}  # fmt: skip
"""The header once more, so that a slip in one of the two is noticed."""
_HEADER = struct.Struct("<" + "".join(HEADER_FIELDS.values()))


class Columns(NamedTuple):
    """The arguments that a batch is made from."""

    values: list[bytes | None]
    keys: list[bytes | None] | None = None
    timestamps: list[int] | None = None
    headers: list[Headers] | None = None
    offset_deltas: list[int] | None = None

    def __len__(self) -> int:
        return len(self.values)


def batch_bytes(
    values: Sequence[bytes | None] | Columns,
    base_offset: int = 0,
    *,
    epoch: int = 0,
    codec: int = CODEC_NONE,
    append_time_ms: int | None = None,
    timestamps: Sequence[int] | None = None,
    **fields: Any,
) -> bytes:
    """Return a batch as a log stores it."""
    columns = values if isinstance(values, Columns) else Columns(list(values))
    times = columns.timestamps if timestamps is None else timestamps
    deltas = columns.offset_deltas
    batch = encode(
        columns.values,
        columns.keys,
        None if times is None else np.array(times, np.int64),
        columns.headers,
        now_ms=fields.pop("now_ms", NOW_MS),
        compression=compression_of(codec),
        offset_deltas=None if deltas is None else np.array(deltas, np.uint32),
        **fields,
    )
    return bytes(batch.placed_at(base_offset, epoch, append_time_ms)) + bytes(batch.payload)


def read_batch(data: bytes | memoryview, position: int = 0) -> RecordBatch:
    """Return the batch at ``position`` after all checks of a reader."""
    view = memoryview(data)
    header = decode_header(view, position)
    return record_batch(header, check_payload(view, position, header), position=position)


def read_everything(data: bytes | memoryview, position: int = 0) -> list[Record]:
    """Decode every column and every record of a batch."""
    batch = read_batch(data, position)
    count = batch.header.record_count
    columns: list[list[Any] | Int64Array] = [batch.values, batch.keys, batch.headers, batch.offsets, batch.timestamps]
    assert [len(column) for column in columns] == [count] * 5
    return list(batch.records())


def expected_records(columns: Columns, base_offset: int, now_ms: int = NOW_MS, epoch: int = 0) -> list[Record]:
    """Return the records that a batch of these columns must decode to."""
    count = len(columns)
    keys = columns.keys or [None] * count
    headers: Sequence[Headers] = columns.headers or [()] * count
    times = columns.timestamps or [now_ms] * count
    deltas = range(count) if columns.offset_deltas is None else columns.offset_deltas
    return [
        Record("", 0, base_offset + delta, time, key, value, one, epoch)
        for delta, time, key, value, one in zip(deltas, times, keys, columns.values, headers, strict=True)
    ]


# ---------------------------------------------------------------- forging


def unpack_header(data: bytes) -> dict[str, Any]:
    """Return the fields of a batch's header, read without the library."""
    return dict(zip(HEADER_FIELDS, _HEADER.unpack_from(data), strict=True))


def forge(data: bytes, *, payload: bytes | None = None, **fields: Any) -> bytes:
    """Return the batch with other header fields, or another payload, and with checksums (and a position) that match
    them.
    """
    stored = data[HEADER_SIZE:] if payload is None else payload
    header = unpack_header(data) | fields
    hashed = stored
    if header["attributes"] & KAFKA_LAYOUT and len(stored) >= PLACE_SIZE:
        hashed = stored[PLACE_SIZE:]
        length, epoch = (header["payload_size"] - 12) & 0xFFFFFFFF, header["partition_epoch"] & 0x7FFFFFFF
        stored = struct.pack(">qII", header["base_offset"], length, epoch) + hashed
    header = header | {"payload_checksum": xxhash.xxh3_64_intdigest(hashed)} | fields
    checked = _HEADER.pack(*header.values())[:CHECKED_SIZE]
    return checked + struct.pack("<Q", xxhash.xxh3_64_intdigest(checked)) + stored


# ---------------------------------------------------------------- strategies

blobs = st.none() | st.binary(max_size=40)
timestamps = st.integers(0, 2**63 - 1) | st.integers(NOW_MS - 10_000, NOW_MS + 10_000)
record_headers = st.lists(st.tuples(st.text(max_size=8), blobs), max_size=3).map(tuple)
offsets = st.integers(0, 2**63 - 2**33)
codecs = st.sampled_from([codec.number for codec in CODECS])


@st.composite
def columns(draw: st.DrawFn, max_size: int = 20) -> Columns:
    """Return a strategy of columns, with or without each optional one."""
    count = draw(st.integers(1, max_size))

    def column(items: st.SearchStrategy[Any]) -> Any:
        return draw(st.none() | st.lists(items, min_size=count, max_size=count))

    deltas = draw(
        st.none() | st.lists(st.integers(0, 2**32 - 2), min_size=count, max_size=count, unique=True).map(sorted)
    )
    return Columns(
        draw(st.lists(blobs, min_size=count, max_size=count)),
        column(blobs),
        column(timestamps),
        column(record_headers),
        deltas,
    )
