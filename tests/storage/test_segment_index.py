"""A segment's index says the same however it came about, and damage to its files costs time, never a wrong answer."""

from __future__ import annotations

import errno
import functools
import os
import threading
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from batches import batch_bytes
from hypothesis import example, given
from hypothesis import strategies as st

from segmentlog.format.file_names import INDEX_SUFFIX, LOG_SUFFIX, TIME_INDEX_SUFFIX
from segmentlog.format.index_file import MAX_RELATIVE
from segmentlog.storage.fs import FileSystem
from segmentlog.storage.segment_index import SegmentIndex
from segmentlog.testing.fault_injection import FaultyFileSystem
from segmentlog.testing.interrupts import interrupt_at, list_points

INTERVAL = 300
SUFFIXES = (INDEX_SUFFIX, TIME_INDEX_SUFFIX)


class Batch(NamedTuple):
    """One batch of a segment as the oracle knows it."""

    position: int
    base_offset: int
    next_offset: int
    max_timestamp: int
    size_bytes: int


class Segment(NamedTuple):
    """The bytes of a segment, and a plain list of its batches."""

    base_offset: int
    view: memoryview
    batches: list[Batch]

    @property
    def end_offset(self) -> int:
        return self.batches[-1].next_offset if self.batches else self.base_offset


def make_segment(shape: list[tuple[int, int, int, int]], base_offset: int) -> Segment:
    """Return a segment of batches given as (records, size of their values, gap in front, timestamp)."""
    data, found, offset = b"", [], base_offset
    for records, size, gap, timestamp in shape:
        offset += gap
        one = batch_bytes([b"v" * size] * records, offset, timestamps=[timestamp] * records)
        found.append(Batch(len(data), offset, offset + records, timestamp, len(one)))
        data, offset = data + one, offset + records
    return Segment(base_offset, memoryview(data), found)


SHAPE = [(1 + at % 3, 20 * (at % 5), at % 7 == 0, 1000 + (at * 37) % 101) for at in range(60)]
EXAMPLE = make_segment(SHAPE, 5000)


def new_index(
    folder: Path | None, segment: Segment, interval: int = INTERVAL, fs: FileSystem | None = None
) -> SegmentIndex:
    """Return an empty index, which writes files only if it has a folder."""
    if folder is not None:
        (folder / f"segment{LOG_SUFFIX}").touch()
    stem = f"{folder}/segment"
    return SegmentIndex(fs or FileSystem(), stem, segment.base_offset, interval, writable=folder is not None)


def observe(index: SegmentIndex, batches: list[Batch]) -> None:
    """Update the index as an appender does."""
    for one in batches:
        index.observe(*one)


def catch_up(index: SegmentIndex, segment: Segment, end: int | None = None) -> None:
    """Update the index from the log, as a reader does."""
    index.catch_up(segment.view, len(segment.view) if end is None else end)


def as_bytes(index: SegmentIndex) -> tuple[bytes, bytes]:
    """Return the entries as the files would hold them."""
    offsets, times = index.entries()
    return offsets.tobytes(), times.tobytes()


def files(folder: Path) -> list[Path]:
    """Return the two files of an index."""
    return [folder / f"segment{suffix}" for suffix in SUFFIXES]


def reference(segment: Segment, interval: int = INTERVAL) -> list[tuple[int, int, int]]:
    """Return (base offset, position, largest timestamp before it) of each entry that the rule demands."""
    entries, last, largest = [], 0, 0
    for one in segment.batches:
        if one.position - last >= interval:
            entries.append((one.base_offset, one.position, largest))
            last = one.position
        largest = max(largest, one.max_timestamp)
    return entries


def assert_right(index: SegmentIndex, segment: Segment, entries: list[tuple[int, int, int]]) -> None:
    """Compare every lookup with a search through the plain list."""
    start = (segment.base_offset, 0, -1)
    for offset in range(segment.base_offset - 2, segment.end_offset + 3):
        base_offset, position, _ = max([start, *(one for one in entries if one[0] <= offset)])
        assert index.position_for_offset(offset) == (position, base_offset)
    for timestamp in sorted({max(at + step, 0) for _, _, at in entries for step in (-1, 0, 1)} | {2**63 - 1}):
        base_offset, position, _ = max([start, *(one for one in entries if one[2] < timestamp)])
        assert index.position_for_timestamp(timestamp) == (position, base_offset)
        before = [one.max_timestamp for one in segment.batches if one.position < position]
        assert max(before, default=-1) < timestamp, "a record that late lies in front of where the search begins"


shapes = st.lists(st.tuples(st.integers(1, 3), st.integers(0, 80), st.integers(0, 4), st.integers(0, 30)), max_size=40)


# ---------------------------------------------------------------- lookups


@given(shape=shapes, base_offset=st.integers(0, 2**62), interval=st.sampled_from([1, 150, 300, 1000, 100_000]))
@example(shape=[], base_offset=7, interval=1)
def test_lookups_are_those_of_a_plain_list(shape, base_offset, interval):
    """Offsets and timestamps are found where a search through all entries finds them, near the ends as well."""
    segment = make_segment(shape, base_offset)
    index = new_index(None, segment, interval)
    observe(index, segment.batches)
    assert_right(index, segment, reference(segment, interval))
    assert index.max_timestamp == max((one.max_timestamp for one in segment.batches), default=0)


def test_lookups_far_outside_the_segment_have_an_answer(tmp_path):
    """An offset below the segment maps to its start, an offset beyond the range of an entry to its end."""
    index = new_index(tmp_path, EXAMPLE)
    observe(index, EXAMPLE.batches)
    base_offset, position, _ = reference(EXAMPLE)[-1]
    assert index.position_for_offset(0) == (0, 5000)
    for offset in (5000 + MAX_RELATIVE, 5001 + MAX_RELATIVE, 2**63 - 1):
        assert index.position_for_offset(offset) == (position, base_offset)


def test_what_an_entry_cannot_hold_gets_none(tmp_path):
    """An offset or a position beyond 32 bits gets no entry, rather than a wrong one."""
    index = new_index(tmp_path, EXAMPLE)
    index.observe(1000, 5000 + MAX_RELATIVE, 5001 + MAX_RELATIVE, 1, 500)
    index.observe(2000, 5001 + MAX_RELATIVE, 5002 + MAX_RELATIVE, 1, 500)
    index.observe(MAX_RELATIVE + 1, 5002 + MAX_RELATIVE, 5003 + MAX_RELATIVE, 1, 500)
    assert index.entries()[0].tolist() == [(MAX_RELATIVE, 1000)]


# ---------------------------------------------------------------- rebuilt == live


@given(shape=shapes, cuts=st.lists(st.integers(0, 40), max_size=3).map(sorted))
def test_an_index_rebuilt_is_the_live_one_byte_for_byte(shape, cuts):
    """Followed append by append, read from the log at once, or a part each way: the entries are the same bytes."""
    segment = make_segment(shape, 100)
    live, rebuilt, mixed = (new_index(None, segment) for _ in range(3))
    observe(live, segment.batches)
    catch_up(rebuilt, segment)
    done = 0
    for at, cut in enumerate([*cuts, len(segment.batches)]):
        upto = max(min(cut, len(segment.batches)), done)
        if at % 2:
            observe(mixed, segment.batches[done:upto])
        else:
            end = segment.batches[upto].position if upto < len(segment.batches) else len(segment.view)
            catch_up(mixed, segment, end)
        done = upto
    for index in (live, rebuilt, mixed):
        index.close(segment.end_offset, len(segment.view))
    assert as_bytes(live) == as_bytes(rebuilt) == as_bytes(mixed)
    assert live.is_complete(len(segment.view)) == bool(shape)
    assert live.max_timestamp == rebuilt.max_timestamp == mixed.max_timestamp


def test_an_index_that_was_flushed_loads_as_it_was(tmp_path):
    """Loading returns what a closed index wrote, all of it, mapped or not, without reading the log."""
    index = new_index(tmp_path, EXAMPLE)
    observe(index, EXAMPLE.batches)
    index.close(EXAMPLE.end_offset, len(EXAMPLE.view))
    for sealed in (False, True):
        loaded = new_index(tmp_path, EXAMPLE)
        loaded.load(limit=len(EXAMPLE.view) + (not sealed), sealed=sealed)
        assert loaded.is_complete(len(EXAMPLE.view))
        assert as_bytes(loaded) == as_bytes(index)
        assert loaded.max_timestamp == index.max_timestamp
        assert loaded.scanned_position == len(EXAMPLE.view)


def test_an_index_flushed_in_parts_is_the_same_files(tmp_path):
    """Flushing after every batch, or once, or loading and going on in between, writes the same bytes."""
    (tmp_path / "parts").mkdir()
    (tmp_path / "once").mkdir()
    index = new_index(tmp_path / "parts", EXAMPLE)
    for at, one in enumerate(EXAMPLE.batches):
        index.observe(*one)
        index.flush()
        if at % 10 == 9:
            index = new_index(tmp_path / "parts", EXAMPLE)
            index.load(limit=one.position + one.size_bytes)
            catch_up(index, EXAMPLE, one.position + one.size_bytes)
    index.close(EXAMPLE.end_offset, len(EXAMPLE.view))
    once = new_index(tmp_path / "once", EXAMPLE)
    catch_up(once, EXAMPLE)
    once.close(EXAMPLE.end_offset, len(EXAMPLE.view))
    for part, whole in zip(files(tmp_path / "parts"), files(tmp_path / "once"), strict=True):
        assert part.read_bytes() == whole.read_bytes()


def test_many_entries_are_flushed_without_being_asked(tmp_path):
    """An index that follows appends writes itself out from time to time, so that a kill costs little."""
    index = new_index(tmp_path, EXAMPLE, interval=1)
    for at in range(1000):
        index.observe(100 * at, 5000 + at, 5001 + at, at, 100)
    written = os.path.getsize(files(tmp_path)[0]) // 8
    assert 1000 - 256 <= written < 1000


# ---------------------------------------------------------------- damaged files


@pytest.fixture
def written(tmp_path: Path) -> list[bytes]:
    """Return the files of the example's index, complete, in the folder."""
    index = new_index(tmp_path, EXAMPLE)
    catch_up(index, EXAMPLE)
    index.close(EXAMPLE.end_offset, len(EXAMPLE.view))
    return [path.read_bytes() for path in files(tmp_path)]


COMPLETE = new_index(None, EXAMPLE)
catch_up(COMPLETE, EXAMPLE)
COMPLETE.close(EXAMPLE.end_offset, len(EXAMPLE.view))


def assert_recovers(folder: Path, *, sealed: bool) -> SegmentIndex:
    """Load whatever the files are now: a prefix of the truth, which catching up makes the whole of it."""
    index = new_index(folder, EXAMPLE)
    index.writable = False
    index.load(limit=len(EXAMPLE.view), sealed=sealed)
    truth = as_bytes(COMPLETE)
    for found, all_of_it in zip(as_bytes(index), truth, strict=True):
        assert all_of_it.startswith(found)
    if not index.is_complete(len(EXAMPLE.view)):
        catch_up(index, EXAMPLE)
        index.close(EXAMPLE.end_offset, len(EXAMPLE.view))
    assert as_bytes(index) == truth
    assert index.max_timestamp == COMPLETE.max_timestamp
    return index


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("bits", [0x01, 0x80])
def test_a_flip_of_any_byte_of_an_index_never_gives_a_wrong_answer(tmp_path, written, which, bits):
    """Whichever byte of either file changes, positions included: after catching up every lookup is right."""
    path = files(tmp_path)[which]
    data = bytearray(written[which])
    for at in range(len(data)):
        data[at] ^= bits
        path.write_bytes(data)
        assert_recovers(tmp_path, sealed=bool(at % 2))
        data[at] ^= bits


def test_an_index_cut_short_anywhere_is_completed(tmp_path, written):
    """Either file, or both, cut at any byte, or missing, give a valid beginning; catching up gives the rest."""
    offset_path, time_path = files(tmp_path)
    for at in range(0, len(written[0]) + 1, 3):
        offset_path.write_bytes(written[0][:at])
        time_path.write_bytes(written[1])
        assert_recovers(tmp_path, sealed=False)
        offset_path.write_bytes(written[0])
        time_path.write_bytes(written[1][: 2 * at])
        assert_recovers(tmp_path, sealed=True)
    for missing in (offset_path, time_path):
        missing.unlink()
        assert_recovers(tmp_path, sealed=True)


@pytest.mark.parametrize("first", [0, 5, 8, 40])
def test_an_index_of_zeros_is_completed(tmp_path, written, first):
    """Zero pages left by a crash end the entries; later entries are ignored."""
    for path, data, size in zip(files(tmp_path), written, (1, 2), strict=True):
        path.write_bytes(data[: first * size] + bytes(24 * size) + data[first * size + 24 * size :])
    assert_recovers(tmp_path, sealed=False)


def test_a_repaired_index_is_written_back(tmp_path, written):
    """After a damaged index was completed and closed, its files are valid, without extra bytes at the end."""
    for path, data in zip(files(tmp_path), written, strict=True):
        path.write_bytes(data[:32] + b"\xff" * 5000)
    index = new_index(tmp_path, EXAMPLE)
    index.load(limit=len(EXAMPLE.view), sealed=False)
    catch_up(index, EXAMPLE)
    index.close(EXAMPLE.end_offset, len(EXAMPLE.view))
    assert [path.read_bytes() for path in files(tmp_path)] == written


@given(first=st.binary(max_size=200), second=st.binary(max_size=400))
def test_files_of_arbitrary_bytes_are_no_index(tmp_path_factory, first, second):
    """Loading never raises for any content of the files, and catching up gives the right index."""
    folder = tmp_path_factory.getbasetemp() / "arbitrary"
    folder.mkdir(exist_ok=True)
    for path, data in zip(files(folder), (first, second), strict=True):
        path.write_bytes(data)
    assert_recovers(folder, sealed=bool(first))


def test_entries_beyond_the_end_of_the_log_are_not_loaded(tmp_path, written):
    """Valid entries for batches that a crash lost are ignored."""
    for one in EXAMPLE.batches:
        index = new_index(tmp_path, EXAMPLE)
        index.load(limit=one.position)
        assert all(position < one.position for position in index.entries()[0]["position"].tolist())
        assert index.scanned_position < max(one.position, 1)


# ---------------------------------------------------------------- damaged logs


def test_a_damaged_batch_is_stepped_over(tmp_path):
    """The index skips a damaged header, continues with the next batch, and contains every other batch."""
    victim = EXAMPLE.batches[20]
    data = bytearray(EXAMPLE.view)
    data[victim.position + 10] ^= 1
    index = new_index(tmp_path, EXAMPLE, interval=1)
    index.catch_up(memoryview(data), len(data))
    positions = index.entries()[0]["position"].tolist()
    assert positions == [one.position for one in EXAMPLE.batches if one.position and one is not victim]
    assert index.scanned_position == len(data)


def test_a_log_of_noise_is_scanned_to_its_end(tmp_path):
    """Bytes without a batch add no entry, and the scan still reaches its end."""
    index = new_index(tmp_path, EXAMPLE)
    noise = memoryview(np.random.default_rng(1).bytes(100_000))
    index.catch_up(noise, len(noise))
    assert (index.count, index.scanned_position) == (0, len(noise))


# ---------------------------------------------------------------- disks and neighbours


def test_files_that_others_have_mapped_never_shrink(tmp_path, written):
    """An index with fewer entries than the files, or with damaged files, does not truncate what a reader may touch."""
    late = new_index(tmp_path, EXAMPLE)
    observe(late, EXAMPLE.batches[:30])
    reader = new_index(tmp_path, EXAMPLE)
    reader.load(sealed=True)
    mapped = [path.stat().st_ino for path in files(tmp_path)]
    late.flush()
    assert [path.read_bytes() for path in files(tmp_path)] == written, "true entries over the same true entries"
    for path in files(tmp_path):
        os.link(path, path.with_suffix(path.suffix + ".mapped"))
        with path.open("r+b") as file:
            file.seek(16)
            file.write(b"\xff")
    repairing = new_index(tmp_path, EXAMPLE)
    repairing.load(sealed=True)
    catch_up(repairing, EXAMPLE)
    repairing.close(EXAMPLE.end_offset, len(EXAMPLE.view))
    for path, inode, data in zip(files(tmp_path), mapped, written, strict=True):
        assert path.read_bytes() == data
        assert path.stat().st_ino != inode
        assert path.with_suffix(path.suffix + ".mapped").stat().st_size == len(data)


def test_no_index_is_left_of_a_segment_that_was_deleted(tmp_path):
    """A process that still follows a deleted segment does not create its index again."""
    index = new_index(tmp_path, EXAMPLE)
    observe(index, EXAMPLE.batches)
    (tmp_path / f"segment{LOG_SUFFIX}").unlink()
    index.flush()
    assert os.listdir(tmp_path) == []


def test_an_index_of_a_store_that_must_not_be_written_to_writes_nothing(tmp_path):
    """A reader of a read-only store has its index in memory alone."""
    index = new_index(tmp_path, EXAMPLE, interval=1)
    index.writable = False
    for at in range(600):
        index.observe(100 * at, 5000 + at, 5001 + at, at, 100)
    index.close(5600, 60_000)
    assert os.listdir(tmp_path) == [f"segment{LOG_SUFFIX}"]
    assert index.count == 600


@pytest.mark.parametrize(("method", "call"), [("stat", 1), ("open", 1), ("open", 2), ("pwritev", 1), ("pwritev", 2)])
def test_an_index_that_cannot_be_written_is_no_failure(tmp_path, method, call):
    """A full or failing disk costs the cache, not the append; it is written once the disk is well again."""
    fs = FaultyFileSystem()
    index = new_index(tmp_path, EXAMPLE, fs=fs)
    observe(index, EXAMPLE.batches)
    fs.fail(method, errno.ENOSPC, call=call)
    index.flush()
    assert_recovers(tmp_path, sealed=False)
    fs.heal()
    index.close(EXAMPLE.end_offset, len(EXAMPLE.view))
    loaded = new_index(tmp_path, EXAMPLE)
    loaded.load(sealed=True)
    assert as_bytes(loaded) == as_bytes(COMPLETE)


def test_processes_that_index_the_same_segment_do_not_spoil_it(tmp_path):
    """Two processes write their entries at any time and at any interval: the files stay a valid index."""
    ahead, behind = new_index(tmp_path, EXAMPLE), new_index(tmp_path, EXAMPLE, interval=2 * INTERVAL)
    for at, one in enumerate(EXAMPLE.batches):
        ahead.observe(*one)
        if at % 7 == 0:
            ahead.flush()
            catch_up(behind, EXAMPLE, one.position)
            behind.flush()
        loaded = new_index(tmp_path, EXAMPLE)
        loaded.load(limit=len(EXAMPLE.view))
        entries = [
            (5000 + relative, position, stamp)
            for (relative, position), stamp in zip(
                loaded.entries()[0].tolist(), loaded.entries()[1]["max_timestamp"].tolist(), strict=True
            )
        ]
        assert set(entries) <= set(reference(EXAMPLE, 1)), "an entry that is no batch, or with another one's time"
        assert_right(loaded, EXAMPLE, entries)


def test_readers_may_look_while_the_index_catches_up():
    """Lookups from other threads during a long catch-up give batches that are there, and never fail."""
    segment = make_segment([(1, 10, 0, at) for at in range(3000)], 0)
    index = new_index(None, segment, interval=1)
    positions = {one.base_offset: one.position for one in segment.batches}
    failures: list[BaseException] = []

    def look() -> None:
        try:
            while index.scanned_position < len(segment.view):
                position, base_offset = index.position_for_offset(2999)
                assert positions[base_offset] == position
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=look) for _ in range(3)]
    for thread in threads:
        thread.start()
    for one in segment.batches[::50]:
        catch_up(index, segment, one.position)
    catch_up(index, segment)
    for thread in threads:
        thread.join()
    assert not failures


# ---------------------------------------------------------------- interrupts


@pytest.mark.long
@pytest.mark.parametrize("how", ["observe", "catch up", "load"])
def test_an_interrupt_anywhere_leaves_it_whole(tmp_path, how):
    """After an interrupt at any point, the index has the same entries and lookups as without it."""
    segment = make_segment([(1, 20, 0, 1000 + at) for at in range(70)], 5000)
    clean = new_index(tmp_path, segment, 1)
    observe(clean, segment.batches)
    clean.flush()
    assert len(clean.entries()[0]) > 64, "it has grown twice"

    def go_on(index: SegmentIndex) -> None:
        if how == "observe":
            observe(index, [one for one in segment.batches if one.position >= index.scanned_position])
        elif how == "catch up":
            catch_up(index, segment)
        else:
            index.load()

    def fresh() -> SegmentIndex:
        if how != "load":
            return new_index(None, segment, 1)
        return SegmentIndex(FileSystem(), f"{tmp_path}/segment", segment.base_offset, 1, writable=False)

    tried = 0
    for at in range(1, len(list_points(functools.partial(go_on, fresh()))) + 1):
        index = fresh()
        outcome = interrupt_at(at, functools.partial(go_on, index))
        tried += outcome.place is not None
        for _ in range(2):
            if how == "load":
                catch_up(index, segment)
            go_on(index)
            for offset in range(5000, segment.end_offset, 7):
                assert index.position_for_offset(offset) == clean.position_for_offset(offset), outcome.place
            assert as_bytes(index) == as_bytes(clean), outcome.place
    assert tried > (20 if how == "load" else 200)
