"""The page about damage: findings of the scrubber, lost ranges, recoveries and current errors."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from segmentlog.errors import SegmentlogError
from segmentlog.http.console.pages import Console
from segmentlog.objects.standby.machine_role import MachineRole, read_machine_role
from segmentlog.security.viewer import Thing
from segmentlog.storage.fs import FileSystem

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from segmentlog.records import LostRange, RecoveryReport

_SHOWN_MAX: Final = 200
"""Maximum number of rows in each table."""
# Keys of `LogStore.health`.
_PARTITION: Final = re.compile(r"(?:ship )?([^/ ]+)/\d+")
_PRODUCER: Final = re.compile(r"transaction of (.+)", re.DOTALL)
_QUIET: Final = frozenset(("new", "clean", "live"))
"""Verdicts of recoveries that found nothing to repair."""


class DamagePages:
    """Handler of the page about damage."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._store = console.store

    def show_damage(self, request: Request) -> Response:
        """Render the page, limited to topics that the principal may see."""
        console = self._console
        sees_all = console.may_see(request, Thing.CLUSTER)
        scrub = self._store.scrub_report()
        findings = [one for one in scrub.findings if console.may_see_topic(request, one.topic)]
        overview = console.overview()
        hurt = [
            state
            for state in overview.partitions.values()
            if (state.lost_offsets or state.summary.has_failed) and console.may_see_topic(request, state.topic)
        ]
        lost = [
            (state.topic, state.number, one)
            for state in hurt[:_SHOWN_MAX]
            for one in self._lost(state.topic, state.number)
        ]
        recoveries = self._store.recovery_reports()
        shown_reports: list[tuple[str, int, RecoveryReport]] = [
            (topic, number, report)
            for (topic, number), report in sorted(recoveries.items())
            if report.verdict not in _QUIET and console.may_see_topic(request, topic)
        ]
        return console.render(
            request, "damage.html", nav="damage", findings=findings[:_SHOWN_MAX], finding_count=len(findings),
            scrub=scrub, failed=[state for state in hurt if state.summary.has_failed][:_SHOWN_MAX],
            lost=sorted(lost, key=lambda one: -one[2].at_ms)[:_SHOWN_MAX], recoveries=shown_reports[:_SHOWN_MAX],
             role=self._role() if sees_all else None,
             opened_count=len(recoveries) if sees_all else None, health=self._health(request) if sees_all else None,
             path=console.store_location(request), store_id=self._store.store_id,
        )  # fmt: skip

    def _role(self) -> MachineRole | None:
        path = self._store.path
        return None if path is None else read_machine_role(FileSystem(), path, self._console.now_ms())

    def _health(self, request: Request) -> dict[str, str]:
        """Return current errors, except those about topics and producers that the principal may not see."""
        found = {}
        for name, why in self._store.health().items():
            partition, producer = _PARTITION.fullmatch(name), _PRODUCER.fullmatch(name)
            if partition and not self._console.may_see_topic(request, partition[1]):
                continue
            if producer and not self._console.may_see(request, Thing.TRANSACTIONAL_ID, producer[1]):
                continue
            found[name] = why
        return found

    def _lost(self, topic: str, number: int) -> list[LostRange]:
        try:
            return self._store.topic(topic).partition(number).lost_ranges()
        except (SegmentlogError, OSError):  # listed as failed, or deleted meanwhile
            return []
