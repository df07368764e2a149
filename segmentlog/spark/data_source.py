"""The data source ``segmentlog``: topics for Spark to read and write, batch and streaming."""

from __future__ import annotations

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import StructType

from segmentlog.errors import InvalidConfig, SegmentlogError
from segmentlog.spark.batch_reader import BatchReader
from segmentlog.spark.batch_writer import BatchWriter, StreamWriter
from segmentlog.spark.schema import check_read_schema, check_write_schema, source_schema
from segmentlog.spark.source_options import (
    TABLE_ADVICE,
    ReadOptions,
    WriteOptions,
    parse_read_options,
    parse_write_options,
)
from segmentlog.spark.stream_reader import StreamReader


class DefaultSource(DataSource):
    """Entry point of ``format("segmentlog")`` for `spark.read`, `readStream`, `df.write` and `df.writeStream`.

    Spark creates a new instance whenever it needs one and passes the options as text. It pickles the readers and
    writers that the methods return and sends them to other processes, so an instance must not hold an open file.
    """

    @classmethod
    def name(cls) -> str:
        """Return the name that users pass to `format`."""
        return "segmentlog"

    def schema(self) -> StructType:
        """Return the columns of a read without an explicit schema.

        Raises `SegmentlogError` for CREATE TABLE: a catalog table cannot use this source.
        """
        if {"provider", "owner"} <= {key.lower() for key in self.options}:  # Spark adds both for CREATE TABLE
            raise SegmentlogError(f"a catalog table cannot use the source segmentlog: {TABLE_ADVICE}")
        include_headers = self.options.get("includeHeaders", "false").strip().lower() == "true"
        return source_schema(include_headers=include_headers)

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the reader for `spark.read`."""
        check_read_schema(schema)
        return BatchReader(self._read_options(streaming=False), schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """Return the reader for `spark.readStream`."""
        check_read_schema(schema)
        return StreamReader(self._read_options(streaming=True), schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Return the writer for `df.write`. Raises `InvalidConfig` for mode "overwrite"."""
        return BatchWriter(self._write_options(schema, overwrite))

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        """Return the writer for `df.writeStream`."""
        # Spark passes output mode "complete" as overwrite. Every micro-batch is appended, as by Spark's Kafka sink.
        return StreamWriter(self._write_options(schema, overwrite=False))

    def _read_options(self, *, streaming: bool) -> ReadOptions:
        return parse_read_options(dict(self.options), streaming=streaming)

    def _write_options(self, schema: StructType, overwrite: bool) -> WriteOptions:
        options = parse_write_options(dict(self.options))
        if overwrite:
            accepted = "append (.mode('append'), INSERT INTO): a log is only ever appended to"
            raise InvalidConfig("mode", "overwrite", accepted)
        check_write_schema(schema, topic_is_given=options.topic is not None)
        return options
