"""The process that finds out the role of a machine: its messages, and an object store that does not answer."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec.structs import replace
from objects.buckets import Memory
from waiting import PATIENCE_S

from segmentlog.cli.serve_command import _start_message
from segmentlog.clock import Clock
from segmentlog.errors import ShippingRefused
from segmentlog.format.server_file import ServerNode, fault_of_nodes
from segmentlog.objects.ownership.binding import Binding
from segmentlog.objects.standby.status import FORMER_NODES_MS, StandbyStatus, write_standby_status
from segmentlog.server import standby_process
from segmentlog.server.addresses import worker_nodes
from segmentlog.server.machine_cluster import owner_cluster, standby_cluster
from segmentlog.server.standby_process import run_standby
from segmentlog.server.supervisor import ServerPlan, StandbyPlan, Supervisor
from segmentlog.server.worker_cluster import WorkerNode
from segmentlog.server.worker_lifecycle import StopSignal
from segmentlog.storage.fs import FileSystem

URL = "https://account.blob.core.windows.net/c/store?sv=1&sig=SECRET"


@pytest.mark.parametrize("status", [None, {"role": "waiting"}])
def test_the_message_of_a_start_contains_no_secret(status: dict[str, str] | None) -> None:
    """A token in the URL is in no line that `serve` prints."""
    supervisor = SimpleNamespace(
        plan=SimpleNamespace(path="d", standby=StandbyPlan(url=URL)), is_standby=status is not None, is_ready=True,
        standby_status=status, bootstrap_servers="h:1", nodes=[1], statuses=list,
    )  # fmt: skip
    message = _start_message(supervisor)  # type: ignore[arg-type]
    assert "account.blob.core.windows.net" in message
    assert "SECRET" not in message


def test_the_log_of_a_new_role_contains_no_secret(caplog: pytest.LogCaptureFixture) -> None:
    """Tokens are not in the log, either."""
    supervisor = SimpleNamespace(
        plan=SimpleNamespace(path="d", standby=StandbyPlan(url=URL)), is_standby=True, _stops=1, _all_sockets=[],
        _finish=print, _end_at_once=print, _new_children=list,
    )  # fmt: skip
    with caplog.at_level(logging.INFO):
        Supervisor._change_role(supervisor, 0)  # type: ignore[arg-type]
    assert "owner of the store at https" in caplog.text
    assert "SECRET" not in caplog.text


@pytest.mark.parametrize("state", ["some topics", "other files"])
def test_a_refusal_contains_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str) -> None:
    """A folder that cannot be a standby is refused with the URL as other commands show it."""
    bucket = Memory()
    bucket.url = URL.partition("?")[0]
    monkeypatch.setattr(standby_process, "open_bucket", lambda url: bucket)
    if state == "some topics":
        binding = Binding(url=bucket.url, owner_id="o", owner_epoch=1, folder_id=(0, 0), topics=("a",))
        monkeypatch.setattr(standby_process, "read_binding", lambda fs, path: binding)
    else:
        (tmp_path / "notes.txt").touch()
    with pytest.raises(ShippingRefused) as caught:
        standby_process._first_status(str(tmp_path), URL, can_create=False)
    assert bucket.url in str(caught.value)
    assert "SECRET" not in str(caught.value)


def test_a_silent_object_store_stops_no_heartbeat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The supervisor would kill the process before the request fails. The log says what it waits for."""
    is_asked, may_answer = threading.Event(), threading.Event()

    class Silent(Memory):
        def get(self, key: str) -> tuple[bytes, str]:
            is_asked.set()
            may_answer.wait()
            return super().get(key)

    bucket, stop = Silent(), StopSignal()
    monkeypatch.setattr(standby_process, "open_bucket", lambda url: bucket)
    monkeypatch.setattr("segmentlog.objects.standby.standby.open_bucket", lambda url: bucket)
    monkeypatch.setattr(standby_process, "stop_with_supervisor", lambda alive_fd: stop)
    monkeypatch.setattr(standby_process, "_LONG_S", 0.0)
    plan = ServerPlan(path=str(tmp_path), host="", port=0, standby=StandbyPlan(url="memory://bucket"))
    status_read, status_write = os.pipe()
    process = threading.Thread(target=run_standby, args=(plan, [], status_write, -1))
    with open(status_read, encoding="utf-8") as lines:
        process.start()
        try:
            assert is_asked.wait(PATIENCE_S)
            for _ in range(2):
                assert json.loads(lines.readline()) == {"ready": True}
            assert "the role of this machine is not known until the object store answers" in caplog.text
            may_answer.set()
            found = (json.loads(line) for line in lines)
            assert next(status["role"] for status in found if "role" in status) == "waiting"
        finally:
            may_answer.set()
            stop.request()
            process.join()
            for fd in (status_write, stop._read_fd, stop._write_fd):
                os.close(fd)


def test_machines_have_node_ids_of_their_own() -> None:
    """Of several machines, each has its own node ids, the same after every start. librdkafka takes the same id for the
    same machine, and kept asking a former owner that answers as a standby who coordinates its group."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(65)]
        names = ("m1", "m2", "m3")
        found = [worker_nodes("", sockets, (name, 9092), is_one_of_several=True)[0] for name in names]
        again = [worker_nodes("", sockets, (name, 9092), is_one_of_several=True)[0] for name in names]
        alone = worker_nodes("", sockets, ("m1", 9092))[0]
    assert found == again
    assert len({node.node_id for nodes in found for node in nodes}) == 3 * 64
    assert not fault_of_nodes(tuple(ServerNode(*node) for nodes in found for node in nodes))
    assert all(node.node_id < 2**30 for nodes in found for node in nodes)
    assert [node.node_id for node in alone] == list(range(1, 65))


@pytest.mark.parametrize(
    ("age_ms", "is_listed"), [(0, True), (FORMER_NODES_MS - 60_000, True), (FORMER_NODES_MS, False)]
)
def test_the_former_owner_stays_a_broker_for_a_while(tmp_path: Path, age_ms: int, *, is_listed: bool) -> None:
    """After a takeover, both machines name both as brokers: else consumers of librdkafka may hang."""
    m1, m2 = ServerNode(64, "m1", 9092), ServerNode(128, "m2", 9092)
    one, two = WorkerNode(64, "m1", 9092), WorkerNode(128, "m2", 9092)
    since_ms = Clock().now_ms() - age_ms
    status = StandbyStatus(
        url="file:///x", role="owner", owner_epoch=2, nodes=(m2,), former_nodes=(m1,), owner_since_ms=since_ms
    )
    path = str(tmp_path)
    write_standby_status(FileSystem(), path, status)
    owner = owner_cluster(path, "c", [two], 128)
    write_standby_status(FileSystem(), path, replace(status, role="standby", former_nodes=()))
    standby = standby_cluster(path, "c", [one])
    assert owner.nodes == standby.nodes == (two,)
    assert (
        [node.host for node in owner.brokers]
        == [node.host for node in standby.brokers]
        == ["m2", "m1"][: 1 + is_listed]
    )
    assert owner.leader_of("00", 1) == standby.leader_of("00", 1) == two
    assert (owner.is_own(128), owner.is_own(64), standby.is_own(64), standby.is_own(128)) == (
        True,
        False,
        is_listed,
        False,
    )
