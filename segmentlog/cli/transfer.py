"""``segmentlog import`` and ``export``: records from and to other formats."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import IO, TYPE_CHECKING, Any

import click

from segmentlog.cli.common import Progress, check_stdin, open_store, say, status_of, stoppable, stopped_by
from segmentlog.cli.options import PLACE, SELECTOR, Place, Selector, existing_topic, resolve, selected_partitions
from segmentlog.errors import InvalidRecord, RecordTooLarge, UnknownTopic

if TYPE_CHECKING:
    from segmentlog.store import LogStore
    from segmentlog.transfer import Rows

_FORMATS = click.Choice(["ndjson", "csv", "parquet"])
_ENDINGS = {".ndjson": "ndjson", ".jsonl": "ndjson", ".json": "ndjson", ".csv": "csv", ".parquet": "parquet"}


def _format_of(file: str, shape: str | None) -> str:
    """The format that was asked for, or that the file's ending says."""
    return shape or _ENDINGS.get(os.path.splitext(file)[1].lower(), "ndjson")


@click.command("import")
@click.argument("source")
@click.argument("topic")
@click.option("--format", "shape", type=_FORMATS, help="Of the file; else by its ending, else ndjson.")
@click.option("--key", metavar="FIELD", help="Field that becomes the key ('key').")
@click.option("--value", metavar="FIELD", help="Field that becomes the value ('value').")
@click.option("--whole", is_flag=True, help="The whole row, as JSON, becomes the value.")
@click.option("--timestamp", metavar="FIELD", help="Field with the timestamp: milliseconds or ISO 8601 ('timestamp').")
@click.option("--batch-size", type=click.IntRange(1), default=4096, show_default=True, metavar="RECORDS",
              help="Append so many records at a time.")  # fmt: skip
@click.pass_context
def import_(
    ctx: click.Context,
    source: str,
    topic: str,
    shape: str | None,
    key: str | None,
    value: str | None,
    whole: bool,
    timestamp: str | None,
    batch_size: int,
) -> int:
    """Append the records of SOURCE to TOPIC.

    SOURCE is a file (- for stdin), or redis://HOST[:PORT]/DB or unix:///PATH with a topic of
    kafkaesque of the same name, whose settings TOPIC gets if it is not there yet.
    """
    from segmentlog.transfer import Fields

    if whole and value:
        raise click.UsageError("--whole takes the whole row for the value, --value one field: give one of them")
    with ExitStack() as stack, stoppable() as stopped:
        from_redis = source.startswith(("redis://", "rediss://", "unix://"))
        store = stack.enter_context(open_store(ctx, create=from_redis))
        if from_redis:
            rows = _from_redis(store, source, topic, batch_size)
        else:
            existing_topic(store, topic, to_write=True)
            fields = Fields(key, value, timestamp, whole)
            rows = _from_file(stack, source, _format_of(source, shape), fields, batch_size)
        started = time.perf_counter()
        count = 0
        with store.producer() as producer, Progress("records", None) as progress:
            try:
                for part in rows:
                    try:
                        producer.send_many(
                            topic, part.values, part.keys, headers=part.headers, timestamps=part.timestamps
                        )
                    except (InvalidRecord, RecordTooLarge) as error:
                        raise click.ClickException(f"records {count + 1} to {count + len(part)}: {error}") from None
                    count += len(part)
                    progress.advance(len(part))
                    if stopped:
                        break
            except UnicodeDecodeError as error:
                raise click.ClickException(f"the input is not UTF-8: {error}") from None
            finally:
                seconds = max(time.perf_counter() - started, 1e-9)
                rate = f"{count / seconds:,.0f} records/s"
                say(f"{count:,} records imported in {seconds:.2f} s ({rate}){stopped_by(stopped)}")
        return status_of(stopped)


def _from_file(stack: ExitStack, source: str, shape: str, fields: Any, batch_size: int) -> Iterator[Rows]:
    from segmentlog import transfer

    if shape == "parquet":
        if source == "-":
            raise click.UsageError("Parquet is read from a file, not from a pipe")
        documents = transfer.read_parquet(source)
    else:
        file: IO[bytes] = sys.stdin.buffer
        if source == "-":
            check_stdin()
        else:
            file = stack.enter_context(open(source, "rb"))  # noqa: SIM115
        documents = transfer.read_csv(file) if shape == "csv" else transfer.read_ndjson(file)
    return transfer.records_of(documents, fields, batch_size)


def _from_redis(store: LogStore, url: str, topic: str, batch_size: int) -> Iterator[Rows]:
    from segmentlog.transfer import RedisTopic

    taken = RedisTopic(url, topic)
    pages = taken.pages()
    try:
        target = store.topic(topic)
    except UnknownTopic:
        target = store.create_topic(topic, 1, taken.config())
        say(f"created {topic}: " + (", ".join(f"{k} = {v}" for k, v in taken.config().items()) or "all defaults"))
    if target.partition_count != 1:
        raise click.UsageError(
            f"{topic} has {target.partition_count} partitions; the order of a kafkaesque topic needs one"
        )
    first = pages[0][1] if pages else 0
    begins_at = target.partition(0).log_end_offset
    if first != begins_at:
        say(f"its first record that is left has offset {first} there and gets offset {begins_at} here")
    return taken.rows(pages, batch_size)


@click.command()
@click.argument("topic", type=SELECTOR)
@click.argument("file", default="-")
@click.option("--format", "shape", type=_FORMATS, help="Of the file; else by its ending, else ndjson.")
@click.option("--from", "start", type=PLACE, default="earliest", show_default=True, metavar="PLACE",
              help="Where to begin.")  # fmt: skip
@click.option("--to", "stop", type=PLACE, metavar="PLACE", help="End before this place.")
@click.pass_context
def export(ctx: click.Context, topic: Selector, file: str, shape: str | None, start: Place, stop: Place | None) -> int:
    """Write the records of TOPIC (or TOPIC/PARTITION) to FILE (or stdout), partition by partition."""
    from segmentlog import transfer

    form = _format_of(file, shape)
    if form == "parquet" and file == "-":
        raise click.UsageError("Parquet is written to a file, not to a pipe")
    count = 0
    with ExitStack() as stack, stoppable() as stopped:
        store = stack.enter_context(open_store(ctx, read_only=True))
        partitions = selected_partitions(store, topic)
        ends = [one.log_end_offset if stop is None else resolve(stop, one) for one in partitions]
        ranges = [(one, resolve(start, one), end) for one, end in zip(partitions, ends, strict=True)]
        for partition, begin, _ in ranges:
            partition.read(begin)  # raises where there is no such place: before what FILE holds is gone
        writer: Any
        if form == "parquet":
            writer = transfer.ParquetWriter(file)
        else:
            out: IO[bytes] = sys.stdout.buffer if file == "-" else stack.enter_context(open(file, "wb"))
            writer = transfer.CsvWriter(out) if form == "csv" else transfer.NdjsonWriter(out)
        started = time.perf_counter()
        try:
            with Progress("records", None, wanted=file != "-") as progress:
                for partition, begin, end in ranges:
                    for batch in partition.read(begin):
                        part = batch.slice(0, int((batch.offsets < end).sum())) if batch.next_offset > end else batch
                        if len(part):
                            writer.write(part)
                            count += len(part)
                            progress.advance(len(part))
                        if stopped or batch.next_offset >= end:
                            break
        finally:
            writer.close()  # also after an error: a CSV writer that is thrown away takes stdout with it
        seconds = max(time.perf_counter() - started, 1e-9)
        rate = f"{count / seconds:,.0f} records/s"
        say(f"{count:,} records exported in {seconds:.2f} s ({rate}){stopped_by(stopped)}")
    return status_of(stopped)
