"""Decode a request, call its handler, and encode the response.

Each handler is imported with its first request, so that a server starts quickly.
"""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from segmentlog.server.api_table import API_VERSIONS, HANDLERS
from segmentlog.server.codec.apis import APIS, Api
from segmentlog.server.codec.framing import RequestHeader, decode_header
from segmentlog.server.codec.primitives import MalformedMessage
from segmentlog.server.frames import BadFrame
from segmentlog.server.kafka_connection import KafkaConnection
from segmentlog.server.request_context import DeferredResponse, RequestContext
from segmentlog.server.response_queue import Answer

if TYPE_CHECKING:
    from segmentlog.server.broker import Broker

logger = logging.getLogger("segmentlog.server")

Handler = Callable[[RequestContext, Any], Any]
"""Return the response to a request; a `DeferredResponse` that completes later; or None if no response is due."""

_FETCH: Final = 1
_ANSWER_MAX_BYTES: Final = 128 << 20
"""Maximum size of a response. It has room for the elements and bytes that a handler may describe
(`Limits.answer_elements`, `Limits.answer_bytes`) and a copy of the largest request. It also limits handlers that
reserve no room."""
_OF_SASL: Final = frozenset((17, 36))


class Dispatcher:
    """Handles the requests of all connections of a broker. Thread-safe."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._handlers: dict[int, Handler] = {}

    def handle(self, connection: KafkaConnection, frame: memoryview) -> Answer:
        """Handle one request and return its response.

        Raise `BadFrame` if the request cannot be answered; the caller then closes the connection.
        """
        sasl = connection.sasl
        if sasl is not None and sasl.takes_raw_tokens:
            answer = sasl.answer_raw(frame)
            connection.apply_sasl_state()  # ends the connection if authentication has failed
            return answer
        started_s = time.perf_counter()
        try:
            header = decode_header(frame)
        except MalformedMessage as error:
            raise BadFrame(f"malformed request header: {error}") from None
        api = APIS.get(header.api_key)
        if api is None or header.api_key not in HANDLERS:
            raise BadFrame(f"unsupported API key {header.api_key}")
        connection.client_id = client_id = header.client_id or ""
        call = RequestContext(
            broker=self._broker,
            api_key=header.api_key,
            version=header.api_version,
            client_id=client_id,
            client_host=connection.client_host,
            principal=connection.principal,
            correlation_id=header.correlation_id,
            started_s=started_s,
            connection=connection,
            next_check_s=-1.0 if connection.has_left else 0.0,  # -1: the first check reads the socket at once
        )
        if sasl is not None and not sasl.permits(header.api_key):
            raise BadFrame(f"the client sent a {api.name} request before it was authenticated")
        response = self._respond(call, api, header, frame)
        if sasl is not None and header.api_key in _OF_SASL:
            connection.apply_sasl_state()
        if isinstance(response, DeferredResponse):
            return response.pending
        call.count_request(response)
        if response is None:
            return None
        buffers = call.encode(response)
        size = sum(len(buffer) for buffer in buffers)
        if size > _ANSWER_MAX_BYTES and header.api_key != _FETCH:  # a fetch has its own bound
            raise BadFrame(f"the {api.name} response has {size} bytes; at most {_ANSWER_MAX_BYTES} are sent")
        return buffers

    def _respond(self, call: RequestContext, api: Api, header: RequestHeader, frame: memoryview) -> Any:
        if not api.min_version <= header.api_version <= api.max_version:
            if header.api_key == API_VERSIONS:
                from segmentlog.server.handlers.api_versions import unsupported_version

                call.version = 0
                return unsupported_version(call)
            raise BadFrame(
                f"unsupported version {header.api_version} of {api.name}; "
                f"supported: {api.min_version} to {api.max_version}"
            )
        try:
            request = api.codec.decode_request(frame, header.body_at, header.api_version)
        except MalformedMessage as error:
            raise BadFrame(f"malformed {api.name} request, version {header.api_version}: {error}") from None
        return self._handler(header.api_key)(call, request)

    def _handler(self, api_key: int) -> Handler:
        handler = self._handlers.get(api_key)
        if handler is None and self._broker.cluster.is_standby:
            from segmentlog.server.handlers.standby_refusals import REFUSALS

            handler = REFUSALS.get(api_key)
            if handler is not None:
                self._handlers[api_key] = handler
        if handler is None:
            module, _, name = HANDLERS[api_key].partition(":")
            handler = getattr(importlib.import_module(f"segmentlog.server.handlers.{module}"), name)
            self._handlers[api_key] = handler
        return handler
