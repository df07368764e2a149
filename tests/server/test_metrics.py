"""Metrics: each figure compared with the store or the requests that it is about, and who may request them."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from server.scraping import RawClient, get, parse, scrape, value
from waiting import wait_until
from wire import Sent, foreign

import segmentlog
from segmentlog.config import TopicConfig
from segmentlog.errors import SegmentlogError
from segmentlog.log.partition import Partition
from segmentlog.records import TopicPartition
from segmentlog.security import cross_site
from segmentlog.security.security_errors import UnsafeListening
from segmentlog.server import metrics
from segmentlog.server.codec.generated import list_offsets, metadata, produce
from segmentlog.server.embedded import Server
from segmentlog.server.telemetry import definitions
from segmentlog.server.worker_counters import BUCKETS_S
from segmentlog.storage.fs import FileSystem
from segmentlog.store import LogStore
from segmentlog.topics.topic_folders import TopicFolders

ROOT = Path(__file__).parent.parent.parent
_PRODUCE, _LIST_OFFSETS, _METADATA = 0, 2, 3


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LogStore]:
    """Provide a store with topic ``t`` of two partitions, without automatic fsyncs."""
    with segmentlog.open(tmp_path / "store", background=False) as store:
        store.create_topic("t", partitions=2, fsync="never")
        yield store


@pytest.fixture
def server(store: LogStore) -> Iterator[Server]:
    """Provide a server of it, with metrics."""
    with segmentlog.serve(store, port=0, metrics="127.0.0.1:0") as server:
        yield server


@pytest.fixture
def shipped(tmp_path: Path) -> Iterator[Server]:
    """Provide a server that ships its store."""
    with segmentlog.serve(
        tmp_path / "shipped", port=0, metrics="127.0.0.1:0", ship=f"file://{tmp_path}/bucket", ship_interval_ms=10
    ) as server:
        ends_s = time.monotonic() + 30
        while (status := server.store.shipping.status()) is None or not status.shipped_ms:
            assert time.monotonic() < ends_s
            time.sleep(0.01)
        yield server


def address_of(server: Server) -> str:
    """Return the address of the metrics."""
    assert server.metrics_address is not None
    return server.metrics_address


def produced(data: bytes, *, acks: int = -1, topic: str = "t") -> Any:
    """Return a request that appends a batch to a topic's first partition."""
    partition = produce.PartitionProduceData(0, data)
    return produce.ProduceRequest(acks=acks, topic_data=[produce.TopicProduceData(topic, partition_data=[partition])])


# ---------------------------------------------------------------- the store


def test_a_partition_is_told_as_it_is(store: LogStore, server: Server) -> None:
    """Offsets, bytes, segments, what is at risk: the same as the library says."""
    partition = store.open_partition("t", 0)
    partition.append([b"one", b"two"])
    partition.flush()
    partition.roll()
    partition.append([b"three"])
    partition.trim(1)
    found = scrape(address_of(server))
    told = {family: value(found, family.name, topic="t", partition=0) for family in definitions.PARTITION}
    assert told.pop(definitions.UNSYNCED_SECONDS) is not None
    assert told == {
        definitions.LOG_START: 1,
        definitions.LOG_END: 3,
        definitions.DURABLE: partition.durable_offset,
        definitions.LAST_STABLE: 3,
        definitions.BYTES: sum(segment.size_bytes for segment in partition.segments()),
        definitions.SEGMENTS: 2,
        definitions.EPOCH: 0,
        definitions.LOST: 0,
        definitions.UNSYNCED_RECORDS: 3 - partition.durable_offset,
        definitions.SYNCS: partition.sync_count,
        definitions.FAILED: 0,
    }


def test_data_at_risk_grows_old_until_it_is_synced(store: LogStore, server: Server) -> None:
    """The age counts from the last scrape that found everything on disk; it is 0 once it is synced."""
    partition = store.open_partition("t", 0)
    partition.append([b"one"])
    partition.flush()
    since = time.monotonic()
    assert value(scrape(address_of(server)), "segmentlog_partition_unsynced_seconds", topic="t", partition=0) == 0
    partition.append([b"two"])
    time.sleep(0.05)
    found = scrape(address_of(server))
    assert value(found, "segmentlog_partition_unsynced_records", topic="t", partition=0) == 1
    at_risk_s = value(found, "segmentlog_partition_unsynced_seconds", topic="t", partition=0)
    assert at_risk_s is not None
    assert 0.04 <= at_risk_s <= time.monotonic() - since
    partition.flush()
    assert value(scrape(address_of(server)), "segmentlog_partition_unsynced_seconds", topic="t", partition=0) == 0


def test_what_a_truncation_took_is_told(store: LogStore, server: Server) -> None:
    """Lost offsets are counted, and the epoch shows it."""
    partition = store.open_partition("t", 0)
    partition.append([b"%d" % number for number in range(10)])
    partition.flush()
    assert value(scrape(address_of(server)), "segmentlog_partition_lost_offsets_total", topic="t", partition=0) == 0
    lost = partition.truncate(4)
    assert lost is not None
    found = scrape(address_of(server))
    told = value(found, "segmentlog_partition_lost_offsets_total", topic="t", partition=0)
    assert told == lost.end_offset - lost.base_offset
    assert value(found, "segmentlog_partition_epoch", topic="t", partition=0) == partition.epoch == 1


def test_partitions_of_other_processes_are_told_without_being_opened(tmp_path: Path) -> None:
    """Their metrics come from the shared state page; those not opened since the machine started are only counted."""
    path = tmp_path / "store"
    pid = os.fork()
    if not pid:
        store = segmentlog.open(path, background=False)
        store.create_topic("t", partitions=3)
        store.open_partition("t", 0).append([b"theirs"])
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    with (
        segmentlog.open(path, background=False) as store,
        segmentlog.serve(store, port=0, metrics="127.0.0.1:0") as server,
    ):
        found = scrape(address_of(server))
        assert value(found, "segmentlog_partition_log_end_offset", topic="t", partition=0) == 1
        assert value(found, "segmentlog_partition_unsynced_records", topic="t", partition=0) == 1
        assert value(found, "segmentlog_partition_log_end_offset", topic="t", partition=1) is None
        assert value(found, "segmentlog_partitions") == 3
        assert value(found, "segmentlog_unread_partitions") == 2
        assert value(found, "segmentlog_opened_partitions") == 0
        assert not store.opened_partitions()


def test_a_first_scrape_of_many_topics_opens_and_syncs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One look at each topic: no partition is opened, nothing is written, and each configuration is checked once.

    The next scrape reads no topic again.
    """
    path, calls = tmp_path / "store", Counter[str]()
    with segmentlog.open(path, background=False) as store:
        for number in range(40):
            config = {"retention.ms": 1000 + number % 2} if number % 4 else {}
            store.create_topic(f"t{number}", partitions=2, config=config)
            store.open_partition(f"t{number}", 0).append([b"v"])

        def count(owner: type, name: str) -> None:
            real = getattr(owner, name)

            def counted(*args: Any, **options: Any) -> Any:
                calls[name] += 1
                return real(*args, **options)

            kept = staticmethod(counted) if isinstance(vars(owner).get(name), staticmethod) else counted
            monkeypatch.setattr(owner, name, kept)

        with (
            segmentlog.open(path, background=False) as looking,
            segmentlog.serve(looking, port=0, metrics="127.0.0.1:0") as server,
        ):
            # A file that has just changed is read again, because a further change may not change its timestamp.
            time.sleep(0.2)
            for owner, name in (
                (FileSystem, "fsync"), (FileSystem, "fdatasync"), (FileSystem, "write"), (FileSystem, "pwrite"),
                (Partition, "__init__"), (TopicConfig, "__post_init__"), (TopicFolders, "_parse"),
            ):  # fmt: skip
                if hasattr(owner, name):
                    count(owner, name)
            found = scrape(address_of(server))
            assert value(found, "segmentlog_topics") == 40
            assert value(found, "segmentlog_partition_log_end_offset", topic="t39", partition=0) == 1
            assert calls.pop("_parse") == 40
            assert calls.pop("__post_init__") <= 3
            assert not calls
            scrape(address_of(server))
            assert not calls
            assert not looking.opened_partitions()


def test_a_topic_made_anew_is_told_anew(store: LogStore, server: Server) -> None:
    """Cached data of the deleted topic is not used for the new one; a deleted topic has no metrics."""
    partition = store.open_partition("t", 0)
    partition.append([b"x" * 100])
    partition.roll()
    assert value(scrape(address_of(server)), "segmentlog_partition_segments", topic="t", partition=0) == 2
    store.delete_topic("t")
    assert value(scrape(address_of(server)), "segmentlog_partition_segments", topic="t", partition=0) is None
    store.create_topic("t").partition(0)
    found = scrape(address_of(server))
    assert value(found, "segmentlog_partition_segments", topic="t", partition=0) == 1
    assert value(found, "segmentlog_partition_size_bytes", topic="t", partition=0) == 0


def test_groups_of_the_library_are_told(store: LogStore, server: Server) -> None:
    """Members, state, positions and lag; no partition is opened to know where it ends."""
    group = 'a "group"\\of ours'
    store.open_partition("t", 0).append([b"%d" % number for number in range(10)])
    store.groups.reset(group, {TopicPartition("t", 0): 4})
    found = scrape(address_of(server))
    assert value(found, "segmentlog_group_committed_offset", group=group, topic="t", partition=0) == 4
    assert value(found, "segmentlog_group_lag", group=group, topic="t", partition=0) == 6
    assert value(found, "segmentlog_group_state", group=group, state="Empty") == 1
    with store.consumer("t", group=group) as consumer:
        next(iter(consumer))
        found = scrape(address_of(server))
        assert value(found, "segmentlog_group_members", group=group, kind="library") == 1
        assert value(found, "segmentlog_group_members", group=group, kind="kafka") == 0
        assert value(found, "segmentlog_group_state", group=group, state="Empty") == 0


# ---------------------------------------------------------------- the worker


def test_requests_are_counted_with_their_latency(server: Server) -> None:
    """Each request is in every bucket from its latency up, by API; bytes count in both directions."""
    with RawClient(server.bootstrap_servers) as client:
        for _ in range(3):
            client.ask(_METADATA, metadata.MetadataRequest(topics=[]), 12)
        found = scrape(address_of(server))
        assert value(found, "segmentlog_connections") == 1
    assert value(found, "segmentlog_request_duration_seconds_count", api="Metadata") == 3
    assert value(found, "segmentlog_request_duration_seconds_bucket", api="Metadata", le="+Inf") == 3
    buckets = [value(found, "segmentlog_request_duration_seconds_bucket", api="Metadata", le=one) for one in BUCKETS_S]
    assert buckets == sorted(buckets, key=lambda one: one or 0)
    assert value(found, "segmentlog_connections_accepted_total") == 1
    assert (value(found, "segmentlog_received_bytes_total") or 0) > 50
    before = value(found, "segmentlog_sent_bytes_total") or 0
    assert before > 100
    _until(server, "segmentlog_connections", 0)
    kept = value(scrape(address_of(server)), "segmentlog_sent_bytes_total") or 0
    assert before <= kept < before + 1000, "kept when the client is gone"  # an answer counts a moment after it is sent


def test_an_answer_that_waits_for_the_disk_counts_until_then(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The latency of acks=all is that of the fsync, too."""
    partition = server.store.open_partition("t", 0)
    sync_upto = type(partition).sync_upto

    def slow(self: Any, *args: Any) -> Any:
        time.sleep(0.1)
        return sync_upto(self, *args)

    monkeypatch.setattr(type(partition), "sync_upto", slow)
    with RawClient(server.bootstrap_servers) as client:
        answer = client.ask(_PRODUCE, produced(foreign([Sent(None, b"x")])), 9)
        assert answer.responses[0].partition_responses[0].error_code == 0
        found = scrape(address_of(server))
    assert value(found, "segmentlog_request_duration_seconds_count", api="Produce") == 1
    assert (value(found, "segmentlog_request_duration_seconds_sum", api="Produce") or 0) >= 0.1


def test_errors_are_counted_under_kafkas_names(server: Server) -> None:
    """Errors inside a response count for each partition; successes do not count."""
    wanted = [list_offsets.ListOffsetsPartition(number, -1, -1) for number in (0, 7, 8)]
    request = list_offsets.ListOffsetsRequest(topics=[list_offsets.ListOffsetsTopic("t", wanted)])
    with RawClient(server.bootstrap_servers) as client:
        client.ask(_LIST_OFFSETS, request, 5)
        client.ask(_PRODUCE, produced(b"no batch", acks=1), 9)
        found = scrape(address_of(server))
    errors = {dict(labels)["api"]: (dict(labels)["error"], count) for (name, labels), count in found.items()
              if name == "segmentlog_errors_total"}  # fmt: skip
    assert errors.pop("ListOffsets") == ("UNKNOWN_TOPIC_OR_PARTITION", 2)
    assert [count for _, count in errors.values()] == [1]
    assert list(errors) == ["Produce"]


def test_a_connection_that_brings_no_request_is_counted(server: Server) -> None:
    """It counts as cut; a connection that just closes does not."""
    with RawClient(server.bootstrap_servers) as client:
        client.socket.sendall(b"\x7f\xff\xff\xff")
        assert client.is_closed()
    with RawClient(server.bootstrap_servers):
        pass
    _until(server, "segmentlog_connections", 0)
    assert value(scrape(address_of(server)), "segmentlog_connections_cut_total") == 1


def test_a_store_that_is_not_shipped_tells_nothing_of_it(store: LogStore, server: Server) -> None:
    """Zeros would say that nothing is left to ship."""
    assert not [name for name, _ in scrape(address_of(server)) if "ship" in name]


def test_every_metric_is_told_and_no_other(shipped: Server) -> None:
    """A scrape has the metrics of `definitions`, with kind and help, and those of Prometheus' library."""
    _, text = get(address_of(shipped))
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
    helps = dict(re.findall(r"^# HELP (\S+) (.*)$", text, re.MULTILINE))
    ours = {family.name: family for family in (*definitions.WORKER, *definitions.STORE)}
    assert {name for name in kinds if not name.startswith("process_")} == set(ours)
    assert {name: kinds[name] for name in ours} == {name: family.kind for name, family in ours.items()}
    assert {name: helps[name] for name in ours} == {name: family.help for name, family in ours.items()}
    assert "process_open_fds" in kinds
    for (name, labels), _ in parse(text).items():
        base = re.sub(r"_(bucket|sum|count)$", "", name)
        if base in ours:
            assert {label for label, _ in labels} - {"le"} == set(ours[base].labels)


def test_names_are_prometheus_own() -> None:
    """Counters end in _total, times are seconds, sizes bytes; nothing comes twice."""
    all_of_them = (*definitions.WORKER, *definitions.STORE)
    assert len({family.name for family in all_of_them}) == len(all_of_them)
    for family in all_of_them:
        assert re.fullmatch(r"segmentlog(_[a-z]+)+", family.name)
        assert family.name.endswith("_total") == (family.kind == "counter")
        assert not re.search(r"_(ms|millis|kb|mb)(_|$)", family.name)


# ---------------------------------------------------------------- pages


def test_the_page_has_every_metric() -> None:
    """docs/server-metrics.md has a row for each metric, with its labels and its help text."""
    page = (ROOT / "docs" / "server-metrics.md").read_text()
    rows = re.findall(r"^\| `(segmentlog_\w+)` \| (\w+) \| (.*?) \| (.*) \|$", page, re.MULTILINE)
    assert rows == [
        (family.name, family.kind, ", ".join(f"`{label}`" for label in family.labels), family.help)
        for family in (*definitions.WORKER, *definitions.STORE, *definitions.STANDBY)
    ]


def test_the_dashboard_asks_for_what_there_is(shipped: Server) -> None:
    """Every name in an expression is in a scrape, and every label that it groups by; every metric is on it."""
    dashboard = json.loads((ROOT / "docs" / "grafana" / "segmentlog.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    expressions += [one["query"]["query"] for one in dashboard["templating"]["list"] if one["type"] == "query"]
    _, text = get(address_of(shipped))
    told = set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)) | {family.name for family in definitions.STANDBY}
    names = {re.sub(r"_(bucket|sum|count)$", "", name) for one in expressions
             for name in re.findall(r"\b((?:segmentlog|process)_\w+)", one)}  # fmt: skip
    assert names <= told
    assert names >= {family.name for family in (*definitions.WORKER, *definitions.STORE, *definitions.STANDBY)} - {
        definitions.LOG_START.name, definitions.DURABLE.name, definitions.EPOCH.name, definitions.TOPICS.name,
        definitions.STORE_SECONDS.name,
    }  # fmt: skip
    labels = {label for family in (*definitions.WORKER, *definitions.STORE) for label in family.labels}
    for one in expressions:
        for group in re.findall(r"by \(([^)]*)\)", one):
            assert {label.strip() for label in group.split(",")} <= labels | {"le"}
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    assert dashboard["schemaVersion"] >= 38


# ---------------------------------------------------------------- health


def test_a_server_that_is_well_says_so(server: Server) -> None:
    """Both the health and the readiness endpoint answer ok."""
    assert get(address_of(server), "/healthz") == (200, "ok\n")
    assert get(address_of(server), "/readyz") == (200, "ok\n")


def test_a_stuck_server_is_not_healthy(server: Server) -> None:
    """It is unhealthy while a lock that requests need is held, and healthy again afterwards."""
    with server.worker.broker.purgatory._mutex:
        status, why = get(address_of(server), "/healthz")
    assert status == 503
    assert "is stuck" in why
    assert get(address_of(server), "/healthz")[0] == 200


def test_a_failed_partition_is_named(store: LogStore, server: Server) -> None:
    """The server is not ready, with the reason, but healthy: a restart would not help the disk."""
    store.open_partition("t", 1).handle.ledger.mark_failed()
    assert get(address_of(server), "/readyz") == (503, "t/1: an fsync failed\n")
    assert get(address_of(server), "/healthz")[0] == 200
    found = scrape(address_of(server))
    assert value(found, "segmentlog_partition_failed", topic="t", partition=1) == 1
    assert value(found, "segmentlog_problems") == 1
    store.open_partition("t", 1).handle.ledger.unmark_failed()


def test_a_server_that_ends_is_not_ready(server: Server) -> None:
    """It accepts no connections any more, and reports that while it runs."""
    server.worker.close(1)
    assert get(address_of(server), "/readyz") == (503, "no connections are accepted\n")
    server.store.close()
    assert get(address_of(server), "/readyz") == (503, "no connections are accepted\nthe store is closed\n")


# ---------------------------------------------------------------- who asks, and how


def test_there_is_nothing_else(server: Server) -> None:
    """Other paths and methods are refused, and no file is served."""
    assert get(address_of(server), "/")[0] == 404
    assert get(address_of(server), "/../../etc/passwd")[0] == 404
    assert get(address_of(server), "/metrics?name=x")[0] == 200
    assert get(address_of(server), method="POST")[0] == 501


@pytest.mark.parametrize(
    "sent",
    [b"GET /" + b"x" * 20_000, b"\r\n\r\n", b"\x16\x03\x01\x00\xff" * 100 + b"\r\n\r\n"],
    ids=["long", "empty", "TLS"],
)
def test_what_is_no_request_ends_that_connection_alone(server: Server, sent: bytes) -> None:
    """After a request that is too long, empty or TLS, the server still answers the next connection."""
    host, _, port = address_of(server).rpartition(":")
    # The server may close the connection before all of it is sent.
    with socket.create_connection((host, int(port)), timeout=20) as sock, contextlib.suppress(OSError):
        sock.sendall(sent)
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(4096):
            pass
    assert get(address_of(server), "/healthz")[0] == 200


def _connect(server: Server, source: str = "127.0.0.1") -> socket.socket:
    host, _, port = address_of(server).rpartition(":")
    return socket.create_connection((host, int(port)), 20, (source, 0))


@pytest.mark.parametrize("said", [b"", b"GET /met"])
def test_silent_clients_keep_no_scrape_out(store: LogStore, monkeypatch: pytest.MonkeyPatch, said: bytes) -> None:
    """Beyond eight, the oldest one of the address with the most makes room, at once; a close waits for none of them."""
    monkeypatch.setattr(metrics, "_PATIENCE_S", 600.0)
    with segmentlog.serve(store, port=0, metrics="127.0.0.1:0") as server:
        few = [_connect(server, "127.0.0.2") for _ in range(2)]
        many = [_connect(server) for _ in range(40)]
        for sock in (*few, *many):
            with contextlib.suppress(OSError):  # it may be closed by now
                sock.sendall(said)
        for sock in many[:34]:
            with contextlib.suppress(ConnectionError):
                assert sock.recv(1) == b""
        assert get(address_of(server))[0] == 200
        for sock in few:
            sock.sendall(b"GET /metrics HTTP/1.0\r\n\r\n"[len(said) :])
            assert sock.recv(12) == b"HTTP/1.0 200"
    for sock in (*few, *many):
        sock.close()


def _ask(server: Server, path: str = "/metrics", **headers: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection(address_of(server), timeout=20)
    try:
        connection.putrequest("GET", path, skip_host=True)
        for name, value in headers.items():
            connection.putheader(name.replace("_", "-"), value)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def test_no_page_of_another_site_has_it_asked(store: LogStore) -> None:
    """Requests by a name that resolves to this machine, or from a visitor's browser, are refused; others are served."""
    with segmentlog.serve(store, port=0, metrics="127.0.0.1:0", allowed_hosts=["metrics.example"]) as server:
        for host in ("evil.example", "evil.example:9644", "localhost.evil.example", ""):
            status, text = _ask(server, host=host, sec_fetch_site="same-origin")
            assert (status, "topic" in text) == (421, False), host
        for site in ({"sec_fetch_site": "cross-site"}, {"sec_fetch_site": "same-site"}, {"origin": "http://other"}):
            status, text = _ask(server, host="localhost", **site)
            assert (status, "segmentlog_" in text) == (403, False), site
        names = ("localhost", "LOCALHOST:9644", "127.0.0.1:1", "[::1]:9644", "metrics.example:80", socket.gethostname())
        for host in names:
            assert _ask(server, host=host)[0] == 200, host
        assert _ask(server)[0] == 200  # HTTP/1.0 without a host, as balancers ask: no browser does
        assert _ask(server, host="localhost", origin="http://localhost")[0] == 200
        assert _ask(server, host="localhost", sec_fetch_site="none")[0] == 200


def test_it_is_asked_for_by_the_names_that_scrapers_use(store: LogStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The advertised name, and the machine's full name, which a name server may take long to tell."""
    is_told = threading.Event()

    def full_name() -> str:
        assert is_told.wait(60)
        return "kafka1.example.com"

    monkeypatch.setattr(cross_site, "_full_names", {})
    monkeypatch.setattr(socket, "gethostname", lambda: "kafka1")
    monkeypatch.setattr(socket, "getfqdn", full_name)
    with segmentlog.serve(store, port=0, metrics="127.0.0.1:0", advertise="segmentlog:9092") as server:
        for host, status in (("segmentlog:9404", 200), ("kafka1", 200), ("kafka1.example.com", 421)):
            assert _ask(server, host=host)[0] == status, host
        is_told.set()
        wait_until(lambda: _ask(server, host="kafka1.example.com:9404")[0] == 200)
        assert _ask(server, host="kafka2.example.com")[0] == 421


def test_health_is_told_by_any_name_without_reasons(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Balancers ask by names of theirs. The reasons name topics: they are for those who name this machine."""
    for path in ("/healthz", "/readyz?verbose=1"):
        assert _ask(server, path, host="balancer.example") == (200, "ok\n")
    monkeypatch.setattr(type(server.worker), "problems", lambda _: ["partition secret/0: damaged"])
    assert _ask(server, "/readyz", host="localhost") == (503, "partition secret/0: damaged\n")
    status, text = _ask(server, "/readyz", host="balancer.example")
    assert (status, "secret" in text) == (503, False)
    assert _ask(server, "/healthz", host="balancer.example", sec_fetch_site="cross-site")[0] == 403


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]"])
def test_others_are_not_to_reach_it(tmp_path: Path, host: str) -> None:
    """The user must say that the network keeps others out: TLS and users of the server do not protect it."""
    with pytest.raises(UnsafeListening, match=r"--metrics .*names of all topics") as raised:
        segmentlog.serve(tmp_path / "store", port=0, metrics=f"{host}:0")
    assert raised.value.option == "metrics"
    with segmentlog.serve(tmp_path / "store", port=0, metrics="0.0.0.0:0", insecure=True) as server:
        port = address_of(server).rpartition(":")[2]
        assert get(f"127.0.0.1:{port}", "/healthz")[0] == 200


def test_an_address_that_is_taken_is_named(store: LogStore, server: Server, tmp_path: Path) -> None:
    """The server that could not listen leaves no thread and no file."""
    with pytest.raises(OSError, match="cannot listen") as raised:
        segmentlog.serve(tmp_path / "other", port=0, metrics=address_of(server))
    assert raised.value.filename == address_of(server)


def test_without_the_library_it_is_said_what_is_missing(store: LogStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says how to install it; a server without metrics does not need it."""
    monkeypatch.setitem(__import__("sys").modules, "prometheus_client", None)
    monkeypatch.delitem(__import__("sys").modules, "segmentlog.server.telemetry.worker_metrics", raising=False)
    with pytest.raises(SegmentlogError, match=r"pip install '\.\[server\]'"):
        segmentlog.serve(store, port=0, metrics="127.0.0.1:0")
    with segmentlog.serve(store, port=0) as server:
        assert server.metrics_address is None


def test_a_forked_child_holds_no_socket_of_it(store: LogStore) -> None:
    """The port is free once the parent has closed it."""
    with segmentlog.serve(store, port=0, metrics="127.0.0.1:0") as server:
        address = address_of(server)
        read, write = os.pipe()
        born, told = os.pipe()
        pid = os.fork()
        if not pid:
            os.close(write)
            os.write(told, b"!")
            os.read(read, 1)
            os._exit(0)
        os.read(born, 1)  # the child has had time to close what it inherited
    try:
        with pytest.raises(ConnectionRefusedError):
            get(address)
    finally:
        for fd in (read, write, born, told):
            os.close(fd)
        os.waitpid(pid, 0)


def _until(server: Server, name: str, wanted: float) -> None:
    wait_until(lambda: value(scrape(address_of(server)), name) == wanted, lambda: name)
