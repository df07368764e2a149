"""Replace a file unless another process has replaced it, without a lock that a stopped process could keep.

    manifest.json                                   the file
    manifest.json.lock/<number>.<nonce>.tmp         its next content, as one process wants it
    manifest.json.lock/<number>.lock                a claim: at most one process has the turn with this number

    stage     write and sync the next content, for the turn after the last one
    claim     create the claim, exclusively. If a higher claim exists, this process was stopped meanwhile: start again
    revoke    delete what processes with lower claims have staged
    compare   read the file
    commit    rename the staged content to the file. If it is gone, a later turn has revoked it: start again

A process that is stopped, killed or cut off anywhere keeps no other process from its turn. When it continues, it cannot
commit: its content was staged before its claim, so each later turn has deleted it before it read the file. The file
system must create files exclusively and rename them atomically, as NFS does; it needs no locks.

Releases that locked the file ``manifest.json.lock`` cannot write to a folder with that name. Where the file exists,
such a release may run, and `swap_file` uses the lock, too.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable
from typing import Final

from segmentlog.format.file_names import FILE_LOCK_SUFFIX, TEMPORARY_SUFFIX
from segmentlog.storage.file_locks import ProcessLock
from segmentlog.storage.file_operations import write_new_file
from segmentlog.storage.fs import FileSystem, opened
from segmentlog.storage.interrupt_check import failures_ignored

PATIENCE_S: Final = 2.0
"""A turn that takes longer than this is revoked. A turn takes milliseconds; one of a killed process never ends."""
_SHORTEST_S: Final = 0.0005
_LONGEST_S: Final = 0.02
_DIGITS: Final = 20


def swap_file(fs: FileSystem, path: str, data: bytes, is_expected: Callable[[], bool]) -> bool:
    """Replace the file at ``path`` durably if ``is_expected`` returns true. Return False if it does not.

    ``is_expected`` reads the file; it may be called several times. Raise `DiskFull`, `DiskFailed`, OSError.
    """
    folder = _turns(fs, path)
    is_swapped = _swap_in_turn(fs, path, folder, data, is_expected) if folder else _swap_locked(
        fs, path, data, is_expected
    )  # fmt: skip
    if is_swapped:
        fs.sync_folder(os.path.dirname(path))
    return is_swapped


def remove_file(fs: FileSystem, path: str) -> None:
    """Delete the file at ``path``, and what `swap_file` keeps for it. Raise FileNotFoundError, OSError."""
    turns = path + FILE_LOCK_SUFFIX
    if not fs.exists(turns):
        fs.unlink(path)
    elif not fs.is_folder(turns):
        # Only the holder may remove the file: waiting processes then lock the file that replaces it.
        with ProcessLock(fs, turns).hold():
            fs.unlink(turns)
        fs.unlink(path)
    else:
        own = _number(os.path.basename(_take_turn(fs, turns, b"")))
        try:
            fs.unlink(path)
        finally:
            with failures_ignored():  # another process may have taken the next turn: then the folder stays
                for name in fs.listdir(turns):
                    if _number(name) <= own:
                        fs.unlink(f"{turns}/{name}")
                fs.rmdir(turns)


def _turns(fs: FileSystem, path: str) -> str:
    """Return the folder with the turns, which the first call creates; "" if a file has its name."""
    folder = path + FILE_LOCK_SUFFIX
    try:
        fs.mkdir(folder)
    except FileExistsError:
        return folder if fs.is_folder(folder) else ""
    fs.sync_folder(os.path.dirname(path))
    return folder


def _swap_locked(fs: FileSystem, path: str, data: bytes, is_expected: Callable[[], bool]) -> bool:
    """Replace the file while no other process holds the lock. The lock is held only to compare and rename."""
    staged = f"{path}.{secrets.token_hex(8)}{TEMPORARY_SUFFIX}"
    is_swapped = False
    try:
        write_new_file(fs, staged, data)
        with ProcessLock(fs, path + FILE_LOCK_SUFFIX).hold():
            if is_expected():
                fs.rename(staged, path)
                is_swapped = True
    finally:
        if not is_swapped:
            with failures_ignored():
                fs.unlink(staged)
    return is_swapped


def _swap_in_turn(fs: FileSystem, path: str, folder: str, data: bytes, is_expected: Callable[[], bool]) -> bool:
    while True:
        staged = _take_turn(fs, folder, data)
        if not is_expected():
            with contextlib.suppress(FileNotFoundError):
                fs.unlink(staged)
            return False
        with contextlib.suppress(FileNotFoundError):
            fs.rename(staged, path)
            return True


def _take_turn(fs: FileSystem, folder: str, data: bytes) -> str:
    """Stage ``data``, claim the next turn, and revoke all earlier ones. Return the path of the staged content."""
    while True:
        number = _wait_for_turn(fs, folder) + 1
        staged = f"{folder}/{number:0{_DIGITS}}.{secrets.token_hex(8)}{TEMPORARY_SUFFIX}"
        has_turn = False
        try:
            write_new_file(fs, staged, data)
            has_turn = _claim(fs, folder, number)
        finally:
            if not has_turn:
                with failures_ignored():
                    fs.unlink(staged)
        if has_turn:
            return staged


def _claim(fs: FileSystem, folder: str, number: int) -> bool:
    """Claim the turn with this number, and revoke all earlier turns. Return False if another process has the turn."""
    claim = f"{folder}/{number:0{_DIGITS}}{FILE_LOCK_SUFFIX}"
    try:
        with opened(fs, claim, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC):
            pass
    except FileExistsError:
        return False
    names = fs.listdir(folder)
    if max(map(_claimed, names), default=0) > number:  # this process was stopped after it had chosen the number
        with contextlib.suppress(FileNotFoundError):
            fs.unlink(claim)
        return False
    for name in names:
        if _number(name) < number:
            with contextlib.suppress(FileNotFoundError):
                fs.unlink(f"{folder}/{name}")
    return True


def _wait_for_turn(fs: FileSystem, folder: str) -> int:
    """Wait until the last turn has ended, for at most `PATIENCE_S`. Return its number; 0 if there was none."""
    ends_s = time.monotonic() + PATIENCE_S
    pause_s = _SHORTEST_S
    waited_for = None
    while True:
        names = fs.listdir(folder)
        last = max(map(_claimed, names), default=0)
        if not any(_number(name) == last and not _claimed(name) for name in names):
            return last
        if waited_for != last:
            waited_for, ends_s = last, time.monotonic() + PATIENCE_S
        if time.monotonic() >= ends_s:
            return last
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_S)


def _number(name: str) -> int:
    """Return the number in the name of a claim or of a staged content; 0 for other names."""
    number = name.partition(".")[0]
    return int(number) if number.isdecimal() else 0


def _claimed(name: str) -> int:
    """Return the number of a claim; 0 for other names."""
    return _number(name) if name.endswith(FILE_LOCK_SUFFIX) else 0
