"""A budget for file descriptors: ten thousand partitions work under a limit of a thousand.

The limit is the process's, so there is one budget for all stores of the process.
"""

from __future__ import annotations

import resource
import weakref
from collections import OrderedDict

from segmentlog.log.handle import Handle
from segmentlog.storage import fork_safety
from segmentlog.storage.fs import relief

_FILES_PER_PARTITION = 4
"""The lock, the state page, the active segment, and the same once more for fsync."""


class DescriptorBudget:
    """Keeps the number of partitions with open descriptors within the process's limit.

    Second chance: a partition that was used since the last look stays, the others are
    closed, and open themselves again when they are used. Thread-safe.
    """

    def __init__(self) -> None:
        # Reentrant: a partition may be garbage-collected, or a descriptor be wanting, in the middle.
        self._mutex = fork_safety.reentrant_lock(self, "_mutex")
        self._handles: OrderedDict[weakref.ref[Handle], None] = OrderedDict()
        fork_safety.on_fork(self, "_forget_parent")

    @staticmethod
    def limit() -> int:
        """Partitions that may have their files open: two thirds of the limit, the rest is for what is open briefly."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        available = 4096 if soft == resource.RLIM_INFINITY else min(soft, 1 << 16)
        return max(8, available * 2 // 3 // _FILES_PER_PARTITION)

    def opened(self, handle: Handle) -> None:
        """A partition has opened its files; others may have to close theirs."""
        with self._mutex:
            own = weakref.ref(handle)
            self._handles.pop(own, None)
            self._handles[own] = None
            excess = len(self._handles) - self.limit()
        self._release(excess, handle)

    def make_room(self) -> bool:
        """Close some that are not in use, since there is no descriptor left; whether there were any."""
        return self._release(max(8, len(self._handles) // 4))

    def _release(self, wanted: int, but: Handle | None = None) -> bool:
        """Have so many fewer, if so many can be closed, or are closed or dropped already; whether any was closed."""
        any_closed = False
        for _ in range(2 * len(self._handles)):  # in the second round nobody is spared for having been used
            if wanted <= 0:
                break
            with self._mutex:
                own = next(iter(self._handles), None)
                if own is None:
                    break
                self._handles.move_to_end(own)
                candidate = own()
                if candidate is not None and candidate.used:
                    candidate.used = False
                    continue
            # Without the mutex: closing takes a lock under which somebody may be asking for room.
            if candidate is not None and candidate.has_files:
                if candidate is but or not candidate.close_if_idle():
                    continue
                any_closed = True
            with self._mutex:
                if candidate is None or not candidate.has_files:  # else it is in use again
                    self._handles.pop(own, None)
            wanted -= 1
        return any_closed

    def _forget_parent(self) -> None:
        """In a forked child: nothing is open there."""
        self._handles = OrderedDict()


budget = DescriptorBudget()
"""The process's."""

relief.append(budget.make_room)
