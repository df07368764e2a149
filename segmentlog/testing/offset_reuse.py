"""The scenario of a log that takes its word back, the same for every engine.

    A producer appends alpha, and it is synced; then beta and gamma, which are acknowledged.
    Consumer A reads all three. The machine dies, and comes back.
    The producer goes on with delta, epsilon and zeta, and all of it is synced.
    Consumer A goes on from where it was; consumer B reads from the start.

It is the one that kafkaesque's README tells of itself: after the crash its log holds alpha
alone, and hands the offsets of beta and gamma to delta and epsilon. A then holds alpha, beta,
gamma, zeta, B holds alpha, delta, epsilon, zeta, and nobody is told.

A log need not keep what it never promised to keep. But who had read it must be told that it
is gone, and its offsets must not come back with other records. That is what `play` checks,
and `torment` does many times over, at random.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

import msgspec

from segmentlog.clock import Clock
from segmentlog.errors import LogTruncated
from segmentlog.store import LogStore
from segmentlog.testing.history import Conflict, History
from segmentlog.testing.worst_case import WorstCaseDisk

if TYPE_CHECKING:
    from segmentlog.log.partition import Ack, Partition

Entry = tuple[int, bytes]
"""A record as a reader is handed it: offset, value."""


class LostPosition(Exception):
    """A reader's position lies in ``[base_offset, end_offset)``, which the log says is lost; go on at its end."""

    def __init__(self, base_offset: int, end_offset: int) -> None:
        super().__init__(base_offset, end_offset)
        self.base_offset, self.end_offset = base_offset, end_offset


class CrashableLog(Protocol):
    """A log on a machine that can die: what the scenario asks of an engine."""

    name: str
    """The engine and how it is set, for people."""

    acks_durably: bool
    """Whether `append` promises that the records survive the crash."""

    reads_durable: bool
    """Whether `read` hands out nothing but what survives the crash."""

    def append(self, values: list[bytes]) -> int:
        """Append, and return the offset of the first once the log acknowledges it."""

    def sync(self) -> None:
        """Make everything so far survive the crash."""

    def crash(self) -> None:
        """Die, as this log's machine or process does it, and come back."""

    def read(self, from_offset: int) -> list[Entry]:
        """Everything from there to the end. Raises `LostPosition`."""

    def lost_ranges(self) -> list[tuple[int, int]]:
        """``[base, end)`` of what the log says is lost."""


class Consumer:
    """Somebody who reads, remembers what it was handed, and where it is."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.position = 0
        self.seen: list[Entry] = []
        self.told: list[tuple[int, int]] = []
        """Ranges that the log told this consumer are lost, in the order in which it was told."""

    def go_on(self, log: CrashableLog, history: History) -> None:
        """Read from the position to the end; where the log says that the position is lost, behind that."""
        while True:
            try:
                entries = log.read(self.position)
                break
            except LostPosition as lost:
                if not lost.base_offset <= self.position < lost.end_offset:
                    raise RuntimeError(f"position {self.position} does not lie in the lost range") from lost
                self.told.append((lost.base_offset, lost.end_offset))
                self.position = lost.end_offset
        for offset, value in entries:
            history.handed(self.name, offset, value, durable_only=log.reads_durable)
        if entries:
            self.seen += entries
            self.position = entries[-1][0] + 1

    def kept(self) -> dict[int, bytes]:
        """What this consumer believes the log to hold: what it was handed, but for what it was told is lost."""
        return {offset: value for offset, value in self.seen if not _is_in(self.told, offset)}


class Outcome(msgspec.Struct, frozen=True):
    """What came of it.

    a, b       what consumer A, who lived through the crash, and consumer B, who came after it, were handed
    told       the ranges that A was told are lost
    conflicts  every rule of `History` that the log broke
    agree      whether A and B hold the same records at the same offsets, but for what A was told is lost
    """

    log: str
    a: tuple[Entry, ...]
    b: tuple[Entry, ...]
    told: tuple[tuple[int, int], ...]
    conflicts: tuple[Conflict, ...]
    agree: bool

    @property
    def told_each_loss(self) -> bool:
        """Whether every record that A holds and B does not get lies in a range that A was told of."""
        gone = {offset for offset, _ in self.a} - {offset for offset, _ in self.b}
        return all(_is_in(self.told, offset) for offset in gone)

    @property
    def recycled(self) -> list[int]:
        """Offsets that named two records."""
        return sorted({conflict.offset for conflict in self.conflicts if conflict.rule == "one offset, two records"})

    def story_of_a(self) -> str:
        """A's history as text, with each loss where A was told of it."""
        entries = [(offset, 1, _shown(offset, value)) for offset, value in self.a]
        losses = [(end, 0, f"(told: [{base}, {end}) is lost)") for base, end in self.told]
        return ", ".join(text for _, _, text in sorted([*entries, *losses]))

    def story_of_b(self) -> str:
        """B's history as text."""
        return ", ".join(_shown(offset, value) for offset, value in self.b)

    def verdict(self) -> str:
        """Whether they agree, in a few words."""
        if self.recycled:
            offsets = ", ".join(map(str, self.recycled))
            return f"{'agree' if self.agree else 'DISAGREE'}: two records each at {offsets}"
        if self.conflicts or not self.agree:
            return "DISAGREE" if not self.agree else f"agree, but {self.conflicts[0]}"
        return "agree, A was told of the loss" if self.told else "agree"


def play(log: CrashableLog) -> Outcome:
    """The scenario above, once."""
    stage = _Stage(log)
    stage.append([b"alpha"])
    stage.sync()
    stage.append([b"beta"])
    stage.append([b"gamma"])
    stage.a.go_on(log, stage.history)
    stage.crash()
    for value in (b"delta", b"epsilon", b"zeta"):
        stage.append([value])
    return stage.outcome()


def torment(log: CrashableLog, rng: random.Random, rounds: int) -> Outcome:
    """Append, sync and read at random, through ``rounds`` crashes; A lives through all of them.

    What is found after a crash has to stay from then on: it was on the disk, or it would not be there.
    """
    stage = _Stage(log)
    number = 0
    for _ in range(rounds):
        for _ in range(rng.randrange(1, 8)):
            match rng.choice(("append", "append", "append", "sync", "read", "read")):
                case "append":
                    count = rng.randrange(1, 6)
                    stage.append([b"%d" % (number + index) for index in range(count)])
                    number += count
                case "sync":
                    stage.sync()
                case "read":
                    stage.a.go_on(log, stage.history)
        stage.crash()
        for offset, value in _everything(log, stage.history):
            stage.history.acknowledged(offset, [value], durable=True)
    stage.append([b"the last"])
    return stage.outcome()


class _Stage:
    """The log, the two consumers, and what has been said so far."""

    def __init__(self, log: CrashableLog) -> None:
        self.log = log
        self.history = History()
        self.a = Consumer("consumer A")
        self._unsynced: list[tuple[int, list[bytes]]] = []

    def append(self, values: list[bytes]) -> None:
        base_offset = self.log.append(values)
        self.history.acknowledged(base_offset, values, durable=self.log.acks_durably)
        self._unsynced.append((base_offset, values))

    def sync(self) -> None:
        self.log.sync()
        # Not `History.durable_below`: below the durable offset lie lost ranges, too.
        for base_offset, values in self._unsynced:
            self.history.acknowledged(base_offset, values, durable=True)
        self._unsynced.clear()

    def crash(self) -> None:
        self.log.crash()
        self._unsynced.clear()

    def outcome(self) -> Outcome:
        """Sync, let A go on and B read everything, and compare."""
        self.sync()
        self.a.go_on(self.log, self.history)
        found = _everything(self.log, self.history)
        conflicts = self.history.check(dict(found), self.log.lost_ranges())
        agree = self.a.kept() == dict(found)
        a, told = tuple(self.a.seen), tuple(self.a.told)
        return Outcome(self.log.name, a, tuple(found), told, tuple(conflicts), agree)


def _everything(log: CrashableLog, history: History) -> list[Entry]:
    """What a consumer that comes new is handed."""
    b = Consumer("consumer B")
    b.go_on(log, history)
    return b.seen


def _is_in(ranges: Iterable[tuple[int, int]], offset: int) -> bool:
    return any(base <= offset < end for base, end in ranges)


def _shown(offset: int, value: bytes) -> str:
    return f"{offset}:{value.decode(errors='replace')}"


# ---------------------------------------------------------------- segmentlog as such a log


POLICIES = ("always", "everysec", "100records", "1MiB", "never")
"""One fsync policy of each kind, as a topic's configuration spells it."""

_LEVELS: tuple[tuple[Ack, bool], ...] = (("written", False), ("durable", False), ("written", True))


class _StandingClock(Clock):
    """Time stands still, so that no flush by age comes between: the cut hits before a second is over."""

    def __init__(self) -> None:
        self._now_ms = super().now_ms()

    def now_ms(self) -> int:
        return self._now_ms

    def monotonic_ms(self) -> int:
        return 1_000_000


class SegmentlogLog:
    """A partition of a real store on a `WorstCaseDisk`: a crash takes everything that was not synced.

    policy        the topic's fsync policy, as its config spells it
    ack           what `append` waits for: "written", "durable", or None for what the policy says
    durable_only  readers end at the durable offset, and so are never handed what a crash can take
    settings      further keys of the topic's configuration

    Use it in a ``with``: it lives in a temporary folder. There is no background flush, so that what
    a crash takes is what the policy and the scenario leave to it, the same in every run.
    """

    def __init__(self, policy: str, ack: Ack | None = None, *, durable_only: bool = False, **settings: object) -> None:
        self.policy = policy
        self.ack = ack
        self.durable_only = durable_only
        self._settings = {"fsync": policy, **settings}
        parts = [f"segmentlog, fsync={policy}", f"ack={ack}" if ack else "", "durable_only" if durable_only else ""]
        self.name = ", ".join(filter(None, parts))
        self.acks_durably = policy == "always" or ack == "durable"
        self.reads_durable = durable_only
        self._temporary = tempfile.TemporaryDirectory(prefix="segmentlog-scenario-")
        self.disk = WorstCaseDisk(f"{self._temporary.name}/disk")
        self._clock = _StandingClock()
        self._open()

    def _open(self) -> None:
        self._store = LogStore(self.disk.path("store"), fs=self.disk, clock=self._clock, background=False)
        if not self._store.topics():
            self._store.create_topic("t", config=self._settings)
        self.partition: Partition = self._store.topic("t").partition(0)

    def append(self, values: list[bytes]) -> int:
        return self.partition.append(values, ack=self.ack)

    def sync(self) -> None:
        self.partition.flush()

    def crash(self) -> None:
        self._abandon()
        self.disk.power_cut()
        self._open()

    def _abandon(self) -> None:
        self.partition.abandon()
        self._store.close()  # with nothing to do any more: the partition was abandoned

    def read(self, from_offset: int) -> list[Entry]:
        entries: list[Entry] = []
        try:
            for batch in self.partition.read(from_offset, durable_only=self.durable_only):
                entries += zip(batch.offsets.tolist(), (value or b"" for value in batch.values), strict=True)
        except LogTruncated as truncated:
            raise LostPosition(truncated.lost.base_offset, truncated.lost.end_offset) from truncated
        return entries

    def lost_ranges(self) -> list[tuple[int, int]]:
        return [(lost.base_offset, lost.end_offset) for lost in self.partition.lost_ranges()]

    def __enter__(self) -> SegmentlogLog:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._abandon()
        self.disk.close_held()
        self._temporary.cleanup()


def play_segmentlog() -> list[Outcome]:
    """The scenario under each fsync policy: as it is, with appends that wait for the disk, with readers that do."""
    outcomes = []
    for policy in POLICIES:
        for ack, durable_only in _LEVELS:
            with SegmentlogLog(policy, ack, durable_only=durable_only) as log:
                outcomes.append(play(log))
    return outcomes
