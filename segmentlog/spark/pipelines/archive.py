"""Archive sealed records to Parquet in verified runs, and then trim them from the log.

A run archives the new records below the active segment that are durable and outside open transactions.
Spark writes them to a folder of the run. It reads the files again through the code that restores them (see
`archived_rows`), reads the log again, and compares count and checksum of each partition. Only after that are the files
moved into the archive (see `archive_folder`), and only then is the log trimmed.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

import msgspec
from pyspark.sql import Observation

from segmentlog.errors import SegmentlogError
from segmentlog.spark.pipelines.archive_folder import (
    FORMAT,
    ArchivedPartition,
    ArchivedRange,
    ArchivedRun,
    ArchiveFolder,
    ArchiveManifest,
    Intent,
    OnStep,
)
from segmentlog.spark.pipelines.archived_rows import (
    READ,
    largest_batch_column,
    read_files,
    simulate_restore,
    to_archive_columns,
)
from segmentlog.spark.pipelines.digests import NOTHING, Digest, compute_digests
from segmentlog.spark.pipelines.output_folders import spark_uri
from segmentlog.spark.pipelines.run_history import (
    AnotherHistory,
    RecordsGone,
    check_resume_offset,
    find_last_mark,
    open_to_sync,
    read_ranges,
    sync_stable_records,
)
from segmentlog.spark.spark_errors import explain_spark_errors

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from segmentlog.log.partition import Partition
    from segmentlog.store import LogStore

_NEW_ARCHIVE_ADVICE: Final = "archive it into another folder"
_GAP_ADVICE: Final = "to continue after them, and record the gap in the archive: --allow-gaps (allow_gaps=True)"


class VerificationFailed(SegmentlogError):
    """The written files differ from the log. The files of the run were deleted."""

    def __init__(self, log: str, written: Digest, found: Digest) -> None:
        super().__init__(log, written, found)
        self.log, self.written, self.found = log, written, found

    def __str__(self) -> str:
        return (
            f"{self.log}: {self.written.records} records were written (checksum {self.written.checksum}), and"
            f" {self.found.records} are in the log (checksum {self.found.checksum}); nothing was archived or trimmed;"
            " if the topic was compacted meanwhile, run the command again"
        )


class ArchiveReport(msgspec.Struct, frozen=True):
    """Result of one archive run."""

    topic: str
    folder: str
    run: str | None
    """None if there was nothing to archive."""
    records: int
    files: int
    size_bytes: int
    """Size of the run's Parquet files."""
    ranges: dict[int, tuple[int, int]]
    """Archived offsets ``[start, end)``, by partition."""
    gaps: dict[int, tuple[int, int]]
    """Offsets ``[start, end)`` that were deleted before they could be archived, by partition."""
    trimmed: dict[int, tuple[int, int]]
    """Log start offset before and after, for partitions where it has changed."""
    finished: str | None
    """An interrupted earlier run that this run finished first."""
    seconds: float


@explain_spark_errors()
def archive(
    spark: SparkSession,
    path: str,
    topic: str,
    folder: str,
    *,
    trim: bool = False,
    upto: int | None = None,
    upto_ms: int | None = None,
    allow_gaps: bool = False,
    on_step: OnStep = lambda step: None,
) -> ArchiveReport:
    """Add the sealed records of a topic to the archive in ``folder``, which is created if needed.

    Args:
        path: the folder of the store; without ``trim`` also the URL of an object store that it was shipped to.
        trim: after archiving, delete the archived records from the log.
        upto: archive and trim only records before this offset.
        upto_ms: archive and trim only records before the first with this timestamp or a later one, in ms since 1970.
        allow_gaps: continue after records that were deleted before they were archived.
        on_step: called with the name of each step before it.

    Raises:
        VerificationFailed: the written files differ from the log.
        ArchiveDamaged: with ``trim``: files of the archive were changed, or are missing. Nothing was trimmed.
        AnotherHistory: the archive is of another topic or store, or the topic was created again.
        RecordsGone: retention deleted records before they were archived, and ``allow_gaps`` is false.
        ReadOnlyStore: with ``trim``, if the store is read-only.
        SegmentlogError: the folder is not an archive; another archiver is running; Spark failed.
    """
    started = time.perf_counter()
    archived = ArchiveFolder(folder)
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(open_to_sync(path))
        if trim:
            store.check_writable("delete the archived records")
        partitions = store.topic(topic).partitions()
        stack.enter_context(archived.writing())
        manifest = archived.read() or ArchiveManifest(FORMAT, topic, store.store_id, len(partitions))
        _check_identity(manifest, archived, store, topic)
        finished = None if manifest.intent is None else manifest.intent.run.id
        manifest = archived.finish(manifest, on_step)
        archived.sweep()
        ends = {log.number: _find_sealed_end(log, upto, upto_ms, read_only=store.read_only) for log in partitions}
        ranges, gaps = _plan_ranges(manifest, partitions, ends, allow_gaps)
        run = None
        if ranges:
            run = f"{len(manifest.runs) + 1:06d}-{secrets.token_hex(4)}"
            intent = _write(spark, store, topic, archived, run, manifest, ranges, gaps, on_step)
            manifest = msgspec.structs.replace(manifest, intent=intent, partition_count=len(partitions))
            on_step("noting the intent")
            archived.write(manifest)
            manifest = archived.finish(manifest, on_step)
        trimmed = _trim(archived, manifest, partitions, ends, on_step) if trim else {}
    done = manifest.runs[-1] if run is not None else None
    return ArchiveReport(
        topic,
        archived.path,
        run,
        0 if done is None else done.records,
        0 if done is None else len(done.files),
        0 if done is None else done.size_bytes,
        ranges,
        gaps,
        trimmed,
        finished,
        time.perf_counter() - started,
    )


def _check_identity(manifest: ArchiveManifest, archived: ArchiveFolder, store: LogStore, topic: str) -> None:
    if (manifest.topic, manifest.store_id) != (topic, store.store_id):
        other = "" if manifest.store_id == store.store_id else " of another store"
        raise AnotherHistory(
            archived.path, f"it is the archive of topic {manifest.topic!r}{other}", _NEW_ARCHIVE_ADVICE
        )


def _find_sealed_end(log: Partition, upto: int | None, upto_ms: int | None, *, read_only: bool) -> int:
    """Return the end of the records that a run can archive: sealed, durable, not in an open transaction.

    ``upto`` and ``upto_ms`` lower it.
    """
    end = max((segment.base_offset for segment in log.segments() if segment.active), default=log.log_start_offset)
    if upto is not None:
        end = min(end, upto)
    if upto_ms is not None:
        found = log.offset_for_timestamp(upto_ms)
        end = end if found is None else min(end, found)
    return sync_stable_records(log, end, read_only=read_only)


def _plan_ranges(
    manifest: ArchiveManifest, partitions: Sequence[Partition], ends: dict[int, int], allow_gaps: bool
) -> tuple[dict[int, tuple[int, int]], dict[int, tuple[int, int]]]:
    """Return the ranges to archive, and the gaps before them, both by partition.

    Raises `AnotherHistory`, `RecordsGone`.
    """
    known = manifest.archived()
    if missing := sorted(set(known) - {log.number for log in partitions}):
        why = f"it no longer has partition {missing[0]}, and the archive has records of it"
        raise AnotherHistory(manifest.topic, why, _NEW_ARCHIVE_ADVICE)
    ranges, gaps = {}, {}
    for log in partitions:
        number = log.number
        start = log.log_start_offset
        if number in known:
            position = known[number].end
            try:
                start = check_resume_offset(
                    log, position, known[number].mark, rebuild_advice=_NEW_ARCHIVE_ADVICE, gap_advice=_GAP_ADVICE
                )
            except RecordsGone as error:
                if not allow_gaps:
                    raise
                start = error.end_offset
                if ends[number] > start:
                    gaps[number] = (position, start)
        if ends[number] > start:
            ranges[number] = (start, ends[number])
    return ranges, gaps


# ---------------------------------------------------------------- a run


def _write(
    spark: SparkSession,
    store: LogStore,
    topic: str,
    archived: ArchiveFolder,
    run: str,
    manifest: ArchiveManifest,
    ranges: dict[int, tuple[int, int]],
    gaps: dict[int, tuple[int, int]],
    on_step: OnStep,
) -> Intent:
    """Write the records to the run's folder, verify them, and return the intent. Raises `VerificationFailed`."""
    folder = archived.run_folder(run)
    on_step("writing")
    rows = read_ranges(spark, store.url or store.path, topic, ranges, *READ, milliseconds=True)
    with write_microseconds(spark):
        ordered = to_archive_columns(rows).sortWithinPartitions("date", "partition", "offset")
        ordered.write.partitionBy("date").option("compression", "zstd").parquet(spark_uri(folder))
    sources, files = archived.sync_run_files(run)
    on_step("verifying")
    largest = Observation()
    files_rows = read_files(spark, [f"{folder}/{source}" for source in sources])
    files_rows = files_rows.observe(largest, largest_batch_column())
    written = compute_digests(simulate_restore(files_rows, store.topic(topic).config))
    found = compute_digests(read_ranges(spark, store.url or store.path, topic, ranges, *READ, milliseconds=True))
    for number in ranges:
        if written.get(number, NOTHING) != found.get(number, NOTHING):
            archived.sweep()
            log = f"{topic}/{number}"
            raise VerificationFailed(log, written.get(number, NOTHING), found.get(number, NOTHING))
    known = manifest.archived()
    for number, (start, end) in ranges.items():
        before = known.get(number, ArchivedPartition(number, start, start))
        noted = [*before.gaps, gaps[number]] if number in gaps else before.gaps
        mark = find_last_mark(store.open_partition(topic, number), end) or before.mark
        known[number] = ArchivedPartition(number, before.start, end, noted, mark)
    done = ArchivedRun(
        run,
        time.time_ns() // 1_000_000,
        [ArchivedRange(number, *ranges[number], found.get(number, NOTHING)) for number in sorted(ranges)],
        files,
        int(largest.get["largest_batch_bytes"] or 0) if files else 0,
    )
    return Intent(done, sources, [known[number] for number in sorted(known)])


@contextlib.contextmanager
def write_microseconds(spark: SparkSession) -> Iterator[None]:
    """Write timestamps inside the block as Parquet's TIMESTAMP, not as INT96, Spark's default."""
    key = "spark.sql.parquet.outputTimestampType"
    before = spark.conf.get(key)
    spark.conf.set(key, "TIMESTAMP_MICROS")
    try:
        yield
    finally:
        if before is not None:
            spark.conf.set(key, before)


# ---------------------------------------------------------------- trimming


def _trim(
    archived: ArchiveFolder,
    manifest: ArchiveManifest,
    partitions: Sequence[Partition],
    ends: dict[int, int],
    on_step: OnStep,
) -> dict[int, tuple[int, int]]:
    """Trim archived records from the log after checking the files that hold them. Raises `ArchiveDamaged`."""
    known = manifest.archived()
    todo = {
        log: (log.log_start_offset, before)
        for log in partitions
        if log.number in known and (before := min(known[log.number].end, ends[log.number])) > log.log_start_offset
    }
    starts = {log.number: start for log, (start, _) in todo.items()}
    on_step("checking the archive's files")
    needed = [
        run
        for run in manifest.runs
        if any(span.partition in starts and span.end > starts[span.partition] for span in run.ranges)
    ]
    archived.check_files(needed)
    trimmed = {}
    for log, (start, before) in todo.items():
        on_step("trimming")
        trimmed[log.number] = (start, log.trim(before))
    return trimmed
