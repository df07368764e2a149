"""Decode records of `consume --avro` to JSON, and encode those of `produce --avro`, by the store's schema registry."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import click
import msgspec

from segmentlog.cli.common import exit_at_once_on_signals
from segmentlog.errors import DeserializationError, SegmentlogError
from segmentlog.exchange.record_sender import BadRecord, OutgoingRecords, Parse

if TYPE_CHECKING:
    from segmentlog.cli.record_output import Pieces
    from segmentlog.format.record_batch import RecordBatch
    from segmentlog.store import LogStore


def decode_before(pieces: Pieces, store: LogStore, *, keys: bool, values: bool, as_json: bool) -> Pieces:
    """Return a function that decodes keys, values or both to JSON, and passes the records to ``pieces``.

    Raises `DeserializationError` for the first record without a schema.
    """
    with exit_at_once_on_signals():
        from segmentlog.schemas.any_values import AnyDeserializer

    deserializer = AnyDeserializer(store.schemas)

    def decode(batch: RecordBatch, column: str) -> list[bytes | None]:
        found: list[bytes | None] = []
        for index, blob in enumerate(batch.keys if column == "key" else batch.values):
            try:
                (value,) = deserializer.deserialize(batch.topic, [blob])
                found.append(None if blob is None else msgspec.json.encode(value))
            except (ValueError, TypeError, LookupError, RecursionError) as error:
                offset = int(batch.offsets[index])
                raise DeserializationError(batch.topic, batch.partition, offset, column, str(error), blob) from error
        return found

    def decoded(batch: RecordBatch) -> list[bytes]:
        made_keys = decode(batch, "key") if keys else None
        made_values = decode(batch, "value") if values else None
        texts = pieces(batch.with_objects(made_keys, made_values))
        if as_json:
            texts = [_unquote_json(text, keys=keys, values=values) for text in texts]
        return texts

    return decoded


def _unquote_json(text: bytes, *, keys: bool, values: bool) -> bytes:
    """Return the JSON of a record whose decoded fields are JSON and not text."""
    document: dict[str, msgspec.Raw] = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    for field, wanted in (("key", keys), ("value", values)):
        if wanted and (inner := msgspec.json.decode(document[field])) is not None:
            document[field] = msgspec.Raw(inner.encode())
    return msgspec.json.encode(document) + b"\n"


def encode_after(parse: Parse, store: LogStore, topic: str, schema: str | None) -> Parse:
    """Return a function that calls ``parse``, and encodes each JSON value as Avro.

    If ``schema`` is given, it is registered and used; otherwise the newest schema of the topic is used. Raises the
    errors of the registry.
    """
    with exit_at_once_on_signals():
        from segmentlog.schemas.avro_values import PlainWriter
        from segmentlog.schemas.parsed_schemas import Draft

    subject = f"{topic}-value"
    if schema is None:
        record = store.schemas.version(subject)
    else:
        record = store.schemas.register(subject, Draft(schema))
    if record.schema_type != "AVRO":
        raise click.ClickException(f"--avro: the schema of {subject} is {record.schema_type}")
    write: Callable[[Any], bytes] = PlainWriter(store.schemas.parsed(record), record.id).write

    def encoded(raw: list[bytes]) -> Iterator[OutgoingRecords]:
        before = 0
        for lists in parse(raw):
            for index, value in enumerate(lists.values):
                if value is not None:
                    try:
                        lists.values[index] = write(msgspec.json.decode(value))
                    except (ValueError, TypeError, RecursionError, SegmentlogError) as error:
                        raise BadRecord(
                            before + index, f"the value does not match schema {record.id}: {error}"
                        ) from None
            before += len(lists.values)
            yield lists

    return encoded


def read_schema(path: str) -> str:
    """Return the text of a schema file. Raises ClickException."""
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except UnicodeDecodeError:
        raise click.ClickException(f"{path}: a schema file must be UTF-8") from None


def type_of_file(path: str) -> str:
    """Return the type of the schema in a file, by the file's name. Raises UsageError."""
    for ending, kind in ((r"\.(avsc|avro)$", "AVRO"), (r"\.json$", "JSON"), (r"\.proto$", "PROTOBUF")):
        if re.search(ending, path):
            return kind
    raise click.UsageError(f"{path}: unknown ending; give --type AVRO, JSON or PROTOBUF")
