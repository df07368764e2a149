"""Telling an operation that failed from one that was interrupted.

A time-out made of SIGALRM raises what it likes, and `TimeoutError`, which is the natural choice, is an `OSError`.
Whoever gets on without a file that cannot be opened must not take that for one, or nobody ever hears of the time-out.
"""

from __future__ import annotations

import contextlib
from types import TracebackType

from segmentlog.errors import SegmentlogError


def is_from_a_call(error: OSError) -> bool:
    """Whether a system call failed with it. Without a number it is an interrupt's: a time-out made of SIGALRM, say."""
    return error.errno is not None


def is_interrupt(error: BaseException) -> bool:
    """Whether it is an `OSError` that no system call failed with, nor anything of ours."""
    return isinstance(error, OSError) and not is_from_a_call(error) and not isinstance(error, SegmentlogError)


def is_failure(error: BaseException) -> bool:
    """Whether an operation failed with it, as opposed to being interrupted by it."""
    return isinstance(error, SegmentlogError) or (isinstance(error, OSError) and is_from_a_call(error))


class failures_ignored(contextlib.AbstractContextManager[None]):
    """`contextlib.suppress` of every `OSError` but an interrupt's, and of what else is named."""

    def __init__(self, *others: type[BaseException]) -> None:
        self._ignored: tuple[type[BaseException], ...] = (OSError, *others)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        return error is not None and isinstance(error, self._ignored) and not is_interrupt(error)
