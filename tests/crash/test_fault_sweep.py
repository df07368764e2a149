"""A call of a workload fails: every record that was acknowledged survives, and the log can be appended to.

SEGMENTLOG_FAULTS_EVERY  1: each call fails in turn; 4, the default: the first call of each method, and each fourth call
                         from a start that the fresh seed chooses
"""

from __future__ import annotations

import errno
import os
import random
from itertools import product
from typing import Any

import pytest
from logs import FakeClock, values_by_offset
from seeds import fresh_seed

from segmentlog.config import TopicConfig
from segmentlog.errors import DiskFull, PartitionFailed, SegmentlogError
from segmentlog.log.partition import Partition
from segmentlog.testing import History
from segmentlog.testing.fault_injection import Died
from segmentlog.testing.simulated_disk import SimulatedDisk

FOLDER = "/t/0"
EVERY = int(os.environ.get("SEGMENTLOG_FAULTS_EVERY", "4"))
pytestmark = pytest.mark.usefixtures("small_steps")

FAULTS = {
    "EIO": errno.EIO,
    "ENOSPC": errno.ENOSPC,
    "EINTR": errno.EINTR,
    "short write": "short",
    "half and full": "full",
    "death": "die",
}


class Workload:
    """Appends, syncs, rolls, trims and reads of one process, which records errors and continues."""

    def __init__(self, policy: str) -> None:
        self.config = TopicConfig.from_mapping({"fsync": policy, "segment_records": 9, "index_interval_bytes": 100})
        self.disk = SimulatedDisk()
        self.disk.make_folders(FOLDER)
        self.disk.find(FOLDER).sync()
        self.policy = policy
        self.process = self.disk.process()
        self.history = History()
        self.refused: list[BaseException] = []
        self._number = 0

    def opened(self, disk: SimulatedDisk | None = None) -> Partition:
        fs = self.process if disk is None else disk.process()
        return Partition(FOLDER, "t", 0, lambda: self.config, fs=fs, clock=FakeClock())

    def run(self) -> None:
        log: Partition | None = None
        for step in range(14):
            try:
                if log is None:
                    log = self.opened()
                self._step(log, step)
            except PartitionFailed as error:
                self.refused.append(error)
                log = None  # until the log is opened again
            except (SegmentlogError, OSError) as error:
                self.refused.append(error)

    def _step(self, log: Partition, step: int) -> None:
        if step == 6:
            log.flush()
        elif step == 9:
            log.trim(3)
        elif step == 11:
            for batch in log.read(log.log_start_offset):
                for offset, value in zip(batch.offsets.tolist(), batch.values, strict=True):
                    self.history.handed("a reader", offset, value)
        else:
            self.append(log, durable=step in (2, 12), count=25 if step == 7 else 1)

    def append(self, log: Partition, *, durable: bool, count: int = 1) -> None:
        self._number += 1
        values = [b"%d:%d" % (self._number, index) for index in range(count)] + [b"." * 300]
        base_offset = log.append(values, ack="durable" if durable else None)
        self.history.acknowledged(base_offset, values, durable=durable or self.policy == "always")

    def check(self, disk: SimulatedDisk) -> None:
        """Check that the next process finds everything that was promised, and that it can append."""
        log = self.opened(disk)
        contents = values_by_offset(log)
        ranges = [(lost.base_offset, lost.end_offset) for lost in log.lost_ranges()]
        assert not self.history.check(contents, ranges, log.log_start_offset)
        assert log.append([b"after"], ack="durable") not in self.history.named()
        assert len(values_by_offset(log)) == len(contents) + 1


@pytest.mark.parametrize(
    ("fault", "policy"), [*product(FAULTS, ("always", "never")), ("EIO", "4records"), ("death", "4records")]
)
def test_a_failure_at_any_call_breaks_no_promise(fault: str, policy: str) -> None:
    """Everything that was promised is found by this process, by the next one, and after a power cut."""
    methods = _calls_of(policy)
    assert len(methods) > 150
    assert {"pwritev", "fdatasync", "fsync", "ftruncate", "open", "flock", "fstat"} <= set(methods)
    print(f"SEGMENTLOG_SEED={fresh_seed()}")
    first_calls = {1 + methods.index(method) for method in methods}
    for call in sorted(first_calls.union(range(1 + fresh_seed() % EVERY, len(methods) + 1, EVERY))):
        work = Workload(policy)
        how: Any = FAULTS[fault]
        work.process.fail_at = (call, how)
        note = f"call {call} ({{}}) fails with {fault}, policy {policy}"
        try:
            work.run()
        except BaseException as error:
            if type(error).__name__ != "Died":
                raise AssertionError(note.format(work.process.failed)) from error
        assert work.process.failed == methods[call - 1]
        try:
            point = work.disk.point()
            work.check(point.process_death())
            for survivor in point.crashes(random.Random(call), 2):
                work.check(survivor)
        except Exception as error:
            raise AssertionError(note.format(work.process.failed)) from error


def _calls_of(policy: str) -> list[str]:
    """Return the method of each call that the workload makes when nothing fails."""
    work = Workload(policy)
    methods: list[str] = []
    work.process.fail_at = (0, "die")  # no call has this number
    work.process._fail_if_asked = lambda method, *_: methods.append(method)  # type: ignore[method-assign]
    work.run()
    assert not work.refused
    assert len(methods) == work.process.calls
    return methods


@pytest.mark.parametrize("method", ["pwritev", "fallocate", "open"])
def test_after_a_full_disk_appends_go_on_without_a_restart(method: str) -> None:
    """ENOSPC once: that append is refused or takes another way, and the next one is in order."""
    for nth in range(1, 6):
        work = Workload("never")
        log = work.opened()
        work.append(log, durable=False)
        seen = 0
        process = work.process
        real = getattr(process, method)

        def failing(*args: Any, real: Any = real, nth: int = nth, **options: Any) -> Any:
            nonlocal seen
            seen += method != "open" or bool(args[1] & os.O_CREAT)
            if seen == nth:
                seen += 1
                raise OSError(errno.ENOSPC, "no room")
            return real(*args, **options)

        setattr(process, method, failing)
        refused = 0
        for _ in range(12):
            try:
                work.append(log, durable=False)
            except (SegmentlogError, OSError):
                refused += 1
        assert refused <= 1
        work.check(work.disk.point().process_death())


@pytest.mark.parametrize("how", ["refused", "died"])
def test_records_of_an_append_that_never_was_do_not_come_back_under_others_offsets(how: str) -> None:
    """Half of a long append was written, then the disk was full, or its process dead; its offsets went to others."""
    work = Workload("never")
    log = work.opened()
    log.append([b"first"], ack="durable")
    writes = 0
    real = work.process.pwritev

    def second_fails(fd: int, buffers: Any, position: int) -> int:
        nonlocal writes
        writes += len(buffers) > 1  # batches: header and payload
        if writes == 2:
            if how == "died":
                work.process.die()
                raise Died
            raise OSError(errno.ENOSPC, "no room")
        return real(fd, buffers, position)

    work.process.pwritev = second_fails
    with pytest.raises((DiskFull, Died)):
        log.append([b"never %d" % index for index in range(30)])
    assert writes == 2
    if how == "died":
        log = work.opened(work.disk)
    work.append(log, durable=False)
    point = work.disk.point()
    for survivor in point.crashes(random.Random(1), 300):
        work.check(survivor)
