"""An archive has the records of the log, and a restore has those of the archive, after a crash at any step."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet
import pytest
from pyspark.sql import SparkSession

import segmentlog
from segmentlog.cli import cli
from segmentlog.cli.common import run
from segmentlog.errors import InvalidConfig, SegmentlogError, UnknownTopic
from segmentlog.inspection.store_inspection import inspect_store
from segmentlog.spark.pipelines.archive import ArchiveReport, VerificationFailed, archive
from segmentlog.spark.pipelines.archive_folder import ArchiveDamaged, ArchiveFolder
from segmentlog.spark.pipelines.archive_restore import NotAPrefix, RestoredWrong, restore
from segmentlog.spark.pipelines.run_history import AnotherHistory, RecordsGone
from segmentlog.store import LogStore

DAY_MS = 86_400_000
COLUMNS = ["partition", "offset", "timestamp", "timestampType", "key", "value", "headers", "timestampMillis", "date"]
Row = tuple[object, ...]


class Crash(BaseException):
    """The process dies here."""


def crash_before(step: str, times: int = 1) -> Callable[[str], None]:
    """Return an ``on_step`` that crashes before the given occurrence of a step."""
    left = times

    def on_step(name: str) -> None:
        nonlocal left
        left -= name == step
        if not left:
            raise Crash

    return on_step


def rows_of(store_path: Path, topic: str, upto: int | None = None) -> list[Row]:
    """Return all records of a topic, as a reader of committed records gets them."""
    found: list[Row] = []
    with segmentlog.open(store_path, background=False) as store:
        for log in store.topic(topic).partitions():
            for batch in log.read(log.log_start_offset, isolation="read_committed"):
                columns = (batch.offsets.tolist(), batch.timestamps.tolist(), batch.keys, batch.values, batch.headers)
                found += [(log.number, *row) for row in zip(*columns, strict=True) if upto is None or row[0] < upto]
    return found


def archived_rows(spark: SparkSession, folder: Path) -> list[Row]:
    """Return the rows that any reader finds in an archive."""
    rows = spark.read.parquet(str(folder)).orderBy("partition", "offset").collect()
    return [
        (
            row.partition,
            row.offset,
            round(row.timestamp.timestamp() * 1000),
            None if row.key is None else bytes(row.key),
            None if row.value is None else bytes(row.value),
            tuple((one.key, None if one.value is None else bytes(one.value)) for one in row.headers or ()),
        )
        for row in rows
    ]


def fill(store: LogStore, topic: str, partitions: int = 1, count: int = 100, first: int = 0) -> None:
    """Append records of three days to each partition, and seal the segment."""
    for number in range(partitions):
        log = store.topic(topic).partition(number)
        numbers = range(first, first + count)
        log.append(
            [b"value %d" % at for at in numbers],
            keys=[b"key %d" % (at % 7) for at in numbers],
            timestamps=[(at * 31 % 3) * DAY_MS + at for at in numbers],
        )
        log.roll()


def make_rich(path: Path) -> None:
    """Topic "rich": compacted, transactions, headers, nulls, times out of order, and a start that is not 0."""
    with segmentlog.open(path, background=False) as store:
        topic = store.create_topic("rich", partitions=3, cleanup_policy="compact", retention_ms=-1)
        with store.producer(name="writer") as producer:
            for number in range(2):
                log = topic.partition(number)
                fill(store, "rich", 1, 0)
                keys = [b"key %d" % (at % 40) for at in range(200)]
                headers = [[("a", b"1"), ("a", None)] if at % 3 == 0 else [] for at in range(200)]
                values = [None if at % 11 == 0 else b"" if at % 7 == 0 else b"v%d" % at for at in range(200)]
                log.append(values, keys, timestamps=[DAY_MS * (at % 2) + 5 for at in range(200)], headers=headers)
                log.roll()
                for at in range(4):
                    producer.begin_transaction()
                    producer.send_many("rich", [b"t%d" % at] * 5, [b"t%d" % (at % 2)] * 5, partition=number)
                    producer.commit_transaction() if at % 2 else producer.abort_transaction()
                log.roll()
                log.compact()
                log.append([b"x"], [b"x"])
                log.roll()
        topic.partition(1).trim(190)
        store.alter_topic("rich", cleanup_policy="delete")
        topic.partition(0).append([b"no key", None], keys=None)
        topic.partition(0).roll()


def test_archive_and_restore_exactly(spark: SparkSession, tmp_path: Path) -> None:
    """The second run has only new records; the restore has the same offsets, gaps, times, keys, values and headers."""
    path, folder = tmp_path / "store", tmp_path / "some archive"
    make_rich(path)
    first = archive(spark, str(path), "rich", str(folder))
    before = rows_of(path, "rich")
    assert first.records == len(before)
    assert sorted(first.ranges) == [0, 1]
    assert first.ranges[1][0] == 190
    with segmentlog.open(path, background=False) as store:
        fill(store, "rich", 2, 10, 1000)
        store.topic("rich").partition(0).append([b"active: not sealed"])
        ends = [log.log_end_offset for log in store.topic("rich").partitions()]
    second = archive(spark, str(path), "rich", str(folder))
    assert second.records == 20
    assert second.ranges == {0: (first.ranges[0][1], ends[0] - 1), 1: (first.ranges[1][1], ends[1])}
    assert archive(spark, str(path), "rich", str(folder)).run is None
    expected = rows_of(path, "rich", ends[0] - 1)
    assert archived_rows(spark, folder) == expected
    assert spark.read.parquet(str(folder)).columns == COLUMNS
    file = next(folder.glob("date=1970-01-02/*.parquet"))
    assert str(pyarrow.parquet.read_schema(file).field("timestamp").type) == "timestamp[us, tz=UTC]"

    report = restore(spark, str(path), str(folder), "again")
    assert report.records == report.verified == len(expected)
    assert rows_of(path, "again") == expected
    with segmentlog.open(path, background=False) as store:
        topic = store.topic("again")
        assert topic.partition_count == 3
        assert topic.config.retention_ms == -1
        logs = [topic.partition(number) for number in range(2)]
        assert [log.log_end_offset for log in logs] == [ends[0] - 1, ends[1]]
        assert [log.log_start_offset for log in logs] == [0, 190]
        assert logs[0].append([b"behind"]) == ends[0] - 1
    assert list(inspect_store(str(path), "again")) == []
    with pytest.raises(NotAPrefix, match="ends at offset"):
        restore(spark, str(path), str(folder), "again")


@pytest.fixture(scope="module")
def plain(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a store, its topic "t" of two partitions, and their archive of two runs; tests copy it."""
    base = tmp_path_factory.mktemp("archive")
    with segmentlog.open(base / "store", background=False) as store:
        store.create_topic("t", partitions=2, retention_ms=-1)
        fill(store, "t", 2)
    archive(spark, str(base / "store"), "t", str(base / "archive"))
    with segmentlog.open(base / "store", background=False) as store:
        fill(store, "t", 2, 50, 100)
    archive(spark, str(base / "store"), "t", str(base / "archive"))
    return base


@pytest.fixture
def base(plain: Path, tmp_path: Path) -> Path:
    """Return a copy of it."""
    shutil.copytree(plain, tmp_path / "base")
    return tmp_path / "base"


def archive_of(spark: SparkSession, base: Path, **options: object) -> ArchiveReport:
    """Archive topic "t" of the folder in its archive."""
    return archive(spark, str(base / "store"), "t", str(base / "archive"), **options)  # type: ignore[arg-type]


def log_starts(base: Path) -> list[int]:
    """Return the log start offsets of the partitions."""
    with segmentlog.open(base / "store", background=False) as store:
        return [log.log_start_offset for log in store.topic("t").partitions()]


def test_a_crash_at_every_step(spark: SparkSession, base: Path) -> None:
    """The next run finishes the noted step or starts again; the archive has each record once."""
    with segmentlog.open(base / "store", background=False) as store:
        fill(store, "t", 2, 20, 150)
    expected = rows_of(base / "store", "t")
    before = [row for row in expected if int(str(row[1])) < 150]
    for step in ("verifying", "noting the intent"):
        with pytest.raises(Crash):
            archive_of(spark, base, on_step=crash_before(step), trim=True)
        assert archived_rows(spark, base / "archive") == before
    with pytest.raises(Crash):
        archive_of(spark, base, on_step=crash_before("moving a file", 2), trim=True)
    (left,) = (base / "archive/_segmentlog").glob("run-*")
    with pytest.raises(Crash):
        archive_of(spark, base, on_step=crash_before("finishing the manifest"), trim=True)
    assert log_starts(base) == [0, 0]
    report = archive_of(spark, base)
    assert report.finished == left.name.removeprefix("run-")
    assert report.run is None
    assert archived_rows(spark, base / "archive") == expected
    assert not list((base / "archive/_segmentlog").glob("run-*"))


def test_what_was_written_wrong_is_not_archived(spark: SparkSession, base: Path) -> None:
    """A value that differs from the log's is found before anything counts as archived, or is trimmed."""
    with segmentlog.open(base / "store", background=False) as store:
        fill(store, "t", 1, 20, 150)

    def harm(step: str) -> None:
        if step == "verifying":
            path = next((base / "archive/_segmentlog").glob("run-*/date=*/*.parquet"))
            (path.parent / f".{path.name}.crc").unlink()
            table = pyarrow.parquet.read_table(path, partitioning=None)
            values = table.column("value").to_pylist()
            at = table.schema.get_field_index("value")
            column = pyarrow.array([b"X" + values[0][1:], *values[1:]], "binary")
            pyarrow.parquet.write_table(table.set_column(at, "value", column), path)

    with pytest.raises(VerificationFailed, match=r"^t/0: 20 records were written .* nothing was archived or trimmed"):
        archive_of(spark, base, on_step=harm, trim=True)
    assert log_starts(base) == [0, 0]
    assert len(archived_rows(spark, base / "archive")) == 300
    assert archive_of(spark, base).records == 20


def test_trim(spark: SparkSession, base: Path) -> None:
    """A trim deletes archived records, and nothing if a file of the archive was changed or is missing."""
    path = next((base / "archive").glob("date=*/part-000001*.parquet"))
    good = path.read_bytes()
    harmed = bytearray(good)
    harmed[len(good) // 2] ^= 1
    for data, why in ((harmed, "checksum differs"), (good[:-1], "bytes, and had"), (None, "missing")):
        path.unlink()
        if data is not None:
            path.write_bytes(data)
        with pytest.raises(ArchiveDamaged, match=why):
            archive_of(spark, base, trim=True)
        assert log_starts(base) == [0, 0]
    path.write_bytes(good)
    expected = rows_of(base / "store", "t")
    assert archive_of(spark, base, trim=True, upto=120).trimmed == {0: (0, 120), 1: (0, 120)}
    path.unlink()  # the log no longer has this file's records, so a trim does not check it
    assert archive_of(spark, base, trim=True).trimmed == {0: (120, 150), 1: (120, 150)}
    path.write_bytes(good)
    assert rows_of(base / "store", "t") == []
    assert archived_rows(spark, base / "archive") == expected


def test_what_is_not_archived(spark: SparkSession, tmp_path: Path) -> None:
    """The active segment, open transactions, and records after --upto are not archived."""
    with segmentlog.open(tmp_path / "store", background=False) as store:
        topic = store.create_topic("t", retention_ms=-1)
        log = topic.partition(0)
        log.append([b"a"] * 10, timestamps=range(10))
        log.roll()
        producer = store.producer(name="open")
        producer.begin_transaction()
        producer.send_many("t", [b"undecided"] * 5)
        producer.flush()
        log.append([b"behind"])
        log.roll()
        log.append([b"active"])
        assert archive_of(spark, tmp_path, upto_ms=4).ranges == {0: (0, 4)}
        assert archive_of(spark, tmp_path, upto=7).ranges == {0: (4, 7)}
        assert archive_of(spark, tmp_path).ranges == {0: (7, 10)}
        producer.commit_transaction()
        producer.close()
        assert archive_of(spark, tmp_path).ranges == {0: (10, 16)}


def test_gaps(spark: SparkSession, base: Path) -> None:
    """Records that were deleted before a run cause an error, or are noted in the manifest if gaps are allowed."""
    with segmentlog.open(base / "store", background=False) as store:
        fill(store, "t", 1, 20, 150)
        store.topic("t").partition(0).trim(160)
    with pytest.raises(RecordsGone, match=r"^t/0: offsets 150 to 159 are gone: .*--allow-gaps"):
        archive_of(spark, base)
    report = archive_of(spark, base, allow_gaps=True)
    assert report.gaps == {0: (150, 160)}
    assert report.records == 10
    manifest = ArchiveFolder(str(base / "archive")).read()
    assert manifest is not None
    assert manifest.archived()[0].gaps == [(150, 160)]
    restore(spark, str(base / "store"), str(base / "archive"), "again")
    offsets = [row[1] for row in rows_of(base / "store", "again") if row[0] == 0]
    assert offsets == [*range(150), *range(160, 170)]


def test_another_history(spark: SparkSession, base: Path, tmp_path: Path) -> None:
    """A topic that was recreated under the same name is refused at any length, and so is another topic or store."""
    with segmentlog.open(base / "store", background=False) as store:
        store.create_topic("other")
        with pytest.raises(AnotherHistory, match="archive of topic 't'"):
            archive(spark, str(base / "store"), "other", str(base / "archive"))
        store.delete_topic("t")
        store.create_topic("t", partitions=2, retention_ms=-1)
    with pytest.raises(AnotherHistory, match="ends at offset 0, and an earlier run read it up to 150"):
        archive_of(spark, base)
    with segmentlog.open(base / "store", background=False) as store:
        store.topic("t").partition(0).append([b"x"] * 200)
    with pytest.raises(AnotherHistory, match="another record"):
        archive_of(spark, base)
    with segmentlog.open(tmp_path / "second", background=False) as store:
        store.create_topic("t")
    with pytest.raises(AnotherHistory, match="of another store"):
        archive(spark, str(tmp_path / "second"), "t", str(base / "archive"))


def test_folders_that_will_not_do(spark: SparkSession, base: Path) -> None:
    """Each of them raises one sentence, before anything is written."""
    store = str(base / "store")
    with pytest.raises(SegmentlogError, match=r"^s3://bucket/x: the folder must be on a file system that is mounted"):
        archive(spark, store, "t", "s3://bucket/x")
    with pytest.raises(SegmentlogError, match="not empty and contains no archive"):
        archive(spark, store, "t", store)
    with pytest.raises(UnknownTopic):
        archive(spark, store, "none", str(base / "new"))
    assert not (base / "new").exists()
    with pytest.raises(SegmentlogError, match="the folder contains no archive"):
        restore(spark, store, store, "again")
    archived = ArchiveFolder(str(base / "archive"))
    with archived.writing(), pytest.raises(SegmentlogError, match="another archiver is running"):
        archive_of(spark, base)
    (base / "archive/_segmentlog/manifest.json").write_text("{}")
    with pytest.raises(ArchiveDamaged, match="it is not a manifest"):
        archive_of(spark, base)


# ---------------------------------------------------------------- restoring


def restore_in(spark: SparkSession, base: Path, topic: str = "again", **options: object) -> int:
    """Restore the archive of the folder; how many records were appended."""
    report = restore(spark, str(base / "store"), str(base / "archive"), topic, **options)  # type: ignore[arg-type]
    return report.records


def test_a_restoration_that_was_cut_off(spark: SparkSession, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one appends what is missing, and nothing twice."""
    monkeypatch.setattr("segmentlog.spark.pipelines.archive_restore._WAVE_BYTES", 0)  # a wave for each run
    with pytest.raises(Crash):
        restore_in(spark, base, on_step=crash_before("staging", 2))
    assert len(rows_of(base / "store", "again")) == 200
    assert restore_in(spark, base) == 100
    assert rows_of(base / "store", "again") == rows_of(base / "store", "t")
    assert restore_in(spark, base) == 0
    assert not (base / "store/@staging/restore-again").exists()


def test_topics_that_cannot_be_restored_into(spark: SparkSession, base: Path) -> None:
    """Topics with other records, own timestamps or too few partitions are refused, and nothing is appended."""
    with segmentlog.open(base / "store", background=False) as store:
        store.create_topic("other", partitions=2)
        store.topic("other").partition(1).append([b"other"])
        store.create_topic("few")
        store.create_topic("stamps", partitions=2, message_timestamp_type="LogAppendTime")
    with pytest.raises(NotAPrefix, match=r"^other/1: its records differ from the archived records"):
        restore_in(spark, base, "other")
    with pytest.raises(NotAPrefix, match="it has 1 partitions"):
        restore_in(spark, base, "few")
    with pytest.raises(InvalidConfig, match="LogAppendTime"):
        restore_in(spark, base, "stamps")
    with pytest.raises(InvalidConfig, match="LogAppendTime"):
        restore_in(spark, base, "new", config={"message.timestamp.type": "LogAppendTime"})
    with pytest.raises(InvalidConfig, match="exists already"):
        restore_in(spark, base, "few", config={"retention.ms": "1d"})
    with segmentlog.open(base / "store", background=False) as store:
        assert "new" not in store.topics()
        assert store.topic("other").partition(0).log_end_offset == 0


def test_a_damaged_archive_is_not_restored(spark: SparkSession, base: Path) -> None:
    """The damage is found before the first append, or for a manifest that does not fit, at the end."""
    path = next((base / "archive").glob("date=*/*.parquet"))
    good = path.read_bytes()
    path.write_bytes(good[:100] + bytes([good[100] ^ 1]) + good[101:])
    with pytest.raises(ArchiveDamaged, match="was changed since"):
        restore_in(spark, base)
    assert rows_of(base / "store", "again") == []
    path.write_bytes(good)
    manifest = base / "archive/_segmentlog/manifest.json"
    manifest.write_text(manifest.read_text().replace('"records": 100', '"records": 101'))
    with pytest.raises(RestoredWrong, match=r"it has \d+ records with checksum .*, and"):
        restore_in(spark, base)


# ---------------------------------------------------------------- command line


@pytest.mark.usefixtures("spark")
def test_command_line(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Results on stdout, a summary on stderr, the exit statuses of all commands."""

    def call(*args: str) -> tuple[int, str, str]:
        status = run(cli, ["--dir", str(base / "store"), "spark", *args])
        return (status, *capsys.readouterr())

    folder = str(base / "archive")
    status, out, err = call("archive", "t", folder, "--trim")
    assert (status, out.split()[:7]) == (0, ["PARTITION", "FROM", "TO", "GAP", "LOG", "START", "0"])
    assert "nothing new to archive; trimmed 300 offsets" in err
    status, out, err = call("restore", folder, "again", "-c", "compression.type=none", "--json")
    assert status == 0
    assert '"records":300' in out
    assert "300 records restored to again" in err
    with segmentlog.open(base / "store", background=False) as store:
        assert store.topic("again").config.compression_type == "none"
    assert call("archive", "t", folder, "--upto", "latest")[0] == 2
    assert call("archive", "none", folder)[0] == 1
    assert call("restore", folder, "x", "-c", "what")[0] == 2
    assert call("restore", str(base), "x")[0] == 1
    assert call("archive", "t", "s3://bucket/x")[0] == 1
    next((base / "archive").glob("date=*/*.parquet")).unlink()
    status, out, err = call("restore", folder, "third")
    assert (status, out) == (3, "")
    assert "the file is missing" in err


def stop_in_a_job(spark: SparkSession) -> None:
    """SIGINT while Java works, and this process's main thread waits for its answer."""
    tracker = spark.sparkContext.statusTracker()
    while not tracker.getActiveJobsIds():
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGINT)


def test_a_signal_in_the_middle_of_a_job(
    spark: SparkSession, tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """It ends the job and prints a line. Asking Java while another call waits for its answer would break both calls."""
    with segmentlog.open(tmp_path / "store", background=False) as store:
        store.create_topic("t", retention_ms=-1)
        fill(store, "t", count=30_000)
    stopper = threading.Thread(target=stop_in_a_job, args=(spark,))
    stopper.start()
    status = run(cli, ["--dir", str(tmp_path / "store"), "spark", "archive", "t", str(tmp_path / "archive")])
    stopper.join()
    err = capfd.readouterr().err
    assert status == 130
    assert err.endswith("nothing was archived; stopped by SIGINT\n")
    assert "Traceback" not in err + caplog.text
    assert spark.range(3).count() == 3
    assert ArchiveFolder(str(tmp_path / "archive")).read() is None
