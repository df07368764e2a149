"""A seeded life of a store with transactions on a simulated machine, with a power cut at any of its calls."""

from __future__ import annotations

import json
import logging
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from unittest import mock

import delivery_checker as checker
from logs import FakeClock
from trial import Broken, Moment

from segmentlog.errors import ProducerFenced, SegmentlogError, TransactionAborted, UnknownTopic
from segmentlog.producing.producer import Producer
from segmentlog.storage.file_operations import replace_file
from segmentlog.store import LogStore
from segmentlog.testing.fault_injection import Died
from segmentlog.testing.simulated_disk import SimulatedDisk

PATH = "/simulated/store"
TOPICS = {"a": 2, "b": 1}
NAMES = ("one", "two", None)


@contextmanager
def simulated_paths(current: Callable[[], SimulatedDisk]) -> Iterator[None]:
    """Make `os.path` ask the simulated disk about paths on it."""

    def patched(real: Callable[[Any], bool]) -> Callable[[Any], bool]:
        def exists(path: Any) -> bool:
            if not str(path).startswith(PATH):
                return real(path)
            with suppress(FileNotFoundError):
                current().find(str(path))
                return True
            return False

        return exists

    with (
        mock.patch("os.path.exists", patched(os.path.exists)),
        mock.patch("os.path.lexists", patched(os.path.lexists)),
        mock.patch("os.path.isdir", patched(os.path.isdir)),
    ):
        yield


class User:
    """One process: a store, a producer, its transaction, and the positions of its reader."""

    def __init__(self, label: str, disk: SimulatedDisk, clock: FakeClock, name: str | None) -> None:
        self.label, self.name = label, name
        self.fs = disk.process()
        self.store = LogStore(PATH, fs=self.fs, clock=clock, background=False)
        self.producer: Producer | None = None
        self.txn = ""
        self.counted = 0
        self.positions: dict[checker.Place, int] = {}


class Trial:
    """A seeded life of a store, and the checks of every state after its power cuts."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.clock = FakeClock()
        self.disk = self.current = SimulatedDisk()
        self.events: list[checker.Event] = []
        self.states = 0
        self._moments: list[Moment] = []
        self._number = 0
        self._rate = 0.04

    def run(self, rounds: int, operations: int, variants: int) -> int:
        """Run ``rounds`` times: operations, then a crash at some of their calls; continue from one of the crashes."""
        self.disk.make_folders(PATH)
        replace_file(self.disk.process(), f"{PATH}/store.json", json.dumps({"format": 1, "store_id": "00"}).encode())
        with simulated_paths(lambda: self.current):
            store = LogStore(PATH, fs=self.disk.process(), clock=self.clock, background=False)
            for topic, partitions in TOPICS.items():
                store.create_topic(
                    topic, partitions, fsync=self.rng.choice(("never", "3records")),
                    segment_bytes=self.rng.choice((1500, 1 << 20)), index_interval_bytes=256,
                )  # fmt: skip
            store.close()
            for number in range(rounds):
                self._live(number, operations)
                for moment in self._moments:
                    events = self.events[: moment.event_count]
                    if self.rng.random() < 0.3:
                        self._check(moment.point.process_death(), events, moment, power_cut=False)
                    for disk in moment.point.crashes(self.rng, variants):
                        self._check(disk, events, moment)
                if not self._moments:
                    continue
                moment = self.rng.choice(self._moments)
                self.events = self.events[: moment.event_count]
                self.disk = self.current = self.rng.choice(list(moment.point.crashes(self.rng, 6)))
        return self.states

    # ------------------------------------------------------------ living

    def _note(self) -> None:
        if self.rng.random() < self._rate:
            self._moments.append(Moment(self.disk.point(), len(self.events)))

    def _live(self, number: int, operations: int) -> None:
        self._moments = []
        self.disk.on_effect = self._note
        users = [User(f"{number}.{at}.0", self.disk, self.clock, NAMES[at]) for at in range(3)]
        for step in range(operations):
            at = self.rng.randrange(len(users))
            user = users[at]
            user.fs.fail_at = None
            if self.rng.random() < 0.03:
                user.fs.fail_at = (user.fs.calls + self.rng.randrange(1, 40), "die")
            try:
                self._operate(user)
            except Died:
                user.store._topics.is_closed = True  # the end of this process must not close the store
                users[at] = User(f"{number}.{at}.{step + 1}", self.disk, self.clock, NAMES[self.rng.randrange(3)])
        self.disk.on_effect = None
        for user in users:
            user.store._topics.is_closed = True

    def _say(self, kind: str, user: User, *rest: Any) -> None:
        self.events.append([kind, user.label, *rest])

    def _operate(self, user: User) -> None:
        what = self.rng.random()
        self.clock.advance(self.rng.choice((1, 10, 200)))
        try:
            if what < 0.55:
                self._produce(user)
            elif what < 0.75:
                self._read(user)
            elif what < 0.85:
                user.store.finish_transactions()
            elif what < 0.90:
                topic = self.rng.choice(list(TOPICS))
                user.store.topic(topic).partition(0).flush()
            elif what < 0.92:
                with suppress(UnknownTopic):
                    user.store.topic("__transaction_state").partition(0).flush()
            elif what < 0.96 and not user.txn:
                self._forget(user)
        except ProducerFenced:
            self._forget(user)

    def _forget(self, user: User) -> None:
        user.txn = ""
        if user.producer is not None:
            producer, user.producer = user.producer, None
            with suppress(SegmentlogError):
                producer.close()

    def _produce(self, user: User) -> None:
        if user.producer is None:
            user.producer = user.store.producer(name=user.name, linger_ms=0, transaction_timeout_ms=3000)
        producer = user.producer
        if not user.txn:
            if self.rng.random() < 0.3:
                self._send(user, ack=True)
                return
            self._number += 1
            producer.begin_transaction()
            user.txn = f"t{self._number}"
            self._send(user)
            return
        what = self.rng.random()
        if what < 0.45:
            self._send(user)
        elif what < 0.85:
            self._say("commit", user, user.txn)
            try:
                producer.commit_transaction()
            except (ProducerFenced, TransactionAborted):
                self._say("aborted", user, user.txn)
                raise
            self._say("committed", user, user.txn)
            user.txn = ""
        else:
            self._say("abort", user, user.txn)
            producer.abort_transaction()
            user.txn = ""

    def _send(self, user: User, *, ack: bool = False) -> None:
        topic = self.rng.choice(list(TOPICS))
        partition = self.rng.randrange(TOPICS[topic])
        values = []
        for _ in range(self.rng.choice((1, 1, 3))):
            self._number += 1
            values.append(f"{user.label}-{self._number}" + "." * self.rng.choice((0, 200)))
        self._say("send", user, user.txn, topic, partition, values)
        assert user.producer is not None
        user.producer.send_many(topic, [value.encode() for value in values], partition=partition)
        if ack:
            user.store.topic(topic).partition(partition).flush()
        self._say("ok", user)

    def _read(self, user: User) -> None:
        topic = self.rng.choice(list(TOPICS))
        partition = self.rng.randrange(TOPICS[topic])
        log = user.store.topic(topic).partition(partition)
        position = user.positions.get((topic, partition), 0)
        found = []
        for batch in log.read(position, isolation="read_committed"):
            found += [
                [offset, (value or b"").decode()]
                for offset, value in zip(batch.offsets.tolist(), batch.values, strict=True)
            ]
            user.positions[topic, partition] = batch.next_offset
        self._say("handed", user, "read_committed", topic, partition, found)

    # ------------------------------------------------------------ checking

    def _check(
        self, disk: SimulatedDisk, events: list[checker.Event], moment: Moment, *, power_cut: bool = True
    ) -> None:
        self.states += 1
        self.current = disk
        where = f"state {self.states}, after call {moment.point.effects}; again with SEGMENTLOG_SEED={self.seed}"
        store = LogStore(PATH, fs=disk.process(), clock=self.clock, background=False)
        try:
            again = self.rng.random() < 0.5
            if again:  # a named producer continues before all transactions have ended
                for name in NAMES[:2]:
                    store.producer(name=name, linger_ms=0).close()
            final = settled(store, TOPICS)
            wrong = checker.check(checker.gather(events), final, power_cut=power_cut)
            if not wrong:
                wrong = self._go_on(store)
        except Broken:
            raise
        except Exception as error:
            raise Broken(f"{type(error).__name__}: {error}\n  {where}") from error
        finally:
            store._topics.is_closed = True
            self.current = self.disk
        if wrong:
            raise Broken("\n  ".join([*wrong[:8], where]))

    def _go_on(self, store: LogStore) -> list[str]:
        """Transactions work as before."""
        for name in NAMES:
            with store.producer(name=name, linger_ms=0) as producer, producer.transaction():
                producer.send_many("a", [b"after"], partition=1)
                producer.send_many("b", [b"after"])
        ends = [
            place
            for place, final in settled(store, TOPICS).items()
            if place != ("a", 0) and list(final.committed.values())[-3:] != ["after"] * 3
        ]
        return [f"blocked: {place} takes no transactions" for place in ends]


def settled(store: LogStore, topics: dict[str, int]) -> dict[checker.Place, checker.Final]:
    """Return the content of a store after ending the transactions that no producer will continue."""
    logs = {
        (topic, number): store.topic(topic).partition(number)
        for topic, partitions in topics.items()
        for number in range(partitions)
    }
    for _ in range(3):
        store.finish_transactions()
    return {place: contents(log) for place, log in logs.items()}


def contents(log: Any) -> checker.Final:
    """Return the current content of a partition."""
    found: dict[str, dict[int, str]] = {}
    for isolation in ("read_uncommitted", "read_committed"):
        content = found[isolation] = {}
        for batch in log.read(log.log_start_offset, isolation=isolation):
            for offset, value in zip(batch.offsets.tolist(), batch.values, strict=True):
                content[offset] = (value or b"").decode()
    lost = [(one.base_offset, one.end_offset) for one in log.lost_ranges()]
    return checker.Final(
        found["read_uncommitted"], found["read_committed"], log.log_end_offset, log.last_stable_offset,
        log.log_start_offset, lost,
    )  # fmt: skip


def run_trial(seed: int) -> int:
    """Run one trial and return the number of states that it checked. Raises `Broken`."""
    logging.disable(logging.CRITICAL)
    return Trial(seed).run(rounds=3, operations=50, variants=5)
