"""Splits the text of a ``.proto`` file into tokens, without white space and comments."""

from __future__ import annotations

import re
from typing import Final, NamedTuple, NoReturn

from segmentlog.schemas.registry_errors import InvalidSchema

_TOKEN: Final = re.compile(
    r"""
    (?P<space>\s+|//[^\n]*|/\*.*?\*/)
  | (?P<float>\.?[0-9][0-9]*(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)[fF]?|[0-9]+\.[0-9]*[fF]?|\.[0-9]+[fF]?)
  | (?P<int>0[xX][0-9a-fA-F]+|[0-9]+)
  | (?P<word>[A-Za-z_][A-Za-z0-9_]*)
  | (?P<string>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')
  | (?P<sign>[{}()\[\]<>=;,.:+\-/])
    """,
    re.VERBOSE | re.DOTALL,
)
_ESCAPE: Final = re.compile(r"\\(x[0-9a-fA-F]{1,2}|[0-7]{1,3}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", re.DOTALL)
_ESCAPED: Final = {"n": b"\n", "r": b"\r", "t": b"\t", "a": b"\a", "b": b"\b", "f": b"\f", "v": b"\v"}


class Token(NamedTuple):
    kind: str
    text: str
    position: int


class Tokens:
    """Cursor over the tokens of a text. A method that reads a kind of token raises `InvalidSchema` for others."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = self._split()
        self._at = 0

    def _split(self) -> list[Token]:
        tokens, position = [], 0
        while position < len(self._text):
            match = _TOKEN.match(self._text, position)
            if match is None:
                self._fail_at(position, f"{self._text[position : position + 10]!r} is not a token of a .proto file")
            kind = str(match.lastgroup)
            if kind != "space":
                tokens.append(Token(kind, match[0], position))
            position = match.end()
        tokens.append(Token("end", "", len(self._text)))
        return tokens

    @property
    def next(self) -> Token:
        return self._tokens[self._at]

    def is_second(self, text: str) -> bool:
        """Return whether the token after the next token has this text."""
        return self._at + 1 < len(self._tokens) and self._tokens[self._at + 1].text == text

    def is_next(self, *texts: str) -> bool:
        return self.next.text in texts and self.next.kind != "string"

    def take(self) -> Token:
        token = self.next
        if token.kind != "end":
            self._at += 1
        return token

    def skip(self, text: str) -> bool:
        """Skip the next token and return True, if it has this text."""
        if self.is_next(text):
            self._at += 1
            return True
        return False

    def expect(self, text: str) -> None:
        if not self.skip(text):
            self.fail(f"expected {text!r}")

    def read_name(self) -> str:
        if self.next.kind != "word":
            self.fail("expected a name")
        return self.take().text

    def read_type_name(self) -> str:
        """Read the name of a type: ``a.b.C`` or ``.a.b.C``."""
        text = "." if self.skip(".") else ""
        text += self.read_name()
        while self.skip("."):
            text += "." + self.read_name()
        return text

    def read_integer(self) -> int:
        sign = -1 if self.skip("-") else 1
        if self.next.kind != "int":
            self.fail("expected an integer")
        return sign * as_int(self.take().text)

    def read_string(self) -> bytes:
        """Read one or more adjacent string literals, and return their concatenation."""
        if self.next.kind != "string":
            self.fail("expected a quoted string")
        parts = []
        while self.next.kind == "string":
            parts.append(_unescape(self.take().text[1:-1]))
        return b"".join(parts)

    def read_text(self) -> str:
        try:
            return self.read_string().decode()
        except UnicodeDecodeError:
            self.fail("a quoted string is not UTF-8")

    def fail(self, why: str) -> NoReturn:
        """Raise `InvalidSchema` with a reason, the next token and its line."""
        self._fail_at(self.next.position, f"{why}, at {self.next.text[:40] or 'the end'!r}")

    def _fail_at(self, position: int, why: str) -> NoReturn:
        line = self._text.count("\n", 0, position) + 1
        raise InvalidSchema(f"Invalid Protobuf schema: line {line}: {why}")


def as_int(text: str) -> int:
    """Return the value of an integer literal in C syntax: 0x10, 010, 10."""
    if text[:2].lower() == "0x":
        return int(text, 16)
    if len(text) > 1 and text[0] == "0":
        try:
            return int(text, 8)
        except ValueError:
            raise InvalidSchema(f"Invalid Protobuf schema: {text} is not a valid octal number") from None
    return int(text)


def _unescape(text: str) -> bytes:
    parts, position = [], 0
    for match in _ESCAPE.finditer(text):
        parts.append(text[position : match.start()].encode())
        escape = match[1]
        if escape[0] in "uU" and len(escape) > 1:
            parts.append(chr(int(escape[1:], 16)).encode(errors="replace"))
        elif escape[0] in "x" and len(escape) > 1:
            parts.append(bytes([int(escape[1:], 16)]))
        elif escape[0] in "01234567":
            parts.append(bytes([int(escape, 8) & 0xFF]))
        else:
            parts.append(_ESCAPED.get(escape, escape.encode()))
        position = match.end()
    parts.append(text[position:].encode())
    return b"".join(parts)
