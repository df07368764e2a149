"""The interface of parsed schemas, common to all schema types."""

from __future__ import annotations

from typing import Any, Final, NamedTuple, Protocol

import msgspec

from segmentlog.schemas.registry_errors import InvalidSchema

TYPES: Final = ("AVRO", "JSON", "PROTOBUF")


class Dependency(NamedTuple):
    """A schema that another schema refers to, and the name in the reference."""

    name: str
    text: str


class ParsedSchema(Protocol):
    """A parsed schema, with all schemas that it refers to."""

    @property
    def canonical(self) -> str:
        """The schema's text without insignificant parts such as white space. The registry stores this text."""

    def normalized(self) -> str:
        """Return the canonical text, with every list sorted whose order has no meaning."""

    def formatted(self, shape: str) -> str:
        """Return the schema's text in a named format. Raises `InvalidSchema` for an unknown format."""

    def why_unreadable(self, written: ParsedSchema) -> list[str]:
        """Return why a reader with this schema cannot read data of ``written``; empty if it can.

        Both schemas must have the same type. Each reason is ``{errorType:'..', description:'..'}``, the format of
        Confluent's registry.
        """


def decode_json(text: str, what: str) -> Any:
    """Parse a JSON document. Raises `InvalidSchema` with ``what``, the name of the document."""
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise InvalidSchema(f"Invalid schema: the {what} is not JSON: {error}") from None


def encode_json(document: object) -> str:
    """Return a document as compact JSON; names keep their order."""
    return msgspec.json.encode(document).decode()


def sorted_json(document: object) -> str:
    """Return a document as compact JSON with names sorted."""
    return msgspec.json.encode(document, order="sorted").decode()
