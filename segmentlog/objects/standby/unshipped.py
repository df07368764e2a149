"""Find the records of a former owner that were never shipped: the new owner reports their offsets as lost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from segmentlog.clock import Clock
from segmentlog.errors import SegmentlogError
from segmentlog.format.file_names import INTERNAL_TOPICS
from segmentlog.format.manifest import Manifest, ShippedPartition
from segmentlog.log.partition import Partition
from segmentlog.storage.fs import FileSystem
from segmentlog.topics.topic_folders import TopicFile, TopicFolders


class UnshippedRange(NamedTuple):
    """Offsets ``[base_offset, end_offset)`` of a partition that only the former owner's folder contains."""

    topic: str
    partition: int
    base_offset: int
    end_offset: int
    why: str = ""
    """Why the offsets are unknown: the partition cannot be read; else empty."""

    def __str__(self) -> str:
        where = f"{self.topic}/{self.partition}"
        return f"{where}: {self.why}" if self.why else f"{where}: offsets {self.base_offset} to {self.end_offset - 1}"


def find_unshipped(fs: FileSystem, former: str, manifest: Manifest, clock: Clock) -> Iterator[UnshippedRange]:
    """Yield what the store in the folder ``former`` contains and the new owner does not, for topics of users."""
    folders = TopicFolders(fs, former)
    folders.store_id = manifest.store_id
    shipped = {(topic.id, entry.number): entry for topic in manifest.topics for entry in topic.partitions}
    for name, file in folders.files():
        if name in INTERNAL_TOPICS:
            continue
        for number in range(file.partitions):
            try:
                yield from _find_in(fs, former, name, number, file, shipped.get((file.topic_id, number)), clock)
            except (SegmentlogError, OSError) as error:
                yield UnshippedRange(name, number, 0, 0, str(error))


def _find_in(
    fs: FileSystem, former: str, name: str, number: int, file: TopicFile, shipped: ShippedPartition | None, clock: Clock
) -> Iterator[UnshippedRange]:
    log = Partition(
        f"{former}/{name}/{number}", name, number, lambda: file.config, topic_id=file.topic_id, fs=fs, clock=clock,
        read_only=True, background=False,
    )  # fmt: skip
    try:
        start, end, known = log.log_start_offset, log.log_end_offset, log.lost_ranges()
        missing = [(start, end)]
        if shipped is not None:
            missing = [(lost.base_offset, lost.end_offset) for lost in shipped.lost_ranges]
            missing.append((shipped.end_offset, end))
        for base_offset, end_offset in missing:
            base_offset, end_offset = max(base_offset, start), min(end_offset, end)
            is_known = any(lost.base_offset <= base_offset and end_offset <= lost.end_offset for lost in known)
            if base_offset < end_offset and not is_known:
                yield UnshippedRange(name, number, base_offset, end_offset)
    finally:
        log.close()
