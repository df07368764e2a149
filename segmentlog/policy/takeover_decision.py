"""Decide when a standby takes over a shipped store: what it has observed of the owner, and for how long.

    handed over   the manifest says that the owner has stopped and waits for a successor: at once
    refused       every port of the owner's server refuses connections, and the manifest stays the same
    silent        no port of the owner's server answers as the owner, and the manifest stays the same
    unreached     the same for much longer: only an earlier owner has ever answered this machine

The decision is about availability only. If it is wrong, the conditional put of the takeover still names one owner, and
the previous one is fenced. Both observations must fail together: an owner that cannot be reached from here still
changes the manifest. The server of an owner does so even if it has appended nothing (`TakeoverSettings.heartbeat_ms`).

Only time that the standby itself has observed counts. After its start, and after a time in which it was stopped, the
periods begin again. If its cycles are slow, each cycle counts as one second.

An owner that has never answered this machine may be healthy: perhaps its address is wrong here, or a firewall is in
between. If an earlier owner has answered, or was this machine itself, the new one may have died before its first
answer, for example during its takeover. Then the standby waits for `TakeoverSettings.unreached_s`.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterator
from typing import Final, NamedTuple

import msgspec

OBSERVATION_GAP_S: Final = 3.0
"""A longer time between two observations was not observed: the process was stopped, or waited for the object store."""
STOPPED_S: Final = 60.0
"""After a longer time between two observations, the periods begin again. A shorter one counts as `_SLOW_CYCLE_S`.

*Rejected:* beginning again after each gap. With an object store that answers after seconds, each cycle is such a gap,
and the takeover would never be due."""
_SLOW_CYCLE_S: Final = 1.0
_HEARTBEAT_MAX_S: Final = 4.0
"""Also how late an idle owner notices that it was replaced, so it is limited if ``silence_s`` is long."""


class TakeoverSettings(msgspec.Struct, frozen=True):
    """How long the owner must be silent, or refuse connections, before a standby takes over; in seconds.

    A process that was killed refuses at once. A machine that is gone, stopped or cut off is silent: it may only be
    slow, so that period is longer. ``unreached_s`` is the period for an owner that has never answered this machine, if
    an earlier owner has. It must be longer than a takeover: meanwhile the new owner does not answer.
    """

    silence_s: float = 8.0
    refused_s: float = 3.0
    unreached_s: float = 300.0

    @property
    def heartbeat_ms(self) -> int:
        """Longest time in milliseconds between two changes of the manifest by an owner that appends nothing.

        A standby that cannot reach the owner must see a change within ``silence_s``, also if an upload is slow.
        """
        return max(1, round(min(self.silence_s / 2, _HEARTBEAT_MAX_S) * 1000))


class ProbeResult(enum.Enum):
    """What one connection to a port of the owner's server showed."""

    ALIVE = "answers"
    """The owner that the manifest names has answered."""
    REFUSED = "refuses connections"
    SILENT = "does not answer"
    """No answer in time, or another program has answered."""


class TakeoverDecision(NamedTuple):
    """Whether to take over now, and the reason for the log and the status."""

    is_due: bool
    reason: str
    is_blocked: bool = False
    """Whether the standby could not take over if the owner failed now."""


class OwnerWatch:
    """What a standby has observed of the owner of the store. All times are of one monotonic clock, in seconds.

    Not thread-safe.
    """

    def __init__(self, settings: TakeoverSettings, answered_owner: str = "") -> None:
        self._settings = settings
        self.answered_owner = answered_owner
        """Id of the owner that answered this machine last, also before a restart of this process.

        If this machine itself was the owner since, the id of that owner.
        """
        self._owner_id = ""
        self._read_s: float | None = None
        """The caller's time of the last observation."""
        self._clock_s = 0.0
        """Time that this machine has observed. All times below are of this clock."""
        self._is_readable = False
        self._nonce = ""
        self._has_nodes = False
        self._is_handed_over = self._is_ended = False
        self._unchanged_since_s: float | None = None
        self._silent_since_s: float | None = None
        self._refused_since_s: float | None = None

    def observe_manifest(
        self, now_s: float, nonce: str, owner_id: str, *, has_nodes: bool, is_handed_over: bool, is_ended: bool = False
    ) -> None:
        """Record the manifest that was just read; ``has_nodes``: whether it names the ports of the owner's server."""
        now_s = self._start_observation(now_s)
        self._is_readable = True
        if owner_id != self._owner_id:
            self._owner_id, self._silent_since_s, self._refused_since_s = owner_id, None, None
        self._has_nodes, self._is_handed_over, self._is_ended = has_nodes, is_handed_over, is_ended
        if nonce != self._nonce or self._unchanged_since_s is None:
            self._nonce, self._unchanged_since_s = nonce, now_s

    def observe_unreadable(self, now_s: float) -> None:
        """Record that the manifest could not be read: whether the owner ships is unknown until the next reading."""
        self._start_observation(now_s)
        self._is_readable = False
        self._unchanged_since_s = None

    def observe_probes(self, now_s: float, results: Collection[ProbeResult]) -> None:
        """Record the results of one probe of each port."""
        now_s = self._start_observation(now_s)
        is_alive = ProbeResult.ALIVE in results
        if is_alive:
            self.answered_owner = self._owner_id
        is_refused = bool(results) and all(result is ProbeResult.REFUSED for result in results)
        self._silent_since_s = None if is_alive else _earlier(self._silent_since_s, now_s)
        self._refused_since_s = _earlier(self._refused_since_s, now_s) if is_refused else None

    def _start_observation(self, now_s: float) -> float:
        """Continue the clock of observed time, and return its time."""
        gap_s = 0.0 if self._read_s is None else now_s - self._read_s
        self._read_s = now_s
        if not 0 <= gap_s <= STOPPED_S:
            self._unchanged_since_s = self._silent_since_s = self._refused_since_s = None
        else:
            self._clock_s += gap_s if gap_s <= OBSERVATION_GAP_S else _SLOW_CYCLE_S
        return self._clock_s

    def decide(self, *, is_complete: bool) -> TakeoverDecision:
        """Decide whether to take over now. ``is_complete``: whether the replica has been complete once."""
        now_s = self._clock_s
        if not is_complete:
            return TakeoverDecision(False, "the replica is not complete yet", is_blocked=True)
        if not self._is_readable or self._unchanged_since_s is None:
            why = "the manifest cannot be read: whether the owner still ships is unknown"
            return TakeoverDecision(False, why, is_blocked=True)
        if self._is_ended:
            return TakeoverDecision(
                False, "the owner has ended shipping, and may have appended records since; a takeover would assign"
                " their offsets a second time", is_blocked=True,
            )  # fmt: skip
        if self._is_handed_over:
            return TakeoverDecision(True, "the owner hands the store over")
        if not self._has_nodes:
            return TakeoverDecision(
                False, "no server serves the store at the owner, so that nothing shows whether it works; to take over"
                " by hand, use 'segmentlog takeover'", is_blocked=True,
            )  # fmt: skip
        if self._silent_since_s is None:
            return TakeoverDecision(False, "the owner answers")
        if not self.answered_owner:
            return TakeoverDecision(
                False, "the owner has never answered this machine: check that its address can be reached from here,"
                " with the same TLS settings; to take over by hand, use 'segmentlog takeover'", is_blocked=True,
            )  # fmt: skip
        for since_s, wanted_s, what in self._periods(self._silent_since_s):
            period_s = now_s - max(since_s, self._unchanged_since_s)
            if period_s >= wanted_s:
                return TakeoverDecision(True, f"{what}, and it has shipped nothing for {period_s:.1f} s")
        silent_s = now_s - self._silent_since_s
        unchanged_s = now_s - self._unchanged_since_s
        if self.answered_owner != self._owner_id:
            return TakeoverDecision(
                False, f"this owner has never answered this machine; it has shipped nothing for {unchanged_s:.1f} s,"
                f" and this machine takes over after {self._settings.unreached_s:.0f} s"
            )  # fmt: skip
        return TakeoverDecision(
            False, f"the owner has not answered for {silent_s:.1f} s; it shipped last {unchanged_s:.1f} s ago"
        )

    def _periods(self, silent_since_s: float) -> Iterator[tuple[float, float, str]]:
        """Yield each period that can make a takeover due: its start, its length and what it shows."""
        settings = self._settings
        if self.answered_owner != self._owner_id:
            yield silent_since_s, settings.unreached_s, "the owner has never answered this machine"
            return
        if self._refused_since_s is not None:
            yield self._refused_since_s, settings.refused_s, "the owner's ports refuse connections"
        yield silent_since_s, settings.silence_s, "the owner does not answer"


def _earlier(since_s: float | None, now_s: float) -> float:
    return now_s if since_s is None else since_s
