"""A segment of an open log leaves this machine, or comes back to it: by `storage.segment_stub`, under the append lock.

That lock is held by whoever replaces segments, and only while names change: the object store is never waited for
under it. Readers are told by a new generation, and give back what they have mapped of the old file.
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
"""Meanwhile somebody else may have replaced the segment, or made its stub anew: for moments."""


def is_remote(handle: Handle, base: int) -> bool:
    """Whether the bytes of a segment lie in an object store alone; also where its stub is damaged."""
    try:
        with handle.folder_locked():
            return read_stub(handle.fs, segment_stem(handle.folder, base) + LOG_SUFFIX) is not None
    except FileNotFoundError:
        return False
    except CorruptBatch:
        return True


def evict(handle: Handle, base: int, stamp: Stamp, stub: Stub) -> bool:
    """Have a sealed segment lie in the object store alone; False, with nothing changed, if it is another file by now.

    ``stamp`` is that of the file whose bytes the stub tells of. Only below the checkpoint's recovery segment: a
    recovery reads what lies above. Raises `DiskFull`, `StoreFenced`, OSError.
    """
    fs, path = handle.fs, segment_stem(handle.folder, base) + LOG_SUFFIX
    with handle.translating_errors("nothing was changed"), handle.folder_locked():
        if not _is(handle, path, stamp):
            return False
        write_stub(fs, path, stub)
        done = False
        with prepared_hole(fs, path, stub.size_bytes, stamp[2]) as hole, handle.append_locked():
            handle.check_appendable()
            is_settled = not handle.page.writing and base < handle.ledger.last_checkpoint().recovery_segment
            if is_settled and _is(handle, path, stamp) and _stands(handle, path, stub):
                fs.replace(hole, path)
                handle.ledger.count_generation()
                done = True
        if done:
            fs.sync_folder(handle.folder)
        elif _read_stub(handle, path) is None:
            remove_stub(fs, path)
    return done


def bring_back(handle: Handle, base: int) -> bool:
    """Have the bytes of a segment here again; False if they are, or if it is gone. Durable when it returns.

    Raises `ObjectStoreError`, `SegmentGone`, `DiskFull`, OSError.
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
        ranges.need(0, stub.size_bytes)  # that may take long: nobody who would rename the topic waits for it
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
                    if _read_stub(handle, path) is None:  # it has not left again since: then it is that one's
                        remove_stub(fs, path)
    return done


def insist(handle: Handle, base: int) -> None:
    """Have the bytes of a segment here, or have it gone, when this returns. Raises as `bring_back`."""
    for _ in range(_TRIES):
        with contextlib.suppress(FileNotFoundError):  # of a file that was replaced while it came
            if bring_back(handle, base):
                return
        if not is_remote(handle, base):
            return
    path = segment_stem(handle.folder, base) + LOG_SUFFIX
    found = _read_stub(handle, path)
    if found is not None:
        raise ObjectStoreError(
            found[0].url, found[0].key, f"{path} lies there alone still, and did not come; try again"
        )


def _read_stub(handle: Handle, path: str) -> tuple[Stub, int] | None:
    """`read_stub`; None for a log that is gone."""
    with contextlib.suppress(FileNotFoundError):
        return read_stub(handle.fs, path)
    return None


def _is(handle: Handle, path: str, stamp: Stamp) -> bool:
    """Whether a file is the one with that stamp still."""
    try:
        found = handle.fs.stat(path)
    except FileNotFoundError:
        return False
    return (found.st_ino, found.st_size, found.st_mtime_ns) == stamp


def _stands(handle: Handle, path: str, stub: Stub) -> bool:
    """Whether the stub lies there as it was written: a compaction that replaced the log has removed it."""
    with contextlib.suppress(FileNotFoundError):
        return read_file(handle.fs, stub_path(path)) == encode_stub(stub)
    return False
