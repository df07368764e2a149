"""A budget for file descriptors, so that ten thousand partitions work under a limit of a thousand.

The operating system's limit is for each process, so all stores of a process share one budget.
"""

from __future__ import annotations

import resource
import weakref
from collections import OrderedDict

from segmentlog.log.handle import Handle
from segmentlog.storage import fork_safety
from segmentlog.storage.fs import relief

_FILES_PER_PARTITION = 4
"""The lock, the state page, the active segment, and a second descriptor of the segment for fsync."""


class DescriptorBudget:
    """Keeps the number of partitions with open descriptors within the limit of the process. Thread-safe.

    Uses the second-chance algorithm: partitions are checked in a circle, and a partition is closed if it was not used
    since its last check. A closed partition reopens its files at its next use.
    """

    def __init__(self) -> None:
        # The lock is reentrant: while a thread holds it, the garbage collector may finalize a partition, or an open may
        # run out of descriptors, and both call this class again.
        self._mutex = fork_safety.reentrant_lock(self, "_mutex")
        self._handles: OrderedDict[weakref.ref[Handle], None] = OrderedDict()
        fork_safety.on_fork(self, "_discard_parent_state")

    @staticmethod
    def limit() -> int:
        """Return how many partitions may have open files.

        They may use two thirds of the descriptors of the process. The rest is for short-lived files.
        """
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        available = 4096 if soft == resource.RLIM_INFINITY else min(soft, 1 << 16)
        return max(8, available * 2 // 3 // _FILES_PER_PARTITION)

    def register(self, handle: Handle) -> None:
        """Register a partition that has opened its files. Closes other partitions if there are too many."""
        with self._mutex:
            own = weakref.ref(handle)
            self._handles.pop(own, None)
            self._handles[own] = None
            excess = len(self._handles) - self.limit()
        self._release(excess, handle)

    def make_room(self) -> bool:
        """Close some idle partitions, after the descriptors have run out. Return whether any was closed."""
        return self._release(max(8, len(self._handles) // 4))

    def _release(self, wanted: int, spared: Handle | None = None) -> bool:
        """Close up to ``wanted`` partitions, except ``spared``. Return whether any was closed.

        Partitions that are closed already, or were garbage-collected, count towards ``wanted``.
        """
        any_closed = False
        for _ in range(2 * len(self._handles)):  # the second pass closes recently used partitions, too
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
            # Close without the mutex: closing takes a lock whose holder may be waiting for a descriptor, and so for the
            # mutex.
            if candidate is not None and candidate.has_files:
                if candidate is spared or not candidate.close_if_idle():
                    continue
                any_closed = True
            with self._mutex:
                if candidate is None or not candidate.has_files:  # if it has files, another thread has opened it again
                    self._handles.pop(own, None)
            wanted -= 1
        return any_closed

    def _discard_parent_state(self) -> None:
        """Drop all entries in a forked child, where no partition is open."""
        self._handles = OrderedDict()


budget = DescriptorBudget()
"""The budget of this process."""

relief.append(budget.make_room)
