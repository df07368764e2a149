"""The ledger owns the state page and the checkpoint, and decides which is written first."""

from __future__ import annotations

import ast
import errno
from collections.abc import Callable
from pathlib import Path

import pytest
from logs import NoSyncFileSystem, open_log, values

import segmentlog
from segmentlog.errors import DiskFull, PartitionFailed, StoreClosed
from segmentlog.log.ledger import Ledger
from segmentlog.log.partition import Partition
from segmentlog.log.producer_state import ProducerStamp
from segmentlog.records import LostRange
from segmentlog.storage.state_page import REWRITING, LogState
from segmentlog.testing.fault_injection import Died, FaultyFileSystem

PACKAGE = Path(segmentlog.__file__).parent

_OWNERS = {"log/ledger.py", "storage/state_page.py", "storage/checkpoint_file.py", "topics/topic_admin.py"}
_WORDS = {"writing", "failed", "waiting_until_ms"}
_CHANGES = {"count_move", "count_abort", "count_config_change", "initialise"}


def _changes_in(tree: ast.AST) -> set[str]:
    """Yield the changes of pages and checkpoints in a file: fields of a block, words, flags, slots."""
    found = set()
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else []
        for target in targets:
            text = ast.unparse(target)
            if isinstance(target, ast.Subscript) and "words[" in text:
                found.add(text)
            if isinstance(target, ast.Attribute) and target.attr in _WORDS and text.endswith(f"page.{target.attr}"):
                found.add(text)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            text = ast.unparse(node.func)
            if text.endswith(("page.log.write", "page.sync.write", "checkpoint.write")):
                found.add(text)
            if node.func.attr in _CHANGES and not text.endswith(f"ledger.{node.func.attr}"):
                found.add(text)
    return found


def test_nobody_else_changes_a_page_or_a_checkpoint() -> None:
    """Only the ledger changes them: it knows what else must change, and in which order."""
    others = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        # Modules of these packages do not know the page.
        if name not in _OWNERS and not name.startswith(("testing/", "format/", "policy/")):
            changes = _changes_in(ast.parse(path.read_text()))
            if changes:
                others[name] = changes
    assert others == {}
    assert _changes_in(ast.parse((PACKAGE / "log/ledger.py").read_text()))
    assert _changes_in(ast.parse("page.failed = 1\nself.page.words[3] = 1")) == {"page.failed", "self.page.words[3]"}


_LOST = LostRange(3, 6, 1, "for a test", 0)
_CHECKPOINT_FIRST: list[Callable[[Ledger, LogState], object]] = [
    lambda ledger, log: ledger.reserve_offsets(log, log.offset_ceiling + 1000),
    lambda ledger, log: ledger.record_producers(),
    lambda ledger, log: ledger.trim(log, 2, None),
    lambda ledger, log: ledger.advance_recovery_point(log, ledger.page.sync.read()),
]


@pytest.mark.parametrize("change", _CHECKPOINT_FIRST, ids=["reserve", "producers", "trim", "point"])
def test_the_page_shows_nothing_that_a_power_cut_takes_back(
    tmp_path: Path, change: Callable[[Ledger, LogState], object]
) -> None:
    """If the checkpoint comes first and cannot be written, the page is unchanged; with room it changes."""
    fs = FaultyFileSystem()
    log = open_log(tmp_path, fs=fs)
    log.append([b"%d" % number for number in range(5)], ack="durable")
    handle, page = log.handle, log.handle.page
    before = bytes(page.words)
    with handle.append_locked(), handle.sync_locked():
        fs.fail("pwritev", errno.ENOSPC)
        with pytest.raises(DiskFull):
            change(handle.ledger, page.log.read())
        assert bytes(page.words) == before
        fs.heal()
        change(handle.ledger, page.log.read())
        assert bytes(page.words) != before
    log.abandon()


_WRITES: list[Callable[[Partition], object]] = [
    lambda log: log.trim(2),
    lambda log: log.truncate(3),
    lambda log: log.append([b"x"], producer=ProducerStamp(1 << 61, 0, 0)),
    lambda log: log.handle.ledger.record_compaction(3, 1, 0),
    lambda log: log.close(),
]


@pytest.mark.parametrize("change", _WRITES, ids=["trim", "truncate", "producers", "compaction", "close"])
def test_a_checkpoint_that_could_not_be_synced_fails_the_partition(
    tmp_path: Path, change: Callable[[Partition], object]
) -> None:
    """No process appends, until one reopens the log and so recovers it."""
    fs = FaultyFileSystem()
    log, other = open_log(tmp_path, fs=fs), open_log(tmp_path)
    log.append([b"%d" % number for number in range(5)], ack="durable")
    for sync in ("fsync", "fdatasync"):
        fs.fail(sync, errno.EIO, times=None)
    with pytest.raises((OSError, PartitionFailed)):
        change(log)
    fs.heal()
    for one in (log, other):
        with pytest.raises((PartitionFailed, StoreClosed)):
            one.append([b"more"])
    log.abandon()
    other.abandon()
    again = open_log(tmp_path)
    again.append([b"more"], ack="durable")
    assert values(again)[-1] == b"more"


def test_a_truncation_is_announced_before_anything_is_written(tmp_path: Path) -> None:
    """After a death at any point of it, the next process recovers the log; without the range it removes nothing."""
    fs = FaultyFileSystem()
    log = open_log(tmp_path, fs=fs)
    log.append([b"%d" % number for number in range(5)], ack="durable")
    handle, page = log.handle, log.handle.page
    with handle.append_locked(), handle.sync_locked():
        fs.fail("pwritev", errno.ENOSPC)
        with pytest.raises(DiskFull):
            handle.ledger.start_truncation(page.log.read(), _LOST, 0)
        assert page.writing == REWRITING
        fs.heal()
    log.append([b"5"])
    assert values(log) == [b"%d" % number for number in range(6)]
    assert not page.writing


class _FastFaults(FaultyFileSystem, NoSyncFileSystem):
    """Dies on demand, and does not wait for the disk: no power is cut here."""


def test_a_truncation_that_was_cut_short_is_ended_by_whoever_moves_the_recovery_point(tmp_path: Path) -> None:
    """After a death at any call, the next process to advance the recovery point completes the truncation.

    Otherwise the recovery would begin after the records to remove, and keep them. No record gets a lost offset, and
    truncated records do not come back.
    """
    step = announced = 0
    is_done = False
    while not is_done:
        step += 1
        folder, fs = tmp_path / f"{step}", _FastFaults()
        log, other = (open_log(folder, fs=one) for one in (fs, None))
        for number in range(6):
            log.append([b"%d" % number])
            if number == 1:
                log.roll()
        other.append([b"6"])
        fs.die_at(step)
        try:
            log.truncate(4)
            is_done = True
        except Died:
            if other.handle.page.writing != REWRITING:
                continue
            announced += 1
        other.advance_recovery_point()
        again = open_log(folder)
        was_cut = bool(again.lost_ranges())
        offset = again.append([b"new"], ack="durable")
        assert [lost for lost in again.lost_ranges() if lost.base_offset <= offset < lost.end_offset] == []
        kept = 4 if was_cut else 7
        assert values(again) == [*(b"%d" % number for number in range(kept)), b"new"], f"step {step}"
        assert was_cut or not is_done
        for one in (again, other):
            one.close()
    assert announced > 5


def test_a_store_into_a_word_is_one_call_into_c() -> None:
    """Interrupts are checked only after the store, as they would be at the start of a function written in Python."""
    for name in ("start_append", "end_append", "mark_failed", "unmark_failed"):
        assert name not in vars(Ledger), f"{name} is made in `adopt`, of `partial`"
