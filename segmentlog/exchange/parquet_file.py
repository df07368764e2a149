"""Read and write records as Parquet. Needs pyarrow."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import IO, TYPE_CHECKING, Any

from segmentlog.exchange.record_files import FieldNames, TransferError, package, rounded

if TYPE_CHECKING:
    from segmentlog.format.record_batch import RecordBatch

# ---------------------------------------------------------------- reading


def read_parquet(path: str, fields: FieldNames, skip: int = 0) -> Iterator[dict[str, Any]]:
    """Yield the rows of a Parquet file, except the first ``skip`` rows. Needs pyarrow.

    Timestamps are returned in milliseconds, because Python's dates end with the year 9999.
    """
    parquet = package("pyarrow.parquet", "pyarrow", "parquet")
    arrow = package("pyarrow", "pyarrow", "parquet")
    name = fields.timestamp or "timestamp"
    unreadable = f"{path} is not a readable Parquet file"
    try:
        source = open(path, "rb")  # noqa: SIM115  # a `with` block would catch errors of the code that uses the rows
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
                raise TransferError(f"{path} has a value outside the range of Python's types: {error}") from None
            if stamps is not None:
                for document, timestamp in zip(documents, stamps, strict=True):
                    document[name] = timestamp
            yield from islice(documents, skip, None)
            skip = max(skip - len(documents), 0)


def _batches(file: Any) -> Iterator[Any]:
    """Yield the rows in batches. Read one row group at a time: the writer of the file also had one in memory."""
    for group in range(file.num_row_groups):
        yield from file.iter_batches(batch_size=8192, row_groups=[group])


def _arrow_milliseconds(column: Any, arrow: Any) -> list[int | None]:
    """Return a column of timestamps of any unit in milliseconds."""
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
# Size of a row group, whatever the size of the log's batches is: each group has 1 kB of metadata.


class ParquetWriter:
    """Writes columns partition, offset, timestamp (ms, UTC), key, value, headers. Needs pyarrow."""

    def __init__(self, out: IO[bytes]) -> None:
        self._arrow = package("pyarrow", "pyarrow", "parquet")
        self._parquet = package("pyarrow.parquet", "pyarrow", "parquet")
        self._out = out
        self._writer: Any = None
        self._waiting: list[Any] = []
        """Tables of the next row group."""
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
        if self._writer is None:  # nothing was exported: write a file with the columns and no rows
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
