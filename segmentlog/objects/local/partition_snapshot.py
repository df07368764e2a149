"""What of a store is on disk now, as it is to be shipped: ends first, bytes when they are asked for.

Positions are looked at before the data that they speak of. Decisions come last; `decisions` sees to their data.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Final

import xxhash
from msgspec.structs import replace

from segmentlog.errors import CorruptBatch, SegmentlogError, StoreClosed, UnknownTopic
from segmentlog.format.batch import decode_header
from segmentlog.format.file_names import (
    INDEX_SUFFIX,
    INTERNAL_TOPICS,
    LOG_SUFFIX,
    OFFSETS_TOPIC,
    SNAPSHOT_SUFFIX,
    TIME_INDEX_SUFFIX,
    TRANSACTIONS_TOPIC,
)
from segmentlog.format.index_file import decode_entries, pack_index
from segmentlog.format.manifest import Chunk, ShippedPartition, ShippedTopic
from segmentlog.format.producer_snapshot import encode_aborted
from segmentlog.log.handle import Handle
from segmentlog.log.partition import Partition
from segmentlog.log.segment_tiering import is_remote
from segmentlog.log.transaction_index import SegmentAborts, read_sealed_aborts, write_txn_index
from segmentlog.policy.upload_policy import LocalLog, LocalSegment
from segmentlog.records import EpochStart
from segmentlog.storage.file_operations import read_file
from segmentlog.storage.segment import segment_stem
from segmentlog.storage.segment_stub import read_stub
from segmentlog.storage.state_page import PRODUCERS_WORD, WANTED_WORD, LogState
from segmentlog.topics.topic_folders import TopicFile
from segmentlog.topics.topic_registry import Topics

_FIRST: Final = (OFFSETS_TOPIC,)
_LAST: Final = (TRANSACTIONS_TOPIC,)

Signature = tuple[int, ...]

_MARKERS_MAX: Final = 1000
UNKNOWN_OBJECT: Final = "?"
"""No name of an object: of a segment that is not here, and of which nothing here says where it is."""
_STABLE_KEPT: Final = 8
"""Looks: what was on disk at one is shipped by the next, or the one after."""


class Replaced(Exception):
    """A segment was compacted, cut or deleted between the look at it and the reading of it: the next look tells."""


def in_order(names: list[str]) -> list[str]:
    """Topics in the order in which their ends are to be looked at."""
    rest = [name for name in names if name not in INTERNAL_TOPICS]
    return [*(name for name in _FIRST if name in names), *rest, *(name for name in _LAST if name in names)]


def is_wanted(name: str, wanted: tuple[str, ...]) -> bool:
    """Whether a topic is to be shipped: its name matches, or it is the store's own."""
    return name in INTERNAL_TOPICS or not wanted or any(fnmatchcase(name, pattern) for pattern in wanted)


def topics_of(
    topics: Topics, wanted: tuple[str, ...], shipped: Iterable[str] = ()
) -> list[tuple[str, TopicFile]]:  # fmt: skip
    """The topics that are to be shipped, in that order: those that are wanted.

    ``shipped`` are the ids of those that the manifest has. Of them none is missing that there is: neither one that is
    renamed at this moment, nor one that is wanted no more but has segments that lie in the object store alone.
    """
    found: dict[str, tuple[str, TopicFile]] = {}
    for name in topics.names(internal=True):
        if is_wanted(name, wanted):
            with contextlib.suppress(UnknownTopic):  # deleted meanwhile, or renamed
                file = topics.read_topic_file(name)
                found[file.topic_id] = name, file
    for topic_id in shipped:
        if topic_id not in found and (there := _by_id(topics, topic_id)) is not None:
            name, file = there
            if is_wanted(name, wanted) or _has_remote_segments(topics, name, file):
                found[topic_id] = there
    by_name = {name: file for name, file in found.values()}
    return [(name, by_name[name]) for name in in_order(sorted(by_name))]


def _by_id(topics: Topics, topic_id: str) -> tuple[str, TopicFile] | None:
    """A topic whatever it is called by now; None when it was deleted, for which nobody's word is taken."""
    while True:
        try:
            name = topics.topic_name(topic_id)
        except UnknownTopic:
            return None
        with contextlib.suppress(UnknownTopic):  # renamed once more
            return name, topics.read_topic_file(name, topic_id)


def _has_remote_segments(topics: Topics, name: str, file: TopicFile) -> bool:
    """Whether bytes of a topic lie in an object store alone. Where that cannot be seen they may."""
    try:
        for number in range(file.partitions):
            handle = topics.open_partition(name, number, file.topic_id).handle
            if any(is_remote(handle, base) for base in handle.list_segments()):
                return True
    except (SegmentlogError, OSError):
        return True
    return False


def as_shipped(name: str, file: TopicFile, partitions: tuple[ShippedPartition, ...]) -> ShippedTopic:
    """A topic as the manifest has it."""
    return ShippedTopic(
        id=file.topic_id, name=name, config=file.config.to_mapping(), largest_batch_bytes=file.largest_batch_bytes,
        partition_count=file.partitions, partitions=partitions,
    )  # fmt: skip


class LocalPartition:
    """One partition of the store that is shipped. For one thread at a time, but for `read`."""

    def __init__(self, partition: Partition) -> None:
        self.partition = partition
        self._handle: Handle = partition.handle
        self._sealed: tuple[int, dict[int, LocalSegment]] = (-1, {})
        self._stable: tuple[int, list[tuple[int, int]]] = (-1, [])
        """Of an epoch: (where the log ended, the last stable offset then), ascending."""

    def signature(self) -> Signature:
        """Another one whenever there may be something new to ship."""
        log, sync = self._handle.page.log.read(), self._handle.page.sync.read()
        return (
            log.log_start_offset, log.log_end_offset, log.active_base_offset, log.epoch, log.generation,
            sync.durable_offset, sync.checkpointed_bytes, self.wanted_offset,
        )  # fmt: skip

    @property
    def wanted_offset(self) -> int:
        """Offsets below it were handed out, or an append waits for them."""
        page = self._handle.page
        return max(page.log.read().log_end_offset, page.words[WANTED_WORD])

    @property
    def appended_bytes(self) -> int:
        """A count that grows with every append."""
        return self._handle.page.log.read().appended_bytes

    @property
    def log_end_offset(self) -> int:
        """Offsets below it were handed out."""
        return self._handle.page.log.read().log_end_offset

    def first_epoch(self) -> EpochStart:
        """The one that the log begins in."""
        return self._handle.ledger.last_checkpoint().epochs[0]

    def look(self) -> LocalLog | None:
        """What is on disk; None while it cannot be told, because somebody is replacing segments right now."""
        page = self._handle.page
        before = page.log.read()
        sync = page.sync.read()
        checkpoint = self._handle.ledger.last_checkpoint()
        log = page.log.read()
        is_steady = (log.epoch, log.generation) == (before.epoch, before.generation)
        if not is_steady or checkpoint.epoch != log.epoch or page.failed or page.writing > 1:
            return None
        bases = self._handle.segments(log)
        end_offset = sync.durable_offset
        # Where in the active segment that is; before its beginning, when it was begun since the last fsync.
        position = log.end_position - (log.appended_bytes - sync.synced_bytes)
        segments = []
        try:
            sizes = [self._stat(base) for base in bases[:-1]] if position < 0 else []
            for base, following in zip(bases, [*bases[1:], log.log_end_offset], strict=True):
                if base > end_offset:
                    break
                if base < log.active_base_offset and following <= end_offset:
                    segments.append(self._sealed_segment(base, following, log))
                    continue
                for found in sizes[len(segments) :]:
                    position += found.st_size
                segments.append(LocalSegment(base, end_offset, position, False, (self._stat(base).st_ino, 0, 0)))
                break
        except FileNotFoundError:  # deleted or replaced meanwhile
            return None
        if page.log.read().generation != log.generation:
            return None
        self._note_stable(log)
        return LocalLog(
            number=self.partition.number,
            log_start_offset=min(log.log_start_offset, end_offset),
            end_offset=end_offset,
            epochs=checkpoint.epochs,
            lost_ranges=checkpoint.lost_ranges,
            compacted=checkpoint.compacted,
            has_producers=checkpoint.has_producers or bool(page.words[PRODUCERS_WORD]),
            generation=log.generation,
            segments=tuple(segments),
            markers_end_offset=self._markers_behind(log, segments, end_offset, position),
        )

    def _markers_behind(self, log: LogState, segments: Sequence[LocalSegment], end_offset: int, position: int) -> int:
        """How far markers of transactions go behind what is on disk, with no record between them; -1 without any.

        Groups may have committed positions behind them, which are on disk.
        """
        offset = end_offset
        is_active = bool(segments) and segments[-1].base_offset == log.active_base_offset
        if is_active and end_offset < log.log_end_offset and 0 <= position < log.end_position:
            try:
                data = self._handle.map_segment(log.active_base_offset).view_to(log.end_position)
                while position < len(data) and offset - end_offset < _MARKERS_MAX:
                    header = decode_header(data, position)
                    if not header.is_control or (header.base_offset, header.next_offset) != (offset, offset + 1):
                        break
                    offset, position = header.next_offset, position + header.size_bytes
            except (OSError, SegmentlogError):  # cut, or removed meanwhile
                return -1
        return offset if offset > end_offset else -1

    def _note_stable(self, log: LogState) -> None:
        epoch, known = self._stable
        if epoch != log.epoch:  # a truncation may have taken markers
            known = []
        if not known or known[-1][0] < log.log_end_offset:
            known = [*known[-_STABLE_KEPT:], (log.log_end_offset, log.last_stable_offset)]
        elif known[-1][1] < log.last_stable_offset:
            known = [*known[:-1], (log.log_end_offset, log.last_stable_offset)]
        self._stable = log.epoch, known

    def stable_offset(self, log: LocalLog, end_offset: int) -> int:
        """Every transaction below it is decided by markers below ``end_offset``; -1 when that is not known.

        It may be less than there is: what was stable at a look whose end is shipped by now.
        """
        if not log.has_producers:
            return end_offset
        epoch, known = self._stable
        found = (stable for end, stable in reversed(known) if end <= end_offset)
        return next(found, -1) if epoch == log.version[0] else -1

    def upto(self, log: LocalLog, offset: int) -> LocalLog | None:
        """The log as far as ``offset``, where a batch ends; None when that cannot be told."""
        kept = [segment for segment in log.segments if segment.base_offset < offset]
        if offset > log.end_offset or not kept:
            return None
        last = kept.pop()
        position = 0
        if not (last.sealed and last.end_offset == offset):
            try:
                data = self.read(log, last.base_offset, 0, last.size_bytes)
                while position < len(data) and (header := decode_header(data, position)).base_offset < offset:
                    position += header.size_bytes
            except (Replaced, CorruptBatch):
                return None
            last = replace(last, end_offset=offset, size_bytes=position, sealed=False, stamp=(last.stamp[0], 0, 0))
        now = self._handle.page.log.read()
        is_same = (now.epoch, now.generation) == log.version
        markers_end_offset = self._markers_behind(now, [last], offset, last.size_bytes) if is_same else -1
        return replace(log, end_offset=offset, segments=(*kept, last), markers_end_offset=markers_end_offset)

    def _stat(self, base: int) -> os.stat_result:
        return self._handle.fs.stat(segment_stem(self._handle.folder, base) + LOG_SUFFIX)

    def _sealed_segment(self, base: int, end: int, log: LogState) -> LocalSegment:
        generation, known = self._sealed
        if generation != log.generation:
            known = {}
            self._sealed = (log.generation, known)
        found = known.get(base)
        if found is None or found.end_offset != end:
            stat = self._stat(base)
            stamp = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
            found = known[base] = LocalSegment(base, end, stat.st_size, True, stamp, self._remote_key(base))
        return found

    def _remote_key(self, base: int) -> str:
        """The object that a segment lies in alone; empty when it is here."""
        try:
            found = read_stub(self._handle.fs, segment_stem(self._handle.folder, base) + LOG_SUFFIX)
        except CorruptBatch:  # of its stub: `recalling.settle` makes it anew
            return UNKNOWN_OBJECT
        return "" if found is None else found[0].key

    def read(self, log: LocalLog, segment: int, position: int, size_bytes: int) -> memoryview:
        """Bytes of a segment file as it was when ``log`` was looked at; they stay what they are.

        Raises `Replaced` when it is another file by now, or none, or the log was cut or compacted since.
        """
        known = next(one for one in log.segments if one.base_offset == segment)
        try:
            mapped = self._handle.map_segment(segment)
            data = mapped.view_to(position + size_bytes)[position:]
        except (FileNotFoundError, CorruptBatch, UnknownTopic) as error:
            raise Replaced(str(error)) from error
        now = self._handle.page.log.read()
        if known.sealed:  # it stays what it is when others are replaced: one that leaves for the object store, say
            is_same = (mapped.inode, len(mapped.view), mapped.written_ns) == known.stamp
        else:
            is_same = mapped.inode == known.stamp[0] and now.generation == log.generation
        if not is_same or now.epoch != log.version[0]:
            raise Replaced(f"segment {segment} of {self._handle.log_name} was replaced while it was to be shipped")
        return data

    def at(self, segment: LocalSegment, position: int) -> bytes:
        """The bytes of a sealed segment's file from there on. Raises `Replaced` when it is another file by now."""
        try:
            mapped = self._handle.map_segment(segment.base_offset)
        except (FileNotFoundError, UnknownTopic) as error:
            raise Replaced(str(error)) from error
        if (mapped.inode, len(mapped.view), mapped.written_ns) != segment.stamp:
            raise Replaced(f"segment {segment.base_offset} of {self._handle.log_name} was replaced meanwhile")
        return bytes(mapped.view[position:])

    def snapshot(self, segment: int) -> bytes | None:
        """What was known of producers where a segment begins; None where nothing was left."""
        try:
            with self._handle.folder_locked():
                return read_file(self._handle.fs, segment_stem(self._handle.folder, segment) + SNAPSHOT_SUFFIX)
        except FileNotFoundError:
            return None

    def producers_segment(self, log: LocalLog) -> int:
        """Base offset of the segment from which on the log is read for its producers; its end where it has none."""
        if not log.has_producers:
            return log.end_offset
        fs, folder = self._handle.fs, self._handle.folder
        bases = (segment.base_offset for segment in reversed(log.segments))
        return next((base for base in bases if fs.exists(segment_stem(folder, base) + SNAPSHOT_SUFFIX)), 0)

    def index(self, log: LocalLog, segment: LocalSegment) -> bytes | None:
        """The index of a sealed segment, which is complete once its `max_timestamp` was asked for; None without one.

        Raises `Replaced` as `read` does.
        """
        handle, base, size_bytes = self._handle, segment.base_offset, segment.size_bytes
        stem = segment_stem(handle.folder, base)
        try:
            with handle.folder_locked():
                offsets, times = (read_file(handle.fs, stem + suffix) for suffix in (INDEX_SUFFIX, TIME_INDEX_SUFFIX))
        except FileNotFoundError:  # there was no room for it
            return None
        entries, _, is_whole = decode_entries(offsets, times)
        if not is_whole or not len(entries) or int(entries["position"][-1]) != size_bytes:
            return None
        aborted = b""
        if log.has_producers:
            self.read(log, base, 0, size_bytes)  # no shorter one has the name since
            found = self._aborted(segment)
            if found.position != size_bytes:
                raise Replaced(f"segment {base} of {handle.log_name} was replaced while it was to be shipped")
            aborted = encode_aborted(size_bytes, found.aborted)
            if not found.is_kept:
                with contextlib.suppress(OSError):  # before it leaves, at the latest
                    write_txn_index(handle, base, found)
        self.read(log, base, 0, 0)
        return pack_index(offsets, times, aborted)

    def _aborted(self, segment: LocalSegment) -> SegmentAborts:
        handle, base = self._handle, segment.base_offset
        return read_sealed_aborts(handle, base, lambda: handle.segment_context(base, segment.end_offset))

    def complete_indexes(self, log: LocalLog, segment: LocalSegment) -> None:
        """See to it that nobody needs a sealed segment's bytes to find a place in it, or to step over what was aborted.

        Raises FileNotFoundError for one that is gone, `DiskFull`, OSError.
        """
        self.max_timestamp(segment.base_offset)
        found = self._aborted(segment) if log.has_producers else SegmentAborts(segment.size_bytes, sealed=True)
        if not found.is_kept:
            write_txn_index(self._handle, segment.base_offset, found)

    def max_timestamp(self, segment: int) -> int:
        """The largest timestamp in a segment as it is now; -1 where there is none."""
        return self.partition.max_timestamp(segment)

    def holds(self, chunk: Chunk) -> bool:
        """Whether a chunk's bytes are what stands in the segment file now."""
        try:
            data = self._handle.map_segment(chunk.segment).view_to(chunk.position + chunk.size_bytes)[chunk.position :]
        except (OSError, SegmentlogError):
            return False
        return xxhash.xxh3_64_hexdigest(data) == chunk.xxh3_64


def open_local(topics: Topics, name: str, number: int, topic_id: str) -> LocalPartition | None:
    """A partition of the store; None when its topic is gone, or it has no folder."""
    try:
        return LocalPartition(topics.open_partition(name, number, topic_id))
    except (UnknownTopic, StoreClosed):
        return None
