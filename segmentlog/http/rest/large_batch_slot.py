"""Large batches, one at a time: a few MiB on the disk can be half a GiB in memory, however little is asked for."""

from __future__ import annotations

from http import HTTPStatus
from types import TracebackType
from typing import TYPE_CHECKING, Final

from segmentlog.http.error_responses import HttpProblem
from segmentlog.storage import fork_safety

if TYPE_CHECKING:
    from segmentlog.format.record_batch import RecordBatch

LARGE_BYTES: Final = 16 << 20
"""Of a batch in memory: of smaller ones every thread may have one."""
_WAIT_S: Final = 20.0


class _Gate:
    """One for all doors of the process."""

    def __init__(self) -> None:
        self.mutex = fork_safety.lock(self, "mutex")


_gate = _Gate()


class Alone:
    """``with Alone() as alone:`` around reading; until it ends nobody else has a large batch, once it has seen one.

    Nothing that waits for a client may be within it.
    """

    def __init__(self) -> None:
        self._is_alone = False

    def __enter__(self) -> Alone:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_alone:
            _gate.mutex.release()

    def see(self, batch: RecordBatch) -> None:
        """Before anything of the batch is looked at. Raises `HttpProblem` when others take too long with theirs."""
        if self._is_alone or batch.raw_size_bytes <= LARGE_BYTES:
            return
        if not _gate.mutex.acquire(timeout=_WAIT_S):
            raise HttpProblem(
                HTTPStatus.SERVICE_UNAVAILABLE, "too many large batches are read at this moment: try again",
                headers={"retry-after": "5"},
            )  # fmt: skip
        self._is_alone = True
