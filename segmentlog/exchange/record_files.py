"""Read and write records in other formats: NDJSON, and kafkaesque topics in Redis.

CSV and Parquet have modules of their own. Readers yield `ParsedRecords`, columns of equal length, which callers send to
a topic.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from typing import IO, TYPE_CHECKING, Any, Final

import msgspec

from segmentlog.errors import SegmentlogError
from segmentlog.quantities import EARLIEST_MS, LATEST_MS, TIMESTAMPS_ACCEPTED

if TYPE_CHECKING:
    from segmentlog.format.record_batch import RecordBatch
    from segmentlog.records import Record


ROWS_MAX_BYTES: Final = 16 << 20
"""A list of records is complete once its keys, values and headers have this many bytes, however few records it has.

4,096 records of 10 MiB would take 40 GiB. 16 MiB hold 4,096 records of 4 KiB.
"""
_FIRST_PAGE_RECORDS: Final = 16
"""Number of values in the first request to Redis. It is small, because the sizes of the values are not known yet."""


class TransferError(SegmentlogError):
    """The input cannot be parsed, or a package is missing.

    The message contains the line of the input, or the command that installs the package.
    """


class ParsedRecords(msgspec.Struct):
    """Records as columns of equal length. Missing columns are None."""

    values: list[bytes | None]
    keys: list[bytes | None] | None = None
    timestamps: list[int] | None = None
    headers: list[list[tuple[str, bytes | None]]] | None = None
    partitions: list[int | None] | None = None
    """The partition of each record in the source, to which it is imported again; None: the key selects a partition."""

    def __len__(self) -> int:
        return len(self.values)


class FieldNames(msgspec.Struct, frozen=True):
    """The names of the fields of a row that become a record's key, value and timestamp.

    None stands for the name that `export` gives the field: key, value or timestamp.
    """

    key: str | None = None
    value: str | None = None
    timestamp: str | None = None
    whole: bool = False
    """Use the whole row, as JSON, as the value."""
    by_key: bool = False
    """Choose partitions by key, and ignore the partition that a record names."""


# ---------------------------------------------------------------- rows to records


def records_of(
    documents: Iterator[dict[str, Any]], fields: FieldNames, size: int, first: int = 1, max_bytes: int = ROWS_MAX_BYTES
) -> Iterator[ParsedRecords]:
    """Yield lists of ``size`` records from documents like those of JSON. A list ends earlier once it has ``max_bytes``.

    ``first`` is the number of the first document, for messages.
    """
    rows = ParsedRecords([], [], [], [], [])
    stamps: list[int | None] = []
    size_bytes = 0
    for number, document in enumerate(documents, first):
        size_bytes += _add(rows, stamps, document, fields, number)
        if len(rows) == size or size_bytes >= max_bytes:
            yield _trimmed(rows, stamps)
            rows, stamps, size_bytes = ParsedRecords([], [], [], [], []), [], 0
    if len(rows):
        yield _trimmed(rows, stamps)


def _add(
    rows: ParsedRecords, stamps: list[int | None], document: dict[str, Any], fields: FieldNames, number: int
) -> int:
    """Convert a document to a record, add it to ``rows``, and return the bytes of its key, value and headers."""
    assert rows.keys is not None
    assert rows.headers is not None
    assert rows.partitions is not None
    value = _json(document, number) if fields.whole else _bytes(document, fields.value or "value", number)
    rows.values.append(value)
    key = _bytes(document, fields.key or "key", number, optional=fields.key is None)
    rows.keys.append(key)
    stamps.append(_milliseconds(document, fields.timestamp, number))
    headers = [] if fields.whole else _headers(document.get("headers") or [], number)
    rows.headers.append(headers)
    rows.partitions.append(None if fields.whole or fields.by_key else _partition(document.get("partition"), number))
    header_bytes = sum(len(name) + len(blob or b"") for name, blob in headers)
    return len(value or b"") + len(key or b"") + header_bytes


def _partition(value: Any, number: int) -> int | None:
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) < 10:
        value = int(value)
    if value is None or (type(value) is int and 0 <= value < 1 << 31):
        return value
    raise TransferError(f"record {number}: {value!r} is not a partition; ignore the field 'partition' with --by-key")


def _headers(pairs: Any, number: int) -> list[tuple[str, bytes | None]]:
    """Parse a list of objects with "name" (Spark and Arrow call it "key") and "value" or "value_base64"."""
    shape = '{"name": text, "value": text}'
    if not isinstance(pairs, list):
        raise TransferError(f"record {number}: headers must be a list of {shape}, not {pairs!r}")
    headers = []
    for pair in pairs:
        name = pair.get("name", pair.get("key")) if isinstance(pair, dict) else None
        if not isinstance(name, str):
            raise TransferError(f"record {number}: a header must be {shape}, not {pair!r}")
        headers.append((name, _bytes(pair, "value", number, optional=True)))
    return headers


def _trimmed(rows: ParsedRecords, stamps: list[int | None]) -> ParsedRecords:
    """Set the columns that are empty for all records to None, and fill missing timestamps with the current time."""
    if not any(key is not None for key in rows.keys or []):
        rows.keys = None
    if not any(rows.headers or []):
        rows.headers = None
    if not any(partition is not None for partition in rows.partitions or []):
        rows.partitions = None
    rows.timestamps = None
    if any(timestamp is not None for timestamp in stamps):
        now_ms = time.time_ns() // 1_000_000
        rows.timestamps = [now_ms if timestamp is None else timestamp for timestamp in stamps]
    return rows


def _bytes(document: dict[str, Any], field: str, number: int, *, optional: bool = False) -> bytes | None:
    """Return a field as bytes: text as UTF-8, ``field_base64`` decoded, anything else as JSON."""
    if (encoded := document.get(f"{field}_base64")) is not None:
        from base64 import b64decode

        try:
            return b64decode(encoded, validate=True)
        except (ValueError, TypeError) as error:
            raise TransferError(f"record {number}: {field}_base64 is not base64: {error}") from None
    if field not in document:
        if optional:
            return None
        names = ", ".join(map(str, document)) or "none"
        raise TransferError(
            f"record {number}: it has no field {field!r} (it has: {names}); name another field, or use --whole"
        )
    value = document[field]
    if value is None or isinstance(value, bytes):
        return value
    return value.encode() if isinstance(value, str) else _json(value, number)


def _json(value: Any, number: int) -> bytes:
    try:
        return msgspec.json.encode(value, enc_hook=_as_text)
    except TypeError as error:
        raise TransferError(f"record {number}: it has a value that JSON cannot hold: {error}") from None


def _as_text(value: Any) -> str:
    """Return a time in nanoseconds as text. If pandas is installed, pyarrow returns pandas' datetime and timedelta."""
    if isinstance(value, datetime | timedelta) and hasattr(value, "isoformat"):
        return str(value.isoformat())
    raise TypeError(f"{value!r:.100} is {type(value).__name__}")


def _milliseconds(document: dict[str, Any], field: str | None, number: int) -> int | None:
    """Return the milliseconds of a timestamp field; None if the field is missing or empty.

    The field contains milliseconds, or a text in ISO 8601, which is UTC if it has no zone. The value -1 means a
    record without a timestamp, as in Kafka, and is returned unchanged. If the result is None, the record gets the
    current time.
    """
    value = document.get(field or "timestamp")
    if value is None or value == "":
        if field is not None and field not in document:
            raise TransferError(f"record {number}: it has no field {field!r} for the timestamp")
        return None
    try:
        milliseconds = _as_milliseconds(value)
    except (ValueError, TypeError, OverflowError):
        raise TransferError(f"record {number}: {value!r} is not a timestamp (milliseconds, or ISO 8601)") from None
    if not EARLIEST_MS <= milliseconds <= LATEST_MS:
        raise TransferError(f"record {number}: the timestamp is {value!r}; expected {TIMESTAMPS_ACCEPTED}")
    return milliseconds


def _as_milliseconds(value: Any) -> int:
    if isinstance(value, str):
        if value.lstrip("-").isdecimal():
            return int(value)  # a float would round distant times
        value = datetime.fromisoformat(value)
    if isinstance(value, datetime):
        since = (value if value.tzinfo else value.replace(tzinfo=UTC)) - datetime(1970, 1, 1, tzinfo=UTC)
        return rounded(since // timedelta(microseconds=1), 1000)
    if isinstance(value, date):
        return (value - date(1970, 1, 1)).days * 86_400_000
    if isinstance(value, bool):
        raise TypeError
    return value if isinstance(value, int) else round(float(value))


def rounded(number: int, divisor: int) -> int:
    """Return the quotient, with halves rounded up."""
    whole, rest = divmod(number, divisor)
    return whole + (2 * rest >= divisor)


# ---------------------------------------------------------------- reading files


def read_ndjson(source: IO[bytes], skip: int = 0) -> Iterator[dict[str, Any]]:
    """Yield one JSON object per line. Skips empty lines, and the first ``skip`` other lines, which need not be JSON."""
    for number, line in enumerate(source, 1):
        if not line.strip():
            continue
        if skip:
            skip -= 1
            continue
        try:
            document = msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise TransferError(f"line {number} is not JSON: {error}") from None
        if not isinstance(document, dict):
            raise TransferError(f"line {number} is not a JSON object: {line[:60]!r}")
        yield document


def package(module: str, name: str, extra: str) -> Any:
    """Import an optional module. Raises `TransferError` with the command that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        message = f"this needs the package {name}: pip install '.[{extra}]' in a clone of segmentlog"
        raise TransferError(message) from None


# ---------------------------------------------------------------- writing files


class NdjsonWriter:
    """Writes one JSON object per record.

    Keys and values that are not UTF-8 are written as base64, in the fields ``key_base64`` and ``value_base64``.
    """

    def __init__(self, out: IO[bytes]) -> None:
        self._out = out

    def write(self, batch: RecordBatch) -> None:
        lines = [msgspec.json.encode(record_document(record)) for record in batch]
        self._out.write(b"\n".join(lines) + b"\n")

    def close(self) -> None:
        self._out.flush()


def record_document(record: Record) -> dict[str, Any]:
    """Return a record as a JSON document: UTF-8 bytes as text, other bytes in a field whose name ends with _base64."""
    document: dict[str, Any] = {
        "topic": record.topic,
        "partition": record.partition,
        "offset": record.offset,
        "timestamp": record.timestamp,
    }
    _put(document, "key", record.key)
    _put(document, "value", record.value)
    if record.headers:
        document["headers"] = header_documents(record)
    return document


def header_documents(record: Record) -> list[dict[str, Any]]:
    """Return the headers of a record as documents that JSON can represent."""
    return [_put({"name": name}, "value", value) for name, value in record.headers]


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
    """A topic of kafkaesque: a hash with its settings, a sorted set of pages, and a list per page.

    ``{topic}``            hash of the settings size, max and ttl
    ``{topic}/pages``      sorted set of page numbers, by the first offset of the page
    ``{topic}/pages/{n}``  list of the records of page n

    The set also contains pages that have expired or were dropped. Their lists do not exist.
    """

    def __init__(self, url: str, topic: str) -> None:
        redis = package("redis", "redis", "redis")
        self._error = redis.RedisError
        self.topic = topic
        try:
            self._client = redis.Redis.from_url(url, socket_connect_timeout=5)
            settings = self._client.hgetall(topic)
        except (self._error, ValueError) as error:
            raise TransferError(f"{url}: {error}") from None
        if not settings:
            raise TransferError(f"{url}: kafkaesque topic {topic!r} does not exist (there is no hash of that name)")
        self.settings: dict[str, str] = {key.decode(): value.decode() for key, value in settings.items()}

    def config(self) -> dict[str, object]:
        """Return the settings of the kafkaesque topic, as the keys of segmentlog's topic configuration."""
        named = {"size": "segment.records", "max": "retention.segments", "ttl": "retention.closed.ms"}
        config: dict[str, object] = {}
        for field, key in named.items():
            value = self.settings.get(field, "")
            if value.isdecimal() and int(value):
                config[key] = int(value) * (1000 if field == "ttl" else 1)
        return config

    def pages(self) -> list[tuple[int, int]]:
        """Return (page number, first offset) of the pages that still exist, in order."""
        try:
            found = self._client.zrange(f"{self.topic}/pages", 0, -1, withscores=True)
            pages = [(int(number), int(first)) for number, first in found]
            return [page for page in pages if self._client.exists(self._key(page[0]))]
        except (self._error, ValueError) as error:
            raise TransferError(f"kafkaesque topic {self.topic!r}: {error}") from None

    def rows(self, pages: list[tuple[int, int]], size: int, skip: int = 0) -> Iterator[ParsedRecords]:
        """Yield the records of these pages, oldest first, except the first ``skip`` records.

        Yields lists of ``size`` records. A list is shorter if ``size`` values would probably exceed `ROWS_MAX_BYTES`,
        judging by the size of the previous values.
        """
        count = min(size, _FIRST_PAGE_RECORDS)
        for number, _ in pages:
            start = 0
            while True:
                try:
                    values = self._client.lrange(self._key(number), start, start + count - 1)
                except self._error as error:
                    raise TransferError(f"kafkaesque topic {self.topic!r}, page {number}: {error}") from None
                if not values:
                    break
                start += len(values)
                mean_bytes = sum(map(len, values)) // len(values) + 1
                count = max(1, min(size, ROWS_MAX_BYTES // mean_bytes))
                if left := values[skip:]:
                    yield ParsedRecords(list(left))
                skip = max(skip - len(values), 0)

    def _key(self, number: int) -> str:
        return f"{self.topic}/pages/{number}"
