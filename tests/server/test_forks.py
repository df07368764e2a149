"""A program that serves a store, and forks."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import segmentlog


def _connected(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=10)


def test_a_child_keeps_neither_port_nor_connections_nor_the_store(tmp_path: Path) -> None:
    """While a forked child lives on, the parent's server ends: its clients notice, and another one takes its place."""
    told_read, told_write = os.pipe()
    go_read, go_write = os.pipe()
    with segmentlog.serve(tmp_path / "store", port=0) as server:
        address = server.bootstrap_servers
        port = int(address.rpartition(":")[2])
        client = _connected(address)
        pid = os.fork()
        if not pid:
            code = 1
            try:
                os.write(told_write, b"x")
                os.read(go_read, 1)
                code = 0
            finally:
                os._exit(code)
        os.read(told_read, 1)
    try:
        assert client.recv(1) == b""
        with segmentlog.serve(tmp_path / "store", port=port) as again:
            _connected(again.bootstrap_servers).close()
    finally:
        os.write(go_write, b"x")
        _, status = os.waitpid(pid, 0)
        client.close()
        for fd in (told_read, told_write, go_read, go_write):
            os.close(fd)
    assert status == 0
