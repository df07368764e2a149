"""Records from and to CSV.

A field that is empty is null, one that is ``""`` in quotes is an empty text, as PostgreSQL, DuckDB and Spark have it:
so a tombstone stays one. Headers are JSON in a column of that name. Binary is refused: CSV is text.
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
    """The lines of a text; those of the row in hand are kept, for the csv module does not say what was in quotes."""

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
        """What was read since the last call."""
        row = "".join(self._row)
        self._row.clear()
        return row


def read_csv(source: IO[bytes], skip: int = 0, *, with_nulls: bool = True) -> Iterator[dict[str, Any]]:
    """Rows of a CSV file whose first line names the columns, without the first ``skip``.

    ``with_nulls``: an empty field without quotes is None, and JSON in ``headers`` is what it says.
    """
    csv.field_size_limit(sys.maxsize)  # 128 KiB, for all of the process, unless somebody says so
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
                raise TransferError(f"line {reader.line_num} has another number of columns than the first line")
            row: dict[str, Any] = dict(zip(names, fields, strict=True))
            if with_nulls and "" in fields:
                row.update((name, None) for name, null in zip(names, _nulls(text), strict=True) if null)
            if with_nulls and row.get("headers"):
                row["headers"] = _decoded(row["headers"])
            yield row
    except UnicodeDecodeError as error:
        raise TransferError(f"the file is not UTF-8: {error}") from None
    except csv.Error as error:
        raise TransferError(f"the file is no CSV: line {reader.line_num}: {error}") from None


def _nulls(text: str) -> list[bool]:
    """Which fields of a row are empty and not in quotes."""
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
        return headers  # whoever takes it for headers says what they should be


# ---------------------------------------------------------------- writing


class CsvWriter:
    """partition, offset, timestamp, key, value, headers; for text only."""

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
        where = f"{record.topic}/{record.partition} offset {record.offset}"
        raise TransferError(f"{where} is binary, and CSV is text; export to ndjson or parquet") from None
    headers = msgspec.json.encode(header_documents(record)).decode() if record.headers else None
    texts = ",".join(map(_field, (key, value, headers)))
    return f"{record.partition},{record.offset},{record.timestamp},{texts}\r\n"


def _field(text: str | None) -> str:
    """Null is nothing at all; what would be taken for something else is put in quotes."""
    if text is None:
        return ""
    return '"' + text.replace('"', '""') + '"' if _TO_QUOTE.search(text) else text
