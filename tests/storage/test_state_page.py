"""The shared page: a reader sees the fields of one write, whichever process is killed.

Damage is never taken for data.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from seeds import seeds, share

from segmentlog.storage.fs import FileSystem
from segmentlog.storage.state_page import PAGE_SIZE, LogState, StateBlock, StateDamaged, StatePage, SyncState
from segmentlog.testing.fault_injection import FaultyFileSystem

BOOT = "11111111-2222-3333-4444-555555555555"
FLAG_BYTES = range(8 * 8, 13 * 8)
FORK = multiprocessing.get_context("fork")


def log_state(number: int) -> LogState:
    """Return a state whose fields all say the same, so that one torn from two writes shows."""
    return LogState(*[number] * len(LogState.__struct_fields__))


def sync_state(number: int) -> SyncState:
    """Likewise."""
    return SyncState(*[number] * len(SyncState.__struct_fields__))


def number_of(state: LogState | SyncState) -> int:
    """Return the number that all fields agree on."""
    numbers = {getattr(state, name) for name in state.__struct_fields__}
    assert len(numbers) == 1, f"torn: {state}"
    return int(numbers.pop())


def open_page(folder: Path, fs: FileSystem | None = None, *, writable: bool = True) -> StatePage:
    """Return the page of a folder, mapped."""
    fd = os.open(folder / "state", os.O_RDWR | os.O_CREAT)
    try:
        page = StatePage.map(fs or FileSystem(), fd, writable=writable)
    finally:
        os.close(fd)
    assert page is not None
    return page


@pytest.fixture
def page(tmp_path: Path) -> Iterator[StatePage]:
    """Yield a page that was initialised with 1 and 2."""
    page = open_page(tmp_path)
    page.initialise(BOOT, tmp_path.stat(), log_state(1), sync_state(2))
    yield page
    page.close()


def copy_of(page: StatePage) -> bytearray:
    """Return the current bytes of a page."""
    return bytearray(memoryview(page.words).cast("B"))


# ---------------------------------------------------------------- what was written is read


@given(
    st.lists(
        st.integers(0, 2**64 - 1), min_size=len(LogState.__struct_fields__), max_size=len(LogState.__struct_fields__)
    ),
    st.integers(0, 2**64 - 1),
)
def test_fields_come_back(fields, number):
    """Every field of both blocks has the last written value, in this page and in another on the same bytes."""
    buffer = bytearray(PAGE_SIZE)
    writer, reader = StatePage(buffer), StatePage(buffer)
    for state in (log_state(number), LogState(*fields), log_state(5), LogState(*fields)):
        writer.log.write(state)
        writer.sync.write(sync_state(number))
        assert writer.log.read() == reader.log.read() == state
        assert number_of(reader.sync.read()) == number


def test_the_page_is_shared(tmp_path, page):
    """Another mapping of the same file sees a change of blocks and flags at once."""
    other = open_page(tmp_path)
    assert (number_of(other.log.read()), number_of(other.sync.read())) == (1, 2)
    page.log.write(log_state(7))
    page.writing, page.failed, page.waiting_until_ms = 1, 2, 3
    page.count_config_change()
    page.count_move()
    assert number_of(other.log.read()) == 7
    assert (other.writing, other.failed, other.waiting_until_ms) == (1, 2, 3)
    assert other.config_version
    assert other.moved
    other.close()


def test_a_state_that_did_not_change_is_the_same_object(page):
    """Polling costs no decoding: an unchanged block gives the object that was read before."""
    page.log.write(log_state(3))
    other = StatePage(page._map)
    assert other.log.read() is other.log.read()


def test_initialising_clears_what_a_dead_writer_left(tmp_path, page):
    """A newly initialised page has no running append and no failure; counters that others follow continue."""
    page.writing = page.failed = 1
    page.count_config_change()
    page.initialise(BOOT, tmp_path.stat(), log_state(8), sync_state(9))
    assert (page.writing, page.failed) == (0, 0)
    assert page.config_version
    assert (number_of(page.log.read()), number_of(page.sync.read())) == (8, 9)
    assert page.is_valid_for(BOOT, tmp_path.stat())


@pytest.mark.parametrize("fill", [b"\xff", b"\0", b"\x01", b"SLSTATE\x01"])
def test_a_page_of_any_bytes_can_be_made_anew(tmp_path, fill):
    """A page with any content, counters at their maximum included, is valid exactly once it is initialised."""
    page = StatePage(bytearray((fill * PAGE_SIZE)[:PAGE_SIZE]))
    assert not page.is_valid_for(BOOT, tmp_path.stat())
    with pytest.raises(StateDamaged):
        page.log.read()
    page.initialise(BOOT, tmp_path.stat(), log_state(1), sync_state(2))
    page.count_config_change()
    page.count_move()
    assert page.is_valid_for(BOOT, tmp_path.stat())
    assert (number_of(page.log.read()), number_of(page.sync.read())) == (1, 2)


# ---------------------------------------------------------------- whose page it is


def test_a_page_describes_its_folder_in_its_boot(tmp_path, page):
    """A page is invalid after a restart of the machine, and for a copy of its folder."""
    (tmp_path / "copy").mkdir()
    assert page.is_valid_for(BOOT, tmp_path.stat())
    assert not page.is_valid_for(BOOT.replace("5", "6"), tmp_path.stat())
    assert not page.is_valid_for(BOOT, (tmp_path / "copy").stat())
    assert StatePage(copy_of(page)).is_valid_for(BOOT, tmp_path.stat()), "it is the bytes that are judged"


@pytest.mark.parametrize("boot", ["init-1700000000", "", "größe"])
def test_a_boot_id_need_not_be_a_uuid(tmp_path, boot):
    """If the system's boot id is not a UUID, any text distinguishes pages of different boots."""
    page = StatePage.private()
    page.initialise(boot, tmp_path.stat(), log_state(1), sync_state(2))
    assert page.is_valid_for(boot, tmp_path.stat())
    assert not page.is_valid_for(boot + "x", tmp_path.stat())


def test_a_flip_of_any_byte_is_noticed_or_changes_nothing(tmp_path, page):
    """If any byte of a page changes, the page is not trusted, or its fields are unchanged (flags are plain words)."""
    for number in (3, 4, 5):
        page.log.write(log_state(number))
    page.sync.write(sync_state(6))
    sound = copy_of(page)
    folder = tmp_path.stat()
    noticed = 0
    for at, bits in itertools.product(range(PAGE_SIZE), (0x01, 0x80, 0xFF)):
        data = bytearray(sound)
        data[at] ^= bits
        flipped = StatePage(data)
        if flipped.is_valid_for(BOOT, folder):
            assert (number_of(flipped.log.read()), number_of(flipped.sync.read())) == (5, 6), f"byte {at}"
        else:
            assert at not in FLAG_BYTES
            noticed += 1
    # The header, and of each block the sequence number and the copy that is current.
    blocks = sum(len(kind.__struct_fields__) + 2 for kind in (LogState, SyncState))
    assert noticed == 3 * 8 * (7 + blocks)


@pytest.mark.parametrize("word", [16, 64])
def test_a_damaged_block_raises(page, word):
    """Reading a block whose sequence number or fields were overwritten raises StateDamaged, whatever was cached."""
    block = page.log if word == 16 else page.sync
    block.read()
    for value in (0, 2**64 - 1, page.words[word] + 1, page.words[word] + 2):
        sound = page.words[word]
        page.words[word] = value
        with pytest.raises(StateDamaged):
            block.read()
        page.words[word] = sound
        block.read()


# ---------------------------------------------------------------- a writer stopped anywhere


class Recorder:
    """Bytes, or words of them, that note down every store in the order in which it happens."""

    def __init__(self, page: bytearray, stores: list[tuple[int, bytes]], word_size: int) -> None:
        self._page, self._stores, self._word_size = page, stores, word_size

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return bytes(self._page[at])
        return int.from_bytes(self._page[8 * at : 8 * at + 8], "little")

    def __setitem__(self, at: Any, value: Any) -> None:
        position, data = (8 * at, value.to_bytes(8, "little")) if self._word_size == 8 else (at.start, bytes(value))
        self._page[position : position + len(data)] = data
        self._stores.append((position, data))


def stores_of_a_write(page: bytearray, number: int) -> Iterator[bytearray]:
    """Yield the page after each step of writing a log state: each byte of a copy, each word stored at once."""
    stores: list[tuple[int, bytes]] = []
    scratch = bytearray(page)
    words: Any = Recorder(scratch, stores, 8)
    StateBlock(Recorder(scratch, stores, 1), words, 16, LogState).write(log_state(number))
    seen = bytearray(page)
    for position, data in stores:
        step = 8 if len(data) == 8 else 1
        for at in range(0, len(data), step):
            seen[position + at : position + at + step] = data[at : at + step]
            yield bytearray(seen)
    assert seen == scratch


def test_a_writer_killed_at_any_store_leaves_the_old_state_or_the_new_one():
    """After each store of a write a reader gets the old or the new fields, and the next write succeeds."""
    buffer = bytearray(PAGE_SIZE)
    StatePage(buffer).log.write(log_state(1))
    for number in range(2, 5):
        seen = []
        for torn in stores_of_a_write(buffer, number):
            seen.append(number_of(StatePage(torn).log.read()))
            after = StatePage(torn)
            after.log.write(log_state(99))
            assert number_of(StatePage(torn).log.read()) == 99
        assert seen == sorted(seen)
        assert set(seen) == {number - 1, number}
        StatePage(buffer).log.write(log_state(number))


def test_a_reader_overtaken_by_writers_reads_again():
    """A reader that pauses anywhere while writers continue gets the fields of one write."""
    buffer = bytearray(PAGE_SIZE)
    writer = StatePage(buffer)
    writer.log.write(log_state(1))
    for steps, writes in itertools.product(range(1, 6), range(1, 4)):

        class Slow:
            """Words whose reader is interrupted before its n-th look at them."""

            def __init__(self, until: int, count: int) -> None:
                self.until, self.count = until, count

            def __getitem__(self, at: int) -> int:
                self.until -= 1
                if self.until == 0:
                    for number in range(self.count):
                        writer.log.write(log_state(100 + number))
                return writer.words[at]

        words: Any = Slow(steps, writes)
        number_of(StateBlock(buffer, words, 16, LogState).read())


# ---------------------------------------------------------------- other threads and processes


def hammer(folder: Path) -> None:
    """Write as fast as possible, forever."""
    page = open_page(folder)
    first = number_of(page.log.read())
    for number in itertools.count(first + 1):
        page.log.write(log_state(number))
        page.sync.write(sync_state(number))


def start(folder: Path) -> BaseProcess:
    """Start a process that does nothing but write."""
    process = FORK.Process(target=hammer, args=(folder,), daemon=True)
    process.start()
    return process


def kill(process: BaseProcess) -> None:
    """kill -9."""
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join(10)
    assert process.exitcode == -signal.SIGKILL


def test_readers_never_see_a_torn_state_while_a_process_writes(tmp_path, page):
    """While another process writes without a pause, every read returns the fields of one write, in their order."""
    process = start(tmp_path)
    try:
        seen, last = set(), 0
        began = time.monotonic()
        while (taken := time.monotonic() - began) < 1 or (len(seen) <= 100 and taken < 60):
            for block in (page.log, page.sync):
                seen.add(number_of(block.read()))
            number = number_of(page.log.read())
            assert number >= last
            last = number
        assert len(seen) > 100
    finally:
        kill(process)


def test_readers_never_see_a_torn_state_while_a_thread_writes(page):
    """Threads that share a page object read the fields of one write, however they interleave."""
    stop = threading.Event()
    failures: list[BaseException] = []

    def read() -> None:
        try:
            while not stop.is_set():
                number_of(page.log.read())
                number_of(page.sync.read())
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + 0.7
    for number in itertools.count(3):
        page.log.write(log_state(number))
        page.sync.write(sync_state(number))
        if time.monotonic() > end:
            break
    stop.set()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.parametrize("seed", seeds("killed page writers", (5,)))
@pytest.mark.long
def test_a_killed_writer_leaves_a_page_that_can_be_read(tmp_path, page, seed):
    """After kill -9 during a write, again and again, the page is valid, and the next writer continues."""
    chance = random.Random(seed)
    last = 1
    for killed in range(share(25, "killed page writers")):
        process = start(tmp_path)
        while number_of(page.log.read()) == last:
            pass
        time.sleep(chance.random() / 300)
        kill(process)
        assert page.is_valid_for(BOOT, tmp_path.stat())
        fresh = StatePage(copy_of(page))
        log, sync = number_of(fresh.log.read()), number_of(fresh.sync.read())
        assert log > last
        assert 0 <= log - sync <= killed + 1  # a kill between the two blocks leaves one outdated forever
        last = log


# ---------------------------------------------------------------- the file


def test_a_missing_page_is_made_but_not_by_who_may_not_write(tmp_path):
    """A writable handle extends a short file to a page; a read-only handle gets no page and changes nothing."""
    for size in (0, 100, PAGE_SIZE - 1):
        path = tmp_path / "state"
        path.write_bytes(b"x" * size)
        fd = os.open(path, os.O_RDWR)
        try:
            assert StatePage.map(FileSystem(), fd, writable=False) is None
            assert path.read_bytes() == b"x" * size
            page = StatePage.map(FileSystem(), fd, writable=True)
            assert page is not None
            assert path.read_bytes() == b"x" * size + bytes(PAGE_SIZE - size)
            assert path.stat().st_blocks * 512 >= PAGE_SIZE, "no hole that a full disk could not fill"
            page.close()
        finally:
            os.close(fd)


def test_short_writes_still_make_a_whole_page(tmp_path):
    """A page is never mapped beyond the end of its file: touching it there would kill the process."""
    fs = FaultyFileSystem()
    fs.short_writes(1000)
    page = open_page(tmp_path, fs)
    page.initialise(BOOT, tmp_path.stat(), log_state(1), sync_state(2))
    assert (tmp_path / "state").stat().st_size == PAGE_SIZE


@pytest.mark.parametrize("call", ["fstat", "flock", "pwritev"])
def test_making_a_page_does_not_wipe_one_that_others_use(tmp_path, call):
    """Two processes open a new partition, and the slower one is interrupted anywhere: the faster one's page stays."""
    fs = FaultyFileSystem()
    made: list[StatePage] = []

    def other_process() -> None:
        def run() -> None:
            page = open_page(tmp_path)
            page.initialise(BOOT, tmp_path.stat(), log_state(1), sync_state(2))
            made.append(page)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join(0.2)  # it may have to wait for the slower one's lock

    fs.before(call, other_process)
    slower = open_page(tmp_path, fs)
    end = time.monotonic() + 10
    while not made and time.monotonic() < end:
        time.sleep(0.01)
    assert made[0].is_valid_for(BOOT, tmp_path.stat())
    assert number_of(slower.log.read()) == 1


def test_a_page_without_a_file_works_alike(tmp_path):
    """A page of this process alone, for stores that must not be written to, is a page like any other."""
    page = StatePage.private()
    page.initialise(BOOT, tmp_path.stat(), log_state(1), sync_state(2))
    assert page.is_valid_for(BOOT, tmp_path.stat())
    page.close()


def test_a_number_that_arrives_before_its_fields_is_read_again(page, monkeypatch):
    """On a processor that reorders stores a brief mismatch is not damage; a lasting mismatch is."""
    from segmentlog.storage import state_page

    page.log.write(log_state(3))
    reader = StatePage(copy_of(page))
    real, wrong = state_page._hash, 5

    def late(data, sequence=0):
        nonlocal wrong
        wrong -= 1
        return real(data, sequence) if wrong < 0 else 0

    monkeypatch.setattr(state_page, "_hash", late)
    assert number_of(reader.log.read()) == 3
    wrong = 10**9
    with pytest.raises(StateDamaged):
        StatePage(copy_of(page)).log.read()
