"""Prometheus' text format, for what is told by the ten thousand.

The client library makes a sample in some 10 us, which is a second of this process for 10,000 partitions, with everybody
else kept waiting: so what is told of partitions and groups is written here. All else is the library's to write.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from segmentlog.server.telemetry.definitions import Family


def labels_of(names: Sequence[str], values: Sequence[object]) -> str:
    """``{topic="clicks",partition="3"}``."""
    return "{" + ",".join(f'{name}="{_escaped(str(value))}"' for name, value in zip(names, values, strict=True)) + "}"


def head(family: Family) -> str:
    """The two lines above a metric."""
    text = family.help.replace("\\", r"\\").replace("\n", r"\n")
    return f"# HELP {family.name} {text}\n# TYPE {family.name} {family.kind}\n"


def render(family: Family, samples: Iterable[tuple[str, float]]) -> str:
    """A metric of which there is one for each of these labels."""
    name = family.name
    return head(family) + "".join([f"{name}{labels} {value}\n" for labels, value in samples])


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
