"""APIs of Kafka's protocol: their keys, versions and modules."""

from __future__ import annotations

from functools import cached_property
from importlib import import_module
from typing import Any, Final, Protocol, cast

from segmentlog.server.codec.generated import FACTS
from segmentlog.server.codec.primitives import Buffer

API_VERSIONS_KEY: Final = 18


class Codec(Protocol):
    """Functions of a module of `generated`, beside its classes. Their docstrings name the errors that they raise."""

    def decode_request(self, data: memoryview, at: int, version: int) -> Any:
        """The request that begins at ``at``."""

    def encode_request(self, message: Any, version: int) -> list[Buffer]:
        """Its bytes."""

    def decode_response(self, data: memoryview, at: int, version: int) -> Any:
        """The response that begins at ``at``."""

    def encode_response(self, message: Any, version: int) -> list[Buffer]:
        """Its bytes."""


class Api:
    """An API, with the versions that the codec has of it.

    key                        its number
    name                       as Kafka spells it, `ListOffsets`
    min_version, max_version   without versions that Kafka calls unstable
    flexible_from              the first version with compact sizes and tagged fields; None if there is none
    """

    def __init__(self, key: int, name: str, module: str, versions: tuple[int, int], flexible_from: int | None) -> None:
        self.key, self.name = key, name
        self.min_version, self.max_version = versions
        self.flexible_from = flexible_from
        self._module = module

    def __repr__(self) -> str:
        return f"<Api {self.key} {self.name} {self.min_version}-{self.max_version}>"

    @cached_property
    def codec(self) -> Codec:
        """Its module, imported when it is first asked for: all of them take longer than a server may take to start."""
        return cast(Codec, import_module(f"segmentlog.server.codec.generated.{self._module}"))

    def is_flexible(self, version: int) -> bool:
        """Whether messages of this version have compact sizes and tagged fields."""
        return self.flexible_from is not None and version >= self.flexible_from

    def has_tagged_response_header(self, version: int) -> bool:
        """Whether the header of a response has tagged fields.

        That of ApiVersions never has: a client that reads it does not know yet what the server speaks.
        """
        return self.key != API_VERSIONS_KEY and self.is_flexible(version)


APIS: Final = {
    key: Api(key, name, module, (min_version, max_version), flexible_from)
    for key, name, module, min_version, max_version, flexible_from in FACTS
}
"""All of them by key."""
