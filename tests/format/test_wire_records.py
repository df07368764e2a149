"""The records of Kafka batches: what is malformed is refused with its number and the reason, in every way there is."""

from __future__ import annotations

import pickle
import tracemalloc

import numpy as np
import pytest
from batches import Columns, batch_bytes, columns, forge, read_batch
from cores import WAYS, use_way
from hypothesis import given, settings
from hypothesis import strategies as st

from segmentlog.errors import CorruptBatch
from segmentlog.format import wire_scan
from segmentlog.format.batch import HEADER_SIZE, WIRE_HEADER_SIZE, decode_header
from segmentlog.format.columns import MalformedColumn
from segmentlog.format.decoded_batch import record_batch
from segmentlog.format.record_batch import RecordBatch
from segmentlog.format.wire_conversion import to_wire_batches
from segmentlog.format.wire_records import MalformedRecord, WireRecords, decode_records, varint
from segmentlog.speedups import COMPILED

ONE = varint(1)
NULL = varint(-1)
NONE = varint(0)


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Make the package use one of the ways, and return its name."""
    use_way(request.param, monkeypatch)
    return str(request.param)


def record(
    offset: int | bytes, *, timestamp: bytes = NONE, key: bytes = NULL, value: bytes = NULL, headers: bytes = NONE,
    length: int | bytes | None = None,
) -> bytes:  # fmt: skip
    """Return a record of fields that are encoded already; ``length`` instead of the right one."""
    body = b"\0" + timestamp + (varint(offset) if isinstance(offset, int) else offset) + key + value + headers
    if isinstance(length, bytes):
        return length + body
    return varint(len(body) if length is None else length) + body


def decode(raw: bytes, count: int, last_offset_delta: int | None = None) -> WireRecords:
    """Return uncompressed records, all of them checked."""
    return decode_records(memoryview(bytes(WIRE_HEADER_SIZE) + raw), 0, count, last_offset_delta)


LENGTH = "its length is malformed"
OFFSET = "its offset delta is malformed"
KEY = "its key extends beyond the record"
VALUE = "its value extends beyond the record"
HEADER_COUNT = "its number of headers is malformed"
HEADER_NAME = "the name of a header is null"
HEADER_VALUE = "the value of a header extends beyond the record"
LEFT = "bytes follow its last field"

MALFORMED = {
    "a length of 0": (LENGTH, record(2, length=0)),
    "a negative length": (LENGTH, record(2, length=-7)),
    "a length beyond the end": (LENGTH, record(2, length=1000)),
    "a length of more than 5 bytes": (LENGTH, record(2, length=b"\x8c\x80\x80\x80\x80\x00")),
    "a length of more than 32 bits": (LENGTH, record(2, length=b"\x8c\x80\x80\x80\x10")),
    "a length that ends before the key": (KEY, record(2, length=3, key=b"\2k")),
    "a length that ends in the timestamp": ("its timestamp delta is malformed", record(2, length=1)),
    "a timestamp of more than 64 bits": ("its timestamp delta", record(2, timestamp=b"\xff" * 9 + b"\x02")),
    "an offset that repeats": (OFFSET, record(1)),
    "an offset that goes back": (OFFSET, record(0)),
    "a negative offset": (OFFSET, record(-1)),
    "an offset of more than 5 bytes": (OFFSET, record(b"\x84\x80\x80\x80\x80\x00")),
    "an offset of more than 32 bits": (OFFSET, record(b"\x84\x80\x80\x80\x10")),
    "a key beyond the record": (KEY, record(2, key=varint(100) + b"k")),
    "a key to the end of the record": (VALUE, record(2, key=varint(2) + b"k", value=b"", headers=b"\0")),
    "a key of size -2": (KEY, record(2, key=varint(-2))),
    "a key of more than 5 bytes of size": (KEY, record(2, key=b"\x82\x80\x80\x80\x80\x00k")),
    "a value beyond the record": (VALUE, record(2, value=varint(100) + b"v")),
    "a value of size -2": (VALUE, record(2, value=varint(-2))),
    "a value of more than 32 bits of size": (VALUE, record(2, value=b"\x82\x80\x80\x80\x10v")),
    "a negative number of headers": (HEADER_COUNT, record(2, headers=NULL)),
    "no number of headers": (HEADER_COUNT, record(2, headers=b"")),
    "more headers than there are": (HEADER_NAME, record(2, headers=varint(2) + ONE + b"a" + ONE + b"x")),
    "a null header name": (HEADER_NAME, record(2, headers=ONE + NULL + ONE + b"x")),
    "a header name beyond the record": (HEADER_NAME, record(2, headers=ONE + varint(50) + b"a" + ONE + b"x")),
    "a header value beyond the record": (HEADER_VALUE, record(2, headers=ONE + ONE + b"a" + varint(50) + b"x")),
    "a header value of size -2": (HEADER_VALUE, record(2, headers=ONE + ONE + b"a" + varint(-2))),
    "a header size of 33 bits": (HEADER_VALUE, record(2, headers=ONE + ONE + b"a" + b"\x82\x80\x80\x80\x10x")),
    "bytes after the headers": (LEFT, record(2, headers=ONE + ONE + b"a" + NULL + b"x")),
    "bytes without headers": (LEFT, record(2, headers=NONE + b"x")),
}  # fmt: skip


@pytest.mark.parametrize("many", [False, True], ids=["alone", "among many"])
@pytest.mark.parametrize(("reason", "malformed"), MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_record_is_refused_by_its_number(way: str, reason: str, malformed: bytes, many: bool) -> None:
    """The error names the first record that is wrong, and says what is wrong with it."""
    before = [record(0), record(1, key=ONE + b"k", headers=ONE + ONE + b"a" + NULL)]
    after = [record(at, value=varint(4) + b"abcd") for at in range(3, 60 if many else 4)]
    raw = b"".join((*before, malformed, *after))
    with pytest.raises(MalformedRecord) as refused:
        decode(raw, len(before) + 1 + len(after))
    assert (refused.value.index, refused.value.reason[: len(reason)]) == (2, reason)
    assert str(refused.value) == f"record 2: {refused.value.reason}"
    assert isinstance(refused.value, MalformedColumn)
    assert str(pickle.loads(pickle.dumps(refused.value))) == str(refused.value)


def test_records_and_their_header_agree(way: str) -> None:
    """More bytes or fewer records than the header announces, and offsets beyond its last one, are refused."""
    raw = b"".join(record(at, value=varint(9) + bytes(9)) for at in range(30))
    with pytest.raises(MalformedRecord, match="bytes follow the last record") as more:
        decode(raw, 29)
    assert more.value.index == 29
    with pytest.raises(MalformedRecord, match="its length") as fewer:
        decode(raw, 31)
    assert fewer.value.index == 30
    with pytest.raises(MalformedRecord, match="its offset delta") as beyond:
        decode(raw, 30, 28)
    assert beyond.value.index == 29
    with pytest.raises(MalformedColumn, match="1000 records in 480 bytes"):
        decode(raw, 1000)
    assert decode(raw, 30, 29).offset_deltas.tolist() == list(range(30))
    assert decode(raw, 30).count == 30


@pytest.mark.parametrize("count", [1, 50])
def test_numbers_at_their_limits(way: str, count: int) -> None:
    """The largest and the least numbers are read, and so are numbers with needless zeros."""
    least, largest = varint(-(2**63)), varint(2**63 - 1)
    ends = [record(2**31 - 2, timestamp=least), record(2**31 - 1, timestamp=largest)]
    found = decode(b"".join([record(at) for at in range(count)] + ends), count + 2)
    assert found.offset_deltas.tolist() == [*range(count), 2**31 - 2, 2**31 - 1]
    assert found.timestamp_delta_range == (-(2**63), 2**63 - 1)
    assert found.timestamp_deltas.tolist() == [0] * count + [-(2**63), 2**63 - 1]
    long = b"\x82\x80\x80\x80\x00"
    odd = [record(at, key=long + b"k", value=b"\x81\x80\x80\x00", headers=long + long + b"a" + long + b"x")
           for at in range(count)]  # fmt: skip
    found = decode(b"".join(odd), count)
    assert (found.keys(), found.values(), found.headers()) == ([b"k"] * count, [None] * count, [(("a", b"x"),)] * count)
    assert np.array_equal(found.null_keys(), np.zeros(count, np.bool_))
    assert (found.any_key, found.any_null_value, found.any_headers) == (True, True, True)


def test_no_records(way: str) -> None:
    """A batch without records has empty columns."""
    found = decode(b"", 0)
    assert (found.keys(), found.values(), found.headers(), found.kept(None)) == ([], [], [], b"")
    assert (found.count, found.size_bytes, found.timestamp_delta_range) == (0, 0, (0, 0))
    assert (found.any_key, found.any_null_value, found.any_headers) == (False, False, False)


def test_many_records_are_checked_without_a_table(way: str) -> None:
    """A check of very many records takes no memory for each; their fields are found when they are asked for."""
    count = 2_000
    raw = b"".join(record(at) for at in range(count))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire_scan, "_TABLE_MAX", count - 1)
        data = memoryview(bytes(WIRE_HEADER_SIZE) + raw)
        tracemalloc.start()
        found = decode_records(data, 0, count)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    if way != "numpy":
        assert peak < 100_000  # the table would take 192,000
    assert found.offset_deltas.tolist() == list(range(count))
    assert found.values() == [None] * count
    assert found.kept(None) == raw


# ---------------------------------------------------------------- encoding


@settings(max_examples=25)
@given(columns(max_size=40), st.integers(0, 2**40))
def test_every_way_makes_the_same_of_what_the_library_wrote(made: Columns, base_offset: int) -> None:
    """A batch of the library, or a part of it, becomes the same records for Kafka's clients in every way."""
    ways = WAYS if COMPILED else WAYS[1:]
    whole = read_batch(batch_bytes(made, base_offset))
    for batch in (whole, whole.slice(len(whole) // 3), whole.slice(0, len(whole) // 2)):
        found = []
        for name in ways:
            with pytest.MonkeyPatch.context() as patch:
                use_way(name, patch)
                found.append([bytes(one) for one in to_wire_batches(batch.slice(0))])
        assert found[1:] == found[:1] * (len(ways) - 1)


@pytest.mark.parametrize("damage", ["values", "keys", "headers"])
def test_columns_that_do_not_decode_are_told_with_their_place(way: str, damage: str) -> None:
    """A forged column is a `CorruptBatch` that names the file, in every way."""
    values, keys, headers = b"\x92\xc4\x01a\xc0", b"\x92\xc4\x01k\xc0", b"\x92\x90\x91\x92\xa1n\xc0"
    forged = {"values": values, "keys": keys, "headers": headers}
    assert forged_batch(**forged).values == [b"a", None]
    assert len(to_wire_batches(forged_batch(**forged))) == 1
    forged[damage] = forged[damage][:-1] + b"\x93"
    with pytest.raises(CorruptBatch, match=r"somewhere\.log"):
        to_wire_batches(forged_batch(**forged))


def forged_batch(values: bytes, keys: bytes, headers: bytes) -> RecordBatch:
    """Return a batch of two records with these columns, under right checksums."""
    data = batch_bytes(Columns([b"a", b"b"], None, None, None))
    payload = keys + values + headers
    sizes = {"payload_size": len(payload), "raw_size": len(payload), "keys_size": len(keys)}
    sizes |= {"values_size": len(values), "headers_size": len(headers), "timestamps_size": 0}
    view = memoryview(forge(data, payload=payload, **sizes))
    header = decode_header(view, 0, "somewhere.log")
    return record_batch(header, view[HEADER_SIZE:], path="somewhere.log")
