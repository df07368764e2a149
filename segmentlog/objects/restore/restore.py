"""Restore a store from an object store: download and verify its files, and write a checkpoint for each log.

    DIR/@restoring      URL, topics and target of the restore; a folder with this file and no store.json is unfinished
    DIR/TOPIC/N/...     segments, verified against the manifest's checksums
    DIR/store.json      written last: from then on the folder is a store

The checkpoint of each log has a flag for a restored log. The first process that opens such a log for writing resumes it
at the end of the offset grant, in a new epoch. It reports the offsets from the end of the restored records to the end
of the grant as lost: the owner may have assigned them. A restore that was killed resumes when it is run again. It keeps
files that match the manifest, and syncs them before the checkpoints: their content may be in the page cache only.
`point_in_time` handles restores to a time or to offsets.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from itertools import groupby
from typing import Any, Final

import msgspec
import xxhash
from msgspec.structs import replace

from segmentlog.arguments import as_patterns
from segmentlog.clock import Clock
from segmentlog.config import TopicConfig
from segmentlog.errors import ObjectStoreError, ShippingRefused
from segmentlog.format.checkpoint import RESTORED, Checkpoint
from segmentlog.format.file_names import (
    CACHE_SUFFIXES,
    CHECKPOINT_FILE,
    FORMAT_VERSION,
    GRANT_FILE,
    INDEX_SUFFIX,
    LOG_SUFFIX,
    RESTORING_FILE,
    SHIP_FILE,
    SHIPPED_FILES,
    SNAPSHOT_SUFFIX,
    STORE_FILE,
    check_topic_name,
    is_machine_file,
    segment_name,
)
from segmentlog.format.index_file import OFFSET_ENTRY, end_of_index
from segmentlog.format.manifest import Chunk, Manifest, ShippedPartition, ShippedSegment, ShippedTopic, Stored
from segmentlog.objects.bucket.base import Bucket, Data, ObjectMissing
from segmentlog.objects.bucket.upload_pool import run_parallel
from segmentlog.objects.bucket.url import open_bucket
from segmentlog.objects.manifest import checksums
from segmentlog.objects.manifest.checksums import is_same_file, read_verified_parts, verify_object
from segmentlog.objects.manifest.load import require_manifest
from segmentlog.objects.manifest.object_ranges import chunk_data, object_ranges
from segmentlog.objects.manifest.segment_labels import (
    Checksums,
    checksums_of,
    checksums_of_chunks,
    has_label,
    label_file,
)
from segmentlog.objects.ownership.binding import is_bound
from segmentlog.objects.ownership.claim import FILES_PARALLEL
from segmentlog.objects.restore.cut_points import Piece, RestoreTarget, parse_target
from segmentlog.objects.restore.parallel_jobs import Job, run_jobs
from segmentlog.objects.restore.point_in_time import CutPartition, PointInTimeRestore
from segmentlog.policy.shipped_topics import is_selected
from segmentlog.records import LostRange
from segmentlog.storage.checkpoint_file import CheckpointFile
from segmentlog.storage.file_locks import folder_exclusively_locked
from segmentlog.storage.file_operations import (
    make_folders_durably,
    read_file,
    replace_file,
    replace_file_by_parts,
    sync_data,
)
from segmentlog.storage.fs import FileSystem, opened
from segmentlog.topics.store_entries import is_store_entry
from segmentlog.topics.topic_folders import TopicFile, TopicFolders

PARALLEL: Final = 4
_MANIFESTS_MAX: Final = 20
"""Give up a restore after the manifest has changed this often during it."""

_MARKER: Final = "a transaction marker that was not on disk at the last upload; no record is missing"

Progress = Callable[[int, int], None]
"""Called with (restored bytes, bytes in total)."""


class Restored(msgspec.Struct, frozen=True):
    """Result of a restore.

    kept_bytes  bytes that an earlier, interrupted run had downloaded
    cuts        for each partition that was cut, the offsets that were not restored
    warnings    consequences of these cuts, for the operator
    """

    manifest: Manifest
    topics: int
    partitions: int
    size_bytes: int
    kept_bytes: int
    cuts: tuple[CutPartition, ...] = ()
    warnings: tuple[str, ...] = ()


def restore(
    bucket: Bucket | str,
    path: str | os.PathLike[str],
    topics: Iterable[str] = (),
    *,
    at: int | datetime | None = None,
    offsets: Mapping[Any, int] | None = None,
    fs: FileSystem | None = None,
    clock: Clock | None = None,
    parallel: int = PARALLEL,
    progress: Progress | None = None,
    before_store: Callable[[Manifest], None] | None = None,
) -> Restored:
    """Restore the store that was shipped to ``bucket`` (or to a URL) in the folder ``path``.

    topics        names and patterns of the topics to restore; empty for all
    at            restore to this time, in milliseconds since 1970 or a datetime: each partition ends before its first
                  record, or transaction marker, that is later
    offsets       restore to these offsets, by (topic, partition): each of these partitions ends before its offset, and
                  all other partitions are restored whole
    parallel      number of download threads; with 0 the calling thread downloads
    progress      called with (restored bytes, bytes in total)
    before_store  called before the folder becomes a store

    If offsets of a partition are not restored, they become a lost range, and appends resume after it. Transactions are
    restored whole or not at all, and no committed offset is after a cut: see docs/point-in-time.md.

    Raise `ShippingRefused` if no store was shipped there, the folder contains something else, or an offset cannot be
    cut at; `InvalidConfig`, `ObjectStoreError`, `DiskFull`. Run it again with the same arguments to resume.
    """
    bucket = open_bucket(bucket) if isinstance(bucket, str) else bucket
    path = os.fspath(path)
    fs, target = fs or FileSystem(), parse_target(at, offsets)
    patterns = as_patterns("topics", topics)
    if before_store is None and is_bound(fs, path):  # the result would be an owner without offset grants
        why = f"{path} contains an unfinished takeover; resume it ('segmentlog takeover'), or remove the folder"
        raise ShippingRefused(bucket.url, why)
    for _ in range(_MANIFESTS_MAX):
        manifest, _tag = require_manifest(bucket)
        attempt = Restore(fs, bucket, path, manifest, patterns, target, clock)
        if (complete := attempt.prepare()) is not None:
            return complete
        try:
            with folder_exclusively_locked(fs, path, 0.0) as is_alone:
                if not is_alone:
                    raise ShippingRefused(
                        bucket.url, f"another process is restoring into {path}; wait until it has ended"
                    )
                if (complete := attempt.prepare()) is not None:  # another process finished it before the lock
                    return complete
                return attempt.run(parallel, progress, before_store)
        except ObjectMissing as missing:
            newer, _tag = require_manifest(bucket)
            if newer.sequence == manifest.sequence:
                why = (
                    f"{missing.key} is missing, although the manifest refers to it; 'segmentlog objects verify' lists"
                    " all missing objects"
                )
                raise ShippingRefused(bucket.url, why) from missing
    why = f"the manifest changed {_MANIFESTS_MAX} times during the restore; try again"
    raise ObjectStoreError(bucket.url, "restore", why)


class Restore:
    """The restore of one manifest. Call `run` once."""

    def __init__(
        self, fs: FileSystem, bucket: Bucket, path: str, manifest: Manifest, patterns: tuple[str, ...] = (),
        target: RestoreTarget | None = None, clock: Clock | None = None,
    ) -> None:  # fmt: skip
        self._fs = fs
        self._bucket = bucket
        self._path = path
        self._manifest = manifest
        self._patterns = patterns
        self._topics = [topic for topic in manifest.topics if is_selected(topic.name, patterns)]
        self._tails = {tail.number: tail for tail in manifest.tails}
        self._kept_bytes = 0
        self._downloaded: set[str] = set()
        """Files that this run has downloaded or verified."""
        self._kept: set[str] = set()
        """Files that an earlier run or a replica has downloaded: perhaps they are not on the disk yet."""
        self._checksums: dict[str, Checksums] = {}
        """Checksums of the segment files that match the manifest and have no label yet, by path."""
        self._labelled: set[str] = set()
        """Segment files that an earlier run or a replica has labelled: they match the manifest, and are on the disk."""
        self._target = target
        self._point_in_time: PointInTimeRestore | None = None
        if target is not None:
            self._point_in_time = PointInTimeRestore(
                fs, path, manifest.store_id, bucket.url, self._topics, target, clock or Clock()
            )  # fmt: skip

    def prepare(self) -> Restored | None:
        """Check the folder, and mark it. If an earlier run was killed after its last step, return the run's result.

        Raises `ShippingRefused`.
        """
        fs, path = self._fs, self._path
        mark, content = f"{path}/{RESTORING_FILE}", self._mark
        if self._point_in_time is not None:
            self._point_in_time.check()  # before anything is written
        make_folders_durably(fs, path)
        is_store, is_begun = fs.exists(f"{path}/{STORE_FILE}"), fs.exists(mark)
        if is_store and not is_begun:
            raise ShippingRefused(self._bucket.url, f"{path} is a store; restore into an empty or new folder")
        if is_begun:
            found = json.loads(read_file(fs, mark) or b"{}")
            if found != content:
                raise ShippingRefused(
                    self._bucket.url,
                    f"{path} contains another unfinished restore: {found}; resume that one, or remove the folder",
                )
            if is_store:
                self._remove_mark()
                return self._result(kept_bytes=self._size_bytes())
        elif names := [name for name in fs.listdir(path) if not _is_harmless(name)]:
            why = f"{path} is not empty (it contains {names[0]}); choose an empty or new folder"
            raise ShippingRefused(self._bucket.url, why)
        else:
            self.write_mark()
        return None

    def write_mark(self) -> None:
        """Mark the folder as an unfinished restore, whatever it contains. `run` keeps files that match."""
        replace_file(self._fs, f"{self._path}/{RESTORING_FILE}", json.dumps(self._mark).encode() + b"\n")

    @property
    def _mark(self) -> dict[str, Any]:
        """Content of the file ``@restoring``: URL, topics and target."""
        mark = {"url": self._bucket.url, "store_id": self._manifest.store_id, "topics": list(self._patterns)}
        return mark if self._target is None else mark | self._target.mark

    def run(
        self,
        parallel: int = PARALLEL,
        progress: Progress | None = None,
        before_store: Callable[[Manifest], None] | None = None,
    ) -> Restored:
        """Download everything, and make the folder a store."""
        point_in_time = self._point_in_time
        self._remove_other_files()
        if point_in_time is not None:
            point_in_time.find_cuts(self._read, lambda jobs: self._run_jobs(jobs, parallel))
            self._topics = point_in_time.topics()
        self._run_jobs([job for topic in self._topics for job in self._jobs(topic)], parallel, progress)
        if point_in_time is not None:
            point_in_time.extend_cuts(self._read, lambda jobs: self._run_jobs(jobs, parallel))
            self._topics = point_in_time.topics()
            point_in_time.truncate_files()
        self._download_store_files()
        # A disk needs about the same time for ten syncs as for one, if several threads wait for them.
        files_parallel = FILES_PARALLEL if parallel else 0
        run_parallel(self._sync_file, self._kept | self._checksums.keys(), files_parallel)
        partitions = [(topic, partition) for topic in self._topics for partition in topic.partitions]
        run_parallel(lambda pair: self._finish(*pair), partitions, files_parallel)
        for topic in self._topics:
            self._write_topic(topic)
        if point_in_time is not None:
            point_in_time.undo_transactions()
        if before_store is not None:
            before_store(self._manifest)
        self._make_store()
        return self._result(self._kept_bytes)

    def _run_jobs(self, jobs: Sequence[Job], parallel: int, progress: Progress | None = None) -> None:
        whole, done = self._size_bytes(), 0
        with contextlib.closing(run_jobs(jobs, parallel)) as sizes:
            for size_bytes in sizes:
                done += size_bytes
                if progress is not None:
                    progress(done, whole)

    def _size_bytes(self) -> int:
        return sum(part.size_bytes for topic in self._topics for part in topic.partitions)

    def _result(self, kept_bytes: int) -> Restored:
        partitions = sum(len(topic.partitions) for topic in self._topics)
        done = Restored(self._manifest, len(self._topics), partitions, self._size_bytes(), kept_bytes)
        if self._point_in_time is None:
            return done
        return replace(done, cuts=self._point_in_time.cuts, warnings=tuple(self._point_in_time.warnings))

    def _remove_other_files(self) -> None:
        """Remove topics and partitions that an earlier run downloaded and that are no longer in the manifest.

        Files that are not part of the store stay: a machine that takes over may have them in the folder of its replica.
        """
        numbers = {topic.name: {str(partition.number) for partition in topic.partitions} for topic in self._topics}
        kept = {path.partition("/")[0] for path in SHIPPED_FILES}
        for name in self._fs.listdir(self._path):
            topic = f"{self._path}/{name}"
            if name not in numbers:
                if name not in kept and not _is_harmless(name) and is_store_entry(self._fs, self._path, name):
                    self._remove(topic)
                continue
            for number in self._fs.listdir(topic):
                if number not in numbers[name]:
                    self._remove(f"{topic}/{number}")

    def _remove(self, path: str) -> None:
        try:
            self._fs.unlink(path)
        except (IsADirectoryError, PermissionError):
            self._fs.remove_tree(path)

    # ------------------------------------------------------------ files

    def _jobs(self, topic: ShippedTopic) -> Iterator[Job]:
        check_topic_name(topic.name, internal=True)  # the name becomes a folder
        for partition in topic.partitions:
            folder = f"{self._path}/{topic.name}/{partition.number}"
            self._fs.make_folders(folder)
            for segment in partition.segments:
                yield self._segment_job(folder, segment)
            for base, chunks in groupby(partition.chunks, key=lambda chunk: chunk.segment):
                yield self._chunks_job(folder, base, tuple(chunks))
            for snapshot in partition.snapshots:
                yield self._file_job(f"{folder}/{segment_name(snapshot.segment)}{SNAPSHOT_SUFFIX}", snapshot.object)

    def _segment_job(self, folder: str, segment: ShippedSegment) -> Job:
        stem = f"{folder}/{segment_name(segment.base_offset)}"
        log = self._log_job(stem + LOG_SUFFIX, segment.log)
        if segment.snapshot is None:
            return log
        snapshot = self._file_job(stem + SNAPSHOT_SUFFIX, segment.snapshot)
        return lambda: log() + 0 * snapshot()

    def _log_job(self, path: str, stored: Stored) -> Job:
        download, checksums = self._file_job(path, stored), checksums_of(object_ranges(stored))

        def download_log() -> int:
            return stored.size_bytes if self._has_label(path, checksums) else download()

        return download_log

    def _has_label(self, path: str, checksums: Checksums) -> bool:
        """Return whether an earlier run or a replica has verified and synced a segment file."""
        if has_label(self._fs, path, checksums):
            self._labelled.add(path)
            self._downloaded.add(path)
            self._kept_bytes += sum(checksums[-1][:2])
            return True
        self._checksums[path] = checksums
        return False

    def _file_job(self, path: str, stored: Stored) -> Job:
        def download() -> int:
            if self._is_downloaded(path, stored):
                return stored.size_bytes
            if stored.size_bytes <= checksums.PART_BYTES:
                replace_file(self._fs, path, self._object(stored), sync_folder=False)
            else:
                replace_file_by_parts(self._fs, path, read_verified_parts(self._bucket, stored), sync_folder=False)
            self._downloaded.add(path)
            return stored.size_bytes

        return download

    def _chunks_job(self, folder: str, base: int, chunks: tuple[Chunk, ...]) -> Job:
        path = f"{folder}/{segment_name(base)}{LOG_SUFFIX}"
        size_bytes = sum(chunk.size_bytes for chunk in chunks)

        def download() -> int:
            if self._has_label(path, checksums_of_chunks(chunks)):
                return size_bytes
            with contextlib.ExitStack() as stack:
                fd = None
                with contextlib.suppress(FileNotFoundError):
                    fd = stack.enter_context(opened(self._fs, path, os.O_RDONLY | os.O_CLOEXEC))
                if (
                    fd is not None
                    and self._fs.fstat(fd).st_size == size_bytes
                    and all(map(partial(self._contains, fd), chunks))
                ):
                    self._kept_bytes += size_bytes
                    self._kept.add(path)
                    return size_bytes
                replace_file_by_parts(
                    self._fs, path, (self._chunk(chunk, fd) for chunk in chunks), sync_folder=False
                )  # fmt: skip
            return size_bytes

        return download

    def _contains(self, fd: int, chunk: Chunk) -> bool:
        """Return whether an open segment file has the bytes of a chunk."""
        return xxhash.xxh3_64_hexdigest(self._fs.pread(fd, chunk.size_bytes, chunk.position)) == chunk.xxh3_64

    def _chunk(self, chunk: Chunk, fd: int | None = None) -> Data:
        """Return the bytes of a chunk: from the open segment file ``fd`` if it has them, else from the object store."""
        if fd is not None:
            local = self._fs.pread(fd, chunk.size_bytes, chunk.position)
            if xxhash.xxh3_64_hexdigest(local) == chunk.xxh3_64:
                return local
        tail = self._tails[chunk.tail]
        if tail.object is None:
            return chunk_data(chunk, tail)
        key = tail.object.key
        data = self._bucket.get_range(key, chunk.start, chunk.size_bytes)
        if xxhash.xxh3_64_hexdigest(data) != chunk.xxh3_64:
            why = f"damaged: bytes {chunk.start} to {chunk.start + chunk.size_bytes} differ from their checksum"
            raise ShippingRefused(self._bucket.url, f"{key}: {why}")
        return data

    def _read(self, topic: ShippedTopic, partition: ShippedPartition, piece: Piece) -> bytes:
        """Return the shipped bytes of a piece of a log, from the downloaded file if there is one."""
        if isinstance(piece, Chunk):
            return bytes(self._chunk(piece))
        path = f"{self._path}/{topic.name}/{partition.number}/{segment_name(piece.base_offset)}{LOG_SUFFIX}"
        if path in self._downloaded:
            return read_file(self._fs, path)
        return self._object(piece.log)

    def _object(self, stored: Stored) -> bytes:
        if stored.parts:
            return b"".join(read_verified_parts(self._bucket, stored))
        data, _ = self._bucket.get(stored.key)
        verify_object(self._bucket, stored, data)
        return data

    def _is_downloaded(self, path: str, stored: Stored) -> bool:
        """Return whether an earlier run has downloaded the file."""
        try:
            is_whole = is_same_file(self._fs, path, stored)
        except FileNotFoundError:
            return False
        if is_whole:
            self._kept_bytes += stored.size_bytes
            self._downloaded.add(path)
            self._kept.add(path)
        return is_whole

    def _sync_file(self, path: str) -> None:
        """Make the content of a kept file durable, and label a segment file.

        A replica does not sync the segments that it extends.
        """
        with opened(self._fs, path, os.O_RDONLY | os.O_CLOEXEC) as fd:
            if path in self._kept:
                sync_data(self._fs, fd, path)
            if path in self._checksums and self._point_in_time is None:  # that one truncates files
                label_file(self._fs, fd, self._checksums[path])

    def _download_store_files(self) -> None:
        """Download the store's own files. Ignore other paths that a manifest may name."""
        for file in self._manifest.files:
            if file.path in SHIPPED_FILES:
                path = f"{self._path}/{file.path}"
                self._fs.make_folders(os.path.dirname(path))
                self._file_job(path, file.object)()
                self._fs.sync_folder(os.path.dirname(path))

    # ------------------------------------------------------------ logs, topics, the store

    def _finish(self, topic: ShippedTopic, partition: ShippedPartition) -> None:
        """Remove files that do not belong to the log, and write its checkpoint. This makes all names durable, too."""
        folder = f"{self._path}/{topic.name}/{partition.number}"
        active = f"{segment_name(partition.active_base)}{LOG_SUFFIX}"
        bases = [segment.base_offset for segment in partition.segments] + [chunk.segment for chunk in partition.chunks]
        if partition.active_base not in bases:
            replace_file(self._fs, f"{folder}/{active}", b"", sync_folder=False)
        names = {f"{segment_name(base)}{suffix}" for base in (*bases, partition.active_base)
                  for suffix in (LOG_SUFFIX, SNAPSHOT_SUFFIX)}  # fmt: skip
        for segment in partition.segments:
            if self._has_whole_index(f"{folder}/{segment_name(segment.base_offset)}", segment.log.size_bytes):
                names |= {f"{segment_name(segment.base_offset)}{suffix}" for suffix in CACHE_SUFFIXES}
        for name in self._fs.listdir(folder):
            if name not in names and name not in (CHECKPOINT_FILE, GRANT_FILE):  # left from an older manifest
                self._remove(f"{folder}/{name}")
        position = self._fs.stat(f"{folder}/{active}").st_size
        checkpoint = checkpoint_of(partition, partition.end_offset, position)
        markers = tuple(
            LostRange(offset, offset + 1, partition.epoch, _MARKER, self._manifest.shipped_ms)
            for offset in range(partition.end_offset, partition.markers_end_offset)
        )
        if markers:  # one-offset ranges: a consumer positioned after a marker gets no error
            recovery_offset = partition.markers_end_offset
            checkpoint = replace(
                checkpoint, recovery_offset=recovery_offset, lost_ranges=(*checkpoint.lost_ranges, *markers)
            )
        with contextlib.suppress(FileNotFoundError):  # from an earlier run: both slots must be rewritten
            self._fs.unlink(f"{folder}/{CHECKPOINT_FILE}")
        CheckpointFile(self._fs, f"{folder}/{CHECKPOINT_FILE}").write(checkpoint)

    def _has_whole_index(self, stem: str, size_bytes: int) -> bool:
        """Return whether a segment was in the folder before, with an index up to its end.

        Without the index, the store would read the whole segment when it needs an offset or a time of it.
        """
        if stem + LOG_SUFFIX not in self._labelled:
            return False
        try:
            with opened(self._fs, stem + INDEX_SUFFIX, os.O_RDONLY | os.O_CLOEXEC) as fd:
                position = self._fs.fstat(fd).st_size - OFFSET_ENTRY.itemsize
                return position >= 0 and end_of_index(self._fs.pread(fd, OFFSET_ENTRY.itemsize, position)) == size_bytes
        except FileNotFoundError:
            return False

    def _write_topic(self, topic: ShippedTopic) -> None:
        folder = f"{self._path}/{topic.name}"
        for number in range(topic.partition_count):
            self._fs.make_folders(f"{folder}/{number}")
        config = TopicConfig.from_mapping(topic.config)
        file = TopicFile(topic.partition_count, config, topic.largest_batch_bytes, topic.id)
        TopicFolders(self._fs, self._path).write(folder, file)
        self._fs.sync_folder(self._path)

    def _make_store(self) -> None:
        manifest = self._manifest
        document = {"format": FORMAT_VERSION, "store_id": manifest.store_id, "created_ms": manifest.shipped_ms}
        replace_file(self._fs, f"{self._path}/{STORE_FILE}", json.dumps(document, indent=2).encode() + b"\n")
        self._remove_mark()

    def _remove_mark(self) -> None:
        self._fs.unlink(f"{self._path}/{RESTORING_FILE}")
        self._fs.sync_folder(self._path)


def checkpoint_of(partition: ShippedPartition, recovery_offset: int, recovery_position: int) -> Checkpoint:
    """Return the checkpoint of a restored log.

    Recovery starts at ``recovery_offset``, which is at byte ``recovery_position`` of the active segment.
    """
    return Checkpoint(
        recovery_offset=recovery_offset,
        recovery_segment=partition.active_base,
        recovery_position=recovery_position,
        log_start_offset=partition.log_start_offset,
        offset_ceiling=partition.offset_grant,
        clean=False,
        boot_id=RESTORED,
        epochs=partition.epochs,
        lost_ranges=partition.lost_ranges,
        compacted=partition.compacted,
        has_producers=partition.has_producers,
    )


def _is_harmless(name: str) -> bool:
    """Return whether a file may be in the folder of a new restore: hidden, or left by a start that was interrupted."""
    return name.startswith((".", RESTORING_FILE, SHIP_FILE)) or is_machine_file(name)
