"""A client of one connection that speaks by our codec, and what Prometheus would see."""

from __future__ import annotations

import http.client
import socket
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from segmentlog.server.codec.apis import APIS
from segmentlog.server.codec.framing import decode_response_header, frame_request

Scraped = dict[tuple[str, frozenset[tuple[str, str]]], float]


def get(address: str, path: str = "/metrics", method: str = "GET") -> tuple[int, str]:
    """(status, text) of a page."""
    connection = http.client.HTTPConnection(address, timeout=20)
    try:
        connection.request(method, path)
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def parse(text: str) -> Scraped:
    """Return samples by name and labels, read by Prometheus' own parser; check that each is unique."""
    found: Scraped = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in found, key
            found[key] = sample.value
    return found


def scrape(address: str) -> Scraped:
    """Return the present metrics."""
    status, text = get(address)
    assert status == 200, text
    return parse(text)


def value(found: Scraped, name: str, **labels: object) -> float | None:
    """Return one sample, or None if it does not exist."""
    return found.get((name, frozenset((key, str(one)) for key, one in labels.items())))


class RawClient:
    """Sends requests as they are given, one at a time."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), timeout=20)

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.socket.close()

    def send(self, key: int, request: Any, version: int) -> None:
        """Send a request without waiting for its answer."""
        api = APIS[key]
        self.socket.sendall(
            b"".join(frame_request(api, version, 7, "tests", api.codec.encode_request(request, version)))
        )

    def ask(self, key: int, request: Any, version: int) -> Any:
        """Return a request and its response."""
        self.send(key, request, version)
        api, data = APIS[key], memoryview(self._receive(int.from_bytes(self._receive(4), "big")))
        _, at = decode_response_header(data, api, version)
        return api.codec.decode_response(data, at, version)

    def is_closed(self) -> bool:
        """Return whether the server closes the connection without an answer."""
        try:
            return not self.socket.recv(1)
        except ConnectionError:
            return True

    def _receive(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            block = self.socket.recv(size - len(data))
            assert block, "the server closed the connection"
            data += block
        return data
