"""The scenario in which a log reuses offsets after a crash, the same for every engine.

    A producer appends alpha, and it is synced; then beta and gamma, which are acknowledged.
    Consumer A reads all three. The machine crashes and restarts.
    The producer appends delta, epsilon and zeta, and everything is synced.
    Consumer A continues from its position; consumer B reads from the start.

kafkaesque's README describes this scenario: after the crash its log has only alpha, and assigns the
offsets of beta and gamma to delta and epsilon. Then A has received alpha, beta, gamma and zeta,
and B alpha, delta, epsilon and zeta. Neither of them gets an error.

A log may lose records that it did not guarantee. But a consumer that had read them must get an error, and
their offsets must not be assigned to other records. `play` checks this once, `torment` many times at random.
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

ReceivedRecord = tuple[int, bytes]
"""A record as a reader receives it: offset, value."""


class LostPosition(Exception):
    """The reader's position is in the lost range ``[base_offset, end_offset)``; it may continue at ``end_offset``."""

    def __init__(self, base_offset: int, end_offset: int) -> None:
        super().__init__(base_offset, end_offset)
        self.base_offset, self.end_offset = base_offset, end_offset


class CrashableLog(Protocol):
    """A log on a machine that can crash: the interface between the scenario and an engine."""

    name: str
    """The engine and its settings, for reports."""

    acks_durably: bool
    """Whether `append` guarantees that the records survive a crash."""

    reads_durable: bool
    """Whether `read` returns only records that survive a crash."""

    def append(self, values: list[bytes]) -> int:
        """Append records, wait for the acknowledgement, and return the offset of the first record."""

    def sync(self) -> None:
        """Sync all records that were appended so far."""

    def crash(self) -> None:
        """Crash the machine or process of this log, and restart it."""

    def read(self, from_offset: int) -> list[ReceivedRecord]:
        """Return all records from ``from_offset`` to the end. Raise `LostPosition`."""

    def lost_ranges(self) -> list[tuple[int, int]]:
        """Return ``[base, end)`` of each range that the log reports as lost."""


class ScenarioConsumer:
    """A consumer that records its position and every record that it received."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.position = 0
        self.seen: list[ReceivedRecord] = []
        self.reported_lost: list[tuple[int, int]] = []
        """Ranges that the log has reported to this consumer as lost, in the order of the reports."""

    def read_to_end(self, log: CrashableLog, history: History) -> None:
        """Read from the position to the end. If the log reports the position as lost, continue after the lost range."""
        while True:
            try:
                entries = log.read(self.position)
                break
            except LostPosition as lost:
                if not lost.base_offset <= self.position < lost.end_offset:
                    raise RuntimeError(f"position {self.position} is not in the reported lost range") from lost
                self.reported_lost.append((lost.base_offset, lost.end_offset))
                self.position = lost.end_offset
        for offset, value in entries:
            history.handed(self.name, offset, value, durable_only=log.reads_durable)
        if entries:
            self.seen += entries
            self.position = entries[-1][0] + 1

    def records_not_lost(self) -> dict[int, bytes]:
        """Return the records that this consumer received, except those that the log later reported to it as lost."""
        return {offset: value for offset, value in self.seen if not _is_in(self.reported_lost, offset)}


class ScenarioOutcome(msgspec.Struct, frozen=True):
    """The result of a scenario.

    a              records that consumer A received, which started before the crash
    b              records that consumer B received, which started after the crash
    reported_lost  ranges that the log reported to A as lost
    conflicts      every rule of `History` that the log broke
    agree          whether A and B have the same records at the same offsets, except those reported to A as lost
    """

    log: str
    a: tuple[ReceivedRecord, ...]
    b: tuple[ReceivedRecord, ...]
    reported_lost: tuple[tuple[int, int], ...]
    conflicts: tuple[Conflict, ...]
    agree: bool

    @property
    def reports_each_loss(self) -> bool:
        """Whether the log reported to A each loss: each record that A received and B did not."""
        gone = {offset for offset, _ in self.a} - {offset for offset, _ in self.b}
        return all(_is_in(self.reported_lost, offset) for offset in gone)

    @property
    def reused_offsets(self) -> list[int]:
        """Offsets that identified two records."""
        return sorted({conflict.offset for conflict in self.conflicts if conflict.rule == "one offset, two records"})

    def story_of_a(self) -> str:
        """Return A's records and the losses reported to A as text."""
        entries = [(offset, 1, _shown(offset, value)) for offset, value in self.a]
        losses = [(end, 0, f"(reported: [{base}, {end}) is lost)") for base, end in self.reported_lost]
        return ", ".join(text for _, _, text in sorted([*entries, *losses]))

    def story_of_b(self) -> str:
        """Return B's records as text."""
        return ", ".join(_shown(offset, value) for offset, value in self.b)

    def verdict(self) -> str:
        """Return in a few words whether A and B agree."""
        if self.reused_offsets:
            offsets = ", ".join(map(str, self.reused_offsets))
            return f"{'agree' if self.agree else 'DISAGREE'}: two records each at {offsets}"
        if self.conflicts or not self.agree:
            return "DISAGREE" if not self.agree else f"agree, but {self.conflicts[0]}"
        return "agree, A got an error for the lost records" if self.reported_lost else "agree"


def play(log: CrashableLog) -> ScenarioOutcome:
    """Run the scenario of the module's docstring once."""
    stage = _Stage(log)
    stage.append([b"alpha"])
    stage.sync()
    stage.append([b"beta"])
    stage.append([b"gamma"])
    stage.a.read_to_end(log, stage.history)
    stage.crash()
    for value in (b"delta", b"epsilon", b"zeta"):
        stage.append([value])
    return stage.outcome()


def torment(log: CrashableLog, rng: random.Random, rounds: int) -> ScenarioOutcome:
    """Append, sync and read at random, with ``rounds`` crashes. Consumer A continues after each of them.

    A record that exists after a crash must survive later crashes: it was on the disk.
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
                    stage.a.read_to_end(log, stage.history)
        stage.crash()
        for offset, value in _everything(log, stage.history):
            stage.history.acknowledged(offset, [value], durable=True)
    stage.append([b"the last"])
    return stage.outcome()


class _Stage:
    """The log, consumer A and the history of a running scenario."""

    def __init__(self, log: CrashableLog) -> None:
        self.log = log
        self.history = History()
        self.a = ScenarioConsumer("consumer A")
        self._unsynced: list[tuple[int, list[bytes]]] = []

    def append(self, values: list[bytes]) -> None:
        base_offset = self.log.append(values)
        self.history.acknowledged(base_offset, values, durable=self.log.acks_durably)
        self._unsynced.append((base_offset, values))

    def sync(self) -> None:
        self.log.sync()
        # `History.durable_below` would be wrong: there may be lost ranges below the durable offset.
        for base_offset, values in self._unsynced:
            self.history.acknowledged(base_offset, values, durable=True)
        self._unsynced.clear()

    def crash(self) -> None:
        self.log.crash()
        self._unsynced.clear()

    def outcome(self) -> ScenarioOutcome:
        """Sync, let A continue and B read everything, and compare."""
        self.sync()
        self.a.read_to_end(self.log, self.history)
        found = _everything(self.log, self.history)
        conflicts = self.history.check(dict(found), self.log.lost_ranges())
        agree = self.a.records_not_lost() == dict(found)
        a, reported_lost = tuple(self.a.seen), tuple(self.a.reported_lost)
        return ScenarioOutcome(self.log.name, a, tuple(found), reported_lost, tuple(conflicts), agree)


def _everything(log: CrashableLog, history: History) -> list[ReceivedRecord]:
    """Return all records that a new consumer receives."""
    b = ScenarioConsumer("consumer B")
    b.read_to_end(log, history)
    return b.seen


def _is_in(ranges: Iterable[tuple[int, int]], offset: int) -> bool:
    return any(base <= offset < end for base, end in ranges)


def _shown(offset: int, value: bytes) -> str:
    return f"{offset}:{value.decode(errors='replace')}"


# ---------------------------------------------------------------- the scenario with segmentlog


POLICIES = ("always", "everysec", "100records", "1MiB", "never")
"""One fsync policy of each kind, as a topic's configuration spells it."""

_LEVELS: tuple[tuple[Ack, bool], ...] = (("written", False), ("durable", False), ("written", True))


class _StoppedClock(Clock):
    """A clock whose time never changes, so that no record becomes old enough for a flush before the crash."""

    def __init__(self) -> None:
        self._now_ms = super().now_ms()

    def now_ms(self) -> int:
        return self._now_ms

    def monotonic_ms(self) -> int:
        return 1_000_000


class SegmentlogLog:
    """A partition of a real store on a `WorstCaseDisk`: a crash loses everything that was not synced.

    policy        the topic's fsync policy, as in its config
    ack           what `append` waits for: "written", "durable", or None for the policy's default
    durable_only  readers stop at the durable offset, and so never receive records that a crash can lose
    settings      further keys of the topic's configuration

    Use it in a ``with`` statement, which deletes its temporary folder. The background flush is off. So the losses
    depend only on the policy and the scenario, and are the same in every run.
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
        self._clock = _StoppedClock()
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
        self._store.close()  # flushes nothing: the partition was abandoned

    def read(self, from_offset: int) -> list[ReceivedRecord]:
        entries: list[ReceivedRecord] = []
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


def play_segmentlog() -> list[ScenarioOutcome]:
    """Run the scenario three times for each fsync policy: default, durable acknowledgements, durable reads."""
    outcomes = []
    for policy in POLICIES:
        for ack, durable_only in _LEVELS:
            with SegmentlogLog(policy, ack, durable_only=durable_only) as log:
                outcomes.append(play(log))
    return outcomes
