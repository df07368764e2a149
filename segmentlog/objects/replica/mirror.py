"""Keep a folder equal to a shipped store: topics, partitions and their state pages, for local readers.

A refresh reads the manifest. If the manifest is new, the refresh downloads what is missing locally and publishes it,
partition by partition. Committed offsets and the transaction log are published last: they refer to records of the other
partitions. A `Downloader` decides when bytes are downloaded: all at once, or when they are read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from itertools import groupby
from typing import Final

import msgspec

from segmentlog.clock import Clock
from segmentlog.config import TopicConfig
from segmentlog.errors import ObjectStoreError, ShippingRefused
from segmentlog.format.file_names import (
    DELETED_PREFIX,
    INTERNAL_TOPICS,
    LOG_SUFFIX,
    MAKING_PREFIX,
    SHIPPED_FILES,
    SNAPSHOT_SUFFIX,
    STORE_FILE,
    TOPIC_FILE,
    check_topic_name,
)
from segmentlog.format.manifest import Manifest, ShippedPartition, ShippedTopic, Tail
from segmentlog.log.handle import Handle
from segmentlog.log.replica_log import PublishedState, ReplicaLog
from segmentlog.objects.bucket.base import Bucket, ObjectMissing
from segmentlog.objects.bucket.upload_pool import PARALLEL, run_parallel
from segmentlog.objects.manifest.load import require_manifest
from segmentlog.objects.manifest.object_ranges import ObjectRanges, file_size, segment_ranges
from segmentlog.objects.manifest.segment_labels import checksums_of, sync_and_label
from segmentlog.objects.replica.downloads import Downloader, MoveIntoPlace
from segmentlog.objects.restore.restore import checkpoint_of
from segmentlog.policy.lost_ranges import count_offsets
from segmentlog.policy.shipped_topics import is_selected
from segmentlog.storage.fs import FileSystem
from segmentlog.storage.segment import segment_stem
from segmentlog.topics.topic_folders import TopicFile, TopicFolders

_TRIES: Final = 20
"""Give up a refresh after the manifest has changed this often during it."""


class MirrorStatus(msgspec.Struct, frozen=True):
    """How far a mirror has followed the store.

    sequence    of the published manifest; -1 before the first
    shipped_ms  wall-clock time at which the owner published that manifest
    looked_ms   wall-clock time of the last refresh that succeeded
    behind      number of offsets in the manifest that are not published locally yet
    size_bytes  size of the published logs
    error       why the last refresh failed; empty if it succeeded
    """

    sequence: int = -1
    shipped_ms: int = 0
    looked_ms: int = 0
    behind: int = 0
    size_bytes: int = 0
    error: str = ""


class _ReplicaPartition:
    """One partition of the mirror, with the state that readers see."""

    def __init__(self, log: ReplicaLog) -> None:
        self.log = log
        self.entry: ShippedPartition | None = None
        """The published entry of the manifest."""
        self.ranges: dict[int, ObjectRanges] = {}


class _PartitionRefresh(msgspec.Struct):
    """The next state of a partition, which a refresh publishes."""

    partition: _ReplicaPartition
    entry: ShippedPartition
    ranges: dict[int, ObjectRanges]
    continues: bool
    is_internal: bool
    moves: dict[int, MoveIntoPlace] = {}
    """By segment, the function that renames a file that was downloaded beside the old one."""


class Mirror:
    """Keeps one folder equal to one shipped store. Not thread-safe; one process at a time uses a folder."""

    def __init__(
        self,
        bucket: Bucket,
        path: str,
        downloader: Downloader,
        *,
        topic_patterns: tuple[str, ...] = (),
        parallel: int = PARALLEL,
        fs: FileSystem,
        clock: Clock,
    ) -> None:
        self.bucket = bucket
        self._path = path
        self._downloader = downloader
        self._topic_patterns = topic_patterns
        self._parallel = parallel
        self._fs = fs
        self._clock = clock
        self._folders = TopicFolders(fs, path)
        self._configs: dict[str, TopicConfig] = {}
        """By topic id."""
        self._partitions: dict[tuple[str, int], _ReplicaPartition] = {}
        self._tag: str | None = None
        self.manifest: Manifest | None = None
        self.status = MirrorStatus()

    # ------------------------------------------------------------ refresh

    def refresh(self, progress: Callable[[int, int], None] | None = None) -> bool:
        """Download and publish new data. Return False if there was none.

        ``progress`` is called with (published partitions, all partitions to publish). Raise `ShippingRefused` if the
        manifest is another store's or an object is damaged, `ObjectStoreError`, `DiskFull`, OSError. The next refresh
        continues.
        """
        try:
            changed = self._refresh(progress)
        except BaseException as error:
            self.status = msgspec.structs.replace(self.status, error=str(error) or type(error).__name__)
            raise
        self.status = msgspec.structs.replace(self.status, looked_ms=self._clock.now_ms(), error="")
        return changed

    def _refresh(self, progress: Callable[[int, int], None] | None) -> bool:
        for _ in range(_TRIES):
            manifest, tag = require_manifest(self.bucket)
            if tag == self._tag:
                return False
            if self.manifest is not None and self.manifest.store_id != manifest.store_id:
                raise ShippingRefused(
                    self.bucket.url,
                    f"another store is shipped to this URL now. {self._path} is a copy of the store that was shipped"
                    " before; choose another folder",
                )
            try:
                self._apply(manifest, progress)
            except ObjectMissing as missing:
                self._check_changed(manifest, missing)
                continue
            self.manifest, self._tag = manifest, tag
            return True
        why = f"the manifest changed {_TRIES} times during the refresh; try again"
        raise ObjectStoreError(self.bucket.url, "refresh", why)

    def _check_changed(self, manifest: Manifest, missing: ObjectMissing) -> None:
        """Raise `ShippingRefused` for a missing object, unless a newer manifest exists: it may not need the object."""
        newer, _ = require_manifest(self.bucket)
        if newer.nonce == manifest.nonce:
            why = f"{missing.key} is missing, although the manifest refers to it; see 'segmentlog objects verify'"
            raise ShippingRefused(self.bucket.url, why) from missing

    def _apply(self, manifest: Manifest, progress: Callable[[int, int], None] | None) -> None:
        topics = [topic for topic in manifest.topics if is_selected(topic.name, self._topic_patterns)]
        self._folders.store_id = manifest.store_id
        self._apply_topics(topics)
        tails = {tail.number: tail for tail in manifest.tails}
        ordered = sorted(topics, key=lambda topic: topic.name in INTERNAL_TOPICS)
        refreshes = [
            refresh
            for topic in ordered
            for entry in topic.partitions
            if (refresh := self._plan_refresh(topic, entry, tails)) is not None
        ]
        self._downloader.start_refresh()
        self.status = msgspec.structs.replace(self.status, behind=sum(map(_lag_offsets, refreshes)))
        refused: ShippingRefused | None = None
        for index, refresh in enumerate(refreshes):
            if refused is not None and refresh.is_internal:  # they may refer to unpublished records
                break
            try:
                self._refresh_partition(manifest, refresh)
            except ShippingRefused as error:  # damage in one partition must not stop the others
                refused = refused or error
            if progress is not None:
                progress(index + 1, len(refreshes))
        if refused is not None:
            raise refused
        self._fetch_store_files(manifest)
        self.status = msgspec.structs.replace(
            self.status, sequence=manifest.sequence, shipped_ms=manifest.shipped_ms, behind=0,
            size_bytes=sum(partition.size_bytes for topic in topics for partition in topic.partitions),
        )  # fmt: skip

    def label_active_segments(self) -> None:
        """Sync and label the active segments: a takeover then compares no file. Raise OSError."""
        files = [
            (segment_stem(partition.log.folder, base) + LOG_SUFFIX, checksums_of(ranges))
            for partition in self._partitions.values()
            for base, ranges in partition.ranges.items()
            if ranges and not ranges[-1].is_sealed
        ]
        run_parallel(lambda file: sync_and_label(self._fs, *file), files, self._parallel)

    def close(self) -> None:
        """Close all files. Readers keep the state that was published last."""
        while self._partitions:
            self._partitions.popitem()[1].log.close()

    # ------------------------------------------------------------ topics

    def _apply_topics(self, topics: list[ShippedTopic]) -> None:
        """Create, rename, alter and delete topic folders as the manifest says."""
        existing = self._folders.by_id()
        shipped = {topic.id: topic for topic in topics}
        for topic_id, name in existing.items():
            if topic_id not in shipped:
                self._delete(topic_id, name)
        renamed = self._interrupted_renames(existing) if self.manifest is None or self.status.error else {}
        for topic_id, name in existing.items():
            # First rename to a temporary name: two topics may have swapped their names.
            if topic_id in shipped and shipped[topic_id].name != name:
                renamed[topic_id] = f"{self._path}/{MAKING_PREFIX}{topic_id}"
                self._close_partitions(topic_id)
                self._fs.rename(f"{self._path}/{name}", renamed[topic_id])
        for topic in topics:
            check_topic_name(topic.name, internal=True)  # the name becomes a folder
            folder = f"{self._path}/{topic.name}"
            if topic.id in renamed:
                if self._fs.exists(folder) and not self._fs.exists(f"{folder}/{TOPIC_FILE}"):
                    self._fs.remove_tree(folder)  # a refresh was interrupted while it created a topic of that name
                self._fs.rename(renamed.pop(topic.id), folder)
            self._write_topic(folder, topic)
        for folder in renamed.values():
            self._fs.remove_tree(folder)

    def _interrupted_renames(self, existing: Mapping[str, str]) -> dict[str, str]:
        """Return the folders that an interrupted refresh was renaming, by topic id.

        Delete the folders that the interrupted refresh was deleting. Also delete the folder of an interrupted rename
        whose topic has another folder now. ``existing`` contains the names of the local topics, by id.
        """
        renamed = {}
        for name in self._fs.listdir(self._path):
            topic_id = name.removeprefix(MAKING_PREFIX)
            if name.startswith(MAKING_PREFIX) and topic_id not in existing:
                renamed[topic_id] = f"{self._path}/{name}"
            elif name.startswith((MAKING_PREFIX, DELETED_PREFIX)):
                self._fs.remove_tree(f"{self._path}/{name}")
        return renamed

    def _write_topic(self, folder: str, topic: ShippedTopic) -> None:
        """Write a topic's configuration and create its partitions. Notify readers if the configuration has changed."""
        file = TopicFile(
            topic.partition_count, TopicConfig.from_mapping(topic.config), topic.largest_batch_bytes, topic.id
        )
        self._configs[topic.id] = file.config
        if self._fs.exists(f"{folder}/{TOPIC_FILE}") and self._folders.read(topic.name) == file:
            return
        is_store = self._fs.exists(f"{self._path}/{STORE_FILE}")  # so that readers may open the topic at once
        for number in range(topic.partition_count):
            self._fs.make_folders(f"{folder}/{number}")
            if is_store:
                self._open_partition(topic, number).log.publish_empty()
        self._folders.write(folder, file)
        self._fs.sync_folder(self._path)
        for (topic_id, _), part in self._partitions.items():
            if topic_id == topic.id:
                part.log.notify_config_change()

    def _delete(self, topic_id: str, name: str) -> None:
        self._close_partitions(topic_id)
        gone = f"{self._path}/{DELETED_PREFIX}{topic_id}"
        self._fs.rename(f"{self._path}/{name}", gone)
        self._fs.remove_tree(gone)

    def _close_partitions(self, topic_id: str) -> None:
        """Close a topic's partitions, and notify their readers that the partitions were deleted or renamed."""
        for partition_key in [key for key in self._partitions if key[0] == topic_id]:
            part = self._partitions.pop(partition_key)
            part.log.close(moved=True)
            self._downloader.retain_segments(part.log.folder, ())

    def _open_partition(self, topic: ShippedTopic, number: int) -> _ReplicaPartition:
        part = self._partitions.get((topic.id, number))
        if part is None:
            folder = f"{self._path}/{topic.name}/{number}"
            self._fs.make_folders(folder)
            configs = self._configs
            handle = Handle(self._fs, folder, topic.name, number, lambda: configs[topic.id], self._clock)
            part = _ReplicaPartition(ReplicaLog(handle))
            part.log.open()
            self._partitions[topic.id, number] = part
        return part

    # ------------------------------------------------------------ partitions

    def _plan_refresh(
        self, topic: ShippedTopic, entry: ShippedPartition, tails: Mapping[int, Tail]
    ) -> _PartitionRefresh | None:
        """Return the next state of a partition; None if its manifest entry has not changed."""
        partition = self._open_partition(topic, entry.number)
        before = partition.entry
        if entry == before:
            return None
        continues = before is not None and (before.generation, before.epoch) == (entry.generation, entry.epoch)
        is_internal = topic.name in INTERNAL_TOPICS
        return _PartitionRefresh(partition, entry, segment_ranges(entry, tails), continues, is_internal)

    def _refresh_partition(self, manifest: Manifest, refresh: _PartitionRefresh) -> None:
        try:
            self._download(refresh)
            self._publish(refresh)
        except ObjectMissing as missing:
            self._check_changed(manifest, missing)
            raise

    def _download(self, refresh: _PartitionRefresh) -> None:
        """Download the segment files of a partition. A file that replaces an old file is downloaded beside it."""
        partition, downloader = refresh.partition, self._downloader
        paths = {base: segment_stem(partition.log.folder, base) + LOG_SUFFIX for base in refresh.ranges}
        if refresh.continues:
            changed = [base for base, ranges in refresh.ranges.items() if partition.ranges.get(base) != ranges]

            def extend(base: int) -> bool:
                return downloader.extend(paths[base], file_size(partition.ranges.get(base, ())), refresh.ranges[base])

            with partition.log.extending():
                refresh.continues = all(run_parallel(extend, changed, self._parallel))
        if not refresh.continues:

            def prepare(base: int) -> tuple[int, MoveIntoPlace | None]:
                return base, downloader.prepare(paths[base], refresh.ranges[base])

            found = run_parallel(prepare, refresh.ranges, self._parallel)
            refresh.moves = {base: move for base, move in found if move is not None}

    def _publish(self, refresh: _PartitionRefresh) -> None:
        """Publish the downloaded state of a partition to readers."""
        partition, entry, ranges, log = refresh.partition, refresh.entry, refresh.ranges, refresh.partition.log
        state = PublishedState(
            log_start_offset=entry.log_start_offset,
            end_offset=entry.end_offset,
            stable_offset=_stable_offset(entry),
            active_base=entry.active_base,
            end_position=file_size(ranges[entry.active_base]),
            # Recovery starts at the active segment, so the checkpoint stays the same until the next roll.
            checkpoint=checkpoint_of(entry, entry.active_base, 0),
        )
        if refresh.moves:
            with log.replacing():
                for move in refresh.moves.values():
                    move()
                self._downloader.discard_derived_files(log.folder, refresh.moves)
                log.publish(state, is_replaced=True)
        else:
            log.publish(state, is_replaced=not refresh.continues or not partition.ranges.keys() <= ranges.keys())
        log.remove_other_segments(ranges)
        self._downloader.retain_segments(log.folder, ranges)
        self._fetch_small_files(log.folder, entry)
        partition.entry, partition.ranges = entry, ranges

    def _fetch_small_files(self, folder: str, partition: ShippedPartition) -> None:
        """Download indexes and producer snapshots. Without them readers work, but find positions more slowly."""
        for segment in partition.segments:
            stem = segment_stem(folder, segment.base_offset)
            self._downloader.fetch_index(stem, segment)
            if segment.snapshot is not None:
                self._downloader.fetch_file(stem + SNAPSHOT_SUFFIX, segment.snapshot)
        for base, chunks in groupby(partition.chunks, key=lambda chunk: chunk.segment):
            self._downloader.index_chunks(segment_stem(folder, base), tuple(chunks))
        for snapshot in partition.snapshots:
            self._downloader.fetch_file(segment_stem(folder, snapshot.segment) + SNAPSHOT_SUFFIX, snapshot.object)

    def _fetch_store_files(self, manifest: Manifest) -> None:
        """Download the store's own files. Ignore other paths that a manifest may name."""
        for file in manifest.files:
            if file.path in SHIPPED_FILES:
                path = f"{self._path}/{file.path}"
                self._fs.make_folders(os.path.dirname(path))
                self._downloader.fetch_file(path, file.object)


def _stable_offset(partition: ShippedPartition) -> int:
    if not partition.has_producers:
        return partition.end_offset
    return max(partition.stable_offset, partition.log_start_offset)


def _lag_offsets(refresh: _PartitionRefresh) -> int:
    published_offset = refresh.partition.entry.end_offset if refresh.partition.entry else 0
    return count_offsets(refresh.entry.lost_ranges, published_offset, refresh.entry.end_offset)
