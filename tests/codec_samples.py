"""Random messages of every API and version, and their codecs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from pkgutil import iter_modules
from random import Random
from typing import Any, Final, NamedTuple

from segmentlog.server.codec import generated
from segmentlog.server.codec.layouts import FieldLayout, MessageLayout, StructLayout, layout_of
from tools.codec.generate import snake


def _messages() -> Iterator[MessageLayout]:
    for found in iter_modules(generated.__path__):
        for value in vars(import_module(f"{generated.__name__}.{found.name}")).values():
            if hasattr(value, "VERSIONS"):
                yield layout_of(value)


MESSAGES: Final = {message.name: message for message in sorted(_messages(), key=lambda message: message.name)}
"""The layouts of all messages, by name."""

_STRINGS: Final = ("", "a", "orders", "grüße-日本", "t" * 126, "t" * 127, "t" * 128, "consumer-1-" * 30)
_RANGES: Final = {"int8": 7, "int16": 15, "int32": 31, "int64": 63}


class Codec(NamedTuple):
    """Encoder and decoder of one version of a message."""

    module: Any
    decode: Callable[[memoryview], Any]
    encode: Callable[[Any], bytes]


def every_version() -> Iterator[tuple[str, int]]:
    """Yield each message's name with each of its versions."""
    for name, message in MESSAGES.items():
        for version in message.versions:
            yield name, version


def codec_of(name: str, version: int) -> Codec:
    """Return the codec of a message. The bytes of a data message begin with its version."""
    message = MESSAGES[name]
    if message.kind == "data":
        module = import_module("segmentlog.server.codec.generated.consumer_protocol")
        word = snake(name.removeprefix("ConsumerProtocol"))
        decode, encode = getattr(module, f"decode_{word}"), getattr(module, f"encode_{word}")
        return Codec(module, lambda data: decode(data)[1], lambda value: encode(value, version))
    api = snake(name.removesuffix("Request").removesuffix("Response"))
    module = import_module(f"segmentlog.server.codec.generated.{api}")
    decode, encode = getattr(module, f"decode_{message.kind}"), getattr(module, f"encode_{message.kind}")
    return Codec(module, lambda data: decode(data, 0, version), lambda value: b"".join(encode(value, version)))


def sample(name: str, version: int, random: Random, most: int = 3) -> Any:
    """Return a message with a value in every field of the version; arrays have up to ``most`` elements."""
    module = codec_of(name, version).module
    return _struct(module, MESSAGES[name].struct, version, random, most)


def _struct(module: Any, struct: StructLayout, version: int, random: Random, most: int) -> Any:
    values = {
        field.name: _field(module, field, version, random, most) for field in struct.fields if version in field.versions
    }
    return getattr(module, struct.name)(**values)


def _field(module: Any, field: FieldLayout, version: int, random: Random, most: int) -> Any:
    if version in field.nullable and random.random() < 0.2:
        return None
    if field.stands_for_default and random.random() < 0.4:
        return None
    if not field.is_array:
        made = _one(module, field, version, random, most)
        # An encoder omits a tagged struct that has only defaults, and a decoder returns None for it.
        return None if field.stands_for_default and made == type(made)() else made
    count = random.randint(0, most)
    if field.struct is None and most and random.random() < 0.05:
        count = 130
    return [_one(module, field, version, random, most) for _ in range(count)]


def _one(module: Any, field: FieldLayout, version: int, random: Random, most: int) -> Any:
    if field.struct is not None:
        return _struct(module, field.struct, version, random, most)
    if field.kind in _RANGES:
        bits = _RANGES[field.kind]
        return random.choice((0, -1, 1, 2**bits - 1, -(2**bits), random.randint(-(2**bits), 2**bits - 1)))
    if field.kind == "bool":
        return random.random() < 0.5
    if field.kind == "string":
        return random.choice(_STRINGS)
    if field.kind == "uuid":
        return random.choice((bytes(16), random.randbytes(16)))
    return random.randbytes(random.choice((0, 1, 126, 127, 128, 300)))
