"""Remove segment files: delete them, retire them for a while, or copy their bytes to quarantine."""

from __future__ import annotations

import contextlib

from segmentlog.format.file_names import (
    CACHE_SUFFIXES,
    DELETED_SUFFIX,
    LOG_SUFFIX,
    SEGMENT_SUFFIXES,
    SNAPSHOT_SUFFIX,
    deleted_name,
    deleted_since_ms,
    segment_name,
)
from segmentlog.log.handle import Handle
from segmentlog.storage.file_operations import read_file, replace_file
from segmentlog.storage.segment import segment_stem
from segmentlog.storage.segment_stub import remove_stub


def quarantine_tail(handle: Handle, base: int, position: int, reason: str) -> tuple[int, str | None]:
    """Copy the bytes from ``position`` on to quarantine, without trailing zeros. Return (byte count, file or None)."""
    fs = handle.fs
    data = read_file(fs, segment_stem(handle.folder, base) + LOG_SUFFIX, position).rstrip(b"\0")
    if not data:
        return 0, None
    with contextlib.suppress(FileExistsError):
        fs.mkdir(handle.quarantine)
    path = f"{handle.quarantine}/{segment_name(base)}-{position}-{handle.clock.now_ms()}.{reason}"
    replace_file(fs, path, data)
    return len(data), path


def remove_segment(handle: Handle, base: int) -> None:
    """Delete a segment's files, ignoring missing ones."""
    stem = segment_stem(handle.folder, base)
    for suffix in SEGMENT_SUFFIXES:
        with contextlib.suppress(FileNotFoundError):
            handle.fs.unlink(stem + suffix)


def retire_segment(handle: Handle, base: int) -> None:
    """Remove a segment from the log. Its file stays under another name for `file.delete.delay.ms`."""
    fs, stem = handle.fs, segment_stem(handle.folder, base)
    for suffix in (*CACHE_SUFFIXES, SNAPSHOT_SUFFIX):
        with contextlib.suppress(FileNotFoundError):
            fs.unlink(stem + suffix)
    with contextlib.suppress(FileNotFoundError):
        if handle.config.file_delete_delay_ms:
            fs.rename(stem + LOG_SUFFIX, f"{handle.folder}/{deleted_name(base, handle.clock.now_ms())}")
        else:
            fs.unlink(stem + LOG_SUFFIX)
    remove_stub(fs, stem + LOG_SUFFIX)


def sweep_deleted(handle: Handle, now_ms: int) -> int | None:
    """Delete retired files whose delay has passed. Return when the next delay ends, or None."""
    next_ms = None
    for name in handle.fs.listdir(handle.folder):
        if not name.endswith(DELETED_SUFFIX):
            continue
        due_ms = deleted_since_ms(name) + handle.config.file_delete_delay_ms
        if due_ms > now_ms:
            next_ms = due_ms if next_ms is None else min(next_ms, due_ms)
            continue
        with contextlib.suppress(FileNotFoundError):
            handle.fs.unlink(f"{handle.folder}/{name}")
    return next_ms
