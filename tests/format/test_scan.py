"""Walking over a segment, and getting past damage in it."""

from __future__ import annotations

import time
from typing import Any

import pytest
from batches import batch_bytes, columns, forge
from hypothesis import given
from hypothesis import strategies as st

from segmentlog.errors import CorruptBatch
from segmentlog.format.batch import HEADER_SIZE, MAGIC
from segmentlog.format.scan import ResumePoint, SegmentContext, looks_like_batch, scan_batches, skip_damage


def segment(*batches: bytes) -> tuple[memoryview, list[int]]:
    """(bytes of a segment, the position of each batch)."""
    positions, size = [], 0
    for one in batches:
        positions.append(size)
        size += len(one)
    return memoryview(b"".join(batches)), positions


def walked(view: memoryview, position: int = 0, **options: object) -> list[int]:
    """Return the base offsets of the batches up to the end of the view."""
    return [header.base_offset for _, header in scan_batches(view, position, len(view), "s.log", **options)]


@given(given=st.lists(columns(max_size=4), min_size=1, max_size=6), base_offset=st.integers(0, 2**40))
def test_a_walk_meets_every_batch_where_it_lies(given, base_offset):
    """Batches one after another are met in order, each at its position, with payloads checked or not."""
    batches, offset = [], base_offset
    for one in given:
        batches.append(batch_bytes(one, offset))
        offset += (one.offset_deltas or range(len(one)))[-1] + 1
    view, positions = segment(*batches)
    for payloads in (False, True):
        found = list(scan_batches(view, 0, len(view), payloads=payloads, expected_offset=base_offset))
        assert [position for position, _ in found] == positions
        assert found[-1][1].next_offset == offset


def test_a_walk_ends_at_the_end_position():
    """Bytes after the end of the log are not read, although the file has them."""
    view, positions = segment(batch_bytes([b"a"], 0), batch_bytes([b"b"], 1), b"\xff" * 500)
    assert [position for position, _ in scan_batches(view, 0, positions[2])] == positions[:2]
    assert list(scan_batches(view, positions[2], positions[2])) == []


def test_a_batch_that_reaches_beyond_the_end_position_is_torn():
    """A batch whose last bytes are after the end of the log is incomplete, although the file has them."""
    view, positions = segment(batch_bytes([b"a"], 0), batch_bytes([b"b"], 1))
    with pytest.raises(CorruptBatch) as caught:
        list(scan_batches(view, 0, len(view) - 1, "s.log"))
    assert caught.value.position == positions[1]


def test_gaps_between_offsets_are_met_and_passed():
    """Compaction leaves gaps between batches; a walk goes over them."""
    view, _ = segment(batch_bytes([b"a"], 5), batch_bytes([b"b"], 100), batch_bytes([b"c"], 101))
    assert walked(view, expected_offset=3) == [5, 100, 101]


@pytest.mark.parametrize(
    ("second_offset", "expected"), [(9, "a base offset of 12 or more"), (11, "a base offset of 12 or more")]
)
def test_offsets_that_go_back_are_damage(second_offset, expected):
    """A batch that begins before the end of the previous one raises at its position; the previous one was returned."""
    view, positions = segment(batch_bytes([b"a", b"b"], 10), batch_bytes([b"c"], second_offset))
    met = []
    with pytest.raises(CorruptBatch, match=expected) as caught:
        met.extend(header.base_offset for _, header in scan_batches(view, 0, len(view), "s.log"))
    assert (caught.value.path, caught.value.position, caught.value.offset) == ("s.log", positions[1], second_offset)


def test_the_first_batch_must_begin_at_the_expected_offset_or_after_it():
    """A segment that begins with older offsets than its name says is damage; newer ones are a gap."""
    view, _ = segment(batch_bytes([b"a"], 10))
    assert walked(view, expected_offset=10) == walked(view, expected_offset=9) == [10]
    with pytest.raises(CorruptBatch, match="11 or more"):
        walked(view, expected_offset=11)


def test_epochs_that_go_back_are_damage():
    """Epochs rise or stay; a batch of an older epoch after a newer one raises at its position."""
    view, positions = segment(
        batch_bytes([b"a"], 0, epoch=1), batch_bytes([b"b"], 1, epoch=4), batch_bytes([b"c"], 2, epoch=3)
    )
    assert walked(view[: positions[2]]) == [0, 1]
    with pytest.raises(CorruptBatch, match="an epoch of 4 or more") as caught:
        walked(view)
    assert caught.value.position == positions[2]


def test_payloads_are_checked_when_asked_for():
    """A walk over headers skips a damaged payload; a walk that checks payloads raises at its position."""
    first, second = batch_bytes([b"aaaa"], 0), batch_bytes([b"bbbb"], 1)
    view, positions = segment(first, second[:-1] + b"?")
    assert walked(view) == [0, 1]
    with pytest.raises(CorruptBatch, match="payload checksum") as caught:
        walked(view, payloads=True)
    assert caught.value.position == positions[1] + HEADER_SIZE


# ---------------------------------------------------------------- over damage


def resumed(
    view: bytes | bytearray | memoryview, position: int, expected_offset: int = 0, **around: Any
) -> ResumePoint:
    """Return where the batches continue after the damaged one at ``position``."""
    if isinstance(known := around.pop("known", ()), list):
        around["known"] = lambda behind: [one for one in known if one[0] > behind]
    return skip_damage(memoryview(view), position, expected_offset, SegmentContext(**around))


def three(*values: bytes, codec: int = 0) -> tuple[bytearray, list[int]]:
    """Return three batches, the second with these values, and their positions and the end."""
    middle = list(values) or [b"one", b"two"]
    view, positions = segment(
        batch_bytes([b"a"], 9), batch_bytes(middle, 10, codec=codec), batch_bytes([b"c"], 10 + len(middle))
    )
    return bytearray(view), [*positions, len(view)]


def test_what_is_wrong_in_a_payload_or_in_a_header_costs_one_batch():
    """After any change of any byte of a batch, the next batch is found, without an index."""
    inner = batch_bytes([b"forged"], 11)
    data, (_, position, following, _) = three(b"one", b"holds " + inner)
    for at in range(position, following):
        for bits in (1, 0x80, 0xFF):
            data[at] ^= bits
            assert resumed(data, position, 10) == (following, 12), at - position
            data[at] ^= bits


@given(given=st.binary(max_size=400), start=st.integers(0, 95), size=st.integers(1, 95))
def test_an_intact_payload_tells_where_a_damaged_header_ended(given, start, size):
    """Any part of the header may be wrong, except its magic and the payload's checksum."""
    inner = batch_bytes([b"forged"], 11)
    data, (_, position, following, _) = three(b"one", given + inner)
    head = bytearray(data[position : position + HEADER_SIZE])
    for at in range(start, min(start + size, HEADER_SIZE)):
        if at >= 4 and not 80 <= at < 88:
            head[at] ^= 0x5A
    data[position : position + HEADER_SIZE] = head
    assert resumed(data, position, 10) == (following, 12)


@pytest.mark.parametrize("size", [0, 1, 7, 46, 60, 2**31, 2**32 - 96, 2**32 - 1])
def test_a_size_that_leads_elsewhere_is_not_followed(size):
    """Back to the start, into a value, beyond the end: the checksums tell the true one, with a damaged payload too."""
    inner = batch_bytes([b"forged"], 12)
    data, (_, position, following, _) = three(b"one", b"holds " + inner + b" and more")
    for lead in (size, data.find(inner) - position - HEADER_SIZE):
        for spoil in (position + HEADER_SIZE, following - 1):
            broken = bytearray(data)
            broken[position + 56 : position + 60] = lead.to_bytes(4, "little")
            assert resumed(broken, position, 10) == (following, 12)
            broken[spoil] ^= 1
            assert resumed(broken, position, 10) == (following, 12)


def gone(*values: bytes) -> tuple[bytearray, int, int]:
    """(segment whose second batch has no header any more, its position, that of the third)."""
    data, (_, position, following, _) = three(*values)
    data[position : position + HEADER_SIZE] = bytes(HEADER_SIZE)
    return data, position, following


def test_without_a_header_what_follows_is_not_believed():
    """A batch after the damage cannot be distinguished from one in its values: the rest of the file is skipped."""
    for inner in (b"", batch_bytes([b"forged"], 11)):
        data, position, _ = gone(b"one", inner)
        assert resumed(data, position, 10) == (len(data), None)


def test_an_index_tells_where_batches_begin():
    """The first entry after the damage counts if a batch with its offset is at its position; wrong entries do not."""
    inner = batch_bytes([b"forged"], 11)
    data, position, following = gone(b"one", inner)
    lie = data.find(inner)
    assert resumed(data, position, 10, known=[(0, 9), (following, 12), (len(data), 13)]) == (following, 12)
    assert resumed(data, position, 10, known=[(position + 5, 11), (following, 12)]) == (following, 12)
    for entry in ((lie, 12), (following, 11), (following + 1, 12), (len(data), 13), (len(data) + 5, 13)):
        assert resumed(data, position, 10, known=[entry]) == (len(data), None)
    assert resumed(data, position, 10, known=[(following, 12)], end_offset=12) == (len(data), None)


def test_a_run_longer_than_any_batch_is_believed():
    """Batches after the run cannot be in a value; the run itself is skipped."""
    inner = b"".join(batch_bytes([b"forged"], 11 + at) for at in range(3))
    many = [batch_bytes([b"%d" % at], 12 + at) for at in range(30)]
    data, position, following = gone(b"one", inner)
    data = data[:following] + b"".join(many)
    size = len(many[0])
    found = resumed(data, position, 10, batch_limit=5 * size)
    assert found.offset is not None
    assert found.position == following + (found.offset - 12) * size
    assert following < found.position <= following + 7 * size
    assert resumed(data, position, 10, batch_limit=40 * size) == (len(data), None)


def test_a_claim_counts_when_it_leads_on_without_a_hole():
    """A damaged header whose payload is damaged too is believed, if batches lead from its end to what is known."""
    inner = batch_bytes([b"forged"], 12)
    data, (_, position, following, _) = three(b"one", b"holds " + inner)
    data[position + 80] ^= 1  # the payload's checksum
    data[position + 8 + HEADER_SIZE] ^= 1
    data[position + 32] ^= 1
    assert resumed(data, position, 10, end_offset=13) == (following, 12)
    assert resumed(data, position, 10, end_offset=14) == (len(data), None), "offsets are missing at the end"
    lead = data.find(inner) - position - HEADER_SIZE
    data[position + 56 : position + 64] = lead.to_bytes(4, "little") * 2
    assert resumed(data, position, 10, end_offset=13) == (len(data), None)


def test_several_damaged_batches():
    """Damaged batches in a row: each batch with a valid end is skipped with its offsets."""
    data, (_, position, following, _) = three(b"one", b"two")
    data[position] ^= 1
    data[following] ^= 1
    assert resumed(data, position, 10) == (following, 12), "its own header is known by then"
    assert resumed(data, following, 12) == (len(data), None)
    data[position + 1] ^= 1
    data[position + 24] ^= 1
    assert resumed(data, position, 10) == (len(data), None)


def test_a_record_full_of_magics_does_not_stall_the_search():
    """Half a megabyte of magics is skipped in time that grows with its length, not with its square."""
    data, (_, position, following, _) = three(b"one", MAGIC * (128 << 10))
    for spoiled, found in ((56, (following, 12)), (80, (following, 12)), (32, (len(data), None))):
        data[position + spoiled] ^= 1
        started = time.process_time()
        assert resumed(data, position, 10) == found
        assert time.process_time() - started < 4


@given(before=st.binary(max_size=300), after=st.binary(max_size=100), given=columns(max_size=3))
def test_what_looks_like_a_batch_is_found_for_a_person(before, after, given):
    """A batch is found at its first byte, with any bytes around it; an incomplete batch is not found."""
    batch = batch_bytes(given, 5)
    view = memoryview(before + batch + after)
    assert looks_like_batch(view, 0, len(view)) == len(before)
    assert looks_like_batch(view, len(before) + 1, len(view)) is None
    assert looks_like_batch(view, 0, len(view) - len(after) - 1) is None
    for fake in (MAGIC * 100, batch[:-1], batch[:-1] + bytes([batch[-1] ^ 1]), forge(batch, payload_checksum=1)):
        fakes = memoryview(fake + bytes([batch[-1] ^ 2]) + batch)  # not the byte that would make it whole
        assert looks_like_batch(fakes, 0, len(fakes)) == len(fake) + 1


@pytest.mark.parametrize("gap", [0, 1, (1 << 20) - 3, (1 << 20) - 2, (1 << 20) - 1, 1 << 20, (1 << 20) + 1])
def test_a_batch_is_found_across_the_steps_of_the_search(gap):
    """The search goes megabyte by megabyte; a batch that begins on a border is found like any other."""
    view = memoryview(bytes(gap) + batch_bytes([b"x"], 3))
    assert looks_like_batch(view, 0, len(view)) == gap
