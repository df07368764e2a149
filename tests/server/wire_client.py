"""A client of Kafka's protocol for tests: any API in any version, pipelined, cut in pieces, or no request at all.

    with WireClient(server.bootstrap_servers) as client:
        answer = client.ask(3, 12, MetadataRequest(topics=None))     one request and its answer
        numbers = [client.send(...), client.send(...)]; client.answer(); client.answer()
        client.raw(b"whatever")                                       bytes as they are

`Desk` is the same without sockets: a dispatcher asked by hand, with an answer that is complete when it returns.
"""

from __future__ import annotations

import contextlib
import importlib
import socket
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

from segmentlog.security.principals import ANONYMOUS, Principal
from segmentlog.server.broker import Broker
from segmentlog.server.codec.apis import APIS
from segmentlog.server.codec.framing import decode_response_header, frame_request
from segmentlog.server.dispatch import Dispatcher
from segmentlog.server.kafka_connection import KafkaConnection
from segmentlog.server.response_queue import Answer, PendingResponse

WAIT_S = 20.0


def request_class(key: int) -> Any:
    """Return the class of an API's requests."""
    api = APIS[key]
    return getattr(api.codec, f"{api.name}Request")


def message(key: int, name: str) -> Any:
    """Return a class by name of the module with an API's messages."""
    return getattr(importlib.import_module(APIS[key].codec.__name__), name)  # type: ignore[attr-defined]


def request_bytes(key: int, version: int, body: Any, correlation_id: int = 0, client_id: str | None = "test") -> bytes:
    """Return a request as bytes, length prefix included."""
    api = APIS[key]
    return b"".join(frame_request(api, version, correlation_id, client_id, api.codec.encode_request(body, version)))


class Refused(Exception):
    """The server closed the connection instead of answering."""


class WireClient:
    """One connection. For one thread."""

    def __init__(
        self, address: str, *, timeout_s: float = WAIT_S, receive_buffer: int | None = None, source: str = ""
    ) -> None:
        host, _, port = address.rpartition(":")
        self.sock = socket.socket()
        if receive_buffer is not None:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        if source:
            self.sock.bind((source, 0))
        self.sock.settimeout(timeout_s)
        self.sock.connect((host, int(port)))
        self._sent = 0
        self._expected: deque[tuple[int, int, int]] = deque()

    def __enter__(self) -> WireClient:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Go, without a word."""
        self.sock.close()

    def raw(self, data: bytes | bytearray | memoryview) -> None:
        """Send bytes as they are."""
        self.sock.sendall(data)

    def send(self, key: int, version: int, body: Any, *, answered: bool = True) -> int:
        """Send a request and wait for nothing; returns its correlation id."""
        self._sent += 1
        if answered:
            self._expected.append((self._sent, key, version))
        self.raw(request_bytes(key, version, body, self._sent))
        return self._sent

    def answer(self) -> Any:
        """Return the answer to the oldest pending request. Raises `Refused` if none will come."""
        number, key, version = self._expected.popleft()
        data = memoryview(self.frame())
        correlation_id, at = decode_response_header(data, APIS[key], version)
        assert correlation_id == number, "answers come in the order of the requests"
        return APIS[key].codec.decode_response(data, at, version)

    def ask(self, key: int, version: int, body: Any) -> Any:
        """Send a request and return its answer."""
        self.send(key, version, body)
        return self.answer()

    def frame(self) -> bytes:
        """Return the next answer, without its length."""
        return self._take(int.from_bytes(self._take(4), "big"))

    def is_closed_by_peer(self) -> bool:
        """Wait until the server has closed the connection, skip remaining answers, and return whether it did."""
        try:
            while self.sock.recv(1 << 16):
                pass
        except TimeoutError:
            return False
        except OSError:
            pass
        return True

    def _take(self, size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            try:
                data = self.sock.recv(min(size - len(parts), 1 << 20))
            except ConnectionError as error:
                raise Refused(str(error)) from None
            if not data:
                raise Refused("closed")
            parts += data
        return bytes(parts)


class _Wire:
    """A transport that keeps what is sent, and never has anything to be received."""

    received_bytes = sent_bytes = 0

    def __init__(self) -> None:
        self.sent = bytearray()
        self.is_shut = False

    def receive_into(self, view: memoryview) -> int:
        return 0

    def send(self, buffers: Sequence[Any]) -> None:
        for buffer in buffers:
            self.sent += buffer

    def send_now(self, buffers: Sequence[Any]) -> list[Any]:
        self.send(buffers)
        return []

    def stop_receiving(self) -> None:
        pass

    def is_disconnected(self) -> bool:
        return self.is_shut

    def shut_down(self) -> None:
        self.is_shut = True

    def close(self) -> None:
        pass


class Desk:
    """Asks a broker in this process, without sockets."""

    def __init__(self, broker: Broker, principal: Principal = ANONYMOUS) -> None:
        self.broker = broker
        self.dispatcher = Dispatcher(broker)
        self.wire: Any = _Wire()
        self._frames: Any = None
        self.connection = KafkaConnection(
            self.wire, self._frames, self.dispatcher.handle, client_host="127.0.0.1", principal=principal,
            limit_bytes=1 << 30,
        )  # fmt: skip

    def ask_bytes(self, frame: bytes | memoryview) -> bytes | None:
        """Return the answer to a request (both without their length), or None. Raises as `Dispatcher`."""
        return self.bytes_of(self.dispatcher.handle(self.connection, memoryview(frame)))

    def bytes_of(self, answer: Answer) -> bytes | None:
        """Return the bytes of the dispatcher's answer without their length; wait for a deferred answer."""
        if answer is None:
            return None
        if isinstance(answer, PendingResponse):
            ends = threading.Event()
            while answer.buffers is None:
                assert not ends.wait(0.0005)
            answer = answer.buffers
        return b"".join(answer)[4:]

    def ask(self, key: int, version: int, body: Any) -> Any:
        """Make a request and return its answer."""
        data = self.ask_bytes(request_bytes(key, version, body, 7)[4:])
        return None if data is None else self.decoded(key, version, data)

    def decoded(self, key: int, version: int, data: bytes) -> Any:
        """Decode the answer to a request of `ask`."""
        view = memoryview(data)
        correlation_id, at = decode_response_header(view, APIS[key], version)
        assert correlation_id == 7
        return APIS[key].codec.decode_response(view, at, version)


@contextlib.contextmanager
def connected(address: str, count: int) -> Any:
    """Yield ``count`` connections that have sent nothing yet."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(WireClient(address)) for _ in range(count)]
