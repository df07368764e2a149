"""The folder in which a job's tasks write: which run of the job counts, and what the others left behind.

    @staging/<job>/run-<number>-<name>              who works on the job: the highest number is the one that counts
    @staging/<job>/<run>-<task>-<random>.batches    finished batches, as `format.batch` has them, in no log yet

A task that is done again writes another file; who publishes says which files count. A run that is
new takes the next number, which fences the older ones and lets it remove what they left behind.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import time
from collections.abc import Iterator
from typing import Final

from segmentlog.errors import ProducerFenced
from segmentlog.format.file_names import STAGING_FOLDER, folder_name_of
from segmentlog.staging.staged_files import Staged
from segmentlog.storage.fork_safety import opened_lockable
from segmentlog.storage.fs import FileSystem
from segmentlog.storage.interrupt_check import failures_ignored
from segmentlog.storage.interrupt_safe import EXCLUSIVE, interrupt_safe_context

STAGED_SUFFIX: Final = ".batches"
ABANDONED_AFTER_S: Final = 7 * 24 * 3600
"""Files of a job that nobody wrote to for so long are those of one that died."""
_RUN_PREFIX: Final = "run-"
_REMOVE_ATTEMPTS: Final = 5


class StagingFolder:
    """The folder in which a job's tasks write; of every worker that sees the store's folder."""

    def __init__(self, fs: FileSystem, store_path: str, job: str) -> None:
        self._fs = fs
        self._job = job
        self.path = f"{store_path}/{STAGING_FOLDER}/{folder_name_of(job, 'job')}"

    def claim(self, run: str) -> int:
        """The number of a run, which becomes the newest when it is new: the older ones' files are removed then.

        Raises `ProducerFenced` when another run has become the newest since.
        """
        self.make()
        run = folder_name_of(run, "run")  # as it is read back from the folder
        with self._locked():
            known = self._runs()
            if run not in known:
                self._remove_files()
                known[run] = max(known.values(), default=0) + 1
                self._write(f"{_RUN_PREFIX}{known[run]:010d}-{run}")
            self._check(run, known)
            return known[run]

    def check(self, run: str) -> None:
        """Raise `ProducerFenced` when another run has become the newest."""
        self._check(folder_name_of(run, "run"), self._runs())

    def _check(self, run: str, known: dict[str, int]) -> None:
        newest = max(known.values(), default=0)
        mine = known.get(run, 0)
        if mine < newest:
            raise ProducerFenced(self._job, mine, newest, "another run of the same job has started since")

    def file_for(self, run_number: int, task: int) -> str:
        """A path that no other attempt of the task uses."""
        return f"{self.path}/{run_number}-{task}-{secrets.token_hex(8)}{STAGED_SUFFIX}"

    def discard(self, staged: Staged) -> None:
        """Remove what one task has staged."""
        with contextlib.suppress(FileNotFoundError):
            self._fs.unlink(staged.path)

    def clear(self, run: str | None = None) -> None:
        """Remove what a run has staged, and nothing that is a newer one's; None: all. Keeps who may stage."""
        with contextlib.suppress(FileNotFoundError):
            if run is None:
                self._remove_files()
            elif (number := self._runs().get(folder_name_of(run, "run"))) is not None:
                self._remove_files(f"{number}-")

    def remove(self) -> None:
        """Remove all of it: the job is done, or given up."""
        for _ in range(_REMOVE_ATTEMPTS):
            try:
                self._fs.remove_tree(self.path)
                return
            except FileNotFoundError:
                pass  # all of it, or a file that a task which was given up has just removed itself
            except OSError as error:
                if error.errno != errno.ENOTEMPTY:  # or such a task has just made one
                    raise

    def make(self) -> None:
        """Make it, unless it is there."""
        for folder in (os.path.dirname(self.path), self.path):
            with contextlib.suppress(FileExistsError):
                self._fs.mkdir(folder)

    def _runs(self) -> dict[str, int]:
        runs = {}
        for name in self._fs.listdir(self.path):
            if name.startswith(_RUN_PREFIX):
                number, _, run = name.removeprefix(_RUN_PREFIX).partition("-")
                runs[run] = int(number)
        return runs

    def _remove_files(self, prefix: str = "") -> None:
        for name in self._fs.listdir(self.path):
            if name.startswith(prefix) and name.endswith(STAGED_SUFFIX):
                with contextlib.suppress(FileNotFoundError):
                    self._fs.unlink(f"{self.path}/{name}")

    def _write(self, name: str) -> None:
        fd = self._fs.open(f"{self.path}/{name}", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._fs.close(fd)
        self._fs.sync_folder(self.path)

    @interrupt_safe_context
    def _locked(self) -> Iterator[None]:
        with opened_lockable(self._fs, self.path, os.O_RDONLY | os.O_DIRECTORY) as fd:
            self._fs.flock(fd, EXCLUSIVE)
            yield


def sweep_abandoned(fs: FileSystem, store_path: str, now_s: float | None = None) -> None:
    """Remove the staged files of jobs that died: those that nobody wrote to for `ABANDONED_AFTER_S`."""
    folder = f"{store_path}/{STAGING_FOLDER}"
    oldest = (time.time() if now_s is None else now_s) - ABANDONED_AFTER_S
    with contextlib.suppress(FileNotFoundError):
        for job in fs.listdir(folder):
            with failures_ignored():  # somebody else is at it
                names = fs.listdir(f"{folder}/{job}")
                if max((fs.stat(f"{folder}/{job}/{name}").st_mtime for name in names), default=oldest) > oldest:
                    continue
                if any(name.startswith(_RUN_PREFIX) for name in names):  # a query that may come back: so keep the fence
                    for name in names:
                        if name.endswith(STAGED_SUFFIX):
                            fs.unlink(f"{folder}/{job}/{name}")
                elif fs.stat(f"{folder}/{job}").st_mtime <= oldest:
                    fs.remove_tree(f"{folder}/{job}")
