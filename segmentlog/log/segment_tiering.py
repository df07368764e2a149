"""Evict a segment of an open log to the object store, or recall it, with the stub files of `storage.segment_stub`.

The append lock protects against other replacements of the segment. It is held only while files are renamed, never while
the object store is accessed. A new generation tells readers to drop their mapping of the old file.
"""

from __future__ import annotations

import contextlib
from typing import Final

from segmentlog.errors import CorruptBatch, ObjectStoreError
from segmentlog.format.file_names import LOG_SUFFIX
from segmentlog.format.stub import Stub, encode_stub
from segmentlog.log.handle import Handle
from segmentlog.storage.file_operations import read_file
from segmentlog.storage.fs import Stamp
from segmentlog.storage.segment import segment_stem
from segmentlog.storage.segment_stub import prepared_hole, prepared_log, read_stub, remove_stub, stub_path, write_stub

_TRIES: Final = 3
"""Attempts to recall a segment. Between them, another process may have replaced the segment or its stub."""


def is_remote(handle: Handle, base: int) -> bool:
    """Return whether the object store has the only copy of a segment; also True if its stub is damaged."""
    try:
        with handle.folder_locked():
            return read_stub(handle.fs, segment_stem(handle.folder, base) + LOG_SUFFIX) is not None
    except FileNotFoundError:
        return False
    except CorruptBatch:
        return True


def evict_segment(handle: Handle, base: int, stamp: Stamp, stub: Stub) -> bool:
    """Remove the local bytes of a sealed, uploaded segment. Return False, and change nothing, if its file was replaced.

    ``stamp`` identifies the uploaded file. The segment must be below the recovery segment of the checkpoint, because a
    recovery reads the segments from there on. Raise `DiskFull`, `StoreFenced`, OSError.
    """
    fs, path = handle.fs, segment_stem(handle.folder, base) + LOG_SUFFIX
    with handle.translating_errors("nothing was changed"), handle.folder_locked():
        if not _has_stamp(handle, path, stamp):
            return False
        write_stub(fs, path, stub)
        done = False
        with prepared_hole(fs, path, stub.size_bytes, stamp[2]) as hole, handle.append_locked():
            handle.check_appendable()
            is_settled = not handle.page.writing and base < handle.ledger.last_checkpoint().recovery_segment
            if is_settled and _has_stamp(handle, path, stamp) and _is_stub_unchanged(handle, path, stub):
                fs.replace(hole, path)
                handle.ledger.count_generation()
                done = True
        if done:
            fs.sync_folder(handle.folder)
        elif _read_stub(handle, path) is None:
            remove_stub(fs, path)
    return done


def recall_segment(handle: Handle, base: int) -> bool:
    """Download an evicted segment durably. Return False if the segment is already local, or was deleted.

    Raise `ObjectStoreError`, `SegmentGone`, `DiskFull`, OSError.
    """
    fs, path = handle.fs, segment_stem(handle.folder, base) + LOG_SUFFIX
    with handle.translating_errors("nothing was changed"):
        try:
            with handle.folder_locked():
                found, ranges = read_stub(fs, path), fs.ranged(path)
        except FileNotFoundError:
            return False
        if found is None or ranges is None:
            return False
        stub, done = found[0], False
        ranges.need(0, stub.size_bytes)  # slow, so without the folder lock: a rename of the topic need not wait
        with handle.folder_locked():
            modified_ns = fs.stat(path).st_mtime_ns
            with prepared_log(fs, path, stub, ranges, modified_ns) as log, handle.append_locked():
                if _read_stub(handle, path) == found:
                    fs.replace(log, path)
                    handle.ledger.count_generation()
                    done = True
            if done:
                fs.sync_folder(handle.folder)
                with handle.append_locked():
                    if _read_stub(handle, path) is None:  # otherwise it was evicted again, and needs its stub
                        remove_stub(fs, path)
    return done


def recall_or_raise(handle: Handle, base: int) -> None:
    """Recall a segment, and return once it is local or deleted. Otherwise raise `ObjectStoreError`.

    Also raises what `recall_segment` raises.
    """
    for _ in range(_TRIES):
        with contextlib.suppress(FileNotFoundError):  # the file was replaced during the download
            if recall_segment(handle, base):
                return
        if not is_remote(handle, base):
            return
    path = segment_stem(handle.folder, base) + LOG_SUFFIX
    found = _read_stub(handle, path)
    if found is not None:
        raise ObjectStoreError(
            found[0].url, found[0].key, f"{path} could not be recalled: it changed {_TRIES} times meanwhile; try again"
        )


def _read_stub(handle: Handle, path: str) -> tuple[Stub, int] | None:
    """Return the stub of an evicted segment; None if the segment is local or was deleted."""
    with contextlib.suppress(FileNotFoundError):
        return read_stub(handle.fs, path)
    return None


def _has_stamp(handle: Handle, path: str, stamp: Stamp) -> bool:
    """Return whether the file at ``path`` still has this stamp, and so is unchanged."""
    try:
        found = handle.fs.stat(path)
    except FileNotFoundError:
        return False
    return (found.st_ino, found.st_size, found.st_mtime_ns) == stamp


def _is_stub_unchanged(handle: Handle, path: str, stub: Stub) -> bool:
    """Return whether the stub file still has the content of ``stub``. Compaction deletes it with the segment."""
    with contextlib.suppress(FileNotFoundError):
        return read_file(handle.fs, stub_path(path)) == encode_stub(stub)
    return False
