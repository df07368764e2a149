"""Restore an archive into a topic: each record with its original offset, timestamp, key, value and headers.

Spark reads the Parquet files in the order of partition and offset, and stages encoded batches. The driver appends them
at their offsets (see `segmentlog.staging.offset_restore`). Only some runs of the archive are restored at a time:
staged batches take space in the store's file system until they are appended. A restoration that was interrupted
continues at the log end of each partition.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec
from pyspark import TaskContext
from pyspark.sql import functions as F

import segmentlog
from segmentlog.config import TopicConfig
from segmentlog.errors import InvalidConfig, SegmentlogError, UnknownTopic
from segmentlog.spark.pipelines.archive_folder import ArchivedRun, ArchiveFolder, ArchiveManifest, OnStep
from segmentlog.spark.pipelines.archived_rows import READ, RESTORED, largest_batch_column, pass_rows, read_files
from segmentlog.spark.pipelines.digests import NOTHING, compute_digests
from segmentlog.spark.pipelines.output_folders import hold_lock
from segmentlog.spark.pipelines.run_history import number_by_partition, read_ranges
from segmentlog.spark.spark_errors import explain_spark_errors
from segmentlog.spark.store_opener import resolve_writable_folder
from segmentlog.staging.offset_restore import OffsetStager, Restorer, restore_staged
from segmentlog.staging.staged_files import Staged
from segmentlog.staging.staging_folder import StagingFolder, sweep_abandoned
from segmentlog.storage.fs import FileSystem

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

    from segmentlog.log.partition import Partition
    from segmentlog.store import LogStore, Topic

_WAVE_BYTES: Final = 1 << 30
# Size of the Parquet files restored at a time. Their staged batches take about as much disk space again.
_TASK_BYTES: Final = 16 << 20
_staged_decoder = msgspec.json.Decoder(Staged)


class NotAPrefix(SegmentlogError):
    """The topic is not empty, and its records are not the first records of the archive. Nothing was appended."""

    def __init__(self, log: str, why: str) -> None:
        super().__init__(log, why)
        self.log, self.why = log, why

    def __str__(self) -> str:
        return f"{self.log}: {self.why}; restore into a new topic"


class RestoredWrong(SegmentlogError):
    """The restored topic differs from the archive."""

    def __init__(self, log: str, why: str) -> None:
        super().__init__(log, why)
        self.log, self.why = log, why

    def __str__(self) -> str:
        return f"{self.log}: {self.why}; delete the topic, and restore it again"


class RestoreReport(msgspec.Struct, frozen=True):
    """Result of one restoration."""

    topic: str
    records: int
    """Records that this restoration appended."""
    already_there: int
    """Records that an interrupted earlier restoration appended."""
    verified: int
    """Records in the topic now, all checked against the archive's checksums."""
    ranges: dict[int, tuple[int, int]]
    """Log start offset and log end offset, by partition."""
    notes: list[str]
    """Notes for the user, one sentence each."""
    seconds: float


@explain_spark_errors()
def restore(
    spark: SparkSession,
    path: str,
    folder: str,
    topic: str,
    *,
    config: Mapping[str, object] | None = None,
    on_step: OnStep = lambda step: None,
) -> RestoreReport:
    """Restore the archive in ``folder`` into a topic that is new, empty, or holds a prefix of the archive.

    Args:
        path: the folder of the store, which is created if needed.
        config: settings of a topic that is created. ``retention.ms`` defaults to -1, because retention would delete
            records as old as those of an archive at once. ``max.message.bytes`` defaults to at least the size that
            the largest record needs.
        on_step: called with the name of each step before it.

    Raises:
        NotAPrefix: the topic holds other records, or more than the archive. Nothing was changed.
        ArchiveDamaged: files of the archive were changed, or are missing.
        RestoredWrong: the restored topic differs from the archive.
        InvalidConfig: a setting in ``config`` is not valid, or the topic stamps records itself (LogAppendTime).
        SegmentlogError: the folder has no archive; another restoration of the topic is running; Spark failed.
    """
    started = time.perf_counter()
    archived = ArchiveFolder(folder)
    manifest = archived.existing()
    fs = FileSystem()
    with segmentlog.open(resolve_writable_folder(path), background=False) as store:
        largest = partial(_largest_batch_bytes, spark, archived, manifest)
        target, notes = _open_target(store, topic, manifest, config, largest)
        sweep_abandoned(fs, store.path)
        staging = StagingFolder(fs, store.path, f"restore-{topic}")
        staging.create()
        with hold_lock(f"{staging.path}/lock", "another restoration of the topic"):
            staging.clear()  # left by a killed restoration
            logs = {entry.partition: target.partition(entry.partition) for entry in manifest.partitions}
            already_there = _check_prefix(spark, archived, manifest, store, topic, logs, on_step)
            records = _restore(spark, archived, manifest, target, logs, staging, fs, on_step)
            on_step("verifying")
            verified = _verify(spark, manifest, store, topic)
            staging.remove()
        ranges = {number: (log.log_start_offset, log.log_end_offset) for number, log in logs.items()}
    if manifest.intent is not None:
        notes.append(
            "an interrupted run of the archive was not restored: archive again to finish the run, then restore"
        )
    return RestoreReport(topic, records, already_there, verified, ranges, notes, time.perf_counter() - started)


def _open_target(
    store: LogStore,
    name: str,
    manifest: ArchiveManifest,
    config: Mapping[str, object] | None,
    largest_bytes: Callable[[], int],
) -> tuple[Topic, list[str]]:
    """Return the topic, created if needed, and notes for the user."""
    notes = []
    try:
        topic = store.topic(name)
        if config:
            why = "the topic exists already; leave this setting out, and change it with 'segmentlog alter'"
            raise InvalidConfig(next(iter(config)), next(iter(config.values())), why)
    except UnknownTopic:
        settings = TopicConfig.from_mapping({"retention.ms": -1, **(config or {})})
        _check_timestamps(settings)
        given = settings.to_mapping()
        if "max.message.bytes" not in given and (needed := largest_bytes()) > settings.max_message_bytes:
            settings = TopicConfig.from_mapping({**given, "max.message.bytes": needed})
            notes.append(f"max.message.bytes = {needed}: the archive has a record that is larger than the default")
        topic = store.create_topic(name, manifest.partition_count, settings.to_mapping())
        notes.append(f"created topic {name} with {manifest.partition_count} partitions")
    settings = topic.config
    _check_timestamps(settings)
    if topic.partition_count < manifest.partition_count:
        there = topic.partition_count
        raise NotAPrefix(name, f"it has {there} partitions, and the archive has {manifest.partition_count}")
    if settings.deletes and settings.retention_ms >= 0:
        notes.append(f"retention.ms = {settings.retention_ms}: the next retention deletes records that are older")
    return topic, notes


def _largest_batch_bytes(spark: SparkSession, archived: ArchiveFolder, manifest: ArchiveManifest) -> int:
    """Return the smallest ``max.message.bytes`` of a topic that accepts the archive's records; 0 without records."""
    known = [run.largest_batch_bytes for run in manifest.runs if run.largest_batch_bytes is not None]
    unknown = [run for run in manifest.runs if run.largest_batch_bytes is None]
    if unknown:  # written by older versions
        archived.check_files(unknown)
        found = read_files(spark, archived.paths(unknown)).agg(largest_batch_column()).first()
        known.append(int(found[0] or 0) if found else 0)
    return max(known, default=0)


def _check_timestamps(config: TopicConfig) -> None:
    if config.message_timestamp_type == "LogAppendTime":
        wanted = "CreateTime during a restoration: LogAppendTime would replace the records' timestamps"
        raise InvalidConfig("message.timestamp.type", config.message_timestamp_type, wanted)


# ---------------------------------------------------------------- existing records


def _check_prefix(
    spark: SparkSession,
    archived: ArchiveFolder,
    manifest: ArchiveManifest,
    store: LogStore,
    topic: str,
    logs: Mapping[int, Partition],
    on_step: OnStep,
) -> int:
    """Check that the topic is empty or holds the first records of the archive. Return the number of these records.

    Raises `NotAPrefix` if it holds other records.
    """
    ends = {}
    for entry in manifest.partitions:
        log = logs[entry.partition]
        name, end = f"{topic}/{entry.partition}", log.log_end_offset
        if end > entry.end:
            raise NotAPrefix(name, f"it ends at offset {end}, and the archive ends at {entry.end}")
        if log.log_start_offset > entry.start:
            raise NotAPrefix(
                name, f"it begins at offset {log.log_start_offset}, and the archive begins at {entry.start}"
            )
        if log.last_stable_offset < end:
            raise NotAPrefix(name, "it has an open transaction")
        if end > log.log_start_offset:
            ends[entry.partition] = end
    others = range(manifest.partition_count, store.topic(topic).partition_count)
    if used := [number for number in others if store.open_partition(topic, number).log_end_offset]:
        raise NotAPrefix(f"{topic}/{used[0]}", "it has records, but the archive has none of this partition")
    if not ends:
        return 0
    on_step("checking existing records")
    needed = [run for run in manifest.runs if any(span.start < ends.get(span.partition, 0) for span in run.ranges)]
    archived.check_files(needed)
    expected = compute_digests(
        read_files(spark, archived.paths(needed)).where(F.col("offset") < number_by_partition(ends))
    )
    ranges = {number: (logs[number].log_start_offset, end) for number, end in ends.items()}
    found = compute_digests(read_ranges(spark, store.path, topic, ranges, *READ, milliseconds=True))
    for number in ends:
        if found.get(number, NOTHING) != expected.get(number, NOTHING):
            raise NotAPrefix(f"{topic}/{number}", "its records differ from the archived records with the same offsets")
    return sum(digest.records for digest in found.values())


def _verify(spark: SparkSession, manifest: ArchiveManifest, store: LogStore, topic: str) -> int:
    """Compare the digests of the topic's partitions with the manifest. Return the number of records.

    Raises `RestoredWrong` if they differ.
    """
    ranges = {entry.partition: (entry.start, entry.end) for entry in manifest.partitions}
    found = compute_digests(read_ranges(spark, store.path, topic, ranges, *READ, milliseconds=True)) if ranges else {}
    for number in ranges:
        expected, is_there = manifest.digest(number), found.get(number, NOTHING)
        if is_there != expected:
            why = f"it has {is_there.records} records with checksum {is_there.checksum}, and {expected.records}"
            raise RestoredWrong(f"{topic}/{number}", f"{why} with {expected.checksum} were archived")
    return sum(digest.records for digest in found.values())


# ---------------------------------------------------------------- appending


def _restore(
    spark: SparkSession,
    archived: ArchiveFolder,
    manifest: ArchiveManifest,
    target: Topic,
    logs: Mapping[int, Partition],
    staging: StagingFolder,
    fs: FileSystem,
    on_step: OnStep,
) -> int:
    """Append the missing records, fsync them, and return their number."""
    restorers = {number: Restorer(log) for number, log in logs.items()}
    known = manifest.archived()
    for number, log in logs.items():
        restorers[number].fill_to(known[number].start)
        log.trim(known[number].start)
    records = 0
    for runs in _split_into_waves(manifest.runs):
        missing = {
            span.partition
            for run in runs
            for span in run.ranges
            if span.end > restorers[span.partition].next_offset and span.digest.records
        }
        if not missing:
            continue
        on_step("checking the archive's files")
        archived.check_files(runs)
        on_step("staging")
        for staged in _stage(spark, archived, runs, restorers, target, staging):
            on_step("appending")
            records += restore_staged(fs, restorers, staged)
            staging.discard(staged)
    for number, restorer in restorers.items():
        restorer.fill_to(known[number].end)
        restorer.flush()
        logs[number].flush()
    return records


def _split_into_waves(runs: list[ArchivedRun]) -> Iterator[list[ArchivedRun]]:
    wave: list[ArchivedRun] = []
    for run in runs:
        if wave and sum(earlier.size_bytes for earlier in wave) + run.size_bytes > _WAVE_BYTES:
            yield wave
            wave = []
        wave.append(run)
    if wave:
        yield wave


def _stage(
    spark: SparkSession,
    archived: ArchiveFolder,
    runs: list[ArchivedRun],
    restorers: Mapping[int, Restorer],
    target: Topic,
    staging: StagingFolder,
) -> list[Staged]:
    """Stage the missing records as encoded batches in files, in the order of partition and offset."""
    begin = number_by_partition({number: restorer.next_offset for number, restorer in restorers.items()})
    rows = read_files(spark, archived.paths(runs)).where(F.col("offset") >= begin)
    tasks = max(1, -(-sum(run.size_bytes for run in runs) // _TASK_BYTES))
    # Split by range: several tasks can share a partition, and their numbers follow the order of its offsets.
    ordered = rows.repartitionByRange(tasks, "partition", "offset").sortWithinPartitions("partition", "offset")
    columns = ordered.select(RESTORED.fieldNames())
    stage = partial(_stage_task, staging, target.name, target.config)
    results = columns.mapInArrow(stage, "staged binary").collect()
    return sorted((_staged_decoder.decode(row["staged"]) for row in results), key=lambda staged: staged.task)


def _stage_task(
    staging: StagingFolder, topic: str, config: TopicConfig, batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Stage the rows of one task, and yield one row that names the staged file. Runs on an executor."""
    import pyarrow as pa

    context = TaskContext.get()
    task = context.partitionId() if context else 0
    if not os.path.isdir(staging.path):
        raise SegmentlogError(f"{staging.path}: there is no such folder on this host: every executor must mount it")
    stager = OffsetStager(FileSystem(), staging.file_for(0, task), task, topic, config)
    try:
        for batch in batches:
            pass_rows(batch, stager.add)
        staged = stager.finish()
    except BaseException:
        stager.discard()
        raise
    yield pa.RecordBatch.from_arrays([pa.array([msgspec.json.encode(staged)], pa.binary())], names=["staged"])
