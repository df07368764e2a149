"""JSON objects one behind the other, with whitespace between them or none: cut apart as they come.

A line that is a whole object, as most clients send them, is recognized by decoding it. Any other line is tried once,
and each of its objects looked through for its end once, however small the pieces are that it comes in.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Final, Generic, TypeVar

import msgspec

_T = TypeVar("_T")

_OUTSIDE: Final = re.compile(rb'["{}\[\]]')
_INSIDE: Final = re.compile(rb'["\\]')
_SPACE: Final = b" \t\r\n"
_DEPTH_MAX: Final = 200


class Malformed(ValueError):
    """What came is no sequence of objects; nothing behind it can be understood."""


class Objects(Generic[_T]):
    """Feed it pieces, and it hands out what is whole. ``size_max``: of one object."""

    def __init__(self, decode: Callable[[bytes], _T], size_max: int) -> None:
        self._decode = decode
        self._size_max = size_max
        self._buffer = bytearray()
        self._start = self._at = self._depth = 0
        self._tried = -1
        """As far as it is known that no line from here is one object."""
        self._in_string = False

    @property
    def kept_bytes(self) -> int:
        """Of what was fed: an object that has not ended."""
        return len(self._buffer)

    def feed(self, piece: bytes) -> Iterator[_T | msgspec.ValidationError]:
        """The objects that end in this piece; in place of one that is of another shape the error that says so.

        Raises `Malformed`.
        """
        self._buffer += piece
        while True:
            if not self._depth:
                self._skip_space()
                if self._start >= len(self._buffer):
                    break
                if self._buffer[self._start] != ord("{"):
                    raise Malformed(f"an object begins with {{, and not with {chr(self._buffer[self._start])!r}")
                if self._start > self._tried:
                    found = self._try_line()
                    if found is not None:
                        yield found
                        continue
            end = self._find_end()
            if end is None:
                if len(self._buffer) - self._start > self._size_max:
                    raise Malformed(f"one object has more than {self._size_max} bytes")
                break
            yield self._take(end)
        del self._buffer[: self._start]
        self._at -= self._start
        self._tried -= self._start
        self._start = 0

    def finish(self) -> None:
        """It ends here. Raises `Malformed` in the middle of an object."""
        if self._buffer.strip():
            raise Malformed("it ends in the middle of an object")

    def _skip_space(self) -> None:
        buffer, at = self._buffer, self._start
        while at < len(buffer) and buffer[at] in _SPACE:
            at += 1
        self._start = self._at = at

    def _try_line(self) -> _T | None:
        """The rest of the line, if it is one object, and as it should be."""
        end = self._buffer.find(b"\n", self._start)
        self._tried = end if end >= 0 else len(self._buffer)
        if end < 0:
            return None
        try:
            found = self._decode(bytes(self._buffer[self._start : end]))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
        self._done(end)
        return found

    def _done(self, end: int) -> None:
        self._start = self._at = end
        self._depth, self._in_string = 0, False

    def _take(self, end: int) -> _T | msgspec.ValidationError:
        data = bytes(self._buffer[self._start : end])
        self._done(end)
        try:
            return self._decode(data)
        except msgspec.ValidationError as error:
            return error
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise Malformed(str(error)) from None

    def _find_end(self) -> int | None:
        """Where the object ends that begins at `_start`, looked for from `_at` on."""
        buffer = self._buffer
        while True:
            match = (_INSIDE if self._in_string else _OUTSIDE).search(buffer, self._at)
            if match is None:
                self._at = len(buffer)
                return None
            self._at = match.end()
            mark = match.group()
            if mark == b"\\":
                if self._at >= len(buffer):
                    self._at -= 1  # what it escapes has yet to come
                    return None
                self._at += 1
            elif mark == b'"':
                self._in_string = not self._in_string
            elif mark in b"{[":
                self._depth += 1
                if self._depth > _DEPTH_MAX:
                    raise Malformed("it is nested too deeply")
            else:
                self._depth -= 1
                if self._depth <= 0:
                    self._depth = 0
                    return self._at
