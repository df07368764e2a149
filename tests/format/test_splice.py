"""Records cut out of a column that is a table, against decoding it."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from segmentlog.format.columns import MalformedColumn, decode_blobs
from segmentlog.format.splice import as_table, cut_rows, encode_items, join_items, null_items, select_items

MARKS = st.sampled_from([b"\xc4", b"\xc0", b"\xc4\x02", b"\xc4\xc4\x00", b"\x00\xc4"])
MIXED = st.lists(st.none() | st.binary(max_size=300) | MARKS, min_size=1, max_size=40)
ALIKE = st.integers(0, 300).flatmap(lambda size: st.lists(st.binary(min_size=size, max_size=size), min_size=1))


@st.composite
def cuts(draw: st.DrawFn) -> tuple[list[bytes | None], list[bool]]:
    """Items, of one length or not, and which of them are wanted."""
    items = draw(ALIKE | MIXED)
    return items, draw(st.lists(st.booleans(), min_size=len(items), max_size=len(items)))


@given(given=cuts())
def test_what_is_cut_out_decodes_to_what_was_there(given: tuple[list[bytes | None], list[bool]]) -> None:
    """A column is taken for a table only if it is one, whatever bytes its items hold."""
    items, wanted = given
    count = len(items)
    table = as_table(memoryview(msgspec.msgpack.encode(items)), count)
    lengths = {-1 if item is None else len(item) for item in items}
    assert (table is not None) == (len(lengths) == 1 and 0 <= min(lengths) <= 255)
    if table is None:
        return
    kept = np.array(wanted)
    expected = select_items(items, kept)
    assert expected == [item for item, want in zip(items, wanted, strict=True) if want]
    whole = join_items([cut_rows(table, None), cut_rows(table, kept)], count + len(expected))
    assert decode_blobs(memoryview(whole), count + len(expected)) == items + expected


def test_a_column_of_another_length_is_refused() -> None:
    """It must announce as many items as the header says."""
    with pytest.raises(MalformedColumn):
        as_table(memoryview(msgspec.msgpack.encode([b"a", b"b"])), 3)


def test_decoded_items_and_nulls_join() -> None:
    """Parts that were decoded, cut, or are all null make one column."""
    column = join_items([encode_items([b"a", None]), null_items(2), encode_items([b"x" * 300])], 5)
    assert decode_blobs(memoryview(column), 5) == [b"a", None, None, None, b"x" * 300]
