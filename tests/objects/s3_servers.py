"""S3 servers for tests, on free ports of this machine: moto's, from PyPI, and Versity's gateway, which Go builds.

Moto answers one request at a time, because it checks and puts in two steps. The gateway does both in one step, verifies
signatures, and keeps objects as files.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from server.clients.fetching import Missing, fetched

from segmentlog.testing.ports import free_ports

BUCKET = "bucket"
REGION = "eu-central-1"
KEY_ID = "AKIA7PLANTEDKEYID000"
OTHER_KEY_ID = "ASIAPLANTEDKEYID0001"
"""Keys as an instance's role provides them: the test configures them nowhere."""
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
    """The endpoint of a server; ``KEY_ID`` and ``SECRET`` may do everything."""

    endpoint: str

    @property
    def options(self) -> dict[str, Any]:
        """Options for obstore."""
        return {
            "endpoint": self.endpoint, "region": REGION, "access_key_id": KEY_ID, "secret_access_key": SECRET,
            "client_options": {"allow_http": True},
        }  # fmt: skip

    @property
    def environment(self) -> dict[str, str]:
        """Return the options as environment variables."""
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
    port = free_ports()
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
    """Yield the gateway, with an empty bucket in ``folder``. Raises `Missing` where it cannot be built."""
    program = versitygw_program()
    port = free_ports()
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
    """Yield a server, once something listens at its port."""
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
