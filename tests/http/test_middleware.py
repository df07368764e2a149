"""Checks of the HTTP server before a request reaches a handler: host, origin, authentication and size."""

import base64
import socket
import ssl
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
import trustme
from doors import Client
from security.certificates import write_pair
from waiting import wait_until

from segmentlog.http.context import HttpContext
from segmentlog.http.serving import HttpServer
from segmentlog.http.settings import HttpLimits, HttpSettings
from segmentlog.security.security_errors import SecurityFileError, UnsafeListening
from segmentlog.security.security_settings import Security
from segmentlog.security.users import add_user
from segmentlog.store import LogStore


def test_a_page_elsewhere_that_has_its_name_resolve_to_this_machine_reads_nothing(client: Client) -> None:
    """Requests for other host names than this machine's are refused."""
    for name in ("evil.example", "evil.example:8080", "localhost.evil.example", ""):
        assert client.get("/topics", headers={"host": name}).status_code == 421, name
        assert client.get("/healthz", headers={"host": name}).text == "ok\n", name  # as balancers ask
    for name in ("localhost", "LOCALHOST:8080", "127.0.0.1:1", "[::1]", "[::1]:8080"):
        assert client.get("/topics", headers={"host": name}).status_code == 200, name


def test_a_further_name_is_taken_where_it_is_said(store: LogStore) -> None:
    """``--allowed-host`` adds a host name."""
    with Client(HttpContext(store, HttpSettings(allowed_hosts=("logs.example",)))) as client:
        assert client.get("/topics", headers={"host": "logs.example:8080"}).status_code == 200
        assert client.get("/topics", headers={"host": "other.example"}).status_code == 421


@pytest.mark.parametrize(
    "headers",
    [
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "iframe"},
    ],
)
def test_a_page_of_another_site_may_ask_for_nothing(client: Client, headers: dict[str, str]) -> None:
    """Requests of other sites are refused, whatever the method."""
    for method in ("GET", "POST", "DELETE"):
        answer = client.request(method, "/healthz", headers=headers)
        assert answer.status_code == 403
        assert "another site" in answer.json()["message"]


def test_links_to_pages_may_be_followed(client: Client) -> None:
    """Links to pages work from anywhere; forms and API requests of other sites do not."""
    link = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
    assert client.get("/", headers=link).status_code != 403
    assert client.get("/ui/", headers=link).status_code != 403
    assert client.post("/ui/", headers=link).status_code == 403
    assert client.get("/healthz", headers=link).status_code == 403
    assert client.get("/uinot", headers=link).status_code == 403


def test_our_own_pages_and_programs_are_let_through(client: Client) -> None:
    """Same-site requests of browsers and requests of programs pass."""
    assert client.get("/healthz", headers={"sec-fetch-site": "same-origin"}).status_code == 200
    assert client.get("/healthz", headers={"origin": "http://localhost"}).status_code == 200


def test_every_answer_tells_browsers_to_be_strict(client: Client) -> None:
    """Every response, also a refusal, has the security headers."""
    for answer in (client.get("/healthz"), client.get("/none"), client.get("/", headers={"host": "evil.example"})):
        assert answer.headers["content-security-policy"].startswith("default-src 'none'")
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cache-control"] == "no-store"


def test_what_is_not_there_is_told_in_json(client: Client) -> None:
    """Unknown paths and methods get a JSON error."""
    assert client.get("/none").json() == {"error_code": 404, "message": "Not Found"}
    assert client.delete("/healthz").json()["error_code"] == 405


def _users(folder: Path) -> str:
    path = str(folder / "users.json")
    add_user(path, "ann", "a secret", iterations=4096)
    return path


def _basic(name: str, password: str) -> dict[str, str]:
    return {"authorization": "Basic " + base64.b64encode(f"{name}:{password}".encode()).decode()}


def test_users_say_who_they_are(serve: Callable[..., HttpServer], tmp_path: Path) -> None:
    """Users authenticate with a password, other clients are refused, and a changed password is wrong at once."""
    path = _users(tmp_path)
    server = serve(security=Security(users=path))
    with httpx.Client(base_url=server.url) as web:
        assert web.get("/healthz").status_code == 200  # for monitoring, which has no password
        answer = web.get("/topics")
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"].startswith("Basic ")
        wrong = [_basic("ann", "another"), _basic("bob", "a secret")]
        wrong += [{"authorization": text} for text in ("Basic !!!", "Bearer x", "Basic YW5u", "Basic")]
        for headers in wrong:
            assert web.get("/topics", headers=headers).status_code == 401, headers
        assert web.get("/topics", headers=_basic("ann", "a secret")).status_code == 200
        assert web.get("/topics", headers={**_basic("ann", "a secret"), "host": "logs.example"}).status_code == 200
        add_user(path, "ann", "a new one", iterations=4096)
        wait_until(lambda: web.get("/topics", headers=_basic("ann", "a secret")).status_code != 200)
        assert web.get("/topics", headers=_basic("ann", "a new one")).status_code == 200


def test_a_certificate_lets_somebody_in(serve: Callable[..., HttpServer], tmp_path: Path) -> None:
    """Only certificates of the client CA are accepted; a renewed server certificate applies to new connections."""
    authority = trustme.CA()
    pair = write_pair(tmp_path, "server", authority.issue_cert("localhost"))
    clients_ca = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(str(clients_ca))
    security = Security(tls_cert=pair.certificate, tls_key=pair.key, tls_client_ca=str(clients_ca))
    server = serve(security=security, host="localhost")
    assert server.url.startswith("https://")
    context = ssl.create_default_context(cafile=str(clients_ca))
    with httpx.Client(verify=context) as web, pytest.raises(httpx.TransportError):
        web.get(f"{server.url}/healthz")
    authority.issue_cert("ann@example.org", common_name="ann").configure_cert(context)
    assert httpx.get(f"{server.url}/healthz", verify=context).status_code == 200
    before = _certificate_of(server, context, "localhost")
    write_pair(tmp_path, "server", authority.issue_cert("localhost"))
    deadline = time.monotonic() + 10
    context.check_hostname = False
    for name in ("localhost", None):  # with a server name in the handshake, and without one
        while _certificate_of(server, context, name) == before:
            assert time.monotonic() < deadline
            time.sleep(0.1)


def _certificate_of(server: HttpServer, context: ssl.SSLContext, name: str | None) -> bytes | None:
    host, _, port = server.address.rpartition(":")
    with (
        socket.create_connection((host, int(port)), timeout=10) as sock,
        context.wrap_socket(sock, server_hostname=name) as wrapped,
    ):
        return wrapped.getpeercert(binary_form=True)


def test_nothing_listens_where_others_would_read_along(store: LogStore) -> None:
    """A network address requires TLS or ``--insecure``."""
    with pytest.raises(UnsafeListening, match="--tls-cert"):
        HttpServer(store, "0.0.0.0", 0)
    with pytest.raises(SecurityFileError, match="without --tls-key"):
        HttpServer(store, "127.0.0.1", 0, security=Security(tls_cert="cert.pem"))


def test_bodies_end_at_a_size(store: LogStore, serve: Callable[..., HttpServer]) -> None:
    """Too large bodies are refused, with and without a declared size."""
    server = serve(HttpSettings(limits=HttpLimits(request_bytes=1000)))
    with httpx.Client(base_url=server.url) as web:
        answer = web.post("/healthz", content=b"x" * 1001)
        assert answer.status_code == 413
        assert "1,000 bytes" in answer.json()["message"]


def _ask(server: HttpServer, data: bytes, timeout_s: float = 10) -> bytes:
    with socket.create_connection(server.address.rsplit(":", 1), timeout=timeout_s) as sock:
        sock.sendall(data)
        answer = b""
        while block := sock.recv(65536):
            answer += block
        return answer


def test_heads_end_at_a_size(serve: Callable[..., HttpServer]) -> None:
    """Endless headers, or one endless header, get an error and the connection is closed."""
    server = serve(HttpSettings(limits=HttpLimits(head_bytes=8 << 10)))
    answer = _ask(server, b"GET /healthz HTTP/1.1\r\nhost: localhost\r\nx-long: " + b"x" * 20_000)
    assert answer.startswith(b"HTTP/1.1 400")
    assert b"8,192 bytes" in answer


def test_what_comes_behind_a_body_ends_at_a_size_too(serve: Callable[..., HttpServer]) -> None:
    """Endless trailers and chunk headers close the connection, also without authentication."""
    server = serve(HttpSettings(limits=HttpLimits(head_bytes=8 << 10)))
    head = b"POST /healthz HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
    for more in (b"0\r\n" + b"x-a: aaaaaaaaaa\r\n" * 100, b"0\r\nx-a: " + b"a" * 2000, b"5;ext=" + b"e" * 2000):
        with socket.create_connection(server.address.rsplit(":", 1), timeout=10) as sock:
            sock.sendall(head + more)
            piece = b"a" * 4096 if more[-1:] != b"\n" else b"x-a: aaaaaaaaaaaaaaa\r\n" * 200
            with pytest.raises(OSError, match=r"reset|[Bb]roken"):
                _send_for_ever(sock, piece)


def _send_for_ever(sock: socket.socket, piece: bytes) -> None:
    """Send up to a megabyte, which is more than the server ever accepts."""
    for _ in range((1 << 20) // len(piece)):
        sock.sendall(piece)
        time.sleep(0.001)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"GET /healthz HT",
        b"POST /healthz HTTP/1.1\r\nhost: localhost\r\ncontent-length: 10\r\n\r\nabc",
        b"POST /healthz HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n5\r\nabc",
    ],
)
def test_who_takes_his_time_is_not_waited_for(serve: Callable[..., HttpServer], data: bytes) -> None:
    """A client that pauses before or within a head or a body is disconnected."""
    server = serve(HttpSettings(limits=HttpLimits(head_s=0.3, body_s=0.3, idle_s=1)))
    began_s = time.monotonic()
    try:
        _ask(server, data)
    except ConnectionResetError:
        pass
    assert time.monotonic() - began_s < 9


def test_nonsense_is_a_bad_request(serve: Callable[..., HttpServer]) -> None:
    """Malformed requests get 400, and the server keeps running."""
    server = serve()
    for data in (b"\x16\x03\x01 nonsense\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n"):
        assert _ask(server, data).startswith(b"HTTP/1.1 400"), data
    assert httpx.get(f"{server.url}/healthz").status_code == 200


def test_closing_waits_for_nobody_for_long(store: LogStore) -> None:
    """Closing the server is quick, and a second close does nothing."""
    server = HttpServer(store, "127.0.0.1", 0)
    with socket.create_connection(server.address.rsplit(":", 1)):
        server.close()
        server.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(server.address.rsplit(":", 1))
