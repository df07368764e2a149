"""A folder kept equal to what is shipped: topics, partitions and their state pages, for readers beside it.

A turn gets the manifest, and if it is another one what it speaks of that is not here; then shows it, partition by
partition: data first, positions and decisions of transactions last, as they were looked at in the other order. How
bytes come is a `Bringing`'s to know: all of them at once, or those that are read when they are read.
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
from segmentlog.log.replica_log import MirroredLog, Shown
from segmentlog.objects.bucket.base import Bucket, ObjectMissing
from segmentlog.objects.bucket.upload_pool import PARALLEL, beside_each_other
from segmentlog.objects.manifest.load import require_manifest
from segmentlog.objects.manifest.object_ranges import Spans, segment_spans, size_of
from segmentlog.objects.replica.downloads import Bringing, Place
from segmentlog.objects.restore.restore import checkpoint_of, is_wanted
from segmentlog.policy.lost_ranges import count_offsets
from segmentlog.storage.fs import FileSystem
from segmentlog.storage.segment import segment_stem
from segmentlog.topics.topic_folders import TopicFile, TopicFolders

_TRIES: Final = 20
"""So often the manifest may change under a turn before it gives up."""


class MirrorStatus(msgspec.Struct, frozen=True):
    """How far a mirror is.

    ``sequence`` of the manifest that it shows, -1 before the first one, and the wall clock in ms when that was put, as
    the owner had it; ``behind`` offsets that it knows of and does not show yet. ``looked_ms``: when it last saw that
    there is nothing newer; ``error``: why the last turn failed.
    """

    sequence: int = -1
    shipped_ms: int = 0
    looked_ms: int = 0
    behind: int = 0
    size_bytes: int = 0
    error: str = ""


class _Part:
    """One partition, and what of it is shown."""

    def __init__(self, log: MirroredLog) -> None:
        self.log = log
        self.there: ShippedPartition | None = None
        self.spans: dict[int, Spans] = {}


class _Round(msgspec.Struct):
    """What is to be shown of a partition in this turn."""

    part: _Part
    wanted: ShippedPartition
    spans: dict[int, Spans]
    continues: bool
    is_internal: bool
    place: dict[int, Place] = {}
    """By segment, what puts in place those that were brought beside."""


class Mirror:
    """Keeps one folder equal to one place in an object store. For one thread at a time, of one process."""

    def __init__(
        self,
        bucket: Bucket,
        path: str,
        bringing: Bringing,
        *,
        wanted: tuple[str, ...] = (),
        parallel: int = PARALLEL,
        fs: FileSystem,
        clock: Clock,
    ) -> None:
        self.bucket = bucket
        self._path = path
        self._bringing = bringing
        self._wanted = wanted
        self._parallel = parallel
        self._fs = fs
        self._clock = clock
        self._folders = TopicFolders(fs, path)
        self._configs: dict[str, TopicConfig] = {}
        """By topic id."""
        self._parts: dict[tuple[str, int], _Part] = {}
        self._tag: str | None = None
        self.manifest: Manifest | None = None
        self.status = MirrorStatus()

    # ------------------------------------------------------------ a turn

    def turn(self, progress: Callable[[int, int], None] | None = None) -> bool:
        """Show what lies there now; False when there was nothing new.

        ``progress`` is told (partitions that are shown, partitions in all). Raises `ObjectStoreError`,
        `ShippingRefused` (another store lies there, or something is damaged), `DiskFull`, OSError: what was not shown
        is the next time.
        """
        try:
            changed = self._turn(progress)
        except BaseException as error:
            self.status = msgspec.structs.replace(self.status, error=str(error) or type(error).__name__)
            raise
        self.status = msgspec.structs.replace(self.status, looked_ms=self._clock.now_ms(), error="")
        return changed

    def _turn(self, progress: Callable[[int, int], None] | None) -> bool:
        for _ in range(_TRIES):
            manifest, tag = require_manifest(self.bucket)
            if tag == self._tag:
                return False
            if self.manifest is not None and self.manifest.store_id != manifest.store_id:
                raise ShippingRefused(self.bucket.url, f"another store lies there by now than the one in {self._path}")
            try:
                self._apply(manifest, progress)
            except ObjectMissing as missing:
                self._check_changed(manifest, missing)
                continue
            self.manifest, self._tag = manifest, tag
            return True
        raise ObjectStoreError(self.bucket.url, "follow", f"the manifest changed {_TRIES} times while it was read")

    def _check_changed(self, manifest: Manifest, missing: ObjectMissing) -> None:
        """Raise `ShippingRefused` unless another manifest lies there by now, which may refer to it no more."""
        newer, _ = require_manifest(self.bucket)
        if newer.nonce == manifest.nonce:
            why = f"{missing.key} is gone, which the manifest refers to; see 'segmentlog objects verify'"
            raise ShippingRefused(self.bucket.url, why) from missing

    def _apply(self, manifest: Manifest, progress: Callable[[int, int], None] | None) -> None:
        topics = [topic for topic in manifest.topics if is_wanted(topic.name, self._wanted)]
        self._folders.store_id = manifest.store_id
        self._settle_topics(topics)
        tails = {tail.number: tail for tail in manifest.tails}
        ordered = sorted(topics, key=lambda topic: topic.name in INTERNAL_TOPICS)
        rounds = [
            one
            for topic in ordered
            for partition in topic.partitions
            if (one := self._look(topic, partition, tails)) is not None
        ]
        self._bringing.begin_turn()
        self.status = msgspec.structs.replace(self.status, behind=sum(map(_behind, rounds)))
        refused: ShippingRefused | None = None
        for index, one in enumerate(rounds):
            if refused is not None and one.is_internal:  # positions and decisions of what is not shown
                break
            try:
                self._follow(manifest, one)
            except ShippingRefused as error:  # damage there keeps no other partition from being shown
                refused = refused or error
            if progress is not None:
                progress(index + 1, len(rounds))
        if refused is not None:
            raise refused
        self._bring_files(manifest)
        self.status = msgspec.structs.replace(
            self.status, sequence=manifest.sequence, shipped_ms=manifest.shipped_ms, behind=0,
            size_bytes=sum(partition.size_bytes for topic in topics for partition in topic.partitions),
        )  # fmt: skip

    def close(self) -> None:
        """Let go of all files. What is shown stays so."""
        while self._parts:
            self._parts.popitem()[1].log.close()

    # ------------------------------------------------------------ topics

    def _settle_topics(self, topics: list[ShippedTopic]) -> None:
        """Have the folders that there are to be: topics gone are deleted, others renamed, altered, or made."""
        there = self._folders.by_id()
        wanted = {topic.id: topic for topic in topics}
        for topic_id, name in there.items():
            if topic_id not in wanted:
                self._delete(topic_id, name)
        aside = self._left_aside(there) if self.manifest is None or self.status.error else {}
        for topic_id, name in there.items():
            if topic_id in wanted and wanted[topic_id].name != name:  # two may have changed their names
                aside[topic_id] = f"{self._path}/{MAKING_PREFIX}{topic_id}"
                self._let_go(topic_id)
                self._fs.rename(f"{self._path}/{name}", aside[topic_id])
        for topic in topics:
            check_topic_name(topic.name, internal=True)  # it is to name a folder
            folder = f"{self._path}/{topic.name}"
            if topic.id in aside:
                self._fs.rename(aside.pop(topic.id), folder)
            self._write_topic(folder, topic)
        for gone in aside.values():
            self._fs.remove_tree(gone)

    def _left_aside(self, there: Mapping[str, str]) -> dict[str, str]:
        """By id, topics that a process was killed at renaming, or failed at; what it was deleting goes.

        And what is ``there`` by its id: it was made anew since.
        """
        aside = {}
        for name in self._fs.listdir(self._path):
            topic_id = name.removeprefix(MAKING_PREFIX)
            if name.startswith(MAKING_PREFIX) and topic_id not in there:
                aside[topic_id] = f"{self._path}/{name}"
            elif name.startswith((MAKING_PREFIX, DELETED_PREFIX)):
                self._fs.remove_tree(f"{self._path}/{name}")
        return aside

    def _write_topic(self, folder: str, topic: ShippedTopic) -> None:
        """Have its settings there; whoever has it open is told that they are others."""
        file = TopicFile(
            topic.partition_count, TopicConfig.from_mapping(topic.config), topic.largest_batch_bytes, topic.id
        )
        self._configs[topic.id] = file.config
        if self._fs.exists(f"{folder}/{TOPIC_FILE}") and self._folders.read(topic.name) == file:
            return
        somebody_looks = self._fs.exists(f"{self._path}/{STORE_FILE}")
        for number in range(topic.partition_count):
            self._fs.make_folders(f"{folder}/{number}")
            if somebody_looks:
                self._part(topic, number).log.show_nothing()
        self._folders.write(folder, file)
        self._fs.sync_folder(self._path)
        for (topic_id, _), part in self._parts.items():
            if topic_id == topic.id:
                part.log.tell_altered()

    def _delete(self, topic_id: str, name: str) -> None:
        self._let_go(topic_id)
        gone = f"{self._path}/{DELETED_PREFIX}{topic_id}"
        self._fs.rename(f"{self._path}/{name}", gone)
        self._fs.remove_tree(gone)

    def _let_go(self, topic_id: str) -> None:
        """Of its partitions; whoever has them open is told that they are not there any more."""
        for where in [where for where in self._parts if where[0] == topic_id]:
            part = self._parts.pop(where)
            part.log.close(moved=True)
            self._bringing.forget(part.log.folder, ())

    def _part(self, topic: ShippedTopic, number: int) -> _Part:
        part = self._parts.get((topic.id, number))
        if part is None:
            folder = f"{self._path}/{topic.name}/{number}"
            self._fs.make_folders(folder)
            configs = self._configs
            handle = Handle(self._fs, folder, topic.name, number, lambda: configs[topic.id], self._clock)
            part = _Part(MirroredLog(handle))
            part.log.open()
            self._parts[topic.id, number] = part
        return part

    # ------------------------------------------------------------ partitions

    def _look(self, topic: ShippedTopic, partition: ShippedPartition, tails: Mapping[int, Tail]) -> _Round | None:
        """What is to be done about a partition; None when it is shown as it is."""
        part = self._part(topic, partition.number)
        if partition == part.there:
            return None
        there = part.there
        continues = there is not None and (there.generation, there.epoch) == (partition.generation, partition.epoch)
        return _Round(part, partition, segment_spans(partition, tails), continues, topic.name in INTERNAL_TOPICS)

    def _follow(self, manifest: Manifest, one: _Round) -> None:
        try:
            self._bring(one)
            self._show(one)
        except ObjectMissing as missing:
            self._check_changed(manifest, missing)
            raise

    def _bring(self, one: _Round) -> None:
        """Have all files of the partition that it takes, those that are to replace others beside them."""
        part, bringing = one.part, self._bringing
        paths = {base: segment_stem(part.log.folder, base) + LOG_SUFFIX for base in one.spans}
        if one.continues:
            changed = [base for base, spans in one.spans.items() if part.spans.get(base) != spans]

            def extend(base: int) -> bool:
                return bringing.extend(paths[base], size_of(part.spans.get(base, ())), one.spans[base])

            with part.log.extending():
                one.continues = all(beside_each_other(extend, changed, self._parallel))
        if not one.continues:

            def prepare(base: int) -> tuple[int, Place | None]:
                return base, bringing.prepare(paths[base], one.spans[base])

            found = beside_each_other(prepare, one.spans, self._parallel)
            one.place = {base: place for base, place in found if place is not None}

    def _show(self, one: _Round) -> None:
        part, wanted, log = one.part, one.wanted, one.part.log
        shown = Shown(
            log_start_offset=wanted.log_start_offset,
            end_offset=wanted.end_offset,
            stable_offset=_stable_offset(wanted),
            active_base=wanted.active_base,
            end_position=size_of(one.spans[wanted.active_base]),
            # The same one for as long as the segment is: it is not written in every turn.
            checkpoint=checkpoint_of(wanted, wanted.active_base, 0),
        )
        if one.place:
            with log.replacing():
                for place in one.place.values():
                    place()
                self._bringing.replaced(log.folder, one.place)
                log.show(shown, is_replaced=True)
        else:
            log.show(shown, is_replaced=not one.continues or not part.spans.keys() <= one.spans.keys())
        log.remove_others(one.spans)
        self._bringing.forget(log.folder, one.spans)
        self._bring_beside(log.folder, wanted)
        part.there, part.spans = wanted, one.spans

    def _bring_beside(self, folder: str, partition: ShippedPartition) -> None:
        """What goes with the segments: nobody sees a difference but in the time that it takes to look something up."""
        for segment in partition.segments:
            stem = segment_stem(folder, segment.base_offset)
            self._bringing.bring_index(stem, segment)
            if segment.snapshot is not None:
                self._bringing.bring_file(stem + SNAPSHOT_SUFFIX, segment.snapshot)
        for base, chunks in groupby(partition.chunks, key=lambda chunk: chunk.segment):
            self._bringing.note_chunks(segment_stem(folder, base), tuple(chunks))
        for snapshot in partition.snapshots:
            self._bringing.bring_file(segment_stem(folder, snapshot.segment) + SNAPSHOT_SUFFIX, snapshot.object)

    def _bring_files(self, manifest: Manifest) -> None:
        """Those of the store itself; whatever else a manifest may name is none of them."""
        for file in manifest.files:
            if file.path in SHIPPED_FILES:
                path = f"{self._path}/{file.path}"
                self._fs.make_folders(os.path.dirname(path))
                self._bringing.bring_file(path, file.object)


def _stable_offset(partition: ShippedPartition) -> int:
    if not partition.has_producers:
        return partition.end_offset
    return max(partition.stable_offset, partition.log_start_offset)


def _behind(one: _Round) -> int:
    shown_offset = one.part.there.end_offset if one.part.there else 0
    return count_offsets(one.wanted.lost_ranges, shown_offset, one.wanted.end_offset)
