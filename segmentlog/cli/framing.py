"""Where one record of the input ends and the next begins, and how long to wait for it."""

from __future__ import annotations

import os
import select
import stat
import time
from collections.abc import Iterator
from typing import Final

_READ_BYTES: Final = 256 << 10  # what the cache holds while it is cut into lines
_LOOK_UP_S: Final = 0.2


class BadInput(ValueError):
    """Input that is not in the format it should be in; says where."""


class Framing:
    """Cuts blocks of bytes into records; what a record is still missing comes with later blocks.

    ``limit_bytes`` is the longest record that the topic takes: without it, a file without
    any line end would be read into memory before anybody complains.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._pieces: list[bytes] = []
        self._size_bytes = 0
        self._records = 0

    def cut(self, block: bytes) -> list[bytes]:
        """The records that ``block`` completes."""
        raise NotImplementedError

    def end(self) -> list[bytes]:
        """The input is over: what is left. Raises `BadInput` when that is no whole record."""
        raise NotImplementedError

    def _keep(self, piece: bytes) -> None:
        """A piece of a record whose end has not come yet; joined only once, however many there are."""
        if piece:
            self._pieces.append(piece)
            self._size_bytes += len(piece)

    def _take(self) -> bytes:
        data = b"".join(self._pieces)
        self._pieces.clear()
        self._size_bytes = 0
        return data

    def _too_long(self, size_bytes: int, note: str = "") -> BadInput:
        return BadInput(
            f"record {self._records + 1} of the input has {size_bytes} bytes or more, over max.message.bytes"
            f" = {self._limit_bytes}{note}; raise it with 'segmentlog alter', or choose another --format"
        )


class Delimited(Framing):
    """Records with a delimiter behind each; behind the last one it may be missing."""

    def __init__(self, limit_bytes: int, delimiter: bytes, *, text: bool) -> None:
        super().__init__(limit_bytes)
        self._delimiter = delimiter
        self._text = text

    def cut(self, block: bytes) -> list[bytes]:
        if self._delimiter not in block:
            self._keep(block)
            if self._size_bytes > self._limit_bytes:
                raise self._too_long(self._size_bytes)
            return []
        if self._pieces:
            self._keep(block)
            block = self._take()
        records = block.split(self._delimiter)
        self._keep(records.pop())
        if self._text and b"\r" in block:
            records = [record.removesuffix(b"\r") for record in records]
        self._records += len(records)
        return records

    def end(self) -> list[bytes]:
        return [self._take()] if self._pieces else []


class LengthPrefixed(Framing):
    """Records with their length before each, a big-endian u32."""

    def cut(self, block: bytes) -> list[bytes]:
        self._keep(block)
        if self._size_bytes < 4:
            return []
        if len(self._pieces[0]) < 4:
            self._keep(self._take())
        size = int.from_bytes(self._pieces[0][:4], "big")
        if size > self._limit_bytes:
            raise self._too_long(size, "; is the input length-prefixed?")
        if self._size_bytes - 4 < size:
            return []
        data = self._take()
        records = []
        at = 0
        while len(data) - at >= 4:
            stop = at + 4 + int.from_bytes(data[at : at + 4], "big")
            if stop > len(data):
                break
            records.append(data[at + 4 : stop])
            at = stop
        self._keep(data[at:])
        self._records += len(records)
        return records

    def end(self) -> list[bytes]:
        if self._size_bytes:
            raise BadInput(
                f"the input ends inside record {self._records + 1}: {self._size_bytes} bytes are left over"
            )
        return []


def framing(name: str, limit_bytes: int) -> Framing:
    """The framing for a ``--format``."""
    if name == "length-prefixed":
        return LengthPrefixed(limit_bytes)
    if name == "nul":
        return Delimited(limit_bytes, b"\0", text=False)
    return Delimited(limit_bytes, b"\n", text=True)


class Source:
    """Reads a file or a pipe as lists of records.

    A list is handed on when it has ``batch_size`` records, or when its first one has waited
    for ``linger_s``: from a file the lists are full, and a line from a slow pipe does not
    wait for the next one.
    """

    def __init__(self, fd: int, records: Framing, batch_size: int, linger_s: float, stopped: list[int]) -> None:
        self._fd = fd
        self._framing = records
        self._batch_size = batch_size
        self._linger_s = linger_s
        self._stopped = stopped
        status = os.fstat(fd)
        self.is_file = stat.S_ISREG(status.st_mode)
        """Whether the input has an end that is known from the start."""
        self.size_bytes = status.st_size if self.is_file else None
        self.read_bytes = 0
        self.is_finished = False

    def lists(self, skip: int) -> Iterator[list[bytes]]:
        """The records but the first ``skip``, until the input ends or a signal arrives. Raises `BadInput`."""
        ready: list[bytes] = []
        deadline = 0.0
        while not self._stopped:
            if not self.is_file:
                wait_s = max(deadline - time.monotonic(), 0) if ready else _LOOK_UP_S
                if not select.select([self._fd], [], [], wait_s)[0]:
                    if ready and time.monotonic() >= deadline:
                        yield ready
                        ready = []
                    continue
            block = os.read(self._fd, _READ_BYTES)
            self.read_bytes += len(block)
            found = self._framing.cut(block) if block else self._framing.end()
            if skip:
                found, skip = found[skip:], max(skip - len(found), 0)
            if found and not ready:
                deadline = time.monotonic() + self._linger_s
            ready += found
            whole = len(ready) - len(ready) % self._batch_size
            for at in range(0, whole, self._batch_size):
                yield ready[at : at + self._batch_size]
                if self._stopped:
                    return
            if whole:
                ready = ready[whole:]
            if not block:
                self.is_finished = True
                break
            if ready and not self.is_file and time.monotonic() >= deadline:
                yield ready
                ready = []
        if ready:
            yield ready
