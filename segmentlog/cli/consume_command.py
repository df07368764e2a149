"""``segmentlog consume``: print the records of topics."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from segmentlog.cli.common import (
    EXIT_DONE,
    Progress,
    ReaderGone,
    SkippedRanges,
    collect_signals,
    describe_stop,
    find_exit_status,
    open_store,
    say,
)
from segmentlog.cli.consumer_arguments import create_consumer
from segmentlog.cli.filter_options import filter_options, parse_filter, with_schemas
from segmentlog.cli.option_types import (
    POSITION,
    SELECTOR,
    Selector,
    StartPosition,
    json_option,
    json_values_option,
    match_topics,
    resolve_position,
    skip_damaged_option,
)
from segmentlog.cli.pipe_accounting import StdoutWriter, stop_at_stdout_end
from segmentlog.cli.record_output import batch_renderer, choose_pieces
from segmentlog.errors import UnknownTopic

if TYPE_CHECKING:
    from segmentlog.cli.group_consume import Membership
    from segmentlog.cli.record_output import Pieces
    from segmentlog.consuming.consumer import Consumer
    from segmentlog.consuming.record_filter import RecordFilter
    from segmentlog.format.record_batch import RecordBatch
    from segmentlog.records import TopicPartition
    from segmentlog.store import LogStore


@click.command()
@click.argument("topics", nargs=-1, required=True, type=SELECTOR, metavar="TOPIC[/PARTITION]...")
@click.option(
    "--fetch-size", type=click.IntRange(1), metavar="RECORDS", help="Print at most this many records at a time."
)
@click.option("-f", "--follow", is_flag=True, help="Wait for new records.")
@click.option("--from", "start", type=POSITION, default="earliest", show_default=True, metavar="PLACE",
              help="earliest, latest, an offset, -N (the last N), or a time (2026-07-31T12:00, -1h, @MS).")  # fmt: skip
@click.option("--to", "stop", type=POSITION, metavar="PLACE", help="Stop before this place.")
@click.option("-n", "--max-records", type=click.IntRange(1), metavar="N", help="Stop after N records.")
@click.option("--partition", type=click.IntRange(0), metavar="N", help="Read only this partition.")
@filter_options
@click.option("-g", "--group", metavar="NAME",
              help="Share the partitions with other members of the group, and resume at its committed"
                   " offsets.")  # fmt: skip
@click.option("--isolation", type=click.Choice(["read_uncommitted", "read_committed"]), default="read_uncommitted",
              help="Whether to show records of open and aborted transactions.")  # fmt: skip
@click.option("--durable-only", is_flag=True, help="Print only records that no crash can lose.")
@skip_damaged_option
@click.option("--format", "template", metavar="TEMPLATE",
              help=r"%t topic, %p partition, %o offset, %k key, %s value, %T time (ms), %h headers, %K and %S bytes of"
              r" key and value (-1: null), %% itself; \n \t \r \0 \\.")  # fmt: skip
@click.option("--values", "bare", is_flag=True, help="Print only values, one per line.")
@click.option("--sources/--no-sources", default=None,
              help='Print "topic/partition offset value". Default: on with several topics, and on a terminal also with'
              " several partitions.")  # fmt: skip
@click.option("--avro", is_flag=True,
              help="Decode Avro, JSON Schema and Protobuf values to JSON; the schema id is at"
                   " their start.")  # fmt: skip
@click.option("--avro-keys", is_flag=True, help="Decode keys in the same way.")
@click.option("-q", "--quiet", is_flag=True, help="Print no summary.")
@json_values_option
@json_option
@click.pass_context
def consume(
    ctx: click.Context,
    topics: tuple[Selector, ...],
    fetch_size: int | None,
    follow: bool,
    start: StartPosition,
    stop: StartPosition | None,
    max_records: int | None,
    partition: int | None,
    group: str | None,
    isolation: Any,
    durable_only: bool,
    skip_damaged: bool,
    template: str | None,
    bare: bool,
    sources: bool | None,
    avro: bool,
    avro_keys: bool,
    quiet: bool,
    json_values: bool,
    as_json: bool,
) -> int:
    """Print the records of TOPICS as "offset value"; of several topics as "topic/partition offset value".

    Put patterns in quotes: 'events-*', 'clicks/[01]'. With -f, matching topics that are created later are read, too.
    With --key and other filters, -n counts the records that match.

    With --group NAME the offset of each partition is committed once its records are printed. The next run, or another
    member, continues after them; also after -n, a signal and `| head`. If stdout is a pipe, records in it count as
    printed while a process reads the pipe. If that process ends, only the records that it read from the pipe are
    committed, even if it did not use them: `head -3` consumes three. --from sets where the group starts in a partition
    without a committed offset.
    """
    as_json |= json_values
    if sum((template is not None, bare, as_json)) > 1:
        raise click.UsageError("--format, --values and --json exclude each other")
    if group is not None:
        _check_for_group(topics, partition, stop)
    if partition is not None:
        topics = tuple(Selector(topic.topic, str(partition)) for topic in topics)
    record_filter = parse_filter(ctx)
    settings = {"follow": follow, "isolation": isolation, "durable_only": durable_only, "skip_damaged": skip_damaged}
    with open_store(ctx, background=False) as store:
        record_filter = with_schemas(record_filter, store)
        ends: dict[TopicPartition, int] = {}
        membership: Membership | None = None
        if group is not None:
            from segmentlog.cli.group_consume import Membership

            names = [topic.topic for topic in topics]
            if not follow:  # with --follow, the topics may be created later
                match_topics(store, tuple(names))
            membership = Membership(store, group, names, start, settings, quiet=quiet)
            consumer = membership.consumer
        else:
            consumer = _create_consumer(store, topics, start, stop, ends, settings)
        if sources is None:
            sources = len(topics) > 1 or (sys.stdout.isatty() and _has_several_partitions(store, topics, consumer))
        pieces = choose_pieces(template, bare, as_json, json_values=json_values and not avro, sources=sources)
        if avro or avro_keys:
            from segmentlog.cli.schema_values import decode_before

            pieces = decode_before(pieces, store, keys=avro_keys, values=avro, as_json=as_json)
        with collect_signals(consumer.wakeup) as stopped, consumer:
            total = sum(consumer.lag().values()) if not follow and group is None and record_filter.matches_all else None
            if follow:
                stop_at_stdout_end(consumer)
            printer = _RecordPrinter(
                pieces,
                topics,
                record_filter,
                fetch_size,
                max_records,
                ends,
                flush=follow,
                total=total,
                membership=membership,
            )
            printer.run(consumer, stopped)
        if not quiet:
            say(printer.summary() + describe_stop(stopped))
        done = find_exit_status(stopped) if not follow else EXIT_DONE
        skipped = SkippedRanges()
        for tp, base_offset, end_offset, damage in consumer.skipped:
            skipped.add(str(tp), base_offset, end_offset, damage)
        return skipped.report() or done


def _has_several_partitions(store: LogStore, topics: tuple[Selector, ...], consumer: Consumer) -> bool:
    """Return whether the records come from several partitions."""
    if any(topic.has_pattern for topic in topics) or len(consumer.assignment()) > 1:
        return True
    with contextlib.suppress(UnknownTopic):  # the topic may not exist yet
        return topics[0].number is None and store.topic(topics[0].topic).partition_count > 1
    return False


def _check_for_group(topics: tuple[Selector, ...], partition: int | None, stop: StartPosition | None) -> None:
    if partition is not None or any(topic.partition != "*" for topic in topics):
        raise click.UsageError("a partition and --group exclude each other: the group assigns partitions")
    if stop is not None:
        raise click.UsageError("--to and --group exclude each other: a group resumes at its committed offsets; see -n")


def _create_consumer(
    store: LogStore,
    topics: tuple[Selector, ...],
    start: StartPosition,
    stop: StartPosition | None,
    ends: dict[TopicPartition, int],
    settings: dict[str, Any],
) -> Consumer:
    """Return a consumer without a group, positioned at ``start``. With ``stop``, fill ``ends`` for each partition.

    The consumer follows only if an end is after the current log end. Otherwise it could wait indefinitely: the last
    offset before an end may be a transaction marker, which is never returned as a record.
    """
    if stop is not None:
        match_topics(store, tuple(topic.topic for topic in topics))  # an end needs a topic that exists
    consumer = create_consumer(store, topics, **settings)
    is_to_come = False
    for tp in consumer.assignment():
        if not any(topic.fits(*tp) for topic in topics):
            consumer.pause(*tp)
            continue
        log = store.topic(tp.topic).partition(tp.partition)
        end = log.end_offset(isolation=settings["isolation"], durable_only=settings["durable_only"])
        consumer.seek(tp.topic, tp.partition, resolve_position(start, log, end))
        if stop is not None:
            ends[tp] = resolve_position(stop, log, end)
            is_to_come |= ends[tp] > end
    if settings["follow"] and ends and not is_to_come:
        consumer.close()
        return _create_consumer(store, topics, start, stop, ends, settings | {"follow": False})
    return consumer


class _RecordPrinter:
    """Prints batches to stdout, and counts records and bytes."""

    def __init__(
        self,
        pieces: Pieces,
        selectors: tuple[Selector, ...],
        record_filter: RecordFilter,
        fetch_size: int | None,
        max_records: int | None,
        ends: dict[TopicPartition, int],
        *,
        flush: bool,
        total: int | None,
        membership: Membership | None = None,
    ) -> None:
        self._pieces = pieces
        self._selectors = selectors
        self._filter = record_filter
        self._render = batch_renderer(pieces)
        self._fetch_size = fetch_size
        self._left = max_records
        self._ends = ends
        self._unended: set[TopicPartition] = set()
        """Partitions whose end is not reached yet."""
        self._flush = flush
        self._started = time.perf_counter()
        # On a terminal the printed records show the progress.
        self._progress = Progress("records", total, enabled=not sys.stdout.isatty())
        self._membership = membership
        self.records = self.bytes = 0

    def run(self, consumer: Consumer, stopped: list[int]) -> None:
        out = sys.stdout.buffer
        with self._progress:
            if self._membership is not None:
                self._run_as_member(self._membership, stopped)
                return
            self._unended = {tp for tp, end in self._ends.items() if consumer.position(*tp) < end}
            for batch in consumer.batches() if self._unended or not self._ends else ():
                for part in self._parts(batch, consumer):
                    text = self._render(part)
                    out.write(text)
                    self._count(part, len(text))
                    if self._flush:
                        out.flush()
                if stopped or self._left == 0 or (self._ends and not self._unended):
                    break
            out.flush()
            if self._flush and StdoutWriter().is_abandoned():
                raise ReaderGone

    def _run_as_member(self, membership: Membership, stopped: list[int]) -> None:
        """Print as `run` does, and commit the offsets of the records that the reader of stdout took."""
        with membership.committing(self._render, self._pieces, self._progress, stopped):
            for batch in membership.consumer.batches():
                for part in self._parts(batch, membership.consumer):
                    self._count(part, membership.print(part))
                if stopped or self._left == 0:
                    break
                membership.finish_batch()

    def _count(self, part: RecordBatch, size_bytes: int) -> None:
        self.records += len(part)
        self.bytes += size_bytes
        self._progress.advance(len(part))
        if self._left is not None:
            self._left -= len(part)

    def _parts(self, batch: RecordBatch, consumer: Consumer) -> Iterator[RecordBatch]:
        """Yield the matching records of a batch, in slices of at most `_fetch_size` records.

        Omits records from the partition's end offset (``--to``) on, and those over the maximum count (``-n``).
        """
        from segmentlog.records import TopicPartition

        tp = TopicPartition(batch.topic, batch.partition)
        # a partition that was created later: the consumer reads all partitions of a topic
        if not any(selector.fits(*tp) for selector in self._selectors):
            return
        end = self._ends.get(tp)
        if end is not None and batch.next_offset >= end:
            consumer.pause(*tp)
            self._unended.discard(tp)
            batch = batch.slice(0, int((batch.offsets < end).sum()))
        for run in self._filter.parts(batch):
            if self._left is not None:  # `_count` lowers it as they are printed
                run = run.slice(0, self._left)
            size = self._fetch_size or max(len(run), 1)
            for at in range(0, len(run), size):
                yield run.slice(at, at + size)

    def summary(self) -> str:
        seconds = max(time.perf_counter() - self._started, 1e-9)
        rate = self.records / seconds
        return f"{self.records:,} records, {self.bytes:,} bytes in {seconds:.2f} s ({rate:,.0f} records/s)"
