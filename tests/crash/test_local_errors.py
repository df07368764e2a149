"""An error of one process does not fail the disk: a file that it may not open, lock or map affects only that process.

Two processes have a log open. In one of them, each call that opens, maps, locks or looks fails in turn, with an error
of a limit or a permission. The other process is not affected, and the first continues with the same objects once the
cause is gone.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from typing import Any

import pytest
from logs import FakeClock, values_by_offset

from segmentlog.config import TopicConfig
from segmentlog.errors import PartitionFailed, ProcessLimitError, SegmentlogError
from segmentlog.log.partition import Partition
from segmentlog.testing import History
from segmentlog.testing.process import SimulatedProcess
from segmentlog.testing.simulated_disk import SimulatedDisk

pytestmark = pytest.mark.usefixtures("small_steps")

FOLDER = "/t/0"
LOOKS = ("open", "map_file", "flock", "fstat", "stat", "listdir", "pread", "fallocate", "mkdir", "unlink", "rename")
"""Calls whose failure changes no file. An unlock needs no resource, so it does not fail."""
WRITES = ("pwritev", "ftruncate", "link", "replace")
ERRORS = (errno.EMFILE, errno.ENFILE, errno.EACCES, errno.ENOMEM, errno.EINTR, errno.ENOLCK)
WRITE_ERRORS = (errno.EINTR, errno.EFBIG, errno.ENOMEM, errno.EPERM)
EVERY = int(os.environ.get("SEGMENTLOG_LOCAL_ERRORS_EVERY", "101"))
"""Each so manieth (call, error) is tried; 1 tries them all."""

_PADDING = b"." * 300


class TwoProcesses:
    """Two processes on one log; ``first`` is the one with the errors."""

    def __init__(self, policy: str) -> None:
        self.config = TopicConfig.from_mapping(
            {"fsync": policy, "segment_records": 9, "index_interval_bytes": 100, "file_delete_delay_ms": 0}
        )
        self.disk = SimulatedDisk()
        self.disk.make_folders(FOLDER)
        self.disk.find(FOLDER).sync()
        self.policy = policy
        self.history = History()
        self.sick, self.well = self.disk.process(), self.disk.process()
        self.seen = 0
        self.failing: tuple[int, int] | None = None
        """(number of the call, errno)."""
        self.failed = ""
        self.refused: list[BaseException] = []
        self._number = 0

    def open(self, process: SimulatedProcess) -> Partition:
        return Partition(FOLDER, "t", 0, lambda: self.config, fs=process, clock=FakeClock())

    def watch(self, methods: tuple[str, ...]) -> None:
        """Count the calls of these methods in the sick process, and let one of them fail."""
        for method in methods:
            setattr(self.sick, method, self._watched(method, getattr(self.sick, method)))

    def _watched(self, method: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if method == "flock" and args[1] & fcntl.LOCK_UN:
                return real(*args, **options)
            self.seen += 1
            if self.failing is not None and self.seen == self.failing[0]:
                self.failed = method
                raise OSError(self.failing[1], os.strerror(self.failing[1]))
            return real(*args, **options)

        return call

    def append(self, log: Partition, *, durable: bool = False, count: int = 1) -> None:
        self._number += 1
        values = [b"%d:%d" % (self._number, index) for index in range(count)] + [_PADDING]
        base_offset = log.append(values, ack="durable" if durable else None)
        self.history.acknowledged(base_offset, values, durable=durable or self.policy == "always")

    def work(self, first: Partition | None, second: Partition) -> Partition:
        """Do every kind of work in one process; after each step, append and read in the other one."""
        for step in range(13):
            for attempt in range(2):  # the second attempt meets no error
                number = self._number
                try:
                    if first is None:
                        first = self.open(self.sick)
                    self._step(first, step)
                    break
                except (SegmentlogError, OSError) as error:
                    self._check_told(error, step, attempt)
                    if self._number > number:
                        self._check_appended(error, second)
                    self.refused.append(error)
                    self.check_well(second)
            self.check_well(second)
        assert first is not None
        return first

    def _check_told(self, error: BaseException, step: int, attempt: int) -> None:
        assert not isinstance(error, PartitionFailed), error
        # Errors of the lock itself, and of a reader's files, are the system's.
        assert isinstance(error, ProcessLimitError) or self.failed == "flock" or step == 11, repr(error)
        assert attempt == 0, f"step {step} fails again: {error!r}"

    def _check_appended(self, error: BaseException, second: Partition) -> None:
        """Check that the error of an append says rightly whether its records exist."""
        if isinstance(error, ProcessLimitError):
            *_, last = (value or b"" for value in values_by_offset(second).values() if value != _PADDING)
            assert error.appended == last.startswith(b"%d:" % self._number), error

    def _step(self, log: Partition, step: int) -> None:
        if step == 5:
            log.flush()
        elif step == 7:
            log.roll()
        elif step == 9:
            log.trim(3)
        elif step == 10:
            offset = max(log.log_end_offset - 2, log.log_start_offset)
            self.history.withdrawn(offset)
            log.truncate(offset)
        elif step == 11:
            for batch in log.read(log.log_start_offset):
                for offset, value in zip(batch.offsets.tolist(), batch.values, strict=True):
                    self.history.handed("a reader", offset, value)
        else:
            self.append(log, durable=step in (2, 12), count=25 if step == 6 else 1)

    def close(self, log: Partition) -> None:
        """Close the log. It may raise that the log is not clean, but its descriptors are closed."""
        try:
            log.close()
        except ProcessLimitError as error:
            self.refused.append(error)
        except OSError:
            if self.failed != "flock":
                raise

    def check_well(self, second: Partition) -> None:
        """Check that the other process works normally."""
        assert second.failed is None
        self.append(second)
        self.append(second, durable=True)
        assert second.durable_offset == second.log_end_offset
        values_by_offset(second)

    def check_end(self, log: Partition) -> None:
        contents = values_by_offset(log)
        ranges = [(lost.base_offset, lost.end_offset) for lost in log.lost_ranges()]
        assert not self.history.check(contents, ranges, log.log_start_offset)


def _run(policy: str, methods: tuple[str, ...], failing: tuple[int, int] | None, *, opened: bool) -> TwoProcesses:
    two = TwoProcesses(policy)
    second = two.open(two.well)
    two.append(second, durable=True)
    first = two.open(two.sick) if opened else None
    two.watch(methods)
    two.failing = failing
    try:
        first = two.work(first, second)
        assert first.failed is None
        two.close(first)
        two.failing = None
        two.check_well(second)
        two.check_end(second)
        first = two.open(two.sick)
        two.check_end(first)
        first.close()
        second.close()
        assert not two.sick._fds, "descriptors are left open"
    except BaseException as error:
        raise AssertionError(f"call {failing} ({two.failed}) of policy {policy}, opened {opened}") from error
    return two


@pytest.mark.parametrize("opened", [True, False], ids=["open", "opening"])
@pytest.mark.parametrize("policy", ["always", "never"])
@pytest.mark.parametrize(("methods", "errors"), [(LOOKS, ERRORS), (WRITES, WRITE_ERRORS)], ids=["looks", "writes"])
def test_an_error_of_one_process_is_no_others_affair(
    methods: tuple[str, ...], errors: tuple[int, ...], policy: str, opened: bool
) -> None:
    """Any call fails once: at most one step raises, with the right error, and the same step then succeeds."""
    clean = _run(policy, methods, None, opened=opened)
    assert not clean.refused
    assert clean.seen > 40
    met: set[str] = set()
    refused = tried = 0
    every = EVERY if methods is LOOKS else 1 + EVERY // 10  # there are fewer of them
    for index in range(0, clean.seen * len(errors), every):
        call, number = 1 + index // len(errors), errors[(index + index // len(errors)) % len(errors)]
        two = _run(policy, methods, (call, number), opened=opened)
        met.add(two.failed)
        refused += bool(two.refused)
        tried += 1
    print(f"{tried} errors at {clean.seen} calls, {refused} of them were told")
    assert refused > 3
    assert met >= {"open", "flock", "stat"} if methods is LOOKS else met >= {"pwritev", "ftruncate"}
