"""Findings of an inspection, and counts of what it has checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec

Severity = Literal["damage", "unreadable", "warning", "note"]


class Finding(msgspec.Struct, frozen=True, omit_defaults=True):
    """An error in a file, or a fact about it that users should know.

    severity    ``damage``      bytes differ from what was written, or records are missing without a reason
                ``unreadable``  a batch is intact, but its records do not decode: readers stop at it
                ``warning``     a cache is wrong (an index, the state page, the largest timestamp in a client's
                                header), or the next open has more to do than usual; no record is affected
                ``note``        harmless: leftovers of a crash, unknown files
    path        the file or folder
    position    first byte concerned; -1 if the finding concerns the whole file
    size_bytes  number of bytes concerned
    offsets     ``[base_offset, end_offset)``: the records concerned; -1 if there are none
    """

    severity: Severity
    path: str
    what: str
    position: int = -1
    size_bytes: int = 0
    base_offset: int = -1
    end_offset: int = -1
    topic: str = ""
    partition: int = -1

    def __str__(self) -> str:
        place = self.path
        if self.position >= 0:
            place += f" at byte {self.position}" + (f" ({self.size_bytes} bytes)" if self.size_bytes else "")
        offsets = f", offsets [{self.base_offset}, {self.end_offset})" if self.base_offset >= 0 else ""
        return f"{self.severity}: {place}{offsets}: {self.what}"


class Tally:
    """Counts of what was checked. ``on_bytes`` is called with each number of checked log bytes, for a progress bar."""

    def __init__(self, on_bytes: Callable[[int], None] | None = None) -> None:
        self.partitions = self.segments = self.batches = self.records = self.size_bytes = 0
        self._on_bytes = on_bytes

    def add_bytes(self, size_bytes: int) -> None:
        self.size_bytes += size_bytes
        if self._on_bytes is not None:
            self._on_bytes(size_bytes)

    def counts(self) -> tuple[int, int, int, int, int]:
        return self.partitions, self.segments, self.batches, self.records, self.size_bytes

    def reset(self, counts: tuple[int, int, int, int, int]) -> None:
        """Reset to earlier counts, because the caller checks and counts the same data again."""
        self.partitions, self.segments, self.batches, self.records, self.size_bytes = counts
