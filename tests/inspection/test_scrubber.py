"""The scrubber reads sealed segments in the background, within a budget, and reports damage once."""

from __future__ import annotations

import errno
import logging
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from broken import batches_of, flip, log_files
from hypothesis import given
from hypothesis import strategies as st
from leftovers import files_open_below
from logs import FakeClock, NoSyncFileSystem

import segmentlog
from segmentlog.errors import InvalidConfig, StoreClosed
from segmentlog.format.batch_codecs import UNCOMPRESSED
from segmentlog.format.encode import encode_batch as encode
from segmentlog.inspection.scrubber import Scrubber, ScrubTarget
from segmentlog.store import LogStore
from segmentlog.testing.fault_injection import METHODS, FaultyFileSystem

PLENTY = 1 << 40
ROUND_MS = 600_000


def make(path: Path, batches: int = 8, **options: Any) -> LogStore:
    """Return an open store with a topic "t" of two batches a segment, and a large budget by default."""
    with segmentlog.open(path, background=False) as store:
        config = {"compression_type": "none", "segment_records": 4, "fsync": "never"}
        partition = store.create_topic("t", **config).partition(0)
        for number in range(batches):
            partition.append([b"value %d" % number * 9, b"two"], timestamps=[number, number])
    settings = {"scrub_bytes_per_s": PLENTY, "fs": NoSyncFileSystem(), "clock": FakeClock(), **options}
    return LogStore(path, background=False, **settings)


def scrub_round(store: LogStore) -> None:
    """Complete one pass, from its current position to the end of the next pass."""
    clock = store._topics.clock
    assert isinstance(clock, FakeClock)
    rounds = store.scrub_report().rounds
    clock.advance(ROUND_MS)
    store.scrub_tick()
    clock.advance(1000)
    store.scrub_tick()
    assert store.scrub_report().rounds > rounds


def sealed(store: LogStore) -> list[Path]:
    """Return the segments that the scrubber checks."""
    return log_files(Path(store.path) / "t" / "0")[:-1]


def test_off_by_default(tmp_path: Path) -> None:
    """The scrubber reads nothing unless it was enabled; a tick then raises an error that says how to enable it."""
    with segmentlog.open(tmp_path / "store") as store:
        assert store.scrub_report().segments == 0
        with pytest.raises(InvalidConfig, match="scrub_bytes_per_s"):
            store.scrub_tick()
    for wrong in (0, -1, True, 2.5, "1"):
        with pytest.raises(InvalidConfig, match="scrub_bytes_per_s"):
            segmentlog.open(tmp_path / "store", scrub_bytes_per_s=wrong)  # type: ignore[arg-type]
    store = segmentlog.open(tmp_path / "store", background=False, scrub_bytes_per_s=1)
    store.close()
    with pytest.raises(StoreClosed):
        store.scrub_tick()


def test_every_sealed_segment_is_read_round_after_round(tmp_path: Path) -> None:
    """All of them are read to the last byte, but never the active one; a healthy store has no findings."""
    with make(tmp_path / "store") as store:
        total = sum(path.stat().st_size for path in sealed(store))
        for rounds in (1, 2, 3):
            scrub_round(store)
            report = store.scrub_report()
            assert (report.rounds, report.segments) == (rounds, rounds * len(sealed(store)))
            assert report.size_bytes == rounds * total
            assert report.findings == ()


def test_a_small_store_is_not_read_over_and_over(tmp_path: Path) -> None:
    """Passes begin ten minutes apart at least, and the tick says so."""
    with make(tmp_path / "store") as store:
        scrub_round(store)
        before = store.scrub_report()
        assert store.scrub_tick() == pytest.approx(599, abs=1)
        store._topics.clock.advance(500_000)  # type: ignore[attr-defined]
        assert store.scrub_tick() == pytest.approx(99, abs=1)
        assert store.scrub_report() == before


@pytest.mark.parametrize("bytes_per_s", [7, 100, 1000, 100_000])
def test_the_budget_is_kept(tmp_path: Path, bytes_per_s: int) -> None:
    """It reads at most the rate times the time, and half a second's worth after a pause, but makes progress."""
    with make(tmp_path / "store", scrub_bytes_per_s=bytes_per_s) as store:
        clock = store._topics.clock
        assert isinstance(clock, FakeClock)
        began_ms = clock.up_ms
        store.scrub_tick()
        assert store.scrub_report().size_bytes == 0
        for step_ms in (1, 50, 100, 3000, 100, 20, 60_000, 100, 100, 700_000) * 8:
            clock.advance(step_ms)
            before = store.scrub_report().size_bytes
            assert store.scrub_tick() > 0
            size = store.scrub_report().size_bytes
            assert size <= bytes_per_s * (clock.up_ms - began_ms) / 1000
            assert size - before <= max(bytes_per_s / 2, 1)
        if bytes_per_s > 7:
            assert store.scrub_report().size_bytes > 0


def test_a_wrong_byte_is_found_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A warning has its path, position and offsets; the report keeps it while it exists."""
    store = make(tmp_path / "store")
    hit = batches_of(Path(store.path) / "t" / "0")[3]
    scrub_round(store)
    flip(hit.path, hit.position + 100)
    with caplog.at_level(logging.WARNING, "segmentlog"):
        for _ in range(3):
            scrub_round(store)
            (found,) = store.scrub_report().findings
            assert (found.topic, found.partition, found.path) == ("t", 0, str(hit.path))
            assert (found.position, found.base_offset, found.end_offset) == (
                hit.position, hit.base_offset, hit.next_offset,
            )  # fmt: skip
    (told,) = caplog.messages
    assert str(hit.path) in told
    assert f"byte {hit.position}" in told
    flip(hit.path, hit.position + 100)
    scrub_round(store)
    assert store.scrub_report().findings == (), "it was repaired"
    flip(hit.path, hit.position + 100)
    with caplog.at_level(logging.WARNING, "segmentlog"):
        scrub_round(store)
    assert len(caplog.messages) == 2, "it is told again when it comes back"
    store.close()


def test_every_byte_is_checked(tmp_path: Path) -> None:
    """A wrong byte anywhere in a sealed segment is reported for its batch, and for no other batch."""
    store = make(tmp_path / "store", 4)
    (path,) = sealed(store)
    batches = [one for one in batches_of(path.parent) if one.path == path]
    for batch in batches:
        for position in range(batch.position, batch.position + batch.size_bytes):
            flip(path, position, 1 << position % 8)
            scrub_round(store)
            flip(path, position, 1 << position % 8)
            (found,) = store.scrub_report().findings
            assert (found.position, found.base_offset, found.end_offset) == (
                batch.position, batch.base_offset, batch.next_offset,
            )  # fmt: skip
    store.close()


@given(sizes=st.lists(st.integers(1, 400), min_size=1, max_size=30), wrong=st.integers(0, 699))
def test_pieces_of_any_size(tmp_path_factory: pytest.TempPathFactory, sizes: list[int], wrong: int) -> None:
    """With any budget for a piece of the segment, the findings are those of reading it at once."""
    folder = tmp_path_factory.mktemp("pieces")
    data = bytearray()
    for base_offset in range(5):
        batch = encode([b"v" * 40 * base_offset], now_ms=1, compression=UNCOMPRESSED)
        data += batch.placed_at(base_offset, 0) + batch.payload
    data[wrong % len(data)] ^= 4
    (folder / f"{0:020d}.log").write_bytes(data)
    (folder / f"{5:020d}.log").write_bytes(b"")

    def findings(pieces: list[int]) -> Any:
        scrubber = Scrubber(NoSyncFileSystem(), lambda: [ScrubTarget("t", 0, str(folder))], PLENTY)
        now_ms = 0
        scrubber.scrub(now_ms)
        turn = 0
        while not scrubber.report().rounds:
            now_ms += 1
            scrubber._bytes_per_s = 1 << 20  # fixes the allowance, which otherwise grows with the time of a pause
            scrubber._allowance, scrubber._last_ms = pieces[turn % len(pieces)], now_ms
            if not scrubber._partitions and not scrubber._segments and scrubber._current is None:
                scrubber._allowance = 5000
            turn += 1
            scrubber.scrub(now_ms)
        scrubber.close()
        return scrubber.report().findings

    assert findings(sizes) == findings([1 << 20])
    assert len(findings([1 << 20])) == 1


def test_segments_that_go_away_meanwhile(tmp_path: Path) -> None:
    """Segments and topics that are deleted, replaced or truncated during a read are not reported as damage."""
    store = make(tmp_path / "store", 12, scrub_bytes_per_s=200)
    clock = store._topics.clock
    assert isinstance(clock, FakeClock)
    paths = sealed(store)
    store.scrub_tick()
    scrubber = store._topics.background._scrubber
    assert scrubber is not None
    while scrubber._current is None:
        clock.advance(500)
        store.scrub_tick()
    assert scrubber._current.path == str(paths[0]), "in the middle of it"
    store.topic("t").partition(0).trim(9)
    assert not paths[0].exists()
    for _ in range(100):
        clock.advance(1000)
        store.scrub_tick()
    assert store.scrub_report().rounds == 1
    assert store.scrub_report().findings == ()
    store.delete_topic("t")
    clock.advance(ROUND_MS)
    for _ in range(100):
        clock.advance(1000)
        store.scrub_tick()
    assert store.scrub_report().findings == ()
    store.close()


class _Meanwhile(NoSyncFileSystem):
    """Something else is done before one of the calls, counted from the first rename on."""

    def __init__(self) -> None:
        self.calls_left: int | None = None
        self.then: Callable[[], object] = list
        self.has_begun = False
        for name in METHODS:
            setattr(self, name, self._watched(getattr(self, name)))

    def _watched(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if self.calls_left is not None and (real.__name__ == "rename" or self.has_begun):
                self.has_begun, self.calls_left = True, self.calls_left - 1
                if not self.calls_left:
                    self.then()
            return real(*args, **options)

        return call


def _merge_meanwhile(path: Path, calls: int) -> bool:
    """Segments are merged once they were listed, and all of them read before so many calls of that; False: fewer."""
    files = _Meanwhile()
    store = LogStore(path, background=False, scrub_bytes_per_s=PLENTY, fs=files, clock=FakeClock())
    keys = store.create_topic("t", segment_records=4, fsync="never", cleanup_policy="compact").partition(0)
    for _ in range(4):
        keys.append([b"x"] * 4, [b"a", b"b", b"c", b"d"])
    keys.append([b"y"], [b"a"])
    scrubber = store._topics.background._scrubber
    assert scrubber is not None
    assert scrubber._open_next_segment(0)
    assert scrubber._open_next_segment(0)
    assert len(scrubber._segments) == 4
    assert scrubber._current is None
    files.then, files.calls_left = lambda: scrub_round(store), calls
    keys.compact()
    is_done, files.calls_left = files.calls_left <= 0, None
    scrub_round(store)
    report = store.scrub_report()
    assert report.findings == ()
    assert report.segments > 0
    assert len(keys.segments()) < 4
    store.close()
    return is_done


def test_segments_that_are_merged_once_they_are_listed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Segments read at any call of the compaction that merges them are not reported as damage."""
    calls = 1
    while _merge_meanwhile(tmp_path / str(calls), calls):
        assert "damage found" not in caplog.text, f"before call {calls}"
        calls += 1
    assert calls > 20


def test_findings_go_with_their_segment(tmp_path: Path) -> None:
    """After retention deletes the segment, its damage is no longer reported."""
    store = make(tmp_path / "store")
    flip(sealed(store)[0], 100)
    scrub_round(store)
    assert len(store.scrub_report().findings) == 1
    store.topic("t").partition(0).trim(4)
    scrub_round(store)
    assert store.scrub_report().findings == ()
    store.close()


def test_preallocated_space_is_no_damage(tmp_path: Path) -> None:
    """Zeros after the last batch are space left by a crash during a roll; other bytes there are damage."""
    store = make(tmp_path / "store")
    path = sealed(store)[1]
    end = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(end + 5000)
    scrub_round(store)
    assert store.scrub_report().findings == ()
    flip(path, end + 300)
    scrub_round(store)
    (found,) = store.scrub_report().findings
    assert (found.path, found.position) == (str(path), end)
    store.close()


def test_goes_on_after_an_error(tmp_path: Path) -> None:
    """Bad sectors are findings; other errors are raised, and the next call continues with the next segment."""
    fs = FaultyFileSystem()
    store = make(tmp_path / "store", fs=fs)
    fs.fail("pread", errno.EIO, call=4)  # store.json is one, topic.json two
    scrub_round(store)
    report = store.scrub_report()
    assert len(report.findings) == 1
    assert "the disk cannot read these bytes" in report.findings[0].what
    assert report.rounds == 1
    for method in ("pread", "open", "fstat", "listdir", "stat"):
        rounds = store.scrub_report().rounds
        store._topics.clock.advance(2 * ROUND_MS)  # type: ignore[attr-defined]
        fs.fail(method, errno.EMFILE, call=1 if method != "listdir" else 2)
        with pytest.raises(OSError, match=os.strerror(errno.EMFILE)):
            store.scrub_tick()
        fs.heal()
        for _ in range(3):
            store._topics.clock.advance(1000)  # type: ignore[attr-defined]
            store.scrub_tick()
        assert store.scrub_report().rounds > rounds, method
    open_files = files_open_below(tmp_path)
    scrub_round(store)
    assert files_open_below(tmp_path) == open_files
    store.close()


def test_what_was_read_is_given_back(tmp_path: Path) -> None:
    """Every byte that is read through the page cache is offered back to the kernel."""
    fs = FaultyFileSystem()
    store = make(tmp_path / "store", fs=fs)
    fs.calls.clear()
    scrub_round(store)
    given = sum(arguments[2] for name, arguments in fs.calls if name == "advise_unneeded")
    assert given == store.scrub_report().size_bytes > 0
    store.close()


def test_a_thread_does_it(tmp_path: Path) -> None:
    """With ``background`` a thread scrubs without any call; closing the store ends it."""
    make(tmp_path / "store").close()
    with segmentlog.open(tmp_path / "store", scrub_bytes_per_s=PLENTY) as store:
        flip(sealed(store)[0], 100)
        deadline = time.monotonic() + 20
        while not store.scrub_report().findings and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(store.scrub_report().findings) == 1
        assert store.health() == {}


def test_a_fork_in_the_middle_of_a_tick(tmp_path: Path) -> None:
    """The child has no thread that would ever let go of the lock: it reads its report and closes all the same."""
    store = make(tmp_path / "store")
    scrubber = store._topics.background._scrubber
    assert scrubber is not None
    with scrubber._mutex:
        child = os.fork()
        if not child:
            signal.alarm(10)
            status = 1
            try:
                store.scrub_report()
                store.close()
                status = 0
            finally:
                os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    scrub_round(store)
    store.close()
