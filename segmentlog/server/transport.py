"""Send and receive bytes over one connection, plain or TLS. One thread receives; any thread may send, one at a time.

Sockets block, with the kernel's timeouts: Python's `settimeout` would cost another system call a request, because it
calls `poll` before each operation. OpenSSL allows one thread at a time in a TLS connection, so a receiver waits for
bytes outside the lock that senders need.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Sequence
from itertools import islice
from typing import Final, Protocol

Buffer = bytes | bytearray | memoryview

GATHER_MAX: Final = 1024
"""Buffers in one system call (Linux: IOV_MAX)."""
_SLOWEST_BYTES: Final = 64 << 10
"""Bytes that the client must read within the send timeout; a slower client is disconnected."""
_TLS_RECORD_BYTES: Final = 16 << 10
_TIMEVAL: Final = struct.Struct("ll")


class Idle(Exception):
    """Nothing arrived within the receive timeout; the connection is unchanged."""


class Transport(Protocol):
    """Byte stream of a connection. Errors are `OSError`; after an error nothing more can be sent or received."""

    received_bytes: int
    sent_bytes: int
    """Number of bytes sent so far, without the overhead of encryption."""

    def fileno(self) -> int:
        """Return the descriptor of the socket; -1 once it is closed."""

    def receive_into(self, view: memoryview) -> int:
        """Receive into ``view`` and return the number of bytes, 0 at the end.

        Raise `Idle` after the receive timeout.
        """

    def receive_now(self, view: memoryview) -> int:
        """Receive the bytes that have arrived, as `receive_into` does. Raise `Idle` if there are none."""

    @property
    def has_more(self) -> bool:
        """Whether decrypted bytes are waiting. The socket does not become readable for these bytes."""

    def send(self, buffers: Sequence[Buffer]) -> None:
        """Send all buffers; blocks until the client has read them. Raise TimeoutError for a client that is too slow."""

    def send_now(self, buffers: Sequence[Buffer]) -> list[Buffer]:
        """Send as much as possible without blocking, and return the rest."""

    def is_disconnected(self) -> bool:
        """Return whether the client has closed its side, and so has most likely left. Only for the receiving thread."""

    def stop_receiving(self) -> None:
        """End the receiving side; sending continues. Thread-safe."""

    def shut_down(self) -> None:
        """End both sides. Thread-safe."""

    def close(self) -> None:
        """Close the descriptor. Only for the receiving thread."""


class PlainTransport:
    """A plain socket."""

    def __init__(self, sock: socket.socket, receive_timeout_s: float, send_timeout_s: float) -> None:
        self.received_bytes = self.sent_bytes = 0
        self._socket = sock
        self._send_timeout_s = send_timeout_s
        sock.setblocking(True)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(receive_timeout_s))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(send_timeout_s))

    def receive_into(self, view: memoryview) -> int:
        try:
            received = self._socket.recv_into(view)
        except BlockingIOError:
            raise Idle from None
        self.received_bytes += received
        return received

    def fileno(self) -> int:
        return self._socket.fileno()

    def receive_now(self, view: memoryview) -> int:
        try:
            received = self._socket.recv_into(view, 0, socket.MSG_DONTWAIT)
        except BlockingIOError:
            raise Idle from None
        self.received_bytes += received
        return received

    @property
    def has_more(self) -> bool:
        return False

    def send(self, buffers: Sequence[Buffer]) -> None:
        pace = _SendPace(self._send_timeout_s)
        unsent = list(buffers)
        try:
            while unsent:
                sent = self._socket.sendmsg(unsent[:GATHER_MAX])
                self.sent_bytes += sent
                unsent = drop_sent(unsent, sent)
                if unsent:
                    pace.sent(sent)
        except BlockingIOError:
            raise TimeoutError("the client does not read its responses") from None

    def send_now(self, buffers: Sequence[Buffer]) -> list[Buffer]:
        unsent = list(buffers)
        with contextlib.suppress(BlockingIOError):
            while unsent:
                sent = self._socket.sendmsg(unsent[:GATHER_MAX], (), socket.MSG_DONTWAIT)
                self.sent_bytes += sent
                unsent = drop_sent(unsent, sent)
        return unsent

    def is_disconnected(self) -> bool:
        return _is_disconnected(self._socket)

    def stop_receiving(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RD)

    def shut_down(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


class TlsTransport:
    """A socket with TLS, after the handshake."""

    def __init__(self, sock: ssl.SSLSocket, receive_timeout_s: float, send_timeout_s: float) -> None:
        self.received_bytes = self.sent_bytes = 0
        self._socket = sock
        self._receive_timeout_s = receive_timeout_s
        self._send_timeout_s = send_timeout_s
        self._mutex = threading.Lock()
        sock.setblocking(False)

    def fileno(self) -> int:
        return self._socket.fileno()

    def receive_into(self, view: memoryview) -> int:
        while True:
            received, events = self._receive(view)
            if not events:
                return received
            if not wait_for(self._socket, events, self._receive_timeout_s):
                raise Idle

    def receive_now(self, view: memoryview) -> int:
        received, events = self._receive(view)
        if events:
            raise Idle
        return received

    def _receive(self, view: memoryview) -> tuple[int, int]:
        """Receive what has arrived.

        Return (number of bytes, poll events to wait for; 0 if there is no need to wait).
        """
        with self._mutex:
            try:
                received = self._socket.recv_into(view)
            except ssl.SSLWantReadError:
                return 0, select.POLLIN
            except ssl.SSLWantWriteError:  # renegotiation
                return 0, select.POLLOUT
            except ssl.SSLEOFError:  # the peer left without a TLS close: harmless, since frames have lengths
                return 0, 0
        self.received_bytes += received
        return received, 0

    @property
    def has_more(self) -> bool:
        with self._mutex:
            return bool(self._socket.pending())

    def send(self, buffers: Sequence[Buffer]) -> None:
        pace = _SendPace(self._send_timeout_s)
        unsent = list(buffers)
        while unsent:
            before = _size(unsent)
            unsent = self.send_now(unsent)
            if unsent:
                if not wait_for(self._socket, select.POLLOUT, self._send_timeout_s):
                    raise TimeoutError("the client does not read its responses")
                pace.sent(before - _size(unsent))

    def send_now(self, buffers: Sequence[Buffer]) -> list[Buffer]:
        unsent = list(buffers)
        with contextlib.suppress(ssl.SSLWantWriteError, ssl.SSLWantReadError):
            while unsent:
                # Join small buffers, because each write becomes a separate TLS record.
                if len(unsent) > 1 and len(unsent[0]) < _TLS_RECORD_BYTES:
                    unsent = _merged(unsent)
                with self._mutex:
                    sent = self._socket.send(unsent[0])
                self.sent_bytes += sent
                unsent = drop_sent(unsent, sent)
        return unsent

    def is_disconnected(self) -> bool:
        return _is_disconnected(self._socket)

    def stop_receiving(self) -> None:
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._socket, socket.SHUT_RD)

    def shut_down(self) -> None:
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


class _SendPace:
    """Minimum speed of a client that reads its responses: it must read `_SLOWEST_BYTES` within each timeout."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._ends_s = time.monotonic() + timeout_s
        self._bytes = 0

    def sent(self, size_bytes: int) -> None:
        self._bytes += size_bytes
        if self._bytes >= _SLOWEST_BYTES:
            self._bytes, self._ends_s = 0, time.monotonic() + self._timeout_s
        elif time.monotonic() > self._ends_s:
            raise TimeoutError("the client reads its responses too slowly")


def drop_sent(buffers: list[Buffer], sent_bytes: int) -> list[Buffer]:
    """Return the buffers without their first ``sent_bytes`` bytes."""
    if sent_bytes == _size(buffers):  # the usual case
        return []
    for at, buffer in enumerate(buffers):
        if sent_bytes < len(buffer):
            rest = buffers[at:]
            if sent_bytes:
                rest[0] = memoryview(buffer)[sent_bytes:]
            return rest
        sent_bytes -= len(buffer)
    return []


def _merged(buffers: list[Buffer]) -> list[Buffer]:
    """Return the same bytes, with the first buffer joined to the following ones up to the size of a TLS record."""
    size, count = 0, 0
    for buffer in buffers:
        if count and size + len(buffer) > _TLS_RECORD_BYTES:
            break
        size, count = size + len(buffer), count + 1
    return [b"".join(islice(buffers, count)), *buffers[count:]]


def _size(buffers: Sequence[Buffer]) -> int:
    return sum(map(len, buffers))


def wait_for(sock: socket.socket, events: int, timeout_s: float) -> bool:
    """Wait until the socket is ready.

    Return False at the timeout. Uses `poll`, because `select` fails for descriptors above 1,023.
    """
    poll = select.poll()
    poll.register(sock, events)
    return bool(poll.poll(max(timeout_s, 0) * 1000))


def _is_disconnected(sock: socket.socket) -> bool:
    poll = select.poll()
    poll.register(sock, select.POLLRDHUP)
    return bool(poll.poll(0))


def _timeval(seconds: float) -> bytes:
    whole = int(seconds)
    return _TIMEVAL.pack(whole, int((seconds - whole) * 1e6))
