"""The offset map against plain dictionaries: with and without room, with and without clashing hashes."""

from __future__ import annotations

from collections import defaultdict
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from segmentlog.format.key_hashes import Uint64Array
from segmentlog.policy import offset_map
from segmentlog.policy.offset_map import ENTRY_BYTES, OffsetMap


def size_of(entries: int, keep_last: int) -> int:
    """Return the bytes that ``entries`` entries need."""
    return entries * (ENTRY_BYTES + (0 if keep_last == 1 else 13 + 12 * keep_last))


def clashing(low: Uint64Array, high: Uint64Array) -> Uint64Array:
    """Return a hash of three values only."""
    return (low % np.uint64(3)) << np.uint64(62)


@st.composite
def logs(draw: st.DrawFn) -> tuple[list[int], list[int], list[bool]]:
    """Keys, offsets that ascend with gaps, and which of the records are dead."""
    keys = draw(st.lists(st.integers(0, draw(st.sampled_from([1, 4, 60]))), min_size=1, max_size=120))
    steps = draw(st.lists(st.integers(1, 5), min_size=len(keys), max_size=len(keys)))
    dead = draw(st.lists(st.booleans(), min_size=len(keys), max_size=len(keys)))
    return keys, np.cumsum(steps).tolist(), dead


def last_ones(keys: list[int], offsets: list[int], dead: list[bool], keep_last: int) -> list[int]:
    """Return the offsets that a dictionary keeps."""
    of_key: dict[int, list[int]] = defaultdict(list)
    for key, offset, is_dead in zip(keys, offsets, dead, strict=True):
        if is_dead and keep_last > 1:
            of_key[key].clear()
        of_key[key].append(offset)
    return sorted(offset for ones in of_key.values() for offset in ones[-keep_last:])


@pytest.mark.parametrize("clash", [False, True])
@given(
    log=logs(),
    keep_last=st.integers(1, 3),
    room=st.sampled_from([1, 2, 7, 40, 1000]),
    step=st.integers(1, 50),
)
def test_the_last_of_each_key_stay(
    clash: bool, log: tuple[list[int], list[int], list[bool]], keep_last: int, room: int, step: int
) -> None:
    """While it has room, the map holds exactly the last records of each key."""
    keys, offsets, dead = log
    with mock.patch.object(offset_map, "_mix", clashing if clash else offset_map._mix):
        found = OffsetMap(size_of(room, keep_last), keep_last)
        assert found.capacity == room
        low = np.array(keys, np.uint64)
        high, at = low * np.uint64(7), 0
        while at < len(keys) and not found.is_full:
            part = slice(at, at + step)
            at += found.add(low[part], high[part], np.array(offsets[part]), np.array(dead[part]))
        assert at >= min(room, len(keys))
        found.finish()
        assert found.kept(0, offsets[-1] + 1).tolist() == last_ones(keys[:at], offsets[:at], dead[:at], keep_last)
        asked = np.arange(62, dtype=np.uint64)
        entries = found.find(asked, asked * np.uint64(7))
        assert [int(key) for key in asked if entries[int(key)] >= 0] == sorted(set(keys[:at]))
        for key in set(keys[:at]):
            mine = [offset for one, offset in zip(keys[:at], offsets[:at], strict=True) if one == key]
            assert int(found._offsets[entries[key]]) in mine


@given(log=logs(), keep_last=st.integers(2, 3), border=st.integers(0, 120))
def test_older_records_go_where_newer_ones_leave_no_place(
    log: tuple[list[int], list[int], list[bool]], keep_last: int, border: int
) -> None:
    """Records below the map, no more of a key than are kept, and those of the map: together the last ones stay."""
    keys, offsets, dead = log
    before = set(last_ones(keys[:border], offsets[:border], dead[:border], keep_last)) if border else set()
    older = [at for at, offset in enumerate(offsets[:border]) if offset in before]
    found = OffsetMap(size_of(1000, keep_last), keep_last)
    low = np.array(keys, np.uint64)
    found.add(low[border:], low[border:], np.array(offsets[border:], np.int64), np.array(dead[border:], np.bool_))
    found.finish()
    found.add_older(low[older], low[older], np.array([offsets[at] for at in older], np.int64))
    left = before - set(found.superseded().tolist())
    assert sorted(left | set(found.kept(0, 10_000).tolist())) == last_ones(keys, offsets, dead, keep_last)


def test_a_small_buffer_takes_one_entry() -> None:
    """Progress is made whatever the buffer: a map has room for one entry at least."""
    found = OffsetMap(1)
    one = np.array([1, 2], np.uint64)
    assert found.add(one, one, np.array([5, 6])) == 1
    assert found.is_full
