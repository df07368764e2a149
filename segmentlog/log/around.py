"""What is known of a segment beside its bytes, for who steps over damage in it."""

from __future__ import annotations

import contextlib

from segmentlog.errors import SegmentlogError
from segmentlog.format.batch import MAX_RAW_SIZE
from segmentlog.format.scan import Around, KnownBatches
from segmentlog.log.handle import Handle
from segmentlog.storage.index import batches_known
from segmentlog.storage.segment import segment_stem


def around_segment(handle: Handle, base: int, end_offset: int | None, known: KnownBatches | None = None) -> Around:
    """Of the segment ``base``, whose batches end at ``end_offset`` at the latest; without ``known`` its index files."""
    batch_limit = MAX_RAW_SIZE
    with contextlib.suppress(OSError, SegmentlogError):
        handle.exceeds_batch_limit(MAX_RAW_SIZE)  # learns of a limit that was raised since
        batch_limit = handle.batch_limit
    return Around(end_offset, batch_limit, known or batches_known(handle.fs, segment_stem(handle.folder, base), base))
