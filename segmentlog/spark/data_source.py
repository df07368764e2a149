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
from segmentlog.spark.source_options import OF_TABLES, ReadOptions, WriteOptions, read_options, write_options
from segmentlog.spark.stream_reader import StreamReader


class DefaultSource(DataSource):
    """``spark.read.format("segmentlog")``, ``spark.readStream``, ``df.write`` and ``df.writeStream``.

    Spark makes it anew wherever it needs one, hands it the options as text, and sends what it
    returns to other processes: nothing here holds a file open.
    """

    @classmethod
    def name(cls) -> str:
        """What it is called in `format`."""
        return "segmentlog"

    def schema(self) -> StructType:
        """The columns that are read when nobody says which."""
        if {"provider", "owner"} <= {key.lower() for key in self.options}:  # what Spark adds for CREATE TABLE
            raise SegmentlogError(f"no table of the catalog can be of this source: {OF_TABLES}")
        include_headers = self.options.get("includeHeaders", "false").strip().lower() == "true"
        return source_schema(include_headers=include_headers)

    def reader(self, schema: StructType) -> DataSourceReader:
        """For `spark.read`."""
        check_read_schema(schema)
        return BatchReader(self._read_options(streaming=False), schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """For `spark.readStream`."""
        check_read_schema(schema)
        return StreamReader(self._read_options(streaming=True), schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """For `df.write`."""
        return BatchWriter(self._write_options(schema, overwrite))

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        """For `df.writeStream`."""
        # Output mode "complete" comes as overwrite. Each micro-batch's rows are appended, as by Spark's Kafka sink.
        return StreamWriter(self._write_options(schema, overwrite=False))

    def _read_options(self, *, streaming: bool) -> ReadOptions:
        return read_options(dict(self.options), streaming=streaming)

    def _write_options(self, schema: StructType, overwrite: bool) -> WriteOptions:
        options = write_options(dict(self.options))
        if overwrite:
            accepted = "append (.mode('append'), INSERT INTO): a log is only ever appended to"
            raise InvalidConfig("mode", "overwrite", accepted)
        check_write_schema(schema, topic_is_given=options.topic is not None)
        return options
