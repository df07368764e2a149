"""Read and write records as CSV.

As in PostgreSQL, DuckDB and Spark, a field without any characters is null, and ``""`` is an empty text. So an import
after an export keeps tombstones. The column ``headers`` contains JSON. Bytes that are not UTF-8 are rejected.
"""

from __future__ import annotations

import csv
import io
import re
import sys
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING, Any, Final

import msgspec

from segmentlog.exchange.record_files import TransferError, header_documents

if TYPE_CHECKING:
    from segmentlog.format.record_batch import RecordBatch
    from segmentlog.records import Record

_FIELD: Final = re.compile(r'("[^"]*(?:""[^"]*)*")|[^,\r\n]*')
_TO_QUOTE: Final = re.compile(r'[",\r\n]|\A\Z')


# ---------------------------------------------------------------- reading


class _Lines:
    """Iterator over lines of a text, which keeps the lines of the current row.

    The csv module does not report which fields were quoted.
    """

    def __init__(self, text: io.TextIOWrapper) -> None:
        self._text = text
        self._row: list[str] = []

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        line = next(self._text)
        self._row.append(line)
        return line

    def take_row(self) -> str:
        """Return the text that was read since the last call."""
        row = "".join(self._row)
        self._row.clear()
        return row


def read_csv(source: IO[bytes], skip: int = 0, *, with_nulls: bool = True) -> Iterator[dict[str, Any]]:
    """Yield the rows of a CSV file after its header line, except the first ``skip`` rows.

    With ``with_nulls`` an empty field without quotes becomes None, and ``headers`` are decoded from JSON.
    """
    csv.field_size_limit(sys.maxsize)  # the default limit is 128 KiB, process-wide
    lines = _Lines(io.TextIOWrapper(source, "utf-8-sig", newline=""))
    reader = csv.reader(lines, strict=True)
    names: list[str] | None = None
    try:
        for fields in reader:
            text = lines.take_row()
            if not fields:
                continue
            if names is None:
                names = fields
                continue
            if skip:
                skip -= 1
                continue
            if len(fields) != len(names):
                raise TransferError(
                    f"line {reader.line_num} has {len(fields)} columns, but the first line has {len(names)}"
                )
            row: dict[str, Any] = dict(zip(names, fields, strict=True))
            if with_nulls and "" in fields:
                row.update((name, None) for name, null in zip(names, _nulls(text), strict=True) if null)
            if with_nulls and row.get("headers"):
                row["headers"] = _decoded(row["headers"])
            yield row
    except UnicodeDecodeError as error:
        raise TransferError(f"the file is not UTF-8: {error}") from None
    except csv.Error as error:
        raise TransferError(f"the file is not CSV: line {reader.line_num}: {error}") from None


def _nulls(text: str) -> list[bool]:
    """Return for each field of a row whether it is empty and has no quotes."""
    nulls = []
    at = 0
    while True:
        field = _FIELD.match(text, at)
        assert field is not None  # it matches the empty text
        nulls.append(field.end() == at)
        at = field.end()
        if text[at : at + 1] != ",":
            return nulls
        at += 1


def _decoded(headers: str) -> Any:
    try:
        return msgspec.json.decode(headers)
    except (msgspec.DecodeError, RecursionError):
        return headers  # the caller that needs headers reports what is expected


# ---------------------------------------------------------------- writing


class CsvWriter:
    """Writes the columns partition, offset, timestamp, key, value, headers.

    Raises `TransferError` for a key or value that is not UTF-8 text.
    """

    def __init__(self, out: IO[bytes]) -> None:
        self._out = out
        out.write(b"partition,offset,timestamp,key,value,headers\r\n")

    def write(self, batch: RecordBatch) -> None:
        self._out.write("".join(map(_row, batch)).encode())

    def close(self) -> None:
        self._out.flush()


def _row(record: Record) -> str:
    try:
        key, value = (None if data is None else data.decode() for data in (record.key, record.value))
    except UnicodeDecodeError:
        name = f"{record.topic}/{record.partition} offset {record.offset}"
        raise TransferError(f"{name} is not UTF-8, and CSV can hold only text; export to ndjson or parquet") from None
    headers = msgspec.json.encode(header_documents(record)).decode() if record.headers else None
    texts = ",".join(map(_field, (key, value, headers)))
    return f"{record.partition},{record.offset},{record.timestamp},{texts}\r\n"


def _field(text: str | None) -> str:
    """Return the text of a CSV field, in quotes if it needs them. None becomes an empty field."""
    if text is None:
        return ""
    return '"' + text.replace('"', '""') + '"' if _TO_QUOTE.search(text) else text
