"""Servers of etcd and ZooKeeper for tests, on free ports of this machine. Tests can kill, pause and restart them."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_until

from segmentlog.testing.ports import free_ports

_JAVA_FOLDER = Path("/usr/share/java")
_JARS = (
    "zookeeper zookeeper-jute slf4j-api slf4j-simple metrics-core snappy-java commons-io commons-cli netty-handler"
    " netty-common netty-transport netty-buffer netty-codec netty-resolver netty-transport-native-epoll"
    " netty-transport-native-unix-common netty-tcnative"
)
_JAVA_OPTIONS = (
    "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xmx128m", "-Dzookeeper.jmx.log4j.disable=true",
    "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
)  # fmt: skip
_TICK_MS = 2000


class EngineServer:
    """A process of a server, and its restarts at the same port with the same data."""

    def __init__(self, command: Sequence[str], port: int, folder: Path, answers: Callable[[int], bool]) -> None:
        self.port = port
        self._command, self._folder, self._answers = [*command], folder, answers
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the server, without waiting for it."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("ETCD")}
        with open(self._folder / f"server-{self.port}.log", "ab") as log:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self._folder, env=environment
            )

    def wait_until_ready(self) -> None:
        """Wait until the server answers requests."""
        wait_until(self._is_ready, lambda: (self._folder / f"server-{self.port}.log").read_text()[-3000:])

    def kill(self) -> None:
        """Kill the process."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def pause(self) -> None:
        """Stop the process with SIGSTOP: it accepts connections, and answers nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        tasks = Path(f"/proc/{self._process.pid}/task")
        wait_until(lambda: all(_is_stopped(task) for task in tasks.iterdir()))

    def resume(self) -> None:
        """Continue the paused process."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def restart(self) -> None:
        """Kill the process, and start it again with the same data."""
        self.kill()
        self.start()
        self.wait_until_ready()

    def _is_ready(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self._folder / f"server-{self.port}.log").read_text()[-3000:]
        try:
            return self._answers(self.port)
        except (OSError, http.client.HTTPException):
            return False


@contextlib.contextmanager
def running(servers: Sequence[EngineServer]) -> Iterator[None]:
    """Start servers, and kill them at the end."""
    try:
        for server in servers:
            server.start()
        for server in servers:
            server.wait_until_ready()
        yield
    finally:
        for server in servers:
            server.kill()


@contextlib.contextmanager
def etcd(folder: Path, *options: str, members: int = 1, scheme: str = "http") -> Iterator[list[EngineServer]]:
    """Yield the members of an etcd cluster."""
    program = shutil.which("etcd")
    if program is None:
        missing("etcd", "etcd-server")
    ports = free_ports(2 * members)
    peers = [f"http://127.0.0.1:{port}" for port in range(ports + members, ports + 2 * members)]
    servers = []
    for number in range(members):
        own = f"{scheme}://127.0.0.1:{ports + number}"
        command = [
            str(program), "--name", f"m{number}", "--data-dir", str(folder / f"etcd-{number}"),
            "--listen-client-urls", own, "--advertise-client-urls", own,
            "--listen-peer-urls", peers[number], "--initial-advertise-peer-urls", peers[number],
            "--initial-cluster", ",".join(f"m{one}={peer}" for one, peer in enumerate(peers)),
            "--unsafe-no-fsync", "--log-level", "error", *options,
        ]  # fmt: skip
        # The other members vote only once they run, so a member is ready when it listens.
        answers = _listens if scheme == "https" or members > 1 else _is_healthy
        servers.append(EngineServer(command, ports + number, folder, answers))
    with running(servers):
        if members > 1:
            for server in servers:
                wait_until(lambda port=server.port: _is_healthy(port))
        yield servers


@contextlib.contextmanager
def zookeeper(folder: Path, *settings: str) -> Iterator[list[EngineServer]]:
    """Yield one server of ZooKeeper."""
    java = shutil.which("java")
    if java is None or not (_JAVA_FOLDER / "zookeeper.jar").exists():
        missing("ZooKeeper", "libzookeeper-java")
    port = free_ports()
    lines = (
        f"tickTime={_TICK_MS}", f"dataDir={folder}/zookeeper", "clientPortAddress=127.0.0.1", f"clientPort={port}",
        "admin.enableServer=false", "forceSync=no", "preAllocSize=64", "4lw.commands.whitelist=srvr", *settings,
    )  # fmt: skip
    (folder / "zoo.cfg").write_text("\n".join(lines) + "\n")
    jars = ":".join(str(_JAVA_FOLDER / f"{name}.jar") for name in _JARS.split())
    command = [str(java), *_JAVA_OPTIONS, "-cp", jars, "org.apache.zookeeper.server.quorum.QuorumPeerMain", "zoo.cfg"]
    servers = [EngineServer(command, port, folder, _serves_zookeeper)]
    with running(servers):
        yield servers


def missing(what: str, package: str) -> None:
    """Skip the test, because a server is not installed. In CI, which installs it, fail the test."""
    reason = f"{what} is not installed: 'apt-get install {package}' installs it"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


def ask_etcd(port: int, method: str, body: dict[str, Any], token: str = "") -> dict[str, Any]:
    """Send a request to one member of etcd, without the code under test."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("POST", f"/v3/{method}", json.dumps(body), {"Authorization": token} if token else {})
        answer = connection.getresponse()
        found: dict[str, Any] = json.loads(answer.read())
        assert answer.status == 200, found
        return found
    finally:
        connection.close()


def _is_stopped(task: Path) -> bool:
    """Return whether a thread has stopped. It can run for a moment after the signal was sent."""
    return (task / "stat").read_text().rpartition(")")[2].split()[0] == "T"


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _is_healthy(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/health")
        return b'"true"' in connection.getresponse().read()
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _serves_zookeeper(port: int) -> bool:
    # Before it is ready, ZooKeeper accepts connections and may never answer them.
    with socket.create_connection(("127.0.0.1", port), timeout=0.3) as probe:
        probe.sendall(b"srvr")
        answer = b""
        while part := probe.recv(4096):
            answer += part
    return b"Mode:" in answer
