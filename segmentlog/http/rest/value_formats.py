"""Keys and values inside of requests and answers: base64, JSON, text, and what a schema describes.

JSON is kept byte for byte as it came: numbers of any length and the order of fields survive, and nothing is encoded
anew. That it is JSON is checked on the way in, and once more on the way out: others may have written to the topic.
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
    """Encodes what one schema describes."""

    subject: str
    schema_id: int
    version: int
    format: str
    """avro, jsonschema or protobuf."""

    def encode(self, data: Any) -> bytes:
        """The schema's id and the data. Raises ValueError for data that is not as the schema says."""


class SchemaWish(msgspec.Struct, frozen=True, kw_only=True):
    """How a client says which schema it means; what it does not say is None."""

    format: str | None = None
    schema_id: int | None = None
    schema: str | None = None
    subject: str | None = None
    strategy: str | None = None
    version: int | None = None


class Schemas(Protocol):
    """What a schema registry does for the formats that need one."""

    def writer(self, topic: str, wish: SchemaWish, *, is_key: bool) -> SchemaWriter:
        """For one schema, which is registered if it was given in full. Raises `SegmentlogError`, ValueError."""

    def read(self, data: bytes) -> Any:
        """A document for JSON, by the schema whose id the bytes begin with. Raises `SegmentlogError`, ValueError."""


def bytes_of_json(raw: Raw) -> bytes | None:
    """What is appended of a JSON value: its text; null is a null."""
    data = bytes(raw)
    return None if data == NULL else data


def json_of_bytes(data: bytes | None) -> Raw | None:
    """The text as a part of an answer. Raises ValueError where it is no JSON."""
    if data is None:
        return None
    if not data.isascii():
        data.decode()
    try:
        return _as_raw(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def text_of_bytes(data: bytes | None) -> str | None:
    """As base64."""
    return None if data is None else b64encode(data).decode()
