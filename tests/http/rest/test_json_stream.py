"""Concatenated JSON objects, split into pieces at any byte."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from segmentlog.http.rest.json_stream import JsonObjectSplitter, MalformedJson

_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
_OBJECTS = st.lists(st.dictionaries(st.text(max_size=4), _VALUES, max_size=3), max_size=6)


def decode(data: bytes) -> Any:
    """Decode any object."""
    return msgspec.json.decode(data, type=dict[str, Any])


@given(objects=_OBJECTS, between=st.sampled_from(["", "\n", " ", "\r\n\t", "\n\n"]), size=st.integers(1, 50),
       indent=st.sampled_from([None, 1]))  # fmt: skip
def test_pieces_do_not_matter(objects: list[dict[str, Any]], between: str, size: int, indent: int | None) -> None:
    """The splitter returns the same objects for any separators and any sizes of pieces."""
    data = between.join(json.dumps(one, indent=indent, ensure_ascii=False) for one in objects).encode()
    taker = JsonObjectSplitter(decode, 1 << 20)
    found = [one for at in range(0, len(data), size) for one in taker.feed(data[at : at + size])]
    taker.finish()
    assert found == objects


@pytest.mark.parametrize(
    ("data", "whole"),
    [
        (b'{"a":1} x {"b":2}', 1), (b'{"a":1}[1]', 1), (b'{"a":}', 0), (b'{"a":1}}', 1), (b"{]", 0),
        (b'{"a":"\xff"}', 0), (b"{" * 10_000, 0), (b'{"a":' * 201, 0), (b'{"a":"' + b"x" * 2000, 0), (b"\0", 0),
    ],
)  # fmt: skip
def test_what_is_no_object_ends_it(data: bytes, whole: int) -> None:
    """Objects before malformed data are returned, and the error ends the stream."""
    taker, found = JsonObjectSplitter(decode, 1000), []

    def take_all() -> None:
        found.extend(taker.feed(data))
        taker.finish()

    with pytest.raises(MalformedJson):
        take_all()
    assert len(found) == whole


def test_another_shape_is_told_and_stepped_over() -> None:
    """An object of another shape yields its error, and the objects after it are decoded."""
    taker = JsonObjectSplitter(msgspec.json.Decoder(dict[str, int]).decode, 1000)
    found = list(taker.feed(b'{"a":1}{"a":"x"}{"a":2}\n{"a":"y"}\n{"a":3}'))
    assert [type(one).__name__ for one in found] == ["dict", "ValidationError", "dict", "ValidationError", "dict"]


def test_many_small_pieces_of_one_large_object() -> None:
    """An object is scanned once: a megabyte in pieces of 16 bytes is quick."""
    data = b'{"a":"' + b"x" * 1_000_000 + b'","b":[' + b"1," * 20_000 + b"1]}"
    taker = JsonObjectSplitter(decode, 1 << 22)
    found = [one for at in range(0, len(data), 16) for one in taker.feed(data[at : at + 16])]
    assert len(found) == 1


@pytest.mark.parametrize("end", [b"\n", b""])
@pytest.mark.parametrize("size", [1 << 20, 1000])
def test_many_small_objects_in_one_line(end: bytes, size: int) -> None:
    """The line is scanned once, and each object is decoded once."""
    lengths: list[int] = []

    def counting(one: bytes) -> Any:
        lengths.append(len(one))
        return decode(one)

    data = b'{"a":1}' * 10_000 + end
    taker = JsonObjectSplitter(counting, 1 << 20)
    found = [one for at in range(0, len(data), size) for one in taker.feed(data[at : at + size])]
    taker.finish()
    assert found == [{"a": 1}] * 10_000
    assert sum(lengths) <= 3 * len(data)
