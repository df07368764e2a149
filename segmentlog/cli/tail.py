"""``segmentlog tail``: the last records of topics, and those that follow."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from segmentlog.cli.common import open_store, say, stoppable, stopped_by
from segmentlog.cli.following import consumer_of
from segmentlog.cli.options import SELECTOR, Selector, json_option
from segmentlog.cli.taken import end_with_stdout

if TYPE_CHECKING:
    from segmentlog.format.record_batch import RecordBatch


@click.command()
@click.argument("topics", nargs=-1, required=True, type=SELECTOR, metavar="TOPIC[/PARTITION]...")
@click.option("-f", "--follow", is_flag=True, help="Go on, also with what is made later: partitions, topics that fit.")
@click.option("-n", "--lines", type=click.IntRange(0), default=10, show_default=True, help="So many of each partition.")
@click.option("-q", "--quiet", is_flag=True, help="Never print headers.")
@click.option("-v", "--verbose", is_flag=True, help="Always print headers.")
@json_option
@click.pass_context
def tail(
    ctx: click.Context,
    topics: tuple[Selector, ...],
    follow: bool,
    lines: int,
    quiet: bool,
    verbose: bool,
    as_json: bool,
) -> None:
    """Print the last records of TOPICS as bare values; with -f, go on with those that are appended.

    Patterns go in quotes: 'events-*', 'clicks/[01]'. A header tells the partition when there
    are several.
    """
    with open_store(ctx, background=False) as store:
        consumer = consumer_of(store, topics, follow=follow)
        several = len(consumer.assignment()) > 1 or any(selector.may_come for selector in topics)
        printer = _Printer(headers=None if quiet or as_json else verbose or several, as_json=as_json)
        with stoppable(consumer.wakeup) as stopped, consumer:
            for tp in consumer.assignment():
                log = store.topic(tp.topic).partition(tp.partition)
                end = log.log_end_offset
                wanted = any(selector.fits(*tp) for selector in topics)
                from segmentlog.consuming.cursor import offset_of_last

                begin = offset_of_last(log, lines, end) if wanted else end
                for batch in log.read(begin) if begin < end else ():
                    if batch.base_offset >= end:
                        break
                    printer.show(batch)
                    end = max(end, batch.next_offset)
                consumer.seek(tp.topic, tp.partition, end)
            printer.flush()
            if follow and not stopped:
                end_with_stdout(consumer)
                for batch in consumer.batches():
                    if any(selector.fits(batch.topic, batch.partition) for selector in topics):
                        printer.show(batch)
                        printer.flush()
                    if stopped:
                        break
            if stopped:
                say(f"{printer.records:,} records{stopped_by(stopped)}")


class _Printer:
    """Bare values, with a header whenever another partition's turn comes.

    ``headers``: also before the first; None for none at all.
    """

    def __init__(self, *, headers: bool | None, as_json: bool) -> None:
        self._headers = headers
        self._as_json = as_json
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
        if self._as_json:
            from segmentlog.cli.rendering import render_json

            out.write(render_json(batch))
        else:
            from segmentlog.cli.rendering import render_values

            out.write(render_values(batch))

    def flush(self) -> None:
        sys.stdout.buffer.flush()
