"""``segmentlog tail``: print the last records of topics, and follow new ones."""

from __future__ import annotations

import heapq
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from segmentlog.cli.common import SkippedRanges, collect_signals, describe_stop, open_store, say
from segmentlog.cli.consumer_arguments import create_consumer
from segmentlog.cli.filter_options import filter_options, parse_filter, with_schemas
from segmentlog.cli.option_types import SELECTOR, Selector, json_option, json_values_option, skip_damaged_option
from segmentlog.cli.pipe_accounting import stop_at_stdout_end
from segmentlog.cli.record_output import bare_pieces, batch_renderer, json_pieces, keyed_pieces
from segmentlog.consuming.cursor import offset_of_last
from segmentlog.consuming.record_filter import batches_between

if TYPE_CHECKING:
    from segmentlog.cli.record_output import Render
    from segmentlog.consuming.consumer import Consumer
    from segmentlog.consuming.record_filter import RecordFilter
    from segmentlog.errors import CorruptBatch
    from segmentlog.format.record_batch import RecordBatch
    from segmentlog.log.partition import Isolation, Partition
    from segmentlog.store import LogStore


@click.command()
@click.argument("topics", nargs=-1, required=True, type=SELECTOR, metavar="TOPIC[/PARTITION]...")
@click.option(
    "-f", "--follow", is_flag=True, help="Keep following, including partitions and matching topics created later."
)
@click.option(
    "-n", "--lines", type=click.IntRange(0), default=10, show_default=True, help="Number of records of each partition."
)
@filter_options
@click.option("--keys", is_flag=True, help="Print the key and a tab before each value.")
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

    Put patterns in quotes: 'events-*', 'clicks/[01]'. The records of several partitions are ordered by timestamp, and a
    header names the partition whenever it changes. With --key and other filters, -n counts the records that match.
    """
    if keys and (as_json or json_values):
        raise click.UsageError("--keys and --json exclude each other: JSON includes the key")
    record_filter = parse_filter(ctx)
    with open_store(ctx, background=False) as store:
        consumer = create_consumer(store, topics, follow=follow, isolation=isolation, skip_damaged=skip_damaged)
        several = len(consumer.assignment()) > 1 or any(selector.can_match_later for selector in topics)
        as_json |= json_values
        text_pieces = keyed_pieces if keys else bare_pieces
        pieces = json_pieces(plain_values=json_values) if as_json else text_pieces
        printer = _TailPrinter(batch_renderer(pieces), headers=None if quiet or as_json else verbose or several)
        record_filter = with_schemas(record_filter, store)
        with collect_signals(consumer.wakeup) as stopped, consumer:
            skipped = SkippedRanges()
            last = _LastRecordsFinder(lines, record_filter, isolation, skipped if skip_damaged else None)
            _show_last(store, consumer, topics, last, printer)
            printer.flush()
            if follow and not stopped:
                stop_at_stdout_end(consumer)
                for batch in consumer.batches():
                    if any(selector.fits(batch.topic, batch.partition) for selector in topics):
                        for part in record_filter.parts(batch):
                            printer.show(part)
                        printer.flush()
                    if stopped:
                        break
            if stopped:
                say(f"{printer.records:,} records{describe_stop(stopped)}")
            for tp, base_offset, end_offset, damage in consumer.skipped:
                skipped.add(str(tp), base_offset, end_offset, damage)
        return skipped.report()


def _show_last(
    store: LogStore, consumer: Consumer, topics: tuple[Selector, ...], last: _LastRecordsFinder, printer: _TailPrinter
) -> None:
    """Print the last records of each partition, and position the consumer after them."""
    streams: list[Iterable[RecordBatch]] = []
    for tp in consumer.assignment():
        log = store.topic(tp.topic).partition(tp.partition)
        end = log.end_offset(isolation=last.isolation)
        if any(selector.fits(*tp) for selector in topics):
            streams.append(last.find_before(log, end))
        consumer.seek(tp.topic, tp.partition, end)
    if len(streams) == 1:
        for batch in streams[0]:
            printer.show(batch)
        return
    run: _Slice | None = None
    for place in heapq.merge(*(_order_records(batches, number) for number, batches in enumerate(streams))):
        if run is not None and place.batch is run.batch and place.at == run.end:
            run = run._replace(end=place.end)
            continue
        if run is not None:
            printer.show(run.batch.slice(run.at, run.end))
        run = place
    if run is not None:
        printer.show(run.batch.slice(run.at, run.end))


class _LastRecordsFinder(NamedTuple):
    """Finds the last records of each partition, which `tail` prints before new records."""

    lines: int
    record_filter: RecordFilter
    isolation: Isolation
    skipped: SkippedRanges | None
    """Collects damaged and unreadable batches between these records; None: they raise."""

    def find_before(self, log: Partition, end: int) -> Iterable[RecordBatch]:
        """Return the last records before ``end``, as slices of batches."""
        if self.skipped is not None:
            return self._find_skipping(log, end, self.skipped)
        # With a filter or read_committed, some records do not count, so they must be read.
        if not self.record_filter.matches_all or self.isolation != "read_uncommitted":
            return self.record_filter.last(log, self.lines, end, self.isolation)
        return batches_between(log, offset_of_last(log, self.lines, end), end)

    def _find_skipping(self, log: Partition, end: int, skipped: SkippedRanges) -> list[RecordBatch]:
        damaged: list[tuple[int, int, CorruptBatch]] = []
        found = self.record_filter.last(log, self.lines, end, self.isolation, lambda *skip: damaged.append(skip))
        # The search also reads offsets before the first of the records.
        begin = found[0].base_offset if found and sum(map(len, found)) == self.lines else 0
        for base_offset, end_offset, damage in damaged:
            if end_offset > begin:
                skipped.add(f"{log.topic}/{log.number}", base_offset, end_offset, damage)
        return found


class _Slice(NamedTuple):
    """Records ``[at, end)`` of a batch, printed together. Slices sort by timestamp, then by stream and number."""

    timestamp: int
    stream: int
    number: int
    end: int
    at: int
    batch: RecordBatch


def _order_records(batches: Iterable[RecordBatch], stream: int) -> Iterator[_Slice]:
    number = 0
    latest = -(1 << 63)
    for batch in batches:
        for at, timestamp in enumerate(batch.timestamps.tolist()):
            # Records of a partition keep their order, whatever the clocks of their producers were.
            latest = max(latest, timestamp)
            yield _Slice(latest, stream, number, at + 1, at, batch)
            number += 1


class _TailPrinter:
    """Prints batches, with a header whenever the partition changes.

    ``headers``: True also prints a header before the first batch; None omits all headers.
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
