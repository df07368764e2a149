"""Accept connections and enforce limits on them. Give a connection to the loop, or to a thread if it needs one."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from segmentlog.security.address_limits import ByAddress
from segmentlog.security.principals import ANONYMOUS
from segmentlog.security.tls import ServerTls, principal_of
from segmentlog.security.tls_refusals import TlsRefusals
from segmentlog.server.frames import FrameReader
from segmentlog.server.kafka_connection import KafkaConnection, StepResult
from segmentlog.server.log_format import LogRateLimit
from segmentlog.server.loop import Loop
from segmentlog.server.request_buffers import BufferPool
from segmentlog.server.response_queue import Answer
from segmentlog.server.sasl_session import SaslSession
from segmentlog.server.server_settings import Limits
from segmentlog.server.transport import PlainTransport, TlsTransport, Transport, wait_for
from segmentlog.server.worker_counters import Event, WorkerCounters
from segmentlog.storage import fork_safety

if TYPE_CHECKING:
    from segmentlog.security.principals import Principal

logger = logging.getLogger("segmentlog.server")

_CHECK_INTERVAL_S: Final = 10.0
"""Interval at which a thread that waits for a request checks the timeouts."""
_NO_ROOM_S: Final = 0.1
_ENDED_S: Final = 1.0
"""Time for threads of closed connections to end."""
_RESERVED: Final = 8
"""Connections above the limits for machines that probe this server as its standby. Otherwise a server with very many
clients looks dead to its standby."""
_RESERVED_S: Final = 60.0
"""Time after a probe in which its machine can use a reserved connection."""
_PROBE_S: Final = 5.0
"""Time after which a reserved connection is closed."""
_PROBERS_MAX: Final = 64
"""Maximum number of machines that have reserved connections."""


class _Unauthenticated:
    """A connection before authentication: in the TLS handshake or before the end of SASL."""

    __slots__ = ("_is_cut", "_mutex", "_shut_down")

    def __init__(self, shut_down: Callable[[], None]) -> None:
        self._mutex = threading.Lock()
        self._shut_down = shut_down
        self._is_cut = False

    def set_shut_down(self, shut_down: Callable[[], None]) -> None:
        """Set the function that shuts down the connection from now on."""
        with self._mutex:
            self._shut_down = shut_down
            if self._is_cut:
                shut_down()

    def cut(self) -> None:
        """Close the connection; a thread that waits for it notices. Thread-safe."""
        with self._mutex:
            self._is_cut = True
            self._shut_down()


class ConnectionSecurity:
    """How clients connect: TLS and SASL, or neither."""

    def __init__(self, tls: ServerTls | None = None, make_sasl: Callable[[], SaslSession] | None = None) -> None:
        self.tls = tls
        self.make_sasl = make_sasl

    @property
    def has_handshake(self) -> bool:
        """Whether a client must do a TLS handshake or authenticate before its first request."""
        return self.tls is not None or self.make_sasl is not None


class KafkaListener:
    """Accepts connections on listening sockets, which other processes may share, until it is closed."""

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        security: ConnectionSecurity,
        limits: Limits,
        pool: BufferPool,
        handle: Callable[[KafkaConnection, memoryview], Answer],
        meter: WorkerCounters | None = None,
        afterwards: Callable[[], object] = int,
    ) -> None:
        self._sockets = list(sockets)
        self._security = security
        self._limits = limits
        self._pool = pool
        self._handle = handle
        self._afterwards = afterwards
        self._meter = meter or WorkerCounters()
        self._rejection_log = LogRateLimit()
        self._tls_refusals = TlsRefusals(logger)
        self._received_bytes = self._sent_bytes = 0
        """Traffic of closed connections."""
        self._mutex = threading.Lock()
        self._ended = threading.Condition(self._mutex)
        self._open: dict[KafkaConnection, _Unauthenticated | None] = {}
        self._guests: ByAddress[_Unauthenticated] = ByAddress()
        self._loop = Loop(self._take_over)
        self._by_host: Counter[str] = Counter()
        self._probers: dict[str, float] = {}
        """Addresses of standbys, and `time.monotonic` of their last probe."""
        self._is_closed = False
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="segmentlog-accept", daemon=True)
        fork_safety.on_fork(self, "_abandon_copies")

    def _abandon_copies(self) -> None:
        """Close the sockets in a forked child: it has no threads for them, and must not keep the connections open."""
        self._is_closed = True
        for sock in self._sockets:
            sock.close()
        for connection in self._open.copy():
            connection.abandon()
        self._loop.abandon()
        self._close_pipe()

    def _close_pipe(self) -> None:
        """Close the pipe, but only at the first call: afterwards its descriptor numbers may belong to other files."""
        fds, self._wake_read, self._wake_write = (self._wake_read, self._wake_write), -1, -1
        for fd in fds:
            if fd >= 0:
                os.close(fd)

    def start(self) -> None:
        """Start to accept connections."""
        for sock in self._sockets:
            sock.setblocking(False)
        self._loop.start()
        self._thread.start()

    @property
    def connection_count(self) -> int:
        """Number of connected clients."""
        return self._by_host.total()

    def traffic(self) -> tuple[int, int]:
        """Return the bytes received and sent so far, including closed connections."""
        with self._mutex:
            received, sent = self._received_bytes, self._sent_bytes
            for connection in self._open:
                of_one = connection.traffic
                received, sent = received + of_one[0], sent + of_one[1]
        return received, sent

    @property
    def is_open(self) -> bool:
        """Whether connections are accepted."""
        return self._thread.is_alive() and not self._is_closed

    def is_healthy(self, patience_s: float) -> bool:
        """Return whether the lock is free within ``patience_s`` seconds, and the serving threads are alive."""
        if not self._mutex.acquire(timeout=patience_s):
            return False
        self._mutex.release()
        return self._thread.is_alive() and self._loop.is_healthy()

    def close(self, timeout_s: float) -> None:
        """Stop accepting, let connections answer the requests that have arrived, and close the rest after
        ``timeout_s``.

        Idempotent, and allowed before `start`.
        """
        if self._is_closed:
            return
        self._is_closed = True
        with contextlib.suppress(OSError):
            os.write(self._wake_write, b"\0")
        if self._thread.ident is not None:
            self._thread.join()
        for sock in self._sockets:
            sock.close()
        ends_s = time.monotonic() + timeout_s
        with self._mutex:
            connections, guests = list(self._open), list(self._guests)
        for guest in guests:  # unauthenticated clients have no requests in progress
            guest.cut()
        for connection in connections:
            connection.finish()
        with self._ended:
            self._ended.wait_for(lambda: not self._open, max(0.0, ends_s - time.monotonic()))
            connections = list(self._open)
        for connection in connections:
            connection.close()
        with self._ended:
            self._ended.wait_for(lambda: not self._open, _ENDED_S)
        self._loop.close()
        self._close_pipe()

    # ------------------------------------------------------------ accepting

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._wake_read, select.POLLIN)
        by_fd = {sock.fileno(): sock for sock in self._sockets}
        for fd in by_fd:
            poll.register(fd, select.POLLIN)
        while not self._is_closed:
            for fd, _ in poll.poll():
                sock = by_fd.get(fd)
                if sock is not None:
                    self._accept(sock)

    def _accept(self, listening: socket.socket) -> None:
        try:
            sock, address = listening.accept()
        except (BlockingIOError, ConnectionError):  # another worker took it, or the client has left
            return
        except OSError as error:  # probably out of descriptors: wait until others are closed
            self._count_rejection("", f"a connection could not be accepted: {error}")
            time.sleep(_NO_ROOM_S)
            return
        host = str(address[0])
        limits = self._limits
        silent: KafkaConnection | None = None
        with self._mutex:
            is_full = self._by_host[host] >= limits.connections_per_address
            if not is_full and self.connection_count >= limits.connections:
                silent = self._oldest_silent_locked()
                is_full = silent is None
            is_reserved = is_full and self._has_reserved_locked(host)
            if not is_full or is_reserved:
                self._by_host[host] += 1
        if is_full and not is_reserved:
            self._count_rejection(host, f"{host}: rejected: the limit of connections is reached")
            sock.close()  # close it after counting it: the metrics then include it when the client sees the close
            return
        if silent is not None:
            self._meter.count_event(Event.CUT)
            silent.close()
        self._meter.count_event(Event.ACCEPTED)
        guest = self._count_unauthenticated(sock, host) if self._security.has_handshake else None
        try:
            if self._security.tls is None:
                self._serve(self._connection(sock, host, ANONYMOUS, guest, is_reserved=is_reserved), guest)
            else:
                work = partial(self._serve_tls, sock, host, self._security.tls, guest, is_reserved)
                threading.Thread(target=work, name=f"segmentlog-{host}", daemon=True).start()
        except (OSError, RuntimeError) as error:  # the client has left, or no thread could be started
            sock.close()
            self._uncount(host, guest)
            self._count_rejection(host, f"{host}: rejected: {error}")

    def _has_reserved_locked(self, host: str) -> bool:
        """Return whether this address may have a connection above the limits: that of a standby."""
        limits, last_s = self._limits, self._probers.get(host)
        return (
            last_s is not None
            and time.monotonic() - last_s < _RESERVED_S
            and self.connection_count < limits.connections + _RESERVED
            and self._by_host[host] < limits.connections_per_address + _RESERVED
        )

    def _oldest_silent_locked(self) -> KafkaConnection | None:
        """Return the oldest connection that never sent a byte, of the address with the most of these, or None."""
        silent: ByAddress[KafkaConnection] = ByAddress()
        for connection in self._open:
            if not connection.traffic[0] and not connection.is_closed:
                silent.add(connection, connection.client_host)
        return silent.oldest()

    def _count_unauthenticated(self, sock: socket.socket, host: str) -> _Unauthenticated:
        """Add an unauthenticated connection. Above the limit, close the oldest of the address that has the most."""
        guest = _Unauthenticated(partial(_shut_down, sock))
        with self._mutex:
            self._guests.add(guest, host)
            if len(self._guests) <= self._limits.unauthenticated_connections:
                return guest
            oldest = self._guests.oldest()
            assert oldest is not None
            self._guests.discard(oldest)
        self._meter.count_event(Event.CUT)
        oldest.cut()
        return guest

    def _uncount_unauthenticated(self, guest: _Unauthenticated | None) -> None:
        """Stop counting a connection as unauthenticated: it has authenticated or closed."""
        if guest is not None:
            with self._mutex:
                self._guests.discard(guest)

    def _count_rejection(self, host: str, why: str) -> None:
        self._meter.count_event(Event.REFUSED)
        count = self._rejection_log.count()
        if count:
            more = f" ({count} times since the last such line)" if count > 1 else ""
            logger.warning("%s%s", why, more, extra={"client_host": host, "count": count})

    def _uncount(self, host: str, guest: _Unauthenticated | None) -> None:
        self._uncount_unauthenticated(guest)
        with self._mutex:
            self._by_host[host] -= 1
            if not self._by_host[host]:
                del self._by_host[host]

    def _serve_tls(
        self, sock: socket.socket, host: str, tls: ServerTls, guest: _Unauthenticated | None, is_reserved: bool
    ) -> None:
        """Do the TLS handshake in a thread, because a client may be slow, and then serve the connection."""
        try:
            wrapped = self._handshake(tls, sock, guest)
            principal = principal_of(wrapped) or ANONYMOUS
            self._serve(self._connection(wrapped, host, principal, guest, is_reserved=is_reserved), guest)
        except (OSError, ssl.SSLError, ValueError) as error:
            self._meter.count_event(Event.TLS_FAILED)
            self._tls_refusals.report(host, error)
            sock.close()
            self._uncount(host, guest)

    def _handshake(self, tls: ServerTls, sock: socket.socket, guest: _Unauthenticated | None) -> ssl.SSLSocket:
        """Do a TLS handshake within the time limit for all of it. Raise its errors."""
        wrapped = tls.context().wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        try:
            if guest is not None:
                guest.set_shut_down(partial(_shut_down, wrapped))
            # One time limit for the whole handshake: a limit for each read would let a client send a byte now and then.
            ends_s = time.monotonic() + self._limits.authentication_s
            wrapped.setblocking(False)
            while True:
                try:
                    wrapped.do_handshake()
                    return wrapped
                except ssl.SSLWantReadError:
                    events = select.POLLIN
                except ssl.SSLWantWriteError:
                    events = select.POLLOUT
                if not wait_for(wrapped, events, ends_s - time.monotonic()):
                    raise TimeoutError("the TLS handshake took too long")
        except BaseException:
            wrapped.close()
            raise

    # ------------------------------------------------------------ connections

    def _connection(
        self, sock: socket.socket, host: str, principal: Principal, guest: _Unauthenticated | None, *, is_reserved: bool
    ) -> KafkaConnection:
        limits, security = self._limits, self._security
        check_interval_s = min(_CHECK_INTERVAL_S, limits.patience_s, limits.idle_s, limits.authentication_s)
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        transport: Transport
        if isinstance(sock, ssl.SSLSocket):
            transport = TlsTransport(sock, check_interval_s, limits.patience_s)
        else:
            transport = PlainTransport(sock, check_interval_s, limits.patience_s)
        if guest is not None:
            guest.set_shut_down(transport.shut_down)
        sasl = security.make_sasl() if security.make_sasl is not None else None
        if sasl is None:
            self._uncount_unauthenticated(guest)
        frames = FrameReader(
            transport, self._pool,
            limit_bytes=limits.request_bytes if sasl is None else limits.unauthenticated_request_bytes,
            control_limit_bytes=limits.control_request_bytes, patience_s=limits.patience_s, idle_s=limits.idle_s,
        )  # fmt: skip
        if sasl is not None:
            frames.deadline_s = time.monotonic() + limits.authentication_s
        if is_reserved:
            frames.deadline_s = time.monotonic() + _PROBE_S
        return KafkaConnection(
            transport, frames, self._handle, client_host=host, principal=principal, sasl=sasl,
            limit_bytes=limits.request_bytes, unauthenticated_requests_max=limits.unauthenticated_requests,
            on_authenticated=partial(self._uncount_unauthenticated, guest),
            waiting_bytes_max=limits.answered_bytes, meter=self._meter, afterwards=self._afterwards,
        )  # fmt: skip

    def _serve(self, connection: KafkaConnection, guest: _Unauthenticated | None) -> None:
        """Register the connection, and give it to the thread that serves connections (`Loop`)."""
        with self._mutex:
            self._open[connection] = guest
        if self._is_closed:
            connection.finish()
        self._loop.add(connection)

    def _take_over(self, connection: KafkaConnection, turn: StepResult) -> None:
        """Handle a connection that the loop has released: start a thread for it, or close it."""
        if turn is StepResult.NEEDS_THREAD:
            try:
                threading.Thread(
                    target=self._run_connection,
                    args=(connection,),
                    name=f"segmentlog-{connection.client_host}",
                    daemon=True,
                ).start()
                return
            except RuntimeError as error:
                self._count_rejection(connection.client_host, f"{connection.client_host}: closed: {error}")
        self._end(connection)

    def _run_connection(self, connection: KafkaConnection) -> None:
        """Serve a connection in its own thread as long as it needs one."""
        if connection.run() is StepResult.STAYS:
            self._loop.add(connection)
        else:
            self._end(connection)

    def _end(self, connection: KafkaConnection) -> None:
        connection.end()
        received, sent = connection.traffic
        with self._ended:
            guest = self._open.pop(connection, None)
            self._received_bytes += received
            self._sent_bytes += sent
            if connection.is_probe:
                self._probers.pop(connection.client_host, None)
                self._probers[connection.client_host] = time.monotonic()
                if len(self._probers) > _PROBERS_MAX:
                    del self._probers[next(iter(self._probers))]
            self._ended.notify_all()
        self._uncount(connection.client_host, guest)


def _shut_down(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_RDWR)
