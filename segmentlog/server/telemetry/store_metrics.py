"""Metrics of all partitions and groups of the store, including those that only other processes use. One worker
reports them.
"""

from __future__ import annotations

import threading
import time
from itertools import starmap
from typing import TYPE_CHECKING, Final

from segmentlog.errors import SegmentlogError
from segmentlog.objects.ownership.binding import is_bound
from segmentlog.objects.standby.machine_role import read_machine_role
from segmentlog.objects.standby.roles import Role
from segmentlog.server.telemetry import definitions
from segmentlog.server.telemetry.text_format import labels_of, render
from segmentlog.storage.fs import FileSystem
from segmentlog.topics.partition_states import PartitionStates

if TYPE_CHECKING:
    from collections.abc import Sequence

    from segmentlog.clock import Clock
    from segmentlog.groups.group_admin import GroupDescription
    from segmentlog.records import LostRange, TopicPartition
    from segmentlog.server.telemetry.definitions import Family
    from segmentlog.store import LogStore
    from segmentlog.topics.partition_states import PartitionState

_STATES: Final = ("Stable", "Rebalancing", "Empty")
_KINDS: Final = ("library", "kafka")
_ROLES: Final = (Role.OWNER.value, Role.STANDBY.value, Role.TAKING_OVER.value)

_Samples = list[tuple[str, float]]


class StoreTelemetry:
    """Metrics of a store. Thread-safe: scrapes run one after the other."""

    def __init__(self, store: LogStore, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._partitions = PartitionStates(store, clock)
        self._fs = FileSystem()
        self._mutex = threading.Lock()
        self._labels: dict[tuple[str, int], str] = {}

    def text(self) -> str:
        """Return the metrics in Prometheus' text format. Raise `StoreClosed`."""
        with self._mutex:
            began_s = time.perf_counter()
            states, parts = self._render_partitions()
            parts += self._render_groups(states)
            parts += self._render_role()
            parts.append(render(definitions.STORE_SECONDS, [("", time.perf_counter() - began_s)]))
            return "".join(parts)

    def _render_partitions(self) -> tuple[dict[tuple[str, int], PartitionState], list[str]]:
        """Return (the partitions that have a state, text of the metrics)."""
        states: dict[tuple[str, int], PartitionState] = {}
        labels: dict[tuple[str, int], str] = {}
        rows = []
        shipped: list[tuple[int, int]] = []
        for state in self._partitions.states():
            key = (state.topic, state.number)
            states[key] = state
            labels[key] = self._labels.get(key) or labels_of(definitions.LOG_END.labels, key)
            rows.append(_values(state))
            shipped.append((state.summary.shipped_offset, state.unshipped_count))
        self._labels = labels
        counts = self._partitions
        parts = [
            render(definitions.TOPICS, [("", counts.topic_count)]),
            render(definitions.PARTITIONS, [("", counts.partition_count)]),
            render(definitions.UNREAD, [("", counts.partition_count - len(rows))]),
        ]
        named = list(labels.values())
        columns = list(zip(*rows, strict=True)) or [()] * len(definitions.PARTITION)
        for family, column in zip(definitions.PARTITION, columns, strict=True):
            parts.append(render(family, zip(named, column, strict=True)))
            time.sleep(0)
        if is_bound(self._fs, self._store.path):
            parts.append(render(definitions.SHIPPED, zip(named, (offset for offset, _ in shipped), strict=True)))
            parts.append(render(definitions.UNSHIPPED, zip(named, (count for _, count in shipped), strict=True)))
        return states, parts

    def _render_role(self) -> list[str]:
        found = read_machine_role(self._fs, self._store.path, self._clock.now_ms())
        if found is None:
            return []
        roles = [(labels_of(definitions.ROLE.labels, (role,)), int(found.role == role)) for role in _ROLES]
        parts = [render(definitions.ROLE, roles), render(definitions.OWNER_EPOCH, [("", found.owner_epoch)])]
        if found.role == Role.STANDBY.value:
            parts.append(render(definitions.STANDBY_RECORDS, [("", found.lag_records)]))
            if found.lag_s >= 0:
                parts.append(render(definitions.STANDBY_SECONDS, [("", found.lag_s)]))
            parts.append(render(definitions.STANDBY_BLOCKED, [("", int(bool(found.problem)))]))
        if found.last_takeover_ms:
            parts.append(render(definitions.LAST_TAKEOVER, [("", found.last_takeover_ms / 1000)]))
        return parts

    def _render_groups(self, states: dict[tuple[str, int], PartitionState]) -> list[str]:
        def end_of(tp: TopicPartition) -> int | None:
            state = states.get((tp.topic, tp.partition))
            return None if state is None else state.summary.log.log_end_offset

        def lost_of(tp: TopicPartition) -> Sequence[LostRange]:
            return states[tp.topic, tp.partition].lost

        samples: dict[Family, _Samples] = {
            family: []
            for family in (
                definitions.GROUP_STATE, definitions.GROUP_MEMBERS, definitions.GROUP_GENERATION, definitions.COMMITTED,
                definitions.LAG,
            )
        }  # fmt: skip
        for group in self._store.groups.names():
            try:
                found = self._store.groups.describe(group, end_of, lost_of)
            except (SegmentlogError, OSError):  # most likely deleted since it was listed
                continue
            _add(samples, found)
            time.sleep(0)
        return list(starmap(render, samples.items()))


def _values(state: PartitionState) -> tuple[float, ...]:
    """Return the values in the order of `definitions.PARTITION`."""
    log, sync = state.summary.log, state.summary.sync
    return (
        log.log_start_offset, log.log_end_offset, sync.durable_offset, log.last_stable_offset, state.size_bytes,
        state.segment_count, log.epoch, state.lost_offsets, state.summary.unsynced_count, state.unsynced_s,
        sync.sync_count, int(state.summary.has_failed),
    )  # fmt: skip


def _add(samples: dict[Family, _Samples], found: GroupDescription) -> None:
    def add(family: Family, values: tuple[object, ...], value: float) -> None:
        samples[family].append((labels_of(family.labels, values), value))

    for state in _STATES:
        add(definitions.GROUP_STATE, (found.group, state), int(found.state == state))
    held_by = _KINDS[bool(found.holder)]
    for kind in _KINDS:
        add(definitions.GROUP_MEMBERS, (found.group, kind), len(found.members) if kind == held_by else 0)
    add(definitions.GROUP_GENERATION, (found.group,), found.generation)
    for one in found.partitions:
        where = (found.group, one.topic, one.partition)
        if one.committed is not None:
            add(definitions.COMMITTED, where, one.committed.offset)
        if one.lag is not None:
            add(definitions.LAG, where, one.lag)
