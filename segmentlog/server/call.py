"""One request in hand: who asks, on which connection, in which version."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from segmentlog.server.security.principals import Operation, Principal, ResourceType

if TYPE_CHECKING:
    from segmentlog.server.broker import Broker

ANONYMOUS: Final = Principal("User", "ANONYMOUS")


class Call(msgspec.Struct, gc=False):
    """What a handler is told beside the request itself. It belongs to one thread."""

    broker: Broker
    api_key: int
    version: int
    client_id: str
    client_host: str
    principal: Principal = ANONYMOUS

    def allows(self, operation: Operation, resource: ResourceType, name: str) -> bool:
        """Whether who asks may do that to the resource of this name."""
        return self.broker.authorizer.allows(self.principal, self.client_host, operation, resource, name)
