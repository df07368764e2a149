"""Interrupts: every public operation, ended by an exception at every place where a signal handler may raise one.

Each run tries a sample of the points of each operation, `SEGMENTLOG_INTERRUPT_POINTS` of them (0: all). The sample
changes with the seed, so that many runs try all. Every run tries every point in the functions that take and release
locks.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import os
import random
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import segmentlog
from segmentlog import closing
from segmentlog.config import TopicConfig
from segmentlog.errors import SegmentlogError
from segmentlog.inspection.store_inspection import inspect_store
from segmentlog.log.partition import Partition
from segmentlog.log.producer_state import ProducerStamp
from segmentlog.storage.fs import FileSystem
from segmentlog.testing.interrupts import Interrupt, InterruptPoint, interrupt_at, list_points

POINTS = int(os.environ.get("SEGMENTLOG_INTERRUPT_POINTS", "8"))
SEED = int(os.environ.get("SEGMENTLOG_SEED", str(random.randrange(1_000_000))))
SECONDS = float(os.environ.get("SEGMENTLOG_INTERRUPT_SECONDS", "1"))
CRITICAL = (
    "locks.",
    "group.",
    "handle.Handle.append_locked",
    "handle.Handle.sync_locked",
    "Appender.place",
    "Syncer.sync",
)
CRITICAL_MAX = 60
SOON_S = 3.0  # a second on an idle machine; an endless wait is detected after ten times as long
FAILURES_SHOWN = 12


class TimedOut(TimeoutError):
    """An exception that a handler of SIGALRM may raise: an OSError, but not one of the disk."""


class QuickFileSystem(FileSystem):
    """fsync does nothing, as a function written in C like the real one."""

    fdatasync: Callable[[int], Any] = staticmethod(os.fstat)
    fsync: Callable[[int], Any] = staticmethod(os.fstat)


class Peer:
    """Another process, which has the store open too."""

    def __init__(self) -> None:
        script = Path(__file__).parent.parent / "interrupt_peer.py"
        self._process = subprocess.Popen(
            [sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.ask({"do": "locks", "paths": []}, 60)

    def ask(self, request: dict[str, Any], timeout_s: float = 10 * SOON_S) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        if not select.select([self._process.stdout], [], [], timeout_s)[0]:
            self.close()
            self.__init__()  # type: ignore[misc]
            return "the other process waits for ever"
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture(scope="module")
def peer() -> Iterator[Peer]:
    """Yield one peer for all tests: it takes a while to start."""
    peer = Peer()
    gc.collect()
    gc.freeze()
    yield peer
    gc.unfreeze()
    peer.close()


class World:
    """A store with one topic, what was acknowledged in it, and the checks."""

    def __init__(self, path: Path, peer: Peer, config: dict[str, Any], fs: FileSystem | None = None) -> None:
        self.path = str(path)
        self.peer = peer
        self.store = segmentlog.LogStore(self.path, background=False, fs=fs or QuickFileSystem())
        self.store.create_topic("t", config=config)
        self.names: dict[int, bytes | None] = {}
        """Values that were seen at each offset."""
        self.acked: dict[int, bytes] = {}
        self.once: set[bytes] = set()
        """Values that may be there once only."""
        self.number = 0
        self.trimmed = 0
        self.compacts = self.is_closing = False
        self.closers: list[Callable[[], None]] = []

    @property
    def log(self) -> Partition:
        return self.store.topic("t").partition(0)

    def is_large(self) -> bool:
        """Return whether the log is so large that checking it costs more than starting a new one."""
        return self.number > 4000 or len(os.listdir(f"{self.path}/t/0")) > 100

    def value(self) -> bytes:
        self.number += 1
        return b"v%d" % self.number

    def append(self, count: int = 1, keyed: bool = False, **options: Any) -> int:
        values = [self.value() for _ in range(count)]
        keys = [b"k%d" % (index % 3) for index in range(count)] if keyed or self.compacts else None
        offset = self.log.append(values, keys, **options)
        self.acked.update(zip(range(offset, offset + count), values, strict=True))
        return offset

    def open_again(self) -> None:
        """Close the store if that was requested, and open it again."""
        if self.is_closing:
            self.store.close()
            self.store = segmentlog.LogStore(self.path, background=False, fs=QuickFileSystem())
            self.is_closing = False

    def close(self) -> None:
        """Close what was opened, as far as it can be."""
        for close in self.closers:
            with contextlib.suppress(SegmentlogError, OSError):
                close()
        with contextlib.suppress(SegmentlogError, OSError):
            self.store.close()

    # ------------------------------------------------------------ the checks

    def problems(self) -> Iterator[str]:
        """Yield the problems after an interrupt."""
        self.open_again()
        if not dropped_are_closed():
            yield "a store that was dropped is not closed"
            return
        held = self.peer.ask({"do": "locks", "paths": self.lock_files()})
        if held:
            yield f"locks are held: {held}"
            return
        done: list[int] = []
        thread = threading.Thread(target=lambda: done.append(self.append(ack="durable")), daemon=True)
        started = time.monotonic()
        thread.start()
        thread.join(10 * SOON_S)
        if not done:
            yield "another thread waits for ever, or failed"
            return
        if time.monotonic() - started > SOON_S:
            yield f"another thread waited for {time.monotonic() - started:.1f} s"
        value = self.value()
        started = time.monotonic()
        offset = self.peer.ask({"do": "append", "store": self.path, "topic": "t", "value": value.decode()})
        if not isinstance(offset, int):
            yield f"another process: {offset}"
            return
        if time.monotonic() - started > SOON_S:
            yield f"another process waited for {time.monotonic() - started:.1f} s"
        self.acked[offset] = value
        yield from self.wrong_records()
        for finding in inspect_store(self.path):
            if finding.severity == "damage":
                yield f"verify: {finding}"

    def lock_files(self) -> list[str]:
        found = []
        for folder, _, names in os.walk(self.path):
            for name in names:
                if name in ("lock", "state", "cleaner", "fence") or name.endswith(".tmp"):
                    found.append(f"{folder}/{name}")
        return [*found, self.path]

    def wrong_records(self) -> Iterator[str]:
        log = self.log
        found = {
            offset: value
            for batch in log.read(log.log_start_offset)
            for offset, value in zip(batch.offsets.tolist(), batch.values, strict=True)
        }
        for offset, value in found.items():
            if self.names.setdefault(offset, value) != value:
                yield f"offset {offset} was {self.names[offset]!r} and is {value!r}"
        if not self.compacts:
            for offset, value in self.acked.items():
                if offset >= max(self.trimmed, log.log_start_offset) and found.get(offset) != value:
                    yield f"acknowledged at {offset}: {value!r}; there: {found.get(offset)!r}"
        values = [value for value in found.values() if value in self.once]
        if len(values) != len(set(values)):
            yield "records were appended twice"

    def left_open(self) -> list[str]:
        """Return the deleted files of this case whose descriptors are still open."""
        links = []
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                links.append(os.readlink(f"/proc/self/fd/{fd}"))
        return [link for link in links if link.startswith(os.path.dirname(self.path)) and link.endswith(" (deleted)")]

    def descriptors(self) -> int:
        assert dropped_are_closed()
        return len(os.listdir("/proc/self/fd"))


def dropped_are_closed() -> bool:
    """Wait for the threads that close what the interrupt dropped; they hold its locks and descriptors by right."""
    gc.collect()  # quick, because `peer` froze the older objects
    ends = time.monotonic() + 10 * SOON_S
    while closing.closing_stores:
        if time.monotonic() > ends:
            return False
        time.sleep(0.001)
    return True


Operation = Callable[[], object]


def append_plain(world: World) -> Operation:
    """Append one record."""
    return world.append


def append_many(world: World) -> Operation:
    """Return a list."""
    return lambda: world.append(300)


def append_keyed(world: World) -> Operation:
    """Keys, timestamps, headers."""
    return lambda: world.append(3, keyed=True, timestamps=[1, 2, 3], headers=[[("h", b"1")], None, None])


def append_rolls(world: World) -> Operation:
    """Several batches, over several rolls."""
    return lambda: world.append(10)


def append_durable(world: World) -> Operation:
    """Alone."""
    return lambda: world.append(ack="durable")


def append_stamped(world: World) -> Operation:
    """Repeat an append with the same sequence numbers: it is appended once, and acknowledged with its offset."""
    next_number, values = [0], [world.value(), world.value()]
    world.once.update(values)

    def append() -> None:
        offset = world.log.append(values, producer=ProducerStamp(1 << 62, 0, next_number[0]))
        world.acked.update(zip((offset, offset + 1), values, strict=True))
        next_number[0] += 2
        values[:] = [world.value(), world.value()]
        world.once.update(values)

    return append


def durable_among_others(world: World) -> Operation:
    """Append durably while three other threads do so as well; they end within a second, too."""

    def append() -> None:
        stop = threading.Event()

        def work() -> None:
            while not stop.is_set():
                with contextlib.suppress(SegmentlogError):  # the leader was interrupted
                    world.append(ack="durable")

        threads = [threading.Thread(target=work, daemon=True) for _ in range(3)]
        try:
            for thread in threads:
                thread.start()
            return run(lambda: [world.append(ack="durable") for _ in range(2)])
        finally:
            stop.set()
            for thread in threads:
                thread.join(10 * SOON_S)
                assert not thread.is_alive(), "another thread waits for ever"

    run: Callable[[Operation], Any] = lambda operation: operation()  # noqa: E731
    return append


def producers_among_others(world: World) -> Operation:
    """Append durable batches with sequence numbers, like three other producers; repeat a batch after an error."""
    sequences = [0] * 4
    pending: dict[int, bytes] = {}

    def append(producer: int) -> None:
        value = pending.setdefault(producer, world.value())
        world.once.add(value)
        stamp = ProducerStamp((1 << 61) + producer, 0, sequences[producer])
        world.acked[world.log.append([value], ack="durable", producer=stamp)] = value
        sequences[producer] += 1
        del pending[producer]

    def together() -> None:
        stop = threading.Event()

        def work(producer: int) -> None:
            while not stop.is_set():
                with contextlib.suppress(SegmentlogError):  # the leader was interrupted
                    append(producer)

        threads = [threading.Thread(target=work, args=(producer,), daemon=True) for producer in (1, 2, 3)]
        try:
            for thread in threads:
                thread.start()
            for _ in range(2):
                append(0)
        finally:
            stop.set()
            for thread in threads:
                thread.join(10 * SOON_S)
                assert not thread.is_alive(), "another thread waits for ever"

    return together


def read(world: World) -> Operation:
    """Read every batch of several segments."""
    world.append(20)
    return lambda: [list(batch.values) for batch in world.log.read(world.log.log_start_offset)]


def find_timestamp(world: World) -> Operation:
    """Find a timestamp through the time indexes."""
    world.append(20)
    return lambda: world.log.offset_for_timestamp(5)


def roll(world: World) -> Operation:
    """Roll the active segment."""
    return lambda: (world.append(), world.log.roll())


def trim(world: World) -> Operation:
    """Trim the log."""

    def cut() -> None:
        world.append(8)
        world.trimmed = world.log.log_end_offset - 3
        world.log.trim(world.trimmed)

    return cut


def truncate(world: World) -> Operation:
    """Truncate the log."""

    def cut() -> None:
        offset = world.append(8)
        for gone in range(offset + 3, offset + 8):
            del world.acked[gone]
        world.log.truncate(offset + 3)

    return cut


def compact(world: World) -> Operation:
    """Compact after a roll."""
    world.compacts = True

    def clean() -> None:
        world.append(9)
        world.log.roll()
        assert not world.log.compact().busy

    return clean


def retain(world: World) -> Operation:
    """Apply retention by size."""

    def remove() -> None:
        world.append(12)
        assert not world.log.apply_retention().busy
        world.trimmed = world.log.log_start_offset

    return remove


def flush(world: World) -> Operation:
    """Flush after an append."""
    return lambda: (world.append(5), world.log.flush())


def open_and_close(world: World) -> Operation:
    """Open another object for the same store, append, and close it."""

    def use() -> None:
        store = segmentlog.LogStore(world.path, background=False, fs=QuickFileSystem())
        try:
            value = world.value()
            world.acked[store.topic("t").partition(0).append([value])] = value
        finally:
            store.close()
            store.close()

    return use


def drop(world: World) -> Operation:
    """Open another object for the same store, append, and drop it: a thread closes it."""

    def use() -> None:
        store = segmentlog.LogStore(world.path, background=False, fs=QuickFileSystem())
        value = world.value()
        world.acked[store.topic("t").partition(0).append([value])] = value
        del store
        gc.collect()

    return use


def close_again(world: World) -> Operation:
    """Close the store again after an interrupted close: the second call completes it."""

    def close() -> None:
        world.append()
        member = world.store.consumer("t", group="closing", auto_commit=True)
        member.poll_group()
        next(iter(member), None)
        world.is_closing = True
        world.store.close()
        world.open_again()

    return close


def topics(world: World) -> Operation:
    """Create, alter, rename, delete."""

    def administrate() -> None:
        name = "n"
        for left in world.store.topics():
            if left != "t":
                world.store.delete_topic(left)
        world.store.create_topic(name, 2)
        world.store.topic(name).partition(0).append([b"x"])
        world.store.alter_topic(name, partitions=3, retention_ms=1000)
        world.store.rename_topic(name, f"{name}b")
        world.store.delete_topic(f"{name}b")

    return administrate


def produce(world: World) -> Operation:
    """Send, flush, send many."""
    producer = world.store.producer()
    world.closers.append(producer.close)

    def send() -> None:
        values = [world.value() for _ in range(3)]
        world.once.update(values)
        told = [producer.send("t", value) for value in values]
        producer.flush()
        world.acked.update({one.result(SOON_S).offset: value for one, value in zip(told, values, strict=True)})
        many = world.value()
        world.once.add(many)
        world.acked[producer.send_many("t", [many]).result()[0].offset] = many

    return send


def producer_life(world: World) -> Operation:
    """Return a named producer, opened and closed."""

    def live() -> None:
        for close in world.closers:  # closes what the interrupt left open
            close()
        producer = world.store.producer(name="named")
        world.closers.append(producer.close)
        value = world.value()
        told = producer.send("t", value)
        producer.flush()
        world.acked[told.result(SOON_S).offset] = value
        producer.close()
        world.closers.clear()

    return live


def transact(world: World) -> Operation:
    """Commit one transaction and abort another."""
    producer = world.store.producer(name="transactional")
    world.closers.append(producer.close)

    def decide() -> None:
        value = world.value()
        try:
            producer.begin_transaction()
            told = producer.send("t", value)
            producer.commit_transaction()
            world.acked[told.result(SOON_S).offset] = value
            producer.begin_transaction()
            producer.send("t", world.value())
            producer.abort_transaction()
        except BaseException:
            with contextlib.suppress(SegmentlogError):
                producer.abort_transaction()
            raise

    return decide


def consume(world: World) -> Operation:
    """Consume to the end, without a group."""
    consumer = world.store.consumer("t")
    world.closers.append(consumer.close)

    def iterate() -> None:
        world.append(3)
        for _ in consumer:
            pass

    return iterate


def follow(world: World) -> Operation:
    """Return a consumer that waits, opened and closed."""

    def iterate() -> None:
        end = world.append(3) + 3
        with world.store.consumer("t", follow=True) as consumer:
            for record in consumer:
                if record.offset == end - 1:
                    break

    return iterate


def group_life(world: World) -> Operation:
    """Join a group, read, commit and leave."""

    def take_part() -> None:
        world.append(3)
        with world.store.consumer("t", group="g") as consumer:
            for _ in consumer:
                pass
            consumer.commit()

    return take_part


def group_member(world: World) -> Operation:
    """Continue as the same member after each interrupt."""
    consumer = world.store.consumer("t", group="h", max_poll_records=2)
    world.closers.append(consumer.close)

    def take_part() -> None:
        end = world.append(3) + 3
        consumer.poll_group()
        for _ in consumer:
            pass
        consumer.commit()
        committed = consumer.committed("t")
        assert committed is not None
        assert committed.offset >= end

    return take_part


def group_join(world: World) -> Operation:
    """Interrupt a member while it takes or hands over partitions, and continue with it."""
    kept: list[Any] = []
    leaving = [False]

    def take_part() -> None:
        end = world.append(3) + 3
        if leaving[0]:
            kept[0].close()
            kept.clear()
            leaving[0] = False
        if not kept:
            kept.append(world.store.consumer("t", group="j"))
            world.closers[:] = [kept[0].close]
        for _ in kept[0]:
            pass
        kept[0].commit()
        committed = kept[0].committed("t")
        assert committed is not None
        assert committed.offset >= end
        leaving[0] = True
        kept[0].close()
        kept.clear()
        leaving[0] = False

    return take_part


CASES: list[tuple[Callable[[World], Operation], dict[str, Any]]] = [
    (append_plain, {}),
    (append_many, {}),
    (append_keyed, {}),
    (append_rolls, {"segment_records": 3}),
    (append_durable, {}),
    (append_plain, {"fsync": "always"}),
    (append_stamped, {}),
    (append_stamped, {"segment_records": 3}),
    (durable_among_others, {}),
    (producers_among_others, {}),
    (read, {"segment_records": 5}),
    (find_timestamp, {"segment_records": 5}),
    (roll, {}),
    (trim, {"segment_records": 3}),
    (truncate, {"segment_records": 3}),
    (compact, {"cleanup_policy": "compact", "segment_records": 5, "min_cleanable_dirty_ratio": 0.0}),
    (retain, {"segment_records": 3, "retention_bytes": 300, "file_delete_delay_ms": 0}),
    (flush, {"segment_records": 3}),
    (open_and_close, {}),
    (close_again, {}),
    (topics, {}),
    (produce, {}),
    (producer_life, {}),
    (transact, {}),
    (consume, {}),
    (follow, {}),
    (group_life, {}),
    (group_member, {}),
    (group_join, {}),
    (drop, {}),
]


def points_to_try(passed: list[InterruptPoint], rng: random.Random) -> list[int]:
    """Numbers of points, counted from 1: a sample, and each place in a critical function once."""
    every = list(range(1, len(passed) + 1))
    if not POINTS or len(every) <= POINTS:
        return every
    stride = -(-len(every) // POINTS)
    chosen = set(every[rng.randrange(stride) :: stride])
    critical: dict[tuple[str, int], int] = {}
    for number, place in enumerate(passed, 1):
        if place.function.startswith(CRITICAL) or any(name in place.function for name in CRITICAL):
            critical.setdefault((place.function, place.offset), number)
    few = list(critical.values())
    return sorted(chosen | set(few if len(few) <= CRITICAL_MAX else rng.sample(few, CRITICAL_MAX)))


@pytest.mark.parametrize("kind", [Interrupt, TimedOut])
@pytest.mark.parametrize(("case", "config"), CASES, ids=[f"{case.__name__}{i}" for i, (case, _) in enumerate(CASES)])
def test_interrupted_anywhere(
    tmp_path: Path, peer: Peer, case: Callable[[World], Operation], config: dict[str, Any], kind: type[BaseException],
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """After any interrupt, all locks are released, other processes work, the log is intact, and a retry succeeds."""
    rng = random.Random(f"{SEED}/{case.__name__}/{kind.__name__}")
    dropped: list[object] = []  # by Python: an interrupt in a finalizer, or another callback of its own, ends there
    monkeypatch.setattr(sys, "unraisablehook", lambda lost: dropped.append(lost.exc_type))
    worlds = 0
    failures: list[str] = []

    def begin() -> tuple[World, Operation]:
        nonlocal worlds
        worlds += 1
        world = World(tmp_path / f"{worlds}", peer, config)
        operation = case(world)
        operation()
        return world, operation

    world, operation = begin()
    points = points_to_try(list_points(operation), rng)
    list(world.problems())  # the other process opens the store: that takes its time, once
    assert not list(world.problems())
    most = world.descriptors()
    tried: set[tuple[str, int]] = set()
    known_left: set[str] = set()
    interrupted = 0
    for at in points:
        if world.is_large():
            world.close()
            world, operation = begin()
        outcome = interrupt_at(at, operation, kind)
        if outcome.place is None:
            continue
        interrupted += 1
        tried.add((outcome.place.function, outcome.place.offset))
        is_heard = isinstance(outcome.error, kind) or kind in dropped
        problems = [] if is_heard else [f"it was not heard, and the operation ended with {outcome.error!r}"]
        dropped.clear()
        outcome = outcome._replace(error=None)  # drops its frames, and the objects that they refer to
        try:
            problems += world.problems()
            if not problems:
                operation()
                operation()
                problems += world.wrong_records()
                now = world.descriptors()
                if now > most + 3:
                    problems.append(f"{now - most} more descriptors")
                if left := set(world.left_open()) - known_left:
                    known_left |= left
                    problems.append(f"left open: {sorted(left)}")
        except BaseException as error:
            problems.append(f"again: {type(error).__name__}: {error}")
        if problems:
            failures.append(f"{at} {outcome.place}: {'; '.join(problems)}")
            if len(failures) >= FAILURES_SHOWN:
                break
            with contextlib.suppress(BaseException):
                _close_within(world, 5)
            world, operation = begin()
            most = max(most, world.descriptors())
    _close_within(world, 30)
    with capsys.disabled():
        print(f"\n{case.__name__} {config} {kind.__name__}: {interrupted} interrupts at {len(tried)} places", end=" ")
    assert not failures, f"SEGMENTLOG_SEED={SEED}\n" + "\n".join(failures)


@pytest.mark.filterwarnings("ignore:store .* was not closed:ResourceWarning")
def test_interrupted_while_it_is_dropped(tmp_path: Path, peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store is closed wherever its finalizer is interrupted."""
    monkeypatch.setattr(sys, "unraisablehook", lambda hook: None)
    with segmentlog.LogStore(tmp_path / "s", background=False) as store:
        store.create_topic("t")
    assert dropped_are_closed()
    before = len(os.listdir("/proc/self/fd"))
    tried = set()
    at, is_through = 1, False
    while not is_through:
        store = segmentlog.LogStore(tmp_path / "s", background=False, fs=QuickFileSystem())
        store.topic("t").partition(0).append([b"v"])
        outcome = interrupt_at(at, store.__del__)
        is_through = outcome.place is None
        if outcome.place is not None:
            tried.add(str(outcome.place))
        del store, outcome
        assert dropped_are_closed(), tried
        assert len(os.listdir("/proc/self/fd")) <= before, tried
        at += 1
    assert sum("LogStore.__del__" in place or "close_dropped" in place for place in tried) >= 5, tried


def _close_within(world: World, seconds: float) -> None:
    thread = threading.Thread(target=world.close, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "close waits for ever"


@pytest.mark.parametrize("others", [0, 1, 3])
def test_signals_hammering_on_group_commit(tmp_path: Path, others: int) -> None:
    """Real signals for a second or two end waiting and working; other threads and processes are not affected."""
    log = Partition(str(_made(tmp_path / "t")), "t", 0, TopicConfig, fs=QuickFileSystem())
    acked: dict[int, bytes] = {}
    lost: list[str] = []
    armed: list[bool] = []
    stop = threading.Event()

    def handle(signum: int, frame: object) -> None:
        if armed:
            armed.clear()
            raise Interrupt

    def append(value: bytes) -> None:
        offset = log.append([value], ack="durable")
        if acked.setdefault(offset, value) != value:
            lost.append(f"{offset} was given to {acked[offset]!r} and {value!r}")

    def work(name: int) -> None:
        number = 0
        while not stop.is_set():
            number += 1
            with contextlib.suppress(SegmentlogError):  # raised where it waited for a leader that was interrupted
                append(b"%d/%d" % (name, number))

    def hammer(thread: int) -> None:
        rng = random.Random(f"{SEED}/{others}")
        while not stop.is_set():
            time.sleep(rng.choice((0.0, 0.0001, 0.001)))
            signal.pthread_kill(thread, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, handle)
    threads = [threading.Thread(target=work, args=(name,), daemon=True) for name in range(others)]
    threads.append(threading.Thread(target=hammer, args=(threading.get_ident(),), daemon=True))
    interrupts = appended = 0
    try:
        for thread in threads:
            thread.start()
        ends = time.monotonic() + SECONDS
        while time.monotonic() < ends or interrupts < 20:
            try:
                armed.append(True)
                append(b"main/%d" % (appended + interrupts))
                armed.clear()
                appended += 1
            except Interrupt:
                interrupts += 1
            except SegmentlogError:
                armed.clear()
        stop.set()
        for thread in threads:
            thread.join(10 * SOON_S)
            assert not thread.is_alive(), f"a thread waits for ever after {interrupts} interrupts"
    finally:
        stop.set()
        signal.signal(signal.SIGUSR1, before)
    print(f"{interrupts} interrupts, {appended} appends of the main thread, {len(acked)} in all")
    assert not lost
    append(b"last")
    batches = list(log.read(0))
    found = {at: value for batch in batches for at, value in zip(batch.offsets.tolist(), batch.values, strict=True)}
    assert acked.items() <= found.items()
    assert len(set(found.values())) == len(found), "records were appended twice"
    assert log.durable_offset == log.log_end_offset
    log.close()


class SlowFileSystem(FileSystem):
    """An fsync takes longer than the time between two interrupts."""

    fdatasync: Callable[[int], Any] = staticmethod(lambda fd: time.sleep(0.002))
    fsync: Callable[[int], Any] = staticmethod(lambda fd: time.sleep(0.002))


NOT_IN_A_STORM = (truncate, open_and_close, close_again, drop, durable_among_others, producers_among_others)
"""Operations that remove or close what the others write to, or that start threads of their own."""
STORM_CASES = [(case, config) for case, config in CASES if case not in NOT_IN_A_STORM]
STORM_APPENDS = 30
STORM_INTERRUPTS = 3000
"""Enough interrupts for the others to append all records: they need some 50 to 250."""


@pytest.mark.parametrize("policy", ["always", "never"])
@pytest.mark.parametrize(
    ("case", "config"), STORM_CASES, ids=[f"{case.__name__}{i}" for i, (case, _) in enumerate(STORM_CASES)]
)
def test_others_progress_during_an_interrupt_storm(
    tmp_path: Path, peer: Peer, case: Callable[[World], Operation], config: dict[str, Any], policy: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The main thread is interrupted all the time in an operation: another thread and another process still append."""
    monkeypatch.setattr(sys, "unraisablehook", lambda lost: None)  # an interrupt in a finalizer ends there
    world = World(tmp_path / "s", peer, {"fsync": policy, **config}, SlowFileSystem())
    operation = case(world)
    operation()
    stop = threading.Event()
    armed: list[bool] = []
    progress = {"thread": 0, "process": 0}
    failures: list[str] = []

    def handle(signum: int, frame: object) -> None:
        if armed:
            armed.clear()
            raise Interrupt

    def append_here() -> None:
        while not stop.is_set() and progress["thread"] < STORM_APPENDS:
            with contextlib.suppress(SegmentlogError):  # its leader was interrupted
                world.append(ack="durable")
                progress["thread"] += 1

    def append_there() -> None:
        while not stop.is_set() and progress["process"] < STORM_APPENDS:
            value = world.value()
            offset = peer.ask({"do": "append", "store": world.path, "topic": "t", "value": value.decode()})
            if not isinstance(offset, int):
                failures.append(f"another process: {offset}")
                return
            world.acked[offset] = value
            progress["process"] += 1

    def storm(thread: int) -> None:
        rng = random.Random(f"{SEED}/{case.__name__}")
        while not stop.is_set():
            time.sleep(rng.uniform(0.0005, 0.003))
            signal.pthread_kill(thread, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, handle)
    others = [threading.Thread(target=target, daemon=True) for target in (append_here, append_there)]
    storming = threading.Thread(target=storm, args=(threading.get_ident(),), daemon=True)
    interrupts = 0
    try:
        for thread in (*others, storming):
            thread.start()
        while any(thread.is_alive() for thread in others) and interrupts < STORM_INTERRUPTS:
            try:
                armed.append(True)
                operation()
                armed.clear()
            except Interrupt:
                interrupts += 1
            except SegmentlogError:
                armed.clear()
        reached = dict(progress)
        stop.set()
        for thread in others:
            thread.join(20 * SOON_S)
            assert not thread.is_alive(), f"a thread waits for ever after {interrupts} interrupts"
    finally:
        armed.clear()
        stop.set()
        storming.join()  # before: a signal without a handler would end the process
        signal.signal(signal.SIGUSR1, before)
    print(f"{interrupts} interrupts, {reached}")
    assert not failures
    assert reached == {"thread": STORM_APPENDS, "process": STORM_APPENDS}, f"{interrupts} interrupts, SEED={SEED}"
    assert not list(world.problems())
    _close_within(world, 30)


def test_an_alarm_ends_waiting_for_another_process(tmp_path: Path) -> None:
    """A time-out made of SIGALRM gets an append out of a wait for the append lock, and leaves no trace of it."""
    log = Partition(str(_made(tmp_path / "t")), "t", 0, TopicConfig)
    log.append([b"a"])
    other = os.open(log.handle.lock_path, os.O_RDWR)
    fcntl.flock(other, fcntl.LOCK_EX)

    def handle(signum: int, frame: object) -> None:
        raise TimedOut("it took too long")

    before = signal.signal(signal.SIGALRM, handle)
    try:
        for ack in ("written", "durable"):
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            with pytest.raises(TimedOut):
                log.append([b"b"], ack=ack)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    os.close(other)
    assert log.append([b"c"], ack="durable") == 1
    assert log.failed is None
    log.close()


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder
