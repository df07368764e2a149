"""Snapshots of what is on disk of a store: first where each log ends, then its bytes on request.

Committed offsets are scanned before the data that they refer to. The transaction log is scanned last.
`transaction_ends` ensures that a manifest with a decision also includes the records of its transaction.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence
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
from segmentlog.objects.manifest.segment_labels import Checksums, checksums_of_chunks, has_label, label_file
from segmentlog.policy.shipped_topics import is_selected
from segmentlog.policy.upload_policy import LocalLog, LocalSegment
from segmentlog.records import EpochStart
from segmentlog.storage.file_operations import read_file
from segmentlog.storage.fs import opened
from segmentlog.storage.interrupt_check import failures_ignored
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
"""Object name recorded for an evicted segment whose stub is damaged. No object has this name."""
_STABLE_OFFSETS_MAX: Final = 8
"""Number of scans for which the last stable offset is kept. A scan is published one or two cycles later."""


class SegmentReplaced(Exception):
    """A segment was compacted, truncated or deleted after its snapshot. The next scan sees the new state."""


def scan_order(names: list[str]) -> list[str]:
    """Return the topics in the order in which their partitions must be scanned."""
    rest = [name for name in names if name not in INTERNAL_TOPICS]
    return [*(name for name in _FIRST if name in names), *rest, *(name for name in _LAST if name in names)]


def topics_to_ship(
    topics: Topics, patterns: tuple[str, ...], shipped: Iterable[str] = ()
) -> list[tuple[str, TopicFile]]:  # fmt: skip
    """Return name and file of each topic to ship, in `scan_order`.

    ``shipped`` contains the ids of the topics in the manifest. Also return two kinds of these topics: topics that are
    being renamed at this moment, and excluded topics that still have evicted segments.
    """
    found: dict[str, tuple[str, TopicFile]] = {}
    for name in topics.names(internal=True):
        if is_selected(name, patterns):
            with contextlib.suppress(UnknownTopic):  # deleted meanwhile, or renamed
                file = topics.read_topic_file(name)
                found[file.topic_id] = name, file
    for topic_id in shipped:
        if topic_id not in found and (topic := _find_by_id(topics, topic_id)) is not None:
            name, file = topic
            if is_selected(name, patterns) or _has_evicted_segments(topics, name, file):
                found[topic_id] = topic
    by_name = {name: file for name, file in found.values()}
    return [(name, by_name[name]) for name in scan_order(sorted(by_name))]


def _find_by_id(topics: Topics, topic_id: str) -> tuple[str, TopicFile] | None:
    """Return name and file of a topic, even after a rename; None only if it was deleted."""
    while True:
        try:
            name = topics.topic_name(topic_id)
        except UnknownTopic:
            return None
        with contextlib.suppress(UnknownTopic):  # renamed again
            return name, topics.read_topic_file(name, topic_id)


def _has_evicted_segments(topics: Topics, name: str, file: TopicFile) -> bool:
    """Return whether the object store has the only copy of a segment. An unreadable partition counts as such."""
    try:
        for number in range(file.partitions):
            handle = topics.open_partition(name, number, file.topic_id).handle
            if any(is_remote(handle, base) for base in handle.list_segments()):
                return True
    except (SegmentlogError, OSError):
        return True
    return False


def to_manifest_topic(name: str, file: TopicFile, partitions: tuple[ShippedPartition, ...]) -> ShippedTopic:
    """Return the manifest entry of a topic."""
    return ShippedTopic(
        id=file.topic_id, name=name, config=file.config.to_mapping(), largest_batch_bytes=file.largest_batch_bytes,
        partition_count=file.partitions, partitions=partitions,
    )  # fmt: skip


class LocalPartition:
    """A local partition, as the shipper sees it. Not thread-safe, except `read`."""

    def __init__(self, partition: Partition) -> None:
        self.partition = partition
        self._handle: Handle = partition.handle
        self._sealed: tuple[int, dict[int, LocalSegment]] = (-1, {})
        self._stable: tuple[int, list[tuple[int, int]]] = (-1, [])
        """(epoch, [(log end offset, last stable offset) of each recent scan in that epoch, oldest first])."""

    def signature(self) -> Signature:
        """Return a value that changes whenever there may be something new to ship."""
        log, sync = self._handle.page.log.read(), self._handle.page.sync.read()
        return (
            log.log_start_offset, log.log_end_offset, log.active_base_offset, log.epoch, log.generation,
            sync.durable_offset, sync.checkpointed_bytes, self.requested_offset,
        )  # fmt: skip

    @property
    def requested_offset(self) -> int:
        """The offset after the last one that was assigned, or that a waiting append needs."""
        page = self._handle.page
        return max(page.log.read().log_end_offset, page.words[WANTED_WORD])

    @property
    def appended_bytes(self) -> int:
        """Bytes appended to the partition, of which only differences have a meaning."""
        return self._handle.page.log.read().appended_bytes

    @property
    def log_end_offset(self) -> int:
        """Log end offset, including records that are not on disk yet."""
        return self._handle.page.log.read().log_end_offset

    def first_epoch(self) -> EpochStart:
        """Return the epoch at the log start."""
        return self._handle.ledger.last_checkpoint().epochs[0]

    def snapshot(self) -> LocalLog | None:
        """Return what is on disk; None if that cannot be determined now, because segments are being replaced."""
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
        # The durable end as a position in the active segment. Negative if that segment was begun after the last sync.
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
        self._record_stable_offset(log)
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
            markers_end_offset=self._markers_end(log, segments, end_offset, position),
        )

    def _markers_end(self, log: LogState, segments: Sequence[LocalSegment], end_offset: int, position: int) -> int:
        """Return the offset after the transaction markers that directly follow the durable end; -1 if there are none.

        The committed offsets of a group may be after these markers and already on disk.
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
            except (OSError, SegmentlogError):  # truncated or removed meanwhile
                return -1
        return offset if offset > end_offset else -1

    def _record_stable_offset(self, log: LogState) -> None:
        """Record the last stable offset at this scan, for `stable_offset`."""
        epoch, scans = self._stable
        if epoch != log.epoch:  # a truncation may have removed markers
            scans = []
        this_scan = (log.log_end_offset, log.last_stable_offset)
        if not scans or scans[-1][0] < log.log_end_offset:
            scans = [*scans[-_STABLE_OFFSETS_MAX:], this_scan]
        elif scans[-1][1] < log.last_stable_offset:
            scans = [*scans[:-1], this_scan]
        self._stable = log.epoch, scans

    def stable_offset(self, log: LocalLog, end_offset: int) -> int:
        """Return the last stable offset of a log that ends at ``end_offset``; -1 if it is unknown.

        The result may be too low: it is the last stable offset of an earlier scan, whose log end was at most
        ``end_offset``.
        """
        if not log.has_producers:
            return end_offset
        epoch, scans = self._stable
        found = (stable for end, stable in reversed(scans) if end <= end_offset)
        return next(found, -1) if epoch == log.version[0] else -1

    def truncated_to(self, log: LocalLog, offset: int) -> LocalLog | None:
        """Return the snapshot truncated to ``offset``; None if the position of that offset cannot be determined.

        A batch must end at ``offset``.
        """
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
            except (SegmentReplaced, CorruptBatch):
                return None
            last = replace(last, end_offset=offset, size_bytes=position, sealed=False, stamp=(last.stamp[0], 0, 0))
        now = self._handle.page.log.read()
        is_same = (now.epoch, now.generation) == log.version
        markers_end_offset = self._markers_end(now, [last], offset, last.size_bytes) if is_same else -1
        return replace(log, end_offset=offset, segments=(*kept, last), markers_end_offset=markers_end_offset)

    def _stat(self, base: int) -> os.stat_result:
        return self._handle.fs.stat(segment_stem(self._handle.folder, base) + LOG_SUFFIX)

    def _sealed_segment(self, base: int, end: int, log: LogState) -> LocalSegment:
        """Return a sealed segment, from the cache unless segments have changed since it was cached."""
        generation, cached = self._sealed
        if generation != log.generation:
            cached = {}
            self._sealed = (log.generation, cached)
        segment = cached.get(base)
        if segment is None or segment.end_offset != end:
            stat = self._stat(base)
            stamp = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
            segment = cached[base] = LocalSegment(base, end, stat.st_size, True, stamp, self._remote_key(base))
        return segment

    def _remote_key(self, base: int) -> str:
        """Return the key of an evicted segment's object; an empty text if the segment is on the local disk."""
        try:
            found = read_stub(self._handle.fs, segment_stem(self._handle.folder, base) + LOG_SUFFIX)
        except CorruptBatch:  # a damaged stub; `recall.recall_unreferenced` repairs it
            return UNKNOWN_OBJECT
        return "" if found is None else found[0].key

    def read(self, log: LocalLog, segment: int, position: int, size_bytes: int) -> memoryview:
        """Return bytes of a segment file as of the snapshot ``log``. Later appends do not change them. Thread-safe.

        Raise `SegmentReplaced` if since the snapshot the file was deleted or replaced, or the log was truncated or
        compacted.
        """
        known = next(one for one in log.segments if one.base_offset == segment)
        try:
            mapped = self._handle.map_segment(segment)
            data = mapped.view_to(position + size_bytes)[position:]
        except (FileNotFoundError, CorruptBatch, UnknownTopic) as error:
            raise SegmentReplaced(str(error)) from error
        now = self._handle.page.log.read()
        if known.sealed:  # a sealed file stays valid when other segments change: when one is evicted, for example
            is_same = (mapped.inode, len(mapped.view), mapped.written_ns) == known.stamp
        else:
            is_same = mapped.inode == known.stamp[0] and now.generation == log.generation
        if not is_same or now.epoch != log.version[0]:
            raise SegmentReplaced(f"segment {segment} of {self._handle.log_name} was replaced during its upload")
        return data

    def read_from(self, segment: LocalSegment, position: int) -> bytes:
        """Return a sealed segment's bytes from ``position`` on. Raise `SegmentReplaced` if its file was replaced."""
        try:
            mapped = self._handle.map_segment(segment.base_offset)
        except (FileNotFoundError, UnknownTopic) as error:
            raise SegmentReplaced(str(error)) from error
        if (mapped.inode, len(mapped.view), mapped.written_ns) != segment.stamp:
            raise SegmentReplaced(f"segment {segment.base_offset} of {self._handle.log_name} was replaced")
        return bytes(mapped.view[position:])

    def producer_snapshot(self, segment: int) -> bytes | None:
        """Return the producer snapshot at the base offset of a segment; None if its file does not exist."""
        try:
            with self._handle.folder_locked():
                return read_file(self._handle.fs, segment_stem(self._handle.folder, segment) + SNAPSHOT_SUFFIX)
        except FileNotFoundError:
            return None

    def producers_segment(self, log: LocalLog) -> int:
        """Return the base offset of the first segment that must be read to rebuild the producer state.

        Return the end offset if no segment must be read.
        """
        if not log.has_producers:
            return log.end_offset
        fs, folder = self._handle.fs, self._handle.folder
        bases = (segment.base_offset for segment in reversed(log.segments))
        return next((base for base in bases if fs.exists(segment_stem(folder, base) + SNAPSHOT_SUFFIX)), 0)

    def index(self, log: LocalLog, segment: LocalSegment) -> bytes | None:
        """Return the packed index of a sealed segment; None if its index is missing or incomplete.

        Call `max_timestamp` first: it completes the index. Raise `SegmentReplaced` as `read` does.
        """
        handle, base, size_bytes = self._handle, segment.base_offset, segment.size_bytes
        stem = segment_stem(handle.folder, base)
        try:
            with handle.folder_locked():
                offsets, times = (read_file(handle.fs, stem + suffix) for suffix in (INDEX_SUFFIX, TIME_INDEX_SUFFIX))
        except FileNotFoundError:  # the disk was full when the segment was sealed
            return None
        entries, _, is_whole = decode_entries(offsets, times)
        if not is_whole or not len(entries) or int(entries["position"][-1]) != size_bytes:
            return None
        aborted = b""
        if log.has_producers:
            self.read(log, base, 0, size_bytes)  # check that no shorter file has taken its name
            found = self._aborted(segment)
            if found.position != size_bytes:
                raise SegmentReplaced(f"segment {base} of {handle.log_name} was replaced during its upload")
            aborted = encode_aborted(size_bytes, found.aborted)
            if not found.is_stored:
                with contextlib.suppress(OSError):  # `complete_indexes` tries again before the segment is evicted
                    write_txn_index(handle, base, found)
        self.read(log, base, 0, 0)
        return pack_index(offsets, times, aborted)

    def _aborted(self, segment: LocalSegment) -> SegmentAborts:
        handle, base = self._handle, segment.base_offset
        return read_sealed_aborts(handle, base, lambda: handle.segment_context(base, segment.end_offset))

    def complete_indexes(self, log: LocalLog, segment: LocalSegment) -> None:
        """Write all indexes of a sealed segment, so that lookups and `read_committed` readers do not need its bytes.

        Raise FileNotFoundError for a deleted segment, and `DiskFull`, OSError.
        """
        self.max_timestamp(segment.base_offset)
        found = self._aborted(segment) if log.has_producers else SegmentAborts(segment.size_bytes, sealed=True)
        if not found.is_stored:
            write_txn_index(self._handle, segment.base_offset, found)

    def max_timestamp(self, segment: int) -> int:
        """Return the largest timestamp in a segment; -1 if it has none."""
        return self.partition.max_timestamp(segment)

    def has_label(self, base: int, checksums: Checksums) -> bool:
        """Return whether a local segment is labelled with these checksums, and unchanged since."""
        with contextlib.suppress(OSError):
            return has_label(self._handle.fs, segment_stem(self._handle.folder, base) + LOG_SUFFIX, checksums)
        return False

    def label(self, base: int, stamp: tuple[int, int, int], checksums: Checksums) -> None:
        """Label a sealed segment that matches ``checksums``, if its file still has this stamp."""
        fs = self._handle.fs
        path = segment_stem(self._handle.folder, base) + LOG_SUFFIX
        with failures_ignored(UnknownTopic), opened(fs, path, os.O_RDONLY | os.O_CLOEXEC) as fd:
            found = fs.fstat(fd)
            if (found.st_ino, found.st_size, found.st_mtime_ns) == stamp:
                label_file(fs, fd, checksums)

    def contained_chunks(self, chunks: Iterable[Chunk]) -> set[Chunk]:
        """Return the subset of ``chunks`` whose bytes the segment files have at the chunks' positions.

        Read only segment files whose label does not show it.
        """
        of_segment: dict[int, list[Chunk]] = {}
        for chunk in chunks:
            of_segment.setdefault(chunk.segment, []).append(chunk)
        found: set[Chunk] = set()
        for base, of_one in of_segment.items():
            is_labelled = self.has_label(base, checksums_of_chunks(of_one))
            found |= {chunk for chunk in of_one if is_labelled or self._contains_chunk(chunk)}
        return found

    def _contains_chunk(self, chunk: Chunk) -> bool:
        """Return whether the segment file contains the chunk's bytes at the chunk's position."""
        try:
            data = self._handle.map_segment(chunk.segment).view_to(chunk.position + chunk.size_bytes)[chunk.position :]
        except (OSError, SegmentlogError):
            return False
        return xxhash.xxh3_64_hexdigest(data) == chunk.xxh3_64


def open_local_partition(topics: Topics, name: str, number: int, topic_id: str) -> LocalPartition | None:
    """Open a partition of the store; return None if its topic was deleted or its folder does not exist."""
    try:
        return LocalPartition(topics.open_partition(name, number, topic_id))
    except (UnknownTopic, StoreClosed):
        return None
