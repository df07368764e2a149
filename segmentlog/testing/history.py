"""Record which records a log acknowledged and returned, over any number of crashes, and find contradictions.

The rules apply to every implementation of a log:

* an offset never identifies two different records;
* a record that was acknowledged as durable still exists at its offset;
* a record that a durable-only reader received still exists;
* any other record that no longer exists is in a range that the log reports as lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec


class Claim(msgspec.Struct, frozen=True):
    """A log's answer to ``who``, a producer or reader: the offset has this record, and must keep it if ``durable``."""

    offset: int
    value: bytes | None
    who: str
    durable: bool


class Conflict(msgspec.Struct, frozen=True):
    """A broken rule, with the earlier claim and the present state."""

    rule: str
    offset: int
    before: str
    now: str

    def __str__(self) -> str:
        return f"{self.rule}: offset {self.offset}: {self.before}; now {self.now}"


class History:
    """The claims about one partition, in their order. Not thread-safe."""

    def __init__(self) -> None:
        self._first: dict[int, Claim] = {}
        self._durable: dict[int, Claim] = {}
        self._acknowledged: set[int] = set()
        self._withdrawn: set[int] = set()
        self._gone: set[int] = set()
        self.conflicts: list[Conflict] = []

    def __len__(self) -> int:
        """Return the number of offsets with a claim."""
        return len(self._first)

    def acknowledged(self, base_offset: int, values: Iterable[bytes | None], *, durable: bool) -> None:
        """Record that an append returned ``base_offset``, the offset of the first of these records."""
        for offset, value in enumerate(values, base_offset):
            self._acknowledged.add(offset)
            self._claim(Claim(offset, value, "the producer", durable))

    def handed(self, reader: str, offset: int, value: bytes | None, *, durable_only: bool = False) -> None:
        """Record that ``reader`` received this record at this offset."""
        self._claim(Claim(offset, value, reader, durable_only))

    def _claim(self, claim: Claim) -> None:
        first = self._first.setdefault(claim.offset, claim)
        if first.value != claim.value:
            self.conflicts.append(
                Conflict(
                    "one offset, two records",
                    claim.offset,
                    f"{first.who} got {_shown(first.value)}",
                    f"{claim.who} gets {_shown(claim.value)}",
                )
            )
        if claim.durable:
            self._durable.setdefault(claim.offset, claim)

    def named(self) -> dict[int, bytes | None]:
        """Return every offset with a claim, and the record of its first claim."""
        return {offset: claim.value for offset, claim in self._first.items()}

    def was_acknowledged(self, offset: int) -> bool:
        """Return whether an append at this offset returned, and no process has truncated the log below it since."""
        return offset in self._acknowledged and offset not in self._withdrawn

    def was_withdrawn(self, offset: int) -> bool:
        """Return whether a process truncated the log at or below this offset, or was about to."""
        return offset in self._withdrawn

    def durable_below(self, end_offset: int) -> None:
        """Record that the log reports all offsets below ``end_offset`` as durable.

        From now on the records at these offsets must survive, except those that `check` has already found missing.
        """
        for offset, claim in self._first.items():
            if offset < end_offset and offset not in self._withdrawn and offset not in self._gone:
                self._durable.setdefault(offset, claim)

    def withdrawn(self, offset: int) -> None:
        """Call this before a process truncates the log at ``offset``: claims from this offset on no longer count."""
        self._withdrawn.update(named for named in self._first if named >= offset)
        self._durable = {named: claim for named, claim in self._durable.items() if named < offset}

    def check(
        self,
        contents: Mapping[int, bytes | None],
        lost_ranges: Iterable[tuple[int, int]] = (),
        log_start_offset: int = 0,
    ) -> list[Conflict]:
        """Compare the claims with the present contents of the log. Return all conflicts, old and new.

        contents          offset -> value of every record that a reader gets now
        lost_ranges       ``[base, end)`` of the offsets that the log reports as lost
        log_start_offset  records below it were deleted on purpose
        """
        ranges = list(lost_ranges)
        for offset, value in contents.items():
            self._claim(Claim(offset, value, "a reader", durable=False))
        for offset, claim in self._first.items():
            if offset in contents or offset < log_start_offset:
                continue
            self._gone.add(offset)
            if offset in self._durable:
                promised = self._durable[offset]
                self._add_conflict("a durable record is gone", offset, promised)
            elif not any(base <= offset < end for base, end in ranges):
                self._add_conflict("a record is gone outside every lost range", offset, claim)
        return self.conflicts

    def _add_conflict(self, rule: str, offset: int, claim: Claim) -> None:
        conflict = Conflict(rule, offset, f"{claim.who} got {_shown(claim.value)}", "the log has no such record")
        if conflict not in self.conflicts:
            self.conflicts.append(conflict)


def _shown(value: bytes | None) -> str:
    if value is None:
        return "a null"
    return repr(value) if len(value) <= 32 else f"{value[:32]!r}..."
