"""``segmentlog import`` and ``export``: records from and to other formats."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import time
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import groupby
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import click

from segmentlog.cli.common import Progress, Skipped, check_stdin, open_store, say, status_of, stoppable, stopped_by
from segmentlog.cli.option_types import (
    PLACE,
    SELECTOR,
    Place,
    Selector,
    existing_topic,
    resolve,
    selected_partitions,
    skip_damaged_option,
)
from segmentlog.errors import SegmentlogError, UnknownTopic
from segmentlog.exchange.record_sender import BadRecord, Lists, Sender

if TYPE_CHECKING:
    from segmentlog.errors import CorruptBatch
    from segmentlog.exchange.record_files import Fields, Rows
    from segmentlog.format.record_batch import RecordBatch
    from segmentlog.log.partition import Partition
    from segmentlog.store import LogStore, Topic

_FORMATS = click.Choice(["ndjson", "csv", "parquet"])
_ENDINGS = {".ndjson": "ndjson", ".jsonl": "ndjson", ".json": "ndjson", ".csv": "csv", ".parquet": "parquet"}
_GZIP = ".gz"
_CHECKED_RECORDS = 64
# Read back at a time: few, as each may have some megabytes.
_UNKNOWN = frozenset((".bz2", ".xz", ".zst", ".lz4", ".lzma", ".br", ".snappy", ".zip", ".z", ".tgz", ".7z"))


class _Kind(NamedTuple):
    """What a file is."""

    form: str
    is_gzip: bool

    @classmethod
    def of(cls, file: str, shape: str | None) -> _Kind:
        """As it was asked for, or as the file's ending says. Raises UsageError for what cannot be read or written."""
        stem, ending = os.path.splitext(file)
        is_gzip = ending.lower() == _GZIP
        if ending.lower() in _UNKNOWN:
            raise click.UsageError(f"{file}: {ending} is not read or written here; {_GZIP} is, or use a pipe")
        if is_gzip:
            ending = os.path.splitext(stem)[1]
        form = shape or _ENDINGS.get(ending.lower(), "ndjson")
        if is_gzip and form == "parquet":
            raise click.UsageError(f"{file}: Parquet is compressed by itself; leave {_GZIP} out")
        return cls(form, is_gzip)


# ---------------------------------------------------------------- import


@click.command("import")
@click.argument("source")
@click.argument("topic")
@click.option("--format", "shape", type=_FORMATS, help="Of the file; else by its ending, else ndjson.")
@click.option("--key", metavar="FIELD", help="Field that becomes the key ('key').")
@click.option("--value", metavar="FIELD", help="Field that becomes the value ('value').")
@click.option("--whole", is_flag=True, help="The whole row, as JSON, becomes the value.")
@click.option("--timestamp", metavar="FIELD", help="Field with the timestamp: milliseconds or ISO 8601 ('timestamp').")
@click.option("--batch-size", type=click.IntRange(1), default=4096, show_default=True, metavar="RECORDS",
              help="Append so many records at a time; fewer where they take 16 MiB.")  # fmt: skip
@click.option("--skip", type=click.IntRange(0), default=0, metavar="N", help="Leave out the first N records.")
@click.option("--by-key", is_flag=True, help="Send records where their keys say, not to the 'partition' they name.")
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
    skip: int,
    by_key: bool,
) -> int:
    """Append the records of SOURCE to TOPIC.

    SOURCE is a file (- for stdin; read as gzip if its name ends with .gz), or redis://HOST[:PORT]/DB or
    unix:///PATH with a topic of kafkaesque of the same name, whose settings TOPIC gets if it is not
    there yet.

    Of what 'export' wrote, keys, values, headers, timestamps and partitions come back as they were;
    offsets are new. In CSV an empty field is null (a tombstone, no key), and "" an empty text. A timestamp
    of -1 is a record without one and stays so; a row without the field gets the time of the import.
    """
    from segmentlog.exchange.record_files import Fields

    if whole and value:
        raise click.UsageError("--whole takes the whole row for the value, --value one field: give one of them")
    from_redis = source.startswith(("redis://", "rediss://", "unix://"))
    with ExitStack() as stack, stoppable() as stopped:
        kind = None if from_redis else _Kind.of(source, shape)
        store = stack.enter_context(open_store(ctx, create=from_redis))
        fields = Fields(key, value, timestamp, whole, by_key)
        rows = _rows_of(stack, store, source, kind, topic, fields, batch_size, skip)
        is_spread = store.topic(topic).partition_count > 1
        started = time.perf_counter()
        nulls, failure = 0, None
        with store.producer() as producer, Progress("records", None) as progress:
            limit_bytes = store.topic(topic).config.max_message_bytes if is_spread else None
            sender = Sender(producer, topic, None, (), None, limit_bytes, skip)
            try:
                for part in rows:
                    sender.first = sender.number
                    _check_partitions(part, store.topic(topic), sender.number)
                    for lists in _lists_of(part):
                        sender.send(lists)
                    nulls += part.values.count(None)
                    progress.advance(len(part))
                    if stopped:
                        break
            except (SegmentlogError, click.ClickException, ValueError, OSError, EOFError, zlib.error) as error:
                failure = _failure(error, source, sender)
        seconds = max(time.perf_counter() - started, 1e-9)
        told = f"{sender.records:,} records imported in {seconds:.2f} s ({sender.records / seconds:,.0f} records/s)"
        say(told + stopped_by(stopped))
        if kind is not None and kind.form == "csv" and nulls:
            say(f"{nulls:,} of their values are null: fields that are empty and not in quotes")
        if failure is not None:
            if go_on := sender.how_to_go_on(failure):
                say(go_on)
            raise failure
        return status_of(stopped)


def _rows_of(
    stack: ExitStack, store: LogStore, source: str, kind: _Kind | None, topic: str, fields: Fields, batch_size: int,
    skip: int,
) -> Iterator[Rows]:  # fmt: skip
    """The records of a file, or without a kind of Redis, where the topic is made if it is not there."""
    if kind is None:
        return _from_redis(store, source, topic, batch_size, skip)
    existing_topic(store, topic, to_write=True)
    return _from_file(stack, source, kind, fields, batch_size, skip)


def _failure(error: Exception, source: str, sender: Sender) -> Exception:
    """What to tell of an error."""
    if isinstance(error, BadRecord):
        return click.ClickException(f"record {sender.first + error.index + 1}: {error}")
    if isinstance(error, UnicodeDecodeError):
        return click.ClickException(f"the input is not UTF-8: {error}")
    if isinstance(error, EOFError | zlib.error) or type(error).__name__ == "BadGzipFile":
        return click.ClickException(f"{source} is no gzip file, or not all of one: {error}")
    if isinstance(error, ValueError) and not isinstance(error, SegmentlogError):
        return click.ClickException(str(error))
    return error


def _check_partitions(part: Rows, topic: Topic, number: int) -> None:
    """Raises ClickException if records are to go to partitions that there are not: before any of them is sent."""
    count = topic.partition_count
    for index, partition in enumerate(part.partitions or ()):
        if partition is not None and partition >= count:
            raise click.ClickException(
                f"record {number + index + 1} is of partition {partition}, and {topic.name} has only 0 to {count - 1}:"
                f" add partitions with 'segmentlog alter {topic.name} -p N', or send records where their keys say with"
                " --by-key"
            )


def _lists_of(part: Rows) -> Iterator[Lists]:
    """The records in their order, those of one partition that follow each other together."""
    lists = Lists(part.values, part.keys)
    lists.headers, lists.timestamps = part.headers, part.timestamps
    if part.partitions is None:
        yield lists
        return
    at = 0
    for partition, some in groupby(part.partitions):
        begin, at = at, at + len(list(some))
        run = lists.part(begin, at)
        run.partition = partition
        yield run


def _from_file(
    stack: ExitStack, source: str, kind: _Kind, fields: Fields, batch_size: int, skip: int
) -> Iterator[Rows]:
    from segmentlog.storage.atomic_write import is_leftover

    if is_leftover(source):
        raise click.UsageError(f"{source} is part of an export that was killed, and not all of it")
    return _read_file(stack, source, kind, fields, batch_size, skip)


def _read_file(
    stack: ExitStack, source: str, kind: _Kind, fields: Fields, batch_size: int, skip: int = 0
) -> Iterator[Rows]:
    from segmentlog.exchange import record_files

    if kind.form == "parquet":
        if source == "-":
            raise click.UsageError("Parquet is read from a file, not from a pipe")
        from segmentlog.exchange.parquet_file import read_parquet

        return record_files.records_of(read_parquet(source, fields, skip), fields, batch_size, skip + 1)
    file: IO[bytes] = sys.stdin.buffer
    if source == "-":
        check_stdin()
    else:
        file = stack.enter_context(open(source, "rb"))  # noqa: SIM115
    if kind.is_gzip:
        import gzip

        file = io.BufferedReader(gzip.GzipFile(fileobj=file))
    if kind.form == "csv":
        from segmentlog.exchange.csv_file import read_csv

        documents = read_csv(file, skip, with_nulls=not fields.whole)
    else:
        documents = record_files.read_ndjson(file, skip)
    return record_files.records_of(documents, fields, batch_size, skip + 1)


def _from_redis(store: LogStore, url: str, topic: str, batch_size: int, skip: int) -> Iterator[Rows]:
    from segmentlog.exchange.record_files import RedisTopic

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
    first = pages[0][1] + skip if pages else skip
    begins_at = target.partition(0).log_end_offset
    if first != begins_at:
        say(f"its first record that is left has offset {first} there and gets offset {begins_at} here")
    return taken.rows(pages, batch_size, skip)


# ---------------------------------------------------------------- export


class _Stopped(Exception):
    """A signal came before everything was written."""


@click.command()
@click.argument("topic", type=SELECTOR)
@click.argument("file", default="-")
@click.option("--format", "shape", type=_FORMATS, help="Of the file; else by its ending, else ndjson.")
@click.option("--from", "start", type=PLACE, default="earliest", show_default=True, metavar="PLACE",
              help="Where to begin.")  # fmt: skip
@click.option("--to", "stop", type=PLACE, metavar="PLACE", help="End before this place.")
@click.option("--verify/--no-verify", default=True, show_default=True,
              help="Read FILE back as 'import' does, compare every record; 2 to 4 times as long.")  # fmt: skip
@skip_damaged_option
@click.pass_context
def export(
    ctx: click.Context,
    topic: Selector,
    file: str,
    shape: str | None,
    start: Place,
    stop: Place | None,
    verify: bool,
    skip_damaged: bool,
) -> int:
    """Write the records of TOPIC (or TOPIC/PARTITION) to FILE (or stdout), partition by partition.

    FILE gets its name once everything is in it, was read back by the code of 'import', and is on disk: it is
    whole, or as it was. What is written to stdout or a pipe is not read back. A name that ends with .gz
    is written as gzip. NDJSON and Parquet hold any record; CSV is refused for keys and values that are
    no UTF-8. In CSV null is an empty field, an empty text is "", and headers are JSON. A record without a
    timestamp has -1; in Parquet that is 1969-12-31 23:59:59.999 UTC.
    """
    kind = _Kind.of(file, shape)
    if kind.form == "parquet" and file == "-":
        raise click.UsageError("Parquet is written to a file, not to a pipe")
    count = 0
    with ExitStack() as stack, stoppable() as stopped:
        store = stack.enter_context(open_store(ctx, read_only=True))
        partitions = selected_partitions(store, topic)
        ends = [one.log_end_offset if stop is None else resolve(stop, one) for one in partitions]
        ranges = [(one, resolve(start, one), end) for one, end in zip(partitions, ends, strict=True)]
        for partition, begin, _ in ranges:
            partition.read(begin)  # raises where there is no such place
        started = time.perf_counter()
        check = _Check(file, kind, stopped) if verify and file != "-" else None
        skipped = Skipped()
        try:
            with (
                Progress("records", None, wanted=file != "-") as progress,
                contextlib.nullcontext(sys.stdout.buffer) if file == "-" else _whole(file, kind, check) as out,
            ):
                writer = _writer(out, kind)
                for batch in _batches(ranges, skipped if skip_damaged else None):
                    if check is not None:
                        check.written.add_batch(batch)
                    writer.write(batch)
                    count += len(batch)
                    progress.advance(len(batch))
                    if stopped:
                        break
                writer.close()
                if stopped and file != "-":
                    raise _Stopped
        except _Stopped:
            say(f"{count:,} records were read{stopped_by(stopped)}: {file} is as it was")
            return status_of(stopped)
        seconds = max(time.perf_counter() - started, 1e-9)
        rate = f"{count / seconds:,.0f} records/s"
        say(f"{count:,} records exported in {seconds:.2f} s ({rate}){stopped_by(stopped)}")
        damage_status = skipped.report()
    return damage_status or status_of(stopped)


class _Check:
    """Reads a written file back as `import` does; called with its path. Raises `TransferError`, `_Stopped`."""

    def __init__(self, file: str, kind: _Kind, stopped: list[int]) -> None:
        from segmentlog.exchange.export_check import Fingerprint

        self.written, self._found = Fingerprint(), Fingerprint()
        self._file, self._kind, self._stopped = file, kind, stopped

    def __call__(self, path: str) -> None:
        from segmentlog.exchange.record_files import Fields, TransferError

        as_it_was = f"{self._file} is as it was; export in another format, or with --no-verify"
        with ExitStack() as stack:
            try:
                for rows in _read_file(stack, path, self._kind, Fields(), _CHECKED_RECORDS):
                    self._found.add_rows(rows)
                    if self._stopped:
                        raise _Stopped
            except (TransferError, UnicodeDecodeError, EOFError, zlib.error) as error:
                raise TransferError(f"what was written cannot be imported: {error}. {as_it_was}") from None
        if self._found != self.written:
            raise TransferError(
                f"what was written is not what was read: {self.written.records:,} records were read, and"
                f" {self._found.records:,} would be imported, or others. {as_it_was}"
            )


def _batches(ranges: list[tuple[Partition, int, int]], skipped: Skipped | None) -> Iterator[RecordBatch]:
    """Yield the records in the ranges of offsets. ``skipped`` notes damage; None: damage raises."""

    def note(base_offset: int, end_offset: int, damage: CorruptBatch) -> None:
        if skipped is not None and base_offset < end:
            skipped.note(f"{partition.topic}/{partition.number}", base_offset, end_offset, damage)

    for partition, begin, end in ranges:
        for batch in partition.read(begin, on_skip=None if skipped is None else note):
            part = batch.slice(0, int((batch.offsets < end).sum())) if batch.next_offset > end else batch
            if len(part):
                yield part
            if batch.next_offset >= end:
                break


@contextlib.contextmanager
def _whole(file: str, kind: _Kind, check: _Check | None) -> Iterator[IO[bytes]]:
    """A file that appears when all is written, and was checked."""
    from segmentlog.storage.atomic_write import opened_atomically

    with opened_atomically(file, verify=check) as out:
        if not kind.is_gzip:
            yield out
            return
        import gzip

        with gzip.GzipFile("", "wb", 6, out, 0) as packed:  # no name and time in it: the same records, the same bytes
            yield packed  # type: ignore[misc]


def _writer(out: IO[bytes], kind: _Kind) -> Any:
    from segmentlog.exchange import record_files

    if kind.form == "csv":
        from segmentlog.exchange.csv_file import CsvWriter

        return CsvWriter(out)
    if kind.form == "parquet":
        from segmentlog.exchange.parquet_file import ParquetWriter

        return ParquetWriter(out)
    return record_files.NdjsonWriter(out)
