"""Table of the APIs of Kafka's protocol: keys, versions and codecs."""

from __future__ import annotations

from functools import cached_property
from importlib import import_module
from typing import Any, Final, Protocol, cast

from segmentlog.server.codec.generated import FACTS
from segmentlog.server.codec.primitives import Buffer

API_VERSIONS_KEY: Final = 18


class MessageCodec(Protocol):
    """The functions of each module in `generated`. Their docstrings name the errors that they raise."""

    def decode_request(self, data: memoryview, at: int, version: int) -> Any:
        """Return the request that begins at ``at``."""

    def encode_request(self, message: Any, version: int) -> list[Buffer]:
        """Return the bytes of a request."""

    def decode_response(self, data: memoryview, at: int, version: int) -> Any:
        """Return the response that begins at ``at``."""

    def encode_response(self, message: Any, version: int) -> list[Buffer]:
        """Return the bytes of a response."""


class Api:
    """An API, with the versions that the codec supports.

    key                        its number
    name                       in Kafka's spelling, such as `ListOffsets`
    min_version, max_version   without versions that Kafka calls unstable
    flexible_from              first version with compact sizes and tagged fields; None if there is none
    """

    def __init__(self, key: int, name: str, module: str, versions: tuple[int, int], flexible_from: int | None) -> None:
        self.key, self.name = key, name
        self.min_version, self.max_version = versions
        self.flexible_from = flexible_from
        self._module = module

    def __repr__(self) -> str:
        return f"<Api {self.key} {self.name} {self.min_version}-{self.max_version}>"

    @cached_property
    def codec(self) -> MessageCodec:
        """Module of the API, imported on first use: importing all of them would delay the start of a server."""
        return cast(MessageCodec, import_module(f"segmentlog.server.codec.generated.{self._module}"))

    def is_flexible(self, version: int) -> bool:
        """Return whether messages of this version have compact sizes and tagged fields."""
        return self.flexible_from is not None and version >= self.flexible_from

    def has_tagged_response_header(self, version: int) -> bool:
        """Return whether the header of a response has tagged fields.

        Always false for ApiVersions: its client does not know the server's versions yet.
        """
        return self.key != API_VERSIONS_KEY and self.is_flexible(version)


APIS: Final = {
    key: Api(key, name, module, (min_version, max_version), flexible_from)
    for key, name, module, min_version, max_version, flexible_from in FACTS
}
"""All APIs by key."""
