"""Restoring a store from an object store: the files that the manifest tells of, checked, and a checkpoint for each log.

    DIR/@restoring      what is being restored from where: while it is there, and no store.json is, DIR is no store
    DIR/TOPIC/N/...     segments, checked against the manifest's checksums as they come
    DIR/store.json      last of all: from here on it is a store

Each log gets a checkpoint that says it was restored. The first process that opens it for writing resumes at the
ceiling, in a new epoch, and reports a lost range: the store's owner may have assigned those offsets. A restore that was
killed and is run again keeps the files that are whole. `rewinding` leaves out what a restore to a time or to offsets
leaves out.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from fnmatch import fnmatchcase
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
    CHECKPOINT_FILE,
    FORMAT_VERSION,
    GRANT_FILE,
    INTERNAL_TOPICS,
    LOG_SUFFIX,
    RESTORING_FILE,
    SHIP_FILE,
    SHIPPED_FILES,
    SNAPSHOT_SUFFIX,
    STORE_FILE,
    check_topic_name,
    segment_name,
)
from segmentlog.format.manifest import Chunk, Manifest, ShippedPartition, ShippedSegment, ShippedTopic, Stored
from segmentlog.objects.bucket.base import Bucket, Data, ObjectMissing
from segmentlog.objects.manifest import checksums
from segmentlog.objects.manifest.checksums import check_object, checked_parts, is_same_file
from segmentlog.objects.manifest.load import require_manifest
from segmentlog.objects.manifest.object_ranges import chunk_data
from segmentlog.objects.ownership.binding import is_bound
from segmentlog.objects.restore.cut_points import Piece, Target, target_of
from segmentlog.objects.restore.parallel_jobs import Job, carried_out
from segmentlog.objects.restore.point_in_time import CutPartition, Rewinding
from segmentlog.records import LostRange
from segmentlog.storage.checkpoint_file import CheckpointFile
from segmentlog.storage.file_locks import folder_exclusively_locked
from segmentlog.storage.file_operations import make_folders_durably, read_file, replace_file, replace_file_by_parts
from segmentlog.storage.fs import FileSystem
from segmentlog.topics.topic_folders import TopicFile, TopicFolders

PARALLEL: Final = 4
_MANIFESTS_MAX: Final = 20
"""So often the manifest may change under a restore before it gives up."""

_MARKER: Final = "the marker of a transaction that was not on disk when it was shipped; no record is missing"
_HARMLESS: Final = (SHIP_FILE, "lost+found")

Progress = Callable[[int, int], None]
"""Told (bytes that are there, bytes in all)."""


class Restored(msgspec.Struct, frozen=True):
    """What was restored: topics, partitions, their bytes, how many of these were there already; what was left out on
    request, and what a person should know about that."""

    manifest: Manifest
    topics: int
    partitions: int
    size_bytes: int
    kept_bytes: int
    cuts: tuple[CutPartition, ...] = ()
    warnings: tuple[str, ...] = ()


def restore(
    bucket: Bucket,
    path: str,
    wanted: Iterable[str] = (),
    *,
    at: int | datetime | None = None,
    offsets: Mapping[Any, int] | None = None,
    fs: FileSystem | None = None,
    clock: Clock | None = None,
    parallel: int = PARALLEL,
    progress: Progress | None = None,
    before_store: Callable[[Manifest], None] | None = None,
) -> Restored:
    """Make the store that was shipped there in the folder ``path``, or of it the topics that match ``wanted``.

    ``at``, milliseconds since 1970 or a datetime: each partition ends in front of its first record, or marker of a
    transaction, that is later. ``offsets``, by (topic, partition): these end in front of that offset, others are whole.
    What is left out of a partition is a lost range then, behind which it goes on; no part of a transaction is there
    without the rest, and no position lies behind a cut: see docs/point-in-time.md.
    ``parallel`` threads bring what lies there, with 0 the one that calls. ``before_store`` is called when all is there
    but what makes the folder a store.
    Raises `ShippingRefused` (nothing was shipped there, the folder holds something else, there is no such place to cut
    at), `InvalidConfig`, `ObjectStoreError`, `DiskFull`: run it again, with the same arguments, and it goes on.
    """
    fs, target = fs or FileSystem(), target_of(at, offsets)
    wanted = as_patterns("topics", wanted)
    if before_store is None and is_bound(fs, path):  # it would be the owner, and no log of it limited
        why = (
            f"{path} holds what was begun of a takeover; go on with that ('segmentlog takeover'), or remove the folder"
        )
        raise ShippingRefused(bucket.url, why)
    for _ in range(_MANIFESTS_MAX):
        manifest, _tag = require_manifest(bucket)
        files = Restoring(fs, bucket, path, manifest, wanted, target, clock)
        if (complete := files.begin()) is not None:
            return complete
        try:
            with folder_exclusively_locked(fs, path, 0.0) as is_alone:
                if not is_alone:
                    raise ShippingRefused(bucket.url, f"another process restores into {path}; one is enough")
                if (complete := files.begin()) is not None:  # by another one, which has ended since
                    return complete
                return files.run(parallel, progress, before_store)
        except ObjectMissing as missing:
            newer, _tag = require_manifest(bucket)
            if newer.sequence == manifest.sequence:
                why = (
                    f"{missing.key} is gone, which the manifest refers to; 'segmentlog objects verify' tells what else"
                )
                raise ShippingRefused(bucket.url, why) from missing
    raise ObjectStoreError(bucket.url, "restore", f"the manifest changed {_MANIFESTS_MAX} times while it was read")


class Restoring:
    """One restore, of one manifest. ``run`` once."""

    def __init__(
        self, fs: FileSystem, bucket: Bucket, path: str, manifest: Manifest, wanted: tuple[str, ...] = (),
        target: Target | None = None, clock: Clock | None = None,
    ) -> None:  # fmt: skip
        self._fs = fs
        self._bucket = bucket
        self._path = path
        self._manifest = manifest
        self._wanted = wanted
        self._topics = [topic for topic in manifest.topics if is_wanted(topic.name, wanted)]
        self._tails = {tail.number: tail for tail in manifest.tails}
        self._kept_bytes = 0
        self._brought: set[str] = set()
        """Files that this run has seen to."""
        self._target = target
        self._rewinding: Rewinding | None = None
        if target is not None:
            store_id = manifest.store_id
            self._rewinding = Rewinding(fs, path, store_id, bucket.url, self._topics, target, clock or Clock())

    def begin(self) -> Restored | None:
        """See that the folder is one to restore into. What is there when an earlier run was killed at its last step.

        Raises `ShippingRefused`.
        """
        fs, path = self._fs, self._path
        mark, wanted = f"{path}/{RESTORING_FILE}", self._mark
        if self._rewinding is not None:
            self._rewinding.check()  # nothing is left of what cannot be
        make_folders_durably(fs, path)
        is_store, is_begun = fs.exists(f"{path}/{STORE_FILE}"), fs.exists(mark)
        if is_store and not is_begun:
            raise ShippingRefused(
                self._bucket.url, f"{path} is a store; restore into a folder that is empty or not there"
            )
        if is_begun:
            found = json.loads(read_file(fs, mark) or b"{}")
            if found != wanted:
                raise ShippingRefused(
                    self._bucket.url,
                    f"{path} holds what was begun of another restore: {found}; go on with that, or remove the folder",
                )
            if is_store:
                self._forget_mark()
                return self._restored(kept_bytes=self._size_bytes())
        elif names := [name for name in fs.listdir(path) if not _is_harmless(name)]:
            why = f"{path} is not empty (it holds {names[0]}); restore into a folder that is, or that is not there"
            raise ShippingRefused(self._bucket.url, why)
        else:
            self.adopt()
        return None

    def adopt(self) -> None:
        """Go on from what lies in the folder, whatever that is: of it what is whole is kept, and all else goes."""
        replace_file(self._fs, f"{self._path}/{RESTORING_FILE}", json.dumps(self._mark).encode() + b"\n")

    @property
    def _mark(self) -> dict[str, Any]:
        """What the folder says while it is restored."""
        mark = {"url": self._bucket.url, "store_id": self._manifest.store_id, "topics": list(self._wanted)}
        return mark if self._target is None else mark | self._target.mark

    def run(
        self,
        parallel: int = PARALLEL,
        progress: Progress | None = None,
        before_store: Callable[[Manifest], None] | None = None,
    ) -> Restored:
        """Bring all of it, and make the folder a store."""
        rewinding = self._rewinding
        self._remove_others()
        if rewinding is not None:
            rewinding.find(self._read, lambda jobs: self._carry_out(jobs, parallel))
            self._topics = rewinding.topics()
        self._carry_out([job for topic in self._topics for job in self._jobs(topic)], parallel, progress)
        if rewinding is not None:
            rewinding.keep_together(self._read, lambda jobs: self._carry_out(jobs, parallel))
            self._topics = rewinding.topics()
            rewinding.cut_files()
        for topic in self._topics:
            for partition in topic.partitions:
                self._finish(topic, partition)
            self._write_topic(topic)
        self._bring_files()
        if rewinding is not None:
            rewinding.take_back()
        if before_store is not None:
            before_store(self._manifest)
        self._make_store()
        return self._restored(self._kept_bytes)

    def _carry_out(self, jobs: Sequence[Job], parallel: int, progress: Progress | None = None) -> None:
        whole, done = self._size_bytes(), 0
        with contextlib.closing(carried_out(jobs, parallel)) as sizes:
            for size_bytes in sizes:
                done += size_bytes
                if progress is not None:
                    progress(done, whole)

    def _size_bytes(self) -> int:
        return sum(part.size_bytes for topic in self._topics for part in topic.partitions)

    def _restored(self, kept_bytes: int) -> Restored:
        partitions = sum(len(topic.partitions) for topic in self._topics)
        done = Restored(self._manifest, len(self._topics), partitions, self._size_bytes(), kept_bytes)
        if self._rewinding is None:
            return done
        return replace(done, cuts=self._rewinding.cuts, warnings=tuple(self._rewinding.warnings))

    def _remove_others(self) -> None:
        """What an earlier run has brought of topics that were deleted, renamed or made anew since."""
        wanted = {topic.name: {str(partition.number) for partition in topic.partitions} for topic in self._topics}
        kept = {path.partition("/")[0] for path in SHIPPED_FILES}
        for name in self._fs.listdir(self._path):
            topic = f"{self._path}/{name}"
            if name not in wanted:
                if name not in kept and not _is_harmless(name):
                    self._remove(topic)
                continue
            for number in self._fs.listdir(topic):
                if number not in wanted[name]:
                    self._remove(f"{topic}/{number}")

    def _remove(self, path: str) -> None:
        try:
            self._fs.unlink(path)
        except (IsADirectoryError, PermissionError):
            self._fs.remove_tree(path)

    # ------------------------------------------------------------ files

    def _jobs(self, topic: ShippedTopic) -> Iterator[Job]:
        check_topic_name(topic.name, internal=True)  # it is to name a folder
        for partition in topic.partitions:
            folder = f"{self._path}/{topic.name}/{partition.number}"
            self._fs.make_folders(folder)
            for segment in partition.segments:
                yield self._bringing_segment(folder, segment)
            for base in dict.fromkeys(chunk.segment for chunk in partition.chunks):
                yield self._bringing_chunks(folder, base, [one for one in partition.chunks if one.segment == base])
            for snapshot in partition.snapshots:
                yield self._bringing(f"{folder}/{segment_name(snapshot.segment)}{SNAPSHOT_SUFFIX}", snapshot.object)

    def _bringing_segment(self, folder: str, segment: ShippedSegment) -> Job:
        stem = f"{folder}/{segment_name(segment.base_offset)}"
        log = self._bringing(stem + LOG_SUFFIX, segment.log)
        if segment.snapshot is None:
            return log
        snapshot = self._bringing(stem + SNAPSHOT_SUFFIX, segment.snapshot)
        return lambda: log() + 0 * snapshot()

    def _bringing(self, path: str, stored: Stored) -> Job:
        def bring() -> int:
            if self._is_there(path, stored):
                return stored.size_bytes
            if stored.size_bytes <= checksums.PART_BYTES:
                replace_file(self._fs, path, self._object(stored), sync_folder=False)
            else:
                replace_file_by_parts(self._fs, path, checked_parts(self._bucket, stored), sync_folder=False)
            self._brought.add(path)
            return stored.size_bytes

        return bring

    def _bringing_chunks(self, folder: str, base: int, chunks: list[Chunk]) -> Job:
        def bring() -> int:
            data = b"".join([self._chunk(chunk) for chunk in chunks])
            path = f"{folder}/{segment_name(base)}{LOG_SUFFIX}"
            if not self._is_there(path, Stored("", len(data), xxhash.xxh3_64_hexdigest(data))):
                replace_file(self._fs, path, data, sync_folder=False)
            return len(data)

        return bring

    def _chunk(self, chunk: Chunk) -> Data:
        tail = self._tails[chunk.tail]
        if tail.object is None:
            return chunk_data(chunk, tail)
        key = tail.object.key
        data = self._bucket.get_range(key, chunk.start, chunk.size_bytes)
        if xxhash.xxh3_64_hexdigest(data) != chunk.xxh3_64:
            why = f"damaged: bytes {chunk.start} to {chunk.start + chunk.size_bytes} are not what was shipped"
            raise ShippingRefused(self._bucket.url, f"{key}: {why}")
        return data

    def _read(self, topic: ShippedTopic, partition: ShippedPartition, piece: Piece) -> bytes:
        """A piece of a log as it was shipped: of what is brought, or will be, the file."""
        if isinstance(piece, Chunk):
            return bytes(self._chunk(piece))
        path = f"{self._path}/{topic.name}/{partition.number}/{segment_name(piece.base_offset)}{LOG_SUFFIX}"
        if path in self._brought:
            return read_file(self._fs, path)
        return self._object(piece.log)

    def _object(self, stored: Stored) -> bytes:
        if stored.parts:
            return b"".join(checked_parts(self._bucket, stored))
        data, _ = self._bucket.get(stored.key)
        check_object(self._bucket, stored, data)
        return data

    def _is_there(self, path: str, stored: Stored) -> bool:
        """Whether an earlier run has brought the file."""
        try:
            is_whole = is_same_file(self._fs, path, stored)
        except FileNotFoundError:
            return False
        if is_whole:
            self._kept_bytes += stored.size_bytes
            self._brought.add(path)
        return is_whole

    def _bring_files(self) -> None:
        """Those of the store itself; whatever else a manifest may name is none of them."""
        for file in self._manifest.files:
            if file.path in SHIPPED_FILES:
                path = f"{self._path}/{file.path}"
                self._fs.make_folders(os.path.dirname(path))
                self._bringing(path, file.object)()
                self._fs.sync_folder(os.path.dirname(path))

    # ------------------------------------------------------------ what makes them logs, topics, a store

    def _finish(self, topic: ShippedTopic, partition: ShippedPartition) -> None:
        folder = f"{self._path}/{topic.name}/{partition.number}"
        active = f"{segment_name(partition.active_base)}{LOG_SUFFIX}"
        bases = [segment.base_offset for segment in partition.segments] + [chunk.segment for chunk in partition.chunks]
        if partition.active_base not in bases:
            replace_file(self._fs, f"{folder}/{active}", b"", sync_folder=False)
        wanted = {f"{segment_name(base)}{suffix}" for base in (*bases, partition.active_base)
                  for suffix in (LOG_SUFFIX, SNAPSHOT_SUFFIX)}  # fmt: skip
        for name in self._fs.listdir(folder):
            if name not in wanted and name not in (CHECKPOINT_FILE, GRANT_FILE):  # of a manifest that has changed since
                self._remove(f"{folder}/{name}")
        position = self._fs.stat(f"{folder}/{active}").st_size
        checkpoint = checkpoint_of(partition, partition.end_offset, position)
        markers = tuple(
            LostRange(offset, offset + 1, partition.epoch, _MARKER, self._manifest.shipped_ms)
            for offset in range(partition.end_offset, partition.markers_end_offset)
        )
        if markers:  # each is gone by: whoever stands behind one goes on, and is not taken for one who has read more
            recovery_offset = partition.markers_end_offset
            checkpoint = replace(
                checkpoint, recovery_offset=recovery_offset, lost_ranges=(*checkpoint.lost_ranges, *markers)
            )
        with contextlib.suppress(FileNotFoundError):  # of an earlier run: this is a new one, both of its slots
            self._fs.unlink(f"{folder}/{CHECKPOINT_FILE}")
        CheckpointFile(self._fs, f"{folder}/{CHECKPOINT_FILE}").write(checkpoint)

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
        self._forget_mark()

    def _forget_mark(self) -> None:
        self._fs.unlink(f"{self._path}/{RESTORING_FILE}")
        self._fs.sync_folder(self._path)


def checkpoint_of(partition: ShippedPartition, recovery_offset: int, recovery_position: int) -> Checkpoint:
    """Return the checkpoint of a restored log. Recovery starts at that offset and byte of the active segment."""
    return Checkpoint(
        recovery_offset=recovery_offset,
        recovery_segment=partition.active_base,
        recovery_position=recovery_position,
        log_start_offset=partition.log_start_offset,
        offset_ceiling=partition.ceiling,
        clean=False,
        boot_id=RESTORED,
        epochs=partition.epochs,
        lost_ranges=partition.lost_ranges,
        compacted=partition.compacted,
        has_producers=partition.has_producers,
    )


def _is_harmless(name: str) -> bool:
    """Hidden, an empty disk's, what a takeover has begun with, or what a restore was killed at that had just begun."""
    return name.startswith((".", RESTORING_FILE)) or name in _HARMLESS


def is_wanted(name: str, wanted: tuple[str, ...]) -> bool:
    """Whether a topic is one of those that were asked for: the store's own always are."""
    return name in INTERNAL_TOPICS or not wanted or any(fnmatchcase(name, pattern) for pattern in wanted)
