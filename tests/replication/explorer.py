"""Explore the states of a model: all of them breadth first, or random runs. A failure comes with a short trace.

A random run draws how likely each kind of step is. So some kinds never happen in a run, and others often (swarm
testing): with fixed weights, some mistakes were not found in 20,000 runs.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from enum import StrEnum
from typing import Any, Final, NamedTuple

from replication.cluster_model import STEPS, Broken, Cluster, Setting, Step, check, describe, first_state

Trace = list[tuple[str, Any]]
"""(kind, key) of each step."""

FAULTS: Final = ("kill", "cut the power", "lose", "deliver a copy", "touch the document", "request a read", "shrink")
KINDS: Final = tuple(STEPS)
NEWEST: Final = "newest first"
"""How often the newest message arrives next: then others arrive late."""
NONE: Final = "no message"
"""How likely none of the messages that are under way arrives."""
MESSAGES: Final = ("request", "answer", "swap", "read")


class Explored(NamedTuple):
    """Figures of an exploration."""

    runs: int = 0
    steps: int = 0
    states: int = 0
    acknowledged: int = 0
    """Runs or states with an acknowledged record."""
    led_twice: int = 0
    """Runs or states with such a record in a later term than the first."""
    is_complete: bool = True

    def __add__(self, other: object) -> Explored:  # type: ignore[override]
        assert isinstance(other, Explored)
        sums = [left + right for left, right in zip(self[:-1], other[:-1], strict=True)]
        return Explored(*sums, self.is_complete and other.is_complete)


class Violation(AssertionError):
    """An invariant does not hold after the steps of a trace."""

    def __init__(self, reason: str, setting: Setting, trace: Trace, found: str):
        self.trace = trace
        lines = "\n".join(f"  {number:3} {describe(*step)}" for number, step in enumerate(trace, 1))
        super().__init__(f"{reason}\n{found}\n{setting}\n{lines}")


# ---------------------------------------------------------------- every state


def explore(setting: Setting, max_states: int = 1 << 62) -> Explored:
    """Visit every state that the setting allows, nearest first. Raise `Violation` with the shortest trace."""
    first = first_state(setting)
    parents: dict[Cluster, tuple[str, Any, Cluster] | None] = {first: None}
    left = deque([first])
    steps = acknowledged = led_twice = 0
    while left:
        cluster = left.popleft()
        for kind in KINDS:
            for key, reached in STEPS[kind](cluster, setting):
                after = _canonical(reached)
                steps += 1
                if after in parents:
                    continue
                parents[after] = (kind, key, cluster)
                try:
                    check(after, setting)
                except Broken as error:
                    found = f"found after {len(parents):,} states; no shorter trace exists"
                    raise Violation(str(error), setting, _path(parents, after), found) from None
                acknowledged += bool(after.acknowledged)
                led_twice += any(term > 1 for _, term in after.acknowledged)
                left.append(after)
        if len(parents) >= max_states:
            return Explored(1, steps, len(parents), acknowledged, led_twice, False)
    return Explored(1, steps, len(parents), acknowledged, led_twice)


def _canonical(cluster: Cluster) -> Cluster:
    """Return the same state with its messages in an order that does not depend on how it was reached."""
    return cluster._replace(messages=tuple(sorted(cluster.messages, key=hash)))


def _path(parents: dict[Cluster, tuple[str, Any, Cluster] | None], cluster: Cluster) -> Trace:
    trace: Trace = []
    while (parent := parents[cluster]) is not None:
        kind, key, cluster = parent
        trace.append((kind, key))
    return trace[::-1]


# ---------------------------------------------------------------- random runs


class Theme(StrEnum):
    """A distribution of faults. Each random run draws its theme, setting and weights."""

    MIXED = "mixed"
    LATE = "late messages"
    DISKS = "lost data"
    """Machines lose confirmed records, and return with a new incarnation."""


class Focus(NamedTuple):
    """The setting of runs that concern one rule, and the weights that differ from `CALM`."""

    setting: Setting
    weights: dict[str, float]
    beginning: Sequence[tuple[str, tuple[Any, ...]]] = ()
    """First steps of each run: a kind, and the beginning of a key. A step that is not possible is left out."""


TAKEOVER: Final = (
    *(("append", (0,)), ("sync", (0,)), ("fetch", (1,)), ("deliver", ("request", 0)), ("deliver", ("answer", 1))),
    *(("sync", (1,)), ("fetch", (1,)), ("deliver", ("request", 0)), ("advance the high watermark", (0,))),
    *(("lose", ("answer", 1)), ("append", (0,)), ("stand", (1,)), ("deliver", ("swap", 1))),
    *(("read the document", (1,)), ("read the document", (0,)), ("read the document", (2,))),
)
"""First steps: b takes over, without a record that a has appended alone."""


CALM: Final = dict.fromkeys(KINDS, 1.0) | dict.fromkeys((*FAULTS, "stand", "force", "replace the disk"), 0.0)
"""Weights of a cluster without faults and elections."""


def draw_setting(draw: random.Random, theme: Theme) -> Setting:
    """Draw the size of a cluster, its mode and the faults that may happen."""
    machines = draw.choice((2, 3, 3, 3))
    min_isr = draw.choice((1, 2, 2))
    setting = Setting(
        machines=machines,
        min_isr=min_isr,
        isr=draw.randint(min_isr, machines),
        confirms_unsynced=draw.random() < 0.2,
        step=draw.choice((2, 3)),
        fetches=draw.choice((1, 2, 3)),
        disks=draw.choice((0, 0, min_isr - 1)),
        forced=draw.choice((0, 0, 0, 1, 2)),
    )
    if theme is Theme.DISKS:
        setting = setting._replace(confirms_unsynced=draw.random() < 0.7, disks=min_isr - 1, forced=0)
    return setting


def draw_weights(draw: random.Random, theme: Theme) -> dict[str, float]:
    """Draw how likely each kind of step is in a run, and how likely each kind of message arrives next."""
    weights = {kind: draw.choice((0.3, 1, 1, 3)) for kind in KINDS}
    weights |= {kind: draw.choice((0, 0, 0.02, 0.1, 0.3)) for kind in FAULTS}
    weights["stand"] = draw.choice((0.02, 0.05, 0.1, 0.3))
    weights["join"] = draw.choice((0.3, 1, 5))
    weights["deliver"] = draw.choice((2, 4, 8))
    weights["force"] = weights["replace the disk"] = draw.choice((0.02, 0.1))
    weights["start"] = draw.choice((0.3, 1))
    weights |= {message: draw.choice((0.05, 0.3, 1, 1)) for message in MESSAGES}
    weights[NEWEST], weights[NONE] = draw.choice((0, 0, 0.5, 0.9)), draw.choice((0, 0, 1, 5))
    if theme is Theme.LATE:
        weights |= {kind: draw.choice((0, 0.05)) for kind in ("kill", "lose", "touch the document", "force")}
        weights |= {kind: draw.choice((0.1, 0.5)) for kind in ("deliver a copy", "request a read")}
        weights |= {message: draw.choice((0.02, 0.2, 1)) for message in MESSAGES}
    if theme is Theme.DISKS:
        weights |= {kind: 0 for kind in ("kill", "lose", "touch the document", "deliver a copy")}
        weights |= {"cut the power": draw.choice((0.05, 0.2)), "shrink": 0, "start": 3, "join": 5}
        weights["stand"] = draw.choice((0, 0.02))
    return weights


def choose(draw: random.Random, kind: str, steps: list[Step], weights: dict[str, float]) -> Step | None:
    """Choose one of the steps of a kind, or None. Messages have weights of their own, so that some arrive late."""
    if kind in ("deliver", "deliver a copy", "lose"):
        if len(steps) > 1 and draw.random() < weights[NEWEST]:
            return steps[-1]
        return draw.choices([*steps, None], [*(weights[key[0]] for key, _ in steps), weights[NONE]])[0]
    return draw.choice(steps)


def run(seed: str, focus: Focus | None = None) -> Explored:
    """Make one random run. Raise `Violation` with a shrunk trace."""
    draw = random.Random(seed)
    theme = draw.choice(tuple(Theme))
    setting = focus.setting if focus else draw_setting(draw, theme)
    weights = draw_weights(draw, theme)
    if focus:
        weights = CALM | dict.fromkeys(MESSAGES, 1.0) | {NEWEST: 0, NONE: 0} | focus.weights
    cluster = first_state(setting)
    trace: Trace = []
    beginning: Sequence[tuple[str, tuple[Any, ...]]] = TAKEOVER if draw.random() < 0.25 else ()
    for kind, prefix in focus.beginning if focus else beginning:
        found = [step for step in STEPS[kind](cluster, setting) if step[0][: len(prefix)] == prefix]
        if found:
            cluster = found[0][1]
            trace.append((kind, found[0][0]))
    length = draw.choice((60, 120, 240))
    for kind in draw.choices(KINDS, [weights[kind] for kind in KINDS], k=length * 3):
        steps = list(STEPS[kind](cluster, setting))
        chosen = choose(draw, kind, steps, weights) if steps else None
        if chosen is None:
            continue
        key, cluster = chosen
        trace.append((kind, key))
        try:
            check(cluster, setting)
        except Broken as error:
            found = f"found by run {seed!r} after {len(trace)} steps"
            raise Violation(str(error), setting, shrink(trace, setting, str(error)[:2]), found) from None
        if len(trace) >= length:
            break
    is_later = any(term > 1 for _, term in cluster.acknowledged)
    return Explored(1, len(trace), len(trace), bool(cluster.acknowledged), is_later)


def run_many(seed: int, runs: int, focus: Focus | None = None) -> Explored:
    """Make random runs; each has a seed of its own, ``"<seed>/<number>"``, that a violation names."""
    total = Explored()
    for number in range(runs):
        total += run(f"{seed}/{number}", focus)
    return total


def shrink(trace: Trace, setting: Setting, invariant: str) -> Trace:
    """Return a shorter trace that violates the same invariant: leave out many steps at a time, then fewer."""
    size = len(trace)
    while size:
        position = 0
        while position < len(trace):
            shorter = replay(trace[:position] + trace[position + size :], setting, invariant)
            if shorter is not None and len(shorter) < len(trace):
                trace = shorter
            else:
                position += size
        size //= 2
    return trace


def replay(trace: Trace, setting: Setting, invariant: str) -> Trace | None:
    """Repeat the steps of a trace that are possible. Return those made until the invariant breaks, or None."""
    cluster = first_state(setting)
    made: Trace = []
    for kind, key in trace:
        steps = dict(STEPS[kind](cluster, setting))
        similar = next((other for other in steps if _is_similar(kind, key, other)), None)
        chosen = key if key in steps else similar
        if chosen is None:
            continue
        cluster = steps[chosen]
        made.append((kind, chosen))
        try:
            check(cluster, setting)
        except Broken as error:
            return made if str(error).startswith(invariant) else None
    return None


def _is_similar(kind: str, key: Any, other: Any) -> bool:
    """Return whether two steps are of the same machine, or of messages of the same kind between the same machines."""
    if kind not in ("deliver", "deliver a copy", "lose"):
        return bool(key[0] == other[0])
    if key[0] not in ("request", "answer"):
        return bool(key[:2] == other[:2])
    return bool(key[:2] == other[:2] and key[2].replica == other[2].replica)
