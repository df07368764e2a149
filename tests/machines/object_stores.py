"""The object store between two machines: a folder on a file system that may stop to answer, or an S3 server on a host.

Both can be made unreachable for all machines; of the S3 server, links can also be cut one by one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from machines.network import Network
from objects.s3_servers import BUCKET, KEY_ID, REGION, SECRET, S3Server, versitygw_program
from waiting import wait_until

from segmentlog.testing.crashfs import CrashFS

HOST = "bucket"
_PORT = 7070


class ObjectStore(Protocol):
    """What both kinds have."""

    kind: str
    url: str
    environment: dict[str, str]

    def disconnect(self) -> None:
        """Make it unreachable for all machines, without an error to them."""

    def connect(self) -> None:
        """Make it reachable again. Idempotent."""

    def is_locked(self) -> bool:
        """Return whether a process holds the lock of the manifest, which a stopped process must not."""


class FolderStore:
    """A folder of a mounted file system. While its server is stopped, all calls wait, as with NFS."""

    kind = "folder"

    def __init__(self, disk: CrashFS) -> None:
        self._disk = disk
        self._folder = disk.path / "bucket"
        self._folder.mkdir()
        self.url = f"file://{self._folder}"
        self.environment: dict[str, str] = {}

    def disconnect(self) -> None:
        """Stop the process that serves the file system."""
        os.kill(self._disk.pid, signal.SIGSTOP)

    def connect(self) -> None:
        """Continue it."""
        os.kill(self._disk.pid, signal.SIGCONT)

    def is_locked(self) -> bool:
        """Return whether the lock file is locked now; there is one only if an earlier version created it."""
        lock = self._folder / "manifest.json.lock"
        if lock.is_dir():
            return False
        with lock.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False


class S3Store:
    """Versity's gateway on the host ``bucket``."""

    kind = "s3"

    def __init__(self, network: Network, machines: tuple[str, ...]) -> None:
        self._network, self._machines = network, machines
        self.url = f"s3://{BUCKET}/store"
        self.environment = S3Server(f"http://{network.address(HOST)}:{_PORT}").environment

    def disconnect(self) -> None:
        """Lose what the machines send to it."""
        for machine in self._machines:
            self._network.cut(machine, HOST)

    def connect(self) -> None:
        """Do nothing: `Network.heal` ends all cuts."""

    def is_locked(self) -> bool:
        """Return False: nothing of a machine is locked in it."""
        return False


@contextlib.contextmanager
def folder_store(folder: Path) -> Iterator[FolderStore]:
    """Yield an empty folder on a mounted file system below ``folder``. Raise `CrashFSUnavailable`."""
    disk = CrashFS(folder / "bucket-disk", folder / "bucket-mount")
    try:
        yield FolderStore(disk)
    finally:
        os.kill(disk.pid, signal.SIGCONT)
        disk.close()


@contextlib.contextmanager
def s3_store(folder: Path, network: Network, machines: tuple[str, ...]) -> Iterator[S3Store]:
    """Yield an empty bucket of an S3 server. Raise `Missing` if the server cannot be built."""
    (folder / "buckets" / BUCKET).mkdir(parents=True)
    command = [
        *network.command(HOST), str(versitygw_program()), "--port", f"{network.address(HOST)}:{_PORT}",
        "--access", KEY_ID, "--secret", SECRET, "--region", REGION, "--quiet", "posix", str(folder / "buckets"),
    ]  # fmt: skip
    log_path = folder / "s3.log"
    with log_path.open("w") as log:
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        wait_until(lambda: network.listens(HOST, _PORT) or server.poll() is not None, log_path.read_text)
        assert server.poll() is None, log_path.read_text()[-2000:]
        yield S3Store(network, machines)
    finally:
        server.kill()
        server.wait()
