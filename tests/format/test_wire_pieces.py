"""Records whose keys and values vary in length, put together from where they lie."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from segmentlog.format.columns import MalformedColumn, array_of
from segmentlog.format.splice import find_item_positions
from segmentlog.format.wire_encode import encode_wire_batch
from segmentlog.format.wire_pieces import encode_pieces, find_blobs

ODD = [b"\xc4", b"\xc4\x01a", b"\xc5\x00\x00", b"\xc0", b"\xc4" * 40, b"\xc5\xc4" * 9, b"\xc5" + b"\xc4\x02" * 90]
"""Values that look like marks."""
blobs = st.binary(max_size=40) | st.integers(0, 600).map(lambda size: b"j" * size) | st.sampled_from(ODD)


def both(keys: Sequence[bytes] | None, values: Sequence[bytes]) -> tuple[memoryview, int]:
    """Return (the columns of a batch, the size of its keys)."""
    head = b"" if keys is None else array_of(keys)
    return memoryview(head + array_of(values)), len(head)


@given(st.lists(blobs, min_size=1, max_size=60))
def test_items_lie_where_they_are_found(items: list[bytes]) -> None:
    """If items are found, they are the right ones, for any content."""
    column = memoryview(array_of(items))
    found = find_item_positions(column, len(items))
    if found is not None:
        spans = zip(found.starts.tolist(), found.sizes.tolist(), strict=True)
        assert [bytes(column[start : start + size]) for start, size in spans] == items


@pytest.mark.parametrize("size", [0, 1, 90, 196, 197, 255, 256, 257, 5000])
def test_texts_and_random_bytes_are_found(size: int) -> None:
    """Items of text are found, however long; and of random bytes, those that look like marks are sorted out."""
    chosen = random.Random(size)
    for items in (
        [b"t" * (size + number % 3) for number in range(200)],
        [chosen.randbytes(size + number % 3) for number in range(200)],
    ):
        column = memoryview(array_of(items))
        found = find_item_positions(column, len(items))
        assert found is not None
        assert found.sizes.tolist() == list(map(len, items))


def test_nulls_are_not_found_and_wrong_counts_are_told() -> None:
    """A column with a null, or a long item, is for others; one of another number of items is damaged."""
    assert find_item_positions(memoryview(array_of([b"a", None, b"b"])), 3) is None
    assert find_item_positions(memoryview(array_of([b"a", b"x" * 70_000])), 2) is None
    assert find_item_positions(memoryview(array_of([])), 0) is None
    with pytest.raises(MalformedColumn):
        find_item_positions(memoryview(array_of([b"a", b"b"])), 3)


@given(st.binary(min_size=1, max_size=30), st.integers(1, 3), st.data())
def test_any_bytes_for_a_column(data: bytes, count: int, drawn: st.DataObject) -> None:
    """Damage raises only the documented error, and all items are within the column."""
    column = memoryview(array_of([b"", b"a", b"bb"][:count])[:1] + data)
    found = find_item_positions(column, count)
    if found is not None:
        assert int((found.starts + found.sizes).max()) <= len(column)
        assert len(found.starts) == count


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from([(0, 3), (50, 70), (60, 300), (98, 104), (255, 258), (8180, 8200)]),
    st.sampled_from([None, (0, 2), (5, 9), (60, 70)]),
    st.sampled_from([1, 30, 70, 300, 9000]),
    st.sampled_from([(0, 1), (0, 3), (-3, 4), (60, 66), (70_000, 70_001), (-(2**40), 2**40)]),
    st.integers(0, 1000),
)
def test_pieces_are_encoded_as_lists_are(
    sizes: tuple[int, int], key_sizes: tuple[int, int] | None, count: int, steps: tuple[int, int], seed: int
) -> None:
    """Keys and values of any lengths make the same bytes, whether they are copied from where they lie or are lists."""
    chosen = random.Random(seed)
    if sizes[1] > 1000:
        count = min(count, 100)
    values = [bytes([65 + number % 26]) * chosen.randint(*sizes) for number in range(count)]
    keys = None
    if key_sizes is not None:
        keys = [bytes([97 + number % 26]) * chosen.randint(*key_sizes) for number in range(count)]
    timestamps = 1_700_000_000_000 + np.array([chosen.randrange(*steps) for _ in range(count)], np.int64)
    deltas = np.cumsum(np.array([chosen.choice((1, 1, 1, 40)) for _ in range(count)], np.int64))
    columns, keys_size = both(keys, values)
    found = find_blobs(columns, keys_size, count)
    if found is None:
        return
    wanted = encode_wire_batch(keys, values, None, timestamps, deltas, base_offset=7, epoch=3)
    assert encode_wire_batch(None, found, None, timestamps, deltas, base_offset=7, epoch=3) == wanted


@pytest.mark.parametrize("keyed", [False, True])
def test_usual_records_are_pieces(keyed: bool) -> None:
    """Records as an application logs them take this path."""
    chosen = random.Random(4)
    values = [b"v" * chosen.randint(90, 120) for _ in range(1000)]
    keys = [b"user-%d" % chosen.randrange(100_000) for _ in values] if keyed else None
    columns, keys_size = both(keys, values)
    found = find_blobs(columns, keys_size, 1000)
    assert found is not None
    assert found.as_lists() == (keys, values)
    assert encode_pieces(found, np.arange(1000) // 7, np.arange(1000)) is not None


def test_lengths_that_differ_much_are_left_to_others() -> None:
    """With one long value among small ones, the copies have the actual lengths."""
    columns, _ = both(None, [b"s" * 10] * 500 + [b"l" * 60_000])
    assert find_blobs(columns, 0, 501) is None
