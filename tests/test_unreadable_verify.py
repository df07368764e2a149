"""A batch whose checksum is right and whose records do not decode: what `verify`, `repair` and `dump` do with it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from broken import command, copied, crash, findings, flip, log_files
from logs import tree_bytes
from unreadable import COUNT, KINDS, NOW_MS, ONE_OF_EACH, append_around, append_unreadable
from wire import Sent, encoded, foreign, forged

import segmentlog
from segmentlog import LogTruncated, UnreadableBatch
from segmentlog.inspection.finding import Tally
from segmentlog.inspection.scrubber import Scrubber, ScrubTarget
from segmentlog.inspection.segment_inspection import inspect_segment
from segmentlog.inspection.split_inspection import pack, unpack
from segmentlog.log.producer_state import ProducerStamp
from segmentlog.storage.fs import FileSystem

each_layout = pytest.mark.parametrize("kind", ONE_OF_EACH)
DROP = ("repair", "--drop-unreadable", "--yes")


def make(path: Path, *kinds: str, roll: bool = False, **settings: object) -> Path:
    """Return a closed store with topic t: "before 0", an unreadable batch, "after 0", "before 1" and so on."""
    with segmentlog.open(path, background=False) as store:
        log = store.create_topic("t", **{"fsync": "never", **settings}).partition(0)
        for number, kind in enumerate(kinds):
            log.append([b"before %d" % number])
            if roll:
                log.roll()
            append_unreadable(log, kind)
            if roll:
                log.roll()
            log.append([b"after %d" % number])
    return path


def readable(path: Path) -> dict[int, bytes | None]:
    """Offset to value of what a reader gets that skips damage."""
    with segmentlog.open(path, background=False) as store, store.consumer("t", skip_damaged=True) as consumer:
        return {record.offset: record.value for record in consumer}


def segment(path: Path) -> Path:
    """Return the first segment file."""
    return log_files(path / "t" / "0")[0]


# ---------------------------------------------------------------- verify


@pytest.mark.parametrize("is_live", [True, False])
def test_verify_lists_it_apart(tmp_path: Path, capfd: pytest.CaptureFixture[str], is_live: bool) -> None:
    """A finding for each, with its place, offsets, reason and remedy; no damage; exit status 4."""
    store = make(tmp_path / "store", *KINDS)
    if not is_live:
        crash(store, tmp_path / "crashed")
        store = tmp_path / "crashed"
    found = findings(store)
    assert [one.severity for one in found] == ["unreadable"] * len(KINDS)
    assert [(one.base_offset, one.end_offset) for one in found] == [(5 * n + 1, 5 * n + 4) for n in range(len(KINDS))]
    assert all(f"the {COUNT} records that its header announces" in one.what for one in found)
    assert len({one.what for one in found}) == len(KINDS)
    with segmentlog.open(store, read_only=True) as opened:
        batches = {batch.base_offset: batch for batch in opened.topic("t").partition(0).read(0)}
    assert [(one.position, one.size_bytes) for one in found] == [
        (batches[one.base_offset]._position, batches[one.base_offset].size_bytes) for one in found
    ]
    assert command(store, "verify") == command(store, "verify", "t", "-q") == 4
    out, err = capfd.readouterr()
    assert out.count("unreadable: ") == 2 * len(KINDS)
    assert f"no damage, {len(KINDS)} unreadable batches" in err
    assert command(store, "verify", "--json") == 4
    lines = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert {line["severity"] for line in lines} == {"unreadable"}


def test_damage_outranks_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """With a damaged batch in the same log, verify lists both, and the exit status is that of damage."""
    store = make(tmp_path / "store", "columns")
    flip(segment(store), 97)
    assert sorted(one.severity for one in findings(store)) == ["damage", "unreadable"]
    assert command(store, "verify") == 3
    assert "1 damage, 1 unreadable batch:" in capfd.readouterr().err


@each_layout
def test_every_flipped_byte_of_it_is_damage(tmp_path: Path, kind: str) -> None:
    """A flipped byte is damage, whether or not the batch was readable before."""
    store = make(tmp_path / "store", kind)
    (found,) = findings(store)
    for position in range(found.position, found.position + found.size_bytes):
        flip(segment(store), position)
        (now,) = findings(store)
        flip(segment(store), position)
        assert now.severity == "damage", position
        assert (now.base_offset, now.end_offset) == (found.base_offset, found.end_offset)


def test_it_is_found_elsewhere_too(tmp_path: Path) -> None:
    """A report on a segment names unreadable batches after it was sent between processes."""
    path = str(segment(make(tmp_path / "store", *KINDS)))
    found = inspect_segment(FileSystem(), path, 0, end_position=None, epoch=0, tally=Tally())
    assert len(found.unreadable) == len(KINDS)
    assert unpack(pack(found)) == found


# ---------------------------------------------------------------- repair


@each_layout
def test_repair_leaves_it(tmp_path: Path, capfd: pytest.CaptureFixture[str], kind: str) -> None:
    """No byte changes; the message has the batch and the option, and the exit status is 4."""
    store = make(tmp_path / "store", kind)
    before = tree_bytes(store)
    for options in (("--yes",), ("--dry-run",), ("--yes", "--json")):
        assert command(store, "repair", *options) == 4
        out, err = capfd.readouterr()
        assert '"severity":"unreadable"' in out.replace(" ", "") if "--json" in options else "unreadable: " in out
        assert "--drop-unreadable" in err
    assert tree_bytes(store) == before


def test_repair_says_what_would_be_lost(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """``--dry-run`` prints the offsets, the announced number of records and the reason, and changes nothing."""
    store = make(tmp_path / "store", *ONE_OF_EACH)
    before = tree_bytes(store)
    assert command(store, "repair", "--drop-unreadable", "--dry-run") == 4
    out = capfd.readouterr().out
    assert out.count(f"unreadable batch, {COUNT} records by its header: ") == 2
    for offsets in ("[1, 4)", "[6, 9)"):
        assert f"offsets {offsets} would be recorded as lost: unreadable, cut out by a repair" in out
    assert command(store, "repair", "--drop-unreadable", "--dry-run", "--json") == 4
    (line,) = map(json.loads, capfd.readouterr().out.splitlines())
    assert [cut["record_count"] for cut in line["cuts"]] == [COUNT] * 2
    assert tree_bytes(store) == before


def _cleanly(store: Path, to: Path) -> Path:
    return store


def _copied(store: Path, to: Path) -> Path:
    copied(store, to)
    return to


def _crashed(store: Path, to: Path) -> Path:
    crash(store, to)
    return to


@pytest.mark.parametrize("state", [_cleanly, _copied, _crashed])
@pytest.mark.parametrize("roll", [False, True])
@pytest.mark.parametrize("kinds", [(kind,) for kind in KINDS] + [tuple(KINDS)], ids="+".join)
def test_repair_drops_it(
    tmp_path: Path, kinds: tuple[str, ...], roll: bool, state: Callable[[Path, Path], Path]
) -> None:
    """Its offsets become a lost range, its bytes are in quarantine, every other record stays, and no offset returns."""
    store = state(make(tmp_path / "store", *kinds, roll=roll), tmp_path / "other")
    expected = {}
    for number in range(len(kinds)):
        expected |= {5 * number: b"before %d" % number, 5 * number + 4: b"after %d" % number}
    bytes_before = {
        one.base_offset: Path(one.path).read_bytes()[one.position : one.position + one.size_bytes]
        for one in findings(store, "unreadable")
    }
    assert command(store, *DROP) == 0
    assert findings(store, "damage", "unreadable", "warning") == []
    assert command(store, "verify") == 0
    kept = sorted((store / "t" / "0" / "quarantine").iterdir())
    assert sorted(file.read_bytes() for file in kept if file.suffix == ".damaged") == sorted(bytes_before.values())
    with segmentlog.open(store, background=False) as opened:
        log = opened.topic("t").partition(0)
        lost = [one for one in log.lost_ranges() if "unreadable" in one.reason]
        assert [(one.base_offset, one.end_offset) for one in lost] == [(base, base + COUNT) for base in bytes_before]
        with opened.consumer("t") as consumer:
            assert {record.offset: record.value for record in consumer} == expected
        with pytest.raises(LogTruncated):
            log.read(2)
        assert next(log.read(1)).base_offset == 4
        assert log.append([b"new"]) >= 5 * len(kinds)


@pytest.mark.parametrize("state", [_cleanly, _copied, _crashed])
@each_layout
def test_repair_drops_it_at_the_end_and_alone(tmp_path: Path, kind: str, state: Callable[[Path, Path], Path]) -> None:
    """This also holds for the last batch, and for the only one."""
    for name, first in (("end", [b"before"]), ("alone", [])):
        made = tmp_path / name
        with segmentlog.open(made, background=False) as opened:
            log = opened.create_topic("t", fsync="never").partition(0)
            if first:
                log.append(first)
            span = append_unreadable(log, kind)
        store = state(made, tmp_path / f"other {name}")
        assert command(store, *DROP) == 0
        assert command(store, "verify") == 0
        with segmentlog.open(store, background=False) as opened:
            log = opened.topic("t").partition(0)
            assert any(one.base_offset <= span.base < one.end_offset for one in log.lost_ranges())
            base = log.append([b"new"])
            assert base >= span.end
        assert list(readable(store).values()) == [*first, b"new"]


def test_repair_beside_a_process_that_has_it_open(tmp_path: Path) -> None:
    """Its readers continue after the batch, and its appends get new offsets."""
    with segmentlog.open(tmp_path / "store", background=False) as store:
        log = store.create_topic("t", fsync="never").partition(0)
        append_around(log)
        with store.consumer("t") as consumer:
            with pytest.raises(UnreadableBatch):
                list(consumer)
            assert command(tmp_path / "store", *DROP) == 0
            assert [record.value for record in consumer] == [b"after"]
        assert log.append([b"new"]) == 5
        assert command(tmp_path / "store", "verify") == 0


@pytest.mark.parametrize("state", [_cleanly, _copied, _crashed])
@pytest.mark.parametrize("committed", [True, False, None])
def test_what_its_producer_is_known_for_stays(
    tmp_path: Path, state: Callable[[Path, Path], Path], committed: bool | None
) -> None:
    """A producer's next sequence comes after the dropped batch, and the state of its transaction stays."""
    made = tmp_path / "store"
    transactional = committed is not None
    with segmentlog.open(made, background=False) as opened:
        log = opened.create_topic("t", fsync="never").partition(0)
        log.append([b"before"])
        log.append_batches([KINDS["columns"]()], producer=ProducerStamp(7, 0, 0, transactional))
        if committed is not None:
            log.end_transaction(7, 0, committed=committed)
        log.append([b"after"])
    store = state(made, tmp_path / "other")
    assert command(store, *DROP) == 0
    assert findings(store, "damage", "unreadable", "warning") == []
    with segmentlog.open(store, background=False) as opened:
        log = opened.topic("t").partition(0)
        for isolation in ("read_uncommitted", "read_committed"):
            with opened.consumer("t", isolation=isolation) as consumer:
                assert [record.value for record in consumer] == [b"before", b"after"]
        assert log.last_stable_offset == log.log_end_offset
        base = log.append([b"next"], producer=ProducerStamp(7, 0, COUNT, transactional))
        if transactional:
            log.end_transaction(7, 0, committed=True)
        assert log.append([b"next"], producer=ProducerStamp(7, 0, COUNT, transactional)) == base
    assert findings(store, "damage", "unreadable", "warning") == []


def test_repair_of_damage_leaves_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A repair cuts out a damaged batch and keeps an unreadable one; with the option, it cuts out both."""
    store = make(tmp_path / "store", "columns")
    flip(segment(store), 97)
    assert command(store, "repair", "--yes") == 4
    out, err = capfd.readouterr()
    assert "recorded as lost: damaged, cut out by a repair" in out
    assert "1 unreadable batches were kept" in err
    assert [one.severity for one in findings(store) if one.severity != "note"] == ["unreadable"]
    assert readable(store) == {4: b"after 0"}
    assert command(store, *DROP) == 0
    assert command(store, "verify") == 0
    assert readable(store) == {4: b"after 0"}


def test_repair_of_both_at_once(tmp_path: Path) -> None:
    """Damage and an unreadable batch next to each other, in one pass: a lost range each, with its own reason."""
    store = make(tmp_path / "store", "columns", "kafka, garbage")
    flip(segment(store), 97)
    assert command(store, *DROP) == 0
    with segmentlog.open(store, background=False) as opened:
        lost = opened.topic("t").partition(0).lost_ranges()
    assert {offset for one in lost for offset in range(one.base_offset, one.end_offset)} >= {0, 1, 2, 3, 6, 7, 8}
    assert readable(store) == {4: b"after 0", 5: b"before 1", 9: b"after 1"}


# ---------------------------------------------------------------- dump


@each_layout
def test_dump(tmp_path: Path, capfd: pytest.CaptureFixture[str], kind: str) -> None:
    """The output has its header, that it is unreadable, the reason, and the other records; the exit status is 4."""
    store = make(tmp_path / "store", kind)
    file = str(segment(store))
    for options in ((), ("--records",)):
        assert command(store, "dump", file, *options) == 4
        out = capfd.readouterr().out
        assert "offsets [1, 4), 3 records" in out
        assert "  unreadable: its checksum is right, but its records do not decode: " in out
        assert ("after 0" in out) == bool(options)
    assert command(store, "dump", file, "--json", "--records") == 4
    lines = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert [line["type"] for line in lines] == ["batch", "record", "batch", "unreadable", "batch", "record"]
    assert (lines[3]["base_offset"], lines[3]["next_offset"], lines[3]["record_count"]) == (1, 4, COUNT)
    assert command(store, *DROP) == 0
    (kept,) = (store / "t" / "0" / "quarantine").iterdir()
    capfd.readouterr()
    assert command(store, "dump", str(kept)) == 4
    assert "offsets [1, 4), 3 records" in capfd.readouterr().out


def test_the_scrubber_finds_nothing(tmp_path: Path) -> None:
    """The scrubber looks for changed bytes, and these are unchanged."""
    store = make(tmp_path / "store", *KINDS, roll=True)
    scrubber = Scrubber(FileSystem(), lambda: [ScrubTarget("t", 0, str(store / "t" / "0"))], 1 << 40)
    for second in range(4):
        scrubber.scrub(second * 1000)
    assert scrubber.report().segments == 2 * len(KINDS)
    assert scrubber.report().findings == ()
    scrubber.close()


# ---------------------------------------------------------------- readable, and claimed wrongly


def test_a_wrong_largest_timestamp_is_no_damage(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A client's header may say less than its records: they are read, and no repair can do anything about it."""
    made = foreign([Sent(b"k", b"v", NOW_MS), Sent(b"k", b"w", NOW_MS + 5)])
    with segmentlog.open(tmp_path / "store", background=False) as opened:
        log = opened.create_topic("t", fsync="never").partition(0)
        log.append_batches([encoded(forged(made, max_timestamp=NOW_MS))])
    store = tmp_path / "store"
    (found,) = findings(store)
    assert (found.severity, found.base_offset, found.end_offset) == ("warning", 0, 2)
    assert f"the largest timestamp is {NOW_MS + 5}, but the header claims {NOW_MS}: the client sent it so" in found.what
    assert command(store, "verify") == 0
    assert command(store, "verify", "--strict") == 3
    assert command(store, "repair", "--yes") == 0
    assert command(store, "dump", str(segment(store))) == 0
    assert "; flaw: the largest timestamp is" in capfd.readouterr().out
    assert readable(store) == {0: b"v", 1: b"w"}
