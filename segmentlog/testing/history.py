"""What a log told its writers and readers, over any number of crashes, and where it contradicted itself.

The rules are those of any log, whoever implements it:

* no offset ever names two different records, to anybody;
* what was acknowledged as durable is there, whole, at its offset;
* what a durable-only reader was handed is there;
* what is gone lies in a range that the log itself calls lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec


class Claim(msgspec.Struct, frozen=True):
    """Somebody was told that this record stands at this offset; ``durable`` if it was promised to stay."""

    offset: int
    value: bytes | None
    who: str
    durable: bool


class Conflict(msgspec.Struct, frozen=True):
    """A rule that was broken, with what was said before and what is true now."""

    rule: str
    offset: int
    before: str
    now: str

    def __str__(self) -> str:
        return f"{self.rule}: offset {self.offset}: {self.before}; now {self.now}"


class History:
    """Claims about one partition, in the order they were made. Not thread-safe."""

    def __init__(self) -> None:
        self._first: dict[int, Claim] = {}
        self._durable: dict[int, Claim] = {}
        self._acknowledged: set[int] = set()
        self._withdrawn: set[int] = set()
        self._gone: set[int] = set()
        self.conflicts: list[Conflict] = []

    def __len__(self) -> int:
        """How many offsets were ever named."""
        return len(self._first)

    def acknowledged(self, base_offset: int, values: Iterable[bytes | None], *, durable: bool) -> None:
        """An append returned: its records stand at ``base_offset`` and after."""
        for offset, value in enumerate(values, base_offset):
            self._acknowledged.add(offset)
            self._claim(Claim(offset, value, "the producer", durable))

    def handed(self, reader: str, offset: int, value: bytes | None, *, durable_only: bool = False) -> None:
        """A reader was handed a record."""
        self._claim(Claim(offset, value, reader, durable_only))

    def _claim(self, claim: Claim) -> None:
        first = self._first.setdefault(claim.offset, claim)
        if first.value != claim.value:
            self.conflicts.append(
                Conflict(
                    "one offset, two records",
                    claim.offset,
                    f"{first.who} was told {_shown(first.value)}",
                    f"{claim.who} is told {_shown(claim.value)}",
                )
            )
        if claim.durable:
            self._durable.setdefault(claim.offset, claim)

    def named(self) -> dict[int, bytes | None]:
        """Every offset that was ever named, with the record that was named first."""
        return {offset: claim.value for offset, claim in self._first.items()}

    def was_acknowledged(self, offset: int) -> bool:
        """Whether the append of the record that was first named there returned, and nobody cut it off since."""
        return offset in self._acknowledged and offset not in self._withdrawn

    def was_withdrawn(self, offset: int) -> bool:
        """Whether somebody cut off what stood there, or was about to."""
        return offset in self._withdrawn

    def durable_below(self, end_offset: int) -> None:
        """The log said that everything below is on disk: what `check` found still there is promised from now on."""
        for offset, claim in self._first.items():
            if offset < end_offset and offset not in self._withdrawn and offset not in self._gone:
                self._durable.setdefault(offset, claim)

    def withdrawn(self, offset: int) -> None:
        """Somebody is about to cut off what stands at and above ``offset``: no promise about it counts any more."""
        self._withdrawn.update(named for named in self._first if named >= offset)
        self._durable = {named: claim for named, claim in self._durable.items() if named < offset}

    def check(
        self,
        contents: Mapping[int, bytes | None],
        lost_ranges: Iterable[tuple[int, int]] = (),
        log_start_offset: int = 0,
    ) -> list[Conflict]:
        """Compare with what the log holds now; every conflict so far, those found now included.

        contents          offset -> value of every record that a reader gets now
        lost_ranges       ``[base, end)`` of offsets that the log says are lost
        log_start_offset  what lies below it was deleted on purpose
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
                self._note("a durable record is gone", offset, promised)
            elif not any(base <= offset < end for base, end in ranges):
                self._note("a record is gone outside every lost range", offset, claim)
        return self.conflicts

    def _note(self, rule: str, offset: int, claim: Claim) -> None:
        conflict = Conflict(rule, offset, f"{claim.who} was told {_shown(claim.value)}", "it is not there")
        if conflict not in self.conflicts:
            self.conflicts.append(conflict)


def _shown(value: bytes | None) -> str:
    if value is None:
        return "a null"
    return repr(value) if len(value) <= 32 else f"{value[:32]!r}..."
