"""A budget for file descriptors: ten thousand partitions work under a limit of a thousand."""

from __future__ import annotations

import resource
from collections import OrderedDict
from collections.abc import Iterator

from segmentlog.partition.handle import Handle
from segmentlog.storage import forks

_FILES_PER_PARTITION = 3
"""The lock, the state page, the active segment."""


class DescriptorBudget:
    """Keeps the number of partitions with open descriptors within the process's limit.

    Second chance: a partition that was used since the last look stays, the others are
    closed, and open themselves again when they are used. Thread-safe.
    """

    def __init__(self) -> None:
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        available = 4096 if soft == resource.RLIM_INFINITY else min(soft, 1 << 16)
        self._limit = max(8, available * 2 // 3 // _FILES_PER_PARTITION)
        self._mutex = forks.lock(self, "_mutex")
        self._forget()
        forks.on_fork(self, "_forget")

    def _forget(self) -> None:
        """None is open. In a forked child: their descriptors are closed there."""
        self._handles: OrderedDict[Handle, None] = OrderedDict()

    def opened(self, handle: Handle) -> None:
        with self._mutex:
            self._handles.pop(handle, None)
            self._handles[handle] = None
            excess = len(self._handles) - self._limit
            for candidate in self._in_turn() if excess > 0 else ():
                if candidate is not handle and candidate.release():
                    del self._handles[candidate]
                    excess -= 1
                    if not excess:
                        break

    def _in_turn(self) -> Iterator[Handle]:
        """Handles by age, those in use at the end of the line."""
        for _ in range(len(self._handles)):
            candidate = next(iter(self._handles))
            self._handles.move_to_end(candidate)
            if candidate.used:
                candidate.used = False
            else:
                yield candidate
        yield from list(self._handles)
