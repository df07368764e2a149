"""Measure the prototypes of `leader` and `follower`, beside three Kafka brokers: ``python -m bench.replication``.

latency      one record at a time, acks=all: p50 and p99
rate         64 connections, one record a request and 100 records a request
partitions   1,000 partitions, one record a request to each in turn
profile      where the time of one acknowledgement goes
sync         one write to each of 1,000 files, and several ways to sync them

Every server runs on this machine, and they share its disk and its cores. Each side takes its turn in each round. The
load of the machine is printed beside each figure.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from bench.machine import describe
from bench.replication.kafka_trio import KafkaTrio
from bench.replication.sync_rounds import measure_sync_rounds
from bench.server import load
from bench.server.batches import batch
from bench.server.wire import ALL, CREATE_TOPICS, Address, Client, Topic, check_produced, produce_request
from bench.systems.servers import Server, is_listening
from segmentlog.server.codec.generated.create_topics import CreatableTopic, CreatableTopicConfig, CreateTopicsRequest
from segmentlog.testing.ports import free_ports

_SEGMENT_BYTES = str(2**31 - 1)
_CONNECTIONS = 64
_WARM_UP = 200
_PARTITIONS = 1000


class Follower:
    """A process of `bench.replication.follower`."""

    def __init__(
        self, leader: Address, folder: Path, topic: str, partitions: int, number: int, mode: str, how: str, trace: str
    ) -> None:
        command = [
            sys.executable, "-m", "bench.replication.follower", f"{leader[0]}:{leader[1]}", str(folder), topic,
            str(partitions), str(number), mode, how, trace,
        ]  # fmt: skip
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "ready\n":
            raise RuntimeError("the follower has not started")

    def stop(self) -> dict[str, Any]:
        """End it, and return its report."""
        self._process.send_signal(signal.SIGTERM)
        assert self._process.stdout is not None
        lines = self._process.stdout.read().splitlines()
        self._process.wait()
        found: dict[str, Any] = json.loads(lines[-1])
        return found


class Ours:
    """A leader with followers, and one topic."""

    def __init__(
        self, folder: Path, followers: int, partitions: int = 1, mode: str = "serial", how: str = "each",
        answer_partitions: int = 1 << 30, trace: bool = False, delay_us: int = 0,
    ) -> None:  # fmt: skip
        folder.mkdir(parents=True)
        self._folder = folder
        port = free_ports(4)
        self.address = ("127.0.0.1", port)
        self.trace_path = str(folder / "leader.json") if trace else "-"
        self.follower_trace = str(folder / "follower.json") if trace else "-"
        command = [
            sys.executable, "-m", "bench.replication.leader", str(followers), str(answer_partitions), self.trace_path,
            "--dir", str(folder / "leader"), "serve", "--listen", f"127.0.0.1:{port}", "--workers", "1",
        ]  # fmt: skip
        self._server = Server(command, folder / "leader.log")
        self._server.wait_until(lambda: _is_ready(self.address), 60)
        self.topic = _create(self.address, "gate", partitions, 1)
        leader, self._link = self.address, None
        if delay_us:
            leader = ("127.0.0.1", port + 1)
            command = [sys.executable, "-m", "bench.replication.delayed_link", str(port + 1), str(port), str(delay_us)]
            self._link = Server(command, folder / "link.log")
            self._link.wait_until(lambda: is_listening(port + 1), 60)
        self.followers = [
            Follower(leader, folder / f"follower-{number}", "gate", partitions, number, mode, how,
                     self.follower_trace)
            for number in range(1, followers + 1)
        ]  # fmt: skip

    def stop(self) -> list[dict[str, Any]]:
        """End the processes, and return the reports of the followers."""
        found = [follower.stop() for follower in self.followers]
        if self._link is not None:
            self._link.kill()
        self._server.stop()
        shutil.rmtree(self._folder / "leader")
        return found


def _is_ready(address: Address) -> bool:
    try:
        with Client(address) as client:
            return client.is_ready()
    except (OSError, EOFError):
        return False


def _create(address: Address, name: str, partitions: int, replicas: int) -> Topic:
    with Client(address) as client:
        config = [CreatableTopicConfig("segment.bytes", _SEGMENT_BYTES)]
        if replicas > 1:
            config.append(CreatableTopicConfig("flush.messages", "1"))
            config.append(CreatableTopicConfig("min.insync.replicas", "2"))
        wanted = CreatableTopic(name, partitions, replicas, [], config)
        (result,) = client.ask(CREATE_TOPICS, CreateTopicsRequest([wanted], 60_000)).topics
        if result.error_code:
            raise RuntimeError(f"{name}: {result.error_code} {result.error_message}")
        topic = Topic(name, client.leaders(name))
    topic.end()
    return topic


# ---------------------------------------------------------------- what is measured


def single_records(topic: Topic, count: int) -> list[float]:
    """Return the milliseconds from sending one record to its acknowledgement, for one record after the other."""
    request = produce_request(topic.name, 0, batch(1), ALL)
    found = []
    with Client(topic.leaders[0]) as client:
        for number in range(count + _WARM_UP):
            began_s = time.perf_counter()
            client.send(request)
            frame = client.receive_frame()
            took_ms = (time.perf_counter() - began_s) * 1000
            check_produced(frame)
            if number >= _WARM_UP:
                found.append(took_ms)
    return sorted(found)


def records_per_second(topic: Topic, records: int, seconds: float) -> float:
    """Return the rate of acknowledged records over 64 connections, one request on each."""
    return _rate(topic, [0], records, seconds, 1) * records


def _rate(topic: Topic, partitions: list[int], records: int, seconds: float, depth: int) -> float:
    one = batch(records)
    requests: dict[Address, list[bytes]] = {}
    for number in partitions:
        requests.setdefault(topic.leaders[number], []).append(produce_request(topic.name, number, one, ALL))
    sizes = {}
    for address, some in requests.items():
        with Client(address) as client:
            client.send(some[0])
            frame = client.receive_frame()
            check_produced(frame)
            sizes[address] = len(frame)
    addresses = list(requests)
    lanes = []
    for number in range(_CONNECTIONS):
        address = addresses[number % len(addresses)]
        some = requests[address]
        at = number * len(some) // _CONNECTIONS
        lanes.append(load.Lane(address, some[at:] + some[:at], [sizes[address]], depth))
    try:
        done = load.run(lanes, seconds, 400 << 20)
    finally:
        for lane in lanes:
            lane.close()
    return sum(done.answered) / done.seconds


def _percentiles(times: list[float]) -> dict[str, float]:
    return {"p50": times[len(times) // 2], "p99": times[len(times) * 99 // 100]}


Sides = dict[str, Callable[[], dict[str, float]]]


def alternate(what: str, sides: Sides, rounds: int, warm_up_s: float) -> dict[str, dict[str, list[float]]]:
    """Measure each side once in each round, after ``warm_up_s`` or more for each side. Print every figure."""
    found: dict[str, dict[str, list[float]]] = {name: {} for name in sides}
    for number in range(rounds + 1):
        order = list(sides)
        if number % 2:
            order.reverse()
        for name in order:
            os.sync()
            began_s = time.monotonic()
            figures = sides[name]()
            while not number and name.startswith("Kafka") and time.monotonic() < began_s + warm_up_s:
                figures = sides[name]()
            text = ", ".join(f"{key} {value:,.4g}" for key, value in figures.items())
            print(f"{what}: {name}, round {number}: {text}; load {os.getloadavg()[0]:.2f}", flush=True)
            if number:
                for key, value in figures.items():
                    found[name].setdefault(key, []).append(value)
    for name, columns in found.items():
        medians = ", ".join(
            f"{key} {statistics.median(values):,.4g} ({min(values):,.4g}-{max(values):,.4g})"
            for key, values in columns.items()
        )
        print(f"{what}: {name}: {medians}", flush=True)
    return found


@contextmanager
def kafka_topics(folder: Path, partitions: int, factors: list[int], heap: str) -> Iterator[dict[str, Topic]]:
    """Yield a topic of each replication factor, on three brokers."""
    trio = KafkaTrio(folder, heap)
    try:
        trio.start()
        yield {f"Kafka, {n} replicas": _create(trio.address, f"gate-{n}", partitions, n) for n in factors}
    finally:
        trio.stop()


def main() -> int:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["latency", "rate", "partitions", "profile", "sync"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--records", type=int, default=2000, help="single records a round (default 2000)")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each rate (default 4)")
    parser.add_argument("--warm-up", type=float, default=15.0, help="seconds for each topic of Kafka (default 15)")
    parser.add_argument(
        "--ours", default="1:serial,2:serial,2:overlapped,3:serial", help="machines:mode[:sync[:limit]], ..."
    )
    parser.add_argument("--delay-us", type=int, default=0, help="one-way delay between leader and follower")
    parser.add_argument("--depth", type=int, default=16, help="requests under way on a connection, for partitions")
    parser.add_argument("--kafka", default="3,2", help="replication factors; empty for none")
    parser.add_argument("--heap", default="1G", help="of each Kafka broker")
    parser.add_argument("--batch", default="1,100", help="records a request")
    parser.add_argument("--dir", type=Path, help="folder on the disk to measure (default: a temporary one)")
    parser.add_argument("--out", type=Path, help="append the result to this file as a line of JSON")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="segmentlog-gate-", dir=options.dir))
    results: dict[str, Any] = {"what": options.what, "load": os.getloadavg()}
    try:
        about = describe(folder)
        results["machine"] = {"fdatasync_us": about.fdatasync_us.p50, "p99": about.fdatasync_us.p99,
                              "noise": about.noise.spread, "revision": about.revision}  # fmt: skip
        print(results["machine"], flush=True)
        if options.what == "sync":
            results["rows"] = measure_sync_rounds(folder, _PARTITIONS, options.rounds)
        elif options.what == "profile":
            results["rows"] = _profile(folder, options)
        else:
            results["rows"] = _compare(folder, options)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if options.out is not None:
        with open(options.out, "a", encoding="utf-8") as file:
            file.write(json.dumps(results) + "\n")
    return 0


def _compare(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    partitions = _PARTITIONS if options.what == "partitions" else 1
    factors = [int(one) for one in options.kafka.split(",") if one]
    found: dict[str, Any] = {}
    with ExitStack() as stack:
        topics: dict[str, Topic] = {}
        running: dict[str, Ours] = {}
        for one in filter(None, options.ours.split(",")):
            machines, mode, *rest = one.split(":")
            how = rest[0] if rest else "each"
            limit = int(rest[1]) if len(rest) > 1 else 1 << 30
            ours = Ours(
                folder / one.replace(":", "-"),
                int(machines) - 1,
                partitions,
                mode,
                how,
                limit,
                delay_us=options.delay_us,
            )
            running[f"segmentlog, {one}"] = ours
            topics[f"segmentlog, {one}"] = ours.topic
        if factors:
            topics |= stack.enter_context(kafka_topics(folder, partitions, factors, options.heap))
        try:
            if options.what == "latency":
                sides: Sides = {
                    name: lambda topic=topic: _percentiles(single_records(topic, options.records))  # type: ignore[misc]
                    for name, topic in topics.items()
                }
                found["latency ms"] = alternate("latency", sides, options.rounds, options.warm_up)
            for records in map(int, options.batch.split(",")) if options.what == "rate" else ():
                sides = {
                    name: lambda topic=topic, records=records: {  # type: ignore[misc]
                        "records/s": records_per_second(topic, records, options.seconds)
                    }
                    for name, topic in topics.items()
                }
                found[f"rate {records}"] = alternate(
                    f"rate, {records} a request", sides, options.rounds, options.warm_up
                )
            if options.what == "partitions":
                every = list(range(_PARTITIONS))
                sides = {
                    name: lambda topic=topic: {"records/s": _rate(topic, every, 1, options.seconds, options.depth)}  # type: ignore[misc]
                    for name, topic in topics.items()
                }
                found["partitions"] = alternate("partitions", sides, options.rounds, options.warm_up)
        finally:
            for name, ours in running.items():
                reports = ours.stop()
                for report in reports:
                    print(f"{name}: {report}", flush=True)
                found.setdefault("followers", {})[name] = reports
    return found


# ---------------------------------------------------------------- one acknowledgement


_EVENTS = (
    "received", "leader appended", "sent", "follower received", "follower appended", "follower synced", "confirmed",
    "leader synced", "acknowledged",
)  # fmt: skip


def _profile(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Print the median time from the arrival of a produce request to each event."""
    ours = Ours(folder / "traced", 1, 1, options.ours.split(",")[0].split(":")[-1], "each", trace=True)
    times = _percentiles(single_records(ours.topic, options.records))
    ours.stop()
    by_offset: dict[int, dict[str, float]] = {}
    for path in (ours.trace_path, ours.follower_trace):
        for event, at_s, offset in json.loads(Path(path).read_text()):
            by_offset.setdefault(offset, {}).setdefault(event, at_s)
    rows = [events for offset, events in sorted(by_offset.items())[_WARM_UP:] if len(events) == len(_EVENTS)]
    found: dict[str, Any] = {"client": times, "count": len(rows)}
    for event in _EVENTS:
        took = sorted((events[event] - events["received"]) * 1e6 for events in rows)
        found[event] = {"p50": took[len(took) // 2], "p99": took[len(took) * 99 // 100]}
        print(f"{event:20} p50 {found[event]['p50']:7.0f} us   p99 {found[event]['p99']:7.0f} us")
    print(found["client"], len(rows))
    return found


if __name__ == "__main__":
    sys.exit(main())
