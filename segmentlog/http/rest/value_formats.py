"""Formats of keys and values in requests and responses: base64, JSON, text and schemas.

JSON is stored byte for byte as the client sent it, so numbers of any length and the order of fields stay the same. Its
syntax is checked when it is stored, and again when it is read: other producers may have written to the topic.
"""

from __future__ import annotations

from base64 import b64encode
from typing import Any, Final, Literal, Protocol

import msgspec
from msgspec import Raw

FormatName = Literal["binary", "json", "avro", "jsonschema", "protobuf"]
NULL: Final = b"null"

_as_raw = msgspec.json.Decoder(Raw).decode


class SchemaWriter(Protocol):
    """Encodes data of one schema."""

    subject: str
    schema_id: int
    version: int
    format: str
    """avro, jsonschema or protobuf."""

    def encode(self, data: Any) -> bytes:
        """Return the schema's id and the encoded data. Raises ValueError if the schema does not allow them."""


class SchemaSelector(msgspec.Struct, frozen=True, kw_only=True):
    """Selects a schema by the fields that the client sent; the others are None."""

    format: str | None = None
    schema_id: int | None = None
    schema: str | None = None
    subject: str | None = None
    strategy: str | None = None
    version: int | None = None


class SchemaCodec(Protocol):
    """Encodes and decodes values by the schemas of a registry."""

    def writer(self, topic: str, selector: SchemaSelector, *, is_key: bool) -> SchemaWriter:
        """Return the writer of one schema, registering it if given in full. Raises `SegmentlogError`, ValueError."""

    def read(self, data: bytes) -> Any:
        """Decode data that begin with the id of their schema. Raises `SegmentlogError`, ValueError."""


def bytes_of_json(raw: Raw) -> bytes | None:
    """Return the bytes to store for a JSON value: its text; None for null."""
    data = bytes(raw)
    return None if data == NULL else data


def json_of_bytes(data: bytes | None) -> Raw | None:
    """Return stored bytes as a part of a JSON response. Raises ValueError if they are not JSON."""
    if data is None:
        return None
    if not data.isascii():
        data.decode()
    try:
        return _as_raw(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def text_of_bytes(data: bytes | None) -> str | None:
    """Return stored bytes as base64."""
    return None if data is None else b64encode(data).decode()
