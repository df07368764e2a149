"""The log: text lines for people, JSON objects for programs, and no secrets."""

from __future__ import annotations

import io
import json
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from server.scraping import RawClient, scrape, value

import segmentlog
from segmentlog.security.security_settings import Security
from segmentlog.security.users import add_user
from segmentlog.server.codec.generated import metadata, sasl_authenticate, sasl_handshake
from segmentlog.server.embedded import Server
from segmentlog.server.log_format import FIELDS, LogRateLimit, set_up_logs
from segmentlog.server.server_settings import Limits, ServerSettings

SASL_HANDSHAKE, METADATA, SASL_AUTHENTICATE = 17, 3, 36

Lines = Callable[[], list[dict[str, Any]]]


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """Yield a stream for the log, and restore the logger."""
    root = logging.getLogger("segmentlog")
    before = root.handlers, root.level, root.propagate
    yield io.StringIO()
    root.handlers, root.level, root.propagate = before


@pytest.fixture
def lines(stream: io.StringIO) -> Lines:
    """Return a function that returns the logged objects so far."""
    set_up_logs("json", stream=stream)
    return lambda: [json.loads(line) for line in stream.getvalue().splitlines()]


def test_an_object_a_line(lines: Lines) -> None:
    """Time, level, message, and what it is about; a traceback does not break the line."""
    logger = logging.getLogger("segmentlog.server")
    logger.info("%s: closed\nand more", "10.0.0.7", extra={"client_host": "10.0.0.7", "client_id": "", "api": None})
    try:
        raise ValueError("no good")
    except ValueError:
        logger.exception("oh", extra={"count": 3})
    first, second = lines()
    assert {name: first[name] for name in ("level", "logger", "message", "client_host")} == {
        "level": "info",
        "logger": "segmentlog.server",
        "message": "10.0.0.7: closed\nand more",
        "client_host": "10.0.0.7",
    }
    assert time.strptime(first["time"][:-5], "%Y-%m-%dT%H:%M:%S")
    assert not {"client_id", "api", "count", "error"} & first.keys(), "only what there is to say"
    assert second["count"] == 3
    assert "Traceback" in second["error"]
    assert "no good" in second["error"]


def test_clients_write_no_lines_of_their_own(stream: io.StringIO) -> None:
    """Client ids are logged with control characters escaped."""
    set_up_logs("text", stream=stream)
    logging.getLogger("segmentlog.server").info("%s came", "me\n2026 ERROR disk on fire\x1b[2J")
    assert stream.getvalue().count("\n") == 1
    assert "\x1b" not in stream.getvalue()
    assert "me\\n2026 ERROR disk on fire\\x1b[2J came" in stream.getvalue()


def test_on_a_terminal_a_line_takes_the_place_of_the_status(stream: io.StringIO) -> None:
    """A log line erases the status line; a file contains no control characters."""
    set_up_logs("text", stream=stream)
    logging.getLogger("segmentlog.server").info("one")
    assert not stream.getvalue().startswith("\r")
    terminal = _Terminal()
    set_up_logs("text", stream=terminal)
    logging.getLogger("segmentlog.server").info("two")
    assert terminal.getvalue().startswith("\r\x1b[2K")
    assert terminal.getvalue().endswith(" INFO two\n")


def test_what_happens_all_the_time_is_said_seldom() -> None:
    """It is logged once a second, with its count since then."""
    now_s = [0.0]
    seldom = LogRateLimit(1.0, lambda: now_s[0])
    assert [seldom.count() for _ in range(4)] == [1, 0, 0, 0]
    now_s[0] = 1.5
    assert seldom.count() == 4
    assert seldom.count() == 0


def _serve(path: Path, *, limits: Limits | None = None, security: Security | None = None) -> Server:
    return Server(
        segmentlog.open(path, background=False), host="127.0.0.1", port=0, advertise=None,
        settings=ServerSettings(limits=limits or Limits()), security=security or Security(), owns_store=True,
        metrics="127.0.0.1:0",
    )  # fmt: skip


def test_a_failed_authentication_is_logged_without_secrets(tmp_path: Path, lines: Lines) -> None:
    """The line has address and mechanism, but neither the password nor the name, which may be a password.

    It is counted.
    """
    users = tmp_path / "users.json"
    add_user(str(users), "ann", "right-password")
    with _serve(tmp_path / "store", security=Security(users=str(users))) as server:
        with RawClient(server.bootstrap_servers) as client:
            client.ask(SASL_HANDSHAKE, sasl_handshake.SaslHandshakeRequest("PLAIN"), 1)
            token = b"\0pass-as-name\0wrong-password"
            answer = client.ask(SASL_AUTHENTICATE, sasl_authenticate.SaslAuthenticateRequest(token), 2)
            assert answer.error_code == 58
            assert client.is_closed()
        failed = [line for line in lines() if "authentication failed" in line["message"]]
        assert server.metrics_address is not None
        found = scrape(server.metrics_address)
    assert [(line["level"], line["client_host"], line["client_id"]) for line in failed] == [
        ("info", "127.0.0.1", "tests")
    ]
    assert "PLAIN" in failed[0]["message"]
    said = json.dumps(lines())
    assert "wrong-password" not in said
    assert "pass-as-name" not in said
    assert value(found, "segmentlog_authentication_failures_total", by="sasl") == 1


def test_connections_beyond_the_limit_are_told_of_once_a_second(tmp_path: Path, lines: Lines) -> None:
    """All are counted, but few are logged; connections that are served are not logged."""
    with _serve(tmp_path / "store", limits=Limits(connections=1)) as server, RawClient(server.bootstrap_servers) as one:
        one.ask(METADATA, metadata.MetadataRequest(topics=[]), 12)
        for _ in range(20):
            with RawClient(server.bootstrap_servers) as client:
                assert client.is_closed()
        assert server.metrics_address is not None
        found = scrape(server.metrics_address)
    assert value(found, "segmentlog_connections_refused_total") == 20
    assert value(found, "segmentlog_connections_accepted_total") == 1
    assert 1 <= len(lines()) < 20
    assert {(line["level"], line["client_host"]) for line in lines()} == {("warning", "127.0.0.1")}
    assert "the limit of connections is reached" in lines()[0]["message"]


def test_what_brings_no_request_is_logged_with_who_sent_it(tmp_path: Path, lines: Lines) -> None:
    """The line has the name that the client gave itself in an earlier request."""
    with _serve(tmp_path / "store") as server, RawClient(server.bootstrap_servers) as client:
        client.ask(METADATA, metadata.MetadataRequest(topics=[]), 12)
        client.socket.sendall(b"\x7f\xff\xff\xff")
        assert client.is_closed()
    (line,) = lines()
    assert (line["level"], line["client_host"], line["client_id"]) == ("info", "127.0.0.1", "tests")
    assert "2147483647 bytes" in line["message"]


def test_a_generation_of_a_group_is_logged_once(tmp_path: Path, lines: Lines) -> None:
    """The line has the number of members."""
    confluent_kafka = pytest.importorskip("confluent_kafka")
    with _serve(tmp_path / "store") as server:
        server.store.create_topic("t", fsync="never")
        consumer = confluent_kafka.Consumer(
            {"bootstrap.servers": server.bootstrap_servers, "group.id": "g", "auto.offset.reset": "earliest"}
        )
        try:
            consumer.subscribe(["t"])
            ends = time.monotonic() + 20
            while not consumer.assignment():
                assert time.monotonic() < ends
                consumer.poll(0.05)
            assert server.metrics_address is not None
            found = scrape(server.metrics_address)
        finally:
            consumer.close()
    assert value(found, "segmentlog_group_members", group="g", kind="kafka") == 1
    assert value(found, "segmentlog_group_state", group="g", state="Stable") == 1
    assert value(found, "segmentlog_group_generation", group="g") == 1
    generations = [line for line in lines() if "generation" in line["message"]]
    assert (generations[0]["group"], generations[0]["count"]) == ("g", 1)
    assert [line["message"] for line in generations] == [
        "group g: generation 1 has 1 members",
        "group g: generation 2 has 0 members",
    ]
    assert set(generations[0]) - {"time", "level", "logger", "pid", "message"} <= set(FIELDS)
