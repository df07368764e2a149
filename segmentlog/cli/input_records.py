"""What `produce` reads: a file or a pipe, cut into lists of raw records as they come.

Every byte is looked at once, however long a record is; what is too long is refused before it is read to its end.
"""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Iterator
from typing import Final

_READ_BYTES: Final = 128 << 10  # what the cache holds while it is cut into lines
_WAIT_MS: Final = 200
_JSON_FACTOR: Final = 8
"""A byte takes up to six characters as JSON, an empty header eight times what it takes in a record."""


class TooLong(ValueError):
    """A record that is over the limit for certain; tells why, and how many empty lines there were before it."""

    def __init__(self, why: str, empty_lines: int = 0) -> None:
        super().__init__(why)
        self.empty_lines = empty_lines


class Source:
    """Lists of raw records of a descriptor."""

    def __init__(
        self,
        fd: int,
        shape: str,
        batch_size: int,
        linger_s: float,
        stopped: list[int],
        limit_bytes: Callable[[], int],
        spare_bytes: int = 0,
        name: str = "stdin",
    ) -> None:
        """``limit_bytes`` tells what a record may have now; ``spare_bytes`` of each do not become part of it.

        ``name`` is for errors.
        """
        self._fd = fd
        self._name = name
        self._poll = select.poll()  # unlike select, for descriptors of any number
        self._poll.register(fd, select.POLLIN)
        self._batch_size = batch_size
        self._linger_s = linger_s
        self._stopped = stopped
        self._cutter: _Lines | _Prefixed
        if shape == "length-prefixed":
            self._cutter = _Prefixed(limit_bytes)
        else:
            self._cutter = _Lines(b"\0" if shape == "nul" else b"\n", limit_bytes, spare_bytes, is_json=shape == "json")
        self.unread = True

    def lists(self, skip: int) -> Iterator[tuple[list[bytes], int]]:
        """Lists of at most ``batch_size`` records with the bytes read for them, as they come.

        The first ``skip`` are left out. What came before a record that cannot be, or before bytes that cannot be
        read, is handed out before it raises `TooLong`, ValueError or OSError.
        """
        ready: list[bytes] = []
        count_bytes = 0
        cutter = self._cutter
        cutter.skip = skip
        while not self._stopped:
            # A file is always readable; a pipe may pause, and what it sent must not wait for more.
            if ready and not self._poll.poll(self._linger_s * 1000):
                yield ready, count_bytes
                ready, count_bytes = [], 0
                continue
            if not ready and not self._poll.poll(_WAIT_MS):
                continue  # time to look whether a signal came
            try:
                block = os.read(self._fd, _READ_BYTES)
            except OSError as error:
                error.filename = self._name
                if ready:  # whoever wrote them into a pipe or a terminal does not write them again
                    yield ready, count_bytes
                raise
            count_bytes += len(block)
            ready += cutter.cut(block) if block else cutter.end()
            whole = len(ready) - len(ready) % self._batch_size
            for at in range(0, whole, self._batch_size):
                yield ready[at : at + self._batch_size], count_bytes
                count_bytes = 0
            if whole:
                ready = ready[whole:]
            if cutter.failure is not None:
                if ready:
                    yield ready, count_bytes
                raise cutter.failure
            if not block:
                self.unread = False
                break
        if ready:
            yield ready, count_bytes


class _Lines:
    """Records that end with a mark; the last one may lack it."""

    def __init__(self, mark: bytes, limit_bytes: Callable[[], int], spare_bytes: int, *, is_json: bool) -> None:
        self._mark = mark
        self._is_json = is_json
        self._limit_bytes = limit_bytes
        self._spare_bytes = spare_bytes
        self._longest = self._longest_now()
        self._parts: list[bytes] = []
        """Of a record whose end has not come yet."""
        self._held_bytes = 0
        self._empty_lines = 0
        self.skip = 0
        """So many records are still to be left out."""
        self.failure: ValueError | None = None

    def _longest_now(self) -> int:
        limit_bytes = self._limit_bytes()
        return limit_bytes * _JSON_FACTOR + _READ_BYTES if self._is_json else limit_bytes + self._spare_bytes

    def cut(self, block: bytes) -> list[bytes]:
        """The records that end in the next bytes of the input."""
        records = block.split(self._mark)
        rest = records.pop()
        if records:
            if self._parts:
                records[0] = b"".join((*self._parts, records[0]))
                self._parts, self._held_bytes = [], 0
            records = self._wanted(records)
        if rest:
            self._hold(rest)
        return records

    def end(self) -> list[bytes]:
        """What is left at the end of the input."""
        return self._wanted([b"".join(self._parts)]) if self._parts else []

    def _wanted(self, records: list[bytes]) -> list[bytes]:
        if self._is_json:  # before they are counted, for --skip counts records
            lines, records = len(records), [record for record in records if record.strip()]
            self._empty_lines += lines - len(records)
        skipped = min(self.skip, len(records))
        self.skip -= skipped
        return records[skipped:] if skipped else records

    def _hold(self, part: bytes) -> None:
        self._parts.append(part)
        self._held_bytes += len(part)
        if self._held_bytes <= self._longest:
            return
        if self.skip:  # it is left out: enough to tell whether it is an empty line
            self._parts = [b"".join(self._parts).strip()[:1]]
            self._held_bytes = 1
            return
        self._longest = self._longest_now()  # it may have been raised
        if self._held_bytes > self._longest:
            times = f"{_JSON_FACTOR} times " if self._is_json else ""
            why = f"is longer than {times}max.message.bytes = {self._limit_bytes()}"
            self.failure = TooLong(why, self._empty_lines)


class _Prefixed:
    """Records that begin with their length."""

    def __init__(self, limit_bytes: Callable[[], int]) -> None:
        self._limit_bytes = limit_bytes
        self._longest = limit_bytes()
        self._parts: list[bytes] = []
        self._held_bytes = 0
        self._wanted_bytes = 4
        """So many must be there before it is worth looking again."""
        self._left_out_bytes = 0
        """Of a record that is left out: what is still to come."""
        self.skip = 0
        self.failure: ValueError | None = None

    def cut(self, block: bytes) -> list[bytes]:
        """The records that end in the next bytes of the input."""
        if self._left_out_bytes:
            left_out_bytes = min(self._left_out_bytes, len(block))
            self._left_out_bytes -= left_out_bytes
            block = block[left_out_bytes:]
        self._parts.append(block)
        self._held_bytes += len(block)
        return self._cut() if self._held_bytes >= self._wanted_bytes else []

    def _cut(self) -> list[bytes]:
        data = b"".join(self._parts)
        records = []
        at, self._wanted_bytes = 0, 4
        while len(data) - at >= 4:
            size_bytes = int.from_bytes(data[at : at + 4], "big")
            end = at + 4 + size_bytes
            if self.skip:
                self.skip -= 1
                self._left_out_bytes = max(end - len(data), 0)
            elif size_bytes > self._longest and size_bytes > self._raised():
                self.failure = TooLong(
                    f"is announced with {size_bytes} bytes, over max.message.bytes = {self._longest}"
                    " (is the input length-prefixed?)"
                )
                break
            elif end > len(data):
                self._wanted_bytes = 4 + size_bytes
                break
            else:
                records.append(data[at + 4 : end])
            at = min(end, len(data))
        rest = data[at:]
        self._parts, self._held_bytes = [rest], len(rest)
        return records

    def _raised(self) -> int:
        self._longest = self._limit_bytes()
        return self._longest

    def end(self) -> list[bytes]:
        """Nothing may be left at the end of the input."""
        if self._held_bytes or self._left_out_bytes:
            there = f"{self._held_bytes} bytes are left over" if self._held_bytes else "one that is left out"
            self.failure = ValueError(f"the input ends in the middle of a record: {there}")
        return []
