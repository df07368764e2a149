"""Power cuts during transactions: each transaction exists completely or not at all, and acknowledgements hold."""

from __future__ import annotations

import json
import random
from functools import partial
from typing import NamedTuple

import pytest
from delivery_trial import PATH, simulated_paths
from logs import FakeClock
from seeds import seeds
from wire import Sent, foreign

from segmentlog.errors import SegmentlogError
from segmentlog.log.append.append_pipeline import Ack
from segmentlog.storage.file_operations import replace_file
from segmentlog.store import LogStore
from segmentlog.testing import SimulatedDisk
from segmentlog.testing.simulated_disk import CrashPoint
from segmentlog.transactions.server_transactions import ProducerIdAndEpoch

_STEPS = 14
_VARIANTS = 4
_MOMENTS = 5
_PARTITIONS = 2


class _Known(NamedTuple):
    """Facts that the client knows."""

    numbers: ProducerIdAndEpoch
    committed: frozenset[bytes] = frozenset()
    aborted: frozenset[bytes] = frozenset()
    current: frozenset[bytes] = frozenset()
    """Written, and acknowledged in one way or another."""
    ends_with: bool | None = None
    """How it was about to end its transaction."""


class _Trial:
    """One seeded life of a client in one of the protocols, and machines that die during each step and after it."""

    def __init__(self, seed: int, *, bumps: bool) -> None:
        self.rng = random.Random(seed)
        self.bumps = bumps
        self.clock = FakeClock()
        self.disk = SimulatedDisk()
        self.states = self.refused = self.committed_late = 0

    def open(self, disk: SimulatedDisk) -> LogStore:
        """Start a machine on this disk."""
        self.disk = disk
        return LogStore(PATH, fs=disk.process(), clock=self.clock, background=False)

    def run(self) -> None:
        """Live, and look at what each power cut leaves."""
        self.disk.make_folders(PATH)
        replace_file(self.disk.process(), f"{PATH}/store.json", json.dumps({"format": 2, "store_id": "00"}).encode())
        with simulated_paths(lambda: self.disk):
            store = self.open(self.disk)
            store.create_topic("t", _PARTITIONS)
            known = _Known(store.transactions.server_transactions.register("app", 60_000))
            for step in range(_STEPS):
                alive = self.disk
                moments: list[CrashPoint] = []
                what = self.rng.choice(("write", "write", "write", "commit", "commit", "abort", "begin"))
                before = known._replace(ends_with={"commit": True, "abort": False}.get(what))
                alive.on_effect = partial(_note, moments, alive)
                known = self._step(store, what, b"%d" % step, known)
                alive.on_effect = None
                for point in self.rng.sample(moments, min(len(moments), _MOMENTS)):
                    for disk in point.crashes(self.rng, 1):
                        self._check(disk, before, after=known)
                for disk in alive.point().crashes(self.rng, _VARIANTS):
                    self._check(disk, known, after=known)
                self.disk = alive
            store.close()

    def _step(self, store: LogStore, what: str, value: bytes, known: _Known) -> _Known:
        remote = store.transactions.server_transactions
        if what == "write":
            log = store.topic("t").partition(self.rng.randrange(_PARTITIONS))
            ack: Ack = self.rng.choice(("written", "durable"))
            remote.add_partitions("app", known.numbers, [log])
            entry = log.producer(known.numbers.producer_id)
            sequence = entry.next_sequence if entry is not None and entry.epoch == known.numbers.epoch else 0
            data = foreign([Sent(b"k", value)], producer=(*known.numbers, sequence), transactional=True)
            log.append_wire(data, ack=ack, transaction=remote.append_check("app", known.numbers, log))
            return known._replace(current=known.current | {value})
        if what == "begin":
            numbers = remote.register("app", 60_000)
            return _Known(numbers, known.committed, known.aborted | known.current)
        if not known.current:
            return known
        numbers = remote.end_transaction("app", known.numbers, committed=what == "commit", bumps_epoch=self.bumps)
        if what == "commit":
            return _Known(numbers, known.committed | known.current, known.aborted)
        return _Known(numbers, known.committed, known.aborted | known.current)

    def _check(self, disk: SimulatedDisk, known: _Known, *, after: _Known) -> None:
        """Continue the client on the restarted machine: it ends its transaction, or first writes more."""
        self.states += 1
        store = self.open(disk)
        remote = store.transactions.server_transactions
        committed = known.ends_with is not False
        is_told = False
        try:
            if known.current and known.ends_with is None and self.rng.random() < 0.5:
                known = self._step(store, "write", b"more", known)
            if known.current:
                remote.end_transaction("app", known.numbers, committed=committed, bumps_epoch=self.bumps)
                is_told = True
        except SegmentlogError:
            self.refused += 1
        remote.register("app", 60_000)
        store.finish_transactions()
        seen = self._seen(store)
        assert known.committed <= seen
        assert not known.aborted & seen
        left = known.current & seen
        if known.current:
            assert left in (frozenset(), known.current), "torn"
        if is_told:
            assert left == (known.current if committed else frozenset())
            self.committed_late += committed
        elif known.ends_with is None or not committed:
            assert not left
        unknown = seen - known.committed - known.current
        assert unknown <= after.current, "nobody wrote it"
        store.close()

    @staticmethod
    def _seen(store: LogStore) -> frozenset[bytes]:
        seen = set()
        for log in store.topic("t").partitions():
            assert log.last_stable_offset == log.log_end_offset
            for batch in log.read(log.log_start_offset, isolation="read_committed"):
                seen.update(value for value in batch.values if value is not None)
        return frozenset(seen)


def _note(moments: list[CrashPoint], disk: SimulatedDisk) -> None:
    moments.append(disk.point())


@pytest.mark.long
@pytest.mark.parametrize("bumps", [False, True], ids=["old", "new"])
@pytest.mark.parametrize("seed", seeds("remote power cuts"))
def test_all_of_a_transaction_or_nothing(seed: int, bumps: bool) -> None:
    """In every state of the disk, a transaction that was acknowledged as committed is complete."""
    for number in range(2):
        trial = _Trial(seed + number, bumps=bumps)
        trial.run()
        assert trial.states > _STEPS
