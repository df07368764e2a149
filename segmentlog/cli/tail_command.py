"""``segmentlog tail``: the last records of topics, and those that follow."""

from __future__ import annotations

import heapq
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from segmentlog.cli.common import Skipped, open_store, say, stoppable, stopped_by
from segmentlog.cli.consumer_arguments import consumer_of
from segmentlog.cli.filter_options import filter_of, filter_options, with_schemas
from segmentlog.cli.option_types import SELECTOR, Selector, json_option, json_values_option, skip_damaged_option
from segmentlog.cli.pipe_accounting import end_with_stdout
from segmentlog.cli.record_output import bare_pieces, json_pieces, keyed_pieces, render_as
from segmentlog.consuming.cursor import offset_of_last
from segmentlog.consuming.record_filter import batches_between

if TYPE_CHECKING:
    from segmentlog.cli.record_output import Render
    from segmentlog.consuming.consumer import Consumer
    from segmentlog.consuming.record_filter import Filter
    from segmentlog.errors import CorruptBatch
    from segmentlog.format.record_batch import RecordBatch
    from segmentlog.log.partition import Isolation, Partition
    from segmentlog.store import LogStore


@click.command()
@click.argument("topics", nargs=-1, required=True, type=SELECTOR, metavar="TOPIC[/PARTITION]...")
@click.option("-f", "--follow", is_flag=True, help="Go on, also with what is made later: partitions, topics that fit.")
@click.option("-n", "--lines", type=click.IntRange(0), default=10, show_default=True, help="So many of each partition.")
@filter_options
@click.option("--keys", is_flag=True, help="The key and a tab before each value.")
@click.option("--isolation", type=click.Choice(["read_uncommitted", "read_committed"]), default="read_uncommitted",
              help="Whether to show records of open and aborted transactions.")  # fmt: skip
@skip_damaged_option
@click.option("-q", "--quiet", is_flag=True, help="Never print headers.")
@click.option("-v", "--verbose", is_flag=True, help="Always print headers.")
@json_values_option
@json_option
@click.pass_context
def tail(
    ctx: click.Context,
    topics: tuple[Selector, ...],
    follow: bool,
    lines: int,
    keys: bool,
    isolation: Any,
    skip_damaged: bool,
    quiet: bool,
    verbose: bool,
    json_values: bool,
    as_json: bool,
) -> int:
    """Print the last records of TOPICS as bare values; with -f, continue with records that are appended.

    Patterns go in quotes: 'events-*', 'clicks/[01]'. With several partitions the records are in the order of their
    timestamps, and a header tells the partition whenever it changes. With --key and the like, -n counts the records
    that fit.
    """
    if keys and (as_json or json_values):
        raise click.UsageError("--keys and --json exclude each other: JSON has the key anyway")
    wanted = filter_of(ctx)
    with open_store(ctx, background=False) as store:
        consumer = consumer_of(store, topics, follow=follow, isolation=isolation, skip_damaged=skip_damaged)
        several = len(consumer.assignment()) > 1 or any(selector.may_come for selector in topics)
        as_json |= json_values
        text_pieces = keyed_pieces if keys else bare_pieces
        pieces = json_pieces(plain_values=json_values) if as_json else text_pieces
        printer = _Printer(render_as(pieces), headers=None if quiet or as_json else verbose or several)
        wanted = with_schemas(wanted, store)
        with stoppable(consumer.wakeup) as stopped, consumer:
            skipped = Skipped()
            last = _Last(lines, wanted, isolation, skipped if skip_damaged else None)
            _show_last(store, consumer, topics, last, printer)
            printer.flush()
            if follow and not stopped:
                end_with_stdout(consumer)
                for batch in consumer.batches():
                    if any(selector.fits(batch.topic, batch.partition) for selector in topics):
                        for part in wanted.parts(batch):
                            printer.show(part)
                        printer.flush()
                    if stopped:
                        break
            if stopped:
                say(f"{printer.records:,} records{stopped_by(stopped)}")
            for tp, base_offset, end_offset, damage in consumer.skipped:
                skipped.note(str(tp), base_offset, end_offset, damage)
        return skipped.report()


def _show_last(
    store: LogStore, consumer: Consumer, topics: tuple[Selector, ...], last: _Last, printer: _Printer
) -> None:
    """Print the last records of each partition, and have the consumer continue after them."""
    streams: list[Iterable[RecordBatch]] = []
    for tp in consumer.assignment():
        log = store.topic(tp.topic).partition(tp.partition)
        end = log.end_offset(isolation=last.isolation)
        if any(selector.fits(*tp) for selector in topics):
            streams.append(last.of(log, end))
        consumer.seek(tp.topic, tp.partition, end)
    if len(streams) == 1:
        for batch in streams[0]:
            printer.show(batch)
        return
    run: _Place | None = None
    for place in heapq.merge(*(_in_order(batches, number) for number, batches in enumerate(streams))):
        if run is not None and place.batch is run.batch and place.at == run.end:
            run = run._replace(end=place.end)
            continue
        if run is not None:
            printer.show(run.batch.slice(run.at, run.end))
        run = place
    if run is not None:
        printer.show(run.batch.slice(run.at, run.end))


class _Last(NamedTuple):
    """Which records of each partition are printed first."""

    lines: int
    wanted: Filter
    isolation: Isolation
    skipped: Skipped | None
    """Notes damaged and unreadable batches between these records; None: they raise."""

    def of(self, log: Partition, end: int) -> Iterable[RecordBatch]:
        """Return the last records before ``end``, in parts of batches."""
        if self.skipped is not None:
            return self._skipping(log, end, self.skipped)
        if not self.wanted.is_open or self.isolation != "read_uncommitted":  # what does not fit is not counted
            return self.wanted.last(log, self.lines, end, self.isolation)
        return batches_between(log, offset_of_last(log, self.lines, end), end)

    def _skipping(self, log: Partition, end: int, skipped: Skipped) -> list[RecordBatch]:
        noted: list[tuple[int, int, CorruptBatch]] = []
        found = self.wanted.last(log, self.lines, end, self.isolation, lambda *skip: noted.append(skip))
        # The search for so many records also reads offsets before the first of them.
        begin = found[0].base_offset if found and sum(map(len, found)) == self.lines else 0
        for base_offset, end_offset, damage in noted:
            if end_offset > begin:
                skipped.note(f"{log.topic}/{log.number}", base_offset, end_offset, damage)
        return found


class _Place(NamedTuple):
    """Records of a batch that are printed together; ordered by time, and by what is unique before the batch."""

    timestamp: int
    stream: int
    number: int
    end: int
    at: int
    batch: RecordBatch


def _in_order(batches: Iterable[RecordBatch], stream: int) -> Iterator[_Place]:
    number = 0
    latest = -(1 << 63)
    for batch in batches:
        for at, timestamp in enumerate(batch.timestamps.tolist()):
            # A partition's records stay in their order, whatever clocks their producers had.
            latest = max(latest, timestamp)
            yield _Place(latest, stream, number, at + 1, at, batch)
            number += 1


class _Printer:
    """Writes rendered records, with a header whenever another partition's turn comes.

    ``headers``: also before the first; None for none at all.
    """

    def __init__(self, render: Render, *, headers: bool | None) -> None:
        self._render = render
        self._headers = headers
        self._last: tuple[str, int] | None = None
        self.records = 0

    def show(self, batch: RecordBatch) -> None:
        out = sys.stdout.buffer
        source = (batch.topic, batch.partition)
        if source != self._last and (self._headers or (self._headers is not None and self._last is not None)):
            gap = b"\n" if self._last is not None else b""
            out.write(gap + f"==> {batch.topic}/{batch.partition} <==\n".encode())
        self._last = source
        self.records += len(batch)
        out.write(self._render(batch))

    def flush(self) -> None:
        sys.stdout.buffer.flush()
