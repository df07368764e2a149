"""A TCP proxy that closes the connection of a chosen request: before the server gets the request, or its answer."""

from __future__ import annotations

import contextlib
import enum
import select
import socket
import threading
from collections.abc import Callable, Iterator

_BUFFER_BYTES = 1 << 16


class Loss(enum.Enum):
    """A message that the proxy does not pass on."""

    REQUEST = enum.auto()
    ANSWER = enum.auto()


class LosingProxy:
    """A proxy on a free port. ``is_request`` and ``is_answer`` recognize bytes of a swap and of an answer."""

    def __init__(self, port: int, is_request: Callable[[bytes], bool], is_answer: Callable[[bytes], bool]) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.losses: list[Loss] = []
        """The messages to lose of the next swaps. Later swaps pass."""
        self._server_port, self._is_request, self._is_answer = port, is_request, is_answer
        self._is_closed = False
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def close(self) -> None:
        """Close all connections."""
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self._threads.append(threading.Thread(target=self._pass_on, args=(client,)))
            self._threads[-1].start()

    def _pass_on(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._server_port)) as server:
            loses_answer = False
            while not self._is_closed:
                for source in select.select([client, server], [], [], 0.05)[0]:
                    data = source.recv(_BUFFER_BYTES)
                    if not data:
                        return
                    if source is client and self.losses and self._is_request(data):
                        if self.losses.pop(0) is Loss.REQUEST:
                            return
                        loses_answer = True
                    if source is server and loses_answer and self._is_answer(data):
                        return
                    (server if source is client else client).sendall(data)


@contextlib.contextmanager
def losing_proxy(kind: str, port: int) -> Iterator[LosingProxy]:
    """Yield a proxy before a server of etcd or ZooKeeper."""
    if kind == "etcd":
        proxy = LosingProxy(port, lambda data: b"request_put" in data, lambda data: True)
    else:
        ping = b"\xff\xff\xff\xfe"  # the number of a ping, after the size of the answer
        proxy = LosingProxy(port, lambda data: b"cluster_id" in data, lambda data: data[4:8] != ping)
    try:
        yield proxy
    finally:
        proxy.close()
