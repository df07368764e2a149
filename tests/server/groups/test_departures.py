"""A client that disconnects while it waits leaves its group at once, and its thread ends. The others continue.

The timeouts of groups are minutes here, so that waiting for one would fail.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from leftovers import opened
from logs import NoSyncFileSystem
from server.wire_client import WireClient
from waiting import wait_until

from segmentlog.security.security_settings import Security
from segmentlog.server.codec.generated.fetch import FetchPartition, FetchRequest, FetchTopic
from segmentlog.server.codec.generated.heartbeat import HeartbeatRequest
from segmentlog.server.codec.generated.join_group import JoinGroupRequest, JoinGroupRequestProtocol
from segmentlog.server.codec.generated.sync_group import SyncGroupRequest, SyncGroupRequestAssignment
from segmentlog.server.codec.kafka_errors import ErrorCode
from segmentlog.server.embedded import Server
from segmentlog.server.groups.classic_types import GroupSettings, GroupState
from segmentlog.server.groups.subscriptions import encode_topics
from segmentlog.server.server_settings import ServerSettings
from segmentlog.store import LogStore

_LONG_MS = 300_000
MakeServer = Callable[..., Server]


@pytest.fixture
def make_server(tmp_path: Path) -> Iterator[MakeServer]:
    """Provide a server with topic t."""
    servers: list[Server] = []

    def make(delay_ms: int = 0) -> Server:
        store = opened(LogStore(tmp_path / "store", background=False, fs=NoSyncFileSystem()))
        store.create_topic("t")
        settings = ServerSettings(groups=GroupSettings(initial_rebalance_delay_ms=delay_ms))
        server = Server(
            store, host="127.0.0.1", port=0, advertise=None, settings=settings, security=Security(), owns_store=False
        )
        servers.append(server)
        return server

    yield make
    for server in servers:
        server.close()


class ClassicMember:
    """One, over a connection of its own."""

    def __init__(self, server: Server, instance_id: str | None = None) -> None:
        self.wire = WireClient(server.bootstrap_servers)
        self.id = ""
        self.generation = -1
        self._instance_id = instance_id

    def begin_to_join(self) -> None:
        """Send a JoinGroup. In version 5, a dynamic member first gets its id."""
        if not self.id and self._instance_id is None:
            answer = self.wire.ask(11, 5, self._joining())
            assert answer.error_code == ErrorCode.MEMBER_ID_REQUIRED
            self.id = answer.member_id
        self.wire.send(11, 5, self._joining())

    def end_to_join(self) -> Any:
        """Return the answer."""
        answer = self.wire.answer()
        if not answer.error_code:
            self.id, self.generation = answer.member_id, answer.generation_id
        return answer

    def begin_to_sync(self, *given: str) -> None:
        """Send a SyncGroup; the leader assigns something to each member."""
        assignments = [SyncGroupRequestAssignment(one, b"all") for one in given]
        self.wire.send(
            14, 3, SyncGroupRequest("g", self.generation, self.id, self._instance_id, assignments=assignments)
        )

    def sync(self, *given: str) -> Any:
        """Send a SyncGroup and return the answer."""
        self.begin_to_sync(*given)
        return self.wire.answer()

    def heartbeat(self) -> ErrorCode:
        """Send a heartbeat and return its error code."""
        answer = self.wire.ask(12, 3, HeartbeatRequest("g", self.generation, self.id, self._instance_id))
        return ErrorCode(answer.error_code)

    def _joining(self) -> JoinGroupRequest:
        protocol = JoinGroupRequestProtocol("range", encode_topics(("t",)))
        return JoinGroupRequest(
            "g", _LONG_MS, _LONG_MS, self.id, self._instance_id, protocol_type="consumer", protocols=[protocol]
        )


def close(wire: WireClient) -> None:
    """Close the connection like a client that ends."""
    wire.close()


def reset(wire: WireClient) -> None:
    """Reset the connection, like a killed client with unread data, or a restarted machine."""
    wire.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    wire.close()


def half_close(wire: WireClient) -> None:
    """Shut down the sending side."""
    wire.sock.shutdown(socket.SHUT_WR)


GOING = pytest.mark.parametrize("go", [close, reset, half_close])
Go = Callable[[WireClient], None]


def members(server: Server) -> list[str]:
    """Return the members of the group."""
    entry = server.worker.broker.groups._entries.get("g")
    return [] if entry is None else list(entry.machine.members)


def state(server: Server) -> GroupState:
    """Return the state of the group."""
    return server.worker.broker.groups._entries["g"].machine.state


def alone(server: Server) -> ClassicMember:
    """Return the only member of a stable group."""
    member = ClassicMember(server)
    member.begin_to_join()
    assert member.end_to_join().error_code == 0
    assert member.sync(member.id).assignment == b"all"
    return member


def connection_count(server: Server) -> int:
    """Return the number of connections, which is that of their threads."""
    return server.worker.listener.connection_count


@GOING
def test_who_goes_while_it_joins_is_no_member(make_server: MakeServer, go: Go) -> None:
    """The remaining member sees a rebalance, joins, and need not wait for the departed client."""
    server = make_server()
    first, second = alone(server), ClassicMember(server)
    second.begin_to_join()
    wait_until(lambda: second.id in members(server))
    go(second.wire)
    wait_until(lambda: members(server) == [first.id])
    wait_until(lambda: connection_count(server) == 1)
    assert first.heartbeat() is ErrorCode.REBALANCE_IN_PROGRESS
    first.begin_to_join()
    assert [one.member_id for one in first.end_to_join().members] == [first.id]
    assert first.sync(first.id).assignment == b"all"
    second.wire.close()


@GOING
def test_who_goes_before_others_could_come_leaves_no_group(make_server: MakeServer, go: Go) -> None:
    """This holds while a group without members waits for more of them."""
    server = make_server(delay_ms=_LONG_MS)
    member = ClassicMember(server)
    member.begin_to_join()
    wait_until(lambda: members(server) == [member.id])
    go(member.wire)
    wait_until(lambda: not members(server))
    wait_until(lambda: not connection_count(server))
    member.wire.close()


@GOING
def test_who_goes_while_it_waits_for_its_assignment_is_no_member(make_server: MakeServer, go: Go) -> None:
    """The leader, which has not assigned yet, is told to join again, and does so alone."""
    server = make_server()
    first, second = alone(server), ClassicMember(server)
    second.begin_to_join()
    wait_until(lambda: second.id in members(server))
    first.begin_to_join()
    assert {one.member_id for one in first.end_to_join().members} == {first.id, second.id}
    assert second.end_to_join().error_code == 0
    second.begin_to_sync()
    wait_until(lambda: server.worker.broker.groups._entries["g"].machine.members[second.id].sync_token is not None)
    go(second.wire)
    wait_until(lambda: members(server) == [first.id])
    wait_until(lambda: connection_count(server) == 1)
    assert first.sync(first.id, second.id).error_code == ErrorCode.REBALANCE_IN_PROGRESS
    first.begin_to_join()
    assert first.end_to_join().error_code == 0
    assert first.sync(first.id).assignment == b"all"
    assert state(server) is GroupState.STABLE
    second.wire.close()


@GOING
def test_a_static_member_that_goes_stays_one(make_server: MakeServer, go: Go) -> None:
    """Its thread ends, and it takes its place again under the same instance id."""
    server = make_server()
    first, second = alone(server), ClassicMember(server, "i")
    second.begin_to_join()
    wait_until(lambda: len(members(server)) == 2)
    first.begin_to_join()
    assert first.end_to_join().error_code == second.end_to_join().error_code == 0
    second.begin_to_sync()
    wait_until(lambda: server.worker.broker.groups._entries["g"].machine.members[second.id].sync_token is not None)
    go(second.wire)
    wait_until(lambda: connection_count(server) == 1)
    assert second.id in members(server)
    assert first.sync(first.id, second.id).assignment == b"all"
    again = ClassicMember(server, "i")
    again.begin_to_join()
    joined = again.end_to_join()
    assert (joined.error_code, joined.generation_id) == (0, first.generation)
    assert again.sync().assignment == b"all"
    second.wire.close()


@GOING
def test_nobody_keeps_a_fetch_that_nobody_waits_for(make_server: MakeServer, go: Go) -> None:
    """The thread ends, and so does the watch over the partition."""
    server = make_server()
    wire = WireClient(server.bootstrap_servers)
    wanted = FetchTopic("t", partitions=[FetchPartition(0, partition_max_bytes=1 << 20)])
    wire.send(1, 11, FetchRequest(max_wait_ms=_LONG_MS, min_bytes=1, max_bytes=1 << 20, topics=[wanted]))
    wait_until(lambda: server.worker.broker.purgatory.waiting_count == 1)
    go(wire)
    wait_until(lambda: not connection_count(server))
    wait_until(lambda: server.worker.broker.purgatory.waiting_count == 0)
    wire.close()
