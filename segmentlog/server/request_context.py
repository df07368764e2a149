"""Context of one request: client, connection, API version and limits; encodes the response."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec

from segmentlog.security.principals import ANONYMOUS, CLUSTER_NAME, Operation, Principal, ResourceType
from segmentlog.security.viewer import Thing, Viewer
from segmentlog.server.codec.apis import APIS
from segmentlog.server.codec.chunked_configs import encode_configs
from segmentlog.server.codec.framing import frame_response
from segmentlog.server.codec.kafka_errors import ErrorCode
from segmentlog.server.error_codes import message_of
from segmentlog.server.fair_slots import HeldSlot
from segmentlog.server.loop import step_aside
from segmentlog.server.request_budget import (
    CHECK_INTERVAL_S,
    AnswerBudget,
    ClientGone,
    Element,
    MergedTopic,
    identity,
    merge_topics,
)
from segmentlog.server.response_errors import collect_error_codes
from segmentlog.server.response_queue import PendingResponse
from segmentlog.server.transport import Buffer

if TYPE_CHECKING:
    from segmentlog.server.broker import Broker
    from segmentlog.server.kafka_connection import KafkaConnection

TOO_MUCH: Final = ErrorCode.POLICY_VIOLATION
"""Error code for elements that do not fit into the response. Clients do not retry after this code."""
TOO_MUCH_TEXT: Final = "the response is too large; request fewer elements at a time"
_DESCRIBE_CONFIGS: Final = 32
_JOINED_BYTES: Final = 4096
"""A first buffer up to this size is joined with the header, which saves the kernel a buffer."""


class RequestContext(msgspec.Struct, gc=False, kw_only=True):
    """Context of one request, passed to its handler. Not thread-safe."""

    broker: Broker
    api_key: int
    version: int
    client_id: str
    client_host: str
    principal: Principal = ANONYMOUS
    correlation_id: int = 0
    started_s: float = 0.0
    """`time.perf_counter` when the request had arrived."""
    connection: KafkaConnection | None = None
    budget: AnswerBudget | None = None
    """Room left in the response; created on first use."""
    next_check_s: float = 0.0
    """`time.monotonic` from which `check_client` checks the connection again."""
    has_scanned: bool = False
    """Whether this request has searched the files of all topics for an unknown topic id."""

    def allows(self, operation: Operation, resource: ResourceType, name: str) -> bool:
        """Return whether the client may perform this operation on the resource of this name."""
        return Viewer(self.broker.authorizer, self.principal, self.client_host).allows(operation, resource, name)

    def may_see(self, thing: Thing, name: str = "") -> bool:
        """Return whether the client may see the thing of this name."""
        return Viewer(self.broker.authorizer, self.principal, self.client_host).may_see(thing, name)

    def allows_topic(self, operation: Operation, name: str) -> bool:
        """Return whether the client may perform this operation on the topic."""
        return self.allows(operation, ResourceType.TOPIC, name)

    def allows_cluster(self, operation: Operation) -> bool:
        """Return whether the client may perform this operation on the cluster."""
        return self.allows(operation, ResourceType.CLUSTER, CLUSTER_NAME)

    def is_disconnected(self) -> bool:
        """Return whether the client has disconnected."""
        return self.connection is not None and self.connection.is_disconnected()

    # ------------------------------------------------------------ limits of a request

    def check_client(self) -> None:
        """Raise `ClientGone` if the client has disconnected. Check the socket at most every tenth of a second."""
        now_s = time.monotonic()
        if now_s >= self.next_check_s:
            is_first, self.next_check_s = not self.next_check_s, now_s + CHECK_INTERVAL_S
            if not is_first and self.is_disconnected():
                raise ClientGone

    def each(self, elements: Iterable[Element]) -> Iterator[Element]:
        """Yield the elements while the client is connected. Raise `ClientGone` when it has left.

        Only for requests that may stop between any two elements. Not for requests that clients send before they leave
        (produce, commits, leave group).
        """
        for element in elements:
            self.check_client()
            yield element

    def distinct(self, elements: Iterable[Element], key: Callable[[Element], Hashable] = identity) -> Iterator[Element]:
        """Like `each`, but yield only the first of the elements with the same ``key``, which get one answer."""
        seen: set[Hashable] = set()
        for element in self.each(elements):
            element_key = key(element)
            if element_key not in seen:
                seen.add(element_key)
                yield element

    def merged_topics(
        self, topics: Iterable[Element], parts: str, part_key: tuple[str, ...], *key: str
    ) -> Iterator[MergedTopic[Element]]:
        """Like `distinct`, for topics with partitions. The arguments are those of `merge_topics`."""
        yield from self.each(merge_topics(self.each(topics), parts, part_key, *key))

    def reserve_room(self, elements: int, size_bytes: int = 0) -> bool:
        """Reserve room in the response for ``elements``, and for ``size_bytes`` of text in them.

        If there is too little room, return False; the response then has `TOO_MUCH` in place of the elements.
        """
        if self.budget is None:
            limits = self.broker.settings.limits
            self.budget = AnswerBudget(limits.answer_elements, limits.answer_bytes)
        return self.budget.take(elements, size_bytes)

    def text_if_room(self, text: str) -> str | None:
        """Return ``text`` for the response; None if the response has no room for it."""
        return text if self.reserve_room(0, len(text)) else None

    def explain_error(self, error: BaseException) -> str | None:
        """Return the message of an error for the response; None if the response has no room for it."""
        return self.text_if_room(message_of(error))

    def decompression_slot(self, *, is_stopped: bool = True) -> AbstractContextManager[HeldSlot]:
        """Return a context manager that holds a slot for decompressing client data, after waiting for a free one.

        Raise `ClientGone` if the client leaves while it waits. With ``is_stopped=False`` continue to wait: for
        requests that the server must handle even after their client has left. Other connections are served meanwhile.
        """
        step_aside()
        check = self.check_client if is_stopped else _check_nothing
        return self.broker.decompression_slots.slot((self.principal, self.client_host), check)

    def topic_by_id(self, topic_id: bytes) -> tuple[str, str] | None:
        """Return (the topic's current name, its id as text), or None if clients can see no topic with this id.

        Pass the id to the call that opens or changes the topic: another topic may have the name a moment later.
        """
        ids = self.broker.topic_ids
        found = ids.lookup(topic_id)
        if found is None and not self.has_scanned:
            self.has_scanned = not ids.scan(topic_id)
            found = ids.lookup(topic_id)
        return found

    # ------------------------------------------------------------ response

    def encode(self, response: Any) -> Sequence[Buffer]:
        """Return the bytes of the response, length prefix included."""
        api = APIS[self.api_key]
        encode = api.codec.encode_response
        if self.api_key == _DESCRIBE_CONFIGS:
            encode = partial(encode_configs, encode)
        buffers = frame_response(api, self.version, self.correlation_id, encode(response, self.version))
        if len(buffers[1]) <= _JOINED_BYTES:
            buffers[:2] = (b"".join(buffers[:2]),)
        return buffers

    def count_request(self, response: Any) -> None:
        """Count the request in the metrics when it is answered; pass None if it gets no response."""
        meter, api = self.broker.meter, APIS[self.api_key].name
        if response is not None and (errors := collect_error_codes(response)):
            meter.count_errors(api, errors)
        meter.count_request(api, time.perf_counter() - self.started_s)

    def defer_response(self) -> DeferredResponse:
        """Return a deferred response, for a handler that must not block its connection; complete it in any thread."""
        assert self.connection is not None
        return DeferredResponse(self, PendingResponse(self.connection.responses))


def _check_nothing() -> None:
    """Check nothing, so that the wait continues even if the client has left."""


class DeferredResponse:
    """A response that a handler completes later. Call `complete` once, from any thread."""

    __slots__ = ("_call", "pending")

    def __init__(self, call: RequestContext, pending: PendingResponse) -> None:
        self._call = call
        self.pending = pending

    def complete(self, response: Any) -> None:
        """Count, encode and queue the response."""
        self._call.count_request(response)
        self.pending.complete(self._call.encode(response))
