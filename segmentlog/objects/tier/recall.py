"""Segments that lie in an object store alone come back, where nobody there would know that somebody needs them.

The manifest refers to each object that a segment lies in alone: so it is never condemned. Where it does not, because
shipping ended, or began anew, or a stub is damaged, the segment comes back, or the stub is made anew.
"""

from __future__ import annotations

import contextlib
import logging

from segmentlog.errors import CorruptBatch, SegmentGone, UnknownTopic
from segmentlog.format.file_names import LOG_SUFFIX
from segmentlog.format.manifest import ShippedPartition
from segmentlog.format.stub import Stub
from segmentlog.log.handle import Handle
from segmentlog.log.segment_tiering import bring_back, insist, is_remote
from segmentlog.policy.upload_policy import LocalSegment
from segmentlog.storage.segment import segment_stem
from segmentlog.storage.segment_stub import write_stub
from segmentlog.topics.topic_registry import Topics

logger = logging.getLogger("segmentlog")


def settle(handle: Handle, url: str, segment: LocalSegment, there: ShippedPartition | None) -> None:
    """Bring a segment back whose object the manifest does not refer to; or make a stub anew that is damaged.

    Raises `ObjectStoreError`, `SegmentGone`, `DiskFull`, `CorruptBatch`, OSError.
    """
    base = segment.base_offset
    try:
        bring_back(handle, base)
    except CorruptBatch:
        known = {one.base_offset: one for one in (there.segments if there else ())}.get(base)
        if known is None or known.log.size_bytes != segment.size_bytes:
            raise
        stub = Stub(url, known.log, handle.clock.now_ms())
        with handle.append_locked():
            write_stub(handle.fs, segment_stem(handle.folder, base) + LOG_SUFFIX, stub)
            handle.ledger.count_generation()


def bring_all_back(topics: Topics, *, is_fenced: bool) -> None:
    """Have all bytes of the store here again, before nobody sees to it any more that they stay there.

    Where another machine has taken the store over it may have deleted some: then these stay lost, and are logged.
    Raises `ObjectStoreError`, `SegmentGone`, `DiskFull`, OSError; what came back until then is here.
    """
    for name, _ in list(topics.all_partitions()):
        with contextlib.suppress(UnknownTopic):
            handle = topics.open_partition(name.topic, name.number).handle
            for base in handle.list_segments():
                if is_remote(handle, base):
                    try:
                        insist(handle, base)
                    except SegmentGone as error:
                        if not is_fenced:
                            raise
                        logger.warning("%s: a segment is lost: %s", handle.log_name, error)
