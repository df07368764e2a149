"""Kafka's batches byte by byte, as no encoder makes them, and the server's answers to them.

`REFUSED` and `ACCEPTED` list them. A batch is a function of the time in milliseconds, so that its timestamps are those
of a client with a right clock.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable
from functools import cache
from typing import Final, NamedTuple

import cramjam
import lz4.frame

from segmentlog.format.wire import pack_wire_batch
from segmentlog.format.wire_records import varint
from segmentlog.server.codec.kafka_errors import ErrorCode

HOUR_MS: Final = 3_600_000
NOBODY: Final = (-1, -1, -1)
_MANY: Final = 140 << 20
"""More than readers decompress of a small batch."""
_ZSTD_ZEROS: Final = ((1 << 17) << 3 | 2).to_bytes(3, "little") + b"\0"
"""A block of Zstandard that decompresses to 128 KiB of zeros."""


def blob(data: bytes | None) -> bytes:
    """Return a key, a value, or a header's name or value, with its size in front."""
    return varint(-1) if data is None else varint(len(data)) + data


def record(
    offset_delta: int = 0,
    key: bytes | None = b"k",
    value: bytes | None = b"v",
    *,
    timestamp_delta: int = 0,
    headers: bytes = b"\0",
    behind: bytes = b"",
    longer_by: int = 0,
) -> bytes:
    """Return one record; ``headers`` begin with their count. Its length is ``longer_by`` too large."""
    body = b"\0" + varint(timestamp_delta) + varint(offset_delta) + blob(key) + blob(value) + headers + behind
    return varint(len(body) + longer_by) + body


def records(count: int, **options: bytes | None) -> bytes:
    """Return ``count`` records in order."""
    return b"".join(record(delta, **options) for delta in range(count))  # type: ignore[arg-type]


def batch(
    now_ms: int,
    payload: bytes,
    count: int,
    *,
    codec: int = 0,
    last_offset_delta: int | None = None,
    base_timestamp: int | None = None,
    max_timestamp: int | None = None,
    attributes: int = 0,
    producer: tuple[int, int, int] = NOBODY,
) -> bytes:
    """Return a batch with a right CRC, whatever else is wrong with it."""
    base = now_ms if base_timestamp is None else base_timestamp
    return pack_wire_batch(
        payload,
        base_offset=0,
        leader_epoch=-1,
        attributes=codec | attributes,
        last_offset_delta=count - 1 if last_offset_delta is None else last_offset_delta,
        base_timestamp=base,
        max_timestamp=base if max_timestamp is None else max_timestamp,
        producer_id=producer[0],
        producer_epoch=producer[1],
        base_sequence=producer[2],
        record_count=count,
    )


def _snappy_of_java(data: bytes) -> bytes:
    block = bytes(cramjam.snappy.compress_raw(data))
    return b"\x82SNAPPY\0" + b"\0\0\0\1\0\0\0\1" + len(block).to_bytes(4, "big") + block


PACKERS: Final[dict[str, tuple[int, Callable[[bytes], bytes]]]] = {
    "gzip": (1, gzip.compress),
    "snappy": (2, lambda data: bytes(cramjam.snappy.compress_raw(data))),
    "snappy of Java": (2, _snappy_of_java),
    "lz4": (3, lz4.frame.compress),
    "zstd": (4, lambda data: bytes(cramjam.zstd.compress(data))),
}
"""Ways to compress: (codec, function)."""


class Case(NamedTuple):
    """A batch, and the answer that the server must give."""

    make: Callable[..., bytes]
    """A function of the time in milliseconds; ``producer`` and ``attributes`` are as in `batch`."""
    code: int = 0
    index: int | None = None
    """Index of the record that the answer must name."""
    words: str = ""
    """Words in the error message."""


def _case(
    payload: bytes | Callable[[], bytes],
    count: int,
    code: int = 0,
    index: int | None = None,
    words: str = "",
    *,
    ahead_ms: int | None = None,
    **fields: int,
) -> Case:
    def make(now_ms: int, *, producer: tuple[int, int, int] = NOBODY, attributes: int = 0) -> bytes:
        base = {} if ahead_ms is None else {"base_timestamp": now_ms + ahead_ms}
        data = payload() if callable(payload) else payload
        both = {**base, **fields, "attributes": attributes | fields.get("attributes", 0)}
        return batch(now_ms, data, count, producer=producer, **both)

    return Case(make, code, index, words)


def _broken_crc(now_ms: int, **options: int) -> bytes:
    made = bytearray(batch(now_ms, records(2), 2, **options))  # type: ignore[arg-type]
    made[-1] ^= 1
    return bytes(made)


@cache
def _zeros_in_gzip() -> bytes:
    """Return many zeros in one gzip member; members of a mebibyte each would be quicker to make."""
    packer = zlib.compressobj(1, zlib.DEFLATED, 31)
    return b"".join(packer.compress(bytes(1 << 20)) for _ in range(_MANY >> 20)) + packer.flush()


@cache
def _zeros_in_lz4() -> bytes:
    return lz4.frame.compress(bytes(_MANY))


@cache
def _many_headers() -> bytes:
    """Return one record with a million and one headers, all of them empty."""
    return record(headers=varint(1_000_001) + b"\0\1" * 1_000_001)


_BAD, _SIZE, _TIME = ErrorCode.INVALID_RECORD, ErrorCode.MESSAGE_TOO_LARGE, ErrorCode.INVALID_TIMESTAMP
_HEADER: Final = varint(1)

REFUSED: Final[dict[str, Case]] = {
    "two records announced, one there": _case(record(), 2, _BAD),
    "one record announced, two there": _case(records(2), 1, _BAD),
    "many announced, few there": _case(records(100), 90, _BAD),
    "no record announced": _case(records(1), 0, _BAD),
    "records that are garbage": _case(b"\xff" * 30, 1, _BAD),
    "records that are missing": _case(b"", 1, _BAD),
    "bytes behind the last record": _case(record() + b"\0", 1, _BAD),
    "bytes behind a record's headers": _case(record(behind=b"xy"), 1, _BAD),
    "a record that says it is longer": _case(record(longer_by=3) + record(1), 2, _BAD),
    "a record that says it is shorter": _case(record(longer_by=-1) + record(1), 2, _BAD),
    "a record of less than no bytes": _case(varint(-5), 1, _BAD),
    "offset deltas 0, 0": _case(record() + record(), 2, _BAD, 1, "offset delta"),
    "offset deltas 1, 0": _case(record(1) + record(0), 2, _BAD, words="offset delta"),
    "offset deltas 0, 2 of three": _case(record() + record(2) + record(2), 3, _BAD, words="offset delta"),
    "offset deltas that leave one out": _case(record() + record(2), 2, _BAD, last_offset_delta=2),
    "an offset delta below zero": _case(record(-1), 1, _BAD, 0, "offset delta"),
    "more headers than a batch may have": _case(_many_headers, 1, _BAD, 0, "headers"),
    "a key beyond its record": _case(varint(6) + b"\0\0\0" + varint(90) + b"v", 1, _BAD),
    "a value beyond its record": _case(varint(6) + b"\0\0\0" + varint(-1) + varint(90), 1, _BAD),
    "a header without a name": _case(record(headers=_HEADER + blob(None) + blob(b"x")), 1, _BAD),
    "a header's name beyond its record": _case(record(headers=_HEADER + varint(50) + b"x"), 1, _BAD),
    "a header's value beyond its record": _case(record(headers=_HEADER + blob(b"h") + varint(50)), 1, _BAD),
    "less than no headers": _case(record(headers=varint(-1)), 1, _BAD),
    "more headers than bytes": _case(record(headers=varint(1 << 20)), 1, _BAD),
    "fewer headers than there are": _case(record(headers=_HEADER + blob(b"a") * 4), 1, _BAD),
    "gzip: garbage": _case(b"\x1f\x8b" + b"x" * 20, 1, _BAD, codec=1),
    "gzip: cut short": _case(gzip.compress(records(50))[:-10], 50, _BAD, codec=1),
    "gzip: a wrong checksum": _case(gzip.compress(records(5))[:-8] + bytes(8), 5, _BAD, codec=1),
    "gzip: zlib instead": _case(zlib.compress(records(5)), 5, _BAD, codec=1),
    "snappy: garbage": _case(b"\xff\xff\xff\xff" + b"x" * 7, 1, _BAD, codec=2),
    "snappy: cut short": _case(PACKERS["snappy"][1](records(50))[:-3], 50, _BAD, codec=2),
    "snappy of Java: cut short": _case(_snappy_of_java(records(50))[:-3], 50, _BAD, codec=2),
    "snappy: its own framing": _case(bytes(cramjam.snappy.compress(records(50))), 50, _BAD, codec=2),
    "lz4: garbage": _case(b"\x04\x22\x4d\x18" + b"x" * 14, 1, _BAD, codec=3),
    "lz4: cut short": _case(lz4.frame.compress(records(50))[:-9], 50, _BAD, codec=3),
    "zstd: garbage": _case(b"\x28\xb5\x2f\xfd" + b"x" * 14, 1, _BAD, codec=4),
    "zstd: cut short": _case(PACKERS["zstd"][1](records(50))[:-3], 50, _BAD, codec=4),
    **{
        f"{name}: {what}": _case(pack(payload), count, _BAD, codec=codec)
        for name, (codec, pack) in PACKERS.items()
        for what, payload, count in (
            ("two announced, one there", record(), 2),
            ("no record there", b"", 1),
            ("bytes behind the last", record() + b"xyz", 1),
            ("offset deltas 0, 0", record() + record(), 2),
        )
    },
    "gzip: 140 MiB": _case(_zeros_in_gzip, 1, _SIZE, words="134217667 bytes", codec=1),
    "zstd: 900 MiB": _case(b"\x28\xb5\x2f\xfd\0\x58" + _ZSTD_ZEROS * 7200 + b"\1\0\0", 1, _SIZE, codec=4),
    "lz4: 140 MiB": _case(_zeros_in_lz4, 1, _SIZE, codec=3),
    "timestamp 2^62": _case(record(), 1, _TIME, 0, base_timestamp=1 << 62),
    "timestamp -2^62": _case(record(), 1, _TIME, 0, base_timestamp=-(1 << 62)),
    "a timestamp before the year 1": _case(record(), 1, _TIME, 0, base_timestamp=-62_135_596_800_001),
    "a timestamp in the year 9999": _case(record(), 1, _TIME, 0, "after.max.ms", base_timestamp=253_402_300_799_000),
    "a timestamp in two hours": _case(record(), 1, _TIME, 0, "after.max.ms", ahead_ms=2 * HOUR_MS),
    "a delta of two hours": _case(record() + record(1, timestamp_delta=2 * HOUR_MS), 2, _TIME, 1, "after.max.ms"),
    "a delta of 2^62": _case(record() + record(1, timestamp_delta=1 << 62), 2, _TIME, 1),
    "a base of 2^62 that deltas take back": _case(
        record(timestamp_delta=-(1 << 62) + 1_700_000_000_000), 1, _TIME, base_timestamp=1 << 62
    ),
    "a sum of 2^64": _case(record(timestamp_delta=(1 << 63) - 1), 1, _TIME, base_timestamp=(1 << 63) - 1),
    "a sum of 2^63": _case(record(timestamp_delta=(1 << 63) - 1), 1, _TIME, 0, base_timestamp=1_700_000_000_000),
    "codec 5": _case(record(), 1, ErrorCode.UNSUPPORTED_COMPRESSION_TYPE, codec=5),
    "a wrong CRC": Case(_broken_crc, ErrorCode.CORRUPT_MESSAGE),
}  # fmt: skip
"""Batches that contradict themselves, or that a reader would refuse."""

ACCEPTED: Final[dict[str, tuple[Case, int]]] = {
    "one record": (_case(record(), 1), 1),
    "a null key and a null value": (_case(record(0, None, None), 1), 1),
    "an empty key and an empty value": (_case(record(0, b"", b""), 1), 1),
    "headers": (_case(record(headers=varint(2) + blob(b"h") + blob(None) + blob(b"") + blob(b"x")), 1), 1),
    "a header's name that is no UTF-8": (_case(record(headers=_HEADER + blob(b"\xff\xfe") + blob(b"x")), 1), 1),
    "many records": (_case(records(500), 500), 500),
    "a timestamp delta below zero": (_case(record(timestamp_delta=-5), 1), 1),
    "no timestamp": (_case(record(), 1, base_timestamp=-1), 1),
    "a timestamp in 1969": (_case(record(), 1, base_timestamp=-5000), 1),
    "a timestamp in the year 1": (_case(record(), 1, base_timestamp=-62_135_596_800_000), 1),
    "a timestamp in half an hour": (_case(record(), 1, ahead_ms=HOUR_MS // 2), 1),
    "the header's largest timestamp is 0": (_case(records(2), 2, max_timestamp=0), 2),
    "the header's largest timestamp is 2^62": (_case(records(2), 2, max_timestamp=1 << 62), 2),
    "the header's largest timestamp is -2^62": (_case(records(2), 2, max_timestamp=-(1 << 62)), 2),
    "gzip: stored blocks": (_case(gzip.compress(records(3), 0), 3, codec=1), 3),
    "lz4: linked blocks": (
        _case(lz4.frame.compress(records(20_000), block_linked=True, block_size=4), 20_000, codec=3), 20_000,
    ),
    "zstd: two frames": (
        _case(PACKERS["zstd"][1](record()) + PACKERS["zstd"][1](record(1)), 2, codec=4), 2,
    ),
    "zstd: a skippable frame": (
        _case(b"\x50\x2a\x4d\x18\3\0\0\0abc" + PACKERS["zstd"][1](record()), 1, codec=4), 1,
    ),
    **{name: (_case(pack(records(300)), 300, codec=codec), 300) for name, (codec, pack) in PACKERS.items()},
    **{
        f"{name}: more than a batch that is small": (
            _case(pack(records(2000, value=b"v" * 500)), 2000, codec=codec), 2000,
        )
        for name, (codec, pack) in PACKERS.items()
    },
}  # fmt: skip
"""Unusual but valid batches, and the number of their records."""
