"""Recall evicted segments whose object the manifest does not protect from garbage collection.

Normally the manifest refers to the object of every evicted segment, so garbage collection never deletes that object.
After shipping was ended or started over, the manifest may not refer to it; then the segment is downloaded. If a stub is
damaged, its object is unknown; then the stub is recreated from the manifest.
"""

from __future__ import annotations

import contextlib
import logging

from segmentlog.errors import CorruptBatch, SegmentGone, UnknownTopic
from segmentlog.format.file_names import LOG_SUFFIX
from segmentlog.format.manifest import ShippedPartition
from segmentlog.format.stub import Stub
from segmentlog.log.handle import Handle
from segmentlog.log.segment_tiering import is_remote, recall_or_raise, recall_segment
from segmentlog.policy.upload_policy import LocalSegment
from segmentlog.storage.segment import segment_stem
from segmentlog.storage.segment_stub import write_stub
from segmentlog.topics.topic_registry import Topics

logger = logging.getLogger("segmentlog")


def recall_unreferenced(handle: Handle, url: str, segment: LocalSegment, entry: ShippedPartition | None) -> None:
    """Recall a segment whose object the manifest does not refer to, or recreate a damaged stub from the manifest.

    Raise `ObjectStoreError`, `SegmentGone`, `DiskFull`, `CorruptBatch`, OSError.
    """
    base = segment.base_offset
    try:
        recall_segment(handle, base)
    except CorruptBatch:
        known = {one.base_offset: one for one in (entry.segments if entry else ())}.get(base)
        if known is None or known.log.size_bytes != segment.size_bytes:
            raise
        stub = Stub(url, known.log, handle.clock.now_ms())
        with handle.append_locked():
            write_stub(handle.fs, segment_stem(handle.folder, base) + LOG_SUFFIX, stub)
            handle.ledger.count_generation()


def recall_all(topics: Topics, *, is_fenced: bool) -> None:
    """Recall all evicted segments of a store, before its objects lose their protection from garbage collection.

    With ``is_fenced``, another machine has taken over the store and may have deleted objects. Log each segment that is
    lost because of that, and continue.

    Raise `ObjectStoreError`, `SegmentGone`, `DiskFull`, OSError. Segments that were recalled before stay local.
    """
    for name, _ in list(topics.all_partitions()):
        with contextlib.suppress(UnknownTopic):
            handle = topics.open_partition(name.topic, name.number).handle
            for base in handle.list_segments():
                if is_remote(handle, base):
                    try:
                        recall_or_raise(handle, base)
                    except SegmentGone as error:
                        if not is_fenced:
                            raise
                        logger.warning(
                            "%s: the records of evicted segment %d are lost: %s", handle.log_name, base, error
                        )
