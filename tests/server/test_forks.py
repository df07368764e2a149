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
    """While a forked child lives, the parent's server ends: its clients notice, and another server takes its place."""
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


def test_a_server_that_was_closed_closes_nothing_in_a_child(tmp_path: Path) -> None:
    """The numbers of its descriptors are other files' by then, which a child of this process may need."""
    server = segmentlog.serve(tmp_path / "store", port=0)
    server.close()
    pipes = [os.pipe() for _ in range(32)]  # more than it had
    try:
        pid = os.fork()
        if not pid:
            code = 1
            try:
                for _, write_fd in pipes:
                    os.write(write_fd, b"x")
                code = 0
            finally:
                os._exit(code)
        _, status = os.waitpid(pid, 0)
        assert status == 0
    finally:
        for ends in pipes:
            for fd in ends:
                os.close(fd)
    del server  # kept until here, because a fork asks for it
