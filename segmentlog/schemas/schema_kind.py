"""What every kind of schema has in common."""

from __future__ import annotations

from typing import Any, Final, NamedTuple, Protocol

import msgspec

from segmentlog.schemas.registry_errors import InvalidSchema

TYPES: Final = ("AVRO", "JSON", "PROTOBUF")


class Dependency(NamedTuple):
    """A schema that another one refers to, and the name by which it does."""

    name: str
    text: str


class ParsedSchema(Protocol):
    """A schema that was read, with all that it refers to."""

    @property
    def canonical(self) -> str:
        """Its text without what does not count, white space say; what is stored."""

    def normalized(self) -> str:
        """The same with what may stand in any order sorted, so that more texts are one schema."""

    def formatted(self, shape: str) -> str:
        """Its text in a form that somebody asks for. Raises `InvalidSchema` for one that there is not."""

    def why_unreadable(self, written: ParsedSchema) -> list[str]:
        """What keeps a reader with this schema from what was written with another one of the same type. Empty: nothing.

        Each is ``{errorType:'..', description:'..'}``, as people know it from Confluent's registry.
        """


def decode_json(text: str, what: str) -> Any:
    """A JSON document. Raises `InvalidSchema`."""
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise InvalidSchema(f"Invalid schema: the {what} is not JSON: {error}") from None


def encode_json(document: object) -> str:
    """As short as JSON is; names in the order that they have."""
    return msgspec.json.encode(document).decode()


def sorted_json(document: object) -> str:
    """The same with names in order."""
    return msgspec.json.encode(document, order="sorted").decode()
