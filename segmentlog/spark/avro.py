"""``from_avro``: a column of values as Kafka's serializers write them, by the schemas whose ids they begin with.

Spark's own function of that name comes in a jar, and knows no ids: it reads all values by one schema. This one needs
what the extras ``[spark,http]`` bring.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from segmentlog.errors import InvalidConfig
from segmentlog.spark.store_opener import Place, open_store, place_of

if TYPE_CHECKING:
    from pyspark.sql import Column

    from segmentlog.schemas.subject_strategy import SchemaSource

Mode = Literal["failfast", "permissive"]


def from_avro(
    column: Column | str, registry: str, *, subject: str | None = None, schema: str | None = None,
    mode: Mode = "failfast",
) -> Column:  # fmt: skip
    """The column with values in place of bytes: a struct, for records.

    ``registry`` is where a store is, or the URL of a schema registry, ``http://...``. Every value is read by the schema
    that it names, and becomes one of ``schema``, or of the newest of ``subject`` now: Avro's rules say how. Executors
    ask the registry for each schema once. What is no such value fails the query, or is null with ``permissive``.

    Raises what the registry does, and `InvalidSchema` for what no type of Spark can hold.
    """
    import pyarrow
    from pyspark.sql.pandas.functions import arrow_udf

    from segmentlog.spark.avro_types import AvroTypes

    if (subject is None) == (schema is None):
        raise InvalidConfig("subject", subject, "the subject whose newest schema is read by, or a schema of your own")
    if mode not in ("failfast", "permissive"):
        raise InvalidConfig("mode", mode, "'failfast' or 'permissive'")
    where = registry if _is_http(registry) else place_of(registry)
    text = schema if schema is not None else _newest(where, str(subject))
    parsed, names = _parsed(text)
    types = AvroTypes(parsed, names)
    kind = types.spark_type()
    types.converter()  # what cannot be converted is told here

    def read(values: Any) -> Any:
        return _read(values, where, text, mode)

    read.__annotations__ = {"values": pyarrow.Array, "return": pyarrow.Array}  # which Spark looks at
    found: Column = arrow_udf(read, kind)(column)  # type: ignore[call-overload]
    return found


def _is_http(registry: str) -> bool:
    return registry.startswith(("http://", "https://"))


def _newest(where: str, subject: str) -> str:
    source, close = _open(where)
    try:
        return source.parsed(source.version(subject)).formatted("resolved")
    finally:
        close()


def _open(where: str) -> tuple[SchemaSource, Callable[[], None]]:
    if _is_http(where):
        from segmentlog.schemas.remote_registry import RemoteRegistry

        return RemoteRegistry(where), lambda: None
    store = open_store(Place(where, ("_schemas",)))
    return store.schemas, store.close


def _parsed(text: str) -> tuple[Any, dict[str, Any]]:
    """As fastavro has it, with what it defines by names."""
    from segmentlog.schemas.avro_values import parsed_by_fastavro

    return parsed_by_fastavro(text)


def _read(values: Any, where: str, text: str, mode: Mode) -> Any:
    """What executors do with an array of values."""
    import pyarrow
    from pyspark.sql.pandas.types import to_arrow_type

    from segmentlog.spark.avro_types import AvroTypes

    types = AvroTypes(*_parsed(text))
    convert = types.converter()
    decode = _decoder(where, text)
    found = []
    for blob in values.to_pylist():
        try:
            value = None if blob is None else decode(blob)
        except (ValueError, TypeError, LookupError):
            if mode == "failfast":
                raise
            value = None
        found.append(value if convert is None else convert(value))
    return pyarrow.array(found, to_arrow_type(types.spark_type(), timezone="UTC"))


@functools.lru_cache(maxsize=16)
def _decoder(where: str, text: str) -> Callable[[bytes], Any]:
    """Kept in each Python process of an executor: a schema is asked for when the first value names it."""
    from segmentlog.schemas.avro_values import AvroDeserializer

    deserializer = AvroDeserializer(_Asking(where), text)
    return lambda blob: deserializer.deserialize("", [blob])[0]


class _Asking:
    """A registry that is opened for the moment in which it is asked: an executor's process leaves nothing open."""

    def __init__(self, where: str) -> None:
        self._where = where

    def __getattr__(self, name: str) -> Any:
        def ask(*arguments: Any, **named: Any) -> Any:
            source, close = _open(self._where)
            try:
                return getattr(source, name)(*arguments, **named)
            finally:
                close()

        return ask
