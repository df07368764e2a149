"""Several processes change topics and work with them at random, at the same time, and are killed.

Each process records every call before it begins, and its result afterwards, with both times. Then a checker goes
through all calls. The result of a call must be possible at some moment between its two times, given the calls of the
other processes. The last call of a killed process may be done or not.

    SEGMENTLOG_ADMIN_ROUNDS   how many rounds (40), and more until every kind of event was seen; 1 is one only
    SEGMENTLOG_ADMIN_SEED     of the first one; its successors follow (drawn at random, and printed)
"""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

import segmentlog
from segmentlog.errors import (
    ConsumerFenced,
    InvalidConfig,
    SegmentlogError,
    StoreClosed,
    TopicExists,
    TransactionAborted,
    UnknownTopic,
)
from segmentlog.inspection.store_inspection import inspect_store
from segmentlog.log.partition import Partition
from segmentlog.records import PartitionId
from segmentlog.store import LogStore

ROUNDS = int(os.environ.get("SEGMENTLOG_ADMIN_ROUNDS", "40"))
SEED = int(os.environ.get("SEGMENTLOG_ADMIN_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 32)

WORKERS, CALLS = 3, 14
NAMES = ("a", "b", "c")
OTHER_NAMES = ("d", "e")
"""That topics get by being renamed."""
KEYS = ("retention.segments", "segment.bytes", "retention.closed.ms")
"""One for each worker: what one has set no other one changes."""
NEVER = 1 << 62
TRIED = (
    *(f"{what}: done" for what in ("create", "delete", "rename", "partitions", "set", "compact")),
    *(f"{what}: done" for what in ("append", "append kept", "read", "commit", "transact")),
    "append kept: UnknownTopic", "read: UnknownTopic", "create: TopicExists",
)  # fmt: skip
"""Events that the rounds must include; more rounds run until they do. A single round only repeats a failure."""
_ROUND_S = 60
"""A round takes a fraction of a second; one that takes this long hangs."""


class Event(msgspec.Struct):
    """A call: its name, arguments, start, end and result."""

    worker: int
    what: str
    arguments: tuple[Any, ...]
    start: int
    end: int = NEVER
    """`NEVER` if the process was killed before it recorded the end."""
    result: Any = None
    error: str = ""

    @property
    def is_pending(self) -> bool:
        return self.end == NEVER

    @property
    def may_be_done(self) -> bool:
        """Whether the call was done, or may have been."""
        return self.is_pending or not self.error


# ---------------------------------------------------------------- the processes


class Worker:
    """The work of one process. Every value that it writes is unique."""

    def __init__(self, path: str, journal_fd: int, number: int, seed: int) -> None:
        self._path, self._journal_fd, self._number = path, journal_fd, number
        self._rng = random.Random(seed)
        self._store = segmentlog.open(path, background=False)
        self._kept: list[Partition] = []
        self._calls = 0
        self._deleted = ""
        tell = self._store._topics.administration._notify_handles

        def note_and_tell(folder: str, change: Any) -> None:
            if "@deleted" in folder:  # the lock is held, so no other process deletes the folder meanwhile
                with contextlib.suppress(OSError):
                    self._deleted = json.loads(Path(folder, "topic.json").read_text())["id"]
            tell(folder, change)

        self._store._topics.administration._notify_handles = note_and_tell  # type: ignore[method-assign]

    def run(self) -> None:
        """Make all calls, then close the store."""
        actions: list[Callable[[], None]] = [
            *[self.create] * 4, self.delete, self.delete, *[self.rename] * 2, *[self.alter] * 3, *[self.append] * 5,
            *[self.append_kept] * 3, *[self.read] * 3, *[self.commit] * 3, *[self.transact] * 5, self.compact,
            self.tick,
        ]  # fmt: skip
        for _ in range(2):
            self.create()
        for _ in range(CALLS):
            self._rng.choice(actions)()
        self._store.close()

    def call(self, what: str, arguments: tuple[Any, ...], do: Callable[[], Any]) -> Any:
        """Do something, and write down before and after it."""
        self._calls += 1
        self._write(("begin", Event(self._number, what, arguments, time.monotonic_ns())))
        result, error = None, ""
        try:
            result = do()
        except (UnknownTopic, TopicExists, StoreClosed, TransactionAborted, ConsumerFenced) as raised:
            error = type(raised).__name__
        except InvalidConfig as raised:
            error = f"InvalidConfig {raised.key}"
        self._write(("end", time.monotonic_ns(), result, error))
        return result

    def _write(self, said: object) -> None:
        data = pickle.dumps(said)
        os.write(self._journal_fd, len(data).to_bytes(4, "little") + data)

    def _token(self) -> bytes:
        return b"%d-%d-%d" % (self._number, self._calls, self._rng.randrange(1 << 40))

    def _name(self) -> str:
        return self._rng.choice((*NAMES, *NAMES, *OTHER_NAMES))

    def create(self) -> None:
        """Create a compacted topic with small segments. No two records have the same key."""
        name = self._rng.choice(NAMES)
        options = {"cleanup.policy": "delete,compact", "segment.records": 5, "retention.ms": -1}
        self.call("create", (name,), lambda: self._store.create_topic(name, 1 + self._rng.randrange(2), options).id)

    def delete(self) -> None:
        """Delete a topic. The result is its id."""
        name = self._name()

        def delete() -> str:
            self._deleted = ""
            self._store.delete_topic(name)
            return self._deleted

        self.call("delete", (name,), delete)

    def rename(self) -> None:
        """Rename a topic. The result is its id."""
        name, new_name = self._rng.sample((*NAMES, *OTHER_NAMES), 2)
        self.call("rename", (name, new_name), lambda: self._store.rename_topic(name, new_name).id)

    def alter(self) -> None:
        """Add a partition, or raise the value of a key that only this worker sets."""
        name = self._name()
        if self._rng.random() < 0.5:
            try:
                count = self._store.topic(name).partition_count + 1
            except UnknownTopic:
                return
            self.call("partitions", (name, count), lambda: self._store.alter_topic(name, partitions=count).id)
        else:
            value = 1_000_000 + self._calls
            change = {KEYS[self._number]: value}
            self.call("set", (name, value), lambda: self._store.alter_topic(name, change).id)

    def append(self) -> None:
        """(topic id, partition, offset) of a record that is on disk."""
        name, token = self._name(), self._token()

        def append() -> tuple[str, int, int]:
            topic = self._store.topic(name)
            log = topic.partition(self._rng.randrange(topic.partition_count))
            self._kept.append(log)
            return (log.topic_id, log.number, log.append([token], [token], ack="durable"))

        self.call("append", (name, token), append)

    def append_kept(self) -> None:
        """Append to a partition that was opened before, whatever has happened to its topic since."""
        if not self._kept:
            return
        log, token = self._rng.choice(self._kept), self._token()
        if self._rng.random() < 0.4:
            log.handle.close_if_idle()
        where = (log.topic_id, log.number)
        self.call("append kept", (*where, token), lambda: (*where, log.append([token], [token], ack="durable")))

    def read(self) -> None:
        """Read a partition. The result is (topic id, partition, values by offset)."""
        name = self._name()

        def read() -> tuple[str, int, dict[int, bytes]]:
            topic = self._store.topic(name)
            log = topic.partition(self._rng.randrange(topic.partition_count))
            found = {r.offset: r.value or b"" for batch in log.read(log.log_start_offset) for r in batch.records()}
            return (topic.id, log.number, found)

        self.call("read", (name,), read)

    def commit(self) -> None:
        """Commit offsets as a member of a group, each with the id of the topic that was read."""
        name, group = self._name(), f"group-{self._rng.randrange(2)}"

        def commit() -> dict[str, str]:
            with self._store.consumer(name, group=group, max_poll_interval_ms=2000) as consumer:
                for record in consumer:
                    tp = segmentlog.TopicPartition(record.topic, record.partition)
                    read_of = consumer._cursors.by_partition[tp].log.topic_id
                    consumer.commit({tp: record.offset + 1}, metadata=read_of, sync=False)
            committed = self._store.group_offsets.committed(group)
            return {tp.topic: one.metadata for tp, one in committed.items()}

        self.call("commit", (name, group), commit)

    def transact(self) -> None:
        """Run a transaction. The result is the partitions that were written to, by topic ids."""
        names, token = self._rng.sample(NAMES, 2), self._token()
        parts: list[PartitionId] = []

        def transact() -> list[PartitionId]:
            with self._store.producer(linger_ms=0) as producer, producer.transaction():
                for name in names:
                    producer.send_many(name, [token], [token], partition=0)
                assert producer._identity is not None
                assert producer._identity._transaction is not None
                parts.extend(producer._identity._transaction.ends)
                time.sleep(self._rng.random() * 0.02)  # time for another process to rename a topic of this transaction
                if self._rng.random() < 0.2:
                    raise TransactionAborted("by hand", "")
            return parts

        self.call("transact", (*names, token), transact)

    def compact(self) -> None:
        """Compact a topic. All keys differ, so no record is deleted."""
        name = self._name()

        def compact() -> None:
            for log in self._store.topic(name).partitions():
                log.roll()
                log.compact()

        self.call("compact", (name,), compact)

    def tick(self) -> None:
        """Do the work of a background thread."""
        self._store.finish_transactions()
        with contextlib.suppress(SegmentlogError):
            self._store.retention_tick()


def _work(path: str, journal: str, number: int, seed: int) -> None:
    fd = os.open(journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        Worker(path, fd, number, seed).run()
    except BaseException as error:
        data = pickle.dumps(("failed", repr(error), _where(error)))
        os.write(fd, len(data).to_bytes(4, "little") + data)
        os._exit(1)
    os._exit(0)


def _where(error: BaseException) -> str:
    import traceback

    return "".join(traceback.format_exception(error))


def _read_journal(path: str) -> list[Event]:
    events: list[Event] = []
    data = Path(path).read_bytes() if os.path.exists(path) else b""
    at = 0
    while len(data) - at >= 4:
        size = int.from_bytes(data[at : at + 4], "little")
        if len(data) - at - 4 < size:
            break
        said = pickle.loads(data[at + 4 : at + 4 + size])
        at += 4 + size
        if said[0] == "begin":
            events.append(said[1])
        elif said[0] == "end":
            events[-1].end, events[-1].result, events[-1].error = said[1:]
        else:
            raise AssertionError(f"{said[1]} in {events[-1:]}\n{said[2]}")
    return events


# ---------------------------------------------------------------- the checker


class Checker:
    """Compares the results of all processes with the states that they may have met."""

    def __init__(self, events: list[Event]) -> None:
        self.events = sorted(events, key=lambda event: event.start)
        self.binds: dict[str, list[Event]] = defaultdict(list)
        self.unbinds: dict[str, list[Event]] = defaultdict(list)
        self.bound_ids: dict[str, list[tuple[str, int]]] = defaultdict(list)
        """By id: the names that a topic got, and since when it may have had each."""
        self.deleted: dict[str, int] = {}
        """By id: when its deletion returned."""
        for event in self.events:
            if not event.may_be_done:
                continue
            if event.what in ("create", "rename"):
                self.binds[event.arguments[-1]].append(event)
            if event.what in ("delete", "rename"):
                self.unbinds[event.arguments[0]].append(event)
            if event.is_pending:
                continue
            if event.what in ("create", "rename"):
                self.bound_ids[event.result].append((event.arguments[-1], event.start))
            if event.what == "delete" and event.result:
                assert event.result not in self.deleted, f"{event.result} was deleted twice"
                self.deleted[event.result] = event.end

    def surely_there(self, name: str, start: int, end: int) -> bool:
        """Return whether a topic of that name existed all the time."""
        return any(
            bind.end <= start and not any(gone.end > bind.start and gone.start < end for gone in self.unbinds[name])
            for bind in self.binds[name]
        )

    def surely_gone(self, name: str, start: int, end: int) -> bool:
        """Return whether no topic of that name existed at any time."""
        binds = [bind for bind in self.binds[name] if bind.start < end]
        return not binds or any(
            gone.end <= start
            and not gone.is_pending
            and all(bind.end < gone.start and not bind.is_pending for bind in binds)
            for gone in self.unbinds[name]
        )

    def check_names(self) -> None:
        """`UnknownTopic` and `TopicExists` say what was so at some moment of the call, and success does."""
        for event in self.events:
            if event.is_pending or event.what in ("append kept", "commit", "compact", "transact"):
                continue
            name = event.arguments[0]
            span = (event.start, event.end)
            if event.error == "UnknownTopic":
                assert not self.surely_there(name, *span), event
            if event.error == "TopicExists":
                wanted = event.arguments[-1]
                assert not self.surely_gone(wanted, *span), event
            if event.error:
                continue
            if event.what in ("create", "rename"):
                assert not self._others(event).surely_there(event.arguments[-1], *span), event
            if event.what != "create":
                assert not self._others(event).surely_gone(name, *span), event

    def _others(self, event: Event) -> Checker:
        return Checker([one for one in self.events if one is not event])

    def check_ids(self) -> None:
        """Check that a call by name reached a topic with that name, which was not deleted before the call began."""
        for event in self.events:
            if event.is_pending or event.error or event.what not in ("append", "read", "partitions", "set", "rename"):
                continue
            topic_id = event.result if isinstance(event.result, str) else event.result[0]
            if event.what != "rename":
                named = [since for name, since in self.bound_ids[topic_id] if name == event.arguments[0]]
                pending = any(one.is_pending for one in self.binds[event.arguments[0]])
                assert pending or any(since < event.end for since in named), event
            assert event.start < self.deleted.get(topic_id, NEVER), event

    def check_appends(self, left: dict[str, dict[int, dict[int, bytes]]]) -> None:
        """Check that each acknowledged record has its value at its offset, and was not acknowledged by a
        deleted topic.
        """
        contents: dict[tuple[str, int, int], bytes] = {}
        appends = [e for e in self.events if e.what.startswith("append") and not e.is_pending and not e.error]
        for event in appends:
            topic_id, partition, offset = event.result
            token = event.arguments[-1]
            assert contents.setdefault((topic_id, partition, offset), token) == token, event
            assert event.start < self.deleted.get(topic_id, NEVER), f"acknowledged by a deleted topic: {event}"
            if topic_id in left:
                assert left[topic_id].get(partition, {}).get(offset) == token, f"lost: {event}"
        for event in self.events:
            if event.what != "read" or event.error or event.is_pending:
                continue
            topic_id, partition, found = event.result
            for offset, value in found.items():
                assert contents.setdefault((topic_id, partition, offset), value) == value, event
            for one in appends:
                if one.result[:2] == (topic_id, partition) and one.end <= event.start:
                    assert found.get(one.result[2]) == one.arguments[-1], f"{event} misses {one}"

    def check_topics(self, left: dict[str, Any]) -> None:
        """Topics go by being deleted, and in no other way."""
        made = [e for e in self.events if e.what == "create" and not e.error]
        known = {e.result for e in made if not e.is_pending}
        pending = sum(e.is_pending for e in self.events if e.what == "delete")
        assert len(known - left.keys() - self.deleted.keys()) <= pending
        assert not self.deleted.keys() & left.keys()
        assert len(left.keys() - known) <= sum(e.is_pending for e in made)

    def check_settings(self, store: LogStore, names: dict[str, str]) -> None:
        """Check that no process undid a setting of another one, and that no topic lost partitions."""
        for topic_id, name in names.items():
            topic = store.topic(name)
            settings = topic.config.to_mapping()
            for event in self.events:
                if event.is_pending or event.error or event.result != topic_id:
                    continue
                if event.what == "partitions":
                    assert topic.partition_count >= event.arguments[1], event
                if event.what == "set":
                    assert int(settings.get(KEYS[event.worker], 0)) >= event.arguments[1], (event, settings)

    def check_positions(self, store: LogStore) -> None:
        """Check that each committed offset belongs to the topic that was read, under any of its names."""
        for group in store.group_offsets.groups_with_any_offset():
            for where, one in store.group_offsets.by_topic_id(group).items():
                assert one.metadata in ("", where.topic_id), (group, where, one)
        for event in self.events:
            if event.what == "commit" and not event.is_pending and not event.error:
                for name, topic_id in event.result.items():
                    named = [since for known, since in self.bound_ids[topic_id] if known == name]
                    pending = any(bind.is_pending for bind in self.binds[name])
                    assert not topic_id or pending or any(since < event.end for since in named), event
                    assert event.start < self.deleted.get(topic_id, NEVER), event

    def check_transactions(self, committed: dict[str, set[bytes]]) -> None:
        """Check that a committed transaction is complete in the remaining topics, and an aborted one is invisible."""
        for event in self.events:
            if event.what != "transact":
                continue
            token = event.arguments[-1]
            seen = {topic_id for topic_id, tokens in committed.items() if token in tokens}
            if event.error:
                assert not seen, f"an aborted transaction is in {seen}: {event}"
            elif event.is_pending:
                if not any(one.what == "delete" and one.may_be_done for one in self.events):
                    assert len(seen) in (0, 2), event
            else:
                expected = {one.topic_id for one in event.result} & committed.keys()
                assert seen == expected, f"half of a transaction: {seen}, not {expected}: {event}"


def _check(path: Path, events: list[Event]) -> None:
    with segmentlog.open(path, background=False) as store:
        names = {store.topic(name).id: name for name in store.topics()}
        for name in store.topics(internal=True):
            store.topic(name).partitions()
        store.finish_transactions()
        left: dict[str, dict[int, dict[int, bytes]]] = {}
        committed: dict[str, set[bytes]] = {}
        for topic_id, name in names.items():
            logs = store.topic(name).partitions()
            left[topic_id] = {
                log.number: {r.offset: r.value or b"" for batch in log.read(0) for r in batch.records()} for log in logs
            }
            batches = [batch for log in logs for batch in log.read(0, isolation="read_committed")]
            committed[topic_id] = {value or b"" for batch in batches for value in batch.values}
            assert not any(log.open_transactions() for log in logs)
        checker = Checker(events)
        checker.check_topics(left)
        checker.check_names()
        checker.check_ids()
        checker.check_appends(left)
        checker.check_settings(store, names)
        checker.check_positions(store)
        checker.check_transactions(committed)
    assert not [one for one in inspect_store(str(path)) if one.severity == "damage"]
    assert not [name for name in os.listdir(path) if name.startswith(("@making", "@deleted", "@altering"))]


def _run_round(folder: Path, seed: int) -> list[Event]:
    """Run and check one round, and return its events."""
    rng = random.Random(seed)
    path = folder / "store"
    with segmentlog.open(path, background=False):
        pass
    context = multiprocessing.get_context("fork")
    journals = [str(folder / f"journal-{number}") for number in range(WORKERS)]
    processes = [
        context.Process(target=_work, args=(str(path), journal, number, rng.randrange(1 << 32)))
        for number, journal in enumerate(journals)
    ]
    for process in processes:
        process.start()
    for process in processes:
        if rng.random() < 0.35:
            process.join(rng.random() ** 2 * 0.4)
            process.kill()
    ends = time.monotonic() + _ROUND_S
    for process in processes:
        process.join(max(ends - time.monotonic(), 0.1))
        hangs = process.is_alive()
        if hangs:
            process.kill()
            process.join()
        assert not hangs, "a process hangs"
    events = [event for journal in journals for event in _read_journal(journal)]
    for process in processes:
        assert process.exitcode in (0, -signal.SIGKILL)
    _check(path, events)
    return events


@pytest.mark.long(minutes=0.4)
@pytest.mark.timeout(0)
def test_administration_beside_work(tmp_path: Path) -> None:
    """Each result of each call is possible, given the calls of other processes and the times of their kills."""
    tally: dict[str, int] = defaultdict(int)
    rounds = 0
    for seed in itertools.count(SEED):
        folder = tmp_path / str(seed)
        folder.mkdir()
        try:
            events = _run_round(folder, seed)
        except BaseException:
            print(f"SEGMENTLOG_ADMIN_SEED={seed} SEGMENTLOG_ADMIN_ROUNDS=1 repeats the calls, if not their times")
            raise
        for event in events:
            tally[f"{event.what}: {'killed in it' if event.is_pending else event.error or 'done'}"] += 1
        shutil.rmtree(folder)
        rounds += 1
        if rounds >= ROUNDS and (ROUNDS == 1 or all(tally[what] for what in TRIED)):
            break
    print(f"{rounds} rounds from seed {SEED}: {dict(sorted(tally.items()))}")
