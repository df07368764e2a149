"""The power fails under each kind of client: what the crash took is told to it, and it goes on behind that."""

from __future__ import annotations

import http.client
import json
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from crashfs_mount import disk as disk
from server.clients.driver import Driver, text_of, until
from server.clients.fetching import Missing
from server.clients.java_driver import java_command
from server.clients.mortal import MortalServer, Start, Teller, free_port

from segmentlog.testing.crashfs import CrashFS

confluent_kafka = pytest.importorskip("confluent_kafka")

pytestmark = pytest.mark.long

_NEVER = {"fsync": "never"}


@pytest.fixture
def server(disk: CrashFS) -> Iterator[MortalServer]:
    """On a disk that forgets."""
    server = MortalServer(disk)
    yield server
    server.kill()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts programs; what they said beside is shown of a test that failed."""
    started: list[Teller] = []
    log = tmp_path / "said.log"

    def start(command: Sequence[str]) -> Teller:
        started.append(Teller(command, log))
        return started[-1]

    yield start
    for one in started:
        one.kill()
    print(log.read_text()[-20_000:] if log.exists() else "")


@pytest.fixture
def java() -> None:
    """Skipped where Java's programs cannot be had."""
    try:
        java_command("Client")
    except Missing as error:
        pytest.skip(str(error))


def create(server: MortalServer, topic: str, **config: str) -> None:
    """Of one partition, which is on the disk when somebody asks for that."""
    admin_of = pytest.importorskip("confluent_kafka.admin")
    new = admin_of.NewTopic(topic, num_partitions=1, replication_factor=1, config={**_NEVER, **config})
    admin = admin_of.AdminClient({"bootstrap.servers": server.address})
    admin.create_topics([new])[topic].result(30)


def write(server: MortalServer, topic: str, values: Sequence[str]) -> None:
    """Written, and not on the disk."""
    producer = confluent_kafka.Producer({"bootstrap.servers": server.address, "acks": 1, "linger.ms": 5})
    for value in values:
        producer.produce(topic, value, partition=0)
    assert producer.flush(30) == 0


def lose(
    server: MortalServer, topic: str, kept: int, meanwhile: Callable[[], object] = lambda: None
) -> tuple[int, int]:
    """The power fails, and comes back; what that took of a topic, of which so many records are on the disk."""
    server.lose_power()
    meanwhile()
    server.start()
    ((base_offset, end_offset),) = server.lost(topic)
    assert base_offset == kept
    return base_offset, end_offset


def numbers(first: int, end: int) -> list[str]:
    """What is written."""
    return [f"v{number}" for number in range(first, end)]


def test_members_of_a_group_go_on(kind: type[Driver], server: MortalServer, start: Start) -> None:
    """Their positions are on the disk, and what was read up to there is not: each client reads what comes next."""
    client = kind(server.address)
    create(server, "t")
    write(server, "t", numbers(0, 5))
    server.flush()
    member = start(client.member("g", "t"))

    def words(values: Sequence[str]) -> set[str]:
        return {value if client.name == "kcat" else text_of(value.encode()) for value in values}

    def has_told(values: Sequence[str]) -> bool:
        return words(values) <= {line.split()[-1] for line in member.told}

    until(lambda: has_told(numbers(0, 5)), "it does not read")
    write(server, "t", numbers(5, 10))
    until(lambda: has_told(numbers(5, 10)), "it does not read on")
    until(lambda: server.committed("g") == {"t/0": 10}, "it does not commit")
    is_kcat = client.name == "kcat"  # it ends when nobody is there
    _, end = lose(server, "t", 5, (lambda: until(lambda: member.has_ended)) if is_kcat else lambda: None)
    assert end > 10
    if is_kcat:
        member = start(client.member("g", "t"))
    write(server, "t", numbers(10, 15))
    until(lambda: has_told(numbers(10, 15)), f"it does not go on: {member.told}")
    until(lambda: server.committed("g") == {"t/0": end + 5}, "it does not commit what came then")
    assert not member.has_ended


@pytest.mark.usefixtures("java")
@pytest.mark.parametrize("reset", ["none", "earliest", "latest"])
@pytest.mark.parametrize("appended", ["soon", "late"])
def test_who_reads_by_himself_is_told(server: MortalServer, start: Start, reset: str, appended: str) -> None:
    """Java's consumer is told where history diverges, or goes there by itself; nothing comes twice or is missed."""
    create(server, "t")
    write(server, "t", numbers(0, 5))
    server.flush()
    write(server, "t", numbers(5, 10))
    reader = start(java_command("Follow", server.address, "t", reset))
    before = [f"{number} v{number}" for number in range(10)]
    until(lambda: reader.told == before, "it does not read")
    base_offset, end = lose(server, "t", 5)
    told = [f"truncated 10 {base_offset}"] if reset == "none" else []
    if appended == "late":  # batches without records lead it to the end of what was lost, and it waits there
        until(lambda: f"at {end}" in reader.told, "it stays where it cannot read on")
    write(server, "t", numbers(10, 15))
    after = [f"{end + number} v{10 + number}" for number in range(5)]
    until(lambda: reader.told[-1:] == after[-1:], "it does not go on")
    assert [line for line in reader.told if not line.startswith("at")] == before + told + after
    assert not reader.has_ended


@pytest.mark.usefixtures("java")
@pytest.mark.parametrize("survives", [True, False], ids=["it lives on", "it dies, too"])
def test_streams_restores_its_state(server: MortalServer, start: Start, tmp_path: Path, survives: bool) -> None:
    """Kafka Streams: its state comes back from what is left of the changelog, and it goes on with what comes next."""
    for topic in ("words", "counts"):
        create(server, topic)
    command = java_command("Counting", server.address, "app", "words", "counts", tmp_path / "state", memory="192m")
    app = start(command)
    write(server, "words", ["a"] * 5)
    between = "app-counts-repartition/0"  # its changes are written before it commits
    until(lambda: "a 5" in app.told and server.committed("app").get(between) == 5, "it does not count")
    server.flush()
    write(server, "words", ["a"] * 5)
    until(lambda: "a 10" in app.told and server.committed("app").get(between) == 10, "it does not count on")
    if not survives:
        app.kill()
    lose(server, "words", 5)
    ((base_offset, end_offset),) = server.lost("app-counts-changelog")
    assert base_offset == 5
    if not survives:
        app = start(command)
        until(lambda: f"restoring 0 {end_offset}" in app.told, "it does not look at its changelog")
        until(lambda: "restored 5" in app.told, "it does not come to the end of its changelog")
    write(server, "words", ["a", "b", "b", "b"])
    until(lambda: "b 3" in app.told, "it does not go on")
    until(lambda: server.committed("app").get(between) == server.end(between), "it does not commit what came then")
    app.kill()
    counted = [line for line in app.told if line[0] in "ab"]
    a_s = max([int(line.split()[1]) for line in counted if line[0] == "a"], default=0)
    again = start(command)
    until(lambda: any(line.startswith("restored") for line in again.told), "it does not restore what is around a gap")
    write(server, "words", ["a", "b"])
    until(lambda: {f"a {a_s + 1}", "b 4"} <= set(again.told), f"it has forgotten something: {counted}")
    assert not [line for line in app.told + again.told if line.startswith("!")]


class _Connect:
    """Kafka Connect, one worker in distributed mode, that copies the lines of one file to another through a topic."""

    def __init__(self, server: MortalServer, start: Start, folder: Path) -> None:
        self._start = start
        self._folder = folder
        self._url = f"http://127.0.0.1:{free_port()}"
        (folder / "in").touch()
        settings = {
            "bootstrap.servers": server.address, "group.id": "workers", "listeners": self._url,
            "key.converter": "org.apache.kafka.connect.storage.StringConverter",
            "value.converter": "org.apache.kafka.connect.storage.StringConverter",
            "offset.flush.interval.ms": 200, "scheduled.rebalance.max.delay.ms": 0,
            "session.timeout.ms": 2000, "heartbeat.interval.ms": 300, "rebalance.timeout.ms": 5000,
            "consumer.session.timeout.ms": 2000, "consumer.heartbeat.interval.ms": 300,
            "reconnect.backoff.max.ms": 200, "plugin.discovery": "service_load",
        }  # fmt: skip
        for what in ("config", "offset", "status"):
            settings |= {f"{what}.storage.topic": f"connect-{what}", f"{what}.storage.replication.factor": 1}
            settings |= {f"{what}.storage.fsync": "never"}
        settings |= {"offset.storage.partitions": 1, "status.storage.partitions": 1}
        self._properties = folder / "worker.properties"
        self._properties.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
        self._process: Teller | None = None

    def start(self) -> None:
        """Until it answers."""
        main = "org.apache.kafka.connect.cli.ConnectDistributed"
        self._process = self._start(java_command(main, self._properties, memory="256m"))
        until(lambda: self._ask("/connectors") is not None, "it does not answer")

    def kill(self) -> None:
        """As `kill -9`."""
        assert self._process is not None
        self._process.kill()

    def make_connectors(self) -> None:
        """From the file to the topic, and from that to the other file."""
        source = {"connector.class": "FileStreamSource", "file": self._folder / "in", "topic": "lines"}
        sink = {"connector.class": "FileStreamSink", "file": self._folder / "out", "topics": "lines"}
        for name, settings in (("source", source), ("sink", sink)):
            body = json.dumps({"tasks.max": "1", **{key: str(value) for key, value in settings.items()}})
            until(lambda name=name, body=body: self._ask(f"/connectors/{name}/config", body), "no connector is made")

    def write(self, lines: Sequence[str]) -> None:
        """To the one file."""
        with open(self._folder / "in", "a") as file:
            file.writelines(f"{line}\n" for line in lines)

    def has_copied(self, lines: Sequence[str]) -> bool:
        """To the other one."""
        path = self._folder / "out"
        return path.exists() and set(lines) <= set(path.read_text().splitlines())

    def states(self) -> list[str]:
        """Of its connectors and their tasks."""
        found = self._ask("/connectors?expand=status") or {}
        status = [one["status"] for one in found.values()]
        return [part["state"] for one in status for part in (one["connector"], *one["tasks"])]

    def _ask(self, path: str, body: str | None = None) -> Any:
        request = urllib.request.Request(
            self._url + path, None if body is None else body.encode(), {"Content-Type": "application/json"},
            method="GET" if body is None else "PUT",
        )  # fmt: skip
        try:
            with urllib.request.urlopen(request, timeout=5) as answer:
                return json.loads(answer.read())
        except (OSError, http.client.HTTPException):  # not there yet, or at a rebalance
            return None


@pytest.mark.usefixtures("java")
@pytest.mark.parametrize("survives", [True, False], ids=["it lives on", "it dies, too"])
def test_connect_goes_on(server: MortalServer, start: Start, tmp_path: Path, survives: bool) -> None:
    """Kafka Connect: it reads its own topics over what is lost of them, and goes on from positions that are left."""
    create(server, "lines")
    connect = _Connect(server, start, tmp_path)
    connect.start()
    connect.make_connectors()
    connect.write(numbers(0, 5))
    until(lambda: connect.has_copied(numbers(0, 5)), "it does not copy")
    until(lambda: connect.states() == ["RUNNING"] * 4, "it does not run")
    until(lambda: server.end("connect-offset/0") > 0, "it keeps no position")
    server.flush()
    kept = server.end("connect-offset/0")
    connect.write(numbers(5, 10))
    until(lambda: connect.has_copied(numbers(5, 10)), "it does not copy on")
    until(lambda: server.committed("connect-sink") == {"lines/0": 10}, "the sink does not commit")
    until(lambda: server.end("connect-offset/0") > kept, "it keeps no later position")
    if not survives:
        connect.kill()
    lose(server, "lines", 5)
    ((base_offset, _),) = server.lost("connect-offset")
    assert base_offset == kept
    if not survives:
        connect.start()
    connect.write(numbers(10, 15))
    until(lambda: connect.has_copied(numbers(10, 15)), "it does not go on")
    until(lambda: connect.states() == ["RUNNING"] * 4, "it does not go on running")
    connect.kill()
    connect.write(numbers(15, 20))
    connect.start()
    until(lambda: connect.has_copied(numbers(15, 20)), "another one does not go on")
    until(lambda: connect.states() == ["RUNNING"] * 4, "another one does not run")
