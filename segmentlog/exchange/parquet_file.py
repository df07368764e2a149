"""Records from and to Parquet. Needs pyarrow."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import IO, TYPE_CHECKING, Any

from segmentlog.exchange.record_files import Fields, TransferError, package, rounded

if TYPE_CHECKING:
    from segmentlog.format.record_batch import RecordBatch

# ---------------------------------------------------------------- reading


def read_parquet(path: str, fields: Fields, skip: int = 0) -> Iterator[dict[str, Any]]:
    """Rows of a Parquet file, without the first ``skip``. Needs pyarrow.

    The timestamp is milliseconds, for Python's dates end with the year 9999.
    """
    parquet = package("pyarrow.parquet", "pyarrow", "parquet")
    arrow = package("pyarrow", "pyarrow", "parquet")
    name = fields.timestamp or "timestamp"
    unreadable = f"{path} is no Parquet file that can be read"
    try:
        source = open(path, "rb")  # noqa: SIM115  # an error of whoever reads the rows is not this one's
    except OSError as error:
        raise TransferError(f"{unreadable}: {error}") from None
    with source:
        try:
            file = parquet.ParquetFile(source)
        except (OSError, ValueError) as error:
            raise TransferError(f"{unreadable}: {error}") from None
        for batch in _batches(file):
            stamps: list[int | None] | None = None
            at = batch.schema.get_field_index(name)
            if at >= 0 and arrow.types.is_timestamp(batch.schema.field(at).type) and not fields.whole:
                stamps = _arrow_milliseconds(batch.column(at), arrow)
                batch = batch.select([number for number in range(batch.num_columns) if number != at])
            try:
                documents = batch.to_pylist()
            except (OverflowError, ValueError) as error:
                raise TransferError(f"{path} has a value that Python's types cannot hold: {error}") from None
            if stamps is not None:
                for document, timestamp in zip(documents, stamps, strict=True):
                    document[name] = timestamp
            yield from islice(documents, skip, None)
            skip = max(skip - len(documents), 0)


def _batches(file: Any) -> Iterator[Any]:
    """A group of rows at a time, so that no more large values are held at once than its writer held."""
    for group in range(file.num_row_groups):
        yield from file.iter_batches(batch_size=8192, row_groups=[group])


def _arrow_milliseconds(column: Any, arrow: Any) -> list[int | None]:
    """Of a column of timestamps in any unit."""
    ticks: list[int | None] = column.cast(arrow.int64()).to_pylist()
    if column.type.unit == "ms":
        return ticks
    if column.type.unit == "s":
        return [None if tick is None else tick * 1000 for tick in ticks]
    divisor = 1000 if column.type.unit == "us" else 1_000_000
    return [None if tick is None else rounded(tick, divisor) for tick in ticks]


# ---------------------------------------------------------------- writing


_GROUP_ROWS = 1 << 17
_GROUP_BYTES = 64 << 20
# Of a group of rows in a Parquet file, whatever the log's batches are: each takes a kilobyte of its own.


class ParquetWriter:
    """Columns partition, offset, timestamp (ms, UTC), key, value, headers. Needs pyarrow."""

    def __init__(self, out: IO[bytes]) -> None:
        self._arrow = package("pyarrow", "pyarrow", "parquet")
        self._parquet = package("pyarrow.parquet", "pyarrow", "parquet")
        self._out = out
        self._writer: Any = None
        self._waiting: list[Any] = []
        """What is to be in the next group."""
        self._rows = self._bytes = 0

    def write(self, batch: RecordBatch) -> None:
        arrow = batch.to_arrow()
        partitions = self._arrow.array([batch.partition] * len(batch), self._arrow.int32())
        self._waiting.append(self._arrow.Table.from_batches([arrow]).add_column(0, "partition", partitions))
        self._rows += len(batch)
        self._bytes += arrow.nbytes
        if self._rows >= _GROUP_ROWS or self._bytes >= _GROUP_BYTES:
            self._write()

    def _write(self) -> None:
        table = self._arrow.concat_tables(self._waiting)
        self._waiting, self._rows, self._bytes = [], 0, 0
        if self._writer is None:
            self._writer = self._parquet.ParquetWriter(self._out, table.schema)
        self._writer.write_table(table)

    def close(self) -> None:
        if self._waiting:
            self._write()
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
            self._writer = self._parquet.ParquetWriter(self._out, schema)
        self._writer.close()
