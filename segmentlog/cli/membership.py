"""`consume --group`: what came through to stdout is committed, to the record."""

from __future__ import annotations

import contextlib
import select
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

from segmentlog.cli.common import Progress, say
from segmentlog.cli.options import Place, resolve
from segmentlog.errors import LogTruncated, OffsetOutOfRange
from segmentlog.records import TopicPartition

if TYPE_CHECKING:
    from segmentlog.consumer import Start
    from segmentlog.format.record_batch import RecordBatch
    from segmentlog.store import LogStore

_COMMIT_MS: Final = 100
"""What was printed for so long is committed: kill -9 has at most so much printed again."""
_SHOWN: Final = 8


class Membership:
    """A group member that prints. It commits by itself between batches, when everything that it was handed is out."""

    def __init__(
        self, store: LogStore, group: str, topic: str, start: Place, settings: dict[str, Any], *, quiet: bool
    ) -> None:
        """``settings``: of the consumer. Joins the group."""
        self._store = store
        self._group = group
        self._start = start
        self._settings = settings
        self._quiet = quiet
        self._leaving = False
        self._progress: Progress | None = None
        self._render: Callable[[RecordBatch], bytes]
        self._reached: tuple[TopicPartition, int] | None = None
        """Up to where the batch in hand came through; None when all of it did."""
        begin: Start = "earliest"
        if start.kind in ("latest", "offset"):
            begin = "latest" if start.kind == "latest" else start.number
        self.consumer = store.consumer(
            topic, group=group, start=begin, auto_commit=True, auto_commit_interval_ms=_COMMIT_MS, client_id="consume",
            on_assigned=self._assigned, on_revoked=self._revoked, on_lost=self._lost, **settings,
        )  # fmt: skip

    @contextlib.contextmanager
    def committing(self, render: Callable[[RecordBatch], bytes], progress: Progress) -> Iterator[None]:
        """Within: print. However it ends, what came through is committed then, durably."""
        self._render, self._progress = render, progress
        try:
            yield
        finally:
            self._leaving = True
            self._commit()

    def print(self, part: RecordBatch) -> int:
        """Write records to stdout, unbuffered; the number of bytes."""
        text = memoryview(self._render(part))
        sys.stdout.flush()
        out = getattr(sys.stdout.buffer, "raw", sys.stdout.buffer)
        done = 0
        try:
            while done < len(text):
                written = out.write(text[done:])
                if written is None:  # somebody made it non-blocking
                    select.select([], [out], [])
                done += written or 0
        finally:
            self._reached = TopicPartition(part.topic, part.partition), self._offset_after(part, done, len(text))
        return len(text)

    def _offset_after(self, part: RecordBatch, done: int, size_bytes: int) -> int:
        """Of the first record of which not every byte is among the first ``done``."""
        if done == size_bytes:
            return int(part.offsets[-1]) + 1
        whole = bisect_right(range(1, len(part) + 1), done, key=lambda count: len(self._render(part.slice(0, count))))
        return int(part.offsets[whole])

    def printed(self, batch: RecordBatch) -> None:
        """All records of a batch came through: the consumer's position is the one to commit."""
        self._reached = None

    def _commit(self) -> None:
        positions = self.consumer.positions()
        if self._reached is not None and self._reached[0] in positions:
            tp, offset = self._reached
            positions[tp] = offset
            # Lest closing, which commits too, takes the batch in hand for one that was not worked on.
            with contextlib.suppress(OffsetOutOfRange, LogTruncated):
                self.consumer.seek(*tp, offset)
        self.consumer.commit(positions)

    # ------------------------------------------------------------ who reads what

    def _assigned(self, partitions: list[TopicPartition]) -> None:
        if self._start.kind in ("last", "time"):
            for tp in partitions:
                if self.consumer.committed(*tp) is None:
                    log = self._store.topic(tp.topic).partition(tp.partition)
                    end = log.end_offset(
                        isolation=self._settings["isolation"], durable_only=self._settings["durable_only"]
                    )
                    self.consumer.seek(*tp, resolve(self._start, log, end))
        self._say("reads", partitions, f" (generation {self.consumer.generation})")

    def _revoked(self, partitions: list[TopicPartition]) -> None:
        if not self._leaving:
            self._say("hands over", partitions)

    def _lost(self, partitions: list[TopicPartition]) -> None:
        self._reached = None
        self._say("lost", partitions, ": others print again what was printed since the last commit")

    def _say(self, what: str, partitions: list[TopicPartition], more: str = "") -> None:
        if self._quiet:
            return
        names = ", ".join(map(str, partitions[:_SHOWN]))
        others = f" and {len(partitions) - _SHOWN} more" if len(partitions) > _SHOWN else ""
        with self._progress.hidden() if self._progress is not None else contextlib.nullcontext():
            say(f"group {self._group}: {what} {names}{others}{more}")
