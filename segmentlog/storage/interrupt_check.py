"""Distinguish an operation that failed from an operation that an interrupt ended.

A signal handler for SIGALRM may raise any exception. The natural choice, `TimeoutError`, is an `OSError`. Code that
continues after an `OSError` must first check that no signal handler raised it, or the time-out is lost.
"""

from __future__ import annotations

import contextlib
from types import TracebackType

from segmentlog.errors import SegmentlogError


def is_from_a_call(error: OSError) -> bool:
    """Return whether a system call raised the error. An `OSError` without a number comes from a signal handler."""
    return error.errno is not None


def is_interrupt(error: BaseException) -> bool:
    """Return whether it is an `OSError` from a signal handler: no system call and no code of this package raised it."""
    return isinstance(error, OSError) and not is_from_a_call(error) and not isinstance(error, SegmentlogError)


def is_failure(error: BaseException) -> bool:
    """Return whether an operation failed with this error, as opposed to being interrupted."""
    return isinstance(error, SegmentlogError) or (isinstance(error, OSError) and is_from_a_call(error))


class failures_ignored(contextlib.AbstractContextManager[None]):
    """Suppress every `OSError` except an interrupt's, and the exceptions in ``others``, like `contextlib.suppress`."""

    def __init__(self, *others: type[BaseException]) -> None:
        self._ignored: tuple[type[BaseException], ...] = (OSError, *others)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        return error is not None and isinstance(error, self._ignored) and not is_interrupt(error)
