"""Staging without Spark: tasks write files that no reader sees, one transaction publishes them, a newer run fences."""

from __future__ import annotations

import errno
import itertools
import multiprocessing
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import segmentlog
from segmentlog.config import TopicConfig
from segmentlog.errors import (
    CorruptBatch,
    DiskFull,
    InvalidRecord,
    ProducerFenced,
    RecordTooLarge,
    SegmentlogError,
    UnknownTopic,
)
from segmentlog.format.arrow_columns import blob_array, blob_column
from segmentlog.format.batch import HEADER_SIZE, decode_header
from segmentlog.format.columns import array_of
from segmentlog.format.file_names import STAGING_FOLDER
from segmentlog.format.record_batch import RecordBatch
from segmentlog.policy.partitioner import HashPartitioner
from segmentlog.spark.arrow_records import ArrowRecords
from segmentlog.staging.staged_files import Staged
from segmentlog.staging.staging import Stager, publish
from segmentlog.staging.staging_folder import ABANDONED_AFTER_S, StagingFolder, sweep_abandoned
from segmentlog.storage.fs import FileSystem
from segmentlog.testing.fault_injection import FaultyFileSystem

Pair = tuple[bytes | None, bytes | None]


@pytest.fixture
def fs() -> FaultyFileSystem:
    """Return the real file system, with failures on demand."""
    return FaultyFileSystem()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[segmentlog.LogStore]:
    """Provide a store without threads, with topic "t" of four partitions."""
    with segmentlog.open(tmp_path / "store", background=False) as opened:
        opened.create_topic("t", partitions=4)
        yield opened


def add(stager: Stager, pairs: Sequence[Pair], topic: str = "t", **options: Any) -> None:
    """Hand keys and values to a stager."""
    keys = [key for key, _ in pairs]
    records = ArrowRecords(
        pa.array([value for _, value in pairs], pa.binary()),
        pa.array(keys, pa.binary()) if any(key is not None for key in keys) else None,
        np.array(options.pop("timestamps", [time.time_ns() // 1_000_000] * len(pairs)), np.int64),
        options.pop("headers", None),
    )
    size_bytes = sum(len(key or b"") + len(value or b"") for key, value in pairs)
    stager.add(topic, records, size_bytes, **options)


def folder_of(store: segmentlog.LogStore, job: str = "job") -> StagingFolder:
    """Return the folder of a job, made."""
    folder = StagingFolder(FileSystem(), store.path, job)
    folder.create()
    return folder


def stager_of(store: segmentlog.LogStore, task: int = 0, fs: FileSystem | None = None, **options: Any) -> Stager:
    """Return a task of the only run."""
    return Stager(store.topic, fs or FileSystem(), folder_of(store).file_for(1, task), task, **options)


def staged(store: segmentlog.LogStore, pairs: Sequence[Pair], task: int = 0) -> Staged:
    """Return the staged file of a task that got these records."""
    stager = stager_of(store, task)
    add(stager, pairs)
    return stager.finish()


def publish_all(store: segmentlog.LogStore, files: Sequence[Staged], note: str | None = None) -> int:
    """Publish in a transaction."""
    with store.producer(name="sink", linger_ms=0) as producer, producer.transaction(note):
        return publish(producer, FileSystem(), files)


def read(store: segmentlog.LogStore, topic: str = "t", isolation: Any = "read_committed") -> dict[int, list[Pair]]:
    """(key, value) of each partition."""
    found: dict[int, list[Pair]] = {number: [] for number in range(store.topic(topic).partition_count)}
    for record in store.consumer(topic, isolation=isolation):
        found[record.partition].append((record.key, record.value))
    return found


def left(store: segmentlog.LogStore) -> list[str]:
    """Staged files that lie around."""
    return sorted(str(path) for path in Path(store.path, STAGING_FOLDER).rglob("*.batches"))


# ---------------------------------------------------------------- tasks


def test_keys_go_where_a_producer_sends_them(store: segmentlog.LogStore) -> None:
    """A key is in the same partition with and without Spark, with its records in order."""
    pairs: list[Pair] = [(b"key %d" % (n % 100), b"%d" % n) for n in range(2000)]
    store.create_topic("by-hand", partitions=4)
    with store.producer() as producer:
        producer.send_many("by-hand", [value for _, value in pairs], keys=[key for key, _ in pairs])
    assert publish_all(store, [staged(store, pairs)]) == 2000
    assert read(store) == read(store, "by-hand")


@settings(max_examples=25)  # each makes a store
@given(
    pairs=st.lists(st.tuples(st.none() | st.binary(max_size=3), st.binary(max_size=5)), max_size=60),
    cuts=st.lists(st.integers(0, 60), max_size=5),
)
def test_nothing_is_lost_or_moved(tmp_path_factory: pytest.TempPathFactory, pairs: list[Pair], cuts: list[int]) -> None:
    """All records are published in the order of their partition, with and without keys, in any split."""
    with segmentlog.open(tmp_path_factory.mktemp("any") / "store", background=False) as store:
        store.create_topic("t", partitions=3, fsync="never")
        stager = stager_of(store)
        bounds = [0, *sorted(min(cut, len(pairs)) for cut in cuts), len(pairs)]
        for start, stop in itertools.pairwise(bounds):
            add(stager, pairs[start:stop])
        numbered = stager.finish()
        assert numbered.record_count == len(pairs)
        publish_all(store, [numbered])
        found = read(store)
        assert sorted(map(repr, (pair for some in found.values() for pair in some))) == sorted(map(repr, pairs))
        for key in {key for key, _ in pairs if key is not None}:
            places = [n for n, some in found.items() if any(pair[0] == key for pair in some)]
            assert len(places) == 1
            assert [v for k, v in found[places[0]] if k == key] == [v for k, v in pairs if k == key]


def test_records_say_where_they_go(store: segmentlog.LogStore) -> None:
    """A partition that is given counts; -1 goes by the key."""
    stager = stager_of(store)
    add(stager, [(b"k", b"%d" % n) for n in range(4)], partitions=np.array([3, 1, -1, 0], np.int32))
    publish_all(store, [stager.finish()])
    by_key = next(n for n, pairs in read(store).items() if (b"k", b"2") in pairs)
    with store.producer() as producer:
        assert producer.send("t", b"", key=b"k").result().partition == by_key
    assert (b"k", b"0") in read(store)[3]
    assert (b"k", b"1") in read(store)[1]
    assert (b"k", b"3") in read(store)[0]


@pytest.mark.parametrize("wrong", [4, -2])
def test_a_partition_that_there_is_not(store: segmentlog.LogStore, wrong: int) -> None:
    """The error lists the partitions that exist."""
    stager = stager_of(store)
    with pytest.raises(UnknownTopic, match=f"it has no partition {wrong}, only 0 to 3"):
        add(stager, [(None, b"x")], partitions=np.array([wrong], np.int32))
    stager.discard()


def test_records_without_keys_take_turns(store: segmentlog.LogStore) -> None:
    """Tasks begin at different partitions, and each goes on to the next with every batch that it is handed."""
    for task in range(4):
        stager = stager_of(store, task)
        for _ in range(4):
            add(stager, [(None, b"x")] * 5)
        found = stager.finish()
        assert sorted(run.partition for run in found.runs) == [0, 1, 2, 3]
    firsts = {staged(store, [(None, b"x")], task).runs[0].partition for task in range(4)}
    assert firsts == {0, 1, 2, 3}


def test_headers_and_timestamps(store: segmentlog.LogStore) -> None:
    """They are staged with their records, also if only some have them; the default time is that of staging."""
    before = time.time_ns() // 1_000_000
    stager = stager_of(store)
    add(stager, [(None, b"1")], partitions=np.array([0], np.int32))
    add(stager, [(b"k", b"2"), (b"k", b"3")], partitions=np.array([0, 0], np.int32), timestamps=[5, 6],
        headers=[[("h", b"1")], []])  # fmt: skip
    add(stager, [(None, b"4")], partitions=np.array([0], np.int32))
    publish_all(store, [stager.finish()])
    records = list(store.consumer("t"))
    assert [(record.key, record.value) for record in records] == [
        (None, b"1"), (b"k", b"2"), (b"k", b"3"), (None, b"4"),
    ]  # fmt: skip
    assert [list(record.headers) for record in records] == [[], [("h", b"1")], [], []]
    assert [record.timestamp for record in records[1:3]] == [5, 6]
    assert before <= records[0].timestamp <= records[3].timestamp <= time.time_ns() // 1_000_000


def test_large_amounts_become_several_batches(store: segmentlog.LogStore) -> None:
    """No batch exceeds what a reader accepts, and all records are in order."""
    pairs: list[Pair] = [(b"k", bytes(1000) + b"%d" % n) for n in range(5000)]
    found = staged(store, pairs)
    (partition,) = {run.partition for run in found.runs}
    assert sum(run.batch_count for run in found.runs) >= 5
    publish_all(store, [found])
    batches = list(store.topic("t").partition(partition).read(0, isolation="read_committed"))
    assert max(batch.header.raw_size for batch in batches) <= 1_048_588
    assert [value for batch in batches for value in batch.values] == [value for _, value in pairs]


def test_much_that_waits_is_staged_early(store: segmentlog.LogStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is bounded, however many partitions the records go to."""
    monkeypatch.setattr("segmentlog.staging.staging._PENDING_BYTES", 1000)
    stager = stager_of(store)
    for n in range(40):
        add(stager, [(None, bytes(100))], partitions=np.array([n % 4], np.int32))
        assert stager._pending_bytes <= 1000
    found = stager.finish()
    assert found.record_count == 40
    assert publish_all(store, [found]) == 40
    assert all(len(pairs) == 10 for pairs in read(store).values())


def test_a_task_without_records(store: segmentlog.LogStore) -> None:
    """It stages an empty file, and publishing it adds nothing."""
    found = stager_of(store).finish()
    assert found.record_count == 0
    assert publish_all(store, [found]) == 0
    assert publish_all(store, []) == 0
    stager = stager_of(store)
    add(stager, [])
    assert stager.finish().runs == ()


def test_several_topics(store: segmentlog.LogStore) -> None:
    """One task writes to all topics that its records name; an unknown topic is refused."""
    store.create_topic("u")
    stager = stager_of(store)
    add(stager, [(b"k", b"1")])
    add(stager, [(b"k", b"2")], "u")
    with pytest.raises(UnknownTopic):
        add(stager, [(b"k", b"3")], "v")
    publish_all(store, [stager.finish()])
    assert read(store, "u") == {0: [(b"k", b"2")]}
    assert sum(map(len, read(store).values())) == 1


def test_null_values(store: segmentlog.LogStore) -> None:
    """Null values are rejected in topics that are not compacted, unless allowed; otherwise they are tombstones."""
    stager = stager_of(store)
    add(stager, [(b"k", b"1"), (b"k", None)])
    with pytest.raises(InvalidRecord, match=r"value\[1\] is null; expected a value: topic 't' is not compacted"):
        stager.finish()
    stager.discard()
    wanted = stager_of(store, allow_null_values=True)
    add(wanted, [(b"k", None)])
    publish_all(store, [wanted.finish()])
    store.create_topic("c", cleanup_policy="compact")
    tombstone = stager_of(store)
    add(tombstone, [(b"k", None)], "c")
    publish_all(store, [tombstone.finish()])
    assert read(store, "c") == {0: [(b"k", None)]}
    keyless = stager_of(store)
    add(keyless, [(None, b"v")], "c")
    with pytest.raises(InvalidRecord, match="a key for each record"):
        keyless.finish()
    keyless.discard()
    assert len(left(store)) == 2


def test_a_record_that_is_too_large(store: segmentlog.LogStore) -> None:
    """It is refused during staging, and not during publishing."""
    store.create_topic("small", max_message_bytes=1000)
    stager = stager_of(store)
    add(stager, [(None, b"fits")] * 3 + [(None, os.urandom(2000))], "small")
    with pytest.raises(RecordTooLarge, match=r"max\.message\.bytes = 1000"):
        stager.finish()
    stager.discard()
    assert left(store) == []


def test_a_full_disk(store: segmentlog.LogStore, fs: FaultyFileSystem) -> None:
    """The task gets `DiskFull`, and its file is deleted."""
    stager = stager_of(store, fs=fs)
    fs.room_bytes = 500
    add(stager, [(b"k", os.urandom(2000))])
    with pytest.raises(DiskFull, match="no room on the disk"):
        stager.finish()
    stager.discard()
    assert left(store) == []
    fs.heal()
    again = stager_of(store, fs=fs)
    add(again, [(b"k", b"1")])
    assert publish_all(store, [again.finish()]) == 1


def test_a_disk_that_fails(store: segmentlog.LogStore, fs: FaultyFileSystem) -> None:
    """Other disk errors are raised unchanged."""
    stager = stager_of(store, fs=fs)
    add(stager, [(b"k", b"1")])
    fs.fail("pwritev", errno.EIO)
    with pytest.raises(OSError, match="Input/output error"):
        stager.finish()
    stager.discard()
    stager.discard()
    assert left(store) == []


def test_short_writes(store: segmentlog.LogStore, fs: FaultyFileSystem) -> None:
    """Partial writes of the kernel are completed."""
    fs.short_writes(7)
    stager = stager_of(store, fs=fs)
    add(stager, [(b"k", b"%d" % n) for n in range(100)])
    found = stager.finish()
    fs.heal()
    assert publish_all(store, [found]) == 100


# ---------------------------------------------------------------- publishing


def test_publishing_follows_the_order_of_tasks(store: segmentlog.LogStore) -> None:
    """Batches are in the order of tasks, whichever finished first, as if one task had written them all."""
    files = [staged(store, [(b"k", b"%d.%d" % (task, n)) for n in range(3)], task) for task in (2, 0, 1)]
    publish_all(store, files)
    (pairs,) = [pairs for pairs in read(store).values() if pairs]
    assert [value for _, value in pairs] == [b"%d.%d" % (task, n) for task in range(3) for n in range(3)]


def test_nothing_is_seen_before_the_commit(store: segmentlog.LogStore) -> None:
    """Staged records are invisible; published in a transaction they are for read_uncommitted; aborted for no reader."""
    found = staged(store, [(b"k", b"1")])
    assert sum(map(len, read(store, isolation="read_uncommitted").values())) == 0
    assert store.topics() == ["t"]
    with store.producer(name="sink") as producer:
        producer.begin_transaction()
        publish(producer, FileSystem(), [found])
        assert sum(map(len, read(store).values())) == 0
        assert sum(map(len, read(store, isolation="read_uncommitted").values())) == 1
        producer.abort_transaction()
        assert sum(map(len, read(store).values())) == 0
        with producer.transaction():
            publish(producer, FileSystem(), [found])
    assert sum(map(len, read(store).values())) == 1


def test_what_others_staged_is_not_published(store: segmentlog.LogStore) -> None:
    """Files of abandoned attempts are ignored."""
    wanted, other = staged(store, [(b"k", b"1")]), staged(store, [(b"k", b"never")])
    assert wanted.path != other.path
    publish_all(store, [wanted])
    assert [pair for pairs in read(store).values() for pair in pairs] == [(b"k", b"1")]


@pytest.mark.parametrize("where", ["header", "payload", "cut off"])
def test_a_damaged_file_publishes_nothing(store: segmentlog.LogStore, where: str) -> None:
    """The damage is found before the commit: no record is visible, not even an intact one."""
    sound, harmed = staged(store, [(b"a", b"1")] * 10, 0), staged(store, [(b"b", b"2")] * 10, 1)
    data = bytearray(Path(harmed.path).read_bytes())
    if where == "cut off":
        del data[-5:]
    else:
        data[20 if where == "header" else -3] ^= 0x10
    Path(harmed.path).write_bytes(data)
    with pytest.raises(CorruptBatch, match="damaged at byte"):
        publish_all(store, [sound, harmed], note="1")
    assert sum(map(len, read(store).values())) == 0
    with store.producer(name="sink") as producer:
        assert producer.last_note is None
    assert publish_all(store, [sound], note="1") == 10
    assert sum(map(len, read(store).values())) == 10


def test_a_file_that_is_not_there(store: segmentlog.LogStore) -> None:
    """The error says whose file system it must be on."""
    found = staged(store, [(b"a", b"1")])
    os.unlink(found.path)
    with pytest.raises(SegmentlogError, match="it does not exist: the publishing process must see the file system"):
        publish_all(store, [found])


def test_much_is_published_in_parts(store: segmentlog.LogStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than goes into one append is several, of one transaction."""
    monkeypatch.setattr("segmentlog.staging.staging._PUBLISHED_AT_ONCE_BYTES", 100)
    files = [staged(store, [(b"k", b"%d.%d" % (task, n)) for n in range(20)], task) for task in range(6)]
    publish_all(store, files)
    (pairs,) = [pairs for pairs in read(store).values() if pairs]
    assert [value for _, value in pairs] == [b"%d.%d" % (task, n) for task in range(6) for n in range(20)]


def test_a_full_disk_while_publishing(tmp_path: Path, fs: FaultyFileSystem) -> None:
    """The transaction is aborted; the same files are published when there is room again."""
    with segmentlog.LogStore(tmp_path / "store", background=False, fs=fs) as store:
        store.create_topic("t", partitions=4)
        files = [staged(store, [(b"%d" % n, os.urandom(500)) for n in range(200)], task) for task in range(2)]
        with store.producer(name="sink", linger_ms=0) as producer:
            with pytest.raises(DiskFull), producer.transaction(note="1"):  # noqa: PT012
                fs.room_bytes = 80_000
                publish(producer, FileSystem(), files)
            fs.heal()
            assert sum(map(len, read(store).values())) == 0
            assert producer.last_note is None
            with producer.transaction(note="1"):
                assert publish(producer, FileSystem(), files) == 400
        assert sum(map(len, read(store).values())) == 400


def test_what_is_published_counts_on(store: segmentlog.LogStore) -> None:
    """Staged batches and records that are sent go into one log, numbered by their producer without a gap."""
    with store.producer(name="sink", linger_ms=0) as producer:
        for round_number in range(3):
            found = staged(store, [(b"k", b"%d" % round_number)] * 7)
            with producer.transaction():
                producer.send("t", b"sent", key=b"k")
                publish(producer, FileSystem(), [found])
                producer.send("t", b"sent", key=b"k")
        (number,) = {run.partition for run in found.runs}
        assert producer.last_sequence("t", number) == 3 * 9 - 1
    assert len(read(store)[number]) == 27


# ---------------------------------------------------------------- runs and fences


def test_the_newest_run_counts(store: segmentlog.LogStore) -> None:
    """A new run takes the next number and fences the older one, which hears of it at its next claim or check."""
    folder = folder_of(store)
    assert folder.claim("one") == 1
    assert folder.claim("one") == 1
    folder.check("one")
    assert folder.claim("two") == 2
    folder.check("two")
    for refused in (folder.claim, folder.check):
        with pytest.raises(ProducerFenced, match=r"job: another run of the same job has started since \(epoch 2, this"):
            refused("one")
    assert folder.claim("three") == 3


def test_runs_of_any_name(store: segmentlog.LogStore) -> None:
    """A name that is not a valid file name identifies one run, not a new one each time."""
    folder = folder_of(store)
    for name in ("a/b", "a-b-c", "ü ö", ".", "x" * 255, "A", "a"):
        number = folder.claim(name)
        assert folder.claim(name) == number
        folder.check(name)
    assert number == 7


def test_a_run_that_nobody_knows(store: segmentlog.LogStore) -> None:
    """A run without a claim cannot publish once another run has claimed."""
    folder = folder_of(store)
    folder.claim("one")
    with pytest.raises(ProducerFenced):
        folder.check("other")


def test_a_new_run_removes_what_the_older_left(store: segmentlog.LogStore) -> None:
    """Orphans of a run that was killed are gone with the next one's first claim; its own files stay."""
    folder = folder_of(store)
    run = folder.claim("one")
    old = Path(folder.file_for(run, 0))
    old.write_bytes(b"old")
    assert folder.claim("one") == run
    assert old.exists()
    run = folder.claim("two")
    assert not old.exists()
    new = Path(folder.file_for(run, 0))
    new.write_bytes(b"new")
    folder.claim("two")
    assert new.exists()
    folder.clear("two")
    assert not new.exists()
    folder.check("two")
    with pytest.raises(ProducerFenced):
        folder.check("one")


def test_a_run_clears_what_is_its_own(store: segmentlog.LogStore) -> None:
    """A run that publishes while a newer one stages keeps that one's files."""
    folder = folder_of(store)
    folder.claim("one")
    newer = Path(folder.file_for(folder.claim("two"), 0))
    newer.write_bytes(b"of the newer one")
    folder.clear("one")
    assert newer.exists()
    folder.clear("nobody")
    assert newer.exists()


def test_jobs_are_apart(store: segmentlog.LogStore) -> None:
    """Each job has its own folder, with any name, and none of them is a topic."""
    names = ["job", "job/1", "job 1", "..", "ü" * 255]
    folders = [folder_of(store, name) for name in names]
    assert len({folder.path for folder in folders}) == len(names)
    for folder in folders:
        assert Path(folder.path).parent == Path(store.path, STAGING_FOLDER)
        assert folder.claim("one") == 1
    assert store.topics() == ["t"]
    folders[0].remove()
    folders[0].remove()
    assert not Path(folders[0].path).exists()
    folders[0].clear("one")
    folders[1].check("one")


def test_threads_that_claim_at_once(store: segmentlog.LogStore) -> None:
    """Each run gets its own number, and only the highest one remains."""
    folder = folder_of(store)
    numbers: dict[str, int] = {}
    barrier = threading.Barrier(8)

    def claim(name: str) -> None:
        barrier.wait()
        numbers[name] = StagingFolder(FileSystem(), store.path, "job").claim(name)

    threads = [threading.Thread(target=claim, args=(f"run {n}",)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(numbers.values()) == list(range(1, 9))
    for name, number in numbers.items():
        if number == 8:
            folder.check(name)
        else:
            with pytest.raises(ProducerFenced):
                folder.check(name)


def _claim(path: str, name: str, found: Any) -> None:
    found.put((name, StagingFolder(FileSystem(), path, "job").claim(name)))


def test_processes_that_claim_at_once(store: segmentlog.LogStore) -> None:
    """Tasks of one run agree on its number in whatever process they are."""
    fork = multiprocessing.get_context("fork")
    found = fork.Queue()
    workers = [fork.Process(target=_claim, args=(store.path, "one", found)) for n in range(6)]
    for worker in workers:
        worker.start()
    told = [found.get(timeout=30) for _ in workers]
    for worker in workers:
        worker.join()
    assert told == [("one", 1)] * 6


# ---------------------------------------------------------------- what is left


def age(path: str | Path, seconds: float) -> None:
    """Set the age of a folder and everything below it."""
    then = time.time() - seconds
    for one in [*Path(path).rglob("*"), Path(path)]:
        os.utime(one, (then, then))


def test_abandoned_files_are_swept(store: segmentlog.LogStore) -> None:
    """Files of abandoned jobs are deleted; a query keeps its fence, and the folder of a batch job is deleted."""
    batch, fresh, query = folder_of(store, "batch"), folder_of(store, "fresh"), folder_of(store, "query")
    run = query.claim("one")
    for folder in (batch, fresh, query):
        Path(folder.file_for(run, 0)).write_bytes(b"x")
    for folder in (batch, query):
        age(folder.path, ABANDONED_AFTER_S + 60)
    sweep_abandoned(FileSystem(), store.path)
    assert not Path(batch.path).exists()
    assert len(os.listdir(fresh.path)) == 1
    assert len(os.listdir(query.path)) == 1
    query.check("one")
    with pytest.raises(ProducerFenced):
        query.check("other")


def test_one_fresh_file_keeps_a_job(store: segmentlog.LogStore) -> None:
    """A long job has files that are a day old, and one that it is writing."""
    folder = folder_of(store)
    old = Path(folder.file_for(1, 0))
    old.write_bytes(b"x")
    age(folder.path, ABANDONED_AFTER_S + 60)
    Path(folder.file_for(1, 1)).write_bytes(b"x")
    sweep_abandoned(FileSystem(), store.path)
    assert old.exists()


def test_an_empty_folder_goes_when_it_is_old(store: segmentlog.LogStore) -> None:
    """A new folder is about to be written to, and stays."""
    folder = folder_of(store)
    sweep_abandoned(FileSystem(), store.path)
    assert Path(folder.path).exists()
    sweep_abandoned(FileSystem(), store.path, now_s=time.time() + ABANDONED_AFTER_S + 60)
    assert not Path(folder.path).exists()


def test_sweeping_nothing(tmp_path: Path) -> None:
    """A store without staging has no such folder, and gets none."""
    with segmentlog.open(tmp_path / "new", background=False) as store:
        sweep_abandoned(FileSystem(), store.path)
        assert not Path(store.path, STAGING_FOLDER).exists()


def test_a_folder_that_others_write_to_is_removed(store: segmentlog.LogStore, fs: FaultyFileSystem) -> None:
    """An abandoned task may write meanwhile: everything is deleted nevertheless; a disk error is raised."""
    folder = StagingFolder(fs, store.path, "job")
    folder.create()
    fs.fail("remove_tree", errno.ENOTEMPTY)
    folder.remove()
    assert not Path(folder.path).exists()
    folder.create()
    fs.fail("remove_tree", FileNotFoundError())
    folder.remove()
    assert not Path(folder.path).exists()
    folder.create()
    fs.fail("remove_tree", errno.EIO)
    with pytest.raises(OSError, match="Input/output error"):
        folder.remove()


# ---------------------------------------------------------------- Arrow arrays in place of lists

BLOBS = st.lists(st.one_of(st.none(), st.binary(max_size=40), st.binary(min_size=250, max_size=300)), min_size=1)


@given(BLOBS)
def test_a_column_of_arrow_is_the_column_of_a_list(blobs: list[bytes | None]) -> None:
    """Bytes are equal for any lengths of items, sliced or not."""
    array = pa.array([b"before", *blobs, b"behind"], pa.binary())
    assert blob_column(array.slice(1, len(blobs))) == array_of(blobs)
    assert blob_column(pa.array(blobs, pa.binary())) == array_of(blobs)


@given(BLOBS)
def test_a_column_becomes_the_array_of_its_items(blobs: list[bytes | None]) -> None:
    """This also holds if binary data contains the marks of other items."""
    assert blob_array(memoryview(array_of(blobs)), len(blobs)).to_pylist() == blobs


@given(st.lists(st.one_of(st.none(), st.binary(max_size=70)), min_size=1, max_size=120), st.integers(1, 9))
def test_arrow_keys_go_where_a_producers_go(keys: list[bytes | None], count: int) -> None:
    """Keys of any length, few or many, with nulls among them, get the partitions of a producer."""
    array = pa.array([b"before", *keys], pa.binary()).slice(1)
    records = ArrowRecords(array, array, np.zeros(len(keys), np.int64), None)
    found = records.partitions(HashPartitioner(), count, count - 1)
    assert found.tolist() == HashPartitioner().partitions(keys, count, count - 1).tolist()


@given(
    st.lists(st.tuples(st.one_of(st.none(), st.binary(max_size=9)), st.binary(max_size=30)), min_size=2, max_size=60),
    st.data(),
)
def test_arrow_records_are_encoded_as_what_they_hold(pairs: list[Pair], data: st.DataObject) -> None:
    """Taken, cut, put together and encoded as lists are."""
    config = TopicConfig.from_mapping({"max.message.bytes": 400})
    keys, values = [key for key, _ in pairs], [value for _, value in pairs]
    rows = np.array(data.draw(st.lists(st.integers(0, len(pairs) - 1), min_size=1, max_size=60)))
    stamps = np.arange(len(pairs), dtype=np.int64)
    headers = [((("h", b"1"),) if number % 3 == 0 else ()) for number in range(len(pairs))]
    arrow = ArrowRecords(pa.array(values, pa.binary()), pa.array(keys, pa.binary()), stamps, headers)
    cut = data.draw(st.integers(0, len(rows)))
    taken = arrow.take(rows)
    again = taken.part(cut, len(rows)).followed_by([taken.part(0, cut)])
    found = []
    for batch in again.encode(config):
        assert batch.size_bytes <= HEADER_SIZE + 400
        view = memoryview(bytes(batch.placed_at(0, 0)) + bytes(batch.payload))
        read = RecordBatch(decode_header(view, 0), view[HEADER_SIZE:])
        found += zip(read.keys, read.values, read.timestamps.tolist(), read.headers, strict=True)
    in_order = [*rows[cut:].tolist(), *rows[:cut].tolist()]
    assert found == [(keys[row], values[row], row, headers[row]) for row in in_order]
