"""Columns survive a round trip, and invalid columns raise an error with the position of the fault."""

from __future__ import annotations

import array
import struct
from typing import Any

import msgspec
import numpy as np
import pytest
from batches import Columns, columns
from hypothesis import given
from hypothesis import strategies as st

from segmentlog.errors import InvalidRecord
from segmentlog.format.columns import (
    MalformedColumn,
    as_timestamps,
    check_blobs,
    check_headers,
    decode_blobs,
    decode_headers,
    decode_offsets,
    decode_timestamps,
    encode_columns,
)
from segmentlog.quantities import EARLIEST_MS


def encode(given: Columns, scratch: bytearray) -> list[memoryview]:
    """Return the columns in their order in the payload: deltas, timestamps, keys, values, headers."""
    sizes = encode_columns(
        scratch,
        given.values,
        given.keys,
        None if given.timestamps is None else np.array(given.timestamps, np.int64),
        given.headers,
        None if given.offset_deltas is None else np.array(given.offset_deltas, np.uint32),
        0 if given.timestamps is None else given.timestamps[0],
    )
    parts, start = [], 0
    for size in (sizes.offset_deltas, sizes.timestamps, sizes.keys, sizes.values, sizes.headers):
        parts.append(memoryview(bytes(scratch[start : start + size])))
        start += size
    assert start == len(scratch), "the sizes add up to the payload"
    return parts


@given(given=columns(), before=st.binary(max_size=2000))
def test_columns_come_back(given, before):
    """Every column decodes to what was encoded, whatever the scratch buffer held before."""
    deltas, timestamps, keys, values, headers = encode(given, bytearray(before))
    count = len(given)
    assert decode_blobs(values, count) == given.values
    if given.keys is None:
        assert not len(keys)
    else:
        assert decode_blobs(keys, count) == given.keys
    if given.headers is None:
        assert not len(headers)
    else:
        assert decode_headers(headers, count) == given.headers
    if given.timestamps is not None:
        assert decode_timestamps(timestamps, count, given.timestamps[0]).tolist() == given.timestamps
    expected = list(range(count)) if given.offset_deltas is None else given.offset_deltas
    assert decode_offsets(deltas, count, 1000).tolist() == [1000 + delta for delta in expected]


@pytest.mark.parametrize(
    ("far", "width"),
    [(2**31 - 1, 4), (2**31, 8), (-(2**31) + 1, 4), (-(2**31), 8)],
)
def test_timestamps_are_narrow_while_they_fit(far, width):
    """Timestamps within 24 days of the first one take four bytes each, others eight; both come back."""
    times = [2**40, 2**40 + far]
    column = encode(Columns([b"", b""], timestamps=times), bytearray())[1]
    assert len(column) == 2 * width
    assert decode_timestamps(column, 2, times[0]).tolist() == times


def test_an_absent_column_costs_nothing():
    """Without keys, timestamps and headers, a batch takes the bytes of its values only."""
    sizes = [len(column) for column in encode(Columns([b"a", b"b"]), bytearray())]
    assert sizes == [0, 0, 0, 1 + 2 * 3, 0]


@pytest.mark.parametrize("count", [1, 15, 16, 65_535, 65_536])
def test_every_length_of_a_messagepack_array_is_read(count):
    """Columns of any length decode, across all three ways in which MessagePack writes a length."""
    column = memoryview(msgspec.msgpack.encode([b"v"] * count))
    assert decode_blobs(column, count) == [b"v"] * count
    with pytest.raises(MalformedColumn, match=f"array of {count - 1} items"):
        decode_blobs(column, count - 1)


@pytest.mark.parametrize(
    ("data", "count"),
    [
        (b"", 1),
        (b"\xa1a", 1),  # no array
        (b"\x91\xa1a", 1),  # a str where bytes belong
        (b"\x91\x01", 1),
        (b"\x91\xc0\xc0", 1),  # more than the array
        (b"\x92\xc0", 2),  # less than the array
        (b"\x91\xc6\xff\xff\xff\xffa", 1),  # four gigabytes announced
        (b"\xdd\xff\xff\xff\xff", 2**32 - 1),
        (b"\xdc\x00\x01\xc0", 1),  # a length that is not written in its short form
        (b"\x91" * 100_000, 1),
    ],
    ids=repr,
)
@pytest.mark.parametrize("decode", [decode_blobs, decode_headers])
def test_what_is_no_column_is_malformed(decode, data, count):
    """Bytes that are not a column of ``count`` items raise MalformedColumn."""
    with pytest.raises(MalformedColumn):
        decode(memoryview(data), count)


@pytest.mark.parametrize(
    "record",
    [
        *[[["a"]], [["a", b"b", b"c"]], [[b"a", b"b"]], [["a", "b"]], ["ab"], {"a": b"b"}, b"a", None],
        [["a", 1]],
    ],
    ids=repr,
)
def test_headers_that_are_no_pairs_are_malformed(record):
    """A headers column that holds anything but pairs of a text and bytes raises MalformedColumn."""
    with pytest.raises(MalformedColumn):
        decode_headers(memoryview(msgspec.msgpack.encode([record])), 1)


def test_a_header_name_that_is_not_utf8_is_malformed():
    """A name that is not UTF-8 raises MalformedColumn, not UnicodeDecodeError."""
    with pytest.raises(MalformedColumn, match="utf-8"):
        decode_headers(memoryview(b"\x91\x91\x92\xa1\xff\xc0"), 1)


@given(data=st.binary(max_size=60), count=st.integers(1, 20), base=st.integers(-(2**63), 2**63 - 1))
def test_any_bytes_are_a_column_or_malformed(data, count, base):
    """Any bytes are a column of ``count`` items, or raise MalformedColumn."""
    prefix = bytes([0x90 | count]) if count < 16 else struct.pack(">BH", 0xDC, count)
    for column in (data, prefix + data):
        for decode in (
            lambda view: decode_blobs(view, count),
            lambda view: decode_headers(view, count),
            lambda view: decode_timestamps(view, count, base),
            lambda view: decode_offsets(view, count, abs(base) >> 1),
        ):
            try:
                found: Any = decode(memoryview(column))
            except MalformedColumn:
                continue
            assert len(found) == count


# ---------------------------------------------------------------- what a caller may give


@pytest.mark.parametrize("blob", ["text", 5, ("a",), (), [b"a"], 1.5, ...], ids=repr)
def test_a_value_that_is_not_bytes_is_refused_with_its_index(blob):
    """Anything but bytes and None is refused before it is written, and the error says which item it is."""
    with pytest.raises(InvalidRecord) as caught:
        check_blobs("keys", [b"fine", None, blob])
    assert (caught.value.column, caught.value.index) == ("keys", 2)


def test_every_kind_of_bytes_is_taken():
    """bytes, bytearray and memoryview may be in one column, together with None."""
    blobs = [b"a", bytearray(b"b"), memoryview(b"c"), None]
    check_blobs("values", blobs)
    column = encode(Columns(blobs), bytearray())[3]
    assert decode_blobs(column, 4) == [b"a", b"b", b"c", None]


def test_a_text_is_refused_with_the_remedy():
    """A str raises an error that says to encode it."""
    with pytest.raises(InvalidRecord, match=r"\.encode\(\)"):
        check_blobs("values", ["text"])


def test_headers_are_normalised():
    """None and empty sequences mean an empty list; pairs may be tuples or lists, with any kind of bytes."""
    given = [None, (), [], [["a", b"1"], ("a", None)], (("b", bytearray(b"2")),)]
    assert check_headers(given) == [(), (), (), (("a", b"1"), ("a", None)), (("b", b"2"),)]


@pytest.mark.parametrize(
    "record", [{"a": b"b"}, 5, ["ab"], [("a",)], [("a", "b")], [(b"a", b"b")], [("a", b"b", b"c")]], ids=repr
)
def test_headers_that_are_no_pairs_are_refused_with_the_record(record):
    """The error names the record whose headers are wrong."""
    with pytest.raises(InvalidRecord) as caught:
        check_headers([[("fine", b"")], None, record])
    assert (caught.value.column, caught.value.index) == ("headers", 2)


@pytest.mark.parametrize("name", ["\ud800", "a\udcffb"], ids=ascii)
def test_a_header_name_that_utf8_cannot_encode_is_refused(name):
    """A lone surrogate, which argv and file names may hold, is an InvalidRecord and no UnicodeEncodeError later."""
    with pytest.raises(InvalidRecord) as caught:
        check_headers([[], [("größe", b""), (name, b"")]])
    assert (caught.value.column, caught.value.index) == ("headers", 1)


@pytest.mark.parametrize(
    "times",
    [[1, 2], (1, 2), np.array([1, 2], np.uint8), np.array([1, 2], ">i4"), array.array("q", [1, 2]), range(1, 3)],
    ids=repr,
)
def test_timestamps_of_any_integer_type_are_taken(times):
    """Lists and arrays of whole numbers become int64."""
    found = as_timestamps(times, 2)
    assert found.dtype == np.int64
    assert found.tolist() == [1, 2]


def test_no_timestamps_for_no_records():
    """An empty list is a list of no timestamps, though numpy takes it for floats."""
    assert as_timestamps([], 0).dtype == np.int64


@pytest.mark.parametrize(
    ("times", "index"),
    [
        *[([1.5, 2], 0), (["1", "2"], 0), ([None, 1], 0), ([[1], [2]], 0), (5, 0), ([True, False], 0)],
        *[([1], 1), ([1, 2, 3], 3), ([1, EARLIEST_MS - 1], 1), ([2**63, 1], 0), ([2**64, 1], 0)],
        (np.array(["NaT", "2021-01-01"], "M8[ms]"), 0),
    ],
    ids=repr,
)
def test_timestamps_that_are_none_are_refused(times, index):
    """Fractions, texts, wrong numbers of them, and times before the year 1 or beyond int64 are refused."""
    with pytest.raises(InvalidRecord) as caught:
        as_timestamps(times, 2)
    assert (caught.value.column, caught.value.index) == ("timestamps", index)
