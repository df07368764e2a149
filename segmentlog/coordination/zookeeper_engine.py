"""The coordination engine over ZooKeeper: a document is a node, and a swap sets the node if its version is still N.

The node of a document is at the path of the URL and the name of the document, such as ``/orders/cluster.json``. The
version of the node is its tag. A read first waits until its server has all changes (``sync``).

kazoo keeps one connection in threads of its own. It connects to the next server, and sends nothing again, when a
connection is lost: requests without an answer fail. Sessions play no part, so they are short: a server that has stopped
is noticed after `_SESSION_S` at the latest.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from segmentlog.coordination.coordination_engine import ConditionFailed
from segmentlog.coordination.engine_url import EngineAddress
from segmentlog.errors import CoordinatorRefused, CoordinatorUnreachable, InvalidConfig
from segmentlog.storage import fork_safety
from segmentlog.texts import in_line

if TYPE_CHECKING:
    from kazoo.client import KazooClient
    from kazoo.interfaces import IAsyncResult

REQUEST_S: Final = 10.0
"""Time limit of a request, with the time to find a server that answers."""
_SESSION_S: Final = 4.0
"""ZooKeeper's shortest session with its default tick of two seconds."""
_RECONNECT_S: Final = 1.0
"""Longest pause between two attempts to connect to all servers."""
_REFUSALS: Final = ("BadArguments", "Marshalling", "NoChildrenForEphemerals", "QuotaExceeded", "Unimplemented")
"""Errors of ZooKeeper that a retry meets again."""
_MAX_TEXT: Final = 200
_KAZOO_MODULES: Final = ("client", "exceptions", "handlers.threading", "retry", "security")

Send = Callable[["KazooClient"], "list[IAsyncResult]"]


class ZooKeeperEngine:
    """A `CoordinationEngine` over ZooKeeper 3.5 or newer. Thread-safe. A forked child opens connections of its own.

    Connect at the first request. If the address has a user, only this user can read or change the nodes that this
    engine creates (scheme ``digest``). Otherwise every user of ZooKeeper can.
    """

    def __init__(self, address: EngineAddress) -> None:
        self._address = address
        self.url = address.url
        self._kazoo = _import_kazoo(address.url)
        security = self._kazoo.security
        self._acl = security.CREATOR_ALL_ACL if address.user else security.OPEN_ACL_UNSAFE
        self._connection: _Connection | None = None
        self._is_closed = False
        self._mutex = fork_safety.lock(self, "_mutex", "_discard_copies")

    def get(self, key: str) -> tuple[bytes, str] | None:
        """Do as `CoordinationEngine.get`."""
        path = self._path(key)
        synced, found = self._send(lambda client: [client.sync_async(path), client.get_async(path)])
        self._require(key, synced)
        if isinstance(found, self._kazoo.exceptions.NoNodeError):
            return None
        data, stat = self._require(key, found)
        return data, str(stat.version)

    def compare_and_swap(self, key: str, data: bytes, tag: str | None) -> str:
        """Do as `CoordinationEngine.compare_and_swap`."""
        if tag is None:
            return self._create(key, data)
        errors = self._kazoo.exceptions
        (found,) = self._send(lambda client: [client.set_async(self._path(key), data, int(tag))])
        if isinstance(found, errors.BadVersionError | errors.NoNodeError):
            raise ConditionFailed
        return str(self._require(key, found).version)

    def wait_for_change(self, key: str, tag: str | None, seconds: float) -> bool:
        """Do as `CoordinationEngine.wait_for_change`."""
        path = self._path(key)
        try:
            connection = self._connected(time.monotonic() + min(seconds, REQUEST_S))
            change = connection.changes.setdefault(path, _Change(connection.handler.event_object()))
            change.event.clear()
            # Pass the same method each time, so that kazoo and ZooKeeper keep only one watch of each node.
            (found,) = self._send(lambda client: [client.exists_async(path, change.notify)])
            stat = self._require(key, found)
        except (CoordinatorUnreachable, CoordinatorRefused):
            return False
        if (None if stat is None else str(stat.version)) == tag:
            change.event.wait(seconds)
        return True

    def delete(self, keys: Iterable[str]) -> None:
        """Do as `CoordinationEngine.delete`."""
        for key in keys:
            found = self._delete(self._path(key))
            if not isinstance(found, self._kazoo.exceptions.NoNodeError):
                self._require(key, found)

    def close(self) -> None:
        """Do as `CoordinationEngine.close`. It can take some seconds if the server does not answer."""
        with self._mutex:
            self._is_closed = True
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    # ------------------------------------------------------------ requests

    def _create(self, key: str, data: bytes) -> str:
        found = self._create_node(key, self._path(key), data)
        if isinstance(found, self._kazoo.exceptions.NodeExistsError):
            raise ConditionFailed
        self._require(key, found)
        return "0"

    def _create_node(self, key: str, path: str, data: bytes) -> Any:
        """Create a node, and before it the nodes above it that do not exist. Return the answer, or the error."""
        errors = self._kazoo.exceptions
        (found,) = self._send(lambda client: [client.create_async(path, data, self._acl)])
        parent = path.rpartition("/")[0]
        if isinstance(found, errors.NoNodeError) and parent:
            made = self._create_node(key, parent, b"")
            if not isinstance(made, errors.NodeExistsError):
                self._require(key, made)
            (found,) = self._send(lambda client: [client.create_async(path, data, self._acl)])
        return found

    def _delete(self, path: str) -> Any:
        return self._send(lambda client: [client.delete_async(path)])[0]

    def _send(self, send: Send) -> list[Any]:
        """Send requests, and return for each the answer or ZooKeeper's error. Raise `CoordinatorUnreachable`."""
        ends_s = time.monotonic() + REQUEST_S
        connection = self._connected(ends_s)
        answers = []
        for pending in send(connection.client):
            if not pending.wait(max(ends_s - time.monotonic(), 0)):
                connection.handler.disconnect()  # the server may have stopped: try the next one
                raise CoordinatorUnreachable(self.url, "no answer in time")
            answers.append(pending.value if pending.exception is None else pending.exception)
        return answers

    def _connected(self, ends_s: float) -> _Connection:
        """Return the connection, once a server answers. Raise `CoordinatorUnreachable`."""
        with self._mutex:
            if self._is_closed:
                raise CoordinatorUnreachable(self.url, "this coordinator is closed")
            if self._connection is not None and self._connection.has_ended:
                self._connection.close()
                self._connection = None
            if self._connection is None:
                self._connection = _Connection(self._kazoo, self._address)
            connection = self._connection
        if not connection.live.wait(max(ends_s - time.monotonic(), 0)):
            reason = connection.reasons.text or "no answer in time"
            raise CoordinatorUnreachable(self.url, f"no server can be reached: {reason}")
        return connection

    def _require(self, key: str, found: Any) -> Any:
        """Return an answer. If it is an error of ZooKeeper, raise `CoordinatorUnreachable` or `CoordinatorRefused`."""
        errors = self._kazoo.exceptions
        if not isinstance(found, BaseException):
            return found
        if isinstance(found, errors.NoAuthError | errors.AuthFailedError | errors.InvalidACLError):
            raise CoordinatorRefused(self.url, f"{key}: access denied")
        name = type(found).__name__.removesuffix("Error")
        if name in _REFUSALS:
            raise CoordinatorRefused(self.url, f"{key}: ZooKeeper refuses the request ({name})")
        is_lost = isinstance(found, errors.ConnectionLoss | errors.SessionExpiredError)
        what = "the connection was closed" if is_lost else "the request failed"
        raise CoordinatorUnreachable(self.url, f"{key}: {what} ({name})")

    def _path(self, key: str) -> str:
        return f"{self._address.path}/{key}"

    def _discard_copies(self) -> None:
        """Close, in a forked child, its copies of the parent's connection. The child has none of its threads."""
        if self._connection is not None:
            self._connection.discard_copies()
        self._connection = None


class _Connection:
    """A client of kazoo, connecting or connected."""

    def __init__(self, kazoo: ModuleType, address: EngineAddress) -> None:
        self.handler = _make_handler(kazoo)
        self._still_connecting: type[Exception] = kazoo.exceptions.WriterNotClosedException
        self.reasons = _LastReason()
        self.changes: dict[str, _Change] = {}
        """By path of the node."""
        logger = logging.Logger("segmentlog.zookeeper", logging.WARNING)  # kazoo logs passwords, at a lower level
        logger.addHandler(self.reasons)
        retry = kazoo.retry.KazooRetry(max_tries=-1, delay=0.1, max_delay=_RECONNECT_S)
        hosts = ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in address.hosts)
        files = address.files
        self.client: KazooClient = kazoo.client.KazooClient(
            hosts, _SESSION_S, handler=self.handler, connection_retry=retry, logger=logger,
            auth_data=[("digest", f"{address.user}:{address.password}")] if address.user else None,
            use_ssl=address.is_tls, check_hostname=address.is_tls, ca=files.get("cacert"), certfile=files.get("cert"),
            keyfile=files.get("key"), keyfile_password="",
        )  # fmt: skip
        self.live = self.handler.live = self.client.start_async()

    @property
    def has_ended(self) -> bool:
        """Whether kazoo has given up, after an answer that is not ZooKeeper's, or a refused password."""
        return not self.handler.is_connecting

    def close(self) -> None:
        """End the session and the threads."""
        for change in self.changes.copy().values():
            change.event.set()
        with contextlib.suppress(self._still_connecting):  # a server name takes long to resolve
            self.client.stop()
            self.client.close()

    def discard_copies(self) -> None:
        """Close a forked child's copies of the sockets."""
        self.handler.close_copies()
        atexit.unregister(self.handler.stop)


class _Change:
    """An event that kazoo sets when a node changes, or when the connection is lost."""

    def __init__(self, event: threading.Event) -> None:
        self.event = event

    def notify(self, _: object) -> None:
        """End the calls of `ZooKeeperEngine.wait_for_change`."""
        self.event.set()


class _LastReason(logging.Handler):
    """Keeps the last warning of kazoo: it has the reason why a server cannot be reached."""

    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text = in_line(record.getMessage())[:_MAX_TEXT]


def _make_handler(kazoo: ModuleType) -> Any:
    """Return a handler of kazoo that knows the sockets and the thread of the connection."""

    class ConnectionThreads(kazoo.handlers.threading.SequentialThreadingHandler):  # type: ignore[misc, name-defined]
        """Opens sockets and starts threads for one client."""

        def __init__(self) -> None:
            super().__init__()
            self._connected: socket.socket | None = None
            self._pair: tuple[socket.socket, ...] = ()
            self._last_thread: threading.Thread | None = None
            self.live: threading.Event | None = None
            """Set while a server answers."""

        @property
        def is_connecting(self) -> bool:
            """Whether the thread of the connection runs: the client starts it last."""
            return self._last_thread is not None and self._last_thread.is_alive()

        def create_connection(self, *args: Any, **options: Any) -> socket.socket:
            self._connected = super().create_connection(*args, **options)
            return self._connected

        def create_socket_pair(self) -> tuple[socket.socket, ...]:
            self._pair = super().create_socket_pair()
            return self._pair

        def spawn(self, func: Callable[..., object], *args: Any, **options: Any) -> threading.Thread:
            def run() -> None:
                with contextlib.suppress(Exception):  # kazoo has logged it
                    func(*args, **options)

            self._last_thread = super().spawn(run)
            return self._last_thread

        def stop(self) -> None:
            """Stop the workers, as the client does before it waits for the thread of the connection."""
            super().stop()
            if self.live is not None and not self.live.is_set():
                self.disconnect()  # the thread waits for an answer

        def disconnect(self) -> None:
            """End the connection, so that the client connects to another server."""
            if self._connected is not None:
                with contextlib.suppress(OSError):
                    socket.socket.shutdown(self._connected, socket.SHUT_RDWR)

        def close_copies(self) -> None:
            """Close a forked child's copies."""
            for sock in (self._connected, *self._pair):
                if sock is not None:
                    with contextlib.suppress(OSError):
                        os.close(sock.detach())

    return ConnectionThreads()


def _import_kazoo(url: str) -> ModuleType:
    try:
        for name in _KAZOO_MODULES:
            importlib.import_module(f"kazoo.{name}")
        return importlib.import_module("kazoo")
    except ImportError:
        accepted = (
            "the URL of an object store or of etcd. To use ZooKeeper, install kazoo: pip install '.[zookeeper]' in a"
            " clone of segmentlog"
        )
        raise InvalidConfig("url", url, accepted) from None
