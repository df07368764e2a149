"""The folder of a job: a file for each run of the job, and the files of batches that the tasks of a run write.

    @staging/<job>/run-<number>-<name>              a run of the job: the highest number is the current run
    @staging/<job>/<run>-<task>-<random>.batches    finished batches in the format of `format.batch`, not in a log yet

A task that is repeated writes a new file; the publishing process chooses the file of one attempt of each task. A new
run takes the next number, which fences older runs: they can no longer publish, so the new run can delete their files.
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
"""A job is dead if none of its files was written for this long."""
_RUN_PREFIX: Final = "run-"
_REMOVE_ATTEMPTS: Final = 5


class StagingFolder:
    """The folder that the tasks of a job write to. All workers must have access to the store's folder."""

    def __init__(self, fs: FileSystem, store_path: str, job: str) -> None:
        self._fs = fs
        self._job = job
        self.path = f"{store_path}/{STAGING_FOLDER}/{folder_name_of(job, 'job')}"

    def claim(self, run: str) -> int:
        """Return the number of a run. A new run becomes the current run, and the files of older runs are deleted.

        Raises `ProducerFenced` if another run has become the current run since.
        """
        self.create()
        run = folder_name_of(run, "run")  # `_runs` returns the names of files
        with self._locked():
            runs = self._runs()
            if run not in runs:
                self._remove_files()
                runs[run] = max(runs.values(), default=0) + 1
                self._write(f"{_RUN_PREFIX}{runs[run]:010d}-{run}")
            self._check(run, runs)
            return runs[run]

    def check(self, run: str) -> None:
        """Raise `ProducerFenced` if another run has become the current run."""
        self._check(folder_name_of(run, "run"), self._runs())

    def _check(self, run: str, runs: dict[str, int]) -> None:
        newest = max(runs.values(), default=0)
        mine = runs.get(run, 0)
        if mine < newest:
            raise ProducerFenced(self._job, mine, newest, "another run of the same job has started since")

    def file_for(self, run_number: int, task: int) -> str:
        """Return a path that no other attempt of the task uses."""
        return f"{self.path}/{run_number}-{task}-{secrets.token_hex(8)}{STAGED_SUFFIX}"

    def discard(self, staged: Staged) -> None:
        """Delete the file of one task."""
        with contextlib.suppress(FileNotFoundError):
            self._fs.unlink(staged.path)

    def clear(self, run: str | None = None) -> None:
        """Delete the batch files of a run, or of all runs for None. Keep the run files, which fence older runs."""
        with contextlib.suppress(FileNotFoundError):
            if run is None:
                self._remove_files()
            elif (number := self._runs().get(folder_name_of(run, "run"))) is not None:
                self._remove_files(f"{number}-")

    def remove(self) -> None:
        """Delete the whole folder after the job has finished or was abandoned."""
        for _ in range(_REMOVE_ATTEMPTS):
            try:
                self._fs.remove_tree(self.path)
                return
            except FileNotFoundError:
                pass  # the folder does not exist, or an abandoned task has just deleted the file itself
            except OSError as error:
                if error.errno != errno.ENOTEMPTY:  # ENOTEMPTY: such a task has just created a file
                    raise

    def create(self) -> None:
        """Create the folder unless it exists."""
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
    """Delete the staged files of dead jobs. A job is dead if none of its files was written for `ABANDONED_AFTER_S`."""
    folder = f"{store_path}/{STAGING_FOLDER}"
    oldest = (time.time() if now_s is None else now_s) - ABANDONED_AFTER_S
    with contextlib.suppress(FileNotFoundError):
        for job in fs.listdir(folder):
            with failures_ignored():  # another process may be deleting the same files
                names = fs.listdir(f"{folder}/{job}")
                if max((fs.stat(f"{folder}/{job}/{name}").st_mtime for name in names), default=oldest) > oldest:
                    continue
                # Keep run files: they fence old runs of a query.
                if any(name.startswith(_RUN_PREFIX) for name in names):
                    for name in names:
                        if name.endswith(STAGED_SUFFIX):
                            fs.unlink(f"{folder}/{job}/{name}")
                elif fs.stat(f"{folder}/{job}").st_mtime <= oldest:
                    fs.remove_tree(f"{folder}/{job}")
