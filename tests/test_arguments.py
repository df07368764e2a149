"""Each parameter of each public function gets values of wrong kinds. It accepts a value as a person means it, or names
it.

A refused value raises one of the package's errors, which names the parameter or the value. A parameter for a boolean, a
number or a text accepts no other type in its place.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import segmentlog
from segmentlog.consuming.consumer import Consumer
from segmentlog.errors import SegmentlogError
from segmentlog.groups.group_admin import Groups
from segmentlog.log.partition import Partition
from segmentlog.producing.producer import Producer
from segmentlog.store import LogStore, Topic
from segmentlog.tables.table import Table

WRONG: dict[str, Any] = {
    "a str": "x", "empty": "", "NUL": "a\0b", "bytes": b"x", "None": None, "a float": 1.5, "NaN": float("nan"),
    "True": True, "a list": [1], "an empty list": [], "a tuple": (1, 2, 3), "a dict": {"a": 1}, "an object": object(),
    "negative": -1, "huge": 2**70, "minus huge": -(2**70), "numpy int": np.int64(3), "numpy float": np.float64(0.5),
    "numpy str": np.str_("x"), "numpy bool": np.bool_(1), "a datetime": datetime(2026, 1, 1, tzinfo=UTC),
    "a timedelta": timedelta(1), "a class": int, "a number as a str": "0", "a surrogate": "\ud800",
}  # fmt: skip

_BOOLS = {"create", "read_only", "background", "follow", "durable_only", "skip_damaged", "auto_commit",
          "enable_idempotence", "dry_run", "internal", "sync", "committed", "control"}  # fmt: skip
_INTS = {"partitions", "offset", "before_offset", "number", "max_bytes", "fetch_bytes", "batch_size",
         "max_poll_records", "auto_commit_interval_ms", "max_poll_interval_ms", "transaction_timeout_ms",
         "timestamp_ms", "offsets_retention_minutes", "buffer_bytes", "scrub_bytes_per_s"}  # fmt: skip


class World:
    """A store with something in it, and the objects that are asked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = segmentlog.open(folder / "store", background=False)
        self.store.create_topic("t", partitions=2)
        self.store.create_topic("c", cleanup_policy="compact")
        self.topic = self.store.topic("t")
        self.partition = self.topic.partition(0)
        self.partition.append([b"%d" % number for number in range(20)])
        self.compacted = self.store.topic("c").partition(0)
        self.compacted.append([b"v"], keys=[b"k"])
        self.producer = self.store.producer(name="n")
        self.consumer = self.store.consumer("t")
        self.member = self.store.consumer("t", group="g")
        self.member.poll_group(1)
        self.table = self.store.table("c")
        self.made = 0

    def close(self) -> None:
        for one in (self.producer, self.consumer, self.member):
            one.close()
        self.store.close()

    def new_topic(self) -> str:
        return self.store.create_topic(self.new_name()).name

    def new_name(self) -> str:
        self.made += 1
        return f"made-{self.made}"


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """Yield a new store for each test, in which some values are valid."""
    made = World(tmp_path)
    yield made
    made.close()


def _closing(result: Any) -> None:
    if hasattr(result, "close"):
        result.close()
    elif inspect.isgenerator(result):
        list(result)


CALLS: dict[str, tuple[Callable[..., Any], Callable[[World], tuple[Any, dict[str, Any]]]]] = {
    "open": (segmentlog.open, lambda w: (segmentlog.open, {"path": w.store.path})),
    "create_topic": (LogStore.create_topic, lambda w: (w.store.create_topic, {"name": w.new_name()})),
    "alter_topic": (LogStore.alter_topic, lambda w: (w.store.alter_topic, {"name": "t", "retention_ms": 5000})),
    "delete_topic": (LogStore.delete_topic, lambda w: (w.store.delete_topic, {"name": w.new_topic()})),
    "rename_topic": (LogStore.rename_topic, lambda w: (w.store.rename_topic, {"name": w.new_topic(), "new_name": "c"})),
    "topic": (LogStore.topic, lambda w: (w.store.topic, {"name": "t"})),
    "topics": (LogStore.topics, lambda w: (w.store.topics, {})),
    "partition": (Topic.partition, lambda w: (w.topic.partition, {"number": 0})),
    "producer": (LogStore.producer, lambda w: (w.store.producer, {})),
    "consumer": (LogStore.consumer, lambda w: (lambda **o: w.store.consumer("t", **o), {})),
    "group consumer": (LogStore.consumer, lambda w: (lambda **o: w.store.consumer("t", **{"group": "g2", **o}), {})),
    "table": (LogStore.table, lambda w: (w.store.table, {"topic": "c"})),
    "append": (Partition.append, lambda w: (w.partition.append, {"values": [b"v"]})),
    "read": (Partition.read, lambda w: (w.partition.read, {"offset": 0})),
    "offset_for_timestamp": (
        Partition.offset_for_timestamp, lambda w: (w.partition.offset_for_timestamp, {"timestamp_ms": 5}),
    ),
    "end_offset": (Partition.end_offset, lambda w: (w.partition.end_offset, {})),
    "check_position": (Partition.check_position, lambda w: (w.partition.check_position, {"offset": 1})),
    "trim": (Partition.trim, lambda w: (w.partition.trim, {"before_offset": 0})),
    "truncate": (Partition.truncate, lambda w: (w.partition.truncate, {"offset": w.partition.log_end_offset})),
    "retain": (Partition.retain, lambda w: (w.partition.retain, {})),
    "compact": (Partition.compact, lambda w: (w.compacted.compact, {})),
    "producer of": (Partition.producer, lambda w: (w.partition.producer, {"producer_id": 5})),
    "send": (Producer.send, lambda w: (w.producer.send, {"topic": "t", "value": b"v"})),
    "send_many": (Producer.send_many, lambda w: (w.producer.send_many, {"topic": "t", "values": [b"v"]})),
    "last_sequence": (Producer.last_sequence, lambda w: (w.producer.last_sequence, {"topic": "t"})),
    "seek": (Consumer.seek, lambda w: (w.consumer.seek, {"topic": "t", "partition": 0, "to": 3})),
    "position": (Consumer.position, lambda w: (w.consumer.position, {"topic": "t"})),
    "pause": (Consumer.pause, lambda w: (w.consumer.pause, {"topic": "t"})),
    "resume": (Consumer.resume, lambda w: (w.consumer.resume, {"topic": "t"})),
    "commit": (Consumer.commit, lambda w: (w.member.commit, {})),
    "commit_async": (Consumer.commit_async, lambda w: (w.member.commit_async, {})),
    "committed": (Consumer.committed, lambda w: (w.member.committed, {"topic": "t"})),
    "describe": (Groups.describe, lambda w: (w.store.groups.describe, {"group": "g"})),
    "reset": (Groups.reset, lambda w: (w.store.groups.reset, {"group": "r", "positions": {("t", 0): 1}})),
    "delete": (Groups.delete, lambda w: (w.store.groups.delete, {"group": "nobody"})),
    "as_of": (Table.as_of, lambda w: (w.table.as_of, {"offsets": 0})),
}  # fmt: skip


def _cases() -> Iterator[tuple[str, str]]:
    for name, (function, _) in CALLS.items():
        for parameter in inspect.signature(function).parameters.values():
            if parameter.name != "self" and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
                yield name, parameter.name


@pytest.mark.parametrize(("call", "parameter"), _cases())
def test_wrong_values_are_refused_by_name(
    world: World, call: str, parameter: str, monkeypatch: Any, tmp_path: Path
) -> None:
    """A wrong value raises a clear error: no TypeError of inner code, no traceback of numpy.

    It is never silently converted.
    """
    monkeypatch.chdir(tmp_path)  # a path like "x" is a path
    problems = [f"{what}: {flaw}" for what, value in WRONG.items() if (flaw := _flaw(world, call, parameter, value))]
    assert not problems, f"{call}({parameter}=...)\n" + "\n".join(problems)


def _flaw(world: World, call: str, parameter: str, value: Any) -> str | None:
    """Return how a call mistreats a value, or None."""
    function, arguments = CALLS[call][1](world)
    try:
        _closing(function(**{**arguments, parameter: value}))
    except SegmentlogError as error:
        named = re.sub("[._ ]", ".?", parameter)
        if re.search(named, str(error), re.IGNORECASE) or any(text in str(error) for text in _shown(value)):
            return None
        return f"{type(error).__name__} names neither parameter nor value: {error}"
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    is_bool = isinstance(value, bool | np.bool_)
    if parameter in _BOOLS and not is_bool:
        return "taken for True or False"
    if parameter in _INTS and (is_bool or isinstance(value, float | str | bytes | list | dict)):
        return "taken for a whole number"
    return None


def _shown(value: Any) -> list[str]:
    """Return the ways in which an error may show a value."""
    parts = [value, *value] if isinstance(value, dict) else [value]
    return [shown[:20] for part in parts for shown in (repr(part), str(part)) if shown]
