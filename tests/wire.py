"""Kafka's batches for tests: encoded and decoded by a foreign codec (aiokafka's), and forged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from aiokafka.record.default_records import DefaultRecordBatch, DefaultRecordBatchBuilder
from hypothesis import strategies as st

from segmentlog.format.wire import (
    CRC,
    CRC_FROM,
    CRC_POSITION,
    WIRE_HEADER,
    Buffer,
    WireHeader,
    check_wire_batch,
    crc32c_of,
    parse_wire_batch,
)
from segmentlog.format.wire_batch import EncodedWireBatch, encode_wire
from segmentlog.log.append.append_pipeline import Ack
from segmentlog.log.partition import Partition
from segmentlog.log.producer_state import ProducerStamp
from segmentlog.records import Headers

NOW_MS = 1_700_000_000_000
CODECS = {"none": 0, "gzip": 1, "snappy": 2, "lz4": 3, "zstd": 4}


class Sent(NamedTuple):
    """One record as a client sends it."""

    key: bytes | None
    value: bytes | None
    timestamp: int = NOW_MS
    headers: Headers = ()


def foreign(
    records: Sequence[Sent],
    codec: int = 0,
    *,
    producer: tuple[int, int, int] = (-1, -1, -1),
    transactional: bool = False,
) -> bytes:
    """Return a batch of these records as aiokafka encodes it, with id, epoch and first sequence of its ``producer``."""
    builder = DefaultRecordBatchBuilder(2, codec, transactional, *producer, 1 << 30)
    for index, one in enumerate(records):
        assert builder.append(index, one.timestamp, one.key, one.value, list(one.headers)) is not None
    return bytes(builder.build())


def read_foreign(data: bytes) -> list[tuple[int, Sent]]:
    """Return (offset, record) of each record of a batch, as aiokafka reads it; assert that its CRC is right."""
    batch = DefaultRecordBatch(data)
    assert batch.validate_crc()
    return [(one.offset, Sent(one.key, one.value, one.timestamp, tuple(one.headers))) for one in batch]


def forged(data: bytes, *, crc: bool = True, **fields: int) -> bytes:
    """Return the batch with other fields in its header, and a matching CRC."""
    header = WireHeader._make(WIRE_HEADER.unpack_from(data))._replace(**fields)
    made = bytearray(WIRE_HEADER.pack(*header) + data[WIRE_HEADER.size :])
    if crc:
        CRC.pack_into(made, CRC_POSITION, crc32c_of(made[CRC_FROM:]))
    return bytes(made)


def encoded(data: Buffer, limit_bytes: int | None = None) -> EncodedWireBatch:
    """Return the batch without checking its records. Raises `InvalidWireBatch` for an invalid header."""
    header = check_wire_batch(data, limit_bytes)
    return encode_wire(data, header, header.max_timestamp)


def append_unchecked(log: Partition, data: bytes) -> int:
    """Append like `Partition.append_wire`, but skip the check of the records, which earlier versions did not have."""
    header = parse_wire_batch(data)
    numbers = header.producer_id, header.producer_epoch, header.base_sequence
    stamp = ProducerStamp(*numbers, header.is_transactional) if header.producer_id >= 0 else None
    return log.append_batches([encoded(data)], producer=stamp)


def stored(data: bytes, base_offset: int = 0, epoch: int = 0, append_time_ms: int | None = None) -> bytes:
    """Return the batch as a log stores it."""
    batch = encoded(data)
    return bytes(batch.placed_at(base_offset, epoch, append_time_ms)) + bytes(batch.payload)


def sent(*, keyed: bool = False) -> st.SearchStrategy[list[Sent]]:
    """Return a strategy of the records of one batch, of every kind."""
    blobs = st.none() | st.binary(max_size=12) | st.integers(60, 140).map(bytes) | st.just(b"x" * 9000)
    keys = st.binary(max_size=20) if keyed else blobs
    times = st.integers(NOW_MS - 200, NOW_MS + 200) | st.integers(0, NOW_MS)
    headers = st.just(()) | st.lists(
        st.tuples(st.text(st.characters(codec="utf-8"), max_size=8), st.none() | st.binary(max_size=90)), max_size=3
    ).map(tuple)
    return st.lists(st.builds(Sent, keys, blobs, times, headers), min_size=1, max_size=80)


def append_sent(
    log: Partition,
    values: Sequence[bytes | None],
    keys: Sequence[bytes | None] | None = None,
    timestamps: Sequence[int] | None = None,
    headers: Sequence[Headers | None] | None = None,
    *,
    ack: Ack | None = None,
    codec: int = 0,
) -> int:
    """Append like `Partition.append`, but as a Kafka client: one batch, which the log stores as it comes."""
    now_ms = log.handle.clock.now_ms()
    records = [
        Sent(
            None if keys is None else keys[at],
            value,
            now_ms if timestamps is None else timestamps[at],
            tuple((headers[at] if headers is not None else None) or ()),
        )
        for at, value in enumerate(values)
    ]
    return log.append_wire(foreign(records, codec), ack=ack).base_offset


def append_either(
    log: Partition, values: Sequence[bytes | None], *columns: Any, ack: Ack | None = None, compressed: bool = True
) -> int:
    """Append through the library or as a Kafka client with one of the codecs; the end of the log decides."""
    choice = log.log_end_offset % 9
    if choice not in CODECS.values():
        return log.append(values, *columns, ack=ack)  # type: ignore[arg-type]
    return append_sent(log, values, *columns, ack=ack, codec=choice if compressed else 0)
