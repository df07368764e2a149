"""Splits a stream of concatenated JSON objects, with or without whitespace between them.

Most clients send one object a line, so each line is first decoded as one object. If that fails, each object of the line
is scanned for its end. Every byte is scanned only once, however small the pieces are.
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


class MalformedJson(ValueError):
    """The stream is not a sequence of JSON objects; the rest of it cannot be parsed."""


class JsonObjectSplitter(Generic[_T]):
    """Decodes the complete objects of a stream that arrives in pieces. ``size_max`` limits one object."""

    def __init__(self, decode: Callable[[bytes], _T], size_max: int) -> None:
        self._decode = decode
        self._size_max = size_max
        self._buffer = bytearray()
        self._start = self._at = self._depth = 0
        self._tried = -1
        """Position up to which decoding a whole line as one object has failed, so that it is not tried again."""
        self._in_string = False

    @property
    def buffered_bytes(self) -> int:
        """Bytes of the incomplete object at the end."""
        return len(self._buffer)

    def feed(self, piece: bytes) -> Iterator[_T | msgspec.ValidationError]:
        """Yield the objects that end in this piece. For an object that `decode` rejects, yield the error instead.

        Raises `MalformedJson`.
        """
        self._buffer += piece
        while True:
            if not self._depth:
                self._skip_space()
                if self._start >= len(self._buffer):
                    break
                if self._buffer[self._start] != ord("{"):
                    raise MalformedJson(f"an object must begin with {{, not with {chr(self._buffer[self._start])!r}")
                if self._start > self._tried:
                    found = self._try_line()
                    if found is not None:
                        yield found
                        continue
            end = self._find_end()
            if end is None:
                if len(self._buffer) - self._start > self._size_max:
                    raise MalformedJson(f"an object has more than {self._size_max:,} bytes")
                break
            yield self._decode_up_to(end)
        del self._buffer[: self._start]
        self._at -= self._start
        self._tried -= self._start
        self._start = 0

    def finish(self) -> None:
        """End the stream. Raises `MalformedJson` if the last object is incomplete."""
        if self._buffer.strip():
            raise MalformedJson("the body ends within an object")

    def _skip_space(self) -> None:
        buffer, at = self._buffer, self._start
        while at < len(buffer) and buffer[at] in _SPACE:
            at += 1
        self._start = self._at = at

    def _try_line(self) -> _T | None:
        """Decode the rest of the line and return the object, if it is one valid object."""
        end = self._buffer.find(b"\n", self._start)
        self._tried = end if end >= 0 else len(self._buffer)
        if end < 0:
            return None
        try:
            found = self._decode(bytes(self._buffer[self._start : end]))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
        self._skip_to(end)
        return found

    def _skip_to(self, end: int) -> None:
        """Set the start of the next object, and reset the scan for its end."""
        self._start = self._at = end
        self._depth, self._in_string = 0, False

    def _decode_up_to(self, end: int) -> _T | msgspec.ValidationError:
        """Decode the object that ends at ``end``, and skip it. Return the error if `decode` rejects the object.

        Raises `MalformedJson` if the bytes are not JSON.
        """
        data = bytes(self._buffer[self._start : end])
        self._skip_to(end)
        try:
            return self._decode(data)
        except msgspec.ValidationError as error:
            return error
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise MalformedJson(str(error)) from None

    def _find_end(self) -> int | None:
        """Return the end of the object that begins at `_start`, if its end has arrived.

        The scan resumes at `_at`, where it ended in the previous piece.
        """
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
                    self._at -= 1  # the escaped character has not arrived
                    return None
                self._at += 1
            elif mark == b'"':
                self._in_string = not self._in_string
            elif mark in b"{[":
                self._depth += 1
                if self._depth > _DEPTH_MAX:
                    raise MalformedJson("it is nested more than 200 levels deep")
            else:
                self._depth -= 1
                if self._depth <= 0:
                    self._depth = 0
                    return self._at
