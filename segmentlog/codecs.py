"""From objects to bytes and back: what producers and consumers are given as serializers, and ready-made ones.

    codec = json_codec(Click)                      # a msgspec Struct, a dataclass, a pydantic model, a dict...
    store.producer(serializer=codec, key_serializer=text_codec())
    store.consumer("clicks", deserializer=codec, key_deserializer=text_codec())

They are asked for a list at a time. None is a null key or a tombstone, and stays None.
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
    """Makes bytes of keys or values. Called by whatever thread sends."""

    def serialize(self, topic: str, values: Sequence[T_contra | None]) -> list[bytes | None]:
        """As many as it is given, in their order; None of None.

        What it raises for an object that it does not take is told as `SerializationError`, with its index. An OSError,
        or a `SegmentlogError` that is no ValueError nor TypeError, is about something else, and raised as it is.
        """


class Deserializer(Protocol[T_co]):
    """Makes keys or values of bytes. Called by whatever thread reads."""

    def deserialize(self, topic: str, data: Sequence[bytes | None]) -> Sequence[T_co]:
        """As many as it is given, in their order; None of None.

        What it raises for bytes that it does not take is told as `DeserializationError`, or as ``on_error`` says; what
        is about something else, as with a `Serializer`, is raised as it is, and the consumer's position stays.
        """


def is_about_data(error: Exception) -> bool:
    """Whether what a serializer raised says that an object, or its bytes, are wrong."""
    return not isinstance(error, SegmentlogError | OSError) or isinstance(error, ValueError | TypeError)


class Codec(Generic[T]):
    """Both of them, from two functions for a single object. None never reaches these."""

    def __init__(self, encode: Callable[[T], bytes], decode: Callable[[bytes], T]) -> None:
        self.encode, self.decode = encode, decode

    def serialize(self, topic: str, values: Sequence[T | None]) -> list[bytes | None]:
        """See `Serializer`."""
        encode = self.encode
        return [None if value is None else encode(value) for value in values]

    def deserialize(self, topic: str, data: Sequence[bytes | None]) -> list[T | None]:
        """See `Deserializer`."""
        decode = self.decode
        return [None if blob is None else decode(blob) for blob in data]


def text_codec(encoding: str = "utf-8") -> Codec[str]:
    """Texts."""
    try:
        encodings.lookup(encoding)
    except (LookupError, TypeError) as error:
        raise InvalidConfig("encoding", encoding, "an encoding of texts") from error

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
    """JSON, checked against a type when it is read: a msgspec Struct, a dataclass, a pydantic model, a dict.

    Without a type anything that JSON has. ``strict=False`` also takes "1" for 1 and the like. A pydantic model is
    checked by pydantic, by its own rules. What is written is not checked against the type.
    """
    if (adapter := _pydantic_adapter(kind)) is not None:
        return Codec(
            lambda value: cast("bytes", adapter.dump_json(value, warnings="error")),
            lambda blob: adapter.validate_json(blob, strict=None if strict else False),
        )
    decoder = _made_for(kind, lambda: msgspec.json.Decoder(kind, strict=strict))
    return Codec(msgspec.json.Encoder().encode, decoder.decode)


@overload
def msgpack_codec(kind: type[T], *, strict: bool = True) -> Codec[T]: ...
@overload
def msgpack_codec(kind: Any = None, *, strict: bool = True) -> Codec[Any]: ...
def msgpack_codec(kind: Any = Any, *, strict: bool = True) -> Codec[Any]:
    """MessagePack, checked as `json_codec` checks JSON."""
    if (adapter := _pydantic_adapter(kind)) is not None:
        encode, decode = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder().decode
        return Codec(
            lambda value: encode(adapter.dump_python(value, mode="python", warnings="error")),
            lambda blob: adapter.validate_python(decode(blob), strict=None if strict else False),
        )
    decoder = _made_for(kind, lambda: msgspec.msgpack.Decoder(kind, strict=strict))
    return Codec(msgspec.msgpack.Encoder().encode, decoder.decode)


def _made_for(kind: object, make: Callable[[], T]) -> T:
    try:
        return make()
    except TypeError as error:
        wanted = f"a type that msgspec reads, or a pydantic model: {error}"
        raise InvalidConfig("kind", kind, wanted) from error


def _pydantic_adapter(kind: Any) -> Any:
    """What reads and writes a pydantic model or dataclass; None for all else. Loads nothing: they bring it along."""
    if not (hasattr(kind, "__pydantic_validator__") or hasattr(kind, "__pydantic_generic_metadata__")):
        return None
    from pydantic import TypeAdapter

    return TypeAdapter(kind)
