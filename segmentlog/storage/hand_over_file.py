"""Read and write the file ``@hand-over`` of a store; see `format.hand_over`."""

from __future__ import annotations

import contextlib

from segmentlog.format.file_names import FILE_LOCK_SUFFIX, HAND_OVER_FILE
from segmentlog.format.hand_over import HandOver, decode_hand_over, encode_hand_over
from segmentlog.storage.file_locks import ProcessLock
from segmentlog.storage.file_operations import read_file, replace_file
from segmentlog.storage.fs import FileSystem


def read_hand_over(fs: FileSystem, path: str) -> HandOver | None:
    """Return the content of the file in the store at ``path``; None without the file."""
    try:
        return decode_hand_over(read_file(fs, f"{path}/{HAND_OVER_FILE}"))
    except (FileNotFoundError, NotADirectoryError):
        return None


def write_hand_over(fs: FileSystem, path: str, hand_over: HandOver) -> None:
    """Write the file durably. Raise `DiskFull`, OSError."""
    replace_file(fs, f"{path}/{HAND_OVER_FILE}", encode_hand_over(hand_over))


def change_hand_over(fs: FileSystem, path: str, expected: HandOver | None, changed: HandOver | None) -> bool:
    """Replace the file if it still contains ``expected``. Return whether it was replaced. None stands for no file.

    The shipper and a process that gives a hand-over up may change it at the same time.
    """
    with ProcessLock(fs, f"{path}/{HAND_OVER_FILE}{FILE_LOCK_SUFFIX}").hold():
        if read_hand_over(fs, path) != expected:
            return False
        if changed is None:
            remove_hand_over(fs, path)
        else:
            write_hand_over(fs, path, changed)
        return True


def remove_hand_over(fs: FileSystem, path: str) -> None:
    """Remove the file durably, if it exists."""
    with contextlib.suppress(FileNotFoundError):
        fs.unlink(f"{path}/{HAND_OVER_FILE}")
        fs.sync_folder(path)
