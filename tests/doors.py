"""A client of the HTTP server without a port: it calls the application in an event loop of its own."""

import asyncio
import threading
from types import TracebackType
from typing import Any

import httpx

from segmentlog.http.accounts import Accounts
from segmentlog.http.app import make_app
from segmentlog.http.console import Console
from segmentlog.http.context import HttpContext


class Client:
    """Sends requests like httpx: ``client.get("/topics")``. Thread-safe."""

    def __init__(self, context: HttpContext, accounts: Accounts | None = None, **options: Any) -> None:
        self.context = context
        self._accounts = accounts
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        transport = httpx.ASGITransport(
            app=make_app(Console(context), accounts), client=("127.0.0.1", 1), raise_app_exceptions=False
        )
        self._client = httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=20, **options)

    def __enter__(self) -> "Client":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        """Send one request and return the complete response."""
        return asyncio.run_coroutine_threadsafe(self._client.request(method, path, **options), self._loop).result(60)

    def get(self, path: str, **options: Any) -> httpx.Response:
        """Send a GET request."""
        return self.request("GET", path, **options)

    def post(self, path: str, **options: Any) -> httpx.Response:
        """Send a POST request."""
        return self.request("POST", path, **options)

    def put(self, path: str, **options: Any) -> httpx.Response:
        """Send a PUT request."""
        return self.request("PUT", path, **options)

    def delete(self, path: str, **options: Any) -> httpx.Response:
        """Send a DELETE request."""
        return self.request("DELETE", path, **options)

    def close(self) -> None:
        """Stop the event loop and its threads."""
        asyncio.run_coroutine_threadsafe(self._client.aclose(), self._loop).result(60)
        asyncio.run_coroutine_threadsafe(self._loop.shutdown_default_executor(), self._loop).result(60)
        if self._accounts is not None:
            self._accounts.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
