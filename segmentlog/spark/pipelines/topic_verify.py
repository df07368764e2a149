"""Verify every checksum and invariant of a topic with Spark's tasks, for `segmentlog spark verify`.

The tasks read the segments, which is nearly all of the work. The driver evaluates their results with the code of
`segmentlog verify`: see `segmentlog.inspection.split_inspection`.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from segmentlog.errors import SegmentlogError, UnknownTopic
from segmentlog.inspection.finding import Finding, Tally
from segmentlog.inspection.split_inspection import (
    KnownSegments,
    SegmentJob,
    SegmentResult,
    inspect_job,
    list_segment_jobs,
    split_jobs,
)
from segmentlog.inspection.store_inspection import inspect_store, list_topics
from segmentlog.objects.bucket.url import is_url
from segmentlog.objects.replica.remote_store import open_store_files
from segmentlog.objects.tier.remote_reader import remote_segments_readable
from segmentlog.spark.store_opener import StoreLocation, open_for_task, resolve_location
from segmentlog.storage.fs import FileSystem

if TYPE_CHECKING:
    from pyspark.accumulators import Accumulator
    from pyspark.sql import SparkSession

OnProgress = Callable[[int, int], None]
"""Called with (verified bytes, total bytes), from another thread while Spark works."""

_PROGRESS_PAUSE_S = 0.2


class StoreNotShared(SegmentlogError):
    """The store's folder does not exist on the host of an executor."""

    def __init__(self, path: str, host: str) -> None:
        super().__init__(path, host)
        self.path, self.host = path, host

    def __str__(self) -> str:
        return (
            f"{self.path}: there is no such folder on host {self.host}, where a Spark executor runs; mount the store's"
            " file system under this path on every executor, or run with --master 'local[*]'"
        )


class VerifyReport(msgspec.Struct, frozen=True):
    """Findings in a topic, and the amount of verified data."""

    topic: str
    findings: list[Finding]
    """Findings of `inspect_store`, in its order."""
    partitions: int
    segments: int
    batches: int
    records: int
    size_bytes: int
    seconds: float
    segments_on_driver: int
    """Segments that the driver inspected again, because they changed meanwhile or their epochs decrease.

    A high number makes the verification slow.
    """


def verify(spark: SparkSession, path: str, topic: str, *, on_progress: OnProgress | None = None) -> VerifyReport:
    """Check every checksum, index and invariant of a topic without changing or locking anything.

    Every executor must have the folder ``path``, or reach the object store at that URL. A task holds one segment in
    memory at a time. Tasks send less than one byte per batch to the driver, and ten bytes per batch of a producer. If
    the total exceeds 1 GB, Spark fails and asks for a larger ``spark.driver.maxResultSize``.

    Raises `StoreVersionError`, `UnknownTopic`, `StoreNotShared`, OSError.
    """
    started = time.perf_counter()
    place = StoreLocation(resolve_location(path), (topic,))
    with open_store_files(place.path, place.only_topics) as (fs, folder):
        if topic not in list_topics(fs, folder):
            raise UnknownTopic(topic)
        jobs = list_segment_jobs(fs, folder, topic)
        known = KnownSegments(_inspect_in_tasks(spark, place, folder, topic, jobs, on_progress))
        tally = Tally()
        findings = list(inspect_store(folder, topic, fs=fs, tally=tally, inspect=known))
    if on_progress is not None:
        on_progress(tally.size_bytes, tally.size_bytes)
    seconds = time.perf_counter() - started
    return VerifyReport(topic, findings, *tally.counts(), seconds, known.inspected_locally)


def _inspect_in_tasks(
    spark: SparkSession,
    place: StoreLocation,
    folder: str,
    topic: str,
    jobs: Sequence[SegmentJob],
    on_progress: OnProgress | None,
) -> list[SegmentResult]:
    """Return the results of the tasks. Raises `StoreNotShared`."""
    if not jobs:
        return []
    context = spark.sparkContext
    shares = split_jobs(jobs, context.defaultParallelism)
    done_bytes = context.accumulator(0)
    todo = context.parallelize(shares, len(shares)).map(partial(_inspect_share, place, folder, topic, done_bytes))
    with _progress(done_bytes, sum(job.size_bytes for job in jobs), on_progress):
        results = todo.collect()
    for result in results:
        # If the folder is missing on the driver too, the topic was deleted, and the inspection reports that.
        if isinstance(result, str) and os.path.isdir(f"{folder}/{topic}"):
            raise StoreNotShared(f"{folder}/{topic}", result)
    return [segment for result in results if not isinstance(result, str) for segment in result]


def _inspect_share(
    place: StoreLocation, folder: str, topic: str, done_bytes: Accumulator[int], share: Sequence[SegmentJob]
) -> list[SegmentResult] | str:
    """Inspect a share of the segments. Runs on an executor.

    Return the results, with paths in the driver's ``folder``. If the folder does not exist on this host, return the
    name of the host and raise no exception. After an exception, Spark would retry the task, and print the message among
    a hundred lines.
    """
    with contextlib.ExitStack() as stack:
        fs, local_folder = FileSystem(), folder
        if is_url(place.path):
            store = stack.enter_context(open_for_task(place))
            fs, local_folder = store.fs, store.path
        elif not os.path.isdir(f"{folder}/{topic}"):
            return socket.gethostname()
        else:
            stack.enter_context(remote_segments_readable(fs))
        jobs = [replace(job, path=local_folder + job.path.removeprefix(folder)) for job in share]
        results = [result for job in jobs if (result := inspect_job(fs, job)) is not None]
    done_bytes.add(sum(job.size_bytes for job in share))
    return [replace(result, path=folder + result.path.removeprefix(local_folder)) for result in results]


@contextlib.contextmanager
def _progress(done_bytes: Accumulator[int], total_bytes: int, on_progress: OnProgress | None) -> Iterator[None]:
    """Report progress from another thread inside the block, while Spark blocks this thread."""
    if on_progress is None:
        yield
        return
    stopped = threading.Event()

    def report_progress() -> None:
        while not stopped.wait(_PROGRESS_PAUSE_S):
            on_progress(min(done_bytes.value, total_bytes), total_bytes)

    thread = threading.Thread(target=report_progress, name="segmentlog-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()
