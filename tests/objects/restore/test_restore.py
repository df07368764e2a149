"""A restore that is killed and run again: between any two calls, and with other objects in the store by then."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from logs import NoSyncFileSystem, machine_dies, values_by_offset
from objects.buckets import Memory

from segmentlog.errors import SegmentlogError, ShippingRefused
from segmentlog.format.manifest import MANIFEST_KEY, Manifest, decode_manifest, encode_manifest
from segmentlog.objects.manifest import checksums
from segmentlog.objects.restore.restore import restore
from segmentlog.objects.upload.shipper import Shipper
from segmentlog.store import LogStore
from segmentlog.testing.fault_injection import Died, FaultyFileSystem


@pytest.fixture
def bucket() -> Memory:
    """Return the bucket that the store is shipped to."""
    return Memory()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LogStore]:
    """Provide a store of two topics, with segments."""
    with LogStore(tmp_path / "store", background=False) as opened:
        for name, partitions in (("a", 2), ("b", 1)):
            opened.create_topic(name, partitions, segment_records=2, fsync="always")
            for log in opened.topic(name).partitions():
                for number in range(5):
                    log.append([b"%s %d" % (name.encode(), number)])
        yield opened


def ship(store: LogStore, bucket: Memory) -> None:
    """Ship everything."""
    shipper = Shipper(store._topics, bucket, parallel=0)
    shipper.ship()
    shipper.close()


def contents(store: LogStore) -> dict[str, dict[int, bytes | None]]:
    """Return the values of all partitions."""
    return {
        f"{topic}/{log.number}": values_by_offset(log)
        for topic in store.topics() for log in store.topic(topic).partitions()
    }  # fmt: skip


def restored(bucket: Memory, folder: Path) -> dict[str, dict[int, bytes | None]]:
    """Restore into the folder, and return the values."""
    restore(bucket, str(folder), parallel=0)
    with LogStore(folder, background=False) as store:
        return contents(store)


def killed(bucket: Memory, folder: Path, call: int) -> bool:
    """Have a restore die at so many calls; whether it came to that."""
    files = FaultyFileSystem()
    files.die_at(call)
    try:
        restore(bucket, str(folder), fs=files, parallel=0)
    except Died:
        return True
    return False


def killed_once(bucket: Memory, path: Path, is_so: Callable[[Path], bool]) -> Path:
    """Return the folder of a restore that died at the first call after which a condition holds."""
    for call in count(1):
        assert killed(bucket, path / str(call), call), "it never was so"
        if is_so(path / str(call)):
            return path / str(call)
    raise AssertionError


@pytest.mark.long
def test_killed_at_any_call_it_can_be_run_again(tmp_path: Path, store: LogStore, bucket: Memory) -> None:
    """A second run completes it after any part of the work."""
    ship(store, bucket)
    calls = 1
    while killed(bucket, tmp_path / str(calls), calls):
        folder = tmp_path / str(calls)
        if (folder / "store.json").exists() and not (folder / "@restoring").exists():
            with pytest.raises(ShippingRefused, match="is a store; restore into an empty or new folder"):
                restore(bucket, str(folder), parallel=0)  # it was killed when all was done
            with LogStore(folder, background=False) as there:
                assert contents(there) == contents(store)
        else:
            assert restored(bucket, folder) == contents(store), f"killed at call {calls}"
        assert not list(folder.rglob("*.tmp"))
        calls += 1
    assert calls > 100


def test_what_has_come_and_gone_between_two_runs(tmp_path: Path, store: LogStore, bucket: Memory) -> None:
    """Topics that were deleted, renamed, or recreated with fewer partitions leave no files, and are not mixed up."""
    ship(store, bucket)
    calls = 20
    while killed(bucket, tmp_path / str(calls), calls):
        calls += 10
    assert calls > 100
    store.rename_topic("b", "c")
    store.delete_topic("a")
    store.create_topic("a", 1, fsync="always").partition(0).append([b"anew"])
    ship(store, bucket)
    for number in range(20, calls, 10):
        folder = tmp_path / str(number)
        if (folder / "store.json").exists():
            continue  # it was killed when all was done
        assert restored(bucket, folder) == contents(store), f"killed at call {number}"
        assert sorted(one.name for one in folder.iterdir() if one.is_dir()) == ["a", "c"]
        assert sorted(one.name for one in (folder / "a").iterdir() if one.is_dir()) == ["0"]


def test_what_was_begun_of_another_restore_is_left_alone(tmp_path: Path, store: LogStore, bucket: Memory) -> None:
    """If the unfinished restore was of other topics, the error says so."""
    ship(store, bucket)
    there = killed_once(bucket, tmp_path, lambda folder: (folder / "@restoring").exists())
    with pytest.raises(ShippingRefused, match=r"contains another unfinished restore: .*'topics': \[\]"):
        restore(bucket, str(there), ["a"], parallel=0)
    assert json.loads((there / "@restoring").read_text())["topics"] == []
    assert restored(bucket, there) == contents(store)


class Slow(Memory):
    """Something happens before a segment is got."""

    meanwhile: Callable[[], None] | None = None

    def get(self, key: str) -> tuple[bytes, str]:
        meanwhile, is_segment = self.meanwhile, key.startswith("segments/")
        if meanwhile is not None and is_segment:
            self.meanwhile = None
            meanwhile()
        return super().get(key)


def test_two_are_not_at_one_folder(tmp_path: Path, store: LogStore) -> None:
    """A second restore would end before the slow one, which would then overwrite new records."""
    bucket, folder = Slow(), tmp_path / "copy"
    ship(store, bucket)

    def another() -> None:
        with pytest.raises(ShippingRefused, match="another process is restoring into"):
            restore(bucket, str(folder), parallel=0)

    bucket.meanwhile = another
    assert restored(bucket, folder) == contents(store)
    assert bucket.meanwhile is None
    with pytest.raises(ShippingRefused, match="is a store"):
        restore(bucket, str(folder), parallel=0)


def test_what_is_whole_is_not_brought_again(tmp_path: Path, store: LogStore, bucket: Memory) -> None:
    """Intact files are kept and reported as kept; damaged ones are downloaded again."""
    ship(store, bucket)
    there = killed_once(bucket, tmp_path, lambda folder: len(list(folder.rglob("*.log"))) > 2)
    segments = sorted(there.rglob("*.log"))
    damaged = next(one for one in segments if one.stat().st_size)
    damaged.write_bytes(bytes(damaged.stat().st_size))
    done = restore(bucket, str(there), parallel=0)
    assert 0 < done.kept_bytes <= sum(one.stat().st_size for one in segments) - damaged.stat().st_size
    with LogStore(there, background=False) as other:
        assert contents(other) == contents(store)


def test_what_is_large_comes_in_parts(
    tmp_path: Path, store: LogStore, bucket: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checked as a whole before it has its name; what is here already is, too."""
    monkeypatch.setattr(checksums, "PART_BYTES", 50)
    ship(store, bucket)
    assert restored(bucket, tmp_path / "copy") == contents(store)
    key = min(key for key in bucket._objects if key.startswith("segments/") and "." not in key)
    data, tag = bucket._objects[key]
    assert len(data) > 150
    for damaged in (data[:-1] + b"x", data[:60] + b"x" + data[61:]):
        bucket._objects[key] = damaged, tag
        with pytest.raises(ShippingRefused, match="damaged"):
            restore(bucket, str(tmp_path / "other"), parallel=0)
        assert not list((tmp_path / "other").rglob("*.tmp"))
    bucket._objects[key] = data, tag
    done = restore(bucket, str(tmp_path / "other"), parallel=0)
    assert done.kept_bytes > 0 or len(list((tmp_path / "other").rglob("*.log"))) > 1
    with LogStore(tmp_path / "other", background=False) as other:
        assert contents(other) == contents(store)


_LISTS = ("topics", "tails", "files")
_NUMBERS = st.one_of(
    st.sampled_from([-7, -1, 0, 1, 2, 3, 99, 100_001, 2**31, 2**63 - 1]),
    st.integers(max_value=50),
    st.integers(min_value=100_001),  # any number between the two is valid, and makes as many folders
)
_TEXTS = st.one_of(st.sampled_from(["", "a", "b", "..", "../../x", "no-uuid", "store.json", "@groups"]), st.text())
_CHANGES = st.one_of(
    st.tuples(st.sampled_from(["partition_count", "largest_batch_bytes"]), _NUMBERS),
    st.tuples(st.just("number"), _NUMBERS),
    st.tuples(st.sampled_from(["id", "name"]), _TEXTS),
    st.tuples(st.just("twice"), st.sampled_from([*_LISTS, "partitions"])),
)


def _changed(document: dict[str, Any], change: tuple[str, Any], which: int) -> bytes:
    """Return the manifest with one thing changed, under a checksum that is right."""
    what, value = change
    topic = document["topics"][which % len(document["topics"])]
    if what == "twice":
        listed = topic["partitions"] if value == "partitions" else document[value]
        listed.extend(listed[-1:])
    elif what == "number":
        topic["partitions"][which % len(topic["partitions"])]["number"] = value
    else:
        topic[what] = value
    return encode_manifest(msgspec.convert(document, Manifest))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(change=_CHANGES, which=st.integers(0, 5))
def test_a_manifest_that_contradicts_itself_is_refused(
    store: LogStore, bucket: Memory, change: tuple[str, Any], which: int
) -> None:
    """A restore either raises, or leaves a store that opens and holds every partition that the manifest lists."""
    if not bucket._objects:  # once for all examples
        ship(store, bucket)
    document = msgspec.json.decode(msgspec.json.encode(decode_manifest(bucket.get(MANIFEST_KEY)[0])))
    hostile = Memory()
    hostile._objects = dict(bucket._objects)
    hostile.put(MANIFEST_KEY, _changed(document, change, which))
    with TemporaryDirectory() as folder:
        try:
            restore(hostile, f"{folder}/copy", fs=NoSyncFileSystem(), parallel=0)
        except SegmentlogError:
            assert not Path(folder, "copy", "store.json").exists()
            return
        by_id = {store.topic(name).id: name for name in store.topics()}
        with LogStore(f"{folder}/copy", background=False) as copy:
            assert sorted(copy.topics()) == sorted(topic["name"] for topic in document["topics"])
            for topic in document["topics"]:
                source = by_id.get(topic["id"], topic["name"])
                for entry in topic["partitions"]:
                    shown = values_by_offset(copy.topic(topic["name"]).partition(entry["number"]))
                    originals = [values_by_offset(log) for log in store.topic(source).partitions()]
                    assert shown in originals
                    assert shown


def test_a_restore_is_no_crash(tmp_path: Path, bucket: Memory, caplog: pytest.LogCaptureFixture) -> None:
    """The verdict for every process is "restored" until one resumes the log, without a warning."""
    with LogStore(tmp_path / "store", background=False) as store:
        store.create_topic("a", 2, fsync="always").partition(0).append([b"1"])
        ship(store, bucket)
    path = tmp_path / "restored"
    restore(bucket, str(path), parallel=0)
    caplog.set_level(logging.INFO, "segmentlog")
    for read_only in (True, True, False):
        with LogStore(path, background=False, read_only=read_only) as store:
            for log in store.topic("a").partitions():
                report = log.recovery_report
                assert report.verdict == "restored"
                assert "restored from an object store" in report.why
                assert "machine died" not in report.why
                assert report.log_end_offset == (log.log_end_offset if read_only else report.lost.end_offset)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    with LogStore(path, background=False) as store:
        assert {log.recovery_report.verdict for log in store.topic("a").partitions()} == {"clean"}


def test_a_restored_log_skips_offsets_once(tmp_path: Path, bucket: Memory) -> None:
    """A restored log has one gap, however often processes open it, also after a machine's death and in a second
    restore.

    The gap reaches to the ceiling: the owner of the store may have assigned everything below, also in a partition of
    which the object store has no record.
    """
    with LogStore(tmp_path / "store", background=False) as store:
        logs = store.create_topic("a", 2, fsync="always").partitions()
        logs[0].append([b"1"])
        ship(store, bucket)
        logs[1].append([b"not shipped"])
    gaps = []
    for path in (tmp_path / "one", tmp_path / "two"):
        restore(bucket, str(path), parallel=0)
        for read_only in (True, False, False):
            with LogStore(path, background=False, read_only=read_only) as store:
                store.topic("a").partitions()
        with LogStore(path, background=False) as store:
            for log in store.topic("a").partitions():
                machine_dies(log)
        with LogStore(path, background=False) as store:
            logs = store.topic("a").partitions()
            assert [len(log.lost_ranges()) for log in logs] == [1, 1]
            gaps.append([(one.base_offset, one.end_offset) for log in logs for one in log.lost_ranges()])
            assert all(log.append([b"new"]) == log.lost_ranges()[0].end_offset for log in logs)
    assert gaps[0] == gaps[1]
    assert gaps[0][1][0] == 0
    assert gaps[0][1][1] > 1  # the offset of the record that was not shipped is skipped
