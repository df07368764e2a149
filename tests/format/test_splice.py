"""Records cut out of a column without decoding it, against decoding it."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from segmentlog.format.columns import MalformedColumn, decode_blobs
from segmentlog.format.splice import cut_items, encode_items, item_bounds, join_items, null_items

MARKS = st.sampled_from([b"\xc4", b"\xc0", b"\xc4\x02", b"\xc4\xc4\x00", b"\x00\xc4"])
BLOBS = st.binary(max_size=30) | st.lists(MARKS | st.binary(max_size=4), max_size=8).map(b"".join)
ALIKE = st.integers(0, 9).flatmap(lambda size: st.lists(st.binary(min_size=size, max_size=size), min_size=1))


@st.composite
def cuts(draw: st.DrawFn) -> tuple[list[bytes], list[bool]]:
    """Items, full of bytes that look like the beginning of one, and which of them are wanted."""
    items = draw(st.lists(BLOBS, min_size=1, max_size=40) | ALIKE)
    return items, draw(st.lists(st.booleans(), min_size=len(items), max_size=len(items)))


@given(given=cuts())
def test_what_is_cut_out_decodes_to_what_was_there(given: tuple[list[bytes], list[bool]]) -> None:
    """Short byte strings of any content, values with MessagePack's own marks in them included."""
    items, wanted = given
    column = memoryview(msgspec.msgpack.encode(items))
    bounds = item_bounds(column, len(items))
    assert bounds is not None
    kept = np.array(wanted)
    expected = [item for item, want in zip(items, wanted, strict=True) if want]
    cut = cut_items(column, bounds, kept)
    assert decode_blobs(memoryview(join_items([cut], len(expected))), len(expected)) == expected
    whole = join_items([cut_items(column, bounds, None), cut], len(items) + len(expected))
    assert decode_blobs(memoryview(whole), len(items) + len(expected)) == items + expected


@given(items=st.lists(st.none() | st.binary(max_size=400), max_size=30))
def test_what_cannot_be_told_is_not_guessed(items: list[bytes | None]) -> None:
    """With nulls and long items there are no bounds, or right ones."""
    column = memoryview(msgspec.msgpack.encode(items))
    bounds = item_bounds(column, len(items))
    if None in items:
        assert bounds is None
    if bounds is not None:
        parts = [bytes(column[start:stop]) for start, stop in pairwise(bounds.tolist())]
        assert [decode_blobs(memoryview(join_items([part], 1)), 1)[0] for part in parts] == items


def test_a_column_of_another_length_is_refused() -> None:
    """It must announce as many items as the header says."""
    with pytest.raises(MalformedColumn):
        item_bounds(memoryview(msgspec.msgpack.encode([b"a", b"b"])), 3)


def test_decoded_items_and_nulls_join() -> None:
    """Parts that were decoded, cut, or are all null make one column."""
    column = join_items([encode_items([b"a", None]), null_items(2), encode_items([b"x" * 300])], 5)
    assert decode_blobs(memoryview(column), 5) == [b"a", None, None, None, b"x" * 300]
