"""Power cuts under each kind of client: it learns of the lost range, and continues after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from crashfs_mount import disk as disk
from server.clients.connect_worker import ConnectWorker
from server.clients.driver import Driver, text_of
from server.clients.fetching import Missing
from server.clients.java_driver import java_command
from server.clients.mortal import MortalServer
from server.clients.teller import Start, starting
from waiting import wait_until

from segmentlog.testing.crashfs import CrashFS

confluent_kafka = pytest.importorskip("confluent_kafka")

pytestmark = pytest.mark.long

_NEVER = {"fsync": "never"}


@pytest.fixture
def server(disk: CrashFS) -> Iterator[MortalServer]:
    """Yield a server on a disk that forgets unsynced data."""
    server = MortalServer(disk)
    yield server
    server.kill()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Yield a function that starts programs."""
    with starting(tmp_path / "said.log") as start:
        yield start


@pytest.fixture
def java() -> None:
    """Skipped where Java's programs cannot be had."""
    try:
        java_command("Client")
    except Missing as error:
        pytest.skip(str(error))


def create(server: MortalServer, topic: str, **config: str) -> None:
    """Create a topic of one partition, which is synced on demand only."""
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
    """Cut the power and restart. Return the lost range of a topic that has ``count`` records on disk."""
    server.lose_power()
    meanwhile()
    server.start()
    ((base_offset, end_offset),) = server.lost(topic)
    assert base_offset == kept
    return base_offset, end_offset


def numbers(first: int, end: int) -> list[str]:
    """Return the written values."""
    return [f"v{number}" for number in range(first, end)]


def test_members_of_a_group_go_on(kind: type[Driver], server: MortalServer, start: Start) -> None:
    """Their offsets are on disk, but the records were not: each client continues with new records."""
    client = kind(server.address)
    create(server, "t")
    write(server, "t", numbers(0, 5))
    server.flush()
    member = start(client.member("g", "t"))

    def words(values: Sequence[str]) -> set[str]:
        return {value if client.name == "kcat" else text_of(value.encode()) for value in values}

    def has_told(values: Sequence[str]) -> bool:
        return words(values) <= {line.split()[-1] for line in member.told}

    wait_until(lambda: has_told(numbers(0, 5)), "it does not read")
    write(server, "t", numbers(5, 10))
    wait_until(lambda: has_told(numbers(5, 10)), "it does not read on")
    wait_until(lambda: server.committed("g") == {"t/0": 10}, "it does not commit")
    is_kcat = client.name == "kcat"  # it ends by itself when no server is there, and may take long on a busy machine
    _, end = lose(server, "t", 5, member.kill if is_kcat else lambda: None)
    assert end > 10
    if is_kcat:
        member = start(client.member("g", "t"))
    write(server, "t", numbers(10, 15))
    wait_until(lambda: has_told(numbers(10, 15)), f"it does not go on: {member.told}")
    wait_until(lambda: server.committed("g") == {"t/0": end + 5}, "it does not commit what came then")
    assert not member.has_ended


@pytest.mark.usefixtures("java")
@pytest.mark.parametrize("reset", ["none", "earliest", "latest"])
@pytest.mark.parametrize("appended", ["soon", "late"])
def test_who_reads_by_himself_is_told(server: MortalServer, start: Start, reset: str, appended: str) -> None:
    """Java's consumer learns where its log diverges, or seeks there by itself. No record is repeated or missed."""
    create(server, "t")
    write(server, "t", numbers(0, 5))
    server.flush()
    write(server, "t", numbers(5, 10))
    reader = start(java_command("Follow", server.address, "t", reset))
    before = [f"{number} v{number}" for number in range(10)]
    wait_until(lambda: reader.told == before, "it does not read")
    base_offset, end = lose(server, "t", 5)
    told = [f"truncated 10 {base_offset}"] if reset == "none" else []
    if appended == "late":  # empty batches lead it to the end of the lost range, where it waits
        wait_until(lambda: f"at {end}" in reader.told, "it stays where it cannot read on")
    write(server, "t", numbers(10, 15))
    after = [f"{end + number} v{10 + number}" for number in range(5)]
    wait_until(lambda: reader.told[-1:] == after[-1:], "it does not go on")
    assert [line for line in reader.told if not line.startswith("at")] == before + told + after
    assert not reader.has_ended


@pytest.mark.usefixtures("java")
@pytest.mark.parametrize("survives", [True, False], ids=["it lives on", "it dies, too"])
def test_streams_restores_its_state(server: MortalServer, start: Start, tmp_path: Path, survives: bool) -> None:
    """Kafka Streams restores its state from the rest of the changelog, and continues with the next records."""
    for topic in ("words", "counts"):
        create(server, topic)
    command = java_command("Counting", server.address, "app", "words", "counts", tmp_path / "state", memory="192m")
    app = start(command)
    write(server, "words", ["a"] * 5)
    between = "app-counts-repartition/0"  # its changes are written before it commits
    wait_until(lambda: "a 5" in app.told and server.committed("app").get(between) == 5, "it does not count")
    server.flush()
    write(server, "words", ["a"] * 5)
    wait_until(lambda: "a 10" in app.told and server.committed("app").get(between) == 10, "it does not count on")
    if not survives:
        app.kill()
    lose(server, "words", 5)
    ((base_offset, end_offset),) = server.lost("app-counts-changelog")
    assert base_offset == 5
    if not survives:
        app = start(command)
        wait_until(lambda: f"restoring 0 {end_offset}" in app.told, "it does not look at its changelog")
        wait_until(lambda: "restored 5" in app.told, "it does not come to the end of its changelog")
    write(server, "words", ["a", "b", "b", "b"])
    wait_until(lambda: "b 3" in app.told, "it does not go on")
    wait_until(lambda: server.committed("app").get(between) == server.end(between), "it does not commit what came then")
    app.kill()
    counted = [line for line in app.told if line[0] in "ab"]
    a_s = max([int(line.split()[1]) for line in counted if line[0] == "a"], default=0)
    again = start(command)
    wait_until(
        lambda: any(line.startswith("restored") for line in again.told), "it does not restore records around a gap"
    )
    write(server, "words", ["a", "b"])
    wait_until(lambda: {f"a {a_s + 1}", "b 4"} <= set(again.told), f"it has forgotten something: {counted}")
    assert not [line for line in app.told + again.told if line.startswith("!")]


class _Connect:
    """Kafka Connect, one worker, that copies the lines of one file to another through a topic."""

    def __init__(self, server: MortalServer, start: Start, folder: Path) -> None:
        self._folder = folder
        (folder / "in").touch()
        fsync = {f"{what}.storage.fsync": "never" for what in ("config", "offset", "status")}
        self._worker = ConnectWorker(server.address, start, folder / "worker.properties", fsync)
        self.states = self._worker.states
        self.kill = self._worker.kill

    def start(self) -> None:
        """Start the worker, and wait until it answers."""
        self._worker.start()
        wait_until(self._worker.answers, "it does not answer")

    def make_connectors(self) -> None:
        """Create a connector from the file to the topic, and one from the topic to the other file."""
        source = {"connector.class": "FileStreamSource", "file": self._folder / "in", "topic": "lines"}
        sink = {"connector.class": "FileStreamSink", "file": self._folder / "out", "topics": "lines"}
        wait_until(lambda: self._worker.configure("source", source), "no connector is made")
        wait_until(lambda: self._worker.configure("sink", sink), "no connector is made")

    def write(self, lines: Sequence[str]) -> None:
        """Append lines to the input file."""
        with open(self._folder / "in", "a") as file:
            file.writelines(f"{line}\n" for line in lines)

    def has_copied(self, lines: Sequence[str]) -> bool:
        """Return whether the lines are in the output file."""
        path = self._folder / "out"
        return path.exists() and set(lines) <= set(path.read_text().splitlines())


@pytest.mark.usefixtures("java")
@pytest.mark.parametrize("survives", [True, False], ids=["it lives on", "it dies, too"])
def test_connect_goes_on(server: MortalServer, start: Start, tmp_path: Path, survives: bool) -> None:
    """Kafka Connect reads its own topics across the lost range, and continues at the remaining committed offsets."""
    create(server, "lines")
    connect = _Connect(server, start, tmp_path)
    connect.start()
    connect.make_connectors()
    connect.write(numbers(0, 5))
    wait_until(lambda: connect.has_copied(numbers(0, 5)), "it does not copy")
    wait_until(lambda: connect.states() == ["RUNNING"] * 4, "it does not run")
    wait_until(lambda: server.end("connect-offset/0") > 0, "it keeps no position")
    server.flush()
    kept = server.end("connect-offset/0")
    connect.write(numbers(5, 10))
    wait_until(lambda: connect.has_copied(numbers(5, 10)), "it does not copy on")
    wait_until(lambda: server.committed("connect-sink") == {"lines/0": 10}, "the sink does not commit")
    wait_until(lambda: server.end("connect-offset/0") > kept, "it keeps no later position")
    if not survives:
        connect.kill()
    lose(server, "lines", 5)
    ((base_offset, _),) = server.lost("connect-offset")
    assert base_offset == kept
    if not survives:
        connect.start()
    connect.write(numbers(10, 15))
    wait_until(lambda: connect.has_copied(numbers(10, 15)), "it does not go on")
    wait_until(lambda: connect.states() == ["RUNNING"] * 4, "it does not go on running")
    connect.kill()
    connect.write(numbers(15, 20))
    connect.start()
    wait_until(lambda: connect.has_copied(numbers(15, 20)), "another one does not go on")
    wait_until(lambda: connect.states() == ["RUNNING"] * 4, "another one does not run")


def read_committed(server: MortalServer, topic: str, last: bytes) -> list[bytes]:
    """Return what a consumer reads from the first partition, up to that value."""
    consumer = confluent_kafka.Consumer({
        "bootstrap.servers": server.address, "group.id": "reader", "isolation.level": "read_committed",
        "auto.offset.reset": "earliest",
    })  # fmt: skip
    consumer.assign([confluent_kafka.TopicPartition(topic, 0, 0)])
    found: list[bytes] = []
    try:

        def has_come() -> bool:
            found.extend(one.value() for one in consumer.consume(100, 0.2) if one.error() is None)
            return last in found

        wait_until(has_come, f"{last!r} is not to be read")
        return found
    finally:
        consumer.close()


def failed(do: Callable[[], object]) -> Any:
    """Return the error that a call raises, without a reference to the client; None if there is none."""
    try:
        do()
    except confluent_kafka.KafkaException as error:
        return error.args[0]
    return None


@pytest.mark.parametrize("is_open", [True, False], ids=["within one", "between two"])
@pytest.mark.parametrize("writes_on", [True, False], ids=["it writes on", "it commits"])
def test_transactions_of_librdkafka_go_on(server: MortalServer, is_open: bool, writes_on: bool) -> None:
    """The first transaction after the power cut cannot be committed, because it may be incomplete.

    The client aborts it, and continues with the same producer.
    """
    create(server, "t")
    producer = confluent_kafka.Producer(
        {"bootstrap.servers": server.address, "transactional.id": "app", "linger.ms": 0}
    )
    producer.init_transactions(30)
    producer.begin_transaction()
    producer.produce("t", b"first", partition=0)
    producer.commit_transaction(30)
    if is_open:
        producer.begin_transaction()
        producer.produce("t", b"lost", partition=0)
        producer.flush(30)
    server.lose_power()
    server.start()
    if not is_open:
        producer.begin_transaction()
    if writes_on or not is_open:
        producer.produce("t", b"more", partition=0)
    error = failed(lambda: producer.commit_transaction(30))
    # Librdkafka cannot know whether the commit it asked for was carried out before the crash.
    if is_open and not writes_on:
        assert error.fatal()
        producer = confluent_kafka.Producer({"bootstrap.servers": server.address, "transactional.id": "app"})
        producer.init_transactions(30)
    else:
        assert error.txn_requires_abort()
        producer.abort_transaction(30)
    producer.begin_transaction()
    producer.produce("t", b"next", partition=0)
    error = failed(lambda: producer.commit_transaction(30))
    if error is not None:  # it counted on from the lost sequence numbers, and needs a new epoch
        assert error.txn_requires_abort()
        assert error.code() == confluent_kafka.KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER
        producer.abort_transaction(30)
        producer.begin_transaction()
        producer.produce("t", b"next", partition=0)
        producer.commit_transaction(30)
    assert read_committed(server, "t", b"next") == [b"first", b"next"]


@pytest.mark.usefixtures("java")
def test_transactions_of_java_go_on(server: MortalServer, start: Start) -> None:
    """Three power cuts during transactions: the client aborts those, and committed records exist once."""
    create(server, "t")
    client = start(java_command("Persist", server.address, "app", "t"))

    def count() -> int:
        return sum(line.startswith("committed") for line in client.told)

    wait_until(lambda: count() >= 3, "it does not begin")
    for boot in range(4):
        if boot:
            server.lose_power()
            server.start()
        wanted = count() + 3
        wait_until(lambda wanted=wanted: count() >= wanted, f"it does not go on: {client.told[-3:]}")  # type: ignore[misc]
    client.kill()
    assert not any(line.startswith("over") for line in client.told)
    assert any(line.startswith("aborted") for line in client.told)
    done = count()
    found = read_committed(server, "t", b"%d.2" % (done - 1))
    expected = [b"%d.%d" % (number, part) for number in range(done) for part in range(3)]
    assert found[: len(expected)] == expected
