"""`segmentlog verify` finds every byte that differs from what was written, and reports nothing else as damage."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from broken import batches_of, command, copied, crash, findings, flip, log_files, make_store, records

import segmentlog
from segmentlog.format.batch_codecs import UNCOMPRESSED
from segmentlog.format.checkpoint import SLOT_SIZE, slot_size
from segmentlog.format.encode import encode_batch
from segmentlog.inspection.partition_inspection import _PartitionInspector
from segmentlog.storage.state_page import PAGE_SIZE, StatePage

# ---------------------------------------------------------------- flipped bytes


def test_strict_verification_exits_with_3_for_a_wrong_byte_in_a_cache(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A flipped byte of an index: a warning and 0, with --strict the same warning and 3."""
    store = tmp_path / "store"
    folder = make_store(store)
    assert command(store, "verify", "--strict") == 0
    flip(next(iter(sorted(folder.glob("*.index")))), 1, 4)
    assert command(store, "verify") == 0
    assert command(store, "verify", "--strict") == 3
    assert "warning: " in capsys.readouterr().out


@pytest.mark.parametrize("compression", ["none", "lz4"])
def test_every_flipped_byte_of_a_log_is_damage(tmp_path: Path, compression: str) -> None:
    """Every byte of a segment counts: damage is reported with file, position and offsets."""
    store = tmp_path / "store"
    size = 40 if compression == "lz4" else 2  # smaller batches are not compressed
    folder = make_store(store, batches=3, records=size, compression_type=compression)
    assert findings(store) == []
    for batch in batches_of(folder):
        step = 1 if compression == "none" else 7
        for position in range(batch.position, batch.position + batch.size_bytes, step):
            flip(batch.path, position, 1 << position % 8)
            (found,) = findings(store)
            flip(batch.path, position, 1 << position % 8)
            assert (found.severity, found.path) == ("damage", str(batch.path))
            assert found.position == batch.position, position
            assert found.position + found.size_bytes == batch.position + batch.size_bytes
            assert (found.base_offset, found.end_offset) == (batch.base_offset, batch.next_offset)
    assert findings(store) == []


def test_every_flipped_byte_of_an_index_is_a_warning(tmp_path: Path) -> None:
    """A wrong index entry is reported with its file, and affects no record: indexes are caches."""
    store = tmp_path / "store"
    folder = make_store(store)
    whole = records(store)
    for path in [*folder.glob("*.index"), *folder.glob("*.timeindex")]:
        entry = 8 if path.suffix == ".index" else 16
        for position in range(path.stat().st_size):
            flip(path, position, 1 << position % 8)
            (found,) = findings(store)
            assert found.severity == "warning"
            assert found.path == str(path)
            assert found.position == position // entry * entry
            if position % 5 == 0:
                with segmentlog.open(store, read_only=True) as opened:
                    assert {one.offset: one.value for one in opened.consumer("t")} == whole
            flip(path, position, 1 << position % 8)


def test_every_flipped_byte_of_a_checkpoint_is_found(tmp_path: Path) -> None:
    """A flipped byte in a slot is damage; in the padding after it, which is never read, it is a warning."""
    store = tmp_path / "store"
    path = make_store(store) / "checkpoint"
    data = path.read_bytes()
    for slot in (0, SLOT_SIZE):
        used = slot + slot_size(data[slot : slot + SLOT_SIZE])
        for position in [*range(slot, used), used, used + 1, slot + SLOT_SIZE - 1]:
            flip(path, position)
            (found,) = findings(store)
            flip(path, position)
            assert found.path == str(path)
            if position < used:
                assert (found.severity, found.position, found.size_bytes) == ("damage", slot, SLOT_SIZE)
            else:
                assert (found.severity, found.position) == ("warning", used)


@pytest.mark.long
def test_flipped_bytes_of_the_state_page(tmp_path: Path) -> None:
    """Every used byte of the state page is checked. A wrong byte only costs a recovery, so it is a warning.

    Some flipped bytes have no effect: unused words, and the copy of each block that is not current, which the next
    write replaces. Flags only cause checks: `writing` makes the next append check the end (a note), `failed` makes the
    next open recover (a warning). `config`, `moved` and `waiting` are counters: they make readers check again or be
    woken.
    """
    store = tmp_path / "store"
    path = make_store(store) / "state"
    page = StatePage(bytearray(path.read_bytes()))
    checked = set(range(7 * 8))
    for block, word, fields in ((page.log, 16, 10), (page.sync, 64, 6)):
        copy = block._positions[page.words[word] & 1]
        checked |= set(range(word * 8, word * 8 + 8)) | set(range(copy, copy + (fields + 1) * 8))
    flags = {**dict.fromkeys(range(64, 72), "note"), **dict.fromkeys(range(72, 80), "warning")}
    for position in [*range(0, 100), *range(100, 130 * 8, 3), PAGE_SIZE - 1]:
        flip(path, position, 0x40)
        severities = [one.severity for one in findings(store) if one.path == str(path)]
        damage = findings(store, "damage")
        flip(path, position, 0x40)
        assert severities == (["warning"] if position in checked else [flags[position]] if position in flags else [])
        assert damage == []


def test_a_damaged_state_page_costs_no_record(tmp_path: Path) -> None:
    """The next open recovers from the checkpoint."""
    store = tmp_path / "store"
    folder = make_store(store)
    whole = records(store)
    flip(folder / "state", 3)
    assert command(store, "verify") == 0
    assert records(store) == whole


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("store.json", b"{}", "not JSON with 'format'"),
        ("store.json", b'{"format": 9, "store_id": "x"}', "format 9"),
        ("store.json", None, "missing"),
        ("t/topic.json", b'{"format": 1', "create it again"),
        ("t/topic.json", b'{"format": 1, "partitions": 1, "config": {"nonsense": 1}}', "nonsense"),
        ("t/topic.json", b'{"format": 1, "partitions": 0, "config": {}}', "0 partitions"),
        ("t/topic.json", b'{"format": 1, "partitions": 2, "config": {}}', "folder is missing"),
        ("t/topic.json", None, "missing"),
    ],
)
def test_a_damaged_store_or_topic_file(tmp_path: Path, name: str, content: bytes | None, told: str) -> None:
    """The file is reported, and the logs are checked nevertheless, including wrong bytes in them."""
    store = tmp_path / "store"
    folder = make_store(store)
    flip(log_files(folder)[1], 50)
    if content is None:
        (store / name).unlink()
    else:
        (store / name).write_bytes(content)
    damage = findings(store, "damage")
    assert [one for one in damage if told in str(one)]
    assert [one for one in damage if one.path == str(log_files(folder)[1])]
    assert command(store, "verify") == 3


# ---------------------------------------------------------------- what is missing


@pytest.mark.parametrize("which", [0, 1, -1])
def test_a_missing_segment_is_damage(tmp_path: Path, which: int) -> None:
    """The missing segment may be the first, a middle one, or the last: its offsets are reported."""
    store = tmp_path / "store"
    folder = make_store(store)
    gone = log_files(folder)[which]
    for suffix in (".log", ".index", ".timeindex"):
        gone.with_suffix(suffix).unlink(missing_ok=True)
    base = int(gone.stem)
    missing = [one for one in findings(store, "damage") if one.base_offset >= 0]
    assert [(one.base_offset, one.end_offset) for one in missing] == [(base, base + 4)]


def test_a_segment_that_lost_its_end_is_damage(tmp_path: Path) -> None:
    """Truncated within a batch or between two: the offsets up to the next segment are reported."""
    store = tmp_path / "store"
    folder = make_store(store)
    batch = batches_of(folder)[1]
    for size in (batch.position, batch.position + 20, batch.position + batch.size_bytes - 1):
        os.truncate(batch.path, size)
        damage = findings(store, "damage")
        assert [(one.base_offset, one.end_offset) for one in damage] == [(batch.base_offset, batch.next_offset)]


def test_an_active_segment_that_is_too_short_is_damage(tmp_path: Path) -> None:
    """The live state page says how long it must be."""
    store = tmp_path / "store"
    batch = batches_of(make_store(store))[-1]
    os.truncate(batch.path, batch.position)
    (found,) = findings(store, "damage")
    assert (found.path, found.base_offset, found.end_offset) == (str(batch.path), batch.base_offset, batch.next_offset)


def test_offsets_that_no_batch_has_are_damage(tmp_path: Path) -> None:
    """A batch that was taken out cleanly is missed, also in a compacted topic: compaction leaves no hole."""
    store = tmp_path / "store"
    folder = make_store(store, batches=3, segment_records=4)
    first, second, _ = batches_of(folder)
    data = first.path.read_bytes()
    first.path.write_bytes(data[second.position :])
    damage = findings(store, "damage")
    assert [(one.base_offset, one.end_offset) for one in damage] == [(0, 2)]
    with segmentlog.open(store) as opened:
        opened.alter_topic("t", cleanup_policy="compact")
    assert findings(store, "damage") == damage


def test_batches_in_the_wrong_place_are_damage(tmp_path: Path) -> None:
    """A segment under another one's name is whole by itself, and does not belong there."""
    store = tmp_path / "store"
    folder = make_store(store)
    first, second, _ = log_files(folder)
    second.write_bytes(first.read_bytes())
    damage = findings(store, "damage")
    assert damage
    assert {one.path for one in damage} == {str(second)}


# ---------------------------------------------------------------- what is no damage


@pytest.mark.parametrize("tail", [b"SLB\x01", b"garbage", b"\0" * 5000, b"SLB\x01" + b"\0" * 200])
def test_a_torn_tail_is_no_damage(tmp_path: Path, tail: bytes) -> None:
    """Above the recovery point of a store that was not closed, the next open cuts off what is torn."""
    store = tmp_path / "store"
    make_store(store, segment_records=1000)
    with segmentlog.open(store, background=False) as opened:
        opened.topic("t").partition(0).append([b"more"])
        folder = crash(store, tmp_path / "crashed")
    (log,) = log_files(folder)
    end = batches_of(folder)[-1] if not log.read_bytes().endswith(b"\0") else None
    assert end is None  # preallocated
    written = log.read_bytes().rstrip(b"\0")
    log.write_bytes(written + tail)
    found = findings(tmp_path / "crashed")
    assert {one.severity for one in found} <= {"note"}
    assert bool(found) == bool(tail.strip(b"\0"))
    assert command(tmp_path / "crashed", "verify") == 0
    assert len(records(tmp_path / "crashed")) == 13
    assert findings(tmp_path / "crashed", "damage", "warning") == []


@pytest.mark.parametrize("cut", [1, 50, 95, 96, 97, 120])
def test_a_batch_cut_short_at_the_tail_is_no_damage(tmp_path: Path, cut: int) -> None:
    """A batch that reached the disk only in part is not damage, either."""
    store = tmp_path / "store"
    make_store(store, segment_records=1000)
    with segmentlog.open(store, background=False) as opened:
        opened.topic("t").partition(0).append([b"more records, long enough to be cut anywhere"])
        folder = crash(store, tmp_path / "crashed")
    (log,) = log_files(folder)
    written = log.read_bytes().rstrip(b"\0")
    start = written.rindex(b"SLB\x01")
    log.write_bytes(written[: start + cut])
    (note,) = findings(tmp_path / "crashed")
    assert (note.severity, note.position) == ("note", start)
    assert "the next open moves the bytes" in note.what


def test_whole_batches_behind_a_torn_one_are_a_warning(tmp_path: Path) -> None:
    """A power cut may leave a hole above the recovery point: no damage, but the next open would drop what follows."""
    store = tmp_path / "store"
    make_store(store, batches=1, segment_records=1000)
    with segmentlog.open(store, background=False) as opened:
        for number in range(3):
            opened.topic("t").partition(0).append([b"more %d" % number])
        folder = crash(store, tmp_path / "crashed")
    (log,) = log_files(folder)
    torn = log.read_bytes().index(b"more 0")
    flip(log, torn)
    (found,) = findings(tmp_path / "crashed")
    assert found.severity == "warning"
    assert "2 intact batches follow" in found.what
    assert command(tmp_path / "crashed", "verify") == 0


def test_bytes_behind_a_live_end_are_not_looked_at(tmp_path: Path) -> None:
    """An append in flight, or what one left behind: the state page says where the log ends."""
    store = tmp_path / "store"
    make_store(store, batches=1)
    with segmentlog.open(store, background=False) as opened:
        partition = opened.topic("t").partition(0)
        partition.append([b"x"])
        end = partition.handle.page.log.read().end_position
        with open(partition.segments()[-1].path, "r+b") as file:
            file.seek(end)
            file.write(b"SLB\x01 half a batch")
        assert findings(store) == []


def test_a_copy_of_a_store_is_whole(tmp_path: Path) -> None:
    """Its state page is of another folder, which is a note; every byte of a cleanly closed store is still checked."""
    store = tmp_path / "store"
    make_store(store)
    folder = copied(store, tmp_path / "copy")
    (note,) = findings(tmp_path / "copy")
    assert (note.severity, note.path) == ("note", str(folder / "state"))
    for batch in batches_of(folder):
        flip(batch.path, batch.position + 30)
        (found,) = findings(tmp_path / "copy", "damage", "warning")
        flip(batch.path, batch.position + 30)
        assert (found.severity, found.position) == ("damage", batch.position)


def test_lost_ranges_explain_gaps(tmp_path: Path) -> None:
    """Offsets have gaps after a machine's death and after a truncation, which is not a finding."""
    store = tmp_path / "store"
    make_store(store)
    with segmentlog.open(store, background=False) as opened:
        opened.topic("t").partition(0).append([b"more"])
        crash(store, tmp_path / "crashed")
    with segmentlog.open(tmp_path / "crashed", background=False) as opened:
        partition = opened.topic("t").partition(0)
        assert partition.lost_ranges()
        partition.append([b"on", b"it", b"goes"])
        partition.truncate(partition.log_end_offset - 1)
        partition.append([b"and on"])
        partition.trim(3)
    assert findings(tmp_path / "crashed", "damage", "warning") == []


@pytest.mark.parametrize(
    "settings",
    [
        {"message_timestamp_type": "LogAppendTime"},
        {"compression_type": "lz4", "segment_bytes": 2000},
        {"partitions": 3},
    ],
)
def test_a_healthy_store_has_no_findings(tmp_path: Path, settings: dict[str, object]) -> None:
    """A healthy store has no findings with any configuration; an empty store has none, either."""
    store = tmp_path / "store"
    make_store(store, batches=20, records=30, segment_records=None, **settings)
    with segmentlog.open(store) as opened:
        opened.create_topic("empty")
        opened.create_topic("opened").partition(0)
    assert findings(store) == []


def test_compacted_batches_are_healthy(tmp_path: Path) -> None:
    """Batches with an offset for each record that is left, and gaps between batches, in a sealed segment."""
    store = tmp_path / "store"
    folder = make_store(store, batches=4, segment_records=4, index_interval_bytes=4096)
    batch = encode_batch(
        [b"one", b"two"], now_ms=2000, compression=UNCOMPRESSED, offset_deltas=np.array([1, 3], np.uint32)
    )
    path = log_files(folder)[0]
    path.write_bytes(bytes(batch.placed_at(0, 0)) + bytes(batch.payload))
    for suffix in (".index", ".timeindex"):
        path.with_suffix(suffix).unlink()
    assert findings(store) == []


def test_damage_does_not_surface_batches_inside_values(tmp_path: Path) -> None:
    """The value of a damaged record may hold whole batches (a log in a log): they are not taken for its own."""
    inner = encode_batch([b"inner"], now_ms=1, compression=UNCOMPRESSED)
    value = bytes(inner.placed_at(1000, 0)) + bytes(inner.payload)
    store = tmp_path / "store"
    with segmentlog.open(store, background=False) as opened:
        partition = opened.create_topic("t", compression_type="none").partition(0)
        for _ in range(3):
            partition.append([value])
    middle = batches_of(store / "t" / "0")[1]
    for position in (0, 10, 70, 90, 97, middle.size_bytes - 1):
        flip(middle.path, middle.position + position)
        (found,) = findings(store)
        flip(middle.path, middle.position + position)
        assert (found.position, found.size_bytes) == (middle.position, middle.size_bytes)


# ---------------------------------------------------------------- beside others, and on the command line

_WRITER = """
import sys, segmentlog
store = segmentlog.open(sys.argv[1], background=False)
partition = store.topic("t").partition(0)
print("ready", flush=True)
number = 0
while True:
    partition.append([b"value %d" % number] * (number % 50 + 1))
    number += 1
    if number % 500 == 0:
        partition.trim(max(partition.log_end_offset - 20_000, 0))
    if number % 800 == 0:
        partition.truncate(partition.log_end_offset - 10)
"""


def test_verify_beside_a_writer_finds_nothing(tmp_path: Path) -> None:
    """Verify reports no unfinished batch, roll, trim or truncation of another process."""
    store = tmp_path / "store"
    make_store(store, segment_records=None, segment_bytes=64 << 10, index_interval_bytes=100)
    writer = subprocess.Popen([sys.executable, "-c", _WRITER, str(store)], stdout=subprocess.PIPE)
    assert writer.stdout is not None
    writer.stdout.readline()
    try:
        for _ in range(25):
            found = findings(store)
            assert [one for one in found if one.severity != "note"] == []
            assert writer.poll() is None
    finally:
        writer.kill()
        writer.wait()
    assert findings(store, "damage", "warning") == []


def test_files_that_change_faster_than_they_are_looked_at_are_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Findings of every inspection count; findings of only the last one are notes that the state was unclear."""
    store = tmp_path / "store"
    folder = make_store(store)
    batch = batches_of(folder)[3]
    flip(batch.path, batch.position + 100)
    numbers = count()
    run = _PartitionInspector.run

    def hurried(look: _PartitionInspector) -> None:
        run(look)
        raise FileNotFoundError(errno.ENOENT, "No such file", f"{folder}/{next(numbers):020d}.log")

    monkeypatch.setattr(_PartitionInspector, "run", hurried)
    monkeypatch.setattr(_PartitionInspector, "has_changed", lambda look: True)
    monkeypatch.setattr("segmentlog.inspection.partition_inspection._PAUSE_S", 0)
    found = findings(store)
    assert [(one.path, one.position) for one in found if one.severity == "damage"] == [
        (str(batch.path), batch.position)
    ]
    assert [one.what for one in found if one.path == str(folder)] == [
        "it changed during each of 10 inspections; findings that only the last inspection had are not reported; inspect"
        " it again"
    ]


def test_a_line_a_finding_and_the_exit_status(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """0 and nothing on stdout for a whole store; 3 and a line with path, byte and offsets for a damaged one."""
    store = tmp_path / "store"
    folder = make_store(store)
    assert command(store, "verify") == 0
    out, err = capfd.readouterr()
    assert out == ""
    assert "1 partitions, 3 segments, 6 batches, 12 records" in err
    assert "no damage" in err
    batch = batches_of(folder)[3]
    flip(batch.path, batch.position + 100)
    assert command(store, "verify", "t") == 3
    out, err = capfd.readouterr()
    assert out.startswith(f"damage: {batch.path} at byte {batch.position} ({batch.size_bytes} bytes), offsets [6, 8): ")
    assert out.count("\n") == 1
    assert "repair" in err
    assert command(store, "verify", "--json") == 3
    found = json.loads(capfd.readouterr().out)
    assert (found["severity"], found["path"], found["position"]) == ("damage", str(batch.path), batch.position)
    assert (found["topic"], found["partition"], found["base_offset"], found["end_offset"]) == ("t", 0, 6, 8)


def test_unknown_files_are_noted(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Unknown files are notes and not damage, because another program may use them; --quiet omits them."""
    store = tmp_path / "store"
    folder = make_store(store)
    for path in (store / "README", store / "t" / "notes", folder / "00000000000000000000.bak", folder / "x.log"):
        path.write_bytes(b"?")
    assert command(store, "verify") == 0
    out = capfd.readouterr().out
    for name in ("README", "notes", ".bak", "x.log"):
        assert name in out
    assert out.count("note: ") == 4
    assert command(store, "verify", "--quiet") == 0
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize("arguments", [("verify", "u"), ("repair", "u", "--yes")])
def test_a_topic_that_is_not_there(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    """A missing topic, and a folder that is not a store, cause an error of one line."""
    make_store(tmp_path / "store")
    assert command(tmp_path / "store", *arguments) == 1
    assert "topic 'u': it does not exist" in capfd.readouterr().err
    (tmp_path / "other").mkdir()
    assert command(tmp_path / "other", *arguments) == 1
    assert "no store" in capfd.readouterr().err
    assert command(tmp_path / "nowhere", *arguments) == 1
    assert "no such folder" in capfd.readouterr().err
