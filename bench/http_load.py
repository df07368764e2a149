"""Clients of the HTTP door in a process of their own, on bare sockets: what they do must not be what is measured.

``python -m bench.http_load`` reads commands as lines of JSON and answers each with a line.

    {"do": "produce", "port", "requests": files of whole requests, "connections", "seconds"} -> {"requests", "seconds"}
    {"do": "upload", "port", "request": a file with the head, "body": a file}                -> {"seconds"}
    {"do": "download", "port", "request": text}                                              -> {"bytes", "seconds"}
    {"do": "listen", "port", "request": text, "clients", "marks": n, "mark": text}              -> {"listening"}, then
        {"bytes", "seconds"} once each of the clients has got so many marks
"""

from __future__ import annotations

import json
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_PIECE = 1 << 20


def _connect(port: int) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", port))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def _read_answer(sock: socket.socket, buffer: bytearray) -> None:
    """One answer with a content-length, taken out of the buffer."""
    while (end := buffer.find(b"\r\n\r\n")) < 0:
        buffer += _received(sock)
    head = bytes(buffer[:end]).lower()
    if not head.startswith(b"http/1.1 200"):
        raise RuntimeError(bytes(buffer).decode(errors="replace"))
    at = head.index(b"content-length:") + len(b"content-length:")
    total = end + 4 + int(head[at:].split(b"\r\n", 1)[0])
    while len(buffer) < total:
        buffer += _received(sock)
    del buffer[:total]


def _received(sock: socket.socket) -> bytes:
    data = sock.recv(_PIECE)
    if not data:
        raise RuntimeError("the server hung up")
    return data


def produce(command: dict[str, Any]) -> dict[str, Any]:
    """Send requests for some seconds, one after the other on each connection."""
    requests = [Path(path).read_bytes() for path in command["requests"]]
    done = [0] * command["connections"]
    ends_s = time.perf_counter() + command["seconds"]

    def work(number: int) -> None:
        with _connect(command["port"]) as sock:
            buffer, at = bytearray(), number
            while time.perf_counter() < ends_s:
                sock.sendall(requests[at % len(requests)])
                _read_answer(sock, buffer)
                done[number] += 1
                at += 1

    began_s = time.perf_counter()
    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(done))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {"requests": sum(done), "seconds": time.perf_counter() - began_s}


def upload(command: dict[str, Any]) -> dict[str, Any]:
    """One large body."""
    head, body = Path(command["request"]).read_bytes(), Path(command["body"]).read_bytes()
    with _connect(command["port"]) as sock:
        began_s = time.perf_counter()
        sock.sendall(head)
        sock.sendall(body)
        _read_answer(sock, bytearray())
        return {"seconds": time.perf_counter() - began_s}


def download(command: dict[str, Any]) -> dict[str, Any]:
    """One large answer, until the server closes."""
    with _connect(command["port"]) as sock:
        began_s, size = time.perf_counter(), 0
        sock.sendall(command["request"].encode())
        while data := sock.recv(_PIECE):
            size += len(data)
        return {"bytes": size, "seconds": time.perf_counter() - began_s}


def listen(command: dict[str, Any], tell: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Many clients at once, each until it has got so many marks."""
    mark = command["mark"].encode()
    selector = selectors.DefaultSelector()
    left: dict[socket.socket, int] = {}
    tails: dict[socket.socket, bytes] = {}
    for _ in range(command["clients"]):
        sock = _connect(command["port"])
        sock.sendall(command["request"].encode())
        while not (data := _received(sock)).endswith(b"\n"):
            pass
        left[sock], tails[sock] = command["marks"] - data.count(mark), b""
        sock.setblocking(False)
        selector.register(sock, selectors.EVENT_READ)
    tell({"listening": len(left)})
    size, began_s = 0, 0.0
    while left:
        for key, _ in selector.select():
            sock = key.fileobj  # type: ignore[assignment]
            data = _received(sock)
            began_s = began_s or time.perf_counter()
            size += len(data)
            data = tails[sock] + data
            left[sock] -= data.count(mark)
            tails[sock] = data[-len(mark) + 1 :]
            if left[sock] <= 0:
                selector.unregister(sock)
                sock.close()
                del left[sock]
    return {"bytes": size, "seconds": time.perf_counter() - began_s}


def main() -> None:
    """Do what is said until nothing is."""

    def tell(answer: dict[str, Any]) -> None:
        print(json.dumps(answer), flush=True)

    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "listen":
            tell(listen(command, tell))
        else:
            tell({"produce": produce, "upload": upload, "download": download}[command["do"]](command))


if __name__ == "__main__":
    main()
