"""`verify`, `repair`, `dump` and `describe` with producers and transactions."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from broken import command, findings, flip
from logs import FakeClock, NoSyncFileSystem, log_files, machine_dies, open_log, values
from seeds import seeds

import segmentlog
from segmentlog.config import TopicConfig
from segmentlog.format.batch import CONTROL, TRANSACTIONAL, decode_header
from segmentlog.format.batch_codecs import UNCOMPRESSED
from segmentlog.format.encode import encode_batch
from segmentlog.format.file_names import ABORTED_SUFFIX, CHECKPOINT_FILE, SNAPSHOT_SUFFIX
from segmentlog.format.producer_snapshot import (
    NAMED_ID_END,
    AbortedTransaction,
    ProducerEntry,
    decode_aborted,
    decode_snapshot,
    encode_aborted,
    encode_snapshot,
)
from segmentlog.inspection.finding import Finding, Tally
from segmentlog.inspection.partition_findings import PartitionFindings
from segmentlog.inspection.partition_inspection import inspect_partition
from segmentlog.inspection.small_files import read_checkpoint
from segmentlog.log.partition import Partition
from segmentlog.log.producer_state import ProducerStamp
from segmentlog.log.repair.partition_repair import RepairReport, repair_partition
from segmentlog.storage.state_page import ABORTS_WORD, PRODUCERS_WORD
from segmentlog.testing.simulated_disk import SimulatedDisk

ONE, TWO, UNNAMED = 1, 2, NAMED_ID_END + 1


pytestmark = pytest.mark.long


def put(log: Partition, sequence: int, count: int = 1, *, who: int = ONE, epoch: int = 0, txn: bool = False) -> int:
    """Append records whose values tell who wrote them and as which."""
    made: list[bytes | None] = [b"%d:%d" % (who, sequence + at) for at in range(count)]
    keys: list[bytes | None] = [b"%d" % ((sequence + at) % 5) for at in range(count)]
    return log.append(made, keys, producer=ProducerStamp(who, epoch, sequence, txn))


def inspected(folder: Path, fs: NoSyncFileSystem | None = None) -> PartitionFindings:
    """Return the findings of an inspection."""
    return inspect_partition(fs or NoSyncFileSystem(), str(folder), "t", 0, TopicConfig(), Tally())


def told(folder: Path) -> list[Finding]:
    """Return all findings that are worse than a note."""
    return [one for one in inspected(folder).findings if one.severity != "note"]


def repaired(folder: Path) -> RepairReport:
    """Repair it; the report."""
    return repair_partition(NoSyncFileSystem(), str(folder), "t", 0, TopicConfig, clock=FakeClock())


def committed(log: Partition) -> list[bytes | None]:
    """Return the records that read_committed readers get."""
    return values(log, isolation="read_committed")


def sample(folder: Path, **settings: Any) -> Partition:
    """Small segments, with a transaction that was committed, one that was aborted, and one that is open."""
    log = open_log(folder, **{"segment_records": 4, **settings})
    put(log, 0, 3, txn=True)
    log.end_transaction(ONE, 0, committed=True)
    put(log, 0, 2, who=TWO, txn=True)
    put(log, 0, 2, who=UNNAMED)
    put(log, 2, 2, who=TWO, txn=True)
    log.end_transaction(TWO, 0, committed=False)
    log.append([b"plain"])
    put(log, 3, 2, txn=True)
    put(log, 2, 2, who=UNNAMED)
    assert committed(log) == [b"1:0", b"1:1", b"1:2", b"%d:0" % UNNAMED, b"%d:1" % UNNAMED, b"plain"]
    return log


# ---------------------------------------------------------------- healthy


def test_open_transactions_are_told_and_are_no_damage(tmp_path: Path) -> None:
    """Open transactions are reported as notes and not as damage, whichever files record them."""
    log = sample(tmp_path)
    found = inspected(tmp_path)
    assert told(tmp_path) == []
    assert [(one.producer_id, one.first_offset) for one in found.open_transactions] == [(ONE, log.last_stable_offset)]
    (note,) = found.findings
    assert (note.severity, note.base_offset, note.end_offset) == ("note", log.last_stable_offset, log.log_end_offset)
    assert f"producer {ONE} (epoch 0) has a transaction open" in note.what
    log.close()
    for name in ("state", CHECKPOINT_FILE, "x" + SNAPSHOT_SUFFIX):
        for path in tmp_path.glob(f"*{name[1:]}" if name.startswith("x") else name):
            path.unlink()
        wrong = [one for one in told(tmp_path) if "missing: the highest assigned" not in one.what]
        assert wrong == []
        assert [one.producer_id for one in inspected(tmp_path).open_transactions] == [ONE]


def test_a_log_that_is_trimmed_up_to_its_end_and_rolls_is_healthy(tmp_path: Path) -> None:
    """The recovery point is in a segment below the log start, which exists until the point is advanced."""
    log = open_log(tmp_path, segment_records=2, file_delete_delay_ms=0)
    log.append([b"a", b"b"])
    log.trim(2)
    log.append([b"c"])
    assert [int(file.stem) for file in log_files(tmp_path)] == [0, 2]
    assert told(tmp_path) == []
    machine_dies(log)
    assert told(tmp_path) == []
    log = open_log(tmp_path, segment_records=2, file_delete_delay_ms=0)
    assert told(tmp_path) == []
    assert values(log) == [b"c"]
    log.close()


@pytest.mark.parametrize("seed", seeds("healthy logs", range(11)))
@pytest.mark.parametrize("policy", ["delete", "compact"])
def test_a_healthy_log_has_no_findings(tmp_path: Path, seed: int, policy: str) -> None:
    """Appends, outcomes, retention, compaction, truncation, recovery and lost caches cause no findings."""
    rng = random.Random(f"{seed}{policy}")
    clock = FakeClock()
    settings: dict[str, Any] = {
        "cleanup_policy": policy, "segment_bytes": rng.choice((300, 600, 2000)), "delete_retention_ms": 0,
        "file_delete_delay_ms": 0, "producer_id_expiration_ms": 5000,
    }  # fmt: skip
    log = open_log(tmp_path, clock=clock, **settings)
    who_ids = [1, 2, 3, UNNAMED, UNNAMED + 1]
    epochs = dict.fromkeys(who_ids, 0)
    for step in range(220):
        who, action = rng.choice(who_ids), rng.random()
        clock.advance(rng.choice((0, 10, 1000)))
        known = log.producer(who)
        if action < 0.5:
            epochs[who] = max(epochs[who], known.epoch if known else 0)
            sequence = known.next_sequence if known else 0
            if rng.random() < 0.1 and who < NAMED_ID_END:
                epochs[who] += 1
                sequence = rng.choice((0, sequence))
            is_open = known is not None and known.transaction_offset >= 0
            put(log, sequence, rng.randint(1, 4), who=who, epoch=epochs[who], txn=is_open or rng.random() < 0.7)
        elif action < 0.55:
            log.append([b"x" * rng.randint(1, 60)], [b"k"])
        elif action < 0.75:
            log.end_transaction(who, max(epochs[who], known.epoch if known else 0), committed=rng.random() < 0.5)
        elif action < 0.8:
            assert committed(log) is not None  # makes txnindexes
        elif action < 0.84 and policy == "delete":
            log.trim(rng.randint(log.log_start_offset, log.log_end_offset))
        elif action < 0.84:
            log.roll()
            log.compact(buffer_bytes=rng.choice((100, 10_000)))
        elif action < 0.87:
            log.truncate(rng.randint(log.log_start_offset, log.log_end_offset))
        elif action < 0.9:
            log.roll()
        elif action < 0.97:
            if rng.random() < 0.5:
                log.close()
            else:
                machine_dies(log)
                assert [one for one in told(tmp_path) if "intact batches follow" not in one.what] == []
            for file in sorted(tmp_path.iterdir()):
                if file.suffix in (SNAPSHOT_SUFFIX, ABORTED_SUFFIX) and rng.random() < 0.2:
                    file.unlink()
            log = open_log(tmp_path, clock=clock, **settings)
        assert told(tmp_path) == [], step


@pytest.mark.parametrize("seed", seeds("crashed transactions", (5,)))
def test_what_a_power_cut_leaves_is_no_damage(seed: int) -> None:
    """The state after a power cut is not damage: before recovery, after it, and after further appends."""
    config = TopicConfig(segment_records=5, fsync="always")  # type: ignore[arg-type]
    folder = "/store/t/0"
    disk = SimulatedDisk()
    disk.make_folders(folder)
    disk.find(folder).sync()
    log = Partition(folder, "t", 0, lambda: config, fs=disk.process(), clock=FakeClock())
    points = []
    for number in range(16):
        put(log, number // 2, who=number % 2 + 1, txn=True)
        put(log, number, who=UNNAMED)
        if number % 4 == 3:
            log.end_transaction(number // 4 % 2 + 1, 0, committed=number % 8 == 3)
            committed(log)
        points.append(disk.point())
    rng = random.Random(seed)
    for point in points:
        for survivor in point.crashes(rng, 3):
            fs = survivor.process()
            check_simulated(fs, folder, config)
            again = Partition(folder, "t", 0, lambda: config, fs=fs, clock=FakeClock())
            check_simulated(fs, folder, config)
            for entry in again.producers():
                put(again, entry.next_sequence, who=entry.producer_id)
            committed(again)
            check_simulated(fs, folder, config)


def check_simulated(fs: Any, folder: str, config: TopicConfig) -> None:
    """Check that every finding is one that a crash explains; lists of aborted transactions are never fsynced."""
    found = inspect_partition(fs, folder, "t", 0, config, Tally())
    excused = ("truncated by a crash", "intact batches follow")
    wrong = [one for one in found.findings if one.severity != "note" and not any(text in one.what for text in excused)]
    assert [one for one in wrong if (one.severity, one.path[-9:]) != ("warning", ABORTED_SUFFIX)] == []


def test_a_store_with_named_producers(tmp_path: Path) -> None:
    """Transactions over topics, consumer positions, the internal topics: nothing to find."""
    store = tmp_path / "store"
    with segmentlog.open(store, background=False) as opened:
        opened.create_topic("t", partitions=2, segment_records=3)
        opened.create_topic("u", cleanup_policy="compact", segment_records=5)
        with opened.producer(name="etl") as producer:
            for number in range(12):
                try:
                    with producer.transaction():
                        for at in range(3):
                            producer.send("t", b"%d" % at, key=b"%d" % at)
                            producer.send("u", b"%d" % number, key=b"%d" % at)
                        if number % 3 == 0:
                            raise KeyError
                except KeyError:
                    pass
        opened.topic("u").partition(0).roll()
        opened.topic("u").partition(0).compact()
        assert findings(store, "damage", "warning") == []
    assert (store / "@producers").is_dir()
    assert findings(store) == []
    assert command(store, "verify", "--strict") == 0


_WRITER = """
import sys, segmentlog
store = segmentlog.open(sys.argv[1], background=False)
producer = store.producer(name="writer")
print("ready", flush=True)
number = 0
while True:
    number += 1
    try:
        with producer.transaction():
            producer.send_many("t", [b"value"] * (number % 7 + 1), keys=[b"%d" % number] * (number % 7 + 1))
            if number % 3 == 0:
                raise KeyError
    except KeyError:
        pass
    if number % 200 == 0:  # while files are replaced again and again, no look at them is of one moment
        log = store.topic("t").partition(0)
        list(log.read(log.log_start_offset, isolation="read_committed"))
        log.compact() if number % 400 else log.trim(max(log.log_end_offset - 500, 0))
"""


def test_verify_beside_transactions_finds_nothing(tmp_path: Path) -> None:
    """Verify reports no marker, roll, snapshot or compaction of another process, unfinished or completed."""
    store = tmp_path / "store"
    with segmentlog.open(store, background=False) as opened:
        opened.create_topic("t", segment_bytes=3000, cleanup_policy="compact", fsync="never", file_delete_delay_ms=0)
    writer = subprocess.Popen([sys.executable, "-c", _WRITER, str(store)], stdout=subprocess.PIPE)
    assert writer.stdout is not None
    writer.stdout.readline()
    try:
        for _ in range(25):
            assert findings(store, "damage", "warning") == []
            assert writer.poll() is None
    finally:
        writer.kill()
        writer.wait()
    assert findings(store, "damage", "warning") == []
    with segmentlog.open(store, background=False) as opened, opened.producer(name="writer"):
        log = opened.topic("t").partition(0)
        assert log.last_stable_offset == log.log_end_offset
    assert findings(store, "damage", "warning") == []


def test_folders_that_are_left_are_told_apart(tmp_path: Path) -> None:
    """Folders of groups and producers are not remains. A finding applies to one folder, not to the next."""
    store = tmp_path / "store"
    with segmentlog.open(store, background=False) as opened:
        opened.create_topic("t")
    for name in ("@deleted-0", "@groups", "@later", "@producers", "t@x", "zzz"):
        (store / name).mkdir()
    told = {Path(one.path).name: "may be deleted" in one.what for one in findings(store)}
    assert told == {"@deleted-0": True, "@later": False, "t@x": False, "zzz": False}


# ---------------------------------------------------------------- what is wrong


def test_every_flipped_byte_of_a_snapshot_or_txnindex_is_a_warning(tmp_path: Path) -> None:
    """The file is ignored, and its content is derived from the log."""
    log = sample(tmp_path / "log")
    wanted = committed(log), log.producers()
    log.close()
    caches = [*(tmp_path / "log").glob("*" + ABORTED_SUFFIX), *(tmp_path / "log").glob("*" + SNAPSHOT_SUFFIX)]
    assert {path.suffix for path in caches} == {ABORTED_SUFFIX, SNAPSHOT_SUFFIX}
    for path in caches:
        for position in range(path.stat().st_size):
            flip(path, position, 1 << position % 8)
            (found,) = told(tmp_path / "log")
            assert (found.severity, found.path) == ("warning", str(path))
            if position % 9 == 0:
                copy = tmp_path / f"{path.name}-{position}"
                shutil.copytree(tmp_path / "log", copy)
                again = open_log(copy, segment_records=4)
                assert committed(again) == wanted[0]
                assert [one.next_sequence for one in again.producers()] == [one.next_sequence for one in wanted[1]]
            flip(path, position, 1 << position % 8)
    assert told(tmp_path / "log") == []


def change_entries(path: Path, **fields: Any) -> None:
    """Change the last entry of a snapshot."""
    entries = decode_snapshot(path.read_bytes())
    entries[0] = msgspec.structs.replace(entries[0], **fields)
    path.write_bytes(encode_snapshot(entries))


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"next_offset": 10**6}, "it has offsets from"),
        ({"next_offset": 1, "runs": (), "transaction_offset": -1}, "its last batch ends at offset"),
        ({"epoch": 5}, "its epoch is 0, not 5"),
        ({"runs": ()}, "its next sequence is"),
        ({"transaction_offset": 0}, "its transaction began at offset"),
        ({"producer_id": 77}, "producer 77: it has no batch at offset 3"),
    ],
)
def test_a_snapshot_that_contradicts_the_log(tmp_path: Path, fields: dict[str, Any], what: str) -> None:
    """The checksum is right: verify warns and says what is wrong, and repair removes the file."""
    log = sample(tmp_path)
    log.close()
    path = sorted(tmp_path.glob("*" + SNAPSHOT_SUFFIX))[1]
    change_entries(path, **fields)
    wrong = [one for one in told(tmp_path) if one.path == str(path)]
    assert [one.severity for one in wrong] == ["warning"]
    assert what in wrong[0].what
    report = repaired(tmp_path)
    assert report.caches == [str(path)]
    assert not path.exists()
    assert told(tmp_path) == []


def test_a_snapshot_that_lacks_a_producer(tmp_path: Path) -> None:
    """A producer with a name is never forgotten."""
    sample(tmp_path).close()
    path = max(tmp_path.glob("*" + SNAPSHOT_SUFFIX))
    entries = decode_snapshot(path.read_bytes())
    path.write_bytes(encode_snapshot([one for one in entries if one.producer_id != UNNAMED]))
    assert told(tmp_path) == []  # it may have been forgotten
    path.write_bytes(encode_snapshot([one for one in entries if one.producer_id != TWO]))
    (found,) = told(tmp_path)
    assert f"producer {TWO}, whose last batch ends at" in found.what


def test_removing_a_snapshot_says_who_is_forgotten(tmp_path: Path) -> None:
    """Producers all of whose batches were deleted are in snapshots alone."""
    log = open_log(tmp_path, segment_records=2)
    put(log, 0, 2)
    for number in range(8):
        put(log, number, who=TWO)
    log.trim(6)
    path = min(tmp_path.glob("*" + SNAPSHOT_SUFFIX))
    assert told(tmp_path) == []
    change_entries(path, next_offset=1000)
    (found,) = told(tmp_path)
    assert "1 of them whose batches were all deleted" in found.what
    flip(path, 20)
    (found,) = told(tmp_path)
    assert "producers whose batches were all deleted" in found.what


@pytest.mark.parametrize("change", ["missing", "extra", "other"])
def test_a_txnindex_that_contradicts_the_log(tmp_path: Path, change: str) -> None:
    """The checksum is right, so that readers trust it: repair removes the file."""
    log = sample(tmp_path)
    path = next(one for one in sorted(tmp_path.glob("*" + ABORTED_SUFFIX)) if decode_aborted(one.read_bytes())[1])
    size, (one,) = decode_aborted(path.read_bytes())
    wrong = {
        "missing": [],
        "extra": [one, AbortedTransaction(ONE, 0, one.last_offset - 1)],
        "other": [AbortedTransaction(TWO, one.first_offset + 1, one.last_offset)],
    }[change]
    path.write_bytes(encode_aborted(size, wrong))
    (found,) = told(tmp_path)
    assert (found.severity, found.path) == ("warning", str(path))
    assert ("nothing at offset" if change == "extra" else "is missing") in found.what
    repaired(tmp_path)
    assert told(tmp_path) == []
    log.close()
    again = open_log(tmp_path, segment_records=4)
    assert b"2:0" not in committed(again)
    assert decode_aborted(path.read_bytes()) == (size, [one])


def append_raw(log: Partition, sequence: int, **fields: Any) -> None:
    """Append a batch as it is: nothing looks at its numbers."""
    batch = encode_batch([b"x"], now_ms=1, compression=UNCOMPRESSED, base_sequence=sequence, **fields)
    log._appender.place([batch], 1)


def test_a_gap_in_the_sequence_of_a_producer(tmp_path: Path) -> None:
    """A gap means missing records for a named producer. An unnamed one may have been forgotten, and may start again."""
    log = open_log(tmp_path)
    put(log, 0, 3)
    put(log, 0, 3, who=UNNAMED)
    append_raw(log, 0, producer_id=UNNAMED, producer_epoch=0)
    assert told(tmp_path) == []
    append_raw(log, 5, producer_id=ONE, producer_epoch=0)
    append_raw(log, 6, producer_id=UNNAMED, producer_epoch=0)
    first, second = told(tmp_path)
    assert (first.severity, first.base_offset, first.end_offset) == ("damage", 7, 8)
    assert f"producer {ONE}: its sequence continues with 5, but 3 should follow" in first.what
    assert (second.severity, second.base_offset) == ("warning", 8)
    append_raw(log, 6, producer_id=ONE, producer_epoch=-1)
    assert any("epoch -1 comes after epoch 0" in one.what for one in told(tmp_path))


@pytest.mark.parametrize(
    ("keys", "content", "what"),
    [
        ([b"\0\0\1\0"], [b"\0" * 6 + (99).to_bytes(8, "little")], "whose transaction begins after it, at offset 99"),
        ([b"\0\0\1"], [b"\0" * 14], "that is not a transaction marker"),
        ([None], [b"\0" * 14], "that is not a transaction marker"),
        ([b"\0\0\1\0"] * 2, [b"\0" * 14] * 2, "that is not a transaction marker"),
    ],
)
def test_a_control_batch_that_says_nothing(tmp_path: Path, keys: Any, content: Any, what: str) -> None:
    """It is damage, although its checksums are right."""
    log = open_log(tmp_path)
    put(log, 0)
    batch = encode_batch(content, keys, now_ms=1, attributes=CONTROL | TRANSACTIONAL, producer_id=ONE, producer_epoch=0)
    log._appender.place([batch], 1)
    (found,) = told(tmp_path)
    assert (found.severity, found.base_offset) == ("damage", 1)
    assert what in found.what


def test_a_control_batch_of_another_kind_is_noted(tmp_path: Path) -> None:
    """A later version may write them."""
    log = open_log(tmp_path)
    put(log, 0)
    batch = encode_batch([b"\0" * 14], [b"\0\0\7\0"], now_ms=1, attributes=CONTROL, producer_id=ONE, producer_epoch=0)
    log._appender.place([batch], 1)
    assert told(tmp_path) == []
    (note,) = inspected(tmp_path).findings
    assert "does not know" in note.what


def test_a_last_stable_offset_that_is_wrong(tmp_path: Path) -> None:
    """If it is too high, undecided records count as committed; if it is too low, readers wait forever."""
    log = sample(tmp_path)
    page = log.handle.page
    state = page.log.read()
    page.log.write(msgspec.structs.replace(state, last_stable_offset=state.log_end_offset))
    (found,) = told(tmp_path)
    assert (found.severity, found.base_offset, found.end_offset) == (
        "damage", state.last_stable_offset, state.log_end_offset,
    )  # fmt: skip
    page.log.write(msgspec.structs.replace(state, last_stable_offset=3))
    (found,) = told(tmp_path)
    assert found.severity == "warning"


def test_words_of_the_state_page(tmp_path: Path) -> None:
    """Repair corrects a state page that denies producers or aborted transactions that exist."""
    log = sample(tmp_path)
    words = log.handle.page.words
    words[ABORTS_WORD] = 0
    (found,) = told(tmp_path)
    assert found.severity == "damage"
    words[PRODUCERS_WORD] = 0
    assert [one.severity for one in told(tmp_path)] == ["damage", "warning"]
    assert repaired(tmp_path).state
    assert told(tmp_path) == []
    assert b"2:0" not in committed(open_log(tmp_path, segment_records=4))


def test_a_checkpoint_that_knows_of_no_producers(tmp_path: Path) -> None:
    """A checkpoint without producers is damage, and repair rewrites it."""
    log = sample(tmp_path)
    with log.handle.sync_locked():
        log.handle.ledger.update_checkpoint(has_producers=False)
    (found,) = told(tmp_path)
    assert found.severity == "damage"
    assert repaired(tmp_path).checkpoint
    assert told(tmp_path) == []
    assert log._checkpoint().has_producers


# ---------------------------------------------------------------- repair


def batch_at(folder: Path, offset: int) -> tuple[Path, int, int]:
    """(file, position, size in bytes) of the batch that begins at an offset."""
    for path in log_files(folder):
        view, position = memoryview(path.read_bytes()), 0
        while position < len(view) and view[position]:
            header = decode_header(view, position)
            if header.base_offset == offset:
                return path, position, header.size_bytes
            position += header.size_bytes
    raise AssertionError(offset)


@pytest.mark.parametrize("at", [20, -3])
@pytest.mark.parametrize("how", ["live", "closed"])
@pytest.mark.parametrize("offset", [0, 3, 4, 6, 8, 10, 11, 12, 14])
def test_repair_of_any_batch(tmp_path: Path, offset: int, how: str, at: int) -> None:
    """The log is consistent after the repair, also when the next open recovers it; aborted records stay aborted."""
    log = sample(tmp_path)
    if offset >= 14:
        for _ in range(4):
            log.append([b"more"])
    before, stable = committed(log), log.last_stable_offset
    if how == "closed":
        log.close()
    path, position, size = batch_at(tmp_path, offset)
    flip(path, position + at % size)
    assert [one.severity for one in told(tmp_path)] == ["damage"]
    report = repaired(tmp_path)
    assert [one.base_offset for one in report.lost] == [offset]
    assert told(tmp_path) == []
    gone = {one.base_offset: one.end_offset for one in report.lost}
    for _ in range(3):
        again = open_log(tmp_path, segment_records=4)
        now = committed(again)
        assert not {b"2:0", b"2:1", b"2:2", b"2:3"} & set(now)
        left = [one for one in now if one in before]  # more where the beginning of an open transaction was cut out
        assert left == [one for one in before if one in now]
        assert len(before) - len(left) <= sum(end - first for first, end in gone.items())
        assert stable <= again.last_stable_offset
        assert told(tmp_path) == []
        for entry in again.producers():
            put(again, entry.next_sequence, who=entry.producer_id)
        before = committed(again)
        stable = again.last_stable_offset
        assert told(tmp_path) == []
        machine_dies(again)


def test_a_segment_that_was_repaired_has_no_stale_txnindex(tmp_path: Path) -> None:
    """The transaction index is right about the remaining markers, and removed bytes are kept in quarantine."""
    log = sample(tmp_path)
    path = next(one for one in sorted(tmp_path.glob("*" + ABORTED_SUFFIX)) if decode_aborted(one.read_bytes())[1])
    size, aborted = decode_aborted(path.read_bytes())
    marker = aborted[0].last_offset
    (log_path, position, size_bytes) = batch_at(tmp_path, marker)
    flip(log_path, position + size_bytes - 1)
    repaired(tmp_path)
    new_size, kept = decode_aborted(path.read_bytes())
    assert new_size == log_path.stat().st_size == size - size_bytes
    assert kept == aborted  # the log file no longer holds them
    empty = next(one for one in tmp_path.glob("*" + ABORTED_SUFFIX) if not decode_aborted(one.read_bytes())[1])
    flip(empty.with_suffix(".log"), 40)
    repaired(tmp_path)
    assert not empty.exists()
    log.close()


def test_a_damaged_slot_does_not_hide_producers(tmp_path: Path) -> None:
    """The slot that is left may be from before the first producer."""
    log = open_log(tmp_path, segment_records=4)
    log.append([b"plain"])
    put(log, 0, txn=True)
    checkpoint = tmp_path / CHECKPOINT_FILE
    newest = 0
    for slot in (0, 4096):
        flip(checkpoint, slot)
        known = read_checkpoint(NoSyncFileSystem(), str(checkpoint)).checkpoint
        if known is not None and not known.has_producers:
            newest = slot
        flip(checkpoint, slot)
    flip(checkpoint, newest)
    repaired(tmp_path)
    machine_dies(log)
    assert open_log(tmp_path, segment_records=4).last_stable_offset == 1


# ---------------------------------------------------------------- dump


def dumped(capsys: pytest.CaptureFixture[str], *arguments: str | Path, status: int = 0) -> tuple[str, list[Any]]:
    """(text, JSON documents) of `dump`."""
    store = Path(".")
    capsys.readouterr()
    assert command(store, "dump", *map(str, arguments)) == status
    text = capsys.readouterr().out
    assert command(store, "dump", "--json", *map(str, arguments)) == status
    return text, [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_dump_of_a_segment_with_transactions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Headers show the producer's numbers, control batches what they say."""
    sample(tmp_path, segment_records=100)
    (path,) = log_files(tmp_path)
    text, documents = dumped(capsys, path, "--records")
    assert f"producer {ONE} epoch 0 sequence 0, transactional" in text
    assert f"producer {ONE} epoch 0, commit of the transaction that began at offset 0" in text
    assert f"producer {TWO} epoch 0, abort of the transaction that began at offset 4" in text
    markers = [(one["producer_id"], one["marker"], one["first_offset"]) for one in documents if "marker" in one]
    assert markers == [(ONE, "commit", 0), (TWO, "abort", 4)]
    batch = documents[0]
    assert (batch["producer_id"], batch["producer_epoch"], batch["base_sequence"]) == (ONE, 0, 0)
    assert batch["marks"] == ["transactional"]


def test_dump_of_a_snapshot_and_a_txnindex(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every entry is printed; the exit status is 3 for a damaged file."""
    sample(tmp_path)
    path = max(tmp_path.glob("*" + SNAPSHOT_SUFFIX))
    text, documents = dumped(capsys, path)
    entries: list[ProducerEntry] = decode_snapshot(path.read_bytes())
    assert [one["producer_id"] for one in documents] == [one.producer_id for one in entries]
    assert [one["last_sequence"] for one in documents] == [one.last_sequence for one in entries]
    assert documents[0]["runs"][0] == {"sequence": 0, "offset": 0, "count": 3}
    assert f"producer {TWO}: epoch 0, last sequence 3" in text
    flip(path, 30)
    text, documents = dumped(capsys, path, status=3)
    assert text.startswith("damaged: the checksum does not match")
    assert [one["type"] for one in documents] == ["damage"]
    path = next(one for one in sorted(tmp_path.glob("*" + ABORTED_SUFFIX)) if decode_aborted(one.read_bytes())[1])
    text, documents = dumped(capsys, path)
    size, (aborted,) = decode_aborted(path.read_bytes())
    assert documents == [
        {"type": "aborts", "segment_bytes": size, "count": 1},
        {"type": "abort", "producer_id": TWO, "first_offset": 4, "last_offset": aborted.last_offset},
    ]
    assert f"producer {TWO}: from offset 4 to its marker at {aborted.last_offset}" in text
    path.write_bytes(b"")
    _, documents = dumped(capsys, path, status=3)
    assert documents[0]["why"].startswith("magic")


# ---------------------------------------------------------------- details


def test_details_of_transactions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The stable offset, open transactions, and producers with their names."""
    store = tmp_path / "store"
    with segmentlog.open(store, background=False) as opened:
        opened.create_topic("t", partitions=2)
        opened.create_topic("plain").partition(0).append([b"x"])
        producer = opened.producer(name="etl")
        with producer.transaction():
            producer.send("t", b"0", partition=0)
        opened.topic("t").partition(0).append([b"x"], producer=ProducerStamp(UNNAMED, 0, 0))
        with producer.transaction():
            producer.send("t", b"1", partition=0).result()
            assert command(store, "describe", "t") == 0
            text = capsys.readouterr().out
            assert command(store, "describe", "t", "--producers") == 0
            more = capsys.readouterr().out
            assert command(store, "describe", "t", "--json") == 0
            document = json.loads(capsys.readouterr().out)
            assert command(store, "verify", "t") == 0
            assert "has a transaction open" in capsys.readouterr().out
            for topic in ("__transaction_state", "plain"):
                assert command(store, "describe", topic, "--producers") == 0
                assert "no producers\n" in capsys.readouterr().out
        producer.close()
    first, second = document["partitions"]
    assert (first["log_end_offset"], first["last_stable_offset"]) == (4, 3)
    (transaction,) = first["open_transactions"]
    assert (transaction["name"], transaction["first_offset"]) == ("etl", 3)
    assert first["producer_count"] == 2
    named, unnamed = first["producers"]
    assert (named["name"], named["last_sequence"], named["last_offset"], named["transaction_offset"]) == (
        "etl",
        1,
        3,
        3,
    )
    assert (unnamed["producer_id"], unnamed["name"], unnamed["transaction_offset"]) == (UNNAMED, None, None)
    assert (second["producer_count"], second["open_transactions"], second["producers"]) == (0, [], [])
    assert "STABLE" in text
    assert "OPEN TRANSACTION OF" in text
    assert "LAST SEQUENCE" not in text
    assert "LAST SEQUENCE" in more
    assert str(UNNAMED) in more
    assert command(store, "describe", "plain") == 0
    assert "STABLE" not in capsys.readouterr().out
    assert os.path.isdir(store)
