"""``segmentlog produce``: append the lines of a file or of stdin to a topic."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import click

from segmentlog.cli.common import (
    Progress,
    check_stdin,
    collect_signals,
    describe_stop,
    find_exit_status,
    open_store,
    say,
)
from segmentlog.cli.input_records import OversizedRecord, RecordInput
from segmentlog.cli.option_types import FiniteRange, complete_topic, json_option, require_topic
from segmentlog.errors import SegmentlogError
from segmentlog.exchange.record_sender import BadRecord, OutgoingRecords, Parse, RecordSender, ResumingSender
from segmentlog.quantities import EARLIEST_MS, LATEST_MS, TIMESTAMPS_ACCEPTED

if TYPE_CHECKING:
    from segmentlog.producing.producer import Producer
    from segmentlog.store import LogStore


@click.command()
@click.argument("topic", shell_complete=complete_topic)
@click.argument("file", type=click.Path(allow_dash=True), default="-")
@click.option("--batch-size", type=click.IntRange(1), default=4096, show_default=True, metavar="RECORDS",
              help="Append at most this many records at a time.")  # fmt: skip
@click.option("--linger", type=FiniteRange(0, 60_000), default=5.0, show_default=True, metavar="MS",
              help="Append fewer records if no more arrive within MS milliseconds.")  # fmt: skip
@click.option(
    "-k", "--key-separator", metavar="TEXT", help="Split each line into KEY TEXT VALUE; a line without TEXT has no key."
)
@click.option("--partition", type=click.IntRange(0), metavar="N", help="Append to this partition.")
@click.option("--format", "shape", type=click.Choice(["lines", "json", "nul", "length-prefixed"]), default="lines",
              show_default=True, help="How the input is split into records.")  # fmt: skip
@click.option(
    "--avro", is_flag=True, help="Values are JSON; convert them to Avro with the newest schema of TOPIC-value."
)
@click.option("--avro-schema", "schema_file", type=click.Path(exists=True, dir_okay=False), metavar="FILE",
              help="Like --avro with the schema in FILE, which is registered if it is new.")  # fmt: skip
@click.option(
    "--ack", type=click.Choice(["written", "durable"]), help="durable: wait for the fsync, whatever the policy is."
)
@click.option("--producer", "name", metavar="NAME",
              help="Continue after what earlier runs with this name appended: each record once, despite"
                   " crashes.")  # fmt: skip
@click.option("-H", "--header", "headers", multiple=True, metavar="NAME=VALUE", help="Add this header to every record.")
@click.option("--skip", type=click.IntRange(0), default=0, metavar="N", help="Skip the first N records.")
@click.option("--print-offsets", is_flag=True, help='Print "partition offset count" for each append.')
@json_option
@click.pass_context
def produce(
    ctx: click.Context,
    topic: str,
    file: str,
    batch_size: int,
    linger: float,
    key_separator: str | None,
    partition: int | None,
    shape: str,
    avro: bool,
    schema_file: str | None,
    ack: Any,
    name: str | None,
    headers: tuple[str, ...],
    skip: int,
    print_offsets: bool,
    as_json: bool,
) -> int:
    """Append the lines of FILE (or of stdin) to TOPIC.

    Formats: "lines" takes the bytes before each \\n (including a \\r; the last line may lack its \\n). "nul" uses \\0
    instead. "json" takes one object per line with "value" (or "value_base64"), and optionally "key", "timestamp",
    "partition" and "headers". "length-prefixed" takes a big-endian u32 and then that many bytes. A record longer than
    max.message.bytes is rejected before it is read completely.

    With --producer NAME, a killed run can be repeated with the same input: it skips what was appended already. If the
    file has grown, its new lines are appended. A second run that starts while the first is running takes over. Use a
    different name for each input.
    """
    _check_options(key_separator, shape, name, skip)
    pairs = tuple(_parse_header_option(header) for header in headers)
    fd, size_bytes = _open_input(file)
    with _close_after(fd), open_store(ctx) as store, collect_signals() as stopped:
        several = require_topic(store, topic, to_write=True).partition_count > 1 and partition is None

        def limit_now() -> int:
            return store.topic(topic).config.max_message_bytes

        spare_bytes = len(os.fsencode(key_separator or ""))
        name_of_input = "stdin" if file == "-" else file
        source = RecordInput(fd, shape, batch_size, linger / 1000, stopped, limit_now, spare_bytes, name_of_input)
        with store.producer(ack=ack, name=name) as producer, Progress("bytes", size_bytes or None) as progress:
            limit = limit_now() if several else None
            on_append = _offset_printer(as_json) if print_offsets or as_json else None
            sender = _create_sender(store, producer, topic, partition, pairs, on_append, limit, skip)
            parse = _choose_parser(shape, key_separator)
            if avro or schema_file is not None:
                from segmentlog.cli.schema_values import encode_after, read_schema

                parse = encode_after(parse, store, topic, None if schema_file is None else read_schema(schema_file))
            try:
                for raw, count_bytes in source.read_lists(skip):
                    sender.first = sender.number
                    for lists in parse(raw):
                        sender.send(lists)
                    sender.bytes += count_bytes
                    progress.advance(count_bytes)
                if not source.unread:
                    sender.finish()
            except (SegmentlogError, ValueError, click.ClickException, OSError) as error:  # OSError: also of the input
                say(sender.summary() if sender.has_appended else "no record was appended")
                if advice := sender.how_to_resume(error):
                    say(advice)
                if isinstance(error, SegmentlogError | click.ClickException | OSError):
                    raise
                raise _explain_failure(error, sender, shape, key_separator) from None
        say(sender.summary() + describe_stop(stopped))
    return find_exit_status(stopped) if source.unread else 0


def _check_options(key_separator: str | None, shape: str, name: str | None, skip: int) -> None:
    """Raise UsageError for options that exclude each other."""
    if key_separator == "":
        raise click.UsageError("--key-separator: it must not be empty")
    if key_separator is not None and shape == "json":
        raise click.UsageError("--key-separator is for lines; a JSON record has its key in 'key'")
    if name is not None and skip:
        raise click.UsageError("--skip and --producer exclude each other: a named producer resumes by itself")


def _open_input(file: str) -> tuple[int, int]:
    """Return (descriptor, size) of the input; the size of stdin is 0."""
    if file == "-":
        check_stdin()
        return 0, 0
    if os.path.isdir(file):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), file)
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    return fd, os.fstat(fd).st_size


def _explain_failure(
    error: Exception, sender: RecordSender, shape: str, key_separator: str | None
) -> click.ClickException:
    """Return an error whose message names the record that cannot be sent, the reason and the remedy."""
    if isinstance(error, OversizedRecord):
        return click.ClickException(sender.describe_failure(error, error.empty_lines))
    if not isinstance(error, BadRecord):
        return click.ClickException(str(error))
    wants_separator = error.has_no_key and shape != "json" and key_separator is None
    remedy = "; take keys from the lines with -k SEPARATOR" if wants_separator else ""
    return click.ClickException(f"record {sender.first + error.index + 1}: {error}{remedy}")


@contextlib.contextmanager
def _close_after(fd: int) -> Iterator[None]:
    try:
        yield
    finally:
        if fd:  # stdin does not belong to this command
            os.close(fd)


def _create_sender(store: LogStore, producer: Producer, topic: str, *arguments: Any) -> RecordSender:
    """Return a sender. For a producer with a name, it skips the records that an earlier run appended."""
    if producer.name is None:
        return RecordSender(producer, topic, *arguments)
    from segmentlog.exchange.resumed_input import ResumedInput

    return ResumingSender(ResumedInput(store.topic(topic), producer, store.transactions), producer, topic, *arguments)


def _offset_printer(as_json: bool) -> Callable[[int, int, int], None]:
    """Return the callback that prints the partition and offsets of appended records."""

    def print_offsets(partition: int, base_offset: int, count: int) -> None:
        if as_json:
            click.echo(f'{{"partition":{partition},"base_offset":{base_offset},"count":{count}}}')
        else:
            click.echo(f"{partition} {base_offset} {count}")

    return print_offsets


def _parse_header_option(header: str) -> tuple[str, bytes]:
    name, equals, value = header.partition("=")
    if not equals:
        raise click.UsageError(f"-H {header}: give it as NAME=VALUE")
    return name, os.fsencode(value)


# ---------------------------------------------------------------- from text to records


def _choose_parser(shape: str, separator: str | None) -> Parse:
    if shape == "json":
        return _parse_json
    if separator is None:
        return lambda raw: iter([OutgoingRecords(raw)])  # type: ignore[arg-type]
    mark = os.fsencode(separator)

    def parse(raw: list[bytes]) -> Iterator[OutgoingRecords]:
        split = [record.partition(mark) for record in raw]
        values: list[bytes | None] = [value if found else key for key, found, value in split]
        yield OutgoingRecords(values, [key if found else None for key, found, _ in split])

    return parse


def _parse_json(raw: list[bytes]) -> Iterator[OutgoingRecords]:
    """Yield lists of consecutive records of one partition, in order."""
    lists: OutgoingRecords | None = None
    for index, line in enumerate(raw):
        if not line.strip():
            continue
        document, value, key, headers = _parse_document(index, line)
        partition = document.get("partition")
        if lists is None or lists.partition != partition:
            if lists is not None:
                yield _drop_empty_columns(lists)
            lists = OutgoingRecords([], [])
            lists.headers, lists.timestamps, lists.partition = [], [], partition
        assert lists.keys is not None
        assert lists.headers is not None
        assert lists.timestamps is not None
        timestamp = document.get("timestamp")
        lists.values.append(value)
        lists.keys.append(key)
        lists.timestamps.append(time.time_ns() // 1_000_000 if timestamp is None else timestamp)
        lists.headers.append(headers)
    if lists is not None:
        yield _drop_empty_columns(lists)


def _parse_document(index: int, line: bytes) -> tuple[dict[str, Any], bytes | None, bytes | None, list[Any]]:
    """Parse a line into (object, value, key, headers). Raises `BadRecord`."""
    import msgspec

    try:
        document = msgspec.json.decode(line)
        if not isinstance(document, dict) or not document.keys() & {"value", "value_base64"}:
            raise ValueError(f"a JSON record needs 'value' or 'value_base64': {line[:60]!r}")
        headers = document.get("headers") or []
        if not isinstance(headers, list):
            raise ValueError(f'headers must be a list of {{"name": ..., "value": ...}}: {line[:60]!r}')
        pairs = [_parse_header(header, line) for header in headers]
        partition, timestamp = document.get("partition"), document.get("timestamp")
        if partition is not None and (type(partition) is not int or partition < 0):
            raise ValueError(f"partition {partition!r} is not a partition number, which is a whole number from 0 on")
        if timestamp is not None and (type(timestamp) is not int or not EARLIEST_MS <= timestamp <= LATEST_MS):
            raise ValueError(f"timestamp {timestamp!r} is not {TIMESTAMPS_ACCEPTED}")
        return document, decode_field(document, "value"), decode_field(document, "key"), pairs
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRecord(index, f"not a JSON object: {line[:60]!r}: {error}") from None
    except ValueError as error:
        raise BadRecord(index, str(error)) from None


def _parse_header(document: Any, line: bytes) -> tuple[str, bytes | None]:
    if not isinstance(document, dict) or not isinstance(document.get("name"), str):
        raise ValueError(f'a header must be {{"name": ..., "value": ...}}: {line[:60]!r}')
    return document["name"], decode_field(document, "value")


def _drop_empty_columns(lists: OutgoingRecords) -> OutgoingRecords:
    """Remove the columns that no record has."""
    if not any(lists.headers or []):
        lists.headers = None
    if all(key is None for key in lists.keys or []):
        lists.keys = None
    return lists


def decode_field(document: dict[str, Any], field: str) -> bytes | None:
    """Return a field of a JSON record as bytes: text, base64 of ``field_base64``, or the JSON text of other values."""
    encoded = document.get(f"{field}_base64")
    if encoded is not None:
        from base64 import b64decode

        try:
            return b64decode(encoded, validate=True)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{field}_base64 is not base64: {error}") from None
    value = document.get(field)
    if value is None or isinstance(value, str):
        return None if value is None else value.encode()
    import msgspec

    return msgspec.json.encode(value)
