"""What is compared, and what is made of it.

A row is measured in rounds: each time once with either server, which take turns in who begins. What it finds out is
figures by name; `Compared` says what is made of one of them: a ratio to Kafka's in the same round, a ratio to another
figure of ours in the same round, or the figure itself against a bound.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Literal

import msgspec

from bench.measure import quantity as shown
from bench.server.brokers import BROKERS, KAFKA, OURS, Broker, Start
from bench.server.wire import Topic, new_topic

Unit = Literal["records/s", "us", "ms", "s", "MB", "MB/s"]
Figures = dict[str, float]
Once = Callable[[], Figures]


class Sizes(msgspec.Struct, frozen=True):
    """How much is done. ``seconds``: of each piece that our own client measures."""

    seconds: float
    client_records: int
    """Each run of Java's tool and of confluent-kafka."""
    single_records: int
    """For the latency of one record."""
    log_mb: float
    """What is consumed."""
    restart_gb: float
    partitions: int
    connections: tuple[int, ...]
    warm_up_s: float
    """At least so long, and at least one round, before anything counts: Kafka's code is compiled as it runs."""


TINY = Sizes(0.05, 2_000, 20, 2, 0.01, 20, (1, 4), 0)
QUICK = Sizes(1.5, 1_000_000, 500, 128, 0.5, 1_000, (1, 16, 100, 1_000), 3)
FULL = Sizes(4.0, 3_000_000, 2_000, 512, 5, 1_000, (1, 16, 100, 1_000, 2_000), 12)


class Side:
    """One of the two servers, as a row sees it: running, unless the row starts it itself (``start`` is None)."""

    def __init__(self, system: str, folder: Path, sizes: Sizes, start: Start | None, broker: Broker | None) -> None:
        self.system = system
        self.folder = folder
        self.sizes = sizes
        self.start = start or Start()
        self._broker = broker
        self._topics = 0

    @property
    def broker(self) -> Broker:
        assert self._broker is not None, "this row starts its servers itself"
        return self._broker

    def new_broker(self) -> Broker:
        """One of the row's own, not started yet."""
        return BROKERS[self.system](self.folder, self.start)

    def new_topic(self, partitions: int = 1, config: Mapping[str, str] | None = None) -> AbstractContextManager[Topic]:
        """Return a context with a new topic, which is deleted at its end."""
        self._topics += 1
        return new_topic(self.broker.address, f"bench-{time.time_ns()}-{self._topics}", partitions, config)


class Compared(msgspec.Struct, frozen=True):
    """One line of the result. ``to`` is Kafka, another figure of ours, or None: the figure itself is judged then."""

    figure: str
    what: str
    unit: Unit
    target: float | None = None
    at_least: bool = True
    to: str | None = KAFKA


class Row(msgspec.Struct, frozen=True):
    """``prepare`` gives what is called each round; it is left when the rounds are over."""

    name: str
    group: str
    """The line of the table of what was wanted."""
    compared: Sequence[Compared]
    prepare: Callable[[Side], AbstractContextManager[Once]]
    start: Start | None = Start()
    systems: tuple[str, ...] = (OURS, KAFKA)
    rounds_max: int | None = None


class Result(msgspec.Struct, frozen=True):
    """Medians of both sides, with their range, and of the ratio within a round."""

    row: str
    group: str
    what: str
    unit: str
    ours: float
    ours_range: tuple[float, float]
    theirs: float | None
    theirs_range: tuple[float, float] | None
    to: str | None
    """What ``theirs`` is: Kafka's, or what else of ours it was compared with."""
    ratio: float | None
    ratio_range: tuple[float, float] | None
    target: float | None
    at_least: bool
    reached: bool | None

    @property
    def target_text(self) -> str:
        if self.target is None:
            return ""
        sign = ">=" if self.at_least else "<="
        return f"{sign} {self.target:g}{'' if self.to is not None else ' ' + self.unit}"

    def cells(self) -> tuple[str, str, str, str, str, str]:
        """Return a line of the table: name, ours, theirs, ratio, its range, target."""
        theirs = "" if self.theirs is None else quantity(self.theirs, self.unit)
        ratio = "" if self.ratio is None else f"{self.ratio:.2f}"
        spread = "" if self.ratio_range is None else f"{self.ratio_range[0]:.2f}-{self.ratio_range[1]:.2f}"
        missed = " (missed)" if self.reached is False else ""
        return self.what, quantity(self.ours, self.unit), theirs, ratio, spread, self.target_text + missed


class Absent(msgspec.Struct, frozen=True):
    """What was left out, and why."""

    what: str
    reason: str


class Again(msgspec.Struct, frozen=True):
    """Rows that were measured once more, after the others."""

    rows: list[str]
    date: str
    revision: str


class Settings(msgspec.Struct, frozen=True):
    """How a result came about."""

    rounds: int
    sizes: Sizes
    versions: dict[str, str]
    absent: list[Absent]
    again: list[Again] = []


def quantity(value: float, unit: str) -> str:
    """Return a figure with its unit, as people say it."""
    return f"{value:,.0f} {unit}" if unit in ("MB", "MB/s") else shown(value, unit)


def measure(
    row: Row, sides: Mapping[str, Side], rounds: int, tell: Callable[[str], None], *, quiet_disk: bool = True
) -> list[Result]:
    """Warm up, and then so many rounds that count.

    With ``quiet_disk`` everything is on disk before each: what others wrote is not to be paid for there.
    """
    rounds = min(rounds, row.rounds_max or rounds)
    found: dict[str, list[Figures]] = {system: [] for system in sides}
    with _prepared(row, sides) as prepared:
        for number in range(rounds + 1):
            order = list(prepared)
            if number % 2:
                order.reverse()
            for system in order:
                tell(f"{row.name}: {system}, {f'round {number} of {rounds}' if number else 'warming up'}")
                if quiet_disk:
                    os.sync()
                began_s = time.monotonic()
                figures = prepared[system]()
                if number:
                    found[system].append(figures)
                while not number and time.monotonic() < began_s + sides[system].sizes.warm_up_s and row.start:
                    prepared[system]()
    return [one for compared in row.compared for one in _compare(row, compared, found)]


@contextmanager
def _prepared(row: Row, sides: Mapping[str, Side]) -> Iterator[dict[str, Once]]:
    with ExitStack() as stack:
        yield {system: stack.enter_context(row.prepare(side)) for system, side in sides.items()}


def _compare(row: Row, compared: Compared, found: Mapping[str, list[Figures]]) -> Iterator[Result]:
    ours = [figures[compared.figure] for figures in found.get(OURS, ()) if compared.figure in figures]
    if not ours:
        return
    if compared.to == KAFKA:
        theirs = [figures[compared.figure] for figures in found.get(KAFKA, ()) if compared.figure in figures]
    elif compared.to is not None:
        theirs = [figures[compared.to] for figures in found[OURS]]
    else:  # told beside ours, and not what it is judged by
        theirs = [figures[compared.figure] for figures in found.get(KAFKA, ()) if compared.figure in figures]
    ratios = [mine / other for mine, other in zip(ours, theirs, strict=False) if other]
    ratio = statistics.median(ratios) if ratios else None
    judged = statistics.median(ours) if compared.to is None else ratio
    reached = None
    if compared.target is not None and judged is not None:
        reached = judged >= compared.target if compared.at_least else judged <= compared.target
    yield Result(
        row=row.name,
        group=row.group,
        what=compared.what,
        unit=compared.unit,
        ours=statistics.median(ours),
        ours_range=(min(ours), max(ours)),
        theirs=statistics.median(theirs) if theirs else None,
        theirs_range=(min(theirs), max(theirs)) if theirs else None,
        to=compared.to,
        ratio=ratio,
        ratio_range=(min(ratios), max(ratios)) if ratios else None,
        target=compared.target,
        at_least=compared.at_least,
        reached=reached,
    )
