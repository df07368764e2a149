"""Encoders and decoders of messages, compiled from the layouts when a version is first used.

Each function is straight-line code for one layout, as fast as code written by hand. As source files, the functions of
all versions had 26,000 lines. ``python -m tools.codec.show FetchRequest 12`` prints the source of a version, and
tracebacks show its lines. Thread-safe: two threads that compile the same version store equal functions.

Rejected: an interpreter of layouts. It is slower, so Fetch and Produce would need compiled code in addition.
"""

from __future__ import annotations

import linecache
import re
import struct
from collections.abc import Callable
from functools import cache
from typing import Any, Final, TypeVar

import msgspec

from segmentlog.server.codec import primitives
from segmentlog.server.codec.decoder_writer import write_decoder
from segmentlog.server.codec.encoder_writer import write_encoder
from segmentlog.server.codec.layouts import MessageLayout, layout_of
from segmentlog.server.codec.primitives import (
    TRUNCATED,
    Buffer,
    MalformedMessage,
    malformed,
    truncated,
    unknown_version,
)
from segmentlog.server.codec.source_lines import format_of

_M = TypeVar("_M", bound=msgspec.Struct)

_PRECOMPILED: Final = re.compile(r"\b_(pack|unpack|iter)_[a-zBx]+\b")
_METHODS: Final = {"pack": "pack", "unpack": "unpack_from", "iter": "iter_unpack"}
_version: Final = struct.Struct(">h")


def message_codec(
    message_class: type[_M],
) -> tuple[Callable[[memoryview, int, int], _M], Callable[[_M, int], list[Buffer]]]:
    """Return the decoder and the encoder of a message: see `decode` and `encode` below."""
    decoders: dict[int, Callable[[memoryview, int], _M]] = {}
    encoders: dict[int, Callable[[_M], list[Buffer]]] = {}
    name = message_class.__name__

    def decode(data: memoryview, at: int, version: int) -> _M:
        """Return the message that begins at ``at``. Raise `MalformedMessage` and `UnsupportedVersion`."""
        try:
            decode_version = decoders[version]
        except KeyError:
            decode_version = decoders[version] = _compiled(message_class, "decode", version)
        try:
            return decode_version(data, at)
        except TRUNCATED as problem:
            raise malformed(problem, name, version) from None

    def encode(message: _M, version: int) -> list[Buffer]:
        """Return the buffers of a message. Raise `NotInVersion` and `UnsupportedVersion`."""
        try:
            encode_version = encoders[version]
        except KeyError:
            encode_version = encoders[version] = _compiled(message_class, "encode", version)
        return encode_version(message)

    return decode, encode


def data_codec(
    message_class: type[_M],
) -> tuple[Callable[[memoryview], tuple[int, _M]], Callable[[_M, int], bytes]]:
    """Return the decoder and the encoder of data whose first bytes are their version: `decode` and `encode` below."""
    decode_body, encode_body = message_codec(message_class)
    name, versions = message_class.__name__, layout_of(message_class).versions

    def decode(data: memoryview) -> tuple[int, _M]:
        """Return (version, message). A version that is too new is decoded as the newest. Raise `MalformedMessage`."""
        if len(data) < _version.size:
            raise truncated()
        (version,) = _version.unpack_from(data, 0)
        if version < versions.start:
            raise MalformedMessage(f"{name} of version {version} is not supported")
        return version, decode_body(data, _version.size, min(version, versions[-1]))

    def encode(message: _M, version: int) -> bytes:
        """Return the bytes, beginning with the version. Raise `NotInVersion` and `UnsupportedVersion`."""
        return b"".join((_version.pack(version), *encode_body(message, version)))

    return decode, encode


def _compiled(message_class: type[msgspec.Struct], verb: str, version: int) -> Any:
    """Return the compiled function of a version. All versions with the same layout share one function."""
    layout = layout_of(message_class)
    if version not in layout.versions:
        raise unknown_version(layout.name, version) from None
    version = layout.first_alike(version)
    namespace = namespace_of(message_class)
    function = f"{verb}_{version}"
    if function not in namespace:
        source = source_of(layout, verb, version)
        file_name = f"<{verb} {layout.name} {version}>"
        linecache.cache[file_name] = (len(source), None, source.splitlines(keepends=True), file_name)
        for match in _PRECOMPILED.finditer(source):
            method = getattr(struct.Struct(format_of(match[0])), _METHODS[match[1]])
            namespace.setdefault(match[0], method)
        exec(compile(source, file_name, "exec"), namespace)
    return namespace[function]


def source_of(layout: MessageLayout, verb: str, version: int) -> str:
    """Return the source of the function ``decode_VERSION`` or ``encode_VERSION``, and of the functions it calls."""
    if verb == "decode":
        lines = [f"def decode_{version}(data, at):", *write_decoder(layout, version)]
    else:
        body, helpers = write_encoder(layout, version)
        lines = [*helpers, f"def encode_{version}(message):", *body]
    return "\n".join(lines) + "\n"


@cache
def namespace_of(message_class: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the global names of the compiled functions of a message: its classes, `primitives`, `struct`."""
    classes = {one.name: one.message_class for one in layout_of(message_class).structs}
    return {**vars(primitives), "pack": struct.pack, "unpack_from": struct.unpack_from, **classes}
