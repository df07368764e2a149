"""Bit rot: any byte of any file changes, and readers get only right records, lose only the damaged batch, and report
it.

Every SEGMENTLOG_BITROT_STEP-th byte of every file rots, one at a time; 1 takes all bytes (some minutes).
`silent_regions` lists the bytes whose change may stay unnoticed: `verify` must find all others.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from broken import Batch, command
from damage.rotten import (
    PARTITIONS,
    AnotherBoot,
    Rotten,
    fill,
    is_inside,
    place_of,
    read_skipping,
)
from logs import NoSyncFileSystem, tree_bytes

from segmentlog.errors import LogTruncated, SegmentlogError, UnknownTopic
from segmentlog.format.checkpoint import slot_size
from segmentlog.inspection.finding import Finding
from segmentlog.inspection.small_files import read_topic_file
from segmentlog.inspection.store_inspection import inspect_store
from segmentlog.log.repair.partition_repair import repair_partition


@pytest.fixture(scope="module")
def rotten(tmp_path_factory: pytest.TempPathFactory) -> Rotten:
    """Return a store that was closed cleanly, with state pages of this boot."""
    return Rotten(tmp_path_factory.mktemp("rot") / "store")


@pytest.fixture(scope="module")
def torn(tmp_path_factory: pytest.TempPathFactory) -> Rotten:
    """Left by a process that died, with batches above the recovery point."""
    return Rotten(tmp_path_factory.mktemp("torn") / "store", clean=False)


def is_log(name: str) -> bool:
    """Return a segment."""
    return name.endswith(".log")


def is_index(name: str) -> bool:
    """Return an offset or time index."""
    return name.endswith("index")


def is_checkpoint(name: str) -> bool:
    """Return a checkpoint."""
    return name.endswith("checkpoint")


def is_state(name: str) -> bool:
    """Return a state page."""
    return name.endswith("state")


def is_json(name: str) -> bool:
    """``store.json`` or ``topic.json``."""
    return name.endswith(".json")


def found_in(rotten: Rotten, *, boot: type[NoSyncFileSystem] = NoSyncFileSystem) -> list[Finding]:
    """Return all findings that are worse than a note."""
    return [one for one in inspect_store(str(rotten.path), fs=boot()) if one.severity != "note"]


def test_the_store_is_complete_and_healthy(rotten: Rotten) -> None:
    """The store has one file of each kind, and verify finds nothing before a byte rots."""
    kinds = Counter(Path(name).suffix or Path(name).name for name in rotten.image if not name.endswith("/"))
    assert set(kinds) == {".json", ".log", ".index", ".timeindex", "checkpoint", "state", "lock", "@administration"}
    assert kinds[".log"] == 3 + 2 + 1 + 1
    assert rotten.image["plain/0/lock"] == rotten.image["@administration"] == b"", "nothing in it that could rot"
    assert found_in(rotten) == []
    assert found_in(rotten, boot=AnotherBoot) == []
    with rotten.open(read_only=True) as store:
        rotten.check_read(store)


# ---------------------------------------------------------------- logs


@pytest.mark.parametrize("boot", [NoSyncFileSystem, AnotherBoot], ids=["same-boot", "restarted"])
def test_a_segment(rotten: Rotten, boot: type[NoSyncFileSystem]) -> None:
    """Reading tells path and position and loses that batch alone; so does verify, with exactly its offsets."""
    for name, position in rotten.positions(is_log):
        hit = rotten.batch_at(name, position)
        assert hit is not None, "a sealed or cleanly closed segment ends with its last batch"
        with rotten.rot(name, position):
            (found,) = found_in(rotten, boot=boot)
            assert (found.severity, found.path, found.position) == ("damage", str(hit.path), hit.position)
            assert (found.base_offset, found.end_offset) == (hit.base_offset, hit.next_offset)
            with rotten.open(read_only=True, boot=boot) as store:
                rotten.check_read(store, hit)
            with rotten.open(boot=boot) as store:
                rotten.check_read(store, hit)
                check_new_offsets(rotten, store, place_of(name))


def check_new_offsets(rotten: Rotten, store: Any, place: tuple[str, int]) -> None:
    """Check that an append gets new offsets, and that its records are readable."""
    partition = store.topic(place[0]).partition(place[1])
    base_offset = fill(partition, 7, long=False)
    assert base_offset > rotten.records[place][-1].offset
    assert [record.offset for batch in partition.read(base_offset) for record in batch][:1] == [base_offset]


# ---------------------------------------------------------------- caches


@pytest.mark.parametrize("boot", [NoSyncFileSystem, AnotherBoot], ids=["same-boot", "restarted"])
def test_an_index(rotten: Rotten, boot: type[NoSyncFileSystem]) -> None:
    """All records and lookups are unchanged; verify warns and names the entry."""
    for name, position in rotten.positions(is_index):
        entry = position // (16 if name.endswith("timeindex") else 8)
        with rotten.rot(name, position):
            found = found_in(rotten, boot=boot)
            if not (boot is AnotherBoot and is_last_segment(rotten, name)):
                assert [(one.severity, one.path.rpartition(".")[0]) for one in found] == [
                    ("warning", str(rotten.path / name).rpartition(".")[0])
                ], (name, position)
                assert found[0].position // found[0].size_bytes == entry
            with rotten.open(boot=boot) as store:
                rotten.check_read(store)
                check_lookups(rotten, store, place_of(name))
                check_new_offsets(rotten, store, place_of(name))


def is_last_segment(rotten: Rotten, name: str) -> bool:
    """Return whether a file belongs to the last segment.

    A recovery recreates its index, so damage there may go unreported.
    """
    folder = name.rpartition("/")[0]
    return name.rpartition(".")[0] == max(one for one in rotten.image if one.startswith(folder) and is_log(one))[:-4]


def check_lookups(rotten: Rotten, store: Any, place: tuple[str, int]) -> None:
    """Check that every record is found by its offset, and that timestamps lead to the first one that is late enough."""
    records, partition = rotten.records[place], store.topic(place[0]).partition(place[1])
    for record in records:
        batch = next(partition.read(record.offset, 1))
        assert (int(batch.offsets[0]), batch.values[0]) == (record.offset, record.value)
    for wanted in (0, 1000, 1011, 1021, 5000, 5001, 5004):
        oracle = next((one.offset for one in records if one.timestamp >= wanted), None)
        assert partition.offset_for_timestamp(wanted) == oracle


@pytest.mark.parametrize("boot", [NoSyncFileSystem, AnotherBoot], ids=["same-boot", "restarted"])
def test_a_checkpoint(rotten: Rotten, boot: type[NoSyncFileSystem]) -> None:
    """One of two slots is left: all records are readable, no offset is assigned twice, and verify reports the slot."""
    for name, position in rotten.positions(is_checkpoint):
        half = len(rotten.image[name]) // 2
        slot = rotten.image[name][position // half * half :][:half]
        used = position % half < slot_size(slot)
        with rotten.rot(name, position):
            (found,) = found_in(rotten, boot=boot)
            assert found.path == str(rotten.path / name)
            assert found.position <= position < found.position + found.size_bytes
            assert found.severity in (("damage", "warning") if used else ("warning",))
            with rotten.open(boot=boot) as store:
                rotten.check_read(store)
                check_new_offsets(rotten, store, place_of(name))


def state_regions(data: bytes) -> Iterator[tuple[int, int, str]]:
    """Yield (first word, end word, name) of each part of a state page that verify checks."""
    words = memoryview(data).cast("Q")
    yield 0, 7, "header"
    yield 8, 10, "flags"
    for word, count in ((16, 10), (64, 6)):
        yield word, word + 1, "sequence"
        copy = word + 1 + (count + 1) * (words[word] & 1)
        yield copy, copy + count + 1, "current copy"


@pytest.mark.parametrize("boot", [NoSyncFileSystem, AnotherBoot], ids=["same-boot", "restarted"])
def test_a_state_page(rotten: Rotten, boot: type[NoSyncFileSystem]) -> None:
    """It is a cache: the log is unchanged. Words in use are checked; counters and old copies may rot unnoticed."""
    for name, position in rotten.positions(is_state):
        what = next(
            (what for first, end, what in state_regions(rotten.image[name]) if first <= position // 8 < end), ""
        )
        with rotten.rot(name, position):
            told = [one for one in inspect_store(str(rotten.path), fs=boot()) if one.path == str(rotten.path / name)]
            assert {one.severity for one in told} <= {"note", "warning"}
            if boot is NoSyncFileSystem:
                assert bool(told) == bool(what), (name, position, what)
            with rotten.open(boot=boot) as store:
                rotten.check_read(store)
                check_new_offsets(rotten, store, place_of(name))


# ---------------------------------------------------------------- store.json, topic.json


def test_a_json_file(rotten: Rotten) -> None:
    """The store is refused with its path, or reads the same records; verify finds each change that affects them."""
    silent: Counter[str] = Counter()
    for name, position in rotten.positions(is_json):
        for bit in range(8):
            with rotten.rot(name, position, 1 << bit):
                damage = [one for one in found_in(rotten) if one.severity == "damage"]
                assert {one.path for one in damage if "folder is missing" not in one.what} <= {str(rotten.path / name)}
                try:
                    with rotten.open(read_only=True) as store:
                        rotten.check_read(store)
                except SegmentlogError as error:
                    # If the number of partitions changed, the error is about the partition.
                    assert str(rotten.path / name) in str(error) or isinstance(error, UnknownTopic)  # noqa: PT017
                    assert damage, f"refused, and verify finds nothing: {error}"  # noqa: PT017
                else:
                    if not damage:
                        silent[changed_key(rotten, name)] += 1
    assert set(silent) <= silent_regions(), silent


def silent_regions() -> set[str]:
    """Return the keys of JSON files whose changes stay unnoticed: people may edit them, so no checksum guards them."""
    return {
        "",  # a different one is as good
        "store_id",  # another one that is as good
        "id",  # groups see another topic, and begin at their reset position
        "created_ms", "created_ms gone",  # not used
        # The config's own limit counts as well; were it the lower one, a batch above both is refused when read.
        "largest_batch_bytes", "largest_batch_bytes gone",
        "config",  # another value that the key takes, which people may have wanted
    }  # fmt: skip


def changed_key(rotten: Rotten, name: str) -> str:
    """Return the key whose value changed or that is missing."""
    before, after = json.loads(rotten.image[name]), json.loads((rotten.path / name).read_bytes())
    for key, value in before.items():
        if key not in after:
            return f"{key} gone"
        if after[key] != value:
            return str(key)
    return ""


def test_a_smaller_number_of_partitions_is_found(rotten: Rotten, capfd: pytest.CaptureFixture[str]) -> None:
    """A ``topic.json`` that hides partitions which hold a log is damaged, for verify and for repair."""
    name = "packed/topic.json"
    position = rotten.image[name].index(b'"partitions": 3') + len(b'"partitions": ')
    with rotten.rot(name, position, 0b10):
        assert json.loads((rotten.path / name).read_bytes())["partitions"] == 1
        (found,) = found_in(rotten)
        assert (found.severity, found.path, found.topic) == ("damage", str(rotten.path / name), "packed")
        assert command(rotten.path, "repair", "--yes") == 3
        assert str(rotten.path / name) in capfd.readouterr().out


# ---------------------------------------------------------------- above the recovery point


@pytest.mark.parametrize("wanted", [is_log, is_checkpoint, is_index, is_state])
def test_after_a_machines_death(torn: Rotten, wanted: Any) -> None:
    """Every record is returned, or its offset is reported as lost or skipped."""
    for name, position in torn.positions(wanted):
        check_after_death(torn, name, position)


def test_every_byte_of_a_torn_tail(torn: Rotten) -> None:
    """This also holds for each byte of the last batch, after the recovery point, and for a few bytes after it."""
    last = torn.batches["plain", 0][-1]
    for position in range(last.position, last.position + last.size_bytes + 3):
        check_after_death(torn, str(last.path.relative_to(torn.path)), position)


def check_after_death(torn: Rotten, name: str, position: int) -> None:
    """Flip one byte, recover the log, and check it."""
    point = {place: recovery_point(torn, place) for place in PARTITIONS}
    hit = torn.batch_at(name, position) if is_log(name) else None
    place = place_of(name)
    with torn.rot(name, position):
        if hit is not None and hit.next_offset <= point[place]:
            found = found_in(torn, boot=AnotherBoot)
            assert [(one.severity, one.position) for one in found] == [("damage", hit.position)]
        elif hit is not None:
            told = inspect_store(str(torn.path), fs=AnotherBoot())
            assert any(one.path == str(hit.path) and one.position == hit.position for one in told)
        with torn.open(boot=AnotherBoot) as store:
            for other in PARTITIONS:
                check_accounted_for(torn, store, other, hit if other == place else None, point[other])
            check_new_offsets(torn, store, place)


def recovery_point(rotten: Rotten, place: tuple[str, int]) -> int:
    """Return the offset before which a recovery does not read."""
    with rotten.open(read_only=True) as store:
        return store.topic(place[0]).partition(place[1])._checkpoint().recovery_offset


def check_accounted_for(
    rotten: Rotten, store: Any, place: tuple[str, int], hit: Batch | None, recovery_offset: int
) -> None:
    """Below the recovery point only the batch that was hit is missing; above it, what follows that one as well."""
    partition = store.topic(place[0]).partition(place[1])
    lost = [(one.base_offset, one.end_offset) for one in partition.lost_ranges()]
    found, skipped = read_skipping(partition, 0)
    told = [(one.base_offset, one.end_offset) for one in skipped]
    records = {one.offset: one for one in rotten.records[place]}
    assert all(records.get(one.offset) == one for one in found), "a record that was never written"
    there = {one.offset for one in found}
    for offset in records:
        assert (offset in there) + is_inside(offset, lost) + is_inside(offset, told) == 1, offset
    if hit is None:
        assert there == set(records)
    else:
        gone = set(records) - there
        assert gone >= set(range(hit.base_offset, hit.next_offset))
        if hit.base_offset < recovery_offset:
            assert gone == set(range(hit.base_offset, hit.next_offset))
        else:
            assert gone == {offset for offset in records if offset >= hit.base_offset}


# ---------------------------------------------------------------- repair


def sample_of_each_batch(rotten: Rotten) -> Iterator[tuple[str, int, Batch]]:
    """Yield a byte of the magic, the sizes, the checksum or the payload of each batch, in turn."""
    for batches in rotten.batches.values():
        for number, hit in enumerate(batches):
            at = [0, 8, 58, 90, 96 + 5, hit.size_bytes - 1]
            for offset in (at[number % 6], at[(number + 3) % 6]):
                yield str(hit.path.relative_to(rotten.path)), hit.position + offset, hit


def test_repair_on_the_command_line(rotten: Rotten, capfd: pytest.CaptureFixture[str]) -> None:
    """A dry run says it and changes no byte; a repair takes exactly that batch, keeps its bytes, and is done."""
    for name, position, hit in sample_of_each_batch(rotten):
        place = place_of(name)
        with rotten.rot(name, position):
            damaged = tree_bytes(rotten.path)
            assert command(rotten.path, "verify") == 3
            assert f"{hit.path} at byte {hit.position} " in capfd.readouterr().out
            assert command(rotten.path, "repair", "--dry-run") == 3
            assert f"[{hit.base_offset}, {hit.next_offset}) would be recorded as lost" in capfd.readouterr().out
            assert tree_bytes(rotten.path) == damaged
            assert command(rotten.path, "repair", "--yes") == 0
            assert f"[{hit.base_offset}, {hit.next_offset}) recorded as lost" in capfd.readouterr().out
            check_repaired(rotten, place, hit, damaged[name])
            assert command(rotten.path, "verify") == 0
            capfd.readouterr()


def check_repaired(
    rotten: Rotten, place: tuple[str, int], hit: Batch, damaged: bytes, boot: type[NoSyncFileSystem] = NoSyncFileSystem
) -> None:
    """Check that all other batches exist, the offsets of this one are lost, and its bytes are in quarantine."""
    assert found_in(rotten, boot=boot) == []
    (kept_file,) = (rotten.folder(*place) / "quarantine").iterdir()
    assert kept_file.read_bytes() == damaged[hit.position : hit.position + hit.size_bytes]
    assert kept_file.name.startswith(f"{hit.path.stem}-{hit.position}-")
    with rotten.open(boot=boot) as store:
        for other in PARTITIONS:
            partition = store.topic(other[0]).partition(other[1])
            expected = rotten.records[other]
            if other == place:
                expected = [one for one in expected if not hit.base_offset <= one.offset < hit.next_offset]
            found, skipped = read_skipping(partition, 0)
            assert (found, skipped) == (expected, [])
        partition = store.topic(place[0]).partition(place[1])
        lost = [(one.base_offset, one.end_offset) for one in partition.lost_ranges()]
        assert lost[0] == (hit.base_offset, hit.next_offset)
        for offset in range(hit.base_offset + 1, hit.next_offset):
            with pytest.raises(LogTruncated):
                partition.read(offset)
        check_new_offsets(rotten, store, place)
    with rotten.open(boot=boot) as store:
        assert fill(store.topic(place[0]).partition(place[1]), 8, long=False) > rotten.records[place][-1].offset
    assert found_in(rotten, boot=boot) == []


@pytest.mark.parametrize("which", ["clean", "torn"])
def test_repair_after_a_machines_death(rotten: Rotten, torn: Rotten, which: str) -> None:
    """A repair before any recovery saves every intact batch, before and after the recovery point."""
    store = rotten if which == "clean" else torn
    for name, position, hit in sample_of_each_batch(store):
        place = place_of(name)
        if which == "torn" and hit == store.batches[place][-1]:
            continue  # without an intact batch after it, this is a torn tail, which a recovery truncates
        with store.rot(name, position):
            damaged = (store.path / name).read_bytes()
            fs = AnotherBoot()
            folder = store.folder(*place)
            report = repair_partition(
                fs, str(folder), *place, lambda fs=fs, folder=folder: read_topic_file(fs, str(folder.parent))[1]
            )
            assert (report.lost[0].base_offset, report.lost[0].end_offset) == (hit.base_offset, hit.next_offset)
            check_repaired(store, place, hit, damaged, AnotherBoot)


@pytest.mark.parametrize("wanted", [is_checkpoint, is_index])
def test_repair_of_a_cache_or_a_checkpoint(rotten: Rotten, wanted: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """Repair recreates the file, touches no record, and leaves no finding."""
    for number, (name, position) in enumerate(rotten.positions(wanted)):
        if number % 5:
            continue
        with rotten.rot(name, position):
            before = tree_bytes(rotten.path)
            severities = {one.severity for one in found_in(rotten)}
            expected = 3 if "damage" in severities else 0
            assert command(rotten.path, "repair", "--dry-run") == expected
            assert tree_bytes(rotten.path) == before
            assert command(rotten.path, "repair", "--yes") == 0
            after = tree_bytes(rotten.path)
            logs = {one for one in before if is_log(one)}
            assert {one: after[one] for one in logs} == {one: before[one] for one in logs}
            left = found_in(rotten)
            assert [one for one in left if "should be zero" not in one.what] == []
            with rotten.open() as store:
                rotten.check_read(store)
                check_new_offsets(rotten, store, place_of(name))
    capfd.readouterr()
