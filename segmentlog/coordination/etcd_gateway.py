"""Client of etcd's JSON gateway: requests of its gRPC interface as HTTP, with Python's standard library only.

Each request has a connection of its own, so no request meets a connection that has died unnoticed. The servers of the
URL are tried in turn, beginning with the server that answered last. A server that does not answer in its share of the
time is as good as one that refuses the connection: a stopped process still accepts connections.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import ssl
import time
from collections.abc import Iterator, Mapping
from typing import Final, TypeVar

import msgspec

from segmentlog.coordination.engine_url import EngineAddress
from segmentlog.errors import CoordinatorRefused, CoordinatorUnreachable, InvalidConfig
from segmentlog.storage import fork_safety
from segmentlog.storage.interrupt_check import is_interrupt
from segmentlog.texts import in_line

REQUEST_S: Final = 10.0
"""Time limit of a call at all servers together. Each server gets an equal share of what is left."""
_WATCH_CONNECT_S: Final = 2.0
_MAX_ANSWER_BYTES: Final = 256 << 10
"""A cluster document has at most 64 KiB; JSON and base64 add half of that."""
_MAX_TEXT: Final = 200
_RETRIED_CODES: Final = frozenset((1, 2, 4, 8, 10, 13, 14))
"""Codes of gRPC that a retry can change: canceled, unknown, deadline exceeded, resource exhausted, aborted, internal,
unavailable. etcd uses the last one without a leader, and while its leader changes."""
_UNAUTHENTICATED: Final = 16
_OLD_TOKEN: Final = "revision of auth store is old"
"""etcd reports it with the code of an invalid argument, when users or roles have changed since the log-in."""
_NO_USER: Final = "user name is empty"

_Answer = TypeVar("_Answer")
Decoder = msgspec.json.Decoder
"""Create decoders when a module is imported: msgspec crashes if two threads use a struct type for the first time."""


class _Header(msgspec.Struct):
    cluster_id: str = ""


class _Headed(msgspec.Struct):
    header: _Header = msgspec.field(default_factory=_Header)


class _GatewayError(msgspec.Struct):
    code: int = 2
    message: str = ""


class _Token(msgspec.Struct):
    token: str


class _WatchEvents(msgspec.Struct):
    created: bool = False
    canceled: bool = False
    events: list[msgspec.Raw] = []


class _WatchAnswer(msgspec.Struct):
    result: _WatchEvents | None = None


_header_decoder: Final = Decoder(_Headed)
_error_decoder: Final = Decoder(_GatewayError)
_token_decoder: Final = Decoder(_Token)
_event_decoder: Final = Decoder(_WatchAnswer)


class _ServerFailed(Exception):
    """One server gave no usable answer. ``is_permanent``: it will not give one later either."""

    def __init__(self, why: str, *, is_permanent: bool = False) -> None:
        super().__init__(why, is_permanent)
        self.why, self.is_permanent = why, is_permanent


class _TokenRejected(Exception):
    """The server rejects the token of an earlier log-in, or requires one."""


class EtcdGateway:
    """Client of one etcd cluster. Thread-safe. A forked child can continue to use it."""

    def __init__(self, address: EngineAddress) -> None:
        self._address = address
        self._tls = _client_context(address.files) if address.is_tls else None
        self._first = 0
        """Index of the server that answered last."""
        self._token = ""
        self._cluster_id = ""
        self._watching: set[socket.socket] = set()
        self._is_closed = False
        self._mutex = fork_safety.lock(self, "_mutex", "_close_copies")

    def call(self, method: str, body: Mapping[str, object], decoder: Decoder[_Answer]) -> _Answer:
        """Send a request, and return the answer. Log in first, if the URL has a user.

        Raise `CoordinatorUnreachable` if no server answers, and `CoordinatorRefused` if etcd refuses the request. In
        both cases etcd may have executed it, or may do so later.
        """
        ends_s = time.monotonic() + REQUEST_S
        for _ in range(2):
            token = self._token
            if self._address.user and not token:
                token = self._log_in(ends_s)
            try:
                return self._call_in_turn(method, body, decoder, token, ends_s)
            except _TokenRejected as error:
                why = str(error)
                self._token = ""  # it has expired, or etcd was restarted: log in again, once
                if not self._address.user:
                    break
        raise CoordinatorRefused(self._address.url, f"access denied: {why}")

    def watch(self, body: Mapping[str, object], seconds: float) -> bool:
        """Wait for an event of a watch. Return True at the first event, or after the time; False if watching fails."""
        ends_s = time.monotonic() + seconds
        host, port = self._address.hosts[self._first]
        connection = self._connection(host, port, min(seconds, _WATCH_CONNECT_S))
        try:
            connection.connect()
            sock = connection.sock
            with self._registered(sock):
                connection.request("POST", "/v3/watch", msgspec.json.encode(body), self._headers(self._token))
                response = connection.getresponse()
                if response.status != http.client.OK:
                    return False
                while True:
                    sock.settimeout(max(ends_s - time.monotonic(), 0.001))
                    found = _decode(response.readline(_MAX_ANSWER_BYTES), _event_decoder).result
                    if found is None or found.canceled:
                        return False
                    if found.events:
                        return True
        except (OSError, ValueError, http.client.HTTPException, _ServerFailed) as error:
            _raise_interrupt(error, ends_s)
            return time.monotonic() >= ends_s
        finally:
            connection.close()

    def close(self) -> None:
        """End all watches. A second call does nothing."""
        with self._mutex:
            self._is_closed = True
            for sock in self._watching:
                with contextlib.suppress(OSError):
                    socket.socket.shutdown(sock, socket.SHUT_RDWR)  # below TLS, whose state its own thread uses

    def _close_copies(self) -> None:
        """Close, in a forked child, its copies of the parent's connections."""
        for sock in self._watching.copy():
            with contextlib.suppress(OSError):
                os.close(sock.detach())
        self._watching = set()

    @contextlib.contextmanager
    def _registered(self, sock: socket.socket) -> Iterator[None]:
        """Let `close` end the watch on this connection."""
        with self._mutex:
            self._watching.add(sock)
            if self._is_closed:
                raise _ServerFailed("closed")
        try:
            yield
        finally:
            with self._mutex:
                self._watching.discard(sock)

    def _log_in(self, ends_s: float) -> str:
        """Return a new token."""
        body = {"name": self._address.user, "password": self._address.password}
        try:
            self._token = self._call_in_turn("auth/authenticate", body, _token_decoder, "", ends_s).token
        except _TokenRejected as error:
            raise CoordinatorRefused(self._address.url, f"access denied: {error}") from None
        return self._token

    def _call_in_turn(
        self, method: str, body: Mapping[str, object], decoder: Decoder[_Answer], token: str, ends_s: float
    ) -> _Answer:
        """Send a request to one server after another, until one answers."""
        data = msgspec.json.encode(body)
        hosts = self._address.hosts
        failures: list[_ServerFailed] = []
        first = self._first
        for tried in range(len(hosts)):
            index = (first + tried) % len(hosts)
            host, port = hosts[index]
            left_s = ends_s - time.monotonic()
            try:
                if left_s <= 0:
                    raise _ServerFailed("not tried, because the time is over")
                answer = self._ask((host, port), method, data, decoder, token, left_s / (len(hosts) - tried))
            except _ServerFailed as error:
                error.why = f"{host}:{port}: {error.why}"
                failures.append(error)
            else:
                self._first = index
                return answer
        kinds = CoordinatorRefused if all(failure.is_permanent for failure in failures) else CoordinatorUnreachable
        raise kinds(self._address.url, "; ".join(failure.why for failure in failures))

    def _ask(
        self, server: tuple[str, int], method: str, data: bytes, decoder: Decoder[_Answer], token: str, seconds: float
    ) -> _Answer:
        """Send a request to one server."""
        ends_s = time.monotonic() + seconds
        connection = self._connection(*server, seconds)
        try:
            connection.connect()
            sock = connection.sock
            sock.settimeout(max(ends_s - time.monotonic(), 0.001))
            connection.request("POST", f"/v3/{method}", data, self._headers(token))
            response = connection.getresponse()
            answer = _read(response, sock, ends_s)
            status = response.status
        except (OSError, ValueError, http.client.HTTPException) as error:
            _raise_interrupt(error, ends_s)
            raise _failure(error) from None
        finally:
            connection.close()
        if status != http.client.OK:
            self._raise_refusal(status, answer)
        self._check_cluster(answer)
        return _decode(answer, decoder)

    def _raise_refusal(self, status: int, answer: bytes) -> None:
        try:
            error = _error_decoder.decode(answer)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            why = f"HTTP status {status}: no JSON gateway of etcd 3.4 or newer is at this address"
            raise _ServerFailed(why, is_permanent=status < http.client.INTERNAL_SERVER_ERROR) from None
        why = in_line(error.message)[:_MAX_TEXT]
        if self._address.password:
            why = why.replace(self._address.password, "...")
        if error.code == _UNAUTHENTICATED or _OLD_TOKEN in why:
            raise _TokenRejected(why)
        if error.code in _RETRIED_CODES:
            raise _ServerFailed(why)
        if _NO_USER in why:
            why += "; name USER:PASSWORD before the hosts of the URL"
        raise CoordinatorRefused(self._address.url, why)

    def _check_cluster(self, answer: bytes) -> None:
        """Refuse an answer of another etcd cluster: its revisions would mean other documents."""
        cluster_id = _decode(answer, _header_decoder).header.cluster_id
        if not cluster_id:
            raise _ServerFailed("the answer does not have the form of etcd's answers", is_permanent=True)
        with self._mutex:
            self._cluster_id = self._cluster_id or cluster_id
        if cluster_id != self._cluster_id:
            raise _ServerFailed("this server belongs to another etcd cluster than the others", is_permanent=True)

    def _connection(self, host: str, port: int, seconds: float) -> http.client.HTTPConnection:
        if self._tls is None:
            return http.client.HTTPConnection(host, port, timeout=seconds)
        return http.client.HTTPSConnection(host, port, timeout=seconds, context=self._tls)

    def _headers(self, token: str) -> dict[str, str]:
        headers = {"Content-Type": "application/json"}
        return headers | {"Authorization": token} if token else headers


def _client_context(files: Mapping[str, str]) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=files.get("cacert"))
    except (OSError, ValueError) as error:
        raise InvalidConfig("cacert", files["cacert"], f"a PEM file with trusted certificates ({error})") from None
    if "cert" in files:
        try:
            context.load_cert_chain(files["cert"], files["key"], password="")  # an empty one: never ask at the terminal
        except (OSError, ValueError) as error:
            accepted = f"a PEM file whose key is in {files['key']!r}, not encrypted ({error})"
            raise InvalidConfig("cert", files["cert"], accepted) from None
    return context


def _read(response: http.client.HTTPResponse, sock: socket.socket, ends_s: float) -> bytes:
    """Read an answer of a limited size until a point in time."""
    parts: list[bytes] = []
    size_bytes = 0
    while not response.isclosed():
        sock.settimeout(max(ends_s - time.monotonic(), 0.001))
        parts.append(response.read(len(response.peek()) or 1))  # what one call of recv has returned
        size_bytes += len(parts[-1])
        if size_bytes > _MAX_ANSWER_BYTES:
            raise _ServerFailed(f"the answer has more than {_MAX_ANSWER_BYTES:,} bytes", is_permanent=True)
    if response.length:
        raise http.client.IncompleteRead(b"", response.length)
    return b"".join(parts)


def _decode(answer: bytes, decoder: Decoder[_Answer]) -> _Answer:
    try:
        return decoder.decode(answer)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise _ServerFailed("the answer does not have the form of etcd's answers", is_permanent=True) from None


def _raise_interrupt(error: BaseException, ends_s: float) -> None:
    """Raise the error again if a signal handler raised it, and not the connection."""
    is_protocol = isinstance(error, http.client.HTTPException)
    is_timeout = isinstance(error, TimeoutError) and time.monotonic() >= ends_s
    if is_interrupt(error) and not is_protocol and not is_timeout:
        raise error


def _failure(error: Exception) -> _ServerFailed:
    if isinstance(error, ssl.SSLCertVerificationError):
        return _ServerFailed(f"the certificate is not trusted: {error.verify_message}", is_permanent=True)
    if isinstance(error, socket.gaierror):
        return _ServerFailed("the host name is unknown")
    if isinstance(error, TimeoutError):
        return _ServerFailed("no answer in time")
    if isinstance(error, ConnectionRefusedError):
        return _ServerFailed("no server listens at this address")
    if isinstance(error, http.client.RemoteDisconnected | ConnectionError | http.client.IncompleteRead):
        return _ServerFailed("the connection was closed")
    if isinstance(error, OSError):
        return _ServerFailed(error.strerror or str(error))
    return _ServerFailed(f"the answer is not HTTP: {in_line(repr(error))[:_MAX_TEXT]}")
