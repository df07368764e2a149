"""Split the input of `produce`, a file or a pipe, into lists of raw records.

Every byte is scanned once, however long its record is. A record that is too long is rejected before it is read
completely.
"""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Iterator
from typing import Final

_READ_BYTES: Final = 128 << 10  # the processor cache holds a block while it is split into lines
_WAIT_MS: Final = 200
_JSON_FACTOR: Final = 8
"""Maximum ratio of JSON size to record size: a byte takes up to 6 characters, an empty header 8 times its stored size.
"""


class OversizedRecord(ValueError):
    """A record is over the limit. ``empty_lines`` counts the empty lines before it, which are not records."""

    def __init__(self, why: str, empty_lines: int = 0) -> None:
        super().__init__(why)
        self.empty_lines = empty_lines


class RecordInput:
    """Splits the bytes of a file descriptor into lists of raw records."""

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
        """Read records of ``fd``, which error messages call ``name``.

        ``limit_bytes`` returns the current size limit of a record. The input of a record may be ``spare_bytes`` longer
        than this limit, for example by a key separator.
        """
        self._fd = fd
        self._name = name
        self._poll = select.poll()  # unlike select, poll accepts descriptors above 1,023
        self._poll.register(fd, select.POLLIN)
        self._batch_size = batch_size
        self._linger_s = linger_s
        self._stopped = stopped
        self._splitter: _DelimitedSplitter | _PrefixedSplitter
        if shape == "length-prefixed":
            self._splitter = _PrefixedSplitter(limit_bytes)
        else:
            self._splitter = _DelimitedSplitter(
                b"\0" if shape == "nul" else b"\n", limit_bytes, spare_bytes, is_json=shape == "json"
            )
        self.unread = True

    def read_lists(self, skip: int) -> Iterator[tuple[list[bytes], int]]:
        """Yield lists of at most ``batch_size`` records as they arrive, each list with the count of bytes read for it.

        Skips the first ``skip`` records. An invalid record raises `OversizedRecord` or ValueError, and a read error
        raises OSError, after the records before it were yielded.
        """
        ready: list[bytes] = []
        count_bytes = 0
        cutter = self._splitter
        cutter.skip = skip
        while not self._stopped:
            # A file is always readable. A pipe may pause: records that it sent must not wait for more.
            if ready and not self._poll.poll(self._linger_s * 1000):
                yield ready, count_bytes
                ready, count_bytes = [], 0
                continue
            if not ready and not self._poll.poll(_WAIT_MS):
                continue  # check whether a signal arrived
            try:
                block = os.read(self._fd, _READ_BYTES)
            except OSError as error:
                error.filename = self._name
                if ready:  # the writer of a pipe or a terminal does not send them again
                    yield ready, count_bytes
                raise
            count_bytes += len(block)
            ready += cutter.split_block(block) if block else cutter.end()
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


class _DelimitedSplitter:
    """Splits input into records that end with a delimiter, such as a line break. The last delimiter may be missing."""

    def __init__(self, mark: bytes, limit_bytes: Callable[[], int], spare_bytes: int, *, is_json: bool) -> None:
        self._mark = mark
        self._is_json = is_json
        self._limit_bytes = limit_bytes
        self._spare_bytes = spare_bytes
        self._longest = self._find_longest()
        self._parts: list[bytes] = []
        """Parts of a record whose end was not read yet."""
        self._held_bytes = 0
        self._empty_lines = 0
        self.skip = 0
        """Count of records that are still to be skipped."""
        self.failure: ValueError | None = None

    def _find_longest(self) -> int:
        limit_bytes = self._limit_bytes()
        return limit_bytes * _JSON_FACTOR + _READ_BYTES if self._is_json else limit_bytes + self._spare_bytes

    def split_block(self, block: bytes) -> list[bytes]:
        """Return the records that end in the next block of the input."""
        records = block.split(self._mark)
        rest = records.pop()
        if records:
            if self._parts:
                records[0] = b"".join((*self._parts, records[0]))
                self._parts, self._held_bytes = [], 0
            records = self._apply_skip(records)
        if rest:
            self._hold(rest)
        return records

    def end(self) -> list[bytes]:
        """Return the last record, if its delimiter is missing."""
        return self._apply_skip([b"".join(self._parts)]) if self._parts else []

    def _apply_skip(self, records: list[bytes]) -> list[bytes]:
        if self._is_json:  # before skipping, because --skip counts records and not empty lines
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
        if self.skip:  # a skipped record: keep enough to see whether it is an empty line
            self._parts = [b"".join(self._parts).strip()[:1]]
            self._held_bytes = 1
            return
        self._longest = self._find_longest()  # the limit may have been raised
        if self._held_bytes > self._longest:
            times = f"{_JSON_FACTOR} times " if self._is_json else ""
            why = f"is longer than {times}max.message.bytes = {self._limit_bytes()}"
            self.failure = OversizedRecord(why, self._empty_lines)


class _PrefixedSplitter:
    """Splits input into records that begin with their length."""

    def __init__(self, limit_bytes: Callable[[], int]) -> None:
        self._limit_bytes = limit_bytes
        self._longest = limit_bytes()
        self._parts: list[bytes] = []
        self._held_bytes = 0
        self._wanted_bytes = 4
        """Scan again once this many bytes have arrived."""
        self._left_out_bytes = 0
        """Bytes of a skipped record that have not arrived yet."""
        self.skip = 0
        self.failure: ValueError | None = None

    def split_block(self, block: bytes) -> list[bytes]:
        """Return the records that end in the next block of the input."""
        if self._left_out_bytes:
            left_out_bytes = min(self._left_out_bytes, len(block))
            self._left_out_bytes -= left_out_bytes
            block = block[left_out_bytes:]
        self._parts.append(block)
        self._held_bytes += len(block)
        return self._split_records() if self._held_bytes >= self._wanted_bytes else []

    def _split_records(self) -> list[bytes]:
        data = b"".join(self._parts)
        records = []
        at, self._wanted_bytes = 0, 4
        while len(data) - at >= 4:
            size_bytes = int.from_bytes(data[at : at + 4], "big")
            end = at + 4 + size_bytes
            if self.skip:
                self.skip -= 1
                self._left_out_bytes = max(end - len(data), 0)
            elif size_bytes > self._longest and size_bytes > self._refresh_limit():
                self.failure = OversizedRecord(
                    f"has a length of {size_bytes} bytes, over max.message.bytes = {self._longest}"
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

    def _refresh_limit(self) -> int:
        self._longest = self._limit_bytes()
        return self._longest

    def end(self) -> list[bytes]:
        """Set `failure` if the input ends within a record."""
        if self._held_bytes or self._left_out_bytes:
            rest = f"{self._held_bytes} bytes are left over" if self._held_bytes else "the record is skipped"
            self.failure = ValueError(f"the input ends in the middle of a record: {rest}")
        return []
