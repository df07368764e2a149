"""Requests that were made beforehand, over many connections, several under way on each: by one thread of the client.

Answers are counted and thrown away. That they are right is known by their size: each is as long as the one that was
looked at when the request was made.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from collections.abc import Sequence

import msgspec

from bench.server.wire import Address, connect

_BUFFER_BYTES = 1 << 20
_STUCK_S = 30.0
_size = struct.Struct(">i").unpack_from


class Done(msgspec.Struct, frozen=True):
    """What came of it. ``answered``: for each lane, how often it was answered."""

    answered: list[int]
    seconds: float
    size_bytes: int


class WrongAnswer(RuntimeError):
    """An answer is not what it was when the request was made."""


class Lane:
    """A connection that goes round and round through its requests, ``depth`` of them under way.

    ``sizes``: of the answer to each of them, without the four bytes that say it.
    """

    def __init__(self, address: Address, requests: Sequence[bytes], sizes: Sequence[int], depth: int) -> None:
        self._socket = connect(address)
        self._requests, self._sizes, self._depth = requests, sizes, depth
        self._socket.setblocking(False)
        self._unsent: list[bytes | memoryview] = []
        self._head = b""
        self._left = 0
        self.sent = self.answered = 0
        self.received_bytes = 0

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    @property
    def is_blocked(self) -> bool:
        """Whether something waits to be sent."""
        return bool(self._unsent)

    def begin(self) -> None:
        """Forget what was counted."""
        self.sent = self.answered = self.received_bytes = 0

    def fill(self) -> None:
        """Send as many requests as may be under way."""
        count = self._depth - (self.sent - self.answered)
        # Not one at a time: a system call for each request would be what is measured.
        if count * 2 < self._depth:
            return
        requests = self._requests
        for number in range(self.sent, self.sent + count):
            self._unsent.append(requests[number % len(requests)])
        self.sent += count
        self.flush()

    def flush(self) -> None:
        """Send what waits, as far as it goes."""
        unsent = self._unsent
        while unsent:
            try:
                sent = self._socket.sendmsg(unsent[:512])
            except BlockingIOError:
                return
            while unsent and sent >= len(unsent[0]):
                sent -= len(unsent.pop(0))
            if sent:
                unsent[0] = memoryview(unsent[0])[sent:]

    def receive(self, buffer: bytearray) -> None:
        """Count what has come."""
        try:
            count = self._socket.recv_into(buffer)
        except BlockingIOError:
            return
        if not count:
            raise EOFError("the server hung up")
        self.received_bytes += count
        at = 0
        while at < count:
            if self._left:
                taken = min(self._left, count - at)
                self._left -= taken
                at += taken
                if self._left:
                    return
                self.answered += 1
            elif not self._head and count - at >= 4:
                self._expect(_size(buffer, at)[0])
                at += 4
            else:
                more = buffer[at : at + 4 - len(self._head)]
                self._head += more
                at += len(more)
                if len(self._head) == 4:
                    self._expect(_size(self._head)[0])
                    self._head = b""

    def _expect(self, size: int) -> None:
        wanted = self._sizes[self.answered % len(self._sizes)]
        if size != wanted:
            raise WrongAnswer(f"an answer of {size} bytes where {wanted} were expected")
        self._left = size


def run(lanes: Sequence[Lane], seconds: float, max_bytes: int | None = None) -> Done:
    """Keep all of them busy for so long, or until so many bytes were sent; then wait for what is under way."""
    poll = select.epoll()
    by_fd = {lane.fileno(): lane for lane in lanes}
    buffer = bytearray(_BUFFER_BYTES)
    sizes = {id(lane): sum(map(len, lane._requests)) / len(lane._requests) for lane in lanes}
    for lane in lanes:
        lane.begin()
        poll.register(lane.fileno(), select.EPOLLIN)
    began_s = now_s = time.perf_counter()
    ends_s = began_s + seconds
    is_over = False
    waiting_to_send: set[int] = set()
    try:
        for lane in lanes:
            lane.fill()
            if lane.is_blocked:
                waiting_to_send.add(lane.fileno())
                poll.modify(lane.fileno(), select.EPOLLIN | select.EPOLLOUT)
        while not is_over or any(lane.answered < lane.sent for lane in lanes):
            events = poll.poll(_STUCK_S)
            if not events:
                raise TimeoutError(f"no answer in {_STUCK_S} s")
            for fd, event in events:
                lane = by_fd[fd]
                if event & select.EPOLLOUT:
                    lane.flush()
                if event & ~select.EPOLLOUT:
                    lane.receive(buffer)
                if not is_over:
                    lane.fill()
                if lane.is_blocked != (fd in waiting_to_send):
                    waiting_to_send ^= {fd}
                    poll.modify(fd, select.EPOLLIN | (select.EPOLLOUT if lane.is_blocked else 0))
            now_s = time.perf_counter()
            is_over = is_over or now_s >= ends_s
            if max_bytes is not None and not is_over:
                is_over = sum(lane.sent * sizes[id(lane)] for lane in lanes) >= max_bytes
    finally:
        poll.close()
    received = sum(lane.received_bytes for lane in lanes)
    return Done([lane.answered for lane in lanes], now_s - began_s, received)


def idle_connections(address: Address, count: int) -> list[socket.socket]:
    """Open connections that have sent ApiVersions, and nothing since."""
    from bench.server.wire import API_VERSIONS, request
    from segmentlog.server.codec.generated.api_versions import ApiVersionsRequest

    hello = request(API_VERSIONS, ApiVersionsRequest("bench", "1"))
    made = []
    for _ in range(count):
        sock = connect(address)
        sock.sendall(hello)
        made.append(sock)
    for sock in made:
        sock.recv(1 << 16)
    return made
