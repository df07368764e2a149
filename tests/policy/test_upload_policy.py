"""The choice of the next upload: in any state of the log, the manifest is complete, and few bytes are shipped twice."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from segmentlog.format.checkpoint import Compacted
from segmentlog.format.manifest import (
    Chunk,
    Manifest,
    Owner,
    ShippedPartition,
    ShippedSegment,
    ShippedTopic,
    Stored,
    Tail,
    decode_manifest,
    encode_manifest,
)
from segmentlog.policy.upload_policy import (
    GRANT_MIN,
    TAIL_BYTES,
    LocalLog,
    LocalSegment,
    extend_grant,
    grant_only_entry,
    manifest_entry,
    plan_upload,
    wasted_tails,
)
from segmentlog.records import EpochStart, LostRange

_RECORD_BYTES = 100


class Log:
    """A log of records of one size, and what was shipped of it so far; ``room_bytes`` is what a tail holds."""

    def __init__(self, room_bytes: int = TAIL_BYTES) -> None:
        self.room_bytes = room_bytes
        self.bases = [0]
        self.end_offset = 0
        self.uploading: dict[int, ShippedSegment] = {}
        self.uploaded: dict[int, ShippedSegment] = {}
        self.shipped: ShippedPartition | None = None
        self.tails: list[Tail] = []

    def local(self) -> LocalLog:
        """Return the log as it is on disk."""
        ends = [*self.bases[1:], self.end_offset]
        segments = [
            LocalSegment(base, end, (end - base) * _RECORD_BYTES, base != self.bases[-1])
            for base, end in zip(self.bases, ends, strict=True)
        ]
        epochs = (EpochStart(0, 0),)
        return LocalLog(0, 0, self.end_offset, epochs, (), Compacted(), False, 1, tuple(segments))

    def append(self, count: int) -> None:
        """Append ``count`` records."""
        self.end_offset += count

    def roll(self) -> None:
        """Begin a new segment with the next record."""
        if self.end_offset > self.bases[-1]:
            self.bases.append(self.end_offset)

    def upload(self) -> None:
        """Finish the uploads that were started."""
        self.uploaded.update(self.uploading)
        self.uploading.clear()

    def tick(self) -> bool:
        """Ship what can be shipped, and check what is said of it; whether it is all that there is."""
        local = self.local()
        before = self.shipped
        to_do = plan_upload(local, before, self.uploaded, before.chunks if before else (), room_bytes=self.room_bytes)
        for segment in to_do.segments_to_upload:
            stored = Stored(f"s{segment.base_offset}", segment.size_bytes, "0" * 16, "0" * 64)
            self.uploading[segment.base_offset] = ShippedSegment(segment.base_offset, segment.end_offset, stored)
        number, start, chunks = len(self.tails), 0, []
        for piece in to_do.pieces:
            chunks.append(
                Chunk(
                    piece.segment,
                    piece.position,
                    piece.size_bytes,
                    piece.base_offset,
                    piece.end_offset,
                    number,
                    start,
                    "",
                )
            )
            start += piece.size_bytes
        self.tails.append(Tail(number, Stored(f"t{number}", start, "0" * 16, "0" * 64)))
        assert start <= self.room_bytes or (len(to_do.pieces) == 1 and to_do.pieces[0].segment == self.bases[-1])
        self.shipped = manifest_entry(local, before, to_do, chunks, (), extend_grant(self.end_offset, 0, 0.0))
        self._check(local)
        assert before is None or self.shipped.end_offset >= before.end_offset
        return not to_do.is_incomplete

    def _check(self, local: LocalLog) -> None:
        """Check that each byte up to the shipped end is uploaded once, in the file that it belongs to."""
        shipped = self.shipped
        assert shipped is not None
        topic = ShippedTopic("0f2ea2a5-6b1c-4a4c-8d29-3f1d7c5f0b11", "t", {}, 1000, 1, (shipped,))
        decode_manifest(
            encode_manifest(Manifest("5" * 32, Owner(1, "a", "b", 1), 0, "n", 0, 1, (topic,), tuple(self.tails)))
        )
        offset = 0
        for segment in shipped.segments:
            assert segment.base_offset == offset
            assert segment.base_offset in self.bases
            offset = segment.end_offset
        for chunk in shipped.chunks:
            assert chunk.base_offset == offset
            assert chunk.position == (offset - chunk.segment) * _RECORD_BYTES
            assert chunk.size_bytes == (chunk.end_offset - offset) * _RECORD_BYTES
            assert chunk.segment == max(base for base in self.bases if base <= offset)
            offset = chunk.end_offset
        assert offset == shipped.end_offset <= local.end_offset
        active = next(one for one in (*self.bases, self.end_offset) if one >= shipped.active_base)
        assert shipped.active_base == active <= shipped.end_offset


_steps = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(1, 40)), st.just(("roll",)), st.just(("upload",)), st.just(("tick",))
    ),
    max_size=40,
)


@given(_steps, st.sampled_from([TAIL_BYTES, 3000, 500]))
def test_what_is_told_is_whole_and_comes_to_all_of_it(steps: list[tuple[Any, ...]], room_bytes: int) -> None:
    """After every tick, the manifest has a state that the log had; after the last append, a few ticks ship all."""
    log = Log(room_bytes)
    with mock.patch("segmentlog.policy.upload_policy.TAIL_BYTES", room_bytes):
        for what, *args in steps:
            getattr(log, what)(*args)
        for _ in range(2):
            log.tick()
            log.upload()
        assert log.tick()
    assert log.shipped is not None
    assert log.shipped.end_offset == log.end_offset
    assert [segment.base_offset for segment in log.shipped.segments] == log.bases[:-1]
    assert {chunk.segment for chunk in log.shipped.chunks} <= {log.bases[-1]}


@pytest.mark.parametrize("each", [1, 7])
def test_no_byte_is_shipped_more_often_than_the_logarithm(each: int) -> None:
    """A segment that grows a little at a time: few chunks at any time, and a few times its bytes in all."""
    log, ticks = Log(), 400
    for _ in range(ticks):
        log.append(each)
        log.tick()
        assert log.shipped is not None
        assert len(log.shipped.chunks) <= 1 + math.log2(ticks)
    put = sum(tail.object.size_bytes for tail in log.tails)
    assert put <= (1 + math.log2(ticks)) * log.end_offset * _RECORD_BYTES


def test_what_was_shipped_stays_until_what_stands_for_it_is_there() -> None:
    """Segments that were compacted here: the entry is the old one until it can be replaced as a whole."""
    log = Log(500)
    log.append(3)
    log.roll()
    log.append(3)
    for _ in range(3):
        log.tick()
        log.upload()
    before = log.shipped
    assert before is not None
    local = log.local()
    again = plan_upload(local, before, {}, before.chunks, is_unchanged=lambda chunk: False, room_bytes=200)
    assert again.is_incomplete
    assert (again.segments, again.kept_chunks, again.pieces) == (before.segments, before.chunks, ())
    assert again.end_offset == before.end_offset
    assert [segment.base_offset for segment in again.segments_to_upload] == [0]


def test_an_end_that_was_given_up_may_be_nearer() -> None:
    """A truncation begins a new epoch: then the log ends where it ends now."""
    log = Log()
    log.append(10)
    log.tick()
    before = log.shipped
    local = LocalLog(
        0, 0, 4, (EpochStart(0, 0), EpochStart(1, 4)), (), Compacted(), False, 2, (LocalSegment(0, 4, 400, False),)
    )
    to_do = plan_upload(local, before, {}, before.chunks if before else (), is_unchanged=lambda chunk: False)
    assert (to_do.end_offset, to_do.is_incomplete) == (4, False)
    assert [(piece.position, piece.size_bytes) for piece in to_do.pieces] == [(0, 400)]
    made = manifest_entry(local, before, to_do, [Chunk(0, 0, 400, 0, 4, 1, 0, "")], (), 0)
    assert before is not None
    assert made.generation == before.generation + 1
    assert made.offset_grant == before.offset_grant


def test_ceilings_are_raised_ahead() -> None:
    """They are raised at half of the window, which is two minutes of appends or more, and never fall."""
    offset_grant = extend_grant(0, 0, 0.0)
    assert offset_grant == GRANT_MIN
    assert extend_grant(GRANT_MIN // 2, offset_grant, 0.0) == offset_grant
    assert extend_grant(GRANT_MIN // 2 + 1, offset_grant, 0.0) == GRANT_MIN // 2 + 1 + GRANT_MIN
    assert extend_grant(100, 0, 1e6) == 100 + 120 * 10**6
    assert grant_only_entry(3, 77, EpochStart(0, 0)).offset_grant == 77


def test_tails_that_hold_little_are_emptied() -> None:
    """Only large tails are emptied; a tail without references is deleted anyway."""
    size = 1 << 20
    chunks = [
        Chunk(0, 0, size // 5, 0, 1, 1, 0, ""),
        Chunk(0, 0, size // 3, 0, 1, 2, 0, ""),
        Chunk(0, 0, 10, 0, 1, 4, 0, ""),
    ]
    assert wasted_tails({1: size, 2: size, 3: size, 4: 1000}, chunks) == {1}


@pytest.mark.parametrize("begun_offset", [0, 3, 6])
def test_a_compacted_segment_goes_with_what_took_the_place_of_its_records(begun_offset: int) -> None:
    """If only the copy is uploaded and the next segment is not, the manifest waits: it would lack records."""
    compacted = Compacted(begun_offset=begun_offset)
    segments = (LocalSegment(0, 3, 100, True), LocalSegment(3, 6, 5 << 20, True), LocalSegment(6, 9, 300, False))
    local = LocalLog(0, 0, 9, (EpochStart(0, 0),), (), compacted, False, 2, segments)
    copies = {
        segment.base_offset: ShippedSegment(
            segment.base_offset, segment.end_offset, Stored("s", segment.size_bytes, "0" * 16, "0" * 64)
        )
        for segment in segments[:2]
    }
    before = grant_only_entry(0, 100, EpochStart(0, 0))
    for shipped in (None, before):
        waits = plan_upload(local, shipped, {0: copies[0]})
        assert waits.is_incomplete
        assert waits.end_offset == (0 if begun_offset > 3 else 3)
        assert len(waits.segments) == (begun_offset <= 3)
        assert [segment.base_offset for segment in waits.segments_to_upload] == [3]
        made = manifest_entry(local, shipped, waits, (), (), 100)
        assert (made.end_offset, made.active_base) == (waits.end_offset, waits.end_offset)
        whole = plan_upload(local, shipped, copies)
        assert (whole.end_offset, whole.is_incomplete) == (9, False)


@pytest.mark.parametrize("same", [True, False])
def test_another_generation_tells_that_chunks_were_replaced(same: bool) -> None:
    """A segment that was uploaded in chunks was compacted: its file is another one, of the same size or smaller."""
    segments = (LocalSegment(0, 4, 400, True), LocalSegment(4, 6, 100, False))
    local = LocalLog(0, 0, 6, (EpochStart(0, 0),), (), Compacted(), False, 2, segments)
    put = [Chunk(0, 0, 400, 0, 4, 0, 0, ""), Chunk(4, 0, 100, 4, 6, 0, 400, "")]
    first = manifest_entry(local, None, plan_upload(local, None, {}), put, (), 100)
    again = plan_upload(local, first, {}, first.chunks, is_unchanged=lambda chunk: same or chunk.segment > 0)
    chunks = [Chunk(piece.segment, 0, piece.size_bytes, 0, 4, 1, 0, "") for piece in again.pieces]
    assert len(chunks) == (not same)
    made = manifest_entry(local, first, again, chunks, (), 100, is_unchanged=lambda chunk: same or chunk.segment > 0)
    assert made.generation == first.generation + (not same)
    trimmed = replace(local, log_start_offset=4, segments=segments[1:])
    kept = plan_upload(trimmed, first, {}, first.chunks, is_unchanged=lambda chunk: chunk.segment > 0)
    made = manifest_entry(trimmed, first, kept, (), (), 100, is_unchanged=lambda chunk: chunk.segment > 0)
    assert made.generation == first.generation, "what retention deletes is no replacement"


@pytest.mark.parametrize("same", [True, False])
def test_a_chunk_before_the_log_start_counts_while_its_segment_stays(same: bool) -> None:
    """A reader keeps the file of the segment and only extends it, although the log starts in its middle."""
    segments = (LocalSegment(0, 4, 300, True),)
    local = LocalLog(0, 2, 4, (EpochStart(0, 0),), (), Compacted(), False, 0, segments)
    first = manifest_entry(
        local, None, plan_upload(local, None, {}), [Chunk(0, 0, 139, 0, 2, 0, 0, "")], (), 100
    )  # fmt: skip
    again = plan_upload(local, first, {}, first.chunks, is_unchanged=lambda chunk: same)
    chunks = [Chunk(piece.segment, 0, piece.size_bytes, 2, 4, 1, 0, "") for piece in again.pieces]
    made = manifest_entry(local, first, again, chunks, (), 100, is_unchanged=lambda chunk: same)
    assert made.generation == first.generation + (not same)


def test_what_is_kept_keeps_what_it_had_lost() -> None:
    """A truncation goes through a lost range, and the remaining segments are not uploaded yet.

    Until then the manifest keeps the old range, which explains the offsets that its segments lack.
    """
    before = ShippedPartition(
        number=0, offset_grant=100, log_start_offset=0, end_offset=15, generation=1,
        epochs=(EpochStart(0, 0), EpochStart(1, 15)), lost_ranges=(LostRange(8, 15, 1, "", 0),), active_base=15,
        segments=(ShippedSegment(0, 15, Stored("s", 400, "0" * 16, "0" * 64)),),
    )  # fmt: skip
    segments = (LocalSegment(0, 16, 5 << 20, True), LocalSegment(16, 16, 0, False))
    epochs = (*before.epochs, EpochStart(2, 16))
    local = LocalLog(0, 0, 16, epochs, (LostRange(7, 16, 2, "", 0),), Compacted(), False, 3, segments)
    waits = plan_upload(local, before, {})
    assert [segment.base_offset for segment in waits.segments_to_upload] == [0]
    assert manifest_entry(local, before, waits, (), (), 200) == replace(before, offset_grant=200)
    copy = ShippedSegment(0, 16, Stored("t", 5 << 20, "1" * 16, "1" * 64))
    made = manifest_entry(local, before, plan_upload(local, before, {0: copy}), (), (), 200)
    assert (made.epochs, made.lost_ranges, made.end_offset) == (epochs, local.lost_ranges, 16)


def test_a_segment_that_lies_there_alone_is_never_put_in_chunks() -> None:
    """The manifest keeps a segment that exists only in the object store while an upload before it is missing."""
    log = Log()
    for _ in range(3):
        log.append(10)
        log.roll()
        log.tick()
        log.upload()
    log.append(5)
    assert log.tick()
    before = log.shipped
    assert before is not None
    there = log.local()
    first, second, *rest = there.segments
    compacted = replace(first, size_bytes=first.size_bytes // 2, stamp=(7, 7, 7))
    uploaded = {base: one for base, one in log.uploaded.items() if base != first.base_offset}
    for remote in ("", "s10"):
        local = replace(there, segments=(compacted, replace(second, remote=remote), *rest))
        to_do = plan_upload(local, before, uploaded, before.chunks)
        assert to_do.segments_to_upload == (compacted,)
        assert to_do.keeps_entry == bool(remote)
        said = manifest_entry(local, before, to_do, (), (), before.offset_grant)
        keys = {segment.log.key for segment in said.segments}
        assert ("s10" in keys) == bool(remote)
    uploaded[first.base_offset] = ShippedSegment(0, 10, Stored("new", 500, "0" * 16, "0" * 64))
    to_do = plan_upload(local, before, uploaded, before.chunks)
    assert [segment.log.key for segment in to_do.segments] == ["new", "s10", "s20"]
