"""Putting a compacted copy in the place of the segments it was made from, whole or not at all.

    B-E.cleaned     being written, or left by a process that died: it does not count
    B-E.swap        whole and durable: from here on it stands for every segment of [B, E)
    B.log           the copy, under its own name; the others of [B, E) are removed
    (no B-E.swap)   done

Each step is durable before the next one, and the name alone tells what is left to do: a
recovery, whoever compacts next, and whoever changes the log meanwhile complete a swap they
find. Readers take no notice: until a name changes they read the old records, then the new
ones, and where both stand in the folder the old ones only repeat what the copy holds.
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
    """Put the finished and fsynced copy ``base-end.cleaned`` in the place of the segments ``replaced``.

    False, with nothing changed, when those are not what they were in ``epoch``: trimmed,
    truncated or recovered meanwhile. The caller holds no lock.
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
        there = [found for found in list_segments(handle.fs, handle.folder) if base <= found < end]
        outdated = log.epoch != epoch or there != replaced or end > log.active_base_offset
        try:
            if outdated or handle.page.writing:
                handle.fs.unlink(cleaned)
                return False
            handle.fs.rename(cleaned, f"{handle.folder}/{copy_name(base, end, SWAP_SUFFIX)}")
        except FileNotFoundError:  # a recovery removed it
            return False
    handle.fs.sync_folder(handle.folder)
    _complete(handle, base, end, locked=False, index=index, size_bytes=size_bytes)
    return True


def finish_swaps(handle: Handle, *, recovering: bool = False) -> None:
    """Complete the swaps that a dead process began, or a live one is about to. The caller holds the append lock.

    ``recovering``: nobody reads, and no state page is believed yet; copies that do not count go, too.
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
    """Go from ``.swap`` to the end. Doing it again changes nothing."""
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
                    fs.unlink(swap)  # where both names are links to one file already, a rename does nothing
        except FileNotFoundError:
            return  # somebody else has completed it
        remove_stub(fs, stem + LOG_SUFFIX)
        if index is not None:  # before readers look at the folder anew
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
        fs.sync_folder(folder)  # or it could come back, and with it what the next pass has removed
