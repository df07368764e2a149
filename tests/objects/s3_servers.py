"""S3 servers for tests: moto's, from PyPI; Versity's gateway, which Go builds; and one that fails as it is told.

The first two are programs on free ports of this machine. Of moto's one request is answered at a time: it looks and puts
in two steps. The gateway looks and puts in one, verifies signatures, and keeps objects as files.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

from server.clients.fetching import Missing, fetched
from server.clients.mortal import free_port

BUCKET = "bucket"
REGION = "eu-central-1"
KEY_ID = "AKIA7PLANTEDKEYID000"
SECRET = "planted/secret+access=key"
_MOTO = """
import sys
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import run_simple
run_simple("127.0.0.1", int(sys.argv[1]), DomainDispatcherApplication(create_backend_app), threaded=False)
"""
_PATIENCE_S = 120.0
_BUILD_S = 900
_VERSITYGW = Path(__file__).with_name("versitygw.txt")


class S3Server(NamedTuple):
    """Where one listens; whoever has ``KEY_ID`` and ``SECRET`` may do everything."""

    endpoint: str

    @property
    def options(self) -> dict[str, Any]:
        """What obstore has to be told."""
        return {
            "endpoint": self.endpoint, "region": REGION, "access_key_id": KEY_ID, "secret_access_key": SECRET,
            "client_options": {"allow_http": True},
        }  # fmt: skip

    @property
    def environment(self) -> dict[str, str]:
        """The same, as users say it."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint, "AWS_REGION": REGION, "AWS_ACCESS_KEY_ID": KEY_ID,
            "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_ALLOW_HTTP": "true",
        }  # fmt: skip


@contextlib.contextmanager
def moto(folder: Path) -> Iterator[S3Server]:
    """moto's server, with an empty bucket. Raises `Missing` where it is not installed."""
    try:
        import moto.server  # noqa: F401
    except ImportError as error:
        raise Missing(f"moto's server is not installed: {error}") from None
    port = free_port()
    with _running([sys.executable, "-c", _MOTO, str(port)], folder, port):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_PATIENCE_S)
        body = (
            f"<CreateBucketConfiguration><LocationConstraint>{REGION}</LocationConstraint></CreateBucketConfiguration>"
        )
        signed_for = f"AWS4-HMAC-SHA256 Credential={KEY_ID}/20200101/{REGION}/s3/aws4_request"
        connection.request("PUT", f"/{BUCKET}", body, {"Authorization": signed_for})
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        connection.close()
        yield S3Server(f"http://127.0.0.1:{port}")


@contextlib.contextmanager
def versitygw(folder: Path) -> Iterator[S3Server]:
    """The gateway, with an empty bucket in ``folder``. Raises `Missing` where it cannot be built."""
    program = versitygw_program()
    port = free_port()
    (folder / "buckets" / BUCKET).mkdir(parents=True)
    command = [program, "--port", f"127.0.0.1:{port}", "--access", KEY_ID, "--secret", SECRET, "--region", REGION]
    with _running([*map(str, command), "--quiet", "posix", str(folder / "buckets")], folder, port):
        yield S3Server(f"http://127.0.0.1:{port}")


def versitygw_program() -> Path:
    """Built once, which takes a minute or two. Raises `Missing`."""
    if shutil.which("go") is None:
        raise Missing("Versity's S3 gateway is built by Go 1.25 or newer, which is not installed")

    def make(folder: Path) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("GO")}
        environment |= {"GOBIN": str(folder), "GOFLAGS": "-modcacherw -trimpath", "GOTOOLCHAIN": "local"}
        command = ["go", "install", "-ldflags=-s -w", _VERSITYGW.read_text().strip()]
        subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=_BUILD_S, cwd=folder,
            env=environment | {"CGO_ENABLED": "0"},
        )  # fmt: skip

    return fetched("versitygw", [_VERSITYGW], make) / "versitygw"


@contextlib.contextmanager
def _running(command: list[str], folder: Path, port: int) -> Iterator[None]:
    """A server, once something listens at its port."""
    with open(folder / "server.log", "w") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=folder)
    try:
        ends_s = time.monotonic() + _PATIENCE_S
        while not _listens(port):
            assert process.poll() is None, (folder / "server.log").read_text()[-2000:]
            assert time.monotonic() < ends_s, "the S3 server does not start"
            time.sleep(0.02)
        yield
    finally:
        process.kill()
        process.wait()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


# ---------------------------------------------------------------- one that fails as it is told


class Asked(NamedTuple):
    """A request that came."""

    method: str
    path: str
    headers: dict[str, str]


Fault = Callable[["_Handler"], None]


class FailingS3:
    """An S3 server in this process, with conditional puts. The next requests meet ``faults``, one each.

    ``ignores``: conditions that it takes no notice of, as servers do that do not know them.
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
        """No answer to anybody any more."""
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
        """What was asked for: (status, body, headers)."""
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
        """All of it, or the head and so many bytes."""
        self.send_response(status)
        for name, text in headers.items():
            self.send_header(name, text)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Last-Modified", "Wed, 01 Jan 2020 00:00:00 GMT")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:sent])

    def log_message(self, *_: Any) -> None:
        """Nowhere."""


def _etag(data: bytes) -> str:
    return f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'


def _said(code: str, message: str) -> bytes:
    return f'<?xml version="1.0"?>\n<Error><Code>{code}</Code><Message>{message}</Message></Error>'.encode()


def refused(status: int, code: str, message: str = "no") -> Fault:
    """It answers that, and does nothing."""

    def fault(handler: _Handler) -> None:
        handler.read_body()
        handler.answer(status, _said(code, message), {})

    return fault


def refused_though_done(status: int, code: str) -> Fault:
    """It answers that, and has done it."""

    def fault(handler: _Handler) -> None:
        handler.read_body()
        handler.do()
        handler.answer(status, _said(code, "no"), {})

    return fault


def lost(handler: _Handler) -> None:
    """It does what it was asked to, and cuts the connection."""
    handler.read_body()
    handler.do()


def cut(handler: _Handler) -> None:
    """It cuts the connection in the middle of what it receives, or sends."""
    if handler.command == "PUT":
        handler.rfile.read(int(handler.headers["content-length"]) // 2)
        return
    status, body, headers = handler.do()
    handler.answer(status, body, headers, len(body) // 2)


def silent(handler: _Handler) -> None:
    """It never answers."""
    handler.s3.ended.wait()


def repeating(handler: _Handler) -> None:
    """It refuses, and repeats all that it was sent: some do, so that one sees what was signed."""
    handler.read_body()
    sent = "\n".join(f"{name}:{text}" for name, text in handler.headers.items())
    told = f"you sent {handler.path}\n{sent}\n and your secret is {SECRET}, by the way"
    said = _said("SignatureDoesNotMatch", told).replace(
        b"</Error>",
        f"<AWSAccessKeyId>{KEY_ID}</AWSAccessKeyId><CanonicalRequest>{sent}</CanonicalRequest></Error>".encode(),
    )
    handler.answer(403, said, {})
