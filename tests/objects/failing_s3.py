"""An S3 server in this process that fails on demand: it refuses, cuts, repeats secrets, or never answers."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from urllib.parse import quote

from objects.s3_servers import KEY_ID, OTHER_KEY_ID, SECRET, S3Server


class Asked(NamedTuple):
    """A request that came."""

    method: str
    path: str
    headers: dict[str, str]


Fault = Callable[["_Handler"], None]


class FailingS3:
    """An S3 server in this process with conditional puts. The next requests meet ``faults``, one each.

    ``ignores``: conditions that the server ignores, like servers that do not support them.
    """

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.faults: list[Fault] = []
        self.always: Fault | None = None
        self.asked: list[Asked] = []
        self.ignores: tuple[str, ...] = ()
        self.mutex = threading.Lock()
        self.ended = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"s3": self}))
        self._server.daemon_threads = False
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    @property
    def server(self) -> S3Server:
        """Where it listens."""
        return S3Server(f"http://127.0.0.1:{self.port}")

    def close(self) -> None:
        """Stop answering, and end the server."""
        self.ended.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    s3: FailingS3
    body: bytes

    def do_GET(self) -> None:
        self._meet()

    def do_PUT(self) -> None:
        self._meet()

    def do_HEAD(self) -> None:
        self._meet()

    def _meet(self) -> None:
        s3 = self.s3
        with s3.mutex:
            s3.asked.append(Asked(self.command, self.path, {name.lower(): text for name, text in self.headers.items()}))
            fault = s3.faults.pop(0) if s3.faults else s3.always
        if fault is not None:
            fault(self)
            self.close_connection = True
            return
        self.read_body()
        self.answer(*self.do())

    def read_body(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("content-length", 0)))

    def do(self) -> tuple[int, bytes, dict[str, str]]:
        """Execute the request. Return (status, body, headers)."""
        with self.s3.mutex:
            there = self.s3.objects.get(self.path)
            return self._put(there) if self.command == "PUT" else self._get(there)

    def _get(self, there: bytes | None) -> tuple[int, bytes, dict[str, str]]:
        if there is None:
            return 404, _said("NoSuchKey", "The specified key does not exist."), {}
        if self.headers.get("if-match") not in (None, _etag(there)):
            return 412, _said("PreconditionFailed", "It is another one."), {}
        wanted = self.headers.get("range")
        if wanted is None:
            return 200, there, {"ETag": _etag(there)}
        start, end = (int(number) for number in wanted.removeprefix("bytes=").split("-"))
        part = there[start : end + 1]
        told = f"bytes {start}-{start + len(part) - 1}/{len(there)}"
        return 206, part, {"ETag": _etag(there), "Content-Range": told}

    def _put(self, there: bytes | None) -> tuple[int, bytes, dict[str, str]]:
        wanted = {name: self.headers.get(name) for name in ("if-match", "if-none-match") if name not in self.s3.ignores}
        has_changed = wanted.get("if-match") not in (None, None if there is None else _etag(there))
        if has_changed or (wanted.get("if-none-match") == "*" and there is not None):
            return 412, _said("PreconditionFailed", "At least one of the conditions does not hold."), {}
        self.s3.objects[self.path] = self.body
        return 200, b"", {"ETag": _etag(self.body)}

    def answer(self, status: int, body: bytes, headers: dict[str, str], sent: int | None = None) -> None:
        """Send the whole answer, or the head and ``sent`` bytes."""
        self.send_response(status)
        for name, text in headers.items():
            self.send_header(name, text)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Last-Modified", "Wed, 01 Jan 2020 00:00:00 GMT")
        self.end_headers()
        self.wfile.write(body[:sent])

    def log_message(self, *_: Any) -> None:
        """Nowhere."""


def _etag(data: bytes) -> str:
    return f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'


def _said(code: str, message: str) -> bytes:
    return f'<?xml version="1.0"?>\n<Error><Code>{code}</Code><Message>{message}</Message></Error>'.encode()


def refused(status: int, code: str, message: str = "no") -> Fault:
    """Return a fault that answers with this error and does not execute the request."""

    def fault(handler: _Handler) -> None:
        handler.read_body()
        handler.answer(status, _said(code, message), {})

    return fault


def refused_though_done(status: int, code: str) -> Fault:
    """Return a fault that executes the request and then answers with this error."""

    def fault(handler: _Handler) -> None:
        handler.read_body()
        handler.do()
        handler.answer(status, _said(code, "no"), {})

    return fault


def answered(handler: _Handler) -> None:
    """Execute and answer the request."""
    handler.read_body()
    handler.answer(*handler.do())


def lost(handler: _Handler) -> None:
    """Execute the request, and close the connection without an answer."""
    handler.read_body()
    handler.do()


def cut(handler: _Handler) -> None:
    """Close the connection in the middle of the request of a PUT, or of the answer to any other method."""
    if handler.command == "PUT":
        handler.rfile.read(int(handler.headers["content-length"]) // 2)
        return
    status, body, headers = handler.do()
    handler.answer(status, body, headers, len(body) // 2)


def silent(handler: _Handler) -> None:
    """Send no answer until the server is closed."""
    handler.s3.ended.wait()


def repeating(handler: _Handler) -> None:
    """Refuse the request, and repeat its headers and secrets. Some servers do so to show what was signed."""
    handler.read_body()
    sent = "\n".join(f"{name}:{text}" for name, text in handler.headers.items())
    knows = f"{SECRET}, {quote(SECRET, safe='')}, plantedpassword, {OTHER_KEY_ID}"
    told = f"you know {knows}, and asked https://host{handler.path}?X-Amz-Signature=plantedsignature {sent}"
    more = f"<AWSAccessKeyId>{KEY_ID}</AWSAccessKeyId><CanonicalRequest>{sent}</CanonicalRequest></Error>"
    said = _said("SignatureDoesNotMatch", told).replace(b"</Error>", more.encode())
    handler.answer(403, said, {})
