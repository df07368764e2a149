"""HTTP servers for tests: in this process without a port (`client`), or on a port (`http_server`)."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from doors import Client

from segmentlog.http.context import HttpContext
from segmentlog.http.serving import HttpServer
from segmentlog.http.settings import HttpSettings
from segmentlog.security.security_settings import Security
from segmentlog.store import LogStore


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LogStore]:
    """Provide an empty store."""
    with LogStore(tmp_path / "store") as opened:
        yield opened


@pytest.fixture
def client(store: LogStore) -> Iterator[Client]:
    """Provide a client of an application that allows writes."""
    with Client(HttpContext(store, HttpSettings(allow_writes=True))) as made:
        yield made


@pytest.fixture
def read_only_client(store: LogStore) -> Iterator[Client]:
    """Provide a client of an application with default settings."""
    with Client(HttpContext(store)) as made:
        yield made


@pytest.fixture
def serve(store: LogStore) -> Iterator[Callable[..., HttpServer]]:
    """Provide a function that starts HTTP servers on local ports: ``serve(settings=..., security=...)``."""
    with ExitStack() as opened:

        def make(settings: HttpSettings | None = None, security: Security | None = None, **options: Any) -> HttpServer:
            options = {"host": "127.0.0.1", "port": 0, **options}
            return opened.enter_context(HttpServer(store, settings=settings, security=security, **options))

        yield make


@pytest.fixture
def http_server(serve: Callable[..., HttpServer]) -> HttpServer:
    """Provide an HTTP server that allows writes."""
    return serve(HttpSettings(allow_writes=True))


@pytest.fixture
def web(http_server: HttpServer) -> Iterator[httpx.Client]:
    """Provide a client of `http_server`."""
    with httpx.Client(base_url=http_server.url, timeout=60) as made:
        yield made
