"""``segmentlog import`` and ``export``: records from and to NDJSON, CSV, Parquet and Redis."""

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

from segmentlog.cli.common import (
    Progress,
    SkippedRanges,
    check_stdin,
    collect_signals,
    describe_stop,
    find_exit_status,
    open_store,
    say,
)
from segmentlog.cli.option_types import (
    POSITION,
    SELECTOR,
    Selector,
    StartPosition,
    open_partitions,
    require_topic,
    resolve_position,
    skip_damaged_option,
)
from segmentlog.errors import SegmentlogError, UnknownTopic
from segmentlog.exchange.record_sender import BadRecord, OutgoingRecords, RecordSender

if TYPE_CHECKING:
    from segmentlog.errors import CorruptBatch
    from segmentlog.exchange.record_files import FieldNames, ParsedRecords
    from segmentlog.format.record_batch import RecordBatch
    from segmentlog.log.partition import Partition
    from segmentlog.store import LogStore, Topic

_FORMATS = click.Choice(["ndjson", "csv", "parquet"])
_ENDINGS = {".ndjson": "ndjson", ".jsonl": "ndjson", ".json": "ndjson", ".csv": "csv", ".parquet": "parquet"}
_GZIP = ".gz"
_CHECKED_RECORDS = 64
# Records read back at a time: few, because each may have several megabytes.
_UNKNOWN = frozenset((".bz2", ".xz", ".zst", ".lz4", ".lzma", ".br", ".snappy", ".zip", ".z", ".tgz", ".7z"))


class _FileKind(NamedTuple):
    """Format of a file, and whether it is compressed with gzip."""

    form: str
    is_gzip: bool

    @classmethod
    def choose(cls, file: str, shape: str | None) -> _FileKind:
        """Return the format ``shape``, or without it the format of the file's ending.

        Raises UsageError for a compression that is not supported.
        """
        stem, ending = os.path.splitext(file)
        is_gzip = ending.lower() == _GZIP
        if ending.lower() in _UNKNOWN:
            raise click.UsageError(f"{file}: {ending} is not supported; use {_GZIP} or a pipe")
        if is_gzip:
            ending = os.path.splitext(stem)[1]
        form = shape or _ENDINGS.get(ending.lower(), "ndjson")
        if is_gzip and form == "parquet":
            raise click.UsageError(f"{file}: Parquet compresses its own data; remove {_GZIP} from the name")
        return cls(form, is_gzip)


# ---------------------------------------------------------------- import


@click.command("import")
@click.argument("source")
@click.argument("topic")
@click.option("--format", "shape", type=_FORMATS, help="Format of the file; default: by its ending, else ndjson.")
@click.option("--key", metavar="FIELD", help="Field that becomes the key ('key').")
@click.option("--value", metavar="FIELD", help="Field that becomes the value ('value').")
@click.option("--whole", is_flag=True, help="Use the whole row, as JSON, as the value.")
@click.option("--timestamp", metavar="FIELD", help="Field with the timestamp: milliseconds or ISO 8601 ('timestamp').")
@click.option("--batch-size", type=click.IntRange(1), default=4096, show_default=True, metavar="RECORDS",
              help="Append at most this many records at a time, and at most 16 MiB.")  # fmt: skip
@click.option("--skip", type=click.IntRange(0), default=0, metavar="N", help="Skip the first N records.")
@click.option("--by-key", is_flag=True, help="Choose partitions by key; ignore the 'partition' field.")
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

    SOURCE is a file (- for stdin; decompressed if its name ends with .gz), or redis://HOST[:PORT]/DB or unix:///PATH
    with a kafkaesque topic of the same name. In the second case TOPIC is created with the settings of the kafkaesque
    topic if it does not exist.

    Files written by 'export' keep their keys, values, headers, timestamps and partitions; offsets are new. In CSV, an
    empty field is null (a tombstone, no key), and "" is an empty text. A timestamp of -1 means no timestamp. Rows
    without a timestamp field get the time of the import.
    """
    from segmentlog.exchange.record_files import FieldNames

    if whole and value:
        raise click.UsageError("--whole and --value exclude each other")
    from_redis = source.startswith(("redis://", "rediss://", "unix://"))
    with ExitStack() as stack, collect_signals() as stopped:
        kind = None if from_redis else _FileKind.choose(source, shape)
        store = stack.enter_context(open_store(ctx, create=from_redis))
        fields = FieldNames(key, value, timestamp, whole, by_key)
        rows = _open_source(stack, store, source, kind, topic, fields, batch_size, skip)
        is_spread = store.topic(topic).partition_count > 1
        started = time.perf_counter()
        nulls, failure = 0, None
        with store.producer() as producer, Progress("records", None) as progress:
            limit_bytes = store.topic(topic).config.max_message_bytes if is_spread else None
            sender = RecordSender(producer, topic, None, (), None, limit_bytes, skip)
            try:
                for part in rows:
                    sender.first = sender.number
                    _check_partitions(part, store.topic(topic), sender.number)
                    for lists in _split_by_partition(part):
                        sender.send(lists)
                    nulls += part.values.count(None)
                    progress.advance(len(part))
                    if stopped:
                        break
            except (SegmentlogError, click.ClickException, ValueError, OSError, EOFError, zlib.error) as error:
                failure = _explain_failure(error, source, sender)
        seconds = max(time.perf_counter() - started, 1e-9)
        summary = f"{sender.records:,} records imported in {seconds:.2f} s ({sender.records / seconds:,.0f} records/s)"
        say(summary + describe_stop(stopped))
        if kind is not None and kind.form == "csv" and nulls:
            say(f"{nulls:,} of their values are null: empty fields without quotes")
        if failure is not None:
            if advice := sender.how_to_resume(failure):
                say(advice)
            raise failure
        return find_exit_status(stopped)


def _open_source(
    stack: ExitStack,
    store: LogStore,
    source: str,
    kind: _FileKind | None,
    topic: str,
    fields: FieldNames,
    batch_size: int,
    skip: int,
) -> Iterator[ParsedRecords]:
    """Return the records of a file, or of Redis if ``kind`` is None.

    If the topic does not exist, an import from Redis creates it, and an import from a file raises `UnknownTopic`.
    """
    if kind is None:
        return _open_redis(store, source, topic, batch_size, skip)
    require_topic(store, topic, to_write=True)
    return _open_file(stack, source, kind, fields, batch_size, skip)


def _explain_failure(error: Exception, source: str, sender: RecordSender) -> Exception:
    """Return the exception to show for an error."""
    if isinstance(error, BadRecord):
        return click.ClickException(f"record {sender.first + error.index + 1}: {error}")
    if isinstance(error, UnicodeDecodeError):
        return click.ClickException(f"the input is not UTF-8: {error}")
    if isinstance(error, EOFError | zlib.error) or type(error).__name__ == "BadGzipFile":
        return click.ClickException(f"{source} is not a gzip file, or is incomplete: {error}")
    if isinstance(error, ValueError) and not isinstance(error, SegmentlogError):
        return click.ClickException(str(error))
    return error


def _check_partitions(part: ParsedRecords, topic: Topic, number: int) -> None:
    """Raise ClickException if a record names a partition that does not exist. Call this before sending any of them."""
    count = topic.partition_count
    for index, partition in enumerate(part.partitions or ()):
        if partition is not None and partition >= count:
            raise click.ClickException(
                f"record {number + index + 1} names partition {partition}, but {topic.name} has partitions 0 to"
                f" {count - 1}:"
                f" add partitions with 'segmentlog alter {topic.name} -p N', or choose partitions by key with"
                " --by-key"
            )


def _split_by_partition(part: ParsedRecords) -> Iterator[OutgoingRecords]:
    """Yield the records in order; consecutive records of one partition form one list."""
    lists = OutgoingRecords(part.values, part.keys)
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


def _open_file(
    stack: ExitStack, source: str, kind: _FileKind, fields: FieldNames, batch_size: int, skip: int
) -> Iterator[ParsedRecords]:
    from segmentlog.storage.atomic_write import is_leftover

    if is_leftover(source):
        raise click.UsageError(f"{source} is a temporary file of a killed export, and may be incomplete")
    return _read_file(stack, source, kind, fields, batch_size, skip)


def _read_file(
    stack: ExitStack, source: str, kind: _FileKind, fields: FieldNames, batch_size: int, skip: int = 0
) -> Iterator[ParsedRecords]:
    from segmentlog.exchange import record_files

    if kind.form == "parquet":
        if source == "-":
            raise click.UsageError("Parquet can be read from a file only, not from a pipe")
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


def _open_redis(store: LogStore, url: str, topic: str, batch_size: int, skip: int) -> Iterator[ParsedRecords]:
    from segmentlog.exchange.record_files import RedisTopic

    source = RedisTopic(url, topic)
    pages = source.pages()
    try:
        target = store.topic(topic)
    except UnknownTopic:
        target = store.create_topic(topic, 1, source.config())
        say(f"created {topic}: " + (", ".join(f"{k} = {v}" for k, v in source.config().items()) or "all defaults"))
    if target.partition_count != 1:
        raise click.UsageError(
            f"{topic} has {target.partition_count} partitions; a kafkaesque topic needs exactly one to keep its order"
        )
    first = pages[0][1] + skip if pages else skip
    begins_at = target.partition(0).log_end_offset
    if first != begins_at:
        say(f"the first imported record has offset {first} in Redis, and gets offset {begins_at} in {topic}")
    return source.rows(pages, batch_size, skip)


# ---------------------------------------------------------------- export


class _StoppedBySignal(Exception):
    """A signal arrived before everything was written."""


@click.command()
@click.argument("topic", type=SELECTOR)
@click.argument("file", default="-")
@click.option("--format", "shape", type=_FORMATS, help="Format of the file; default: by its ending, else ndjson.")
@click.option("--from", "start", type=POSITION, default="earliest", show_default=True, metavar="PLACE",
              help="Start at this place.")  # fmt: skip
@click.option("--to", "stop", type=POSITION, metavar="PLACE", help="Stop before this place.")
@click.option("--verify/--no-verify", default=True, show_default=True,
              help="Read FILE back as 'import' does and compare every record. Takes 2 to 4 times as long.")  # fmt: skip
@skip_damaged_option
@click.pass_context
def export(
    ctx: click.Context,
    topic: Selector,
    file: str,
    shape: str | None,
    start: StartPosition,
    stop: StartPosition | None,
    verify: bool,
    skip_damaged: bool,
) -> int:
    """Write the records of TOPIC (or TOPIC/PARTITION) to FILE (or stdout), partition by partition.

    FILE is replaced atomically, once all records are written, verified and on disk. Output to stdout or a pipe is not
    verified. A name that ends with .gz is compressed. NDJSON and Parquet can hold any record; CSV cannot hold keys and
    values that are not UTF-8. In CSV, null is an empty field, an empty text is "", and headers are JSON. A record
    without a timestamp has -1; in Parquet that is 1969-12-31 23:59:59.999 UTC.
    """
    kind = _FileKind.choose(file, shape)
    if kind.form == "parquet" and file == "-":
        raise click.UsageError("Parquet can be written to a file only, not to a pipe")
    count = 0
    with ExitStack() as stack, collect_signals() as stopped:
        store = stack.enter_context(open_store(ctx, read_only=True))
        partitions = open_partitions(store, topic)
        ends = [log.log_end_offset if stop is None else resolve_position(stop, log) for log in partitions]
        ranges = [(log, resolve_position(start, log), end) for log, end in zip(partitions, ends, strict=True)]
        for partition, begin, _ in ranges:
            partition.read(begin)  # raises if the place does not exist
        started = time.perf_counter()
        check = _ExportCheck(file, kind, stopped) if verify and file != "-" else None
        skipped = SkippedRanges()
        try:
            with (
                Progress("records", None, enabled=file != "-") as progress,
                contextlib.nullcontext(sys.stdout.buffer) if file == "-" else _open_output(file, kind, check) as out,
            ):
                writer = _create_writer(out, kind)
                for batch in _read_ranges(ranges, skipped if skip_damaged else None):
                    if check is not None:
                        check.written.add_batch(batch)
                    writer.write(batch)
                    count += len(batch)
                    progress.advance(len(batch))
                    if stopped:
                        break
                writer.close()
                if stopped and file != "-":
                    raise _StoppedBySignal
        except _StoppedBySignal:
            say(f"{count:,} records read{describe_stop(stopped)}; {file} is unchanged")
            return find_exit_status(stopped)
        seconds = max(time.perf_counter() - started, 1e-9)
        rate = f"{count / seconds:,.0f} records/s"
        say(f"{count:,} records exported in {seconds:.2f} s ({rate}){describe_stop(stopped)}")
        damage_status = skipped.report()
    return damage_status or find_exit_status(stopped)


class _ExportCheck:
    """Callback that reads an exported file as `import` does, and compares it with the exported records.

    Raises `TransferError` if they differ, and `_StoppedBySignal` after a signal.
    """

    def __init__(self, file: str, kind: _FileKind, stopped: list[int]) -> None:
        from segmentlog.exchange.export_check import Fingerprint

        self.written, self._found = Fingerprint(), Fingerprint()
        self._file, self._kind, self._stopped = file, kind, stopped

    def __call__(self, path: str) -> None:
        from segmentlog.exchange.record_files import FieldNames, TransferError

        remedy = f"{self._file} is unchanged; export in another format, or with --no-verify"
        with ExitStack() as stack:
            try:
                for rows in _read_file(stack, path, self._kind, FieldNames(), _CHECKED_RECORDS):
                    self._found.add_rows(rows)
                    if self._stopped:
                        raise _StoppedBySignal
            except (TransferError, UnicodeDecodeError, EOFError, zlib.error) as error:
                raise TransferError(f"the written records cannot be imported: {error}. {remedy}") from None
        if self._found != self.written:
            raise TransferError(
                f"the written records differ from the topic: {self.written.records:,} records were read from it, and"
                f" {self._found.records:,} would be imported. {remedy}"
            )


def _read_ranges(ranges: list[tuple[Partition, int, int]], skipped: SkippedRanges | None) -> Iterator[RecordBatch]:
    """Yield the records in the ranges. Damaged offsets are added to ``skipped``; if it is None, they raise."""

    def on_skip(base_offset: int, end_offset: int, damage: CorruptBatch) -> None:
        if skipped is not None and base_offset < end:
            skipped.add(f"{partition.topic}/{partition.number}", base_offset, end_offset, damage)

    for partition, begin, end in ranges:
        for batch in partition.read(begin, on_skip=None if skipped is None else on_skip):
            part = batch.slice(0, int((batch.offsets < end).sum())) if batch.next_offset > end else batch
            if len(part):
                yield part
            if batch.next_offset >= end:
                break


@contextlib.contextmanager
def _open_output(file: str, kind: _FileKind, check: _ExportCheck | None) -> Iterator[IO[bytes]]:
    """Open a temporary file, which replaces ``file`` once it is completely written and ``check`` has passed."""
    from segmentlog.storage.atomic_write import opened_atomically

    with opened_atomically(file, verify=check) as out:
        if not kind.is_gzip:
            yield out
            return
        import gzip

        # no name and time in the header, so that equal records give equal bytes
        with gzip.GzipFile("", "wb", 6, out, 0) as packed:
            yield packed  # type: ignore[misc]


def _create_writer(out: IO[bytes], kind: _FileKind) -> Any:
    from segmentlog.exchange import record_files

    if kind.form == "csv":
        from segmentlog.exchange.csv_file import CsvWriter

        return CsvWriter(out)
    if kind.form == "parquet":
        from segmentlog.exchange.parquet_file import ParquetWriter

        return ParquetWriter(out)
    return record_files.NdjsonWriter(out)
