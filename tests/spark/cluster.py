"""A standalone cluster of Spark on this machine: a master and workers, each a process with folders of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pyspark

from segmentlog.spark.java import create_launch_home, find_java
from segmentlog.testing.ports import free_ports

_PATIENCE_S = 90.0
_MEMORY = "768m"


class Cluster(NamedTuple):
    """Where the master listens; each worker has one core, and keeps what it needs in folders below its own."""

    url: str
    workers: list[Path]


@contextlib.contextmanager
def cluster(folder: Path, workers: int, environment: Mapping[str, str]) -> Iterator[Cluster]:
    """Start a cluster, and stop it with all its processes at the end of the block. Raises `JavaNotFound`."""
    home = Path(pyspark.__file__).parent
    common = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("SPARK_", "AWS_"))},
        **environment,
        "JAVA_HOME": str(create_launch_home(find_java())),
        "SPARK_HOME": str(home),
        "SPARK_DAEMON_MEMORY": "128m",
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYSPARK_PYTHON": sys.executable,
    }
    started: list[subprocess.Popen[bytes]] = []

    def start(name: str, main: str, *arguments: str, **more: str) -> Path:
        own = folder / name
        for part in ("cwd", "tmp", "local"):
            (own / part).mkdir(parents=True)
        more |= {"TMPDIR": str(own / "tmp"), "SPARK_LOCAL_DIRS": str(own / "local")}
        with open(own / "log", "wb") as log:
            started.append(
                subprocess.Popen(
                    [str(home / "bin" / "spark-class"), f"org.apache.spark.deploy.{main}", *arguments],
                    stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=own / "cwd", env=common | more,
                    start_new_session=True,
                )
            )  # fmt: skip
        return own

    try:
        port = free_ports()
        url = f"spark://127.0.0.1:{port}"
        here = ("--host", "127.0.0.1", "--webui-port", str(free_ports()))
        master = start("master", "master.Master", *here, "--port", str(port))
        _wait_for(lambda: _listens(port), master, started)
        folders = [
            start(
                f"worker{number}", "worker.Worker", url, "--host", "127.0.0.1", "--webui-port", str(free_ports()),
                "--cores", "1", "--memory", _MEMORY, "--work-dir", str(folder / f"worker{number}" / "work"),
            )
            for number in range(workers)
        ]  # fmt: skip
        for own in folders:
            _wait_for(lambda own=own: b"Successfully registered" in (own / "log").read_bytes(), own, started)
        yield Cluster(url, folders)
    finally:
        # Workers first, and not killed: they end their executors.
        for process in reversed(started):
            process.send_signal(signal.SIGTERM)
        for process in reversed(started):
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


def _wait_for(is_there: Any, own: Path, started: list[subprocess.Popen[bytes]]) -> None:
    ends = time.monotonic() + _PATIENCE_S
    while not is_there():
        dead = [process.args for process in started if process.poll() is not None]
        assert not dead, (own / "log").read_text()[-2000:]
        assert time.monotonic() < ends, (own / "log").read_text()[-2000:]
        time.sleep(0.1)
