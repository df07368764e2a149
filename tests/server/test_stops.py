"""SIGTERM in the middle of something: it is answered or its connection is closed, and the server ends well, in time."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme
from security.certificates import write_pair
from security.scram_client import ScramClient
from server.wire_client import Refused, WireClient
from wire import Sent, foreign

import segmentlog
from segmentlog.security.users import add_user
from segmentlog.server.codec.generated.api_versions import ApiVersionsRequest
from segmentlog.server.codec.generated.describe_groups import DescribeGroupsRequest
from segmentlog.server.codec.generated.fetch import FetchPartition, FetchRequest, FetchTopic
from segmentlog.server.codec.generated.join_group import JoinGroupRequest, JoinGroupRequestProtocol
from segmentlog.server.codec.generated.produce import PartitionProduceData, ProduceRequest, TopicProduceData
from segmentlog.server.codec.generated.sasl_authenticate import SaslAuthenticateRequest
from segmentlog.server.codec.generated.sasl_handshake import SaslHandshakeRequest
from segmentlog.server.codec.kafka_errors import ErrorCode
from segmentlog.server.groups.subscriptions import encode_topics

_SERVER = Path(__file__).with_name("stopped_server.py")
_WAIT_S = 60.0
_NEVER_S = 3_600.0
"""How long a server waits for unfinished work: a test in which it waits for something at all does not end in time."""
_LARGE_BYTES = 24 << 20
"""More than what two sockets on loopback keep between them."""


class Process:
    """A server that is stopped."""

    def __init__(self, path: Path, *, finish_s: float, **options: Any) -> None:
        options["finish_s"] = finish_s
        arguments = [sys.executable, str(_SERVER), json.dumps({"path": str(path), **options})]
        self._process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._seen: list[str] = []
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()
        self.address = self.next_line()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line.strip())

    def next_line(self) -> str:
        """Return the next line that the process prints."""
        return self._lines.get(timeout=_WAIT_S)

    def wait_for(self, line: str) -> None:
        """Wait until the server has printed a line."""
        while self.next_line() != line:
            pass

    def terminate(self) -> None:
        """Ask it to end, and do not wait for that."""
        self._process.send_signal(signal.SIGTERM)

    def terminate_until_it_ends(self) -> None:
        """Send the signal again every five seconds, until the process has ended."""
        ends_s = time.monotonic() + _WAIT_S
        while self._process.poll() is None:
            assert time.monotonic() < ends_s, "it waits in spite of several signals"
            self.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(5)

    def has_ended_well(self) -> bool:
        """Wait until the server has ended without an error, and return whether its worker ended by itself."""
        code = self._process.wait(_WAIT_S)
        self._thread.join(_WAIT_S)
        left = [self._lines.get() for _ in range(self._lines.qsize())]
        assert code == 0
        return "left" in left

    def kill(self) -> None:
        """Kill the process at the end of a test, in any state."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait(_WAIT_S)
        self._thread.join(_WAIT_S)
        assert self._process.stdout is not None
        self._process.stdout.close()


Start = Callable[..., Process]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return a store with topic t."""
    with segmentlog.open(tmp_path / "store") as store:
        store.create_topic("t")
    return tmp_path / "store"


@pytest.fixture
def start(path: Path) -> Iterator[Start]:
    """Yield a function that starts servers, and kill them at the end."""
    started: list[Process] = []

    def start_process(*, finish_s: float = _NEVER_S, **options: Any) -> Process:
        started.append(Process(path, finish_s=finish_s, **options))
        return started[-1]

    yield start_process
    for process in started:
        process.kill()


def values(path: Path) -> list[bytes | None]:
    """Return all values of topic t."""
    with segmentlog.open(path) as store:
        partition = store.open_partition("t", 0)
        return [record.value for batch in partition.read(0) for record in batch.records()]


def produce(value: bytes, acks: int = -1) -> ProduceRequest:
    """Return a request with one record."""
    topic = TopicProduceData("t", partition_data=[PartitionProduceData(0, foreign([Sent(b"k", value)]))])
    return ProduceRequest(None, acks, 30_000, [topic])


def fetch(wait_ms: int, size_bytes: int = 1 << 20) -> FetchRequest:
    """Return a fetch of all records."""
    part = FetchPartition(0, partition_max_bytes=size_bytes)
    return FetchRequest(
        max_wait_ms=wait_ms, min_bytes=1, max_bytes=size_bytes, topics=[FetchTopic("t", partitions=[part])]
    )


def test_who_waits_for_the_disk_is_answered(start: Start, path: Path) -> None:
    """All pending requests are answered with the offsets that the records have afterwards."""
    server = start(fsync_s=0.5)
    with WireClient(server.address) as client:
        client.send(0, 7, produce(b"first"))
        server.wait_for("syncing")
        client.send(0, 7, produce(b"second"))
        time.sleep(0.1)  # so that it has come; if it has not, it is refused, which this test takes as well
        server.terminate()
        answers: list[Any] = []
        with contextlib.suppress(Refused):
            for _ in range(2):
                answers.append(client.answer().responses[0].partition_responses[0])
    assert [(one.error_code, one.base_offset) for one in answers] == [(0, number) for number in range(len(answers))]
    assert answers
    assert server.has_ended_well()
    assert values(path)[: len(answers)] == [b"first", b"second"][: len(answers)]


def test_who_waits_for_records_is_answered(start: Start) -> None:
    """They get an empty answer."""
    server = start()
    with WireClient(server.address) as client:
        client.ask(18, 0, ApiVersionsRequest())
        client.send(1, 11, fetch(60_000))
        server.wait_for("waiting")
        server.terminate()
        assert client.answer().responses[0].partitions[0].error_code == 0
        assert client.is_closed_by_peer()
    assert server.has_ended_well()


def test_who_waits_for_a_group_is_answered(start: Start) -> None:
    """The response says that the coordinator is unavailable; the client looks for it, and continues there."""
    server = start()
    with WireClient(server.address) as client:
        protocol = JoinGroupRequestProtocol("range", encode_topics(("t",)))
        client.send(
            11, 3, JoinGroupRequest("g", 300_000, 300_000, protocol_type="consumer", protocols=[protocol])
        )  # fmt: skip
        _until_it_waits(server.address, "g")
        server.terminate()
        assert client.answer().error_code == ErrorCode.COORDINATOR_NOT_AVAILABLE
        assert client.is_closed_by_peer()
    assert server.has_ended_well()


def _until_it_waits(address: str, group: str) -> None:
    """Wait until a client joins a group."""
    deadline_s = time.monotonic() + _WAIT_S
    with WireClient(address) as other:
        while not other.ask(15, 1, DescribeGroupsRequest([group])).groups[0].members:
            assert time.monotonic() < deadline_s
            time.sleep(0.05)


def fill(path: Path) -> None:
    """Append more bytes than a socket accepts at once."""
    with segmentlog.open(path) as store:
        partition = store.open_partition("t", 0)
        for _ in range(_LARGE_BYTES >> 20):
            partition.append([os.urandom(1 << 20)])


def test_who_is_slow_gets_all_of_its_answer(start: Start, path: Path) -> None:
    """The server waits for it, for a limited time."""
    fill(path)
    server = start()
    with WireClient(server.address, receive_buffer=1 << 16) as client:
        client.send(1, 11, fetch(0, 2 * _LARGE_BYTES))
        first = client._take(1000)
        server.terminate()
        time.sleep(1.0)
        size = int.from_bytes(first[:4], "big")
        assert size > _LARGE_BYTES
        assert len(client._take(size + 4 - len(first))) == size + 4 - len(first)
    assert server.has_ended_well()


@pytest.mark.parametrize("times", [1, 2])
def test_who_takes_nothing_is_not_waited_for_long(start: Start, path: Path, times: int) -> None:
    """The server waits for `FINISH_S`, and not at all after a second signal. Acknowledged records exist."""
    fill(path)
    server = start(finish_s=1.0 if times == 1 else _NEVER_S)
    with WireClient(server.address, receive_buffer=4096) as client, WireClient(server.address) as good:
        assert good.ask(0, 7, produce(b"kept")).responses[0].partition_responses[0].error_code == 0
        client.send(1, 11, fetch(0, 2 * _LARGE_BYTES))
        client._take(1000)
        server.terminate()
        if times == 2:  # again and again: two signals that are pending together count once
            time.sleep(0.3)
            server.terminate_until_it_ends()
        assert server.has_ended_well() == (times == 1)
    assert values(path)[-1] == b"kept"


@pytest.mark.parametrize("said", [b"", b"\x16\x03\x01\x02\0\1\0\1\xfc\3\3"])
def test_a_handshake_is_not_waited_for(start: Start, tmp_path: Path, said: bytes) -> None:
    """A TLS handshake is closed: it has no request in progress."""
    pair = write_pair(tmp_path, "server", trustme.CA().issue_cert("localhost"))
    server = start(cert=pair.certificate, key=pair.key)
    with WireClient(server.address) as client:
        client.raw(said)
        time.sleep(0.2)
        server.terminate()
        assert client.is_closed_by_peer()
    assert server.has_ended_well()


@pytest.mark.parametrize("is_begun", [False, True])
def test_who_has_not_said_who_he_is_is_not_waited_for(start: Start, tmp_path: Path, is_begun: bool) -> None:
    """This holds before and during SASL."""
    users = str(tmp_path / "users.json")
    add_user(users, "ann", "secret", iterations=4096)
    server = start(users=users)
    with WireClient(server.address) as client:
        if is_begun:
            client.ask(17, 1, SaslHandshakeRequest("SCRAM-SHA-256"))
            first = ScramClient("SCRAM-SHA-256", "ann", "secret").first()
            assert client.ask(36, 2, SaslAuthenticateRequest(first)).error_code == 0
        else:
            client.ask(18, 0, ApiVersionsRequest())
        server.terminate()
        assert client.is_closed_by_peer()
    assert server.has_ended_well()


def test_half_a_request_is_not_waited_for(start: Start) -> None:
    """Its client got no response about it."""
    server = start()
    with WireClient(server.address) as client:
        client.ask(18, 0, ApiVersionsRequest())
        client.raw((1000).to_bytes(4, "big") + bytes(100))
        time.sleep(0.1)
        server.terminate()
        assert client.is_closed_by_peer()
    assert server.has_ended_well()
