"""Tiered storage: old segments exist only in the object store; readers notice nothing but the time it takes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from logs import FakeClock, values, values_by_offset
from objects.tiering import TIERED, fill, hurried, remote, taken, tiered_store, turn, url_of, value

import segmentlog
from segmentlog.errors import OffsetOutOfRange, SegmentGone
from segmentlog.format.stub import decode_stub
from segmentlog.inspection.store_inspection import inspect_store
from segmentlog.log.partition import Partition
from segmentlog.log.segment_tiering import recall_segment
from segmentlog.objects.bucket.base import Data
from segmentlog.objects.bucket.local_bucket import LocalBucket
from segmentlog.objects.bucket.upload_pool import UploadPool
from segmentlog.objects.bucket.url import open_bucket
from segmentlog.objects.manifest.garbage_collection import sweep, verify
from segmentlog.objects.replica.replica import Replica
from segmentlog.objects.restore.restore import restore
from segmentlog.objects.takeover import take_over
from segmentlog.objects.tier.remote_reader import remote_segments_readable
from segmentlog.objects.upload.shipper import Shipper
from segmentlog.storage.fs import FileSystem
from segmentlog.store import LogStore
from segmentlog.topics.topic_registry import Topics

__all__ = ["hurried"]
ALL = {number: value(number) for number in range(45)}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LogStore]:
    """Yield a store of 45 records in five segments, of which four exist only in the object store."""
    with tiered_store(tmp_path) as opened:
        yield opened


@pytest.fixture
def log(store: LogStore) -> Partition:
    """Return the only partition."""
    return store.topic("a").partition(0)


class CountingBucket(LocalBucket):
    """Knows what was put."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.put_keys: list[str] = []

    def put(self, key: str, data: Data) -> None:
        self.put_keys.append(key)
        super().put(key, data)

    def segments(self) -> list[str]:
        """Return the uploaded objects of segments and their indexes, deleted ones included."""
        return sorted(key for key in self.put_keys if key.startswith("segments/"))


# ---------------------------------------------------------------- reading


def test_sealed_segments_take_no_room_and_read_as_before(store: LogStore, log: Partition) -> None:
    """Names, sizes, times and counts are what they were; the disk has the active segment alone."""
    assert remote(log) == [0, 10, 20, 30]
    assert log.local_log_start_offset == 40
    assert log.log_start_offset == 0
    assert all(segment.size_bytes > 700 for segment in log.segments())
    assert taken(log) == 0
    assert values_by_offset(log) == ALL
    assert store.health() == {}


def test_large_segments_leave_in_parts_and_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several objects hold one segment: it is read and searched in them, recalled, and each part is compared."""
    monkeypatch.setattr("segmentlog.objects.upload.multipart.PART_BYTES", 300)
    with tiered_store(tmp_path) as store:
        log = store.topic("a").partition(0)
        stub = decode_stub(Path(f"{log.folder}/{20:020d}.remote").read_bytes())
        assert len(stub.stored.objects) > 2
        assert remote(log) == [0, 10, 20, 30]
        assert values_by_offset(log) == ALL
        assert log.offset_for_timestamp(1_017) == 17
        with remote_segments_readable(FileSystem()) as fs:
            assert [one for one in inspect_store(store.path, fs=fs) if one.severity != "note"] == []
        assert recall_segment(log.handle, 10)
        assert remote(log) == [0, 20, 30]
        part = tmp_path / "bucket" / stub.stored.objects[1].key
        part.write_bytes(part.read_bytes()[:-1] + b"!")
    with LogStore(tmp_path / "store", background=False) as again:  # this store has not yet fetched any of the segment
        log = again.topic("a").partition(0)
        with pytest.raises(SegmentGone, match=re.escape(stub.stored.objects[1].key)):
            recall_segment(log.handle, 20)
        assert remote(log) == [0, 20, 30]


def test_a_place_is_found_by_offset_and_by_time_without_bringing_it_all(store: LogStore, log: Partition) -> None:
    """Indexes stay here: a lookup brings what it looks at, in the one segment."""
    assert log.offset_for_timestamp(1_017) == 17
    assert next(iter(log.read(23))).values[0] == value(23)
    assert log.max_timestamp(30) == 1_039
    sizes = [segment.size_bytes for segment in log.segments()]
    tiered = store._remote_reader.reader
    assert tiered is not None
    assert tiered.downloaded_bytes == sizes[1] + sizes[2]


def test_consumers_and_followers_do_not_notice(store: LogStore, log: Partition) -> None:
    """They read from the earliest record on, in a group, and continue with new records."""
    with store.consumer("a", start="earliest", group="g") as consumer:
        assert [record.offset for record in consumer] == list(range(45))
        consumer.commit()
    fill(log, 1)
    with store.consumer("a", group="g") as consumer:
        assert [record.offset for record in consumer] == [45]


def test_who_has_a_segment_mapped_reads_on_in_it(tmp_path: Path) -> None:
    """A file is replaced and never emptied: batches that were handed out stay what they are, and so do readers."""
    with LogStore(tmp_path / "store", background=False) as store, LogStore(tmp_path / "store") as other:
        log = store.create_topic("a", **TIERED).partition(0)
        fill(log, 45)
        reading = other.topic("a").partition(0).read(0)
        before = [next(reading) for _ in range(5)]
        store.ship(url_of(tmp_path))
        assert remote(log) == [0, 10, 20, 30]
        assert [batch.values[0] for batch in before] == [value(number) for number in range(5)]
        assert [batch.values[0] for batch in reading] == [value(number) for number in range(5, 45)]
        assert values_by_offset(other.topic("a").partition(0)) == ALL


def test_another_process_reads_while_this_one_ships_and_evicts(tmp_path: Path) -> None:
    """It reads all records again and again with its maps open, and always gets the appended values."""
    with LogStore(tmp_path / "store", background=False) as store:
        log = store.create_topic("a", **TIERED).partition(0)
        fill(log, 5)
        script = (
            "import segmentlog, sys\n"
            f"with segmentlog.open({str(tmp_path / 'store')!r}, background=False) as store:\n"
            "    log, end = store.topic('a').partition(0), 0\n"
            "    while end < 200:\n"
            "        end = log.log_end_offset\n"
            "        found = [int(r.value.split(b'/')[0]) for batch in log.read(0) for r in batch]\n"
            "        assert found[:end] == list(range(end)), (found, end)\n"
            "    print(sum(one.remote for one in log.segments()))\n"
        )
        reader = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
        try:
            while log.log_end_offset < 200:
                fill(log, 25)
                store.ship(url_of(tmp_path))
            out, _ = reader.communicate(timeout=60)
        finally:
            reader.kill()
            reader.wait()
        assert reader.returncode == 0
        assert int(out) > 10


def test_a_small_cache_is_enough(tmp_path: Path) -> None:
    """Blocks are evicted for later reads, and all records are read."""
    tiered_store(tmp_path, cache_bytes=1).close()
    with LogStore(tmp_path / "store", background=False, cache_bytes=1, cache_dir=tmp_path / "cache") as store:
        log = store.topic("a").partition(0)
        for _ in range(2):
            assert values_by_offset(log) == ALL
        tiered = store._remote_reader.reader
        assert tiered is not None
        assert tiered.held_bytes <= max(segment.size_bytes for segment in log.segments())
        assert len(os.listdir(tmp_path / "cache")) == 1
    assert os.listdir(tmp_path / "cache") == []


def test_a_forked_child_brings_what_it_reads_itself(store: LogStore, log: Partition) -> None:
    """The parent's cache is the parent's; both read all of it."""
    assert len(values(log)) == 45
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if values_by_offset(log) == ALL else 2
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert values_by_offset(log) == ALL


def test_committed_records_are_told_from_aborted_ones(tmp_path: Path) -> None:
    """Aborted records are in the object store, too, and are left out."""
    with LogStore(tmp_path / "store", background=False) as store:
        log = store.create_topic("a", **TIERED).partition(0)
        with store.producer(name="p", linger_ms=0) as producer:
            for number in range(12):
                producer.begin_transaction()
                producer.send("a", b"%d" % number, partition=0).result()
                producer.commit_transaction() if number % 3 else producer.abort_transaction()
        store.ship(url_of(tmp_path))
        assert remote(log) == [0, 10]
        wanted = [b"%d" % number for number in range(12) if number % 3]
        assert values(log, isolation="read_committed") == wanted
    with LogStore(tmp_path / "store", background=False) as store:
        assert values(store.topic("a").partition(0), isolation="read_committed") == wanted


def abort_and_commit(store: LogStore) -> None:
    """Append one transaction of each outcome."""
    with store.producer(name="p", linger_ms=0) as producer:
        for value_, end in ((b"aborted", producer.abort_transaction), (b"committed", producer.commit_transaction)):
            producer.begin_transaction()
            producer.send("a", value_, partition=0).result()
            end()


def tail(log: Partition) -> list[bytes]:
    """Return the values in the active segment that a reader of committed records gets."""
    batches = log.read(log.segments()[-1].base_offset, isolation="read_committed")
    return [value_ for batch in batches for value_ in batch.values if value_ is not None]


@pytest.mark.parametrize("first", ["transactions", "plain records"])
def test_what_was_aborted_is_known_of_segments_that_left(tmp_path: Path, first: str) -> None:
    """A reader of committed records at the end downloads no segment, and needs no object store."""
    with LogStore(tmp_path / "store", background=False) as store:
        log = store.create_topic("a", **TIERED).partition(0)
        if first == "transactions":
            abort_and_commit(store)
        fill(log, 30)
        store.ship(url_of(tmp_path))
        assert len(remote(log)) >= 2
        os.rename(tmp_path / "bucket", tmp_path / "away")
        abort_and_commit(store)
        assert tail(log)[-1:] == [b"committed"]
        assert b"aborted" not in tail(log)
        os.rename(tmp_path / "away", tmp_path / "bucket")
        fill(log, 15)
        store.ship(url_of(tmp_path))
        os.rename(tmp_path / "bucket", tmp_path / "away")
    with LogStore(tmp_path / "store", background=False) as store:  # this store has not read the bucket yet
        log = store.topic("a").partition(0)
        assert tail(log)
        assert store._remote_reader.reader is None
        os.rename(tmp_path / "away", tmp_path / "bucket")
        found = values(log, isolation="read_committed")
        assert b"aborted" not in found
        assert found.count(b"committed") == (2 if first == "transactions" else 1)
        for path in Path(log.folder).glob("*.txnindex"):  # caches: without them it is as it was
            path.unlink()
        assert values(log, isolation="read_committed") == found


def test_what_whoever_appends_next_would_read_stays(tmp_path: Path) -> None:
    """A segment stays local while producers have no snapshot after it; the next roll writes one."""
    with LogStore(tmp_path / "store", background=False) as store:
        log = store.create_topic("a", **TIERED).partition(0)
        abort_and_commit(store)
        fill(log, 30)
        rolled = [segment.base_offset for segment in log.segments()]
        for base in rolled[-2:]:  # as if the disk had been full
            os.unlink(f"{log.folder}/{base:020d}.snapshot")
        store.ship(url_of(tmp_path))
        assert remote(log) == rolled[:-3]
        fill(log, 10)
        store.ship(url_of(tmp_path))
        assert remote(log) == rolled
    os.rename(tmp_path / "bucket", tmp_path / "away")
    with LogStore(tmp_path / "store", background=False) as store:
        abort_and_commit(store)
        assert tail(store.topic("a").partition(0))[-1:] == [b"committed"]


def test_it_is_verified_dumped_and_scrubbed_around(tmp_path: Path, store: LogStore, log: Partition) -> None:
    """Verify looks at every byte, wherever it lies; the scrubber leaves out what is not here."""
    path = log.segments()[1].path
    with remote_segments_readable(FileSystem()) as fs:
        assert [str(one) for one in inspect_store(store.path, fs=fs)] == []
    for args in (["--dir", store.path, "verify", "a"], ["dump", path], ["dump", path.replace(".log", ".remote")]):
        done = subprocess.run([sys.executable, "-m", "segmentlog", *args], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
    assert "segments/" in done.stdout
    with LogStore(store.path, background=False, scrub_bytes_per_s=1 << 20, read_only=True) as scrubbed:
        for second in range(1, 4):
            scrubbed.scrub_tick(second * 1000)
        report = scrubbed.scrub_report()
        assert (report.segments, report.findings) == (0, ())


# ---------------------------------------------------------------- changing it


def test_trimming_and_retention_take_stub_and_object_along(tmp_path: Path, store: LogStore, log: Partition) -> None:
    """Objects of deleted segments are condemned first, and deleted after the grace period."""
    log.trim(15)
    with pytest.raises(OffsetOutOfRange):
        list(log.read(3))
    assert values_by_offset(log) == {number: value(number) for number in range(15, 45)}
    store.alter_topic("a", retention_segments=2)
    log.apply_retention()
    assert log.log_start_offset == 20
    assert sorted(os.listdir(log.folder)).count("00000000000000000000.remote") == 0
    assert remote(log) == [20, 30]
    store.ship(url_of(tmp_path))
    bucket = open_bucket(url_of(tmp_path))
    sweep(bucket, now_ms=2**50, grace_ms=0)
    assert len([one for one in bucket.list("segments/") if not one.key.endswith(".index")]) == 2
    assert list(values_by_offset(log)) == list(range(20, 45))


@pytest.mark.parametrize("offset", [25, 20, 40, 3])
def test_truncating_brings_back_what_it_cuts_in_two(
    tmp_path: Path, store: LogStore, log: Partition, offset: int
) -> None:
    """The segment in which the log then ends is local; later segments and their stubs are deleted."""
    lost = log.truncate(offset)
    assert lost is not None
    assert lost.base_offset == offset
    assert values_by_offset(log) == {number: value(number) for number in range(offset)}
    fill(log, 3)
    assert remote(log) == [base for base in (0, 10, 20, 30) if base + 10 <= offset]
    names = os.listdir(log.folder)
    assert all(name.replace(".remote", ".log") in names for name in names if name.endswith(".remote"))
    store.ship(url_of(tmp_path))
    assert len(values(log)) == offset + 3
    assert verify(open_bucket(url_of(tmp_path))).problems == ()


def test_compacted_topics_have_it_too(tmp_path: Path) -> None:
    """Compaction brings what it reads, what it writes is here, is shipped, and leaves again; no stub is left over."""
    with LogStore(tmp_path / "store", background=False) as store:
        log = store.create_topic("k", **(TIERED | {"cleanup_policy": "compact"})).partition(0)
        for round_ in range(1, 4):
            for number in range(25):
                log.append([b"%d/%d" % (round_, number)], [b"%d" % (number % 7)])
            log.roll()
            store.ship(url_of(tmp_path))
            assert len(remote(log)) == len(log.segments()) - 1
            report = log.compact()
            assert report.records_after < report.records_before
            assert remote(log) == []
            table = {record.key: record.value for batch in log.read(0) for record in batch}
            assert table == {b"%d" % key: b"%d/%d" % (round_, max(range(key, 25, 7))) for key in range(7)}
            store.ship(url_of(tmp_path))
            assert len(remote(log)) == len(log.segments()) - 1
            assert {record.key: record.value for batch in log.read(0) for record in batch} == table
            sweep(open_bucket(url_of(tmp_path)), now_ms=2**50, grace_ms=0)
            assert {record.key: record.value for batch in log.read(0) for record in batch} == table
        stubs = [name for name in os.listdir(log.folder) if name.endswith(".remote")]
        assert len(stubs) == len(remote(log))


def test_a_topic_is_renamed_and_deleted(tmp_path: Path, store: LogStore) -> None:
    """The stubs go with the folder; of a topic that is gone the objects go."""
    store.rename_topic("a", "b")
    log = store.topic("b").partition(0)
    assert values_by_offset(log) == ALL
    store.ship(url_of(tmp_path))
    assert remote(log) == [0, 10, 20, 30]
    store.delete_topic("b")
    store.ship(url_of(tmp_path))
    sweep(open_bucket(url_of(tmp_path)), now_ms=2**50, grace_ms=0)
    assert list(open_bucket(url_of(tmp_path)).list("segments/")) == []


def test_after_the_death_of_the_machine_it_is_as_before(tmp_path: Path) -> None:
    """A recovery downloads no segment."""
    tiered_store(tmp_path).close()
    (tmp_path / "store" / "a" / "0" / "state").unlink()
    os.rename(tmp_path / "bucket", tmp_path / "away")
    with LogStore(tmp_path / "store", background=False) as store:
        log = store.topic("a").partition(0)
        assert log.append([b"x"]) == 45
        os.rename(tmp_path / "away", tmp_path / "bucket")
        assert values_by_offset(log) == ALL | {45: b"x"}


# ---------------------------------------------------------------- elsewhere


def test_it_is_restored_followed_taken_over_and_read_where_it_lies(tmp_path: Path, store: LogStore) -> None:
    """The object store has all of it, as without tiers; who brings it has all of it."""
    bucket = open_bucket(url_of(tmp_path))
    restore(bucket, str(tmp_path / "restored"))
    with LogStore(tmp_path / "restored", background=False) as restored:
        log = restored.topic("a").partition(0)
        assert (remote(log), values_by_offset(log)) == ([], ALL)
    with Replica(url_of(tmp_path), tmp_path / "replica", threads=False) as replica:
        replica.refresh()
        with LogStore(tmp_path / "replica", background=False) as copy:
            assert values_by_offset(copy.topic("a").partition(0)) == ALL
    with segmentlog.open(url_of(tmp_path)) as there:
        assert values_by_offset(there.topic("a").partition(0)) == ALL
    take_over(bucket, str(tmp_path / "other"))
    with LogStore(tmp_path / "other", background=False) as other:
        log = other.topic("a").partition(0)
        other.ship(url_of(tmp_path))
        assert remote(log) == [0, 10, 20, 30, 40]
        log.append([b"new"])
        assert list(values_by_offset(log).values()) == [*ALL.values(), b"new"]


def test_shipping_ends_once_all_of_it_is_back(tmp_path: Path, store: LogStore, log: Partition) -> None:
    """The store then ships to another place and evicts again; the first place may be deleted."""
    assert store.shipping.stop_permanently() == url_of(tmp_path)
    assert remote(log) == []
    assert not [name for name in os.listdir(log.folder) if name.endswith(".remote")]
    shutil.rmtree(tmp_path / "bucket")
    assert values_by_offset(log) == ALL
    store.ship(url_of(tmp_path / "elsewhere"))
    assert remote(log) == [0, 10, 20, 30]
    assert values_by_offset(log) == ALL


def test_a_copy_of_the_folder_reads_as_well(tmp_path: Path, store: LogStore) -> None:
    """A copy without holes works, too."""
    shutil.copytree(store.path, tmp_path / "copy")
    with LogStore(tmp_path / "copy", background=False) as copy:
        log = copy.topic("a").partition(0)
        assert remote(log) == [0, 10, 20, 30]
        assert values_by_offset(log) == ALL


def test_what_replaces_a_hole_counts_by_itself(tmp_path: Path, store: LogStore, log: Partition) -> None:
    """If the bytes are put back by hand, the stub no longer counts, without any command."""
    restore(open_bucket(url_of(tmp_path)), str(tmp_path / "restored"))
    for segment in log.segments()[:4]:
        shutil.copy(segment.path.replace(store.path, str(tmp_path / "restored")), segment.path + ".back")
        os.replace(segment.path + ".back", segment.path)
    shutil.rmtree(tmp_path / "bucket")
    with LogStore(store.path, background=False) as again:
        assert remote(again.topic("a").partition(0)) == []
        assert values_by_offset(again.topic("a").partition(0)) == ALL


# ---------------------------------------------------------------- when


def test_nothing_leaves_before_it_is_old_or_much(tmp_path: Path) -> None:
    """Old segments leave by their newest record or by the local size, the oldest first."""
    clock = FakeClock()
    bucket = LocalBucket(str(tmp_path / "bucket"))
    with LogStore(tmp_path / "store", background=False, clock=clock) as store:
        log = store.create_topic("a", **(TIERED | {"local_retention_ms": 60_000})).partition(0)
        for number in range(45):
            log.append([value(number)], timestamps=[clock.now_ms() + number])
        turn(store, bucket, clock)
        assert remote(log) == []
        clock.advance(58_030)  # more than a minute after the newest record of three segments
        turn(store, bucket)
        assert remote(log) == [0, 10, 20]
        size_bytes = log.segments()[3].size_bytes
        store.alter_topic("a", local_retention_ms=-1, local_retention_bytes=size_bytes // 4)
        turn(store, bucket)
        assert remote(log) == [0, 10, 20, 30]


def test_a_store_that_is_not_shipped_keeps_all_of_it(tmp_path: Path) -> None:
    """The setting is allowed, and waits."""
    with LogStore(tmp_path / "store", background=False) as store:
        log = store.create_topic("a", **TIERED).partition(0)
        fill(log, 45)
        store.retention_tick()
        assert remote(log) == []
        assert log.local_log_start_offset == 0


def test_turned_off_it_comes_back(tmp_path: Path, store: LogStore, log: Partition) -> None:
    """A segment in each turn of the shipper; then the disk has all of it."""
    store.alter_topic("a", remote_storage_enable=False)
    bucket = LocalBucket(str(tmp_path / "bucket"))
    for left in (3, 2, 1, 0):
        turn(store, bucket)
        assert len(remote(log)) <= left
    shutil.rmtree(tmp_path / "bucket")
    assert values_by_offset(log) == ALL


def test_what_came_back_is_not_put_anew(tmp_path: Path) -> None:
    """The manifest refers to the same objects, and readers need not download them again."""
    clock = FakeClock()
    bucket = CountingBucket(str(tmp_path / "bucket"))
    with LogStore(tmp_path / "store", background=False, clock=clock) as store:
        log = store.create_topic("a", **TIERED).partition(0)
        fill(log, 45)
        shipper = Shipper(store._topics, bucket, parallel=0)
        try:
            for _ in range(2):
                shipper.ship()
                clock.advance(2_000)
            assert remote(log) == [0, 10, 20, 30]
            before, generation = bucket.segments(), log.handle.page.log.read().generation
            store.alter_topic("a", remote_storage_enable=False)
            for _ in range(6):
                shipper.ship()
                clock.advance(2_000)
            assert remote(log) == []
            assert log.handle.page.log.read().generation > generation
            assert bucket.segments() == before
            store.alter_topic("a", remote_storage_enable=True)
            for _ in range(2):
                shipper.ship()
                clock.advance(2_000)
            assert remote(log) == [0, 10, 20, 30]
            assert bucket.segments() == before
        finally:
            shipper.close()
        assert values_by_offset(log) == ALL


def test_many_segments_leave_in_one_call(tmp_path: Path) -> None:
    """A cycle evicts a part of them, so that waits stay short; a request for all evicts all."""
    with LogStore(tmp_path / "store", background=False) as store:
        log = store.create_topic("a", **(TIERED | {"segment_records": 2})).partition(0)
        fill(log, 41)
        store.ship(url_of(tmp_path))
        assert len(remote(log)) == 20
        assert log.local_log_start_offset == 40


def test_ship_waits_for_the_uploads_it_started_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`LogStore.ship` returns after the manifest refers to every sealed segment, however the uploads finish."""
    ended = UploadPool.collect_finished

    def all_at_once(self: UploadPool[Any, Any], wait_s: float | None = 0.0) -> Any:
        """Return uploads only when the shipper waits, and then all of them."""
        for future in self._under_way.values():
            future.exception()
        return ended(self, wait_s) if wait_s else []

    monkeypatch.setattr(UploadPool, "collect_finished", all_at_once)
    with LogStore(tmp_path / "store", background=False) as store:
        log = store.create_topic("a", **(TIERED | {"segment_records": 2})).partition(0)
        fill(log, 41)
        store.ship(url_of(tmp_path))
        assert len(remote(log)) == 20


# ---------------------------------------------------------------- what is shipped no more


def test_a_topic_that_is_wanted_there_no_more_comes_back_first(tmp_path: Path) -> None:
    """Its segments exist only in the object store: the manifest refers to them until all are local again."""
    clock = FakeClock()
    with LogStore(tmp_path / "store", background=False, clock=clock) as store:
        log = store.create_topic("a", **TIERED).partition(0)
        fill(log, 45)
        store.create_topic("b")
        bucket = open_bucket(url_of(tmp_path))
        turn(store, bucket, clock)
        assert remote(log) == [0, 10, 20, 30]
        shipper = Shipper(store._topics, bucket, topic_patterns=["b"], parallel=0)
        shipper.ship()
        assert remote(log) == []
        shipper.ship()
        assert shipper.manifest is not None
        assert "a" not in [topic.name for topic in shipper.manifest.topics]
        clock.advance(6 * 60_000)
        shipper.ship()
        shipper.close()
        assert values_by_offset(log) == ALL


def test_a_topic_that_is_renamed_while_it_is_looked_for_is_not_taken_for_a_deleted_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Listed under the old name and read under the new one: it stays in every manifest, and is not recalled."""
    clock = FakeClock()
    with LogStore(tmp_path / "store", background=False, clock=clock) as store:
        log = store.create_topic("a", **TIERED).partition(0)
        fill(log, 45)
        shipper = Shipper(store._topics, open_bucket(url_of(tmp_path)), parallel=0)
        shipper.ship()
        clock.advance(2_000)
        shipper.ship()
        real, renames = Topics.names, ["z"]

        def names(self: Topics, *, internal: bool = False) -> list[str]:
            found = real(self, internal=internal)
            if renames:
                self.administration.rename("a", renames.pop())
            return found

        monkeypatch.setattr(Topics, "names", names)
        shipper.run_cycle()
        assert renames == []
        assert shipper.manifest is not None
        assert [topic.name for topic in shipper.manifest.topics] == ["z"]
        shipper.close()
        log = store.topic("z").partition(0)
        assert remote(log) == [0, 10, 20, 30]
        assert values_by_offset(log) == ALL


def test_nothing_leaves_of_which_a_part_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each object is checked before an eviction makes it the only copy."""
    monkeypatch.setattr("segmentlog.objects.upload.multipart.PART_BYTES", 300)
    clock = FakeClock()
    with LogStore(tmp_path / "store", background=False, clock=clock) as store:
        log = store.create_topic("a", **{**TIERED, "local_retention_ms": 10_000}).partition(0)
        for number in range(45):
            log.append([value(number)], timestamps=[clock.now_ms() + number])
        bucket = open_bucket(url_of(tmp_path))
        shipper = Shipper(store._topics, bucket, parallel=0)
        shipper.ship()
        assert shipper.manifest is not None
        (part,) = (part for topic in shipper.manifest.topics for part in topic.partitions if topic.name == "a")
        bucket.delete([part.segments[0].log.objects[0].key])
        clock.advance(10_000_000)
        shipper.ship()
        shipper.close()
        assert 0 not in remote(log)
        assert len(values_by_offset(log)) == 45
