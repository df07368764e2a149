"""A client of an event stream on a plain socket, which controls how much it reads."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import msgspec

from segmentlog.http.serving import HttpServer


class Listener:
    """Reads events: ``with Listener(server, "/topics/t/stream") as events: next(events)`` returns (event, id, data)."""

    def __init__(self, server: HttpServer, path: str, last_id: str | None = None, *, receive_bytes: int = 0) -> None:
        host, _, port = server.address.rpartition(":")
        self._sock = socket.socket()
        if receive_bytes:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        self._sock.settimeout(30)
        self._sock.connect((host, int(port)))
        header = f"last-event-id: {last_id}\r\n" if last_id is not None else ""
        self._sock.sendall(f"GET {path} HTTP/1.1\r\nhost: {server.address}\r\n{header}\r\n".encode())
        self._file = self._sock.makefile("rb")
        self.status = int(self._file.readline().split()[1])
        self.headers = {}
        while line := self._file.readline().strip():
            name, _, value = line.decode().partition(": ")
            self.headers[name.lower()] = value
        self._buffer = b""
        self.first_id = ""
        """The id that the stream begins with, before any event."""
        if self.status == 200:
            _, self.first_id, _ = self._event()

    def __enter__(self) -> Listener:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._file.close()
        self._sock.close()

    def body(self) -> Any:
        """Return the JSON body of a response that is not a stream."""
        return msgspec.json.decode(self._file.read(int(self.headers["content-length"])))

    def __iter__(self) -> Iterator[tuple[str, str, Any]]:
        return self

    def __next__(self) -> tuple[str, str, Any]:
        """Return the next event with data. Raises StopIteration at the end of the stream."""
        while True:
            kind, event_id, data = self._event()
            if data is not None:
                return kind, event_id, data

    def values(self, count: int) -> list[Any]:
        """Return the values of the next records."""
        return [next(self)[2]["value"] for _ in range(count)]

    def _event(self) -> tuple[str, str, Any]:
        while (end := self._buffer.find(b"\n\n")) < 0:
            size = self._file.readline()
            if not size or int(size, 16) == 0:
                raise StopIteration
            self._buffer += self._file.read(int(size, 16))
            self._file.readline()
        block, self._buffer = self._buffer[:end], self._buffer[end + 2 :]
        fields = dict(line.split(b": ", 1) for line in block.split(b"\n"))
        data = fields.get(b"data")
        return (
            fields.get(b"event", b"message").decode(), fields.get(b"id", b"").decode(),
            None if data is None else msgspec.json.decode(data),
        )  # fmt: skip
