"""Serializers and deserializers of producers and consumers: their interfaces, and ready-made ones.

    codec = json_codec(Click)                      # a msgspec Struct, a dataclass, a pydantic model, a dict...
    store.producer(serializer=codec, key_serializer=text_codec())
    store.consumer("clicks", deserializer=codec, key_deserializer=text_codec())

They process lists. None is a null key or a tombstone: it is serialized to None, and None is deserialized to None.
"""

from __future__ import annotations

import codecs as encodings
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar, cast, overload

import msgspec

from segmentlog.errors import InvalidConfig, SegmentlogError

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
T_contra = TypeVar("T_contra", contravariant=True)


class Serializer(Protocol[T_contra]):
    """Converts keys or values to bytes. Called by the thread that sends."""

    def serialize(self, topic: str, values: Sequence[T_contra | None]) -> list[bytes | None]:
        """Return one result per value, in order. The result for None is None.

        If an exception is about an object, the producer raises `SerializationError` with the object's index. It raises
        other exceptions unchanged: OSError, and a `SegmentlogError` that is neither ValueError nor TypeError.
        """


class Deserializer(Protocol[T_co]):
    """Converts bytes to keys or values. Called by the thread that reads."""

    def deserialize(self, topic: str, data: Sequence[bytes | None]) -> Sequence[T_co]:
        """Return one result per item, in order. The result for None is None.

        If an exception is about the bytes, ``on_error`` decides: by default the consumer raises
        `DeserializationError`. It raises other exceptions unchanged, as for a `Serializer`, and keeps its position.
        """


def is_about_data(error: Exception) -> bool:
    """Return whether an exception of a serializer is about an object or its bytes."""
    return not isinstance(error, SegmentlogError | OSError) or isinstance(error, ValueError | TypeError)


class Codec(Generic[T]):
    """A serializer and deserializer that calls a function for each object. The functions never get None."""

    def __init__(self, encode: Callable[[T], bytes], decode: Callable[[bytes], T]) -> None:
        self.encode, self.decode = encode, decode

    def serialize(self, topic: str, values: Sequence[T | None]) -> list[bytes | None]:
        """Serialize values; see `Serializer`."""
        encode = self.encode
        return [None if value is None else encode(value) for value in values]

    def deserialize(self, topic: str, data: Sequence[bytes | None]) -> list[T | None]:
        """Deserialize values; see `Deserializer`."""
        decode = self.decode
        return [None if blob is None else decode(blob) for blob in data]


def text_codec(encoding: str = "utf-8") -> Codec[str]:
    """Return a codec that encodes and decodes texts. Raises `InvalidConfig` for an unknown encoding."""
    try:
        encodings.lookup(encoding)
    except (LookupError, TypeError) as error:
        raise InvalidConfig("encoding", encoding, "the name of a text encoding") from error

    def encode(text: str) -> bytes:
        if not isinstance(text, str):
            raise TypeError(f"expected a str, found {type(text).__name__}")
        return text.encode(encoding)

    return Codec(encode, lambda blob: blob.decode(encoding))


@overload
def json_codec(kind: type[T], *, strict: bool = True) -> Codec[T]: ...
@overload
def json_codec(kind: Any = None, *, strict: bool = True) -> Codec[Any]: ...
def json_codec(kind: Any = Any, *, strict: bool = True) -> Codec[Any]:
    """Return a codec for JSON. While reading, it checks values against a type.

    The type may be a msgspec Struct, dataclass, pydantic model, dict and so on. Without a type, any JSON is accepted.
    ``strict=False`` also accepts "1" for 1 and similar values. Pydantic checks its models by its own rules. Written
    values are not checked against the type.
    """
    if (adapter := _pydantic_adapter(kind)) is not None:
        return Codec(
            lambda value: cast("bytes", adapter.dump_json(value, warnings="error")),
            lambda blob: adapter.validate_json(blob, strict=None if strict else False),
        )
    decoder = _create_for(kind, lambda: msgspec.json.Decoder(kind, strict=strict))
    return Codec(msgspec.json.Encoder().encode, decoder.decode)


@overload
def msgpack_codec(kind: type[T], *, strict: bool = True) -> Codec[T]: ...
@overload
def msgpack_codec(kind: Any = None, *, strict: bool = True) -> Codec[Any]: ...
def msgpack_codec(kind: Any = Any, *, strict: bool = True) -> Codec[Any]:
    """Return a codec for MessagePack. It checks values as `json_codec` does."""
    if (adapter := _pydantic_adapter(kind)) is not None:
        encode, decode = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder().decode
        return Codec(
            lambda value: encode(adapter.dump_python(value, mode="python", warnings="error")),
            lambda blob: adapter.validate_python(decode(blob), strict=None if strict else False),
        )
    decoder = _create_for(kind, lambda: msgspec.msgpack.Decoder(kind, strict=strict))
    return Codec(msgspec.msgpack.Encoder().encode, decoder.decode)


def _create_for(kind: object, make: Callable[[], T]) -> T:
    try:
        return make()
    except TypeError as error:
        expected = f"a type that msgspec reads, or a pydantic model: {error}"
        raise InvalidConfig("kind", kind, expected) from error


def _pydantic_adapter(kind: Any) -> Any:
    """Return the adapter of a pydantic model or dataclass; None for other types, without importing pydantic."""
    if not (hasattr(kind, "__pydantic_validator__") or hasattr(kind, "__pydantic_generic_metadata__")):
        return None
    from pydantic import TypeAdapter

    return TypeAdapter(kind)
