"""Replace segments by their compacted copy, completely or not at all.

    B-E.cleaned     the copy is being written, or was left by a process that died: it does not count
    B-E.swap        the copy is complete and durable: from now on it replaces every segment of [B, E)
    B.log           the copy has its own name; the other segments of [B, E) are removed
    (no B-E.swap)   done

Each step is durable before the next, and the file name alone shows which steps remain. A recovery, the next compaction
and the next change of the log complete a swap that they find. Readers need not know: until a name changes they read the
old records, then the new ones. While both exist, the old segments only repeat what the copy contains.
"""

from __future__ import annotations

import contextlib

from segmentlog.format.file_names import (
    CACHE_SUFFIXES,
    CLEANED_SUFFIX,
    LOG_SUFFIX,
    SWAP_SUFFIX,
    copy_name,
    parse_copy_name,
)
from segmentlog.log.handle import Handle
from segmentlog.log.segment_removal import retire_segment
from segmentlog.storage.file_operations import link_over
from segmentlog.storage.segment import list_segments, segment_stem
from segmentlog.storage.segment_index import SegmentIndex
from segmentlog.storage.segment_stub import remove_stub


def swap_in(
    handle: Handle, base: int, end: int, replaced: list[int], epoch: int, index: SegmentIndex, size_bytes: int
) -> bool:
    """Replace the segments ``replaced`` by the finished and synced copy ``base-end.cleaned``.

    Return False, with nothing changed, if those segments have changed since ``epoch``: trimmed, truncated or recovered.
    The caller holds no lock.
    """
    cleaned = f"{handle.folder}/{copy_name(base, end, CLEANED_SUFFIX)}"
    with handle.folder_locked():
        return _swap_in(handle, cleaned, base, end, replaced, epoch, index, size_bytes)


def _swap_in(
    handle: Handle,
    cleaned: str,
    base: int,
    end: int,
    replaced: list[int],
    epoch: int,
    index: SegmentIndex,
    size_bytes: int,
) -> bool:
    with handle.append_locked():
        handle.check_usable()
        log = handle.page.log.read()
        present = [found for found in list_segments(handle.fs, handle.folder) if base <= found < end]
        outdated = log.epoch != epoch or present != replaced or end > log.active_base_offset
        try:
            if outdated or handle.page.writing:
                handle.fs.unlink(cleaned)
                return False
            handle.fs.rename(cleaned, f"{handle.folder}/{copy_name(base, end, SWAP_SUFFIX)}")
        except FileNotFoundError:  # a recovery has removed the copy
            return False
    handle.fs.sync_folder(handle.folder)
    _complete(handle, base, end, locked=False, index=index, size_bytes=size_bytes)
    return True


def finish_swaps(handle: Handle, *, recovering: bool = False) -> None:
    """Complete the swaps that a dead or running process began. The caller holds the append lock.

    With ``recovering``, incomplete copies are deleted, too. Only a recovery may do that: no reader exists yet, and no
    page is trusted.
    """
    for name in handle.fs.listdir(handle.folder):
        if (offsets := parse_copy_name(name)) is None:
            continue
        if name.endswith(SWAP_SUFFIX):
            _complete(handle, *offsets, locked=True, recovering=recovering)
        elif recovering:
            with contextlib.suppress(FileNotFoundError):
                handle.fs.unlink(f"{handle.folder}/{name}")


def _complete(
    handle: Handle,
    base: int,
    end: int,
    *,
    locked: bool,
    recovering: bool = False,
    index: SegmentIndex | None = None,
    size_bytes: int = 0,
) -> None:
    """Complete a swap from its ``.swap`` file. Doing it again changes nothing."""
    fs, folder = handle.fs, handle.folder
    swap = f"{folder}/{copy_name(base, end, SWAP_SUFFIX)}"
    stem = segment_stem(folder, base)
    with contextlib.nullcontext() if locked else handle.append_locked():
        others = [found for found in list_segments(fs, folder) if base < found < end]
        for suffix in CACHE_SUFFIXES:
            with contextlib.suppress(FileNotFoundError):
                fs.unlink(stem + suffix)
        try:
            if others:
                link_over(fs, swap, stem + LOG_SUFFIX)
            else:
                fs.replace(swap, stem + LOG_SUFFIX)
                with contextlib.suppress(FileNotFoundError):
                    fs.unlink(swap)  # a rename between two links to the same file does nothing
        except FileNotFoundError:
            return  # another process has completed it
        remove_stub(fs, stem + LOG_SUFFIX)
        if index is not None:  # before readers list the folder again
            index.writable = True
            index.close(end, size_bytes)
        if not recovering:
            handle.ledger.count_generation()
    fs.sync_folder(folder)
    if not others:
        return
    with contextlib.nullcontext() if locked else handle.append_locked():
        for other in others:
            retire_segment(handle, other)
        if not recovering:
            handle.ledger.count_generation()
    fs.sync_folder(folder)
    with contextlib.suppress(FileNotFoundError):
        fs.unlink(swap)
        fs.sync_folder(folder)  # else a crash could bring the file back, with records that the next pass removed
