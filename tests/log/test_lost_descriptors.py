"""After an error at any call, every open descriptor has an owner."""

from __future__ import annotations

import errno
import os

import pytest
from logs import FakeClock

from segmentlog.config import TopicConfig
from segmentlog.errors import SegmentlogError
from segmentlog.log.partition import Partition
from segmentlog.testing import SimulatedDisk
from segmentlog.testing.process import SimulatedProcess

FOLDER = "/t/0"
STEP = int(os.environ.get("SEGMENTLOG_DESCRIPTOR_STEP", "5"))
"""Every how many calls one is made to fail; 1 takes each of them."""
CONFIG = {"segment_records": 4, "index_interval_bytes": 1, "cleanup_policy": "compact,delete", "fsync": "3records"}


def _work(process: SimulatedProcess) -> None:
    """Do everything that opens files, continue after errors, and close all at the end."""
    config = TopicConfig.from_mapping(CONFIG)
    log: Partition | None = None

    def opened() -> Partition:
        return Partition(FOLDER, "t", 0, lambda: config, fs=process, clock=FakeClock())

    def fill(log: Partition) -> None:
        for number in range(3):
            log.append([b"%d" % number] * 3, [b"a", b"b", b"c"])

    for step in (
        fill, fill, lambda log: log.flush(), lambda log: list(log.read(log.log_start_offset)), lambda log: log.roll(),
        lambda log: log.compact(), lambda log: log.trim(6), lambda log: log.truncate(14), fill,
        lambda log: log.handle.close_if_idle(), fill, lambda log: log.offset_for_timestamp(0),
        lambda log: log.segments(),
    ):  # fmt: skip
        try:
            log = log or opened()
            step(log)
        except (SegmentlogError, OSError):
            continue
    try:
        if log is not None:
            log.close()
    except (SegmentlogError, OSError):
        pass


def _trial(failing_call: int, error: int) -> SimulatedProcess:
    disk = SimulatedDisk()
    disk.make_folders(FOLDER)
    process = disk.process()
    process.fail_at = (failing_call, error)
    _work(process)
    return process


@pytest.mark.long
@pytest.mark.parametrize(("first", "error"), [(1, "EIO"), (2, "EMFILE"), (3, "ENOSPC")])
def test_an_error_at_any_call_loses_no_descriptor(first: int, error: str) -> None:
    """Once the partition is closed, no descriptor of it is open, also if the close failed."""
    calls = _trial(0, errno.EIO).calls
    assert calls > 200
    lost = []
    for call in range(first, calls + 1, STEP):
        process = _trial(call, getattr(errno, error))
        # A real `close` releases the descriptor even when it fails; the fake one does not.
        if process._fds and process.failed != "close":
            lost.append(f"call {call} ({process.failed}) fails with {error}")
    assert not lost
