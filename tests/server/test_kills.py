"""Kill -9 of workers and of their supervisor, under load from real clients and local programs.

SEGMENTLOG_SERVER_KILL_ROUNDS  kills, over all seeds
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from seeds import seeds, share
from server.clients.fetching import Missing
from server.clients.java_driver import java_command
from waiting import wait_until

import segmentlog
from segmentlog.server import supervisor
from segmentlog.testing.ports import free_ports

confluent_kafka = pytest.importorskip("confluent_kafka")

pytestmark = pytest.mark.long

ROUNDS = int(os.environ.get("SEGMENTLOG_SERVER_KILL_ROUNDS", "50"))
PARTITIONS = 4
WAIT_S = 60.0
_SERVER = Path(__file__).with_name("killed_server.py")


class Killable:
    """A server of two workers, on one port for its whole life and its lives after that."""

    def __init__(self, path: Path, *args: str, workers: int = 2) -> None:
        self._path, self._args, self._workers = path, args, workers
        self.port = free_ports(1 + workers)
        self.address = ""
        self.pids: list[int] = []
        self._process: subprocess.Popen[str] | None = None

    def start(self, *, until_ready: bool = True) -> None:
        """Start the server, and wait until every worker serves."""
        arguments = [sys.executable, str(_SERVER), str(self._path), str(self.port), str(self._workers), *self._args]
        self._process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        threading.Thread(target=self._listen, args=(self._process,), daemon=True).start()
        self.pids = []
        if until_ready:
            wait_until(lambda: bool(self.pids))

    def _listen(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self.address, *pids = line.split()
            self.pids = [int(pid) for pid in pids]

    @property
    def supervisor(self) -> int:
        """Its process."""
        assert self._process is not None
        return self._process.pid

    def kill_worker(self, index: int) -> None:
        """Kill a worker, and wait until the supervisor has started another one."""
        before = self.pids
        os.kill(before[index], signal.SIGKILL)
        wait_until(lambda: self.pids != before)

    def kill_supervisor(self) -> None:
        """Kill the supervisor, and wait until its workers have ended by themselves."""
        workers = self.pids
        os.kill(self.supervisor, signal.SIGKILL)
        self.wait()
        wait_until(lambda: not any(lives(pid) for pid in workers))

    def stop(self) -> None:
        """Politely; returns once all of it has ended."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
        self.wait()

    def wait(self) -> tuple[int, str]:
        """(how it ended, what it said to that)."""
        assert self._process is not None
        code = self._process.wait(WAIT_S)
        assert self._process.stderr is not None
        said = self._process.stderr.read()
        self._process.stderr.close()
        return code, said


def lives(pid: int) -> bool:
    """Return whether the process runs; a zombie does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


class Load:
    """Two producers, a consumer of librdkafka's, and a local program that appends: until it is told to stop.

    With ``java`` they are Java's producers, otherwise librdkafka's.
    """

    def __init__(self, server: Killable, path: Path, *, java: list[str] | None = None) -> None:
        self.acknowledged: list[tuple[int, int, str]] = []
        self.appended: list[tuple[int, int, str]] = []
        self.consumed: dict[int, list[tuple[int, str]]] = defaultdict(list)
        self.errors: list[str] = []
        self._address = server.address
        self._path = str(path)
        self._is_over = threading.Event()
        self._has_ended = threading.Event()
        self._java = java or []
        writers: list[tuple[Any, str]] = [(self._append, "local")]
        writers += [(self._produce_in_java, "a b")] if java else [(self._produce, "a"), (self._produce, "b")]
        self._writers = [threading.Thread(target=self._guarded, args=one, name=one[1]) for one in writers]
        self._reader = threading.Thread(target=self._guarded, args=(self._consume, ""))
        for thread in (*self._writers, self._reader):
            thread.start()

    def wait_until_it_flows(self) -> None:
        """Wait until each producer has an acknowledgement, so that the kill happens under load."""
        wait_until(lambda: self.errors or {value[0] for _, _, value in list(self.acknowledged)} == {"a", "b"})

    def finish(self) -> None:
        """Wait until everything that was sent is acknowledged and consumed."""
        self._is_over.set()
        for thread in self._writers:
            thread.join(2 * WAIT_S)
            assert not thread.is_alive(), f"{thread.name} has not ended:\n{_where(thread)}"
        ends = time.monotonic() + WAIT_S
        wanted = len(self.acknowledged) + len(self.appended)
        while sum(map(len, self.consumed.values())) < wanted and time.monotonic() < ends:
            time.sleep(0.05)
        self._has_ended.set()
        self._reader.join(WAIT_S)

    def _guarded(self, work: Any, name: str) -> None:
        try:
            work(name)
        except Exception as error:
            self.errors.append(f"{work.__name__} {name}: {error!r}")

    def _produce(self, name: str) -> None:
        producer = confluent_kafka.Producer(
            {
                "bootstrap.servers": self._address, "enable.idempotence": True, "acks": "all", "linger.ms": 2,
                "delivery.timeout.ms": 120_000, "reconnect.backoff.ms": 20, "reconnect.backoff.max.ms": 100,
                "retry.backoff.ms": 20, "log_level": 0, "topic.metadata.refresh.interval.ms": 500,
            }
        )  # fmt: skip

        def done(error: Any, message: Any) -> None:
            if error is not None:
                self.errors.append(f"producer {name}: {error}")
            else:
                self.acknowledged.append((message.partition(), message.offset(), message.value().decode()))

        number = 0
        while not self._is_over.is_set():
            for _ in range(10):
                producer.produce("orders", f"{name}:{number}", partition=number % PARTITIONS, on_delivery=done)
                number += 1
            producer.poll(0.01)
        if left := producer.flush(WAIT_S):
            self.errors.append(f"producer {name}: {left} of {number} records were not acknowledged")

    def _produce_in_java(self, names: str) -> None:
        command = [*self._java, self._address, "orders", str(PARTITIONS), *names.split()]
        pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=nothing, text=True) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            stopper = threading.Thread(target=self._stop_at_the_end, args=(process,))
            stopper.start()
            line = ""
            for line in process.stdout:
                if line.startswith("!"):
                    self.errors.append(f"producer {line[2:].strip()}")
                elif line != ".\n":
                    where, offset, value = line.split()
                    self.acknowledged.append((int(where), int(offset), value))
            if line != ".\n":
                self.errors.append("not all was acknowledged in time")
            stopper.join()

    def _stop_at_the_end(self, process: subprocess.Popen[str]) -> None:
        """Stop the processes; requests in progress have some time left."""
        while not self._is_over.wait(0.1) and process.poll() is None:
            pass
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            process.kill()

    def _consume(self, _: str) -> None:
        consumer = confluent_kafka.Consumer(
            {
                "bootstrap.servers": self._address, "group.id": "none", "enable.auto.commit": False, "log_level": 0,
                "reconnect.backoff.ms": 20, "reconnect.backoff.max.ms": 100, "fetch.wait.max.ms": 200,
                "auto.offset.reset": "error",
            }
        )  # fmt: skip
        consumer.assign([confluent_kafka.TopicPartition("orders", number, 0) for number in range(PARTITIONS)])
        while not self._has_ended.is_set():
            for message in consumer.consume(1000, 0.05):
                if message.error() is None:
                    self.consumed[message.partition()].append((message.offset(), message.value().decode()))
                elif message.error().code() in (confluent_kafka.KafkaError._AUTO_OFFSET_RESET,):
                    self.errors.append(f"consumer: {message.error()}")
        consumer.close()

    def _append(self, name: str) -> None:
        with segmentlog.open(self._path) as store:
            number = 0
            while not self._is_over.is_set():
                partition = store.open_partition("orders", number % PARTITIONS)
                began = time.monotonic()
                offset = partition.append([f"{name}:{number}".encode()])
                if time.monotonic() - began > 5:
                    self.errors.append("a local program had to wait")
                self.appended.append((partition.number, offset, f"{name}:{number}"))
                number += 1
                time.sleep(0.005)


def _where(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or 0)
    return "".join(traceback.format_stack(frame)) if frame is not None else ""


def check(load: Load, path: Path) -> int:
    """Check that no record is lost, doubled or reordered, and return the number of records."""
    assert load.errors == []
    total = 0
    with segmentlog.open(path) as store:
        for number in range(PARTITIONS):
            partition = store.open_partition("orders", number)
            found = [
                (one.offset, (one.value or b"").decode()) for batch in partition.read(0) for one in batch.records()
            ]
            held = dict(found)
            total += len(found)
            for where, offset, value in (*load.acknowledged, *load.appended):
                assert where != number or held.get(offset) == value, "lost"
            assert len(set(held.values())) == len(found), "doubled"
            for name in ("a", "b", "local"):
                counted = [int(value.partition(":")[2]) for _, value in found if value.startswith(f"{name}:")]
                assert counted == sorted(counted), "reordered"
            assert load.consumed[number] == found, "a consumer saw something else"
    return total


def java_load() -> list[str]:
    """Return the command of Java's producers."""
    try:
        return java_command("Load")
    except Missing as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("client", ["librdkafka", "java"])
@pytest.mark.parametrize("seed", seeds("server kills"))
def test_nothing_is_lost_when_it_is_killed(tmp_path: Path, seed: int, client: str) -> None:
    """A worker or the supervisor at any moment: idempotent producers with acks=all lose, double and reorder nothing."""
    java = java_load() if client == "java" else None
    chance, path = random.Random(seed), tmp_path / "store"
    with segmentlog.open(path) as store:
        store.create_topic("orders", PARTITIONS)
    server = Killable(path)
    server.start()
    load = Load(server, path, java=java)
    try:
        load.wait_until_it_flows()
        began = time.monotonic()
        for _ in range(share(ROUNDS, "server kills")):
            time.sleep(chance.uniform(0.05, 0.5))
            victim = chance.randrange(3)
            if victim < 2:
                server.kill_worker(victim)
            else:
                server.kill_supervisor()
                server.start()
        took_s = time.monotonic() - began
    finally:
        try:
            load.finish()
        finally:
            server.stop()
    total, rounds = check(load, path), share(ROUNDS, "server kills")
    print(f"{rounds} kills in {took_s:.1f} s, {total:,} records, {len(load.acknowledged):,} acknowledged")


def test_a_worker_that_stands_still_is_replaced(tmp_path: Path) -> None:
    """A worker that is silent for too long is killed, and another one takes its place."""
    server = Killable(tmp_path / "store", "1.0")
    server.start()
    try:
        before = list(server.pids)
        os.kill(before[0], signal.SIGSTOP)
        wait_until(lambda: before[0] not in server.pids)
        assert before[1] in server.pids
        assert not lives(before[0])
    finally:
        server.stop()


def test_a_worker_that_cannot_begin_ends_the_server(tmp_path: Path) -> None:
    """The error has the reason, and no worker is started again."""
    users = tmp_path / "users"
    users.write_text("no user: at all {")
    server = Killable(tmp_path / "store", "5.0", str(users))
    server.start(until_ready=False)
    code, said = server.wait()
    assert code == 3
    assert "users" in said
    assert "Traceback" not in said


def test_a_worker_that_hangs_up_is_waited_for_quietly(tmp_path: Path) -> None:
    """A killed worker closes its files before it has ended: the supervisor sleeps until the end."""
    plan = supervisor.ServerPlan(path=str(tmp_path / "store"), host="127.0.0.1", port=0)
    tested = supervisor.Supervisor(plan, lambda *_: None)
    status_read, status_write = os.pipe2(os.O_NONBLOCK)
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK)
    try:
        (child,) = tested._children
        child.status_fd = status_read
        os.write(status_write, b'{"ready": true}\n')
        os.close(status_write)
        tested._wait(wake_read, 0)
        assert child.is_ready
        began = time.monotonic()
        tested._wait(wake_read, 0.2)
        assert time.monotonic() - began >= 0.2
    finally:
        for fd in (status_read, wake_read, wake_write, tested._alive_read, tested._alive_write):
            os.close(fd)
        tested._close()


def test_a_second_sigterm_is_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The supervisor stops waiting for a worker that does not end: it would wait for an hour."""
    monkeypatch.setenv("KILLED_PATIENCE_S", "3600")
    server = Killable(tmp_path / "store")
    server.start()
    workers = server.pids
    os.kill(workers[0], signal.SIGSTOP)

    def is_over() -> bool:
        os.kill(server.supervisor, signal.SIGTERM)  # two that are pending at once count as one
        time.sleep(0.3)
        return not lives(server.supervisor)

    wait_until(is_over)
    server.wait()
    assert not any(lives(pid) for pid in workers)
