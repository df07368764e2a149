"""Run SQL queries in which every topic is a view."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, Literal

from pyspark.errors import AnalysisException
from pyspark.sql import functions as F
from pyspark.sql.types import BooleanType, NumericType

from segmentlog.errors import InvalidConfig, UnknownTopic
from segmentlog.objects.bucket.error_messages import without_secrets
from segmentlog.spark.pipelines.json_columns import (
    JSON_OPTIONS,
    METADATA,
    may_mention,
    narrow_schema,
    parse_json_columns,
    resolve_schema,
    to_blob,
)
from segmentlog.spark.pipelines.pipeline_queries import QueryReport, read_topic, run_batch
from segmentlog.spark.source_options import VIEW_STATEMENT
from segmentlog.spark.spark_errors import SparkFailed, explain_spark_errors
from segmentlog.spark.store_opener import open_on_driver

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

_COUNT_ALL: Final = re.compile(r"count\s*\(\s*\*\s*\)", re.IGNORECASE)
_ENDINGS: Final = {"parquet": "parquet", "csv": "csv", "json": "json", "ndjson": "json", "jsonl": "json", "orc": "orc"}


@explain_spark_errors()
def query(
    spark: SparkSession, path: str, text: str, *, schemas: Mapping[str, str] | None = None, strict: bool = False
) -> DataFrame:
    """Return the result of a query in Spark's SQL over the topics of a store.

    The view of a topic has the fields of its values, if they are JSON objects, and the columns _key, _value,
    _partition, _offset, _timestamp and _headers. A name with other characters than letters, digits and _ needs
    backticks: `` `my-topic` ``. A view of the session hides a topic of the same name.

    Args:
        schemas: the fields of a topic's values as DDL, by topic; other topics have the fields of their first and last
            records.
        strict: fail at a value that is not a JSON object, instead of a row of nulls.

    Raises:
        UnknownTopic: the query names a table that does not exist in the store or in Spark.
        SparkFailed: the query is not valid SQL, or names a column that does not exist.
    """
    schemas = schemas or {}
    topics = _list_topics(path)
    for name in schemas:
        if name not in topics:
            raise UnknownTopic(name, _unknown_topic_reason(path, topics))
    mentioned = _find_mentioned(topics, text)
    try:
        return _run(spark, path, text, mentioned, schemas, strict)
    except AnalysisException as error:
        condition = error.getCondition() or ""
        if condition == "TABLE_OR_VIEW_NOT_FOUND":
            name = (error.getMessageParameters() or {}).get("relationName", "").replace("`", "")
            if name in topics:
                raise SparkFailed(f"the name of topic {name!r} needs backticks: `{name}`") from error
            raise UnknownTopic(name, _unknown_topic_reason(path, topics)) from error
        if condition.startswith("UNSUPPORTED_INSERT"):
            why = "a query only reads topics; to INSERT, create a view on the source segmentlog"
            raise SparkFailed(f"{why}: {VIEW_STATEMENT}") from error
        if not condition.startswith("UNRESOLVED_COLUMN"):
            raise
    # Run it again with all columns: it fails again, but Spark's message then suggests the names of all columns.
    return _run(spark, path, text, mentioned, schemas, strict, narrow=False)


def save(
    rows: DataFrame,
    to: str,
    form: str | None = None,
    mode: Literal["errorifexists", "append", "overwrite"] = "errorifexists",
) -> QueryReport:
    """Write the rows of a query to a folder, in the format ``form``, or in the format of the folder's ending.

    Raises:
        InvalidConfig: ``form`` is None, and the ending names no format.
        SparkFailed: the query fails, or the format does not support its columns.
    """
    form = form or _ENDINGS.get(to.rpartition(".")[2].lower())
    if form is None:
        raise InvalidConfig("format", None, f"give a format, such as parquet; {to!r} does not end with one")
    options = {"header": "true"} if form == "csv" else {}
    return run_batch(rows, lambda counted: counted.write.format(form).mode(mode).options(**options), to)


def as_json(rows: DataFrame) -> DataFrame:
    """Return each row as a JSON object, in one column."""
    return rows.select(F.to_json(F.struct("*"), JSON_OPTIONS).alias("json"))


def format_for_display(rows: DataFrame) -> DataFrame:
    """Return rows for display: structs, arrays and maps as JSON, times in the session's time zone."""
    plain = rows.toDF(*(f"c{at}" for at in range(len(rows.columns))))  # a join may have two columns of one name
    kinds = [field.dataType for field in plain.schema.fields]
    shown = [
        to_blob(plain, name) if not isinstance(kind, NumericType | BooleanType) else plain[name]
        for name, kind in zip(plain.columns, kinds, strict=True)
    ]
    return plain.select(*shown).toDF(*rows.columns)


def _list_topics(path: str) -> list[str]:
    with open_on_driver(path) as store:
        return store.topics()


def _unknown_topic_reason(path: str, topics: list[str]) -> str:
    return f"it does not exist in {without_secrets(path)} (existing topics: {', '.join(topics[:20]) or 'none'})"


def _find_mentioned(topics: list[str], text: str) -> list[str]:
    """Return the topics that a query may name. A false positive only costs reading a sample of the topic."""
    found: dict[str, str] = {}
    for flags in (re.IGNORECASE, 0):
        # Spark ignores case. If topics differ only in case, the query means the topic with its exact spelling.
        found |= {
            topic.lower(): topic for topic in topics if re.search(rf"(?<!\w){re.escape(topic)}(?!\w)", text, flags)
        }
    return list(found.values())


def _run(
    spark: SparkSession,
    path: str,
    text: str,
    topics: list[str],
    schemas: Mapping[str, str],
    strict: bool,
    *,
    narrow: bool = True,
) -> DataFrame:
    """Run the query, with views of the topics that exist only while Spark resolves names."""
    taken = {table.name.lower() for table in spark.catalog.listTables() if table.isTemporary}
    made = []
    # Only count(*) may have a star: then the text names every column that it uses. A strict read needs whole values.
    narrow = narrow and not strict and "*" not in _COUNT_ALL.sub("", text)
    try:
        for topic in topics:
            if topic.lower() not in taken:
                schema = resolve_schema(spark, path, topic, schemas.get(topic))
                _read_view(spark, path, topic, schema, text if narrow else None, strict).createOrReplaceTempView(
                    f"`{topic}`"
                )
                made.append(topic)
        return spark.sql(text)
    finally:
        for topic in made:
            spark.catalog.dropTempView(topic)


def _read_view(
    spark: SparkSession, path: str, topic: str, schema: StructType, text: str | None, strict: bool
) -> DataFrame:
    """Return the columns of a topic: all, or only those that the query ``text`` may mention, to read less."""
    metadata = list(METADATA)
    if text is not None:
        schema = narrow_schema(schema, text)
        # Counting rows needs at least one column.
        metadata = [name for name in metadata if may_mention(name, text)] or ["_partition"]
    columns = [METADATA[name] for name in metadata] + (["value"] if schema.fields else [])
    return parse_json_columns(read_topic(spark, path, topic, columns), schema, metadata, strict=strict)
