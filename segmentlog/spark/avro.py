"""``from_avro``: decode a column of Avro values with the schema ids that Kafka's serializers write.

Spark's own function of that name needs a jar, ignores schema ids and reads all values with one schema. This function
needs the extras ``[spark,http]``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from segmentlog.errors import InvalidConfig
from segmentlog.spark.store_opener import StoreLocation, open_store, resolve_location

if TYPE_CHECKING:
    from pyspark.sql import Column

    from segmentlog.schemas.subject_strategy import SchemaSource

Mode = Literal["failfast", "permissive"]


def from_avro(
    column: Column | str, registry: str, *, subject: str | None = None, schema: str | None = None,
    mode: Mode = "failfast",
) -> Column:  # fmt: skip
    """Return the column with decoded values in place of bytes; Avro records become structs.

    ``registry`` is the path or URL of a store, or the URL of a schema registry, ``http://...``. Each value is read
    with the schema whose id it holds, and resolved by Avro's rules to ``schema``, or to the newest schema of
    ``subject``. Executors fetch each schema once. A value that cannot be decoded fails the query; in mode
    ``permissive`` it becomes null.

    Raises the errors of the registry, and `InvalidSchema` if no type of Spark can hold the values.
    """
    import pyarrow
    from pyspark.sql.pandas.functions import arrow_udf

    from segmentlog.spark.avro_types import AvroTypes

    if (subject is None) == (schema is None):
        raise InvalidConfig("subject", subject, "either subject (its newest schema is used) or schema, not both")
    if mode not in ("failfast", "permissive"):
        raise InvalidConfig("mode", mode, "'failfast' or 'permissive'")
    where = registry if _is_http(registry) else resolve_location(registry)
    text = schema if schema is not None else _fetch_newest_schema(where, str(subject))
    parsed, names = _parse_schema(text)
    types = AvroTypes(parsed, names)
    kind = types.spark_type()
    types.converter()  # raise on the driver if the schema cannot be converted

    def read(values: Any) -> Any:
        return _decode_values(values, where, text, mode)

    read.__annotations__ = {"values": pyarrow.Array, "return": pyarrow.Array}  # Spark reads the annotations
    found: Column = arrow_udf(read, kind)(column)  # type: ignore[call-overload]
    return found


def _is_http(registry: str) -> bool:
    return registry.startswith(("http://", "https://"))


def _fetch_newest_schema(where: str, subject: str) -> str:
    source, close = _open_registry(where)
    try:
        return source.parsed(source.version(subject)).formatted("resolved")
    finally:
        close()


def _open_registry(where: str) -> tuple[SchemaSource, Callable[[], None]]:
    if _is_http(where):
        from segmentlog.schemas.remote_registry import RemoteRegistry

        return RemoteRegistry(where), lambda: None
    store = open_store(StoreLocation(where, ("_schemas",)))
    return store.schemas, store.close


def _parse_schema(text: str) -> tuple[Any, dict[str, Any]]:
    """Return the schema as fastavro parses it, and the types that it defines, by name."""
    from segmentlog.schemas.avro_values import parsed_by_fastavro

    return parsed_by_fastavro(text)


def _decode_values(values: Any, where: str, text: str, mode: Mode) -> Any:
    """Decode an array of values. Runs on executors."""
    import pyarrow
    from pyspark.sql.pandas.types import to_arrow_type

    from segmentlog.spark.avro_types import AvroTypes

    types = AvroTypes(*_parse_schema(text))
    convert = types.converter()
    decode = _cached_decoder(where, text)
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
def _cached_decoder(where: str, text: str) -> Callable[[bytes], Any]:
    """Return the decoder, cached in each Python process of an executor.

    A schema is fetched when the first value with its id arrives.
    """
    from segmentlog.schemas.avro_values import AvroDeserializer

    deserializer = AvroDeserializer(_RegistryPerCall(where), text)
    return lambda blob: deserializer.deserialize("", [blob])[0]


class _RegistryPerCall:
    """A registry that is opened for each call only, so that an executor's process keeps nothing open."""

    def __init__(self, where: str) -> None:
        self._where = where

    def __getattr__(self, name: str) -> Any:
        def ask(*arguments: Any, **named: Any) -> Any:
            source, close = _open_registry(self._where)
            try:
                return getattr(source, name)(*arguments, **named)
            finally:
                close()

        return ask
