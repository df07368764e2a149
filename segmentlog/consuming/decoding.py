"""Deserialize keys and values for a consumer, and handle records that cannot be deserialized."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from segmentlog.codecs import Deserializer, is_about_data
from segmentlog.errors import DeserializationError, InvalidConfig
from segmentlog.format.record_batch import RecordBatch

logger = logging.getLogger("segmentlog")

OnError = Literal["raise", "skip", "yield"]
"""What to do with a record that cannot be deserialized."""
OnBad = Literal["raise", "skip", "hand_over"]
"""Former name and values of `OnError`: "hand_over" means "yield"."""

_BAD_KEPT = 1000


class Undecodable(msgspec.Struct, frozen=True, gc=False):
    """Stands in for a key or value that cannot be deserialized, with ``on_error="yield"``."""

    data: bytes | None
    error: DeserializationError


class Decoding:
    """Deserializes the batches of a consumer."""

    def __init__(self, key: Deserializer[Any] | None, value: Deserializer[Any] | None, on_error: OnError) -> None:
        for name, deserializer in (("key_deserializer", key), ("deserializer", value)):
            if deserializer is not None and not callable(getattr(deserializer, "deserialize", None)):
                raise InvalidConfig(name, deserializer, "an object with a method `deserialize`, or None")
        self._key, self._value = key, value
        self._on_error = on_error
        self.bad: deque[DeserializationError] = deque(maxlen=_BAD_KEPT)
        """Errors of skipped records: the last 1,000."""

    def decoded(self, batch: RecordBatch) -> Iterator[RecordBatch[Any, Any]]:
        """Yield the records of a batch with deserialized keys and values, as one batch or several.

        ``on_error`` decides about a record that cannot be deserialized. "skip": the yielded batches omit the record.
        "raise": they end before it, and the call raises `DeserializationError`. "yield": they contain an `Undecodable`.
        """
        try:
            whole = batch.with_objects(
                _deserialized(self._key, batch.topic, batch.keys) if self._key else None,
                _deserialized(self._value, batch.topic, batch.values) if self._value else None,
            )
        except Exception as error:
            if not is_about_data(error):
                raise
        else:
            yield whole
            return
        errors: dict[int, DeserializationError] = {}
        whole = batch.with_objects(
            self._deserialize_singly(self._key, batch, "key", errors),
            self._deserialize_singly(self._value, batch, "value", errors),
        )
        if self._on_error == "yield":
            yield whole
            return
        begin = 0
        for index, bad in sorted(errors.items()):
            if index > begin:
                yield whole.slice(begin, index)
            if self._on_error == "raise":
                raise bad from bad.__cause__
            self.bad.append(bad)
            logger.warning("skipped: %s", bad)
            begin = index + 1
        if begin < len(whole):
            yield whole.slice(begin)

    def _deserialize_singly(
        self,
        deserializer: Deserializer[Any] | None,
        batch: RecordBatch,
        column: str,
        errors: dict[int, DeserializationError],
    ) -> list[Any] | None:
        """Deserialize a column item by item. A failure gives an `Undecodable`, and an error in ``errors``."""
        if deserializer is None:
            return None
        objects: list[Any] = []
        for index, blob in enumerate(batch.keys if column == "key" else batch.values):
            try:
                objects += _deserialized(deserializer, batch.topic, [blob])
            except Exception as cause:
                if not is_about_data(cause):
                    raise
                why = str(cause) or type(cause).__name__
                offset = int(batch.offsets[index])
                error = DeserializationError(batch.topic, batch.partition, offset, column, why, blob)
                error.__cause__ = cause
                errors.setdefault(index, error)
                objects.append(Undecodable(blob, error))
        return objects


def decoding_of(key: Deserializer[Any] | None, value: Deserializer[Any] | None, on_error: OnError) -> Decoding | None:
    """Return the `Decoding` for these options, if there is a deserializer. Raises `InvalidConfig`."""
    decoding = Decoding(key, value, on_error)
    return None if key is None and value is None else decoding


def on_error_of(on_error: OnError | None, on_bad: OnBad | None) -> OnError:
    """Return the value of ``on_error``, or of its former name ``on_bad``. Raises `InvalidConfig`."""
    if on_bad is None:
        if on_error is not None and (not isinstance(on_error, str) or on_error not in ("raise", "skip", "yield")):
            raise InvalidConfig("on_error", on_error, "'raise', 'skip' or 'yield'")
        return "raise" if on_error is None else on_error
    if on_error is not None:
        raise InvalidConfig("on_bad", on_bad, "give on_error only: on_bad is its former name")
    if not isinstance(on_bad, str) or on_bad not in ("raise", "skip", "hand_over"):
        raise InvalidConfig("on_bad", on_bad, "'raise', 'skip' or 'hand_over'")
    return "yield" if on_bad == "hand_over" else on_bad


def _deserialized(deserializer: Deserializer[Any], topic: str, blobs: list[bytes | None]) -> list[Any]:
    objects = list(deserializer.deserialize(topic, blobs))
    if len(objects) != len(blobs):
        raise ValueError(f"{type(deserializer).__name__} returned {len(objects)} objects for {len(blobs)} values")
    return objects
