"""Records from and to other formats: NDJSON, CSV, Parquet, and topics of kafkaesque in Redis.

Readers yield `Rows`, lists of one length; whoever calls them sends those to a topic.
"""

from __future__ import annotations

import csv
import importlib
import io
import time
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING, Any

import msgspec

from segmentlog.errors import SegmentlogError

if TYPE_CHECKING:
    from segmentlog.format.record_batch import RecordBatch
    from segmentlog.records import Record


class TransferError(SegmentlogError):
    """Input that cannot be understood, or a package that is missing; says which line, or how to get it."""


class Rows(msgspec.Struct):
    """Records as lists of one length; None for a column that is not there."""

    values: list[bytes | None]
    keys: list[bytes | None] | None = None
    timestamps: list[int] | None = None
    headers: list[list[tuple[str, bytes | None]]] | None = None

    def __len__(self) -> int:
        return len(self.values)


class Fields(msgspec.Struct, frozen=True):
    """Which fields of a row become a record's key, value and timestamp; None: as `export` names them."""

    key: str | None = None
    value: str | None = None
    timestamp: str | None = None
    whole: bool = False
    """The whole row as JSON is the value."""


# ---------------------------------------------------------------- rows to records


def records_of(documents: Iterator[dict[str, Any]], fields: Fields, size: int) -> Iterator[Rows]:
    """Rows of ``size`` records from JSON-like documents."""
    rows = Rows([], [], [], [])
    for number, document in enumerate(documents, 1):
        _add(rows, document, fields, number)
        if len(rows) == size:
            yield _trimmed(rows)
            rows = Rows([], [], [], [])
    if len(rows):
        yield _trimmed(rows)


def _add(rows: Rows, document: dict[str, Any], fields: Fields, number: int) -> None:
    assert rows.keys is not None
    assert rows.timestamps is not None
    assert rows.headers is not None
    value = msgspec.json.encode(document) if fields.whole else _bytes(document, fields.value or "value", number)
    rows.values.append(value)
    rows.keys.append(_bytes(document, fields.key or "key", number, optional=fields.key is None))
    rows.timestamps.append(_milliseconds(document, fields.timestamp, number))
    rows.headers.append([] if fields.whole else _headers(document.get("headers") or [], number))


def _headers(pairs: Any, number: int) -> list[tuple[str, bytes | None]]:
    """A list of objects with "name" (Spark's and Arrow's schema calls it "key") and "value" or "value_base64"."""
    shape = '{"name": text, "value": text}'
    if not isinstance(pairs, list):
        raise TransferError(f"record {number}: headers are a list of {shape}, not {pairs!r}")
    headers = []
    for pair in pairs:
        name = pair.get("name", pair.get("key")) if isinstance(pair, dict) else None
        if not isinstance(name, str):
            raise TransferError(f"record {number}: a header is {shape}, not {pair!r}")
        headers.append((name, _bytes(pair, "value", number, optional=True)))
    return headers


def _trimmed(rows: Rows) -> Rows:
    """Without the columns that no record has."""
    if not any(key is not None for key in rows.keys or []):
        rows.keys = None
    if not any(rows.headers or []):
        rows.headers = None
    stamps = rows.timestamps or []
    if all(timestamp < 0 for timestamp in stamps):
        rows.timestamps = None
    elif any(timestamp < 0 for timestamp in stamps):
        now_ms = time.time_ns() // 1_000_000
        rows.timestamps = [now_ms if timestamp < 0 else timestamp for timestamp in stamps]
    return rows


def _bytes(document: dict[str, Any], field: str, number: int, *, optional: bool = False) -> bytes | None:
    """A field as bytes: text as UTF-8, ``field_base64`` decoded, anything else as JSON."""
    if (encoded := document.get(f"{field}_base64")) is not None:
        from base64 import b64decode

        try:
            return b64decode(encoded, validate=True)
        except (ValueError, TypeError) as error:
            raise TransferError(f"record {number}: {field}_base64 is no base64: {error}") from None
    if field not in document:
        if optional:
            return None
        there = ", ".join(map(str, document)) or "none"
        raise TransferError(
            f"record {number}: there is no field {field!r} (there are: {there}); name another one, or --whole"
        )
    value = document[field]
    if value is None or isinstance(value, bytes):
        return value
    return value.encode() if isinstance(value, str) else msgspec.json.encode(value)


def _milliseconds(document: dict[str, Any], field: str | None, number: int) -> int:
    """A timestamp field: milliseconds, or ISO 8601 (UTC without a zone); -1 when there is none."""
    value = document.get(field or "timestamp")
    if value is None or value == "":
        if field is not None and field not in document:
            raise TransferError(f"record {number}: there is no field {field!r} to take the timestamp from")
        return -1
    from datetime import UTC, datetime

    try:
        if isinstance(value, str) and not value.lstrip("-").isdecimal():
            value = datetime.fromisoformat(value)
        if isinstance(value, datetime):
            value = (value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp() * 1000
        return round(float(value)) if not isinstance(value, int) else value
    except (ValueError, TypeError, OverflowError):
        raise TransferError(f"record {number}: {value!r} is no timestamp (milliseconds, or ISO 8601)") from None


# ---------------------------------------------------------------- reading files


def read_ndjson(source: IO[bytes]) -> Iterator[dict[str, Any]]:
    """One JSON object a line; empty lines are passed over."""
    for number, line in enumerate(source, 1):
        if not line.strip():
            continue
        try:
            document = msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise TransferError(f"line {number} is no JSON: {error}") from None
        if not isinstance(document, dict):
            raise TransferError(f"line {number} is no JSON object: {line[:60]!r}")
        yield document


def read_csv(source: IO[bytes]) -> Iterator[dict[str, Any]]:
    """Rows of a CSV file whose first line names the columns."""
    text = io.TextIOWrapper(source, "utf-8-sig", newline="")
    try:
        for number, row in enumerate(csv.DictReader(text), 2):
            if None in row or None in row.values():
                raise TransferError(f"line {number} has another number of columns than the first line")
            yield dict(row)
    except UnicodeDecodeError as error:
        raise TransferError(f"the file is not UTF-8: {error}") from None
    except csv.Error as error:
        raise TransferError(f"the file is no CSV: {error}") from None


def read_parquet(path: str) -> Iterator[dict[str, Any]]:
    """Rows of a Parquet file. Needs pyarrow."""
    parquet = _package("pyarrow.parquet", "pyarrow", "parquet")
    try:
        file = parquet.ParquetFile(path)
    except (OSError, ValueError) as error:
        raise TransferError(f"{path} is no Parquet file that can be read: {error}") from None
    for batch in file.iter_batches(batch_size=8192):
        yield from batch.to_pylist()


def _package(module: str, name: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise TransferError(f"this needs the package {name}: pip install 'segmentlog[{extra}]'") from None


# ---------------------------------------------------------------- writing files


class NdjsonWriter:
    """One JSON object a record: binary that is no UTF-8 as base64 in ``key_base64``, ``value_base64``."""

    def __init__(self, out: IO[bytes]) -> None:
        self._out = out

    def write(self, batch: RecordBatch) -> None:
        lines = [msgspec.json.encode(record_document(record)) for record in batch]
        self._out.write(b"\n".join(lines) + b"\n")

    def close(self) -> None:
        self._out.flush()


class CsvWriter:
    """partition, offset, timestamp, key, value; for text only, headers are left out."""

    def __init__(self, out: IO[bytes]) -> None:
        self._text = io.TextIOWrapper(out, "utf-8", newline="", write_through=True)
        self._csv = csv.writer(self._text)
        self._csv.writerow(("partition", "offset", "timestamp", "key", "value"))

    def write(self, batch: RecordBatch) -> None:
        for record in batch:
            try:
                key, value = (None if data is None else data.decode() for data in (record.key, record.value))
            except UnicodeDecodeError:
                where = f"{record.topic}/{record.partition} offset {record.offset}"
                raise TransferError(f"{where} is binary, and CSV is text; export to ndjson or parquet") from None
            self._csv.writerow((record.partition, record.offset, record.timestamp, key, value))

    def close(self) -> None:
        self._text.flush()
        self._text.detach()


class ParquetWriter:
    """Columns partition, offset, timestamp (ms, UTC), key, value, headers. Needs pyarrow."""

    def __init__(self, path: str) -> None:
        self._arrow = _package("pyarrow", "pyarrow", "parquet")
        self._parquet = _package("pyarrow.parquet", "pyarrow", "parquet")
        self._path = path
        self._writer: Any = None

    def write(self, batch: RecordBatch) -> None:
        arrow = batch.to_arrow()
        partitions = self._arrow.array([batch.partition] * len(batch), self._arrow.int32())
        table = self._arrow.Table.from_batches([arrow]).add_column(0, "partition", partitions)
        self._write(table)

    def _write(self, table: Any) -> None:
        if self._writer is None:
            self._writer = self._parquet.ParquetWriter(self._path, table.schema)
        self._writer.write_table(table)

    def close(self) -> None:
        if self._writer is None:  # nothing was exported: a file with the columns and no rows
            pair = self._arrow.struct([("key", self._arrow.string()), ("value", self._arrow.binary())])
            schema = self._arrow.schema(
                [
                    ("partition", self._arrow.int32()),
                    ("offset", self._arrow.int64()),
                    ("timestamp", self._arrow.timestamp("ms", tz="UTC")),
                    ("key", self._arrow.binary()),
                    ("value", self._arrow.binary()),
                    ("headers", self._arrow.list_(pair)),
                ]
            )
            self._writer = self._parquet.ParquetWriter(self._path, schema)
        self._writer.close()


def record_document(record: Record) -> dict[str, Any]:
    """A record for JSON: bytes that are UTF-8 as text, others in a field ending in _base64."""
    document: dict[str, Any] = {
        "topic": record.topic,
        "partition": record.partition,
        "offset": record.offset,
        "timestamp": record.timestamp,
    }
    _put(document, "key", record.key)
    _put(document, "value", record.value)
    if record.headers:
        document["headers"] = [_put({"name": name}, "value", value) for name, value in record.headers]
    return document


def _put(document: dict[str, Any], field: str, data: bytes | None) -> dict[str, Any]:
    if data is None:
        document[field] = None
        return document
    try:
        document[field] = data.decode()
    except UnicodeDecodeError:
        from base64 import b64encode

        document[f"{field}_base64"] = b64encode(data).decode()
    return document


# ---------------------------------------------------------------- kafkaesque in Redis


class RedisTopic:
    """A topic of kafkaesque: a hash with its settings, a sorted set of pages, a list a page.

    ``{topic}`` holds size, max and ttl; ``{topic}/pages`` page numbers by their first offset;
    ``{topic}/pages/{n}`` the records. The set is never pruned, so pages that expired or were
    dropped are still in it, without their list.
    """

    def __init__(self, url: str, topic: str) -> None:
        redis = _package("redis", "redis", "redis")
        self._error = redis.RedisError
        self.topic = topic
        try:
            self._client = redis.Redis.from_url(url, socket_connect_timeout=5)
            settings = self._client.hgetall(topic)
        except (self._error, ValueError) as error:
            raise TransferError(f"{url}: {error}") from None
        if not settings:
            raise TransferError(f"{url}: there is no kafkaesque topic {topic!r} (no hash of that name)")
        self.settings: dict[str, str] = {key.decode(): value.decode() for key, value in settings.items()}

    def config(self) -> dict[str, object]:
        """The same settings as keys of the topic config."""
        named = {"size": "segment.records", "max": "retention.segments", "ttl": "retention.closed.ms"}
        config: dict[str, object] = {}
        for field, key in named.items():
            value = self.settings.get(field, "")
            if value.isdecimal() and int(value):
                config[key] = int(value) * (1000 if field == "ttl" else 1)
        return config

    def pages(self) -> list[tuple[int, int]]:
        """(page number, first offset) in order, of the pages that are still there."""
        try:
            found = self._client.zrange(f"{self.topic}/pages", 0, -1, withscores=True)
            pages = [(int(number), int(first)) for number, first in found]
            return [page for page in pages if self._client.exists(self._key(page[0]))]
        except (self._error, ValueError) as error:
            raise TransferError(f"kafkaesque topic {self.topic!r}: {error}") from None

    def rows(self, pages: list[tuple[int, int]], size: int) -> Iterator[Rows]:
        """The records of these pages, oldest first."""
        for number, _ in pages:
            start = 0
            while True:
                try:
                    values = self._client.lrange(self._key(number), start, start + size - 1)
                except self._error as error:
                    raise TransferError(f"kafkaesque topic {self.topic!r}, page {number}: {error}") from None
                if not values:
                    break
                yield Rows(list(values))
                start += len(values)

    def _key(self, number: int) -> str:
        return f"{self.topic}/pages/{number}"
