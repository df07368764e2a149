"""The trial of power cuts, on a disk that is unmounted and mounted while the machine runs."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from typing import Any
from unittest import mock

from trial import Broken, Event, Moment, Trial

from segmentlog.log.partition import Partition
from segmentlog.storage.state_page import StateBlock
from segmentlog.testing import History
from segmentlog.testing.simulated_disk import CrashPoint, SimulatedDisk

KERNELS = ((True, True), (True, False), (False, True), (False, False))
"""Whether the kernel distinguishes mounts, and whether it keeps inode marks."""


class RemountTrial(Trial):
    """Recover every state in the boot that wrote it, with any version of the state page that ever existed."""

    crash_name = "a remount"

    def __init__(self, seed: int, policy: str, writers: int, kernel: tuple[bool, bool] = (True, True)) -> None:
        super().__init__(seed, policy, writers)
        self.rng = random.Random(f"remount/{seed}/{policy}/{writers}/{kernel}")
        self.kernel = kernel
        self.disk.tells_mounts, self.disk.keeps_marks = kernel

    def run(self, rounds: int, operations: int, variants: int) -> int:
        write = StateBlock.write

        def write_and_note(block: StateBlock[Any], fields: Any) -> None:
            write(block, fields)
            self.disk.record_pages()

        with mock.patch.object(StateBlock, "write", write_and_note):
            return super().run(rounds, operations, variants)

    def _crashes(self, point: CrashPoint, count: int, seen: set[int] | None = None) -> Iterator[SimulatedDisk]:
        return point.remounts(self.rng, count, seen)

    def _check(self, disk: SimulatedDisk, events: list[Event], what: str, moment: Moment) -> None:
        super()._check(disk, events, f"{what}, kernel {self.kernel}", moment)

    def _expect_all_there(self, log: Partition, history: History, where: str) -> None:
        super()._expect_all_there(log, history, where)
        if any(self.kernel) and log.recovery_report.verdict == "machine death":
            raise Broken(f"the death of a process was taken for that of its disk: {log.recovery_report}\n  {where}")


def run_remounts(seed: int, policy: str, writers: int, kernel: tuple[bool, bool]) -> int:
    """Run one trial and return the number of states that it checked. Raises `Broken`."""
    logging.disable(logging.WARNING)
    return RemountTrial(seed, policy, writers, kernel).run(rounds=2, operations=25, variants=8)
