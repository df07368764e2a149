"""Which topics a regular expression of a client's means: RE2's syntax, as Kafka's brokers have it, whole names.

Not Python's `re`: that backtracks, so that a short expression may keep it busy for ever, and it understands more than
brokers do. RE2 takes a time that grows with the name, whatever the expression: at most 0.3 ms a name here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

LENGTH_MAX: Final = 4096
_MEMORY_BYTES: Final = 256 << 10
"""Of a compiled expression and of what it remembers: what would need more is refused."""


class BadPattern(ValueError):
    """The expression is none, or takes too much: the text says why."""


class TopicPattern:
    """A regular expression. Raises `BadPattern`."""

    def __init__(self, text: str) -> None:
        if len(text) > LENGTH_MAX:
            raise BadPattern(f"it is longer than {LENGTH_MAX} characters")
        self._matches = _compiled(text).fullmatch

    def matching(self, names: Iterable[str]) -> list[str]:
        """Those of the names that match."""
        return [name for name in names if self._matches(name) is not None]


def _compiled(text: str) -> Any:
    try:
        import re2
    except ImportError:
        raise BadPattern("there is no RE2 here to understand it: pip install google-re2") from None
    options = re2.Options()
    options.log_errors, options.never_capture, options.max_mem = False, True, _MEMORY_BYTES
    try:
        return re2.compile(text, options=options)
    except re2.error as error:
        said = error.args[0] if error.args else "it is not understood"
        raise BadPattern(said.decode(errors="replace") if isinstance(said, bytes) else str(said)) from None
