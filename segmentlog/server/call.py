"""One request in hand: who asks, on which connection, in which version; and how its answer becomes bytes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from segmentlog.security.principals import ANONYMOUS, CLUSTER_NAME, Operation, Principal, ResourceType
from segmentlog.security.viewer import Thing, Viewer
from segmentlog.server.codec.apis import APIS
from segmentlog.server.codec.framing import frame_response
from segmentlog.server.outbox import Later
from segmentlog.server.outcomes import errors_in
from segmentlog.server.transport import Buffer

if TYPE_CHECKING:
    from segmentlog.server.broker import Broker
    from segmentlog.server.connection import Connection

_JOINED_BYTES: Final = 4096
"""A first buffer up to this size is joined with the head: one less for the kernel."""


class Call(msgspec.Struct, gc=False, kw_only=True):
    """What a handler is told beside the request itself. It belongs to one thread."""

    broker: Broker
    api_key: int
    version: int
    client_id: str
    client_host: str
    principal: Principal = ANONYMOUS
    correlation_id: int = 0
    started_s: float = 0.0
    """`time.perf_counter` when its bytes were there."""
    connection: Connection | None = None

    def allows(self, operation: Operation, resource: ResourceType, name: str) -> bool:
        """Whether who asks may do that to the resource of this name."""
        return Viewer(self.broker.authorizer, self.principal, self.client_host).allows(operation, resource, name)

    def may_see(self, thing: Thing, name: str = "") -> bool:
        """Whether who asks may see the thing of this name."""
        return Viewer(self.broker.authorizer, self.principal, self.client_host).may_see(thing, name)

    def allows_topic(self, operation: Operation, name: str) -> bool:
        """The same for a topic."""
        return self.allows(operation, ResourceType.TOPIC, name)

    def allows_cluster(self, operation: Operation) -> bool:
        """The same for the cluster."""
        return self.allows(operation, ResourceType.CLUSTER, CLUSTER_NAME)

    def is_left(self) -> bool:
        """Whether nobody waits for the answer any more."""
        return self.connection is not None and self.connection.is_left()

    def encode(self, response: Any) -> Sequence[Buffer]:
        """The bytes of the answer, its length in front."""
        api = APIS[self.api_key]
        buffers = frame_response(
            api, self.version, self.correlation_id, api.codec.encode_response(response, self.version)
        )
        if len(buffers[1]) <= _JOINED_BYTES:
            buffers[:2] = (b"".join(buffers[:2]),)
        return buffers

    def note(self, response: Any) -> None:
        """Count the request, which is answered now; None: nobody is told anything."""
        meter, api = self.broker.meter, APIS[self.api_key].name
        if response is not None and (errors := errors_in(response)):
            meter.errors(api, errors)
        meter.request(api, time.perf_counter() - self.started_s)

    def answer_later(self) -> PendingAnswer:
        """For a handler that is not to keep its connection waiting: it returns this, and somebody completes it."""
        assert self.connection is not None
        return PendingAnswer(self, Later(self.connection.outbox))


class PendingAnswer:
    """An answer that waits for something. `complete` it once, from any thread."""

    __slots__ = ("_call", "later")

    def __init__(self, call: Call, later: Later) -> None:
        self._call = call
        self.later = later

    def complete(self, response: Any) -> None:
        """Send it when its turn comes."""
        self._call.note(response)
        self.later.complete(self._call.encode(response))
