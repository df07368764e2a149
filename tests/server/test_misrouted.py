"""ApiVersions v5 (KIP-1242): a client says which node of which cluster it wants, and another one sends it away.

A store keeps its id, and so its cluster id, through a restore and a takeover: clients continue there. Another store at
the same address has another cluster id.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from server.clients.fetching import Missing
from server.clients.java_driver import java_command
from server.clients.served import Served
from server.clients.served import served as served
from server.clients.served import store as store
from server.clients.teller import starting
from server.test_every_api import MakeBroker, make_broker
from server.wire_client import Desk, WireClient
from waiting import wait_until

import segmentlog
from segmentlog.format.file_names import SHIP_FILE
from segmentlog.objects.bucket.local_bucket import LocalBucket
from segmentlog.objects.ownership.binding import Binding, folder_id, write_binding
from segmentlog.objects.restore.restore import restore
from segmentlog.objects.takeover import take_over
from segmentlog.server.codec.generated.api_versions import ApiVersionsRequest
from segmentlog.server.codec.generated.metadata import MetadataRequest
from segmentlog.server.codec.kafka_errors import ErrorCode
from segmentlog.server.embedded import Server
from segmentlog.storage.fs import FileSystem

__all__ = ["make_broker"]

_API_VERSIONS, _METADATA = 18, 3
_NONE, _AWAY, _INVALID = ErrorCode.NONE, ErrorCode.REBOOTSTRAP_REQUIRED, ErrorCode.INVALID_REQUEST


@pytest.mark.parametrize(
    ("cluster_id", "node_id", "code"),
    [
        (None, -1, _NONE),  # sent to a bootstrap server, whose identifiers a client does not know
        ("c", 1, _NONE),
        ("c", 2, _AWAY),  # the other worker
        ("c", 0, _AWAY),
        ("c", 2147483646, _AWAY),
        ("d", 1, _AWAY),
        ("", 1, _AWAY),
        ("C", 1, _AWAY),
        (None, 1, _INVALID),  # only both together mean something, as in Kafka
        (None, 0, _INVALID),
        ("c", -1, _INVALID),
        ("", -1, _INVALID),
    ],
)
def test_who_is_meant(make_broker: MakeBroker, cluster_id: str | None, node_id: int, code: ErrorCode) -> None:
    """Worker 1 of cluster "c" lists its APIs to clients that mean it, and to clients that mean no node."""
    desk = Desk(make_broker(2))
    request = ApiVersionsRequest("test", "1", cluster_id, node_id)
    answer = desk.ask(_API_VERSIONS, 5, request)
    assert answer.error_code == code
    assert bool(answer.api_keys) is (code is _NONE)
    for version in range(5):  # which have no words for it
        answer = desk.ask(_API_VERSIONS, version, request)
        assert answer.error_code == _NONE
        assert answer.api_keys


def asked(address: str, cluster_id: str | None = None, node_id: int = -1) -> int:
    """Return the code that a client gets that connects to the address and means this node."""
    with WireClient(address) as client:
        request = ApiVersionsRequest("test", "1", cluster_id, node_id)
        code: int = client.ask(_API_VERSIONS, 5, request).error_code
        # A client that stays gets answers all the same: the code is a hint, not a lock.
        assert client.ask(_METADATA, 12, MetadataRequest(topics=[])).brokers
        return code


def cluster_of(address: str) -> Any:
    """Metadata: the cluster's id and its nodes."""
    with WireClient(address) as client:
        return client.ask(_METADATA, 12, MetadataRequest(topics=[]))


def test_each_worker_is_a_node_of_its_own(served: Served) -> None:
    """Each worker accepts clients that mean it, at its own port. The first port accepts clients that mean no node."""
    found = cluster_of(served.address)
    assert asked(served.address) == _NONE
    codes = {
        (at.node_id, meant.node_id): asked(f"{at.host}:{at.port}", found.cluster_id, meant.node_id)
        for at in found.brokers
        for meant in found.brokers
    }
    assert len(codes) == 9
    assert codes == {(at, meant): _NONE if at == meant else _AWAY for at, meant in codes}


def test_another_store_at_the_address(tmp_path: Path) -> None:
    """A client that knows the store that was served here before is sent away; a client that knows none is accepted."""
    with segmentlog.serve(tmp_path / "one", port=0) as server:
        address = server.bootstrap_servers
        before = cluster_of(address)
        assert asked(address, before.cluster_id, 1) == _NONE
    with segmentlog.serve(tmp_path / "other", port=port_of(address)):
        assert asked(address) == _NONE
        assert asked(address, before.cluster_id, 1) == _AWAY
        assert asked(address, cluster_of(address).cluster_id, 1) == _NONE


@pytest.mark.parametrize("how", ["restore", "takeover"])
def test_the_same_store_again(tmp_path: Path, how: str) -> None:
    """A restored store, and one that another machine took over, is the cluster that it was: clients continue."""
    bucket = LocalBucket(str(tmp_path / "bucket"))
    with segmentlog.serve(tmp_path / "one", port=0, ship=bucket.url) as server:
        server.store.create_topic("t").partition(0).append([b"a"], ack="shipped")
        address = server.bootstrap_servers
        before = cluster_of(address)
    folder = tmp_path / "again"
    if how == "restore":
        restore(bucket, str(folder))
    else:
        take_over(bucket, str(folder))
    with segmentlog.serve(folder, port=port_of(address)) as again:
        assert cluster_of(address).cluster_id == before.cluster_id
        assert asked(address, before.cluster_id, 1) == _NONE
        assert values(again) == [b"a"]


@pytest.mark.parametrize(
    ("fenced", "topics", "code"),
    [("", (), _NONE), ("host b", (), _AWAY), ("host b", ("t", "u-*"), _NONE)],
    ids=["not", "all", "some topics"],
)
def test_who_is_sent_on_after_a_takeover(
    make_broker: MakeBroker, fenced: str, topics: tuple[str, ...], code: ErrorCode
) -> None:
    """A machine whose whole store was taken over sends its clients on. One that keeps other topics does not.

    A client that comes by its bootstrap servers is accepted in any case.
    """
    broker = make_broker()
    fs, path = FileSystem(), broker.store.path
    write_binding(fs, path, Binding("file:///bucket", "a", 1, folder_id(fs, path), topics, fenced=fenced))
    desk = Desk(broker)
    for request, wanted in ((ApiVersionsRequest("test", "1", "c", 1), code), (ApiVersionsRequest("test", "1"), _NONE)):
        answer = desk.ask(_API_VERSIONS, 5, request)
        assert answer.error_code == wanted
        assert bool(answer.api_keys) is (wanted is _NONE)


def test_a_damaged_binding_sends_nobody_on(make_broker: MakeBroker) -> None:
    """The file says nothing then: the server serves."""
    broker = make_broker()
    Path(broker.store.path, SHIP_FILE).write_bytes(b"{")
    answer = Desk(broker).ask(_API_VERSIONS, 5, ApiVersionsRequest("test", "1", "c", 1))
    assert answer.error_code == _NONE


def test_a_machine_that_was_taken_over(tmp_path: Path) -> None:
    """Both call themselves the cluster. The old machine refuses writes by NOT_LEADER_OR_FOLLOWER (`test_shipped`)."""
    bucket = LocalBucket(str(tmp_path / "bucket"))
    with segmentlog.serve(tmp_path / "one", port=0, ship=bucket.url) as old:
        old.store.create_topic("t").partition(0).append([b"a"], ack="shipped")
        cluster_id = cluster_of(old.bootstrap_servers).cluster_id
        assert asked(old.bootstrap_servers, cluster_id, 1) == _NONE
        take_over(bucket, str(tmp_path / "again"))
        old.store.topic("t").partition(0).append([b"late"])
        with segmentlog.serve(tmp_path / "again", port=0) as new:
            wait_until(lambda: asked(old.bootstrap_servers, cluster_id, 1) == _AWAY, "the old machine sends clients on")
            assert asked(old.bootstrap_servers) == _NONE
            assert asked(new.bootstrap_servers, cluster_id, 1) == _NONE


@pytest.mark.long
def test_a_client_of_java_at_another_store(tmp_path: Path) -> None:
    """The consumer asks its bootstrap server again, and reads the store that is served there now.

    It is sent away, unless it has found no broker before the second server started: then it asks again by itself, and
    does not say which node it means.
    """
    try:
        java_command("Follow")
    except Missing as error:
        pytest.skip(str(error))
    with starting(tmp_path / "said.log") as start:
        with segmentlog.serve(tmp_path / "one", port=0) as server:
            address = server.bootstrap_servers
            server.store.create_topic("t").partition(0).append([b"a", b"b"], ack="durable")
            reader = start(java_command("Follow", address, "t", "earliest"))
            wait_until(lambda: reader.told == ["0 a", "1 b"], "it does not read")
        with segmentlog.open(tmp_path / "other") as other:
            other.create_topic("t").partition(0).append([b"x"], ack="durable")
        with segmentlog.serve(tmp_path / "other", port=port_of(address)) as server:
            wait_until(lambda: "0 x" in reader.told, lambda: f"it does not read on: {reader.told}")
        assert not reader.has_ended


def values(server: Server) -> list[bytes | None]:
    """Return the values of the topic."""
    return [record.value for record in server.store.consumer("t")]


def port_of(address: str) -> int:
    """Return the port on which the address is served again."""
    return int(address.rpartition(":")[2])
