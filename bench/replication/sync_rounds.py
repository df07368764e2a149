"""Sync many files that each got one small write: several ways, one round after the other."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

_WRITE = bytes(300)
_ALLOCATED = 64 << 10
_SYNC_FILE_RANGE_WRITE = 2


def measure_sync_rounds(folder: Path, count: int, rounds: int) -> dict[str, Any]:
    """Print and return, for each way, the median milliseconds of a round of writes and of its sync."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    pools = {threads: ThreadPoolExecutor(threads) for threads in (2, 4, 8, 16, 32)}
    folder_fd = os.open(folder, os.O_RDONLY)

    def start_writing(fd: int) -> None:
        libc.sync_file_range(fd, 0, 0, _SYNC_FILE_RANGE_WRITE)

    def each(fds: list[int]) -> None:
        for fd in fds:
            os.fdatasync(fd)

    def started_each(fds: list[int]) -> None:
        for fd in fds:
            start_writing(fd)
        each(fds)

    def pooled(threads: int) -> Callable[[list[int]], None]:
        def sync(fds: list[int]) -> None:
            for _ in pools[threads].map(os.fdatasync, fds):
                pass

        return sync

    def syncfs(fds: list[int]) -> None:
        if libc.syncfs(folder_fd):
            raise OSError(ctypes.get_errno(), "syncfs")

    ways: dict[str, Callable[[list[int]], None]] = {
        "one after the other": each,
        "writing started first": started_each,
        **{f"{threads} threads": pooled(threads) for threads in pools},
        "syncfs": syncfs,
    }
    found: dict[str, Any] = {}
    for active in (1, 10, 100, count):
        for is_zeroed in (False, True):
            fds = []
            for number in range(active):
                fd = os.open(folder / f"sync-{active}-{is_zeroed}-{number}", os.O_RDWR | os.O_CREAT)
                os.posix_fallocate(fd, 0, _ALLOCATED)
                if is_zeroed:
                    os.pwrite(fd, bytes(_ALLOCATED), 0)
                fds.append(fd)
            os.sync()
            times: dict[str, list[float]] = {name: [] for name in [*ways, "a journal"]}
            journal = os.open(folder / f"journal-{active}-{is_zeroed}", os.O_RDWR | os.O_CREAT)
            os.posix_fallocate(journal, 0, 64 << 20)
            if is_zeroed:
                os.pwrite(journal, bytes(64 << 20), 0)
            os.sync()
            at = journal_at = 0
            for _ in range(rounds + 1):
                for name, way in ways.items():
                    for fd in fds:
                        os.pwrite(fd, _WRITE, at)
                    began_s = time.perf_counter()
                    way(fds)
                    times[name].append((time.perf_counter() - began_s) * 1000)
                    at = (at + len(_WRITE)) % (_ALLOCATED - len(_WRITE))
                began_s = time.perf_counter()
                os.pwritev(journal, [_WRITE] * active, journal_at)
                os.fdatasync(journal)
                times["a journal"].append((time.perf_counter() - began_s) * 1000)
                journal_at = (journal_at + active * len(_WRITE)) % (32 << 20)
            for name, took in times.items():
                ordered = sorted(took[1:])
                label = f"{active} files, {'zeros' if is_zeroed else 'reserved'}, {name}"
                found[label] = [ordered[0], ordered[len(ordered) // 2], ordered[-1]]
                print(f"{label:50} {found[label][1]:9.3f} ms ({ordered[0]:.3f}-{ordered[-1]:.3f})", flush=True)
            for fd in [*fds, journal]:
                os.close(fd)
    return found
