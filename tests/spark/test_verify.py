"""The verification on Spark reports exactly the findings of `segmentlog verify`."""

from __future__ import annotations

import os
import random
import shutil
import struct
from pathlib import Path

import pytest
import xxhash
from broken import batches_of, flip, log_files
from pyspark.sql import SparkSession

import segmentlog
from segmentlog.errors import StoreVersionError, UnknownTopic
from segmentlog.format.batch import CHECKED_SIZE
from segmentlog.format.file_names import ABORTED_SUFFIX, CHECKPOINT_FILE, INDEX_SUFFIX, STATE_FILE
from segmentlog.inspection.finding import Finding, Tally
from segmentlog.inspection.store_inspection import inspect_store
from segmentlog.spark.pipelines.topic_verify import StoreNotShared, VerifyReport, verify

PARTITIONS = 12


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store as `make_topic` creates it; tests must not change it."""
    path = tmp_path_factory.mktemp("verify") / "store"
    make_topic(path)
    return path


def make_topic(path: Path) -> None:
    """Topic "t": each partition of some segments, with transactions, committed and aborted; the first is compacted."""
    bytes_of = random.Random(0).randbytes
    settings = {"cleanup_policy": "compact", "segment_bytes": 64 << 10, "fsync": "never"}
    with segmentlog.open(path, background=False) as store:
        topic = store.create_topic("t", partitions=PARTITIONS, **settings)
        named = store.producer(name="writer")
        for number in range(PARTITIONS):
            log = topic.partition(number)
            for first in range(0, 400, 20):
                keys = [b"key %d" % (at % 150) for at in range(first, first + 20)]
                log.append([bytes_of(500) for _ in keys], keys=keys)
                if first % 80 == 0:
                    named.begin_transaction()
                    named.send_many("t", [bytes_of(300) for _ in range(10)], keys[:10], partition=number)
                    named.abort_transaction() if first % 160 else named.commit_transaction()
        report = topic.partition(0).compact()
        assert report.records_after < report.records_before
        named.close()
        # Reading stores the aborted transactions of each segment.
        assert list(store.consumer("t", isolation="read_committed"))


def alone(path: Path) -> tuple[list[Finding], tuple[int, ...]]:
    """Return the findings of one process in topic "t", and the counts of what it inspected."""
    tally = Tally()
    return list(inspect_store(str(path), "t", tally=tally)), tally.counts()


def counts(report: VerifyReport) -> tuple[int, ...]:
    """Return the same counts of a report."""
    return report.partitions, report.segments, report.batches, report.records, report.size_bytes


def test_a_healthy_topic(spark: SparkSession, healthy: Path) -> None:
    """It has no findings, tasks inspected everything, and the last progress is the total."""
    told: list[tuple[int, int]] = []
    report = verify(spark, str(healthy), "t", on_progress=lambda done, total: told.append((done, total)))
    assert ([], counts(report)) == alone(healthy)
    assert report.findings == []
    assert report.segments > 2 * PARTITIONS
    assert report.segments_on_driver == 0
    assert told[-1] == (report.size_bytes, report.size_bytes)
    assert all(0 <= done <= total for done, total in told)


def test_damage(spark: SparkSession, tmp_path: Path) -> None:
    """Each partition has another kind of damage, or none: findings, their order and counts are the same."""
    path = tmp_path / "store"
    make_topic(path)  # not a copy, whose state pages would not be trusted
    harm_all(path)
    findings, looked_at = alone(path)
    assert {one.partition for one in findings} == {-1, *range(1, PARTITIONS)}
    report = verify(spark, str(path), "t")
    assert report.findings == findings
    assert counts(report) == looked_at
    # Epochs that go back are seen from all segments before it only.
    assert report.segments_on_driver == len(log_files(path / "t" / "6")) - 1


def harm_all(path: Path) -> None:
    """Damage every partition but the first, each in another way."""
    folders = {number: path / "t" / str(number) for number in range(PARTITIONS)}
    logs = {number: log_files(folder) for number, folder in folders.items()}
    sealed = batches_of(folders[1])[1]
    flip(sealed.path, sealed.position + 200)
    flip(logs[2][-1], 200)
    logs[3][1].unlink()
    flip(logs[4][1].with_suffix(INDEX_SUFFIX), 9)
    os.truncate(logs[5][1], logs[5][1].stat().st_size - 100)
    set_epoch(logs[6][0], 7)
    data = logs[7][0].read_bytes()
    logs[7][1].write_bytes(data)  # a segment in another one's place
    shutil.rmtree(folders[8])
    first = batches_of(folders[9])[0]
    (folders[9] / logs[9][0].name).write_bytes(logs[9][0].read_bytes()[first.size_bytes :])
    (aborted, *_) = sorted(folders[10].glob(f"*{ABORTED_SUFFIX}"))
    flip(aborted, 20)
    (folders[10] / "strange").touch()
    os.truncate(logs[11][-1], 100)
    flip(folders[11] / CHECKPOINT_FILE, 20)
    (path / "t" / "strange").touch()


def set_epoch(log: Path, epoch: int) -> None:
    """Say that the first batch of a segment is of another epoch, with checksums that are right."""
    data = bytearray(log.read_bytes())
    struct.pack_into("<I", data, 16, epoch)
    struct.pack_into("<Q", data, CHECKED_SIZE, xxhash.xxh3_64_intdigest(data[:CHECKED_SIZE]))
    log.write_bytes(data)


def test_a_topic_after_a_crash(spark: SparkSession, healthy: Path, tmp_path: Path) -> None:
    """Without a state page, torn writes after the recovery point and damage before it are distinguished."""
    path = tmp_path / "copy"
    shutil.copytree(healthy, path)
    folders = [path / "t" / str(number) for number in range(PARTITIONS)]
    for folder in folders:
        (folder / STATE_FILE).unlink()
    for folder in folders[1:4]:
        (folder / CHECKPOINT_FILE).unlink()  # nothing of the log is above question then
    flip(log_files(folders[2])[1], 300)
    flip(log_files(folders[3])[-1], 300)
    flip(log_files(folders[4])[1], 300)
    with log_files(folders[5])[-1].open("ab") as file:
        file.write(b"torn")
    findings, looked_at = alone(path)
    assert {one.severity for one in findings if "the next open" in one.what} == {"note", "warning"}
    report = verify(spark, str(path), "t")
    assert report.findings == findings
    assert counts(report) == looked_at
    assert report.segments_on_driver == 0


def test_what_is_not_there(spark: SparkSession, healthy: Path, tmp_path: Path) -> None:
    """For a missing store or topic, the error is that of `inspect_store`."""
    for path, error in ((tmp_path / "none", StoreVersionError), (tmp_path, StoreVersionError), (healthy, UnknownTopic)):
        with pytest.raises(error) as told:
            verify(spark, str(path), "other")
        with pytest.raises(error) as expected:
            list(inspect_store(str(path), "other"))
        assert str(told.value) == str(expected.value)


def test_an_executor_that_does_not_see_the_store(spark: SparkSession, healthy: Path) -> None:
    """The error names the folder and the host, and says what to do; no file is reported as missing."""
    fd = os.open(healthy, os.O_RDONLY | os.O_DIRECTORY)
    os.set_inheritable(fd, False)
    try:
        # A folder of this process, which Python workers do not have.
        with pytest.raises(StoreNotShared, match=f"^/proc/self/fd/{fd}/t: there is no such folder on host"):
            verify(spark, f"/proc/self/fd/{fd}", "t")
    finally:
        os.close(fd)
