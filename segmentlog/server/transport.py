"""Bytes over one connection, plain or encrypted. One thread receives; any may send, one at a time.

Blocking, with the kernel's own time-outs: Python's `settimeout` asks `poll` before each call, which is a system call
more for every request. Of a TLS connection OpenSSL lets one thread at a time do anything, so a receiver waits for bytes
outside of the lock that a sender takes.
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
"""Buffers that one system call takes (Linux: IOV_MAX)."""
_SLOWEST_BYTES: Final = 64 << 10
"""What a reader takes at the least in a send time-out, or it is cut off."""
_TLS_RECORD_BYTES: Final = 16 << 10
_TIMEVAL: Final = struct.Struct("ll")


class Idle(Exception):
    """Nothing came for as long as one waits at a time; the connection is as it was."""


class Transport(Protocol):
    """What a connection needs of it. Errors are `OSError`: after one nothing more can be sent or received."""

    received_bytes: int
    sent_bytes: int
    """So far, without what encryption adds."""

    def fileno(self) -> int:
        """Of its socket; -1 once it is closed."""

    def receive_into(self, view: memoryview) -> int:
        """How many bytes came, 0 at the end. Raises `Idle`."""

    def receive_now(self, view: memoryview) -> int:
        """The same of what is there already. Raises `Idle` where nothing is."""

    @property
    def has_more(self) -> bool:
        """Whether bytes are there that the socket does not tell of: they were decrypted with those before them."""

    def send(self, buffers: Sequence[Buffer]) -> None:
        """All of them."""

    def send_now(self, buffers: Sequence[Buffer]) -> list[Buffer]:
        """As much as goes without waiting; returns the rest."""

    def is_left(self) -> bool:
        """Whether the peer sends nothing more: it has gone, most likely. For the thread that receives."""

    def stop_receiving(self) -> None:
        """Whoever waits for bytes gets none; what is to be sent can be. For any thread."""

    def shut_down(self) -> None:
        """End it for both sides. For any thread."""

    def close(self) -> None:
        """Give the descriptor back. For the thread that receives."""


class PlainTransport:
    """A socket as it is."""

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
        pace = _Pace(self._send_timeout_s)
        left = list(buffers)
        try:
            while left:
                sent = self._socket.sendmsg(left[:GATHER_MAX])
                self.sent_bytes += sent
                left = behind(left, sent)
                if left:
                    pace.sent(sent)
        except BlockingIOError:
            raise TimeoutError("the peer takes nothing") from None

    def send_now(self, buffers: Sequence[Buffer]) -> list[Buffer]:
        left = list(buffers)
        with contextlib.suppress(BlockingIOError):
            while left:
                sent = self._socket.sendmsg(left[:GATHER_MAX], (), socket.MSG_DONTWAIT)
                self.sent_bytes += sent
                left = behind(left, sent)
        return left

    def is_left(self) -> bool:
        return _is_left(self._socket)

    def stop_receiving(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RD)

    def shut_down(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


class TlsTransport:
    """A socket that was wrapped by an `ssl.SSLContext`, its handshake done."""

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
        """(the bytes that came, what has to be waited for; 0 where nothing has to be)."""
        with self._mutex:
            try:
                received = self._socket.recv_into(view)
            except ssl.SSLWantReadError:
                return 0, select.POLLIN
            except ssl.SSLWantWriteError:  # a handshake within
                return 0, select.POLLOUT
            except ssl.SSLEOFError:  # without a goodbye: frames have lengths, so none is taken for whole
                return 0, 0
        self.received_bytes += received
        return received, 0

    @property
    def has_more(self) -> bool:
        with self._mutex:
            return bool(self._socket.pending())

    def send(self, buffers: Sequence[Buffer]) -> None:
        pace = _Pace(self._send_timeout_s)
        left = list(buffers)
        while left:
            before = _size(left)
            left = self.send_now(left)
            if left:
                if not wait_for(self._socket, select.POLLOUT, self._send_timeout_s):
                    raise TimeoutError("the peer takes nothing")
                pace.sent(before - _size(left))

    def send_now(self, buffers: Sequence[Buffer]) -> list[Buffer]:
        left = list(buffers)
        with contextlib.suppress(ssl.SSLWantWriteError, ssl.SSLWantReadError):
            while left:
                # Small ones together: each write is an encrypted record of its own.
                if len(left) > 1 and len(left[0]) < _TLS_RECORD_BYTES:
                    left = _merged(left)
                with self._mutex:
                    sent = self._socket.send(left[0])
                self.sent_bytes += sent
                left = behind(left, sent)
        return left

    def is_left(self) -> bool:
        return _is_left(self._socket)

    def stop_receiving(self) -> None:
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._socket, socket.SHUT_RD)

    def shut_down(self) -> None:
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


class _Pace:
    """Cuts off who takes next to nothing, but always something."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._ends_s = time.monotonic() + timeout_s
        self._bytes = 0

    def sent(self, size_bytes: int) -> None:
        self._bytes += size_bytes
        if self._bytes >= _SLOWEST_BYTES:
            self._bytes, self._ends_s = 0, time.monotonic() + self._timeout_s
        elif time.monotonic() > self._ends_s:
            raise TimeoutError("the peer takes too little")


def behind(buffers: list[Buffer], sent_bytes: int) -> list[Buffer]:
    """What is left of the buffers once so many bytes of them have gone."""
    if sent_bytes == _size(buffers):  # as a rule
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
    """The same bytes, the first buffer joined with those behind it up to a record's size."""
    size, count = 0, 0
    for buffer in buffers:
        if count and size + len(buffer) > _TLS_RECORD_BYTES:
            break
        size, count = size + len(buffer), count + 1
    return [b"".join(islice(buffers, count)), *buffers[count:]]


def _size(buffers: Sequence[Buffer]) -> int:
    return sum(map(len, buffers))


def wait_for(sock: socket.socket, events: int, timeout_s: float) -> bool:
    """Whether the socket got ready. Not `select`: that knows no descriptor above 1,023."""
    poll = select.poll()
    poll.register(sock, events)
    return bool(poll.poll(max(timeout_s, 0) * 1000))


def _is_left(sock: socket.socket) -> bool:
    poll = select.poll()
    poll.register(sock, select.POLLRDHUP)
    return bool(poll.poll(0))


def _timeval(seconds: float) -> bytes:
    whole = int(seconds)
    return _TIMEVAL.pack(whole, int((seconds - whole) * 1e6))
