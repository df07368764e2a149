"""The checkpoint file of a partition: two slots, written alternately, each valid only once it is synced."""

from __future__ import annotations

import os

from segmentlog.errors import DiskFull
from segmentlog.format.checkpoint import SLOT_SIZE, Checkpoint, decode_checkpoint, encode_slot
from segmentlog.storage.file_operations import read_file, replace_file, write_all
from segmentlog.storage.fs import LOCAL_ERRORS, NO_ROOM, DiskFailed, FileSystem, opened
from segmentlog.storage.interrupt_check import failures_ignored


class CheckpointFile:
    """Reads and replaces the checkpoint. A writer must hold the partition's sync lock."""

    def __init__(self, fs: FileSystem, path: str) -> None:
        self._fs = fs
        self.path = path
        self.known: Checkpoint | None = None
        """The checkpoint that this process read or wrote last."""

    def read(self) -> tuple[Checkpoint | None, bool]:
        """Return (checkpoint, whether a slot is damaged); the checkpoint is None if no slot is valid."""
        checkpoint, damaged, _, _ = self._read()
        if checkpoint is not None:
            self.known = checkpoint
        return checkpoint, damaged

    def write(self, checkpoint: Checkpoint) -> None:
        """Replace the checkpoint durably.

        Raises OSError (`DiskFull` without room): the old checkpoint is still valid. Raises `DiskFailed`: either
        checkpoint may be valid.
        """
        self._write(checkpoint)
        self.known = checkpoint

    def _write(self, checkpoint: Checkpoint) -> None:
        current, damaged, sequence, slot_size = self._read()
        data = encode_slot(checkpoint, sequence + 1)
        if current is None or damaged or len(data) > slot_size:
            # Write a new file with the new checkpoint in both slots, so that the file contains no older checkpoint.
            while len(data) > slot_size:
                slot_size *= 2
            slot = data.ljust(slot_size, b"\0")
            replace_file(self._fs, self.path, slot + slot)
            return
        with opened(self._fs, self.path, os.O_RDWR | os.O_CLOEXEC) as fd:
            self._write_slot(fd, data.ljust(slot_size, b"\0"), sequence + 1)

    def _write_slot(self, fd: int, data: bytes, sequence: int) -> None:
        position = sequence % 2 * len(data)
        before = self._fs.pread(fd, len(data), position)
        is_written = False
        try:
            write_all(self._fs, fd, [data], position)
            is_written = True
            self._fs.fdatasync(fd)
        except OSError as error:
            self._restore_slot(fd, before, position, sequence, error)
            if error.errno in NO_ROOM:
                raise DiskFull(self.path, len(data)) from error
            if is_written or error.errno not in LOCAL_ERRORS:
                raise DiskFailed.of(error, self.path) from error
            raise

    def _restore_slot(self, fd: int, before: bytes, position: int, sequence: int, error: OSError) -> None:
        """Restore the bytes that the slot had before the write that raised ``error``.

        The new checkpoint may be in the page cache but not on the disk. It must not count as the newest checkpoint: the
        next write would then overwrite the only slot that is on the disk. A half-written slot is not valid and may
        stay.
        """
        try:
            found = self._fs.pread(fd, len(before), position)
            if found != before:
                write_all(self._fs, fd, [before], position)
        except OSError:
            with failures_ignored():
                if decode_checkpoint(self._fs.pread(fd, 2 * len(before), 0))[0] != sequence:
                    return
            raise DiskFailed.of(error, self.path) from error

    def _read(self) -> tuple[Checkpoint | None, bool, int, int]:
        try:
            data = read_file(self._fs, self.path)
        except FileNotFoundError:
            return None, False, 0, SLOT_SIZE
        sequence, checkpoint, damaged = decode_checkpoint(data)
        if checkpoint is None:
            return None, True, 0, SLOT_SIZE
        return checkpoint, damaged, sequence, len(data) // 2
