"""Rows of the scaling bench as curves: where each leaves the flat, and what a profiler showed of why.

A curve's flat part begins at its first point. A later point has left it when its whole range over the rounds lies
farther from the flat's median than the noise, and the next point, if there is one, lies there too: one that comes
back was an accident. The noise is 10 %, or half the widest range of a flat point if that is more. Read from its
other end, the same rule finds where a curve is flat again.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Final, Literal

import msgspec

from bench.measure import quantity

NOISE: Final = 0.10
"""Medians of a few rounds differ by as much on a machine that others use, too."""

LOG_SIZE, PARTITIONS, RECORD_SIZE, PROCESSES = "log size", "partitions", "record size", "processes"
ONE_A_CALL: Final = "append one a call, LZ4"
AXES: Final = (LOG_SIZE, PARTITIONS, RECORD_SIZE, PROCESSES)

_ROUGH: Final = 0.5
"""Rounds that differ by more make "flat" say little."""

_IN_PROPORTION: Final = (0.85, 1.15)
"""Exponents of a power law that are called proportional."""


class ScalingRow(msgspec.Struct, frozen=True):
    """One point of one curve: the median over the rounds, with its range.

    ``at`` is in bytes on the axes of the log's and the record's size, else a count.
    """

    axis: str
    at: float
    figure: str
    unit: str
    value: float
    low: float
    high: float

    @classmethod
    def of(cls, axis: str, at: float, figure: str, unit: str, rounds: Sequence[float]) -> ScalingRow:
        """Summarize the rounds as a row."""
        return cls(axis, at, figure, unit, statistics.median(rounds), min(rounds), max(rounds))

    @property
    def at_text(self) -> str:
        return at_text(self.axis, self.at)

    @property
    def value_text(self) -> str:
        if self.unit == "records/s":
            return quantity(self.value, self.unit)
        return f"{self.value:,.0f} {self.unit}" if self.value >= 100 else f"{self.value:.3g} {self.unit}"


class Curve(msgspec.Struct, frozen=True):
    """One figure along its axis, judged.

    ``leaves`` is the first point beyond the flat, ``settles`` the first of those, later on, that are flat again.
    ``slope`` is the exponent between the last flat point and where the curve settles: 1 is proportional, 0 is flat.
    ``within`` tells how far the flat part's points lie from their median.
    """

    axis: str
    figure: str
    unit: str
    rows: tuple[ScalingRow, ...]
    shape: Literal["point", "flat", "rises", "falls"]
    within: float = 0.0
    leaves: float | None = None
    settles: float | None = None
    slope: float = 0.0

    @property
    def title(self) -> str:
        """What the curve shows, in a sentence without its full stop."""
        first, last = self.rows[0], self.rows[-1]
        name = self.figure[0].upper() + self.figure[1:]
        if self.axis == RECORD_SIZE:  # where each figure is there in both
            name += f", in {self.unit}"
        comma = "," if "," in name else ""
        if self.shape == "point":
            return f"{name}: {first.value_text} at {first.at_text}"
        if self.shape == "flat":
            percent = max(1, math.ceil(self.within * 100))
            rough = f", but rounds differ by {self.spread * 100:.0f} %" if self.spread > _ROUGH else ""
            return f"{name}{comma} is flat from {first.at_text} to {last.at_text} (within {percent} %{rough})"
        index = next(index for index, row in enumerate(self.rows) if row.at == self.leaves)
        if index == 1:
            text = f"{name}{comma} {self.shape} from {first.at_text} on"
        else:
            text = f"{name}{comma} is flat to {self.rows[index - 1].at_text}, then {self.shape}"
        text += f": {self._ratios()}"
        if self.settles is not None:
            text += f", and is flat from {at_text(self.axis, self.settles)} on"
        elif _IN_PROPORTION[0] <= abs(self.slope) <= _IN_PROPORTION[1]:
            text += ", in proportion" if self.slope > 0 else ", in inverse proportion"
        return text

    @property
    def spread(self) -> float:
        """The widest range over the rounds of any point, relative to its median."""
        return max((row.high - row.low) / row.value for row in self.rows)

    @property
    def is_told(self) -> bool:
        """Not where the curve says what another one says: both rates by the record's size are one figure."""
        return self.axis != RECORD_SIZE or self.unit == ("records/s" if self.figure == ONE_A_CALL else "MB/s")

    @property
    def text(self) -> str:
        """The sentence, and why it is so where that is known."""
        why = WHY.get((self.axis, self.figure, self.shape), "")
        return f"{self.title}.{' ' if why else ''}{why}"

    def _ratios(self) -> str:
        """How far it comes, against the first point; with its peak where it turns back."""
        first, last = self.rows[0], self.rows[-1]
        pick = max if self.shape == "rises" else min
        peak = pick(self.rows, key=lambda row: row.value)
        text = f"{_times(last.value / first.value)} at {last.at_text}"
        turns_back = self.settles is None or peak.at < self.settles
        if turns_back and abs(math.log(peak.value / last.value)) > math.log1p(NOISE):
            text = f"{_times(peak.value / first.value)} at {peak.at_text}, {text}"
        return text


def curves(rows: Sequence[ScalingRow]) -> list[Curve]:
    """All curves that ``rows`` hold, in their order. Values must be positive."""
    found: dict[tuple[str, str, str], list[ScalingRow]] = {}
    for row in rows:
        found.setdefault((row.axis, row.figure, row.unit), []).append(row)
    return [_judge(sorted(points, key=lambda row: row.at)) for points in found.values()]


def bends(rows: Sequence[ScalingRow]) -> list[Curve]:
    """Return the curves that rise or fall by more than the noise."""
    return [curve for curve in curves(rows) if curve.is_told and curve.shape in ("rises", "falls")]


def at_text(axis: str, at: float) -> str:
    """Return a point of an axis for people: ``0.5 GB``, ``1 MiB``, ``10,000``."""
    if axis not in (LOG_SIZE, RECORD_SIZE):
        return f"{at:,.0f}"
    if at == 1 << 20:
        return "1 MiB"
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if at >= (size / 2 if unit == "GB" else size):
            return f"{at / size:g} {unit}"
    return f"{at:g} B"


def _judge(rows: list[ScalingRow]) -> Curve:
    first = rows[0]
    if len(rows) == 1:
        return Curve(first.axis, first.figure, first.unit, (first,), "point")
    count = _flat_count(rows)
    flat = rows[:count]
    level = statistics.median(row.value for row in flat)
    within = max(abs(row.value / level - 1) for row in flat)
    if count == len(rows):
        return Curve(first.axis, first.figure, first.unit, tuple(rows), "flat", within)
    again = _flat_count(rows[::-1])
    settled = len(rows) - again if again > 1 else len(rows) - 1
    return Curve(
        axis=first.axis,
        figure=first.figure,
        unit=first.unit,
        rows=tuple(rows),
        shape="rises" if rows[count].value > level else "falls",
        within=within,
        leaves=rows[count].at,
        settles=rows[settled].at if again > 1 and settled >= count else None,
        slope=_slope(rows[count - 1 : max(settled, count) + 1]),
    )


def _flat_count(rows: Sequence[ScalingRow]) -> int:
    """How many points the flat at the beginning of ``rows`` has."""
    flat = [rows[0]]
    for index in range(1, len(rows)):
        level = statistics.median(row.value for row in flat)
        noise = max(NOISE, *((row.high - row.low) / 2 / row.value for row in flat))
        side, *beyond = (_side(row, level, noise) for row in rows[index : index + 2])
        if not side:
            flat.append(rows[index])
        elif all(another == side for another in beyond):
            return index
    return len(rows)


def _side(row: ScalingRow, level: float, noise: float) -> int:
    """1 if the point's whole range lies above the flat, -1 below it, 0 if it touches the noise around it."""
    if row.low > level * (1 + noise):
        return 1
    return -1 if row.high < level / (1 + noise) else 0


def _slope(rows: Sequence[ScalingRow]) -> float:
    """Return the exponent of the power law that fits best."""
    return statistics.linear_regression([math.log(row.at) for row in rows], [math.log(row.value) for row in rows]).slope


def _times(ratio: float) -> str:
    if ratio < 0.1:
        return f"1/{1 / ratio:,.0f}"
    return f"{ratio:,.0f}x" if ratio >= 10 else f"{ratio:.2g}x"


# By axis, figure and the shape that is explained: one that a noisy machine has turned round is not. From py-spy with
# native frames, and from counting; parts are of the time in the call that is measured.
_RANDOM_READS = (
    "A search in one segment's index, and one batch, decoded whole; a segment that was not read from before has its"
    " index read first. Where the log is larger than the memory, the disk is waited for."
)

_TURNS = (
    "Appends to a partition take turns. With more writers than cores, the one whose turn comes first waits for a"
    " core: with 8 writers they wait for two thirds of their time, and the lock is held for less than half of it."
)

WHY: dict[tuple[str, str, str], str] = {
    (LOG_SIZE, "append rate", "falls"): (
        "An append does not look at what is there already: what differs is how the disk and its cache are doing."
    ),
    (
        LOG_SIZE,
        "open after close",
        "rises",
    ): "Less than 2 kB are read, however large the log is: neither records nor indexes.",
    (LOG_SIZE, "open after kill -9", "rises"): (
        "The end is in the state page, which outlives the process: nothing is scanned."
    ),
    (LOG_SIZE, "read at a random offset, p50", "rises"): _RANDOM_READS,
    (LOG_SIZE, "read at a random offset, p99", "rises"): _RANDOM_READS,
    (PARTITIONS, "create, for each partition", "falls"): (
        "One partition pays for the store and the topic, too; with many, 60 % is fsync of files and folders,"
        " 20 % mkdir and open."
    ),
    (PARTITIONS, "append rate, each in turn", "falls"): (
        "What belongs to a partition has left the processor's caches when its turn comes again; with more partitions"
        " than two ninths of the files that the process may have, its files are opened again, too."
    ),
    (PARTITIONS, "producer.send with keys", "falls"): (
        "What the producer collects is divided among all partitions; it collects 256 KiB for each of them, but no more"
        " than 8 MiB, some 65 records each with 1,000. What a batch costs whatever it holds is most of the time then."
    ),
    (
        PARTITIONS,
        "open",
        "rises",
    ): "Partitions are opened one after the other, each with its state page and newest segment.",
    (PARTITIONS, "memory after open", "rises"): "13 to 25 kB of objects a partition.",
    (PARTITIONS, "file descriptors after open", "rises"): (
        "Two a partition, for two ninths as many partitions as the process may have files; beyond that, those not used"
        " lately are closed."
    ),
    (RECORD_SIZE, "append, LZ4", "rises"): (
        "Of small records each is checked and encoded, whatever its size; of large ones more than half is LZ4's."
    ),
    (RECORD_SIZE, "append, uncompressed", "rises"): (
        "Of small records each is checked (20 %) and encoded (30 %); large ones are copied twice, into the batch and"
        " into the page cache, as quickly as memory takes it."
    ),
    (RECORD_SIZE, "scan, LZ4", "rises"): (
        "Half of the time with small records is making an object of each; with large ones it is decompression."
    ),
    (RECORD_SIZE, "scan, uncompressed", "rises"): (
        "Half of the time with small records is making an object of each; with large ones it is the checksum and a"
        " copy, as quickly as memory gives it."
    ),
    (RECORD_SIZE, ONE_A_CALL, "falls"): (
        "A call costs some 20 us of Python, a lock and a pwritev, whatever it appends; then copying and LZ4 take over."
    ),
    (PROCESSES, "writers, one partition", "rises"): _TURNS,
    (PROCESSES, "writers, one partition", "falls"): _TURNS,
    (PROCESSES, "writers, a partition each", "rises"): "Nothing is shared but cores, memory and the disk.",
    (PROCESSES, "readers, one partition", "rises"): "Readers take no lock: they share cores and memory alone.",
    (
        PROCESSES,
        "a reader beside so many writers",
        "falls",
    ): "With more processes than cores each gets its part of them.",
    (
        PROCESSES,
        "a writer beside so many readers",
        "falls",
    ): "With more processes than cores each gets its part of them.",
}
