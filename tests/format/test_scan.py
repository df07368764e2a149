"""Walking over a segment, and getting past damage in it."""

from __future__ import annotations

import time

import pytest
from batches import batch_bytes, columns, forge
from hypothesis import given
from hypothesis import strategies as st

from segmentlog.errors import CorruptBatch
from segmentlog.format.batch import HEADER_SIZE, MAGIC
from segmentlog.format.scan import find_batch, walk


def segment(*batches: bytes) -> tuple[memoryview, list[int]]:
    """(bytes of a segment, the position of each batch)."""
    positions, size = [], 0
    for one in batches:
        positions.append(size)
        size += len(one)
    return memoryview(b"".join(batches)), positions


def walked(view: memoryview, position: int = 0, **options: object) -> list[int]:
    """Base offsets of the batches up to the end of the view."""
    return [header.base_offset for _, header in walk(view, position, len(view), "s.log", **options)]


@given(given=st.lists(columns(max_size=4), min_size=1, max_size=6), base_offset=st.integers(0, 2**40))
def test_a_walk_meets_every_batch_where_it_lies(given, base_offset):
    """Batches one after another are met in order, each at its position, with payloads checked or not."""
    batches, offset = [], base_offset
    for one in given:
        batches.append(batch_bytes(one, offset))
        offset += (one.offset_deltas or range(len(one)))[-1] + 1
    view, positions = segment(*batches)
    for payloads in (False, True):
        found = list(walk(view, 0, len(view), payloads=payloads, expected_offset=base_offset))
        assert [position for position, _ in found] == positions
        assert found[-1][1].next_offset == offset


def test_a_walk_ends_at_the_end_position():
    """What lies behind the end of the log is not looked at, though the file goes on."""
    view, positions = segment(batch_bytes([b"a"], 0), batch_bytes([b"b"], 1), b"\xff" * 500)
    assert [position for position, _ in walk(view, 0, positions[2])] == positions[:2]
    assert list(walk(view, positions[2], positions[2])) == []


def test_a_batch_that_reaches_beyond_the_end_position_is_torn():
    """A batch whose last bytes lie behind the end of the log is not whole, though the file has them."""
    view, positions = segment(batch_bytes([b"a"], 0), batch_bytes([b"b"], 1))
    with pytest.raises(CorruptBatch) as caught:
        list(walk(view, 0, len(view) - 1, "s.log"))
    assert caught.value.position == positions[1]


def test_gaps_between_offsets_are_met_and_passed():
    """Compaction leaves gaps between batches; a walk goes over them."""
    view, _ = segment(batch_bytes([b"a"], 5), batch_bytes([b"b"], 100), batch_bytes([b"c"], 101))
    assert walked(view, expected_offset=3) == [5, 100, 101]


@pytest.mark.parametrize(
    ("second_offset", "expected"), [(9, "a base offset of 12 or more"), (11, "a base offset of 12 or more")]
)
def test_offsets_that_go_back_are_damage(second_offset, expected):
    """A batch that begins before the one in front of it ended raises, at its position; the one before was met."""
    view, positions = segment(batch_bytes([b"a", b"b"], 10), batch_bytes([b"c"], second_offset))
    met = []
    with pytest.raises(CorruptBatch, match=expected) as caught:
        met.extend(header.base_offset for _, header in walk(view, 0, len(view), "s.log"))
    assert (caught.value.path, caught.value.position, caught.value.offset) == ("s.log", positions[1], second_offset)


def test_the_first_batch_must_begin_at_the_expected_offset_or_after_it():
    """A segment that begins with older offsets than its name says is damage; newer ones are a gap."""
    view, _ = segment(batch_bytes([b"a"], 10))
    assert walked(view, expected_offset=10) == walked(view, expected_offset=9) == [10]
    with pytest.raises(CorruptBatch, match="11 or more"):
        walked(view, expected_offset=11)


def test_epochs_that_go_back_are_damage():
    """Epochs rise or stay; a batch of an older epoch behind a newer one raises, at its position."""
    view, positions = segment(
        batch_bytes([b"a"], 0, epoch=1), batch_bytes([b"b"], 1, epoch=4), batch_bytes([b"c"], 2, epoch=3)
    )
    assert walked(view[: positions[2]]) == [0, 1]
    with pytest.raises(CorruptBatch, match="an epoch of 4 or more") as caught:
        walked(view)
    assert caught.value.position == positions[2]


def test_payloads_are_checked_when_asked_for():
    """A walk over headers passes a damaged payload; one that checks payloads raises at it."""
    first, second = batch_bytes([b"aaaa"], 0), batch_bytes([b"bbbb"], 1)
    view, positions = segment(first, second[:-1] + b"?")
    assert walked(view) == [0, 1]
    with pytest.raises(CorruptBatch, match="payload checksum") as caught:
        walked(view, payloads=True)
    assert caught.value.position == positions[1] + HEADER_SIZE


@given(
    before=st.binary(max_size=300),
    after=st.binary(max_size=100),
    given=columns(max_size=3),
    base_offset=st.integers(0, 2**40),
)
def test_the_next_batch_is_found_behind_any_bytes(before, after, given, base_offset):
    """Whatever bytes lie in front of a batch, it is found, at its first byte."""
    view = memoryview(before + batch_bytes(given, base_offset) + after)
    assert find_batch(view, 0, len(view), base_offset) == len(before)
    assert find_batch(view, len(before), len(view), 0) == len(before)
    assert find_batch(view, len(before) + 1, len(view), 0) is None
    assert find_batch(view, 0, len(view), base_offset + 1) is None
    assert find_batch(view, 0, len(view) - len(after) - 1, 0) is None, "cut short by the end"


@pytest.mark.parametrize("gap", [0, 1, (1 << 20) - 3, (1 << 20) - 2, (1 << 20) - 1, 1 << 20, (1 << 20) + 1])
def test_a_batch_is_found_across_the_steps_of_the_search(gap):
    """The search goes megabyte by megabyte; a batch that begins on a border is found like any other."""
    view = memoryview(bytes(gap) + batch_bytes([b"x"], 3))
    assert find_batch(view, 0, len(view), 3) == gap


def test_bytes_of_a_record_do_not_pass_for_a_batch():
    """A record that holds an older batch, whole and valid, is not mistaken for one behind a damaged header."""
    inner = batch_bytes([b"a copy of an old batch"], 5)
    outer, following = bytearray(batch_bytes([inner], 10)), batch_bytes([b"next"], 11)
    outer[0] ^= 1
    view = memoryview(bytes(outer) + following)
    assert inner in bytes(view)
    assert find_batch(view, 1, len(view), 10) == len(outer)


@pytest.mark.parametrize(
    "fake",
    [
        MAGIC * 100,
        batch_bytes([b"x"], 20)[:-1],
        batch_bytes([b"x"], 20)[:-1] + b"?",
        forge(batch_bytes([b"x"], 20), payload_checksum=1),
        forge(batch_bytes([b"x"], 20), record_count=0),
    ],
    ids=["magic", "cut", "flipped", "wrong checksum", "absurd"],
)
def test_what_looks_like_a_batch_is_passed_over(fake):
    """The magic alone, torn, damaged and absurd batches are no place to go on at."""
    real = batch_bytes([b"real"], 30)
    view = memoryview(fake + real)
    assert find_batch(view, 0, len(view), 10) == len(fake)


def test_a_record_full_of_magics_does_not_stall_the_search():
    """Half a megabyte of nothing but magics is passed in time that grows with its length, not its square."""
    real = batch_bytes([b"real"], 30)
    fake = MAGIC * (128 << 10)
    view = memoryview(fake + bytes(1 << 20) + real)
    started = time.process_time()
    assert find_batch(view, 0, len(view), 0) == len(view) - len(real)
    assert time.process_time() - started < 4  # copying a megabyte a magic took 10
