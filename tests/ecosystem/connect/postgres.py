"""A PostgreSQL of its own, whose changes can be followed."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from server.clients.driver import WAIT_S
from server.clients.fetching import Missing
from server.clients.java_driver import class_path, java_command

from segmentlog.testing.ports import free_ports

DEBEZIUM = Path(__file__).with_name("debezium")
_NOBODY = 65534
_SAFELY: Any = {"filter": "tar"} if hasattr(tarfile, "tar_filter") else {}  # from Python 3.11.4 on


def plugins() -> Path:
    """Return the folder with the connectors, as Kafka Connect's configuration has it.

    Raises `Missing` if they are not available.
    """
    if platform.machine() != "x86_64":
        raise Missing("the package of PostgreSQL is for x86_64")
    return Path(class_path(DEBEZIUM).split(os.pathsep)[0]).parent


class Postgres:
    """A database server at a port, and a connection to it."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.url = f"jdbc:postgresql://127.0.0.1:{port}/postgres"
        command = java_command("Sql", f"{self.url}?user=postgres", memory="64m", project=DEBEZIUM)
        self._client = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def do(self, statement: str) -> list[list[str]]:
        """Run a statement and return its rows."""
        assert self._client.stdin is not None
        assert self._client.stdout is not None
        self._client.stdin.write(" ".join(statement.split("\n")) + "\n")
        self._client.stdin.flush()
        rows: list[list[str]] = []
        for line in self._client.stdout:
            if line == ".\n":
                return rows
            assert not line.startswith("! "), (statement, line)
            rows.append(line.rstrip("\n").split("\t"))
        raise AssertionError(f"no answer to {statement}")

    def close(self) -> None:
        """Close the connection."""
        self._client.kill()
        self._client.communicate()


@contextmanager
def running() -> Iterator[Postgres]:
    """Start a new server, and delete it afterwards."""
    # PostgreSQL refuses to run as root, and other users may not enter a test folder of root.
    folder = Path(tempfile.mkdtemp(prefix="postgres-", dir="/tmp"))
    try:
        with zipfile.ZipFile(next((plugins() / "libraries").glob("embedded-postgres-binaries-*.jar"))) as jar:
            name = next(name for name in jar.namelist() if name.endswith(".txz"))
            with jar.open(name) as packed, tarfile.open(fileobj=packed, mode="r|xz") as archive:
                archive.extractall(folder, **_SAFELY)
        as_whom: Sequence[str] = ()
        if os.geteuid() == 0:
            as_whom = ("setpriv", f"--reuid={_NOBODY}", f"--regid={_NOBODY}", "--clear-groups")
            for path in (folder, *folder.rglob("*")):
                os.chown(path, _NOBODY, _NOBODY, follow_symlinks=False)
        data, port = folder / "data", free_ports()
        subprocess.run(
            [*as_whom, folder / "bin" / "initdb", "-D", data, "-U", "postgres", "-A", "trust", "-E", "UTF8", "-N"],
            check=True, capture_output=True, timeout=4 * WAIT_S, cwd="/",
        )  # fmt: skip
        settings = {
            "listen_addresses": "127.0.0.1", "port": port, "unix_socket_directories": "", "wal_level": "logical",
            "fsync": "off", "timezone": "UTC",
        }  # fmt: skip
        words = [word for key, value in settings.items() for word in ("-c", f"{key}={value}")]
        with open(folder / "log", "w") as log:
            server = subprocess.Popen([*as_whom, folder / "bin" / "postgres", "-D", data, *words], stderr=log, cwd="/")
        database = Postgres(port)
        try:
            yield database
        finally:
            database.close()
            server.terminate()  # this alone would wait for the connected clients
            server.send_signal(2)  # SIGINT disconnects them
            server.wait(WAIT_S)
            print((folder / "log").read_text()[-4000:])
    finally:
        shutil.rmtree(folder)
