"""`consume --group`: commit exactly the records that the reader of stdout took."""

from __future__ import annotations

import contextlib
import math
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from segmentlog.cli.common import Progress, ReaderGone, say
from segmentlog.cli.option_types import StartPosition, resolve_position
from segmentlog.cli.pipe_accounting import StdoutWriter
from segmentlog.errors import LogTruncated, OffsetOutOfRange
from segmentlog.records import TopicPartition

if TYPE_CHECKING:
    from segmentlog.cli.record_output import Pieces, Render
    from segmentlog.consuming.consumer import Start
    from segmentlog.format.record_batch import RecordBatch
    from segmentlog.store import LogStore

_COMMIT_MS: Final = 100
"""Time between commits of printed records: after kill -9, the next run prints the records of this time again."""
_SHOWN: Final = 8

# `head -3` reads a block and discards what follows the third line, and no process can know what it used. So the first
# records are written one at a time, each after the reader took the previous record; later records are written in
# growing parts. A reader of the first lines then discards at most a 256th of what it used.
_PARTS: Final = 256
_CAREFUL_RECORDS: Final = 4096
_PATIENCE_S: Final = 2.0
"""How long to wait for the reader of stdout, also after a signal. A reader that takes longer is not `head`."""


class _PrintedPart(NamedTuple):
    """Part of a batch that was written to stdout, at least in part."""

    part: RecordBatch
    pieces: Pieces
    begin: int
    end: int
    """Count of bytes written to stdout before the first record (``begin``) and after the last (``end``)."""

    @property
    def tp(self) -> TopicPartition:
        return TopicPartition(self.part.topic, self.part.partition)

    def offset_after(self, written_bytes: int) -> int:
        """Return the offset of the first record that was not fully written, if stdout took ``written_bytes`` bytes."""
        if written_bytes >= self.end:
            return int(self.part.offsets[-1]) + 1
        ends = list(accumulate(map(len, self.pieces(self.part)), initial=self.begin))[1:]
        return int(self.part.offsets[bisect_right(ends, written_bytes)])


class Membership:
    """A group member that prints records.

    While stdout has a reader, written records count as printed, and the consumer commits them between batches. At the
    end it waits for the reader. If the reader is gone, only records that it took are committed.
    """

    def __init__(
        self,
        store: LogStore,
        group: str,
        topics: list[str],
        start: StartPosition,
        settings: dict[str, Any],
        *,
        quiet: bool,
    ) -> None:
        """Join the group. ``settings`` are passed to `LogStore.consumer`."""
        self._store = store
        self._group = group
        self._start = start
        self._settings = settings
        self._quiet = quiet
        self._is_leaving = False
        self._progress: Progress | None = None
        self._render: Render
        self._pieces: Pieces
        self._out: StdoutWriter
        self._careful = True
        self._records = 0
        self._waiting: deque[_PrintedPart] = deque()
        """Records in the pipe, oldest first; the last one may be written in part only."""
        self._reached: tuple[TopicPartition, int] | None = None
        """Partition and offset up to which the current batch was printed; None if it was printed completely."""
        begin: Start = "earliest"
        if start.kind in ("latest", "offset"):
            begin = "latest" if start.kind == "latest" else start.number
        self.consumer = store.consumer(
            *topics, group=group, start=begin, auto_commit=True, auto_commit_interval_ms=_COMMIT_MS,
            client_id="consume", on_assigned=self._assigned, on_revoked=self._revoked, on_lost=self._lost, **settings,
        )  # fmt: skip

    @contextlib.contextmanager
    def committing(self, render: Render, pieces: Pieces, progress: Progress, stopped: list[int]) -> Iterator[None]:
        """Print within this context. At its end, durably commit the offsets of the records that the reader took.

        ``render`` returns the text of a batch, ``pieces`` the same text as a list with an item for each record.
        Raises `ReaderGone`.
        """
        self._render, self._pieces, self._progress = render, pieces, progress
        self._out = StdoutWriter()
        self._careful = self._out.is_pipe
        try:
            yield
            self._seek_to_reached()
            self._wait_for_reader(stopped)
        finally:
            self._is_leaving = True
            self._commit()
        if self._out.is_abandoned():
            raise ReaderGone

    # ------------------------------------------------------------ printing

    def print(self, part: RecordBatch) -> int:
        """Write records to stdout; return the number of bytes.

        The first records of a command are written in small parts, each after the reader took the previous part.
        """
        before = self._out.written_bytes
        at = 0
        if self._careful:
            pieces = self._pieces(part)
            while self._careful and at < len(part):
                count = 1 + self._records // _PARTS
                self._print(part.slice(at, at + count), b"".join(pieces[at : at + count]))
                self._careful = self._out.wait_taken(_PATIENCE_S) and self._records < _CAREFUL_RECORDS
                at += count
        if at < len(part):
            rest = part.slice(at)
            self._print(rest, self._render(rest))
        return self._out.written_bytes - before

    def _print(self, part: RecordBatch, text: bytes) -> None:
        begin = self._out.written_bytes
        printed = _PrintedPart(part, self._pieces, begin, begin + len(text))
        if self._out.is_pipe:
            self._drop_taken()
            self._waiting.append(printed)
        try:
            self._out.write(text)
        finally:
            self._reached = printed.tp, printed.offset_after(self._out.written_bytes)
        self._records += len(part)

    def finish_batch(self) -> None:
        """Make the end of the current batch the offset to commit, because all of its records were printed."""
        self._reached = None

    def _drop_taken(self) -> None:
        taken = self._out.taken_bytes
        while self._waiting and self._waiting[0].end <= taken:
            self._waiting.popleft()

    # ------------------------------------------------------------ committing

    def _wait_for_reader(self, stopped: list[int]) -> None:
        """Wait until the reader of stdout took all printed records or is gone; after a signal, at most `_PATIENCE_S`.

        Polls the group meanwhile, so that this member keeps its partitions.
        """
        since_s = math.inf

        def between() -> bool:
            nonlocal since_s
            self.consumer.poll_group()
            if stopped:
                since_s = min(since_s, time.monotonic())
            return time.monotonic() - since_s < _PATIENCE_S

        self._out.wait_taken(math.inf, between)

    def _commit(self) -> None:
        self._seek_to_reached()
        positions = self.consumer.positions()
        if self._reached is not None and self._reached[0] in positions:
            positions[self._reached[0]] = self._reached[1]
        if self._out.is_abandoned():
            for tp, offset in self._find_untaken().items():
                if tp in positions:
                    positions[tp] = min(offset, positions[tp])
                    self._seek(tp, positions[tp])
        self.consumer.commit(positions)

    def _find_untaken(self) -> dict[TopicPartition, int]:
        """Return, by partition, the first offset that the reader did not take from the pipe."""
        taken = self._out.taken_bytes
        found: dict[TopicPartition, int] = {}
        for printed in self._waiting:
            if printed.end > taken:
                found.setdefault(printed.tp, printed.offset_after(taken))
        return found

    def _seek_to_reached(self) -> None:
        if self._reached is not None and self._reached[0] in self.consumer.positions():
            self._seek(*self._reached)

    def _seek(self, tp: TopicPartition, offset: int) -> None:
        # Closing also commits. Without this seek, it would treat the current batch as unprocessed.
        with contextlib.suppress(OffsetOutOfRange, LogTruncated):
            self.consumer.seek(*tp, offset)

    # ------------------------------------------------------------ assignment

    def _assigned(self, partitions: list[TopicPartition]) -> None:
        if self._start.kind in ("last", "time"):
            for tp in partitions:
                if self.consumer.committed(*tp) is None:
                    log = self._store.topic(tp.topic).partition(tp.partition)
                    end = log.end_offset(
                        isolation=self._settings["isolation"], durable_only=self._settings["durable_only"]
                    )
                    self.consumer.seek(*tp, resolve_position(self._start, log, end))
        self._say("reads", partitions, f" (generation {self.consumer.generation})")

    def _revoked(self, partitions: list[TopicPartition]) -> None:
        if not self._is_leaving:
            if self._out.is_abandoned():
                back = self._find_untaken()
                self.consumer.commit({tp: back[tp] for tp in partitions if tp in back})
            self._count_as_taken(partitions)
            self._say("releases", partitions)

    def _lost(self, partitions: list[TopicPartition]) -> None:
        self._reached = None
        self._count_as_taken(partitions)
        self._say("lost", partitions, ": other members print again the records since the last commit")

    def _count_as_taken(self, partitions: list[TopicPartition]) -> None:
        """Treat records of these partitions as taken: another member continues after them."""
        self._waiting = deque(printed for printed in self._waiting if printed.tp not in partitions)

    def _say(self, what: str, partitions: list[TopicPartition], more: str = "") -> None:
        if self._quiet:
            return
        names = ", ".join(map(str, partitions[:_SHOWN]))
        others = f" and {len(partitions) - _SHOWN} more" if len(partitions) > _SHOWN else ""
        with self._progress.hidden() if self._progress is not None else contextlib.nullcontext():
            say(f"group {self._group}: {what} {names}{others}{more}")
