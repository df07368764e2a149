"""The checkpoint file of a partition: two slots, written alternately, fsynced before they count."""

from __future__ import annotations

import os

from segmentlog.errors import DiskFull
from segmentlog.format.checkpoint import SLOT_SIZE, Checkpoint, decode_checkpoint, encode_slot
from segmentlog.storage.fs import NO_ROOM, FileSystem, read_file, replace_file, write_all
from segmentlog.storage.locks import opened


class CheckpointFile:
    """Reads and replaces the checkpoint. Writers hold the partition's sync lock."""

    def __init__(self, fs: FileSystem, path: str) -> None:
        self._fs = fs
        self.path = path

    def read(self) -> tuple[Checkpoint | None, bool]:
        """(checkpoint, damaged); None when there is none or neither slot is valid."""
        checkpoint, damaged, _, _ = self._read()
        return checkpoint, damaged

    def write(self, checkpoint: Checkpoint) -> None:
        """Returns once the checkpoint is durable. Raises OSError (DiskFull without room); then the old one counts."""
        current, damaged, sequence, slot_size = self._read()
        data = encode_slot(checkpoint, sequence + 1)
        if current is None or damaged or len(data) > slot_size:
            # A new file, both slots alike: nothing older is left that could ever be believed.
            while len(data) > slot_size:
                slot_size *= 2
            slot = data.ljust(slot_size, b"\0")
            replace_file(self._fs, self.path, slot + slot)
            return
        try:
            with opened(self._fs, self.path, os.O_RDWR | os.O_CLOEXEC) as fd:
                write_all(self._fs, fd, [data.ljust(slot_size, b"\0")], (sequence + 1) % 2 * slot_size)
                self._fs.fdatasync(fd)
        except OSError as error:
            if error.errno in NO_ROOM:
                raise DiskFull(self.path, slot_size) from error
            raise

    def _read(self) -> tuple[Checkpoint | None, bool, int, int]:
        try:
            data = read_file(self._fs, self.path)
        except FileNotFoundError:
            return None, False, 0, SLOT_SIZE
        sequence, checkpoint, damaged = decode_checkpoint(data)
        if checkpoint is None:
            return None, True, 0, SLOT_SIZE
        return checkpoint, damaged, sequence, len(data) // 2
