"""Collect the evidence from which `policy.state_page_trust` decides whether a partition's state page can be trusted."""

from __future__ import annotations

import os

from segmentlog.format.batch import HEADER_SIZE, claimed_header, has_valid_checksum
from segmentlog.format.file_names import CHECKPOINT_FILE, LOG_SUFFIX
from segmentlog.policy.state_page_trust import Evidence, distrust
from segmentlog.storage.checkpoint_file import CheckpointFile
from segmentlog.storage.fs import FileSystem
from segmentlog.storage.segment import segment_stem
from segmentlog.storage.state_page import REWRITING, LogState, StateDamaged, StatePage

_ATTEMPTS = 10


def distrust_reason(fs: FileSystem, folder: str, page: StatePage, fd: int) -> str | None:
    """Return why the state page of the partition in ``folder``, open as ``fd``, cannot be trusted; None if it can.

    While other processes append, a caller without a lock may get a reason although the page can be trusted. Under the
    append lock the answer is exact. Raises OSError for files that cannot be read.
    """
    for _ in range(_ATTEMPTS):
        try:
            log = page.log.read()
            page.sync.read()
        except StateDamaged:
            return distrust(_NOTHING)
        why = distrust(_evidence(fs, folder, page, fd, log))
        if why is None or page.log.read() is log:
            break
        # Other processes appended, rolled or closed between reading the page and reading the files.
    return why


_NOTHING = Evidence(False, False, False, False, 0, 0, None, 0, 0, 0, False)


def _evidence(fs: FileSystem, folder: str, page: StatePage, fd: int, log: LogState) -> Evidence:
    is_about = page.is_about(fs.boot_id(), fs.stat(folder))
    same_memory = is_about and page.has_stayed_in_memory(fs, fd)
    if not same_memory:
        return Evidence(is_about, False, False, False, 0, 0, None, 0, 0, 0, False)
    in_rewrite = bool(page.failed) or page.writing == REWRITING
    is_appending = bool(page.writing)
    file_bytes, after_end = _read_header_at(
        fs, segment_stem(folder, log.active_base_offset) + LOG_SUFFIX, log.end_position
    )
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
        continues=_begins_with_batch(after_end, log.log_end_offset),
    )


def _read_header_at(fs: FileSystem, path: str, position: int) -> tuple[int, bytes]:
    """Return (file length or -1 if the file is missing, up to a header's length of bytes at ``position``)."""
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
    return header is not None and header.base_offset == base_offset and has_valid_checksum(header)
