"""Write Prometheus' text format for metrics with tens of thousands of samples.

The client library takes about 10 us a sample. For 10,000 partitions it would take a second,
in which the process could serve no client. So this module writes the metrics of partitions and groups, and the library
writes all others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from segmentlog.server.telemetry.definitions import Family


def labels_of(names: Sequence[str], values: Sequence[object]) -> str:
    """Return the labels as text: ``{topic="clicks",partition="3"}``."""
    return "{" + ",".join(f'{name}="{_escaped(str(value))}"' for name, value in zip(names, values, strict=True)) + "}"


def head(family: Family) -> str:
    """Return the two comment lines of a metric."""
    text = family.help.replace("\\", r"\\").replace("\n", r"\n")
    return f"# HELP {family.name} {text}\n# TYPE {family.name} {family.kind}\n"


def render(family: Family, samples: Iterable[tuple[str, float]]) -> str:
    """Return a metric with a sample for each of the labels."""
    name = family.name
    return head(family) + "".join([f"{name}{labels} {value}\n" for labels, value in samples])


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
