"""One request in hand: who asks, on which connection, in which version; and how its answer becomes bytes."""

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
from segmentlog.server.fair_slots import Turn
from segmentlog.server.loop import step_aside
from segmentlog.server.request_budget import LOOK_S, AnswerBudget, ClientGone, Element, TopicOnce, itself, topics_once
from segmentlog.server.response_errors import errors_in
from segmentlog.server.response_queue import Later
from segmentlog.server.transport import Buffer

if TYPE_CHECKING:
    from segmentlog.server.broker import Broker
    from segmentlog.server.kafka_connection import Connection

TOO_MUCH: Final = ErrorCode.POLICY_VIOLATION
"""What is answered about elements that the answer has no room for. Clients do not try it again by themselves."""
TOO_MUCH_WORDS: Final = "the answer has no room for it: ask about fewer at a time"
_DESCRIBE_CONFIGS: Final = 32
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
    budget: AnswerBudget | None = None
    """What the answer may still hold; made when it is first asked for."""
    looks_s: float = 0.0
    """`time.monotonic` when `check_client` looks at the connection again."""
    has_scanned: bool = False
    """An id was looked for in the files of all topics."""

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

    # ------------------------------------------------------------ what a request may cost

    def check_client(self) -> None:
        """Raise `ClientGone` if the client has left, of which it makes sure every tenth of a second."""
        now_s = time.monotonic()
        if now_s >= self.looks_s:
            is_first, self.looks_s = not self.looks_s, now_s + LOOK_S
            if not is_first and self.is_left():
                raise ClientGone

    def each(self, elements: Iterable[Element]) -> Iterator[Element]:
        """The elements one after the other, for as long as the client is there. Raises `ClientGone`.

        For what may be stopped anywhere, because each element is done by itself: not for what clients send on their
        way out (produce, commits, leaving).
        """
        for element in elements:
            self.check_client()
            yield element

    def once(self, elements: Iterable[Element], key: Callable[[Element], Hashable] = itself) -> Iterator[Element]:
        """As `each`, but only the first of those elements that have the same ``key``: what is answered about them."""
        seen: set[Hashable] = set()
        for element in self.each(elements):
            what = key(element)
            if what not in seen:
                seen.add(what)
                yield element

    def topics_once(
        self, topics: Iterable[Element], parts: str, part_key: tuple[str, ...], *key: str
    ) -> Iterator[TopicOnce[Element]]:
        """As `once`, for what names topics and their partitions; the arguments are those of `topics_once`."""
        yield from self.each(topics_once(self.each(topics), parts, part_key, *key))

    def takes_room(self, elements: int, size_bytes: int = 0) -> bool:
        """Take room in the answer for so many elements, and so many bytes of text in them.

        False where there is too little: then the answer has `TOO_MUCH` in their place.
        """
        if self.budget is None:
            limits = self.broker.settings.limits
            self.budget = AnswerBudget(limits.answer_elements, limits.answer_bytes)
        return self.budget.take(elements, size_bytes)

    def words(self, text: str) -> str | None:
        """A message for the answer; None where the answer has no room for it."""
        return text if self.takes_room(0, len(text)) else None

    def explain(self, error: BaseException) -> str | None:
        """The message of an error, as `words`."""
        return self.words(message_of(error))

    def unpacking(self, *, is_stopped: bool = True) -> AbstractContextManager[Turn]:
        """A place for decompressing what clients wrote; waits for one. Raises `ClientGone` unless ``is_stopped`` is
        False, for what is done whether its client stays or not. Other connections do not wait with it.
        """
        step_aside()
        check = self.check_client if is_stopped else _go_on
        return self.broker.unpacking.place((self.principal, self.client_host), check)

    def topic_by_id(self, topic_id: bytes) -> tuple[str, str] | None:
        """Return (the topic's name now, its id as text); None when there is none with this id that clients may see.

        Pass the id on to whatever opens or changes the topic: the name may be another topic's a moment later.
        """
        ids = self.broker.topic_ids
        found = ids.known(topic_id)
        if found is None and not self.has_scanned:
            self.has_scanned = not ids.scan(topic_id)
            found = ids.known(topic_id)
        return found

    # ------------------------------------------------------------ the answer

    def encode(self, response: Any) -> Sequence[Buffer]:
        """The bytes of the answer, its length in front."""
        api = APIS[self.api_key]
        encode = api.codec.encode_response
        if self.api_key == _DESCRIBE_CONFIGS:
            encode = partial(encode_configs, encode)
        buffers = frame_response(api, self.version, self.correlation_id, encode(response, self.version))
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


def _go_on() -> None:
    """Wait, whoever has left."""


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
