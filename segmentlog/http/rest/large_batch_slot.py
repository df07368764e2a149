"""Limits large batches to one at a time: a few MiB on disk can be half a GiB in memory."""

from __future__ import annotations

from http import HTTPStatus
from types import TracebackType
from typing import TYPE_CHECKING, Final

from segmentlog.http.error_responses import HttpProblem
from segmentlog.storage import fork_safety

if TYPE_CHECKING:
    from segmentlog.format.record_batch import RecordBatch

LARGE_BYTES: Final = 16 << 20
"""Decompressed size above which a batch needs the slot. Smaller batches may be in memory in every thread."""
_WAIT_S: Final = 20.0


class _ProcessMutex:
    """One mutex for all HTTP servers of the process."""

    def __init__(self) -> None:
        self.mutex = fork_safety.lock(self, "mutex")


_process = _ProcessMutex()


class LargeBatchSlot:
    """Context manager around reading. From its first large batch until it exits, no other thread reads a large batch.

    Code within the context must not wait for a client.
    """

    def __init__(self) -> None:
        self._is_held = False

    def __enter__(self) -> LargeBatchSlot:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_held:
            _process.mutex.release()

    def acquire_for(self, batch: RecordBatch) -> None:
        """Wait for the slot if the batch is large. Call this before decompressing. Raises `HttpProblem` (503)."""
        if self._is_held or batch.raw_size_bytes <= LARGE_BYTES:
            return
        if not _process.mutex.acquire(timeout=_WAIT_S):
            raise HttpProblem(
                HTTPStatus.SERVICE_UNAVAILABLE, "another request is reading a large batch; retry in 5 s",
                headers={"retry-after": "5"},
            )  # fmt: skip
        self._is_held = True
