"""Index entries come back, and end where they stop being what was written."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from segmentlog.format.index_file import (
    MAX_RELATIVE,
    OFFSET_ENTRY,
    TIME_ENTRY,
    decode_entries,
    encode_entries,
    entry_due,
)

Triples = list[tuple[int, int, int]]


@st.composite
def triples(draw: st.DrawFn) -> Triples:
    """(relative offset, position, largest timestamp) of entries as a segment has them."""
    count = draw(st.integers(0, 12))

    def ascending(low: int, high: int) -> list[int]:
        return sorted(draw(st.lists(st.integers(low, high), min_size=count, max_size=count, unique=True)))

    stamps = sorted(draw(st.lists(st.integers(0, 2**63 - 1), min_size=count, max_size=count)))
    return list(zip(ascending(0, MAX_RELATIVE), ascending(1, MAX_RELATIVE), stamps, strict=True))


def encode(entries: Triples) -> tuple[bytes, bytes]:
    """Return the bytes of both files."""
    columns = np.array(entries, np.int64).reshape(-1, 3).T
    return encode_entries(columns[0].astype(np.uint32), columns[1].astype(np.uint32), columns[2])


def decode(offset_bytes: bytes, time_bytes: bytes) -> tuple[Triples, bool]:
    """Return the entries of both files, and whether all of them were read."""
    offsets, times, whole = decode_entries(offset_bytes, time_bytes)
    assert offsets["relative_offset"].tolist() == times["relative_offset"].tolist()
    found = zip(
        offsets["relative_offset"].tolist(), offsets["position"].tolist(), times["max_timestamp"].tolist(), strict=True
    )
    return list(found), whole


EXAMPLE: Triples = [(3, 4100, 50), (9, 8300, 50), (10, 12_500, 77), (400, 16_600, 78)]


@given(entries=triples())
def test_entries_come_back(entries):
    """Offsets, positions and timestamps come back, and the files are said to be whole."""
    assert decode(*encode(entries)) == (entries, True)


@given(entries=triples(), cut=st.tuples(st.integers(0, 250), st.integers(0, 250)))
def test_files_cut_short_give_the_entries_that_both_have(entries, cut):
    """If either file is cut at any byte, exactly the entries before the cut are read."""
    offset_bytes, time_bytes = encode(entries)
    offset_bytes, time_bytes = offset_bytes[: cut[0]], time_bytes[: cut[1]]
    found, whole = decode(offset_bytes, time_bytes)
    kept = min(len(offset_bytes) // OFFSET_ENTRY.itemsize, len(time_bytes) // TIME_ENTRY.itemsize)
    assert found == entries[:kept]
    assert whole == (len(offset_bytes) == 8 * kept and len(time_bytes) == 16 * kept)


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("bits", [0x01, 0x80, 0xFF])
def test_a_flip_of_any_byte_ends_the_entries_before_it(which, bits):
    """If any byte of either file changes, positions included, its entry and all later ones are ignored."""
    files = [bytearray(data) for data in encode(EXAMPLE)]
    size = (8, 16)[which]
    for at in range(len(files[which])):
        files[which][at] ^= bits
        assert decode(bytes(files[0]), bytes(files[1])) == (EXAMPLE[: at // size], False)
        files[which][at] ^= bits


@pytest.mark.parametrize("count", [1, 2, 1000])
def test_zeros_are_no_entries(count):
    """Files that a crash left full of zeros hold no entry."""
    assert decode(bytes(8 * count), bytes(16 * count)) == ([], False)


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ((9, 20_000, 90), "an offset that stands still"),
        ((4, 20_000, 90), "an offset that goes back"),
        ((12, 8300, 90), "a position that stands still"),
        ((12, 300, 90), "a position that goes back"),
        ((12, 20_000, 49), "a largest timestamp that falls"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_entries_that_do_not_ascend_are_not_believed(entry, why):
    """An entry that contradicts the one before it ends the entries, though its check is right."""
    assert decode(*encode([*EXAMPLE[:2], entry, (500, 30_000, 99)])) == (EXAMPLE[:2], False)


def test_an_entry_at_position_zero_is_not_believed():
    """The batch at position 0 needs no entry, so such an entry is ignored."""
    assert decode(*encode([(0, 0, 5)])) == ([], False)


@given(offset_bytes=st.binary(max_size=100), time_bytes=st.binary(max_size=200))
def test_arbitrary_bytes_hold_no_entries(offset_bytes, time_bytes):
    """Bytes that are not an index give no entries, and raise no error."""
    assert decode(offset_bytes, time_bytes)[0] == []


@pytest.mark.parametrize(
    ("position", "last", "interval", "due"),
    [(0, 0, 1, False), (1, 0, 1, True), (4095, 0, 4096, False), (4096, 0, 4096, True), (9000, 5000, 4096, False),
     (9096, 5000, 4096, True), (2**31, 5000, 4096, True)],
)  # fmt: skip
def test_an_entry_is_due_once_an_interval_has_passed(position, last, interval, due):
    """A batch gets an entry if it starts an interval or more after the last batch with an entry."""
    assert entry_due(position, last, interval) is due
