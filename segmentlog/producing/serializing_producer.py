"""A producer that serializes objects, or adds trace context to headers."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, cast

import numpy.typing as npt

from segmentlog.codecs import Serializer, is_about_data
from segmentlog.errors import SerializationError
from segmentlog.format.file_names import check_topic_name
from segmentlog.log.append.batch_encoding import as_list
from segmentlog.producing.delivery import Deliveries, Delivery
from segmentlog.producing.producer import Producer
from segmentlog.records import K, V
from segmentlog.tracing import Carrier


class SerializingProducer(Producer[K, V]):
    """A `Producer` that serializes values or keys, or adds trace context to headers. Thread-safe as `Producer`."""

    serializer: Serializer[V] | None = None
    key_serializer: Serializer[K] | None = None
    carrier: Carrier | None = None
    """Set by `ProducerRegistry.create`."""

    def send(
        self,
        topic: str,
        value: V,
        key: K | None = None,
        *,
        headers: Sequence[tuple[str, bytes | None]] | None = None,
        timestamp: int | datetime | None = None,
        partition: int | None = None,
    ) -> Delivery:
        """Serialize and send one object; see `Producer.send`. Also raises `SerializationError`."""
        if self.serializer is not None:
            value = cast("V", serialized(self.serializer, topic, "values", [value])[0])
        if self.key_serializer is not None and key is not None:
            key = cast("K", serialized(self.key_serializer, topic, "keys", [key])[0])
        if self.carrier is None:
            return super().send(topic, value, key, headers=headers, timestamp=timestamp, partition=partition)
        with self.carrier.sending(topic, 1):
            headers = self.carrier.added(headers)
            return super().send(topic, value, key, headers=headers, timestamp=timestamp, partition=partition)

    def send_many(
        self,
        topic: str,
        values: Sequence[V],
        keys: Sequence[K | None] | None = None,
        *,
        headers: Sequence[Sequence[tuple[str, bytes | None]] | None] | None = None,
        timestamps: Sequence[int | datetime] | npt.NDArray[Any] | None = None,
        partition: int | None = None,
    ) -> Deliveries:
        """Serialize and send objects; see `Producer.send_many`. Also raises `SerializationError`."""
        values, keys = self.serialized_columns(topic, values, keys)
        if self.carrier is None:
            return super().send_many(topic, values, keys, headers=headers, timestamps=timestamps, partition=partition)
        values = as_list("values", values)
        with self.carrier.sending(topic, len(values)):
            headers = self.carrier.added_to_all(headers, len(values))
            return super().send_many(topic, values, keys, headers=headers, timestamps=timestamps, partition=partition)

    def serialized_columns(
        self, topic: str, values: Sequence[Any], keys: Sequence[Any] | None
    ) -> tuple[Sequence[Any], Sequence[Any] | None]:
        """Return serialized values and keys for `send_many`."""
        if self.serializer is not None:
            values = serialized(self.serializer, topic, "values", as_list("values", values))
        if self.key_serializer is not None and keys is not None:
            keys = serialized(self.key_serializer, topic, "keys", as_list("keys", keys))
        return values, keys


def serialized(serializer: Serializer[Any], topic: str, column: str, objects: list[Any]) -> list[bytes | None]:
    """Serialize objects. Raises `SerializationError` with the index of the first object that fails."""
    check_topic_name(topic)
    try:
        return _serialized(serializer, topic, column, objects)
    except Exception as error:
        if isinstance(error, SerializationError) or not is_about_data(error):
            raise
        if len(objects) == 1:
            raise SerializationError(topic, column, 0, _reason(error)) from error
        for index, value in enumerate(objects):
            try:
                _serialized(serializer, topic, column, [value])
            except Exception as single:
                if not is_about_data(single):
                    raise
                raise SerializationError(topic, column, index, _reason(single)) from single
        # The serializer accepts each object on its own.
        raise SerializationError(topic, column, 0, _reason(error)) from error


def _serialized(serializer: Serializer[Any], topic: str, column: str, objects: list[Any]) -> list[bytes | None]:
    blobs = serializer.serialize(topic, objects)
    if len(blobs) != len(objects):
        why = f"{type(serializer).__name__} returned {len(blobs)} values for {len(objects)} objects"
        raise SerializationError(topic, column, 0, why)
    return blobs


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__
