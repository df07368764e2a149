"""Collecting what `policy.state_page_trust` judges: whether the state page of a partition is to be believed."""

from __future__ import annotations

import os

from segmentlog.format.batch import HEADER_SIZE, claimed_header, header_holds
from segmentlog.format.file_names import CHECKPOINT_FILE, LOG_SUFFIX
from segmentlog.policy.state_page_trust import Evidence, doubt
from segmentlog.storage.checkpoint_file import CheckpointFile
from segmentlog.storage.fs import FileSystem
from segmentlog.storage.segment import segment_stem
from segmentlog.storage.state_page import REWRITING, LogState, StateDamaged, StatePage

_ATTEMPTS = 10


def distrust_reason(fs: FileSystem, folder: str, page: StatePage, fd: int) -> str | None:
    """Why the page of the partition in ``folder``, its file open as ``fd``, is not believed; None when it is.

    Without a lock it may doubt a page while others are at work; under the append lock it does not.
    Raises OSError for files that cannot be read.
    """
    for _ in range(_ATTEMPTS):
        try:
            log = page.log.read()
            page.sync.read()
        except StateDamaged:
            return doubt(_NOTHING)
        why = doubt(_evidence(fs, folder, page, fd, log))
        if why is None or page.log.read() is log:
            break
        # Others appended, rolled or closed between the look at the page and the one at the files.
    return why


_NOTHING = Evidence(False, False, False, False, 0, 0, None, 0, 0, 0, False)


def _evidence(fs: FileSystem, folder: str, page: StatePage, fd: int, log: LogState) -> Evidence:
    is_about = page.is_about(fs.boot_id(), fs.stat(folder))
    same_memory = is_about and page.has_stayed_in_memory(fs, fd)
    if not same_memory:
        return Evidence(is_about, False, False, False, 0, 0, None, 0, 0, 0, False)
    in_rewrite = bool(page.failed) or page.writing == REWRITING
    is_appending = bool(page.writing)
    file_bytes, behind = _look_behind(fs, segment_stem(folder, log.active_base_offset) + LOG_SUFFIX, log.end_position)
    checkpoint, _ = CheckpointFile(fs, f"{folder}/{CHECKPOINT_FILE}").read()
    return Evidence(
        is_about=is_about,
        same_memory=same_memory,
        in_rewrite=in_rewrite,
        is_appending=is_appending or bool(page.writing),
        epoch=log.epoch,
        offset_ceiling=log.offset_ceiling,
        checkpoint_epoch=None if checkpoint is None else checkpoint.epoch,
        checkpoint_ceiling=0 if checkpoint is None else checkpoint.offset_ceiling,
        end_position=log.end_position,
        file_bytes=file_bytes,
        goes_on=_begins_with_batch(behind, log.log_end_offset),
    )


def _look_behind(fs: FileSystem, path: str, position: int) -> tuple[int, bytes]:
    """(length of a file, -1 when it is missing; what stands at ``position``, up to the length of a header)."""
    try:
        fd = fs.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return -1, b""
    try:
        return fs.fstat(fd).st_size, fs.pread(fd, HEADER_SIZE, position)
    finally:
        fs.close(fd)


def _begins_with_batch(data: bytes, base_offset: int) -> bool:
    header = claimed_header(memoryview(data), 0)
    return header is not None and header.base_offset == base_offset and header_holds(header)
