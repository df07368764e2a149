"""Server lock of a store, and the addresses that a server advertises to clients.

Imports few modules, so that the supervisor process loads only what it needs.
"""

from __future__ import annotations

import base64
import errno
import logging
import os
import socket
from collections.abc import Iterable, Sequence
from typing import Final

import xxhash

from segmentlog.errors import ReadOnlyStore, SegmentlogError
from segmentlog.format.file_names import SERVER_FILE
from segmentlog.format.server_file import ServerFile, ServerNode, decode_server_file, encode_server_file
from segmentlog.server.worker_cluster import WorkerNode
from segmentlog.storage.file_locks import is_current
from segmentlog.storage.file_operations import write_all
from segmentlog.storage.fork_safety import close_lockable, open_lockable
from segmentlog.storage.fs import FileSystem
from segmentlog.storage.interrupt_safe import EXCLUSIVE, NON_BLOCKING

logger = logging.getLogger("segmentlog.server")

DEFAULT_PORT: Final = 9092
_NODES_MAX: Final = 64
"""As many workers as a server can have."""


_UNWRITABLE: Final = frozenset((errno.EACCES, errno.EPERM, errno.EROFS))


class AlreadyServed(SegmentlogError):
    """Another server serves the store. Two servers of one store would give clients different answers."""

    def __init__(self, path: str, holder: str) -> None:
        super().__init__(path, holder)
        self.path, self.holder = path, holder

    def __str__(self) -> str:
        return f"{self.path} is already served{self.holder}; stop that server, or start it with more --workers"


class ServerLock:
    """The lock that the server of a store holds while it runs. The kernel releases it when the process ends."""

    def __init__(self, path: str) -> None:
        self._fs = FileSystem()
        self._path = f"{path}/{SERVER_FILE}"
        self._is_released = False
        while True:
            try:
                self._fd = open_lockable(self._fs, self._path, os.O_RDWR | os.O_CREAT)
            except OSError as error:
                if error.errno not in _UNWRITABLE:
                    raise
                why = self._fs.why_unwritable(path) or f"{self._path}: {error.strerror}"
                raise ReadOnlyStore(path, "serve it to Kafka's clients", why) from None
            try:
                self._fs.flock(self._fd, EXCLUSIVE | NON_BLOCKING)
            except BlockingIOError:
                holder = _holder_of(self._fs, self._fd)
                close_lockable(self._fs, self._fd)
                raise AlreadyServed(path, holder) from None
            if is_current(self._fs, self._fd, self._path):
                return
            close_lockable(self._fs, self._fd)

    def write_addresses(self, address: str, nodes: Iterable[WorkerNode]) -> None:
        """Write this server's addresses to the lock file: for a second server's error message, and for a standby."""
        content = ServerFile(os.getpid(), address, tuple(ServerNode(*node) for node in nodes))
        self._fs.ftruncate(self._fd, 0)
        write_all(self._fs, self._fd, [encode_server_file(content)], 0)

    def release(self) -> None:
        """Release the lock, so that another server can serve the store. Idempotent."""
        if not self._is_released:
            self._is_released = True
            close_lockable(self._fs, self._fd)


def _holder_of(fs: FileSystem, fd: int) -> str:
    holder = decode_server_file(fs.pread(fd, 1 << 16, 0))
    return "" if holder is None else f" by process {holder.pid}, which listens on {holder.address}"


def worker_nodes(
    host: str, sockets: Sequence[socket.socket], advertised: tuple[str, int] | None, *, is_one_of_several: bool = False
) -> tuple[list[WorkerNode], str]:
    """Return (the workers with the addresses that clients use, the bootstrap address).

    All workers share the first socket. If there are several workers, each also has a socket of its own, on one of
    the ports after the first.

    Node ids are the numbers of the workers, from 1 on. With ``is_one_of_several``, other machines serve the same store
    at other times. Node ids then follow from the bootstrap address: two machines must not have the same id. If they
    have, librdkafka keeps its connection to the former coordinator of a group, and never finds the new one.
    """
    ports = [sock.getsockname()[1] for sock in sockets]
    name = host
    if host in ("0.0.0.0", "::"):
        name = socket.gethostname()
    if advertised is not None:
        name, ports = advertised[0], [advertised[1] + index for index in range(len(sockets))]
    own = ports[1:] or ports
    bootstrap = f"[{name}]:{ports[0]}" if ":" in name else f"{name}:{ports[0]}"
    before_first = _machine_number(bootstrap) * _NODES_MAX if is_one_of_several else 0
    return [WorkerNode(before_first + index, name, port) for index, port in enumerate(own, 1)], bootstrap


def _machine_number(address: str) -> int:
    """Return a number from 1 to 2**23 - 1. All node ids stay below 2**30: Java's clients use 2**31 - 1 - id, too."""
    return 1 + xxhash.xxh3_64_intdigest(address.encode()) % (2**23 - 1)


def warn_uncovered_names(cert_path: str | None, nodes: Iterable[WorkerNode]) -> None:
    """Log a warning for each advertised host name that the certificate does not contain: clients will reject it."""
    if cert_path is None:
        return
    from segmentlog.security.certificate_names import (
        explain_uncovered_name,
    )  # imports `ssl`, which a supervisor does not need

    for host in dict.fromkeys(node.host for node in nodes):
        if (why := explain_uncovered_name(cert_path, host)) is not None:
            logger.warning("%s", why)


def cluster_id_of(store_id: str) -> str:
    """Return a store id in the form of a Kafka cluster id: 16 bytes as 22 characters."""
    return base64.urlsafe_b64encode(bytes.fromhex(store_id)).decode().rstrip("=")
