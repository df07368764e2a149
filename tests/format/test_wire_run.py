"""Runs of Kafka's batches: found and checked once, taken many times."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wire import stored

from segmentlog.format.batch import HEADER_SIZE
from segmentlog.format.wire_encode import encode_wire_batch
from segmentlog.format.wire_run import WireRun, scan_wire_run

ALL = 1 << 62


def lying(sizes: Sequence[int], base_offset: int = 0) -> tuple[bytes, list[bytes]]:
    """Return (batches of a record of these sizes as a log stores them, the same batches as a client gets them)."""
    found = []
    for at, size in enumerate(sizes):
        wire = encode_wire_batch(None, [b"v" * size], None, np.array([at], np.int64), base_offset=0, epoch=0)
        found.append(stored(wire, base_offset + at))
    return b"".join(found), [one[HEADER_SIZE:] for one in found]


def taken(run: WireRun, view: memoryview, first: int, stop: int) -> bytes:
    """Return the bytes of these batches."""
    return b"".join(run.take(view, first, stop))


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 300) | st.just(5000), min_size=1, max_size=40) | st.lists(st.just(77), min_size=1),
    st.data(),
)
def test_every_part_of_a_run_is_what_lies_there(sizes: list[int], data: st.DataObject) -> None:
    """For any sizes, start and end, a part of the run has the bytes that are stored."""
    log, sent = lying(sizes)
    view = memoryview(log)
    run, _ = scan_wire_run(view, 0, len(view), 0, 0, ALL, ALL)
    assert run is not None
    assert (run.batch_count, run.base_offset, run.end_offset) == (len(sizes), 0, len(sizes))
    assert (run.position, run.end_position) == (0, len(view))
    offset = data.draw(st.integers(0, len(sizes) - 1))
    bound = data.draw(st.integers(offset, len(sizes) + 3))
    room = data.draw(st.integers(0, 3000) | st.just(ALL))
    first, stop, is_full = run.find(offset, bound, room)
    wanted = []
    for one in sent[offset:bound]:
        room -= len(one)
        if room < 0:
            break
        wanted.append(one)
    assert (first, stop) == (offset, offset + len(wanted))
    assert taken(run, view, first, stop) == b"".join(wanted)
    assert is_full == (offset + len(wanted) < min(bound, len(sent)))
    walked, is_full = scan_wire_run(view, 0, len(view), 0, offset, bound, sum(map(len, wanted)))
    assert is_full == (offset + len(wanted) < min(bound, len(sent)))
    assert (walked.batch_count if walked else 0) == len(wanted)
    if walked is not None:
        assert taken(walked, view, 0, walked.batch_count) == b"".join(wanted)


def test_one_very_long_batch_among_small_ones() -> None:
    """Small batches are not copied as if each were as long as the longest, when that is far longer."""
    sizes = [10] * 2000 + [400_000] + [20] * 2000
    log, sent = lying(sizes)
    view = memoryview(log)
    run, _ = scan_wire_run(view, 0, len(view), 0, 0, ALL, ALL)
    assert run is not None
    assert taken(run, view, 0, run.batch_count) == b"".join(sent)
    (alone,) = run.take(view, 2000, 2001)
    assert bytes(alone) == sent[2000]


def test_large_batches_are_not_copied() -> None:
    """They are views of the map."""
    log, sent = lying([10_000] * 20)
    view = memoryview(log)
    run, _ = scan_wire_run(view, 0, len(view), 0, 0, ALL, ALL)
    assert run is not None
    buffers = run.take(view, 3, 9)
    assert buffers == sent[3:9]
    assert all(isinstance(one, memoryview) and one.obj is log for one in buffers)


def test_runs_that_follow_are_joined() -> None:
    """Two consecutive parts of a run are joined to that run."""
    log, sent = lying([30, 9, 200, 8, 1], base_offset=100)
    view = memoryview(log)
    whole, _ = scan_wire_run(view, 0, len(view), 100, 100, ALL, ALL)
    head, _ = scan_wire_run(view, 0, len(view), 100, 100, 102, ALL)
    assert whole is not None
    assert head is not None
    tail, _ = scan_wire_run(view, head.end_position, len(view), 102, 102, ALL, ALL)
    assert tail is not None
    joined = head.joined(tail)
    assert joined.position == whole.position
    assert joined.end_position == whole.end_position
    assert joined.offsets.tolist() == whole.offsets.tolist()
    assert joined.sizes.tolist() == whole.sizes.tolist()
    assert taken(joined, view, 1, 4) == b"".join(sent[1:4])


@pytest.mark.parametrize("seed", range(3))
def test_a_walk_ends_before_damage(seed: int) -> None:
    """If any byte of a batch changes, the run has the batches before it, and not that batch."""
    log, sent = lying([5, 60, 0, 33])
    begin = HEADER_SIZE * 2 + len(sent[0]) + len(sent[1])
    chosen = random.Random(seed)
    for at in range(begin, begin + HEADER_SIZE + len(sent[2])):
        damaged = bytearray(log)
        damaged[at] ^= 1 << chosen.randrange(8)
        run, _ = scan_wire_run(memoryview(damaged), 0, len(damaged), 0, 0, ALL, ALL)
        assert run is not None
        assert run.batch_count == 2, at


def test_offsets_that_are_far_apart() -> None:
    """Offsets that do not fit into half the bytes are kept in whole ones; a lookup gives the same results."""
    offsets = [7, 8, 2**33, 2**40, 2**62, 2**62 + 1]
    sizes = [0, 100, 200, 300, 400, 500]
    run = WireRun.of(0, offsets, sizes)
    near = WireRun.of(0, [7, 8, 9, 10, 11, 12], sizes)
    assert (run.base_offset, run.end_offset, run.offset_of(2)) == (7, 2**62 + 1, 2**33)
    assert (run.offsets.itemsize, near.offsets.itemsize) == (8, 4)
    for number, offset in enumerate(offsets[:-1]):
        assert run.find(offset, 2**63, 1 << 20) == (number, 5, False)
        assert run.find(7, offset, 1 << 20) == (0, number, False)
        assert near.find(7 + number, 2**63, 250) == (number, min(number + 2, 5), number < 3)
    assert run.find(2**40 - 1, 2**63, 100) == (2, 3, True)
    further = WireRun.of(run.end_position, [run.end_offset, run.end_offset + 9], [0, 50])
    assert run.joined(further).offset_of(-1) == run.end_offset + 9
