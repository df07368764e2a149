"""Topics are created, altered, renamed and deleted while others use them; no data is lost or mixed up."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import segmentlog
from segmentlog.errors import PartitionBusy, SegmentlogError, TopicExists, UnknownTopic
from segmentlog.format.file_names import OFFSETS_TOPIC, TRANSACTIONS_TOPIC
from segmentlog.inspection.store_inspection import inspect_store
from segmentlog.log.partition import Partition
from segmentlog.records import TopicPartition
from segmentlog.storage.fs import FileSystem
from segmentlog.store import LogStore
from segmentlog.testing.fault_injection import Died, FaultyFileSystem

_T0 = TopicPartition("t", 0)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LogStore]:
    """Provide a store with topics ``t`` and ``u``."""
    with segmentlog.open(tmp_path / "store", background=False) as store:
        store.create_topic("t")
        store.create_topic("u")
        yield store


@pytest.fixture
def fs() -> FaultyFileSystem:
    """Return the file system of `faulty`."""
    return FaultyFileSystem()


@pytest.fixture
def faulty(store: LogStore, fs: FaultyFileSystem) -> Iterator[LogStore]:
    """Provide the store as a second process sees it, with a hook before each file system call."""
    with LogStore(store.path, background=False, fs=fs) as faulty:
        yield faulty


def values_of(store: LogStore, topic: str, number: int = 0) -> list[bytes | None]:
    """Return what a reader of committed records gets."""
    log = store.topic(topic).partition(number)
    return [value for batch in log.read(0, isolation="read_committed") for value in batch.values]


def beside(act: Callable[[], object]) -> threading.Thread:
    """Start something in another thread; wait a moment, or until it is done."""
    thread = threading.Thread(target=act)
    thread.start()
    thread.join(0.3)
    return thread


class Meanwhile:
    """An action of another process, run in a thread: it completes at once, or waits for this process."""

    def __init__(self, action: Callable[[], object]) -> None:
        self._action = action
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            self._action()
        except BaseException as error:
            self._error = error

    def __call__(self) -> None:
        self._thread.start()
        self._thread.join(0.5)

    def end(self) -> None:
        """Wait for its end; it must have started."""
        self._thread.join()
        if self._error is not None:
            raise self._error


# ---------------------------------------------------------------- altering


def test_two_who_alter_both_do(store: LogStore, faulty: LogStore, fs: FaultyFileSystem) -> None:
    """If two processes alter a topic at once, both changes remain."""
    others: list[threading.Thread] = []
    fs.before("replace", lambda: others.append(beside(lambda: store.alter_topic("t", partitions=4))))
    faulty.alter_topic("t", segment_records=7)
    others[0].join()
    assert (store.topic("t").partition_count, store.topic("t").config.segment_records) == (4, 7)


def test_processes_that_alter_at_once_lose_nothing(store: LogStore) -> None:
    """Concurrent changes of keys and partition counts are all kept, and durable appends stay."""

    def add_partitions(_: int) -> None:
        with segmentlog.open(store.path, background=False) as opened:
            for count in range(2, 8):
                log = opened.alter_topic("t", partitions=count).partition(count - 1)
                log.append([b"kept"], ack="durable")

    def set_keys(number: int) -> None:
        with segmentlog.open(store.path, background=False) as opened:
            for count in range(1, 7):
                key = "segment.records" if number else "retention.segments"
                opened.alter_topic("t", {key: 100 * number + count})

    context = multiprocessing.get_context("fork")
    jobs = [(add_partitions, 0), (set_keys, 0), (set_keys, 1)]
    processes = [context.Process(target=work, args=(number,)) for work, number in jobs]
    for one in processes:
        one.start()
    for one in processes:
        one.join()
    topic = store.topic("t")
    assert (topic.config.segment_records, topic.config.retention_segments, topic.partition_count) == (106, 6, 7)
    assert [values_of(store, "t", number) for number in range(1, 7)] == [[b"kept"]] * 6


def test_who_opens_while_a_topic_is_altered_sees_it(store: LogStore, faulty: LogStore, fs: FaultyFileSystem) -> None:
    """A process that opens a topic during a change sees the new settings, wherever the change comes."""
    store.topic("t").partition(0).append([b"1"])  # a state page exists, which shows changes to other processes
    for number, call in enumerate(("open", "fstat", "map_file", "stat", "boot_id"), 2):
        fs.before(call, lambda number=number: store.alter_topic("t", segment_records=number))
        with LogStore(store.path, background=False, fs=fs) as opened:
            log = opened.topic("t").partition(0)
            log.append([b"more"])
            assert log.config.segment_records == number


def test_what_was_killed_in_the_middle_of_altering_is_told(store: LogStore) -> None:
    """If a process dies after writing new settings, the next change notifies the open handles."""
    log = store.topic("t").partition(0)
    fs = FaultyFileSystem()
    dying = LogStore(store.path, background=False, fs=fs)
    fs.before("map_file", lambda: fs.die_at(1))  # of the page
    with pytest.raises(Died):
        dying.alter_topic("t", segment_records=3)
    assert store.topic("t").config.segment_records == 3
    with segmentlog.open(store.path, background=False):
        pass
    log.append([b"1"])
    assert log.config.segment_records == 3


def test_what_was_killed_in_the_middle_of_renaming_is_told(store: LogStore) -> None:
    """If a process dies after a rename, open handles notice it, also if another topic gets the old name."""
    log = store.topic("t").partition(0)
    log.append([b"1"])
    fs = FaultyFileSystem()
    dying = LogStore(store.path, background=False, fs=fs)
    fs.before("map_file", lambda: fs.die_at(1))  # of the page
    with pytest.raises(Died):
        dying.rename_topic("t", "v")
    with segmentlog.open(store.path, background=False) as other:
        other.rename_topic("u", "t")
        other.topic("t").partition(0).append([b"2"])
    with pytest.raises(UnknownTopic):
        log.append([b"3"])
    assert (values_of(store, "v"), values_of(store, "t")) == ([b"1"], [b"2"])
    assert store.open_partition("t", 0).topic_id == store.topic("t").id


def test_settings_that_change_within_a_tick_of_the_clock_are_seen(store: LogStore, faulty: LogStore) -> None:
    """A file that is replaced by one with the same inode, time and size is read again."""
    for number in range(60):
        store.alter_topic("t", segment_records=10 + number % 7)
        assert faulty.topic("t").config.segment_records == 10 + number % 7


# ---------------------------------------------------------------- deleting


def test_who_is_stopped_in_the_middle_of_something_is_not_waited_for_for_ever(
    store: LogStore, faulty: LogStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped process does not block a rename forever: it fails, changes nothing, and others continue."""
    monkeypatch.setattr("segmentlog.topics.topic_admin._LOCK_WAIT_S", 0.1)
    log = store.topic("t").partition(0)
    with log.handle.folder_locked(), log.handle.folder_locked():  # more than once, too
        with pytest.raises(PartitionBusy, match="Stop that process to rename it"):
            faulty.rename_topic("t", "v")
        with pytest.raises(PartitionBusy, match="Stop that process to delete it"):
            faulty.delete_topic("t")
        faulty.rename_topic("u", "v")
    assert log.append([b"1"], ack="durable") == 0
    assert faulty.rename_topic("t", "w").partition(0).log_end_offset == 1
    with pytest.raises(UnknownTopic), log.handle.folder_locked():
        pass


@pytest.mark.parametrize("call", ["fstat", "rename", "open", "map_file", "fsync", "remove_tree"])
def test_deleted_means_deleted(store: LogStore, faulty: LogStore, fs: FaultyFileSystem, call: str) -> None:
    """After a delete, no append is acknowledged, whatever step of opening the topic another process is in."""
    store.topic("t").partition(0).append([b"1"], ack="durable")
    opened: list[segmentlog.Partition] = []
    others = segmentlog.open(store.path, background=False)

    def open_it() -> None:
        try:
            log = others.topic("t").partition(0)
            log.append([b"2"], ack="durable")
        except UnknownTopic:
            return
        opened.append(log)

    opening = Meanwhile(open_it)
    fs.before(call, opening)
    faulty.delete_topic("t")
    opening.end()
    for log in (*opened, *store._topics._partitions.values()):
        for append in (lambda log=log: log.append([b"3"], ack="durable"), lambda log=log: log.append([b"3"])):
            with pytest.raises(UnknownTopic):
                append()
    assert call != "fstat" or opened
    others.close()


@pytest.mark.parametrize("call", ["open", "fstat", "map_file", "stat", "boot_id", "flock"])
@pytest.mark.parametrize("anew", [False, True])
def test_who_opens_what_is_deleted_is_told(
    store: LogStore, faulty: LogStore, fs: FaultyFileSystem, call: str, anew: bool
) -> None:
    """A process that opens a topic during its deletion gets all of it or an error."""
    store.topic("t").partition(0).append([b"old"] * 5, ack="durable")

    def replace() -> None:
        store.delete_topic("t")
        if anew:
            store.create_topic("t", partitions=2)

    topic = faulty.topic("t")
    replacing = Meanwhile(replace)
    fs.before(call, replacing)

    def open_and_append() -> None:
        log = topic.partition(0)
        for _ in range(2):  # before it, perhaps, and after it
            log.append([b"x"], ack="durable")
            replacing.end()

    with pytest.raises(UnknownTopic):
        open_and_append()
    fs.heal()
    replacing.end()
    if anew:
        assert faulty.topic("t").partition(0).append([b"new"], ack="durable") == 0
        assert values_of(store, "t") == [b"new"]


@pytest.mark.parametrize("call", ["stat", "open", "fstat", "flock"])
def test_idle_files_are_not_opened_in_another_topic(
    store: LogStore, faulty: LogStore, fs: FaultyFileSystem, call: str
) -> None:
    """Released files of a topic are not reopened in another topic that has the name now."""
    log = faulty.topic("t").partition(0)
    log.append([b"old"] * 5, ack="durable")
    assert log.handle.close_if_idle()

    def replace() -> None:
        store.delete_topic("t")
        store.create_topic("t").partition(0).append([b"new"], ack="durable")

    replacing = Meanwhile(replace)
    fs.before(call, replacing)

    def append() -> None:
        for _ in range(2):  # before it, perhaps, and after it
            log.append([b"x"], ack="durable")
            replacing.end()

    with pytest.raises(UnknownTopic):
        append()
    fs.heal()
    replacing.end()
    assert values_of(store, "t") == [b"new"]
    assert store.topic("t").partition(0).append([b"newer"], ack="durable") == 1
    assert not [one for one in inspect_store(store.path) if one.severity == "damage"]


def test_a_topic_stands_for_itself_and_not_for_its_name(store: LogStore, faulty: LogStore) -> None:
    """A `Topic` is bound to its id: after delete and create it raises; a producer, which has names, continues."""
    topic = faulty.topic("t")
    assert str(uuid.UUID(topic.id)) == topic.id == store.topic("t").id
    producer = faulty.producer(linger_ms=0)
    producer.send_many("t", [b"old"])
    store.delete_topic("t")
    anew = store.create_topic("t", partitions=3)
    assert anew.id != topic.id
    for use in (lambda: topic.partition_count, lambda: topic.config, lambda: topic.partition(0), topic.partitions):
        with pytest.raises(UnknownTopic):
            use()
    producer.send_many("t", [b"new"], partition=2)
    assert values_of(store, "t", 2) == [b"new"]
    renamed = store.rename_topic("t", "v")
    assert renamed.id == anew.id
    with pytest.raises(UnknownTopic):
        anew.partition(0)
    producer.close()


# ---------------------------------------------------------------- two threads


def test_two_threads_open_released_files_once(store: LogStore, faulty: LogStore, fs: FaultyFileSystem) -> None:
    """Two threads that reopen released files at once both succeed, and leak no lock."""
    log = faulty.topic("t").partition(0)
    for call in ("open", "stat"):
        log.append([b"1"])
        assert log.handle.close_if_idle()
        others: list[threading.Thread] = []
        failures: list[BaseException] = []

        def flush(failures: list[BaseException] = failures) -> None:
            try:
                log.flush()
            except BaseException as error:
                failures.append(error)

        fs.before(call, lambda others=others, flush=flush: others.append(beside(flush)))
        log.append([b"2"])
        others[0].join(10)
        assert not failures
        names = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
        for name in ("lock", "state"):
            assert names.count(f"{log.folder}/{name}") == 1, name

        def append() -> None:
            with segmentlog.open(store.path, background=False) as other:
                other.topic("t").partition(0).append([b"3"], ack="durable")

        thread = beside(append)
        thread.join(5)
        assert not thread.is_alive()


# ---------------------------------------------------------------- transactions


def _rename_between(
    store: LogStore, faulty: LogStore, fs: FaultyFileSystem, when: str
) -> tuple[Callable[[], None], Meanwhile]:
    """Return a hook that renames the topic at a certain call, and the function that renames it."""

    def rename_now() -> None:
        store.rename_topic("t", "renamed")
        store.create_topic("t").partition(0).append([b"of another topic"])

    # In another thread, because this thread's buffers may hold data that is still to be written.
    rename = Meanwhile(rename_now)
    if when == "sent":
        return rename, rename
    real = faulty.transactions._completer.complete

    def complete(*args: object) -> object:
        faulty.transactions._completer.complete = real  # type: ignore[method-assign]
        rename()
        return real(*args)  # type: ignore[arg-type]

    if when == "decided":
        faulty.transactions._completer.complete = complete  # type: ignore
        return (lambda: None), rename
    return (lambda: fs.before(when, rename)), rename


@pytest.mark.parametrize(
    ("when", "committed"),
    [
        *((when, True) for when in ("sent", "decided", "fdatasync", "pwritev", "flock")),
        *((when, False) for when in ("sent", "decided", "pwritev", "flock")),
    ],
)
def test_a_transaction_is_all_or_nothing_over_a_rename(
    store: LogStore, faulty: LogStore, fs: FaultyFileSystem, when: str, committed: bool
) -> None:
    """A decision reaches all partitions of a renamed topic, and no other topic."""
    with faulty.producer(name="n") as producer:
        producer.begin_transaction()
        producer.send_many("t", [b"1"])
        producer.send_many("u", [b"2"])
        begin, renaming = _rename_between(store, faulty, fs, when)
        begin()
        if committed:
            producer.commit_transaction()
        else:
            producer.abort_transaction()
    renaming.end()
    expected = ([b"1"], [b"2"]) if committed else ([], [])
    assert (values_of(store, "renamed"), values_of(store, "u")) == expected
    assert values_of(store, "t") == [b"of another topic"]
    for name in ("renamed", "u"):
        assert not store.topic(name).partition(0).open_transactions()


def test_a_transaction_goes_on_under_the_new_name(store: LogStore) -> None:
    """A transaction continues under the new name, in the process that renames, too."""
    with store.producer() as producer, producer.transaction():
        producer.send_many("t", [b"1"])
        store.rename_topic("t", "renamed")
        producer.send_many("renamed", [b"2"])
        producer.send_many("u", [b"3"])
    assert (values_of(store, "renamed"), values_of(store, "u")) == ([b"1", b"2"], [b"3"])


def test_a_dead_producer_s_decision_reaches_a_renamed_topic(store: LogStore) -> None:
    """A decided transaction of a dead process is finished in a topic that was renamed since."""

    def die() -> None:
        opened = segmentlog.open(store.path, background=False)
        producer = opened.producer(name="n")
        producer.begin_transaction()
        producer.send_many("t", [b"1"])
        producer.send_many("u", [b"2"])
        producer.flush()
        opened.transactions._completer.complete = lambda *args: os._exit(9)  # type: ignore
        producer.commit_transaction()

    process = multiprocessing.get_context("fork").Process(target=die)
    process.start()
    process.join()
    assert process.exitcode == 9
    store.rename_topic("t", "renamed")
    store.rename_topic("u", "t")
    store.finish_transactions()
    assert (values_of(store, "renamed"), values_of(store, "t")) == ([b"1"], [b"2"])


def test_a_topic_that_cannot_be_read_is_not_a_deleted_one_to_a_transaction(store: LogStore) -> None:
    """A commit waits for a topic that cannot be read, and completes when `topic.json` is restored."""
    path = Path(store.path, "t", "topic.json")
    whole = path.read_bytes()
    with segmentlog.open(store.path, background=False) as other, other.producer(name="n") as producer:
        producer.begin_transaction()
        producer.send_many("t", [b"1"])
        producer.send_many("u", [b"2"])
        producer.flush()
        tell = other.transactions._completer.complete

        def damage_and_tell(*args: object) -> object:
            path.write_bytes(b"{")
            return tell(*args)  # type: ignore[arg-type]

        other.transactions._completer.complete = damage_and_tell  # type: ignore[method-assign,assignment]
        producer.commit_transaction()
    with (
        segmentlog.open(store.path, background=False) as other,
        contextlib.suppress(SegmentlogError),
        other.producer(name="n") as producer,
        producer.transaction(),
    ):
        producer.send_many("u", [b"3"])  # it is not forgotten over the next one, should there be one
    with segmentlog.open(store.path, background=False) as another:
        another.finish_transactions()
        path.write_bytes(whole)
        another.finish_transactions()
        assert values_of(another, "t") == [b"1"]
        assert values_of(another, "u")[:1] == [b"2"]


# ---------------------------------------------------------------- positions


def test_positions_in_a_topic_that_cannot_be_read_stay(store: LogStore) -> None:
    """Offsets of a topic that cannot be read are kept until it is known to be deleted."""
    path = Path(store.path, "t", "topic.json")
    whole = path.read_bytes()
    for topic in ("t", "u"):
        store.topic(topic).partition(0).append([b"1"])
        store.groups.reset("g", {TopicPartition(topic, 0): 1})
    path.write_bytes(b"{")
    store.delete_topic("u")
    store._run_periodic_work(1)
    path.write_bytes(whole)
    assert store.group_offsets.committed("g")[_T0].offset == 1
    store._run_periodic_work(1_000_000)
    assert len(store.group_offsets.by_topic_id("g")) == 1


def test_a_position_is_never_another_topic_s(store: LogStore, faulty: LogStore) -> None:
    """Committed offsets follow a rename, and never apply to another topic of the same name."""
    store.topic("t").partition(0).append([b"1", b"2", b"3"])
    member = faulty.consumer("t", group="g")
    assert len(list(member)) == 3
    member.commit({_T0: 1})
    store.rename_topic("t", "renamed")
    store.create_topic("t").partition(0).append([b"new"] * 9)
    member.commit({_T0: 2})  # commits its own topic's position, under the new name
    assert {tp: one.offset for tp, one in store.group_offsets.committed("g").items()} == {
        TopicPartition("renamed", 0): 2
    }
    member.close()
    with store.consumer("t", group="g") as consumer:
        assert len(list(consumer)) == 9
    with store.consumer("renamed", group="g") as consumer:
        assert [record.value for record in consumer] == [b"3"]


def test_a_member_under_the_old_name_keeps_others_out(store: LogStore, faulty: LogStore) -> None:
    """One member reads a partition at a time, whatever name each uses."""
    store.topic("t").partition(0).append([b"1"])
    old = faulty.consumer("t", group="g")
    assert old.poll_group(5) == [_T0]
    store.rename_topic("t", "v")
    with store.consumer("v", group="g") as new:
        for _ in range(5):
            assert new.poll_group() == []
        old.commit({_T0: 1})
        old.close()
        assert new.poll_group(5) == [TopicPartition("v", 0)]
        assert new.position("v") == 1


def test_positions_of_deleted_topics_are_forgotten_at_last(store: LogStore) -> None:
    """Offsets of a deleted topic are removed later if the deleting process was killed."""
    store.topic("t").partition(0).append([b"1"])
    store.groups.reset("g", {_T0: 1})
    fs = FaultyFileSystem()
    dying = LogStore(store.path, background=False, fs=fs)
    fs.before("remove_tree", lambda: fs.die_at(1))
    with pytest.raises(Died):
        dying.delete_topic("t")
    store.create_topic("t").partition(0).append([b"new"])
    assert store.group_offsets.committed("g") == {}
    with store.consumer("t", group="g") as consumer:
        assert [record.value for record in consumer] == [b"new"]
    assert len(store.group_offsets.by_topic_id("g")) == 1
    store._run_periodic_work(1)
    assert store.group_offsets.by_topic_id("g") == {}
    assert store.group_offsets.groups_with_any_offset() == []


def test_a_topic_made_anew_while_the_one_before_is_deleted_stays_open(
    store: LogStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deleting a topic does not close a new topic that another thread has created under the name."""
    old = store.topic("t").partition(0)
    old.append([b"old"])
    administration = store._topics.administration
    delete = administration.delete
    made: list[Partition] = []

    def delete_and_make(name: str, topic_id: str | None = None) -> object:
        gone = delete(name, topic_id)
        made.append(store.create_topic(name).partition(0))
        made[0].append([b"new"])
        return gone

    monkeypatch.setattr(administration, "delete", delete_and_make)
    store.delete_topic("t")
    assert made[0].append([b"more"]) == 1
    assert values_of(store, "t") == [b"new", b"more"]
    with pytest.raises(SegmentlogError):
        old.append([b"late"])


# ---------------------------------------------------------------- who was killed


def _change(store: LogStore, what: str) -> None:
    if what == "create":
        store.create_topic("made", partitions=2, retention_ms=-1)
    elif what == "alter":
        store.alter_topic("t", partitions=3, segment_records=5)
    elif what == "rename":
        store.rename_topic("t", "renamed")
    elif what == "delete":
        store.delete_topic("t")
    else:
        store.delete_topic("t")
        store.create_topic("t")


@pytest.mark.long
@pytest.mark.parametrize("what", ["create", "alter", "rename", "delete", "recreate"])
def test_killed_at_any_call_a_change_was_made_or_was_not(tmp_path: Path, what: str) -> None:
    """A change that is killed at any call is complete or absent; the next process cleans up."""
    for call in range(1, 300):
        path = tmp_path / str(call)
        with segmentlog.open(path, background=False) as store:
            store.create_topic("t").partition(0).append([b"1", b"2"], ack="durable")
            store.groups.reset("g", {_T0: 1})
            before = store.topic("t").id
        fs = FaultyFileSystem()
        dying = LogStore(path, background=False, fs=fs)
        dying.topic("t").partition(0)
        fs.die_at(call)
        try:
            _change(dying, what)
        except Died:
            died = True
        else:
            died = False
            fs.heal()
            dying.close()
        with segmentlog.open(path, background=False) as store:
            for name in store.topics():
                topic = store.topic(name)
                values = values_of(store, name)
                assert values == ([b"1", b"2"] if topic.id == before else [])
                assert [len(values_of(store, name, number)) for number in range(1, topic.partition_count)] == [0] * (
                    topic.partition_count - 1
                )
                if topic.id == before and what == "alter":
                    assert (topic.partition_count, topic.config.segment_records) in ((1, None), (3, 5))
            shown = {tp.topic: one.offset for tp, one in store.group_offsets.committed("g").items()}
            named = {store.topic(name).id: name for name in store.topics()}
            assert shown == ({named[before]: 1} if before in named else {})
            if died:
                try:
                    _change(store, what)
                except (UnknownTopic, TopicExists):
                    assert what in ("create", "rename", "delete", "recreate")
            left = [name for name in os.listdir(path) if "@" in name]
            assert sorted(left) == ["@administration", "@groups"]
        assert not [one for one in inspect_store(str(path)) if one.severity == "damage"]
        if not died:
            return
    raise AssertionError("it does not come to an end")


@pytest.mark.parametrize("what", ["create", "alter", "rename", "delete", "recreate"])
def test_who_has_the_store_open_sees_to_what_a_dead_process_left(tmp_path: Path, what: str) -> None:
    """The next change in a process that has the store open finishes what a dead process left."""
    kinds = set()
    for call in range(1, 300):
        fs = FaultyFileSystem()
        with segmentlog.open(tmp_path / str(call), background=False) as store:
            store.create_topic("t").partition(0).append([b"1"])
            dying = LogStore(store.path, background=False, fs=fs)
            fs.die_at(call)
            try:
                _change(dying, what)
            except Died:
                pass
            else:
                fs.heal()
                dying.close()
                break
            kinds.update(name.partition("-")[0] for name in os.listdir(store.path) if "-" in name)
            store.create_topic("other")
            left = [name for name in os.listdir(store.path) if "@" in name]
            assert left == ["@administration"], f"at call {call}"
    else:
        raise AssertionError("it does not come to an end")
    wanted = {"create": {"@making"}, "delete": {"@deleted"}, "recreate": {"@deleted", "@making"}}
    assert kinds == wanted.get(what, {"@altering"})


def test_what_cannot_be_swept_keeps_nobody_out(store: LogStore) -> None:
    """A change that cannot be finished now does not block opening the store; it is finished later."""

    class Failing(FileSystem):
        fails = True

        def open(self, path: str, flags: int, mode: int = 0o777) -> int:
            if self.fails and path.endswith("/a/topic.json"):
                raise OSError(errno.EIO, os.strerror(errno.EIO), path)
            return super().open(path, flags, mode)

    log = store.topic("u").partition(0)
    store.create_topic("a")
    note = Path(store.path, f"@altering-{store.topic('u').id}")
    note.touch()
    fs, before = Failing(), log.handle.page.config_version
    for fs.fails in (True, False):
        with LogStore(store.path, background=False, fs=fs) as other:
            other.topic("t").partition(0).append([b"1"])
        assert note.exists() == fs.fails
    assert log.handle.page.config_version != before


def test_a_change_is_done_though_its_end_cannot_be_noted(store: LogStore, fs: FaultyFileSystem) -> None:
    """A change succeeds if its end cannot be recorded; the next process finds nothing to do."""
    with LogStore(store.path, background=False, fs=fs) as faulty:
        fs.fail("ftruncate", errno.EIO, call=2)
        faulty.create_topic("made")
        assert os.path.getsize(f"{store.path}/@administration")
        store.create_topic("next")
        assert not os.path.getsize(f"{store.path}/@administration")
        assert {"made", "next"} <= set(store.topics())


def test_leftovers_are_swept(store: LogStore, tmp_path: Path) -> None:
    """Leftovers of interrupted creations and deletions are removed, after open handles were notified."""
    log = store.topic("t").partition(0)
    log.append([b"1"])
    os.mkdir(f"{store.path}/@making-{'0' * 32}")
    os.rename(f"{store.path}/t", f"{store.path}/@deleted-{'0' * 32}")  # and here its process died
    log.append([b"2"])
    with segmentlog.open(store.path, background=False):
        pass
    assert not [name for name in os.listdir(store.path) if name.startswith(("@making", "@deleted"))]
    with pytest.raises(UnknownTopic):
        log.append([b"3"])
    os.mkdir(f"{store.path}/@making-{'1' * 32}")
    store.retention_tick()
    assert not [name for name in os.listdir(store.path) if name.startswith(("@making", "@deleted"))]


def test_nobody_sweeps_what_is_being_made(store: LogStore, faulty: LogStore, fs: FaultyFileSystem) -> None:
    """A topic that is being created is not swept, as its process holds the lock."""
    others: list[threading.Thread] = []

    def open_beside() -> None:
        others.append(beside(lambda: segmentlog.open(store.path, background=False).close()))

    fs.before("rename", open_beside)
    assert faulty.create_topic("made", partitions=3).partition(2).append([b"1"]) == 0
    fs.before("remove_tree", open_beside)
    faulty.delete_topic("made")
    for thread in others:
        thread.join()
    assert store.topics() == ["t", "u"]


# ---------------------------------------------------------------- what is shown


def test_a_copy_of_a_topic_s_folder_is_told(store: LogStore) -> None:
    """A copy of a topic's folder is reported: two topics with one id would be one to groups and transactions."""
    import shutil

    shutil.copytree(f"{store.path}/t", f"{store.path}/copy")
    found = [one for one in inspect_store(store.path) if one.severity == "damage"]
    assert [(one.topic, "the id of topic 'copy'" in one.what) for one in found] == [("t", True)]


def test_internal_topics_have_ids_too(store: LogStore) -> None:
    """Internal topics have ids, too."""
    store.groups.reset("g", {_T0: 0})
    with store.producer(name="n"):
        pass
    ids = [store.topic(name).id for name in ("t", "u", OFFSETS_TOPIC, TRANSACTIONS_TOPIC)]
    assert len(set(ids)) == 4


def test_the_lock_is_free_after_a_death(store: LogStore) -> None:
    """A process that is killed during a change leaves the lock free."""
    ours, theirs = multiprocessing.Pipe()

    def hold() -> None:
        opened = segmentlog.open(store.path, background=False)
        with opened._topics.administration.locked():
            theirs.send(None)
            time.sleep(60)

    process = multiprocessing.get_context("fork").Process(target=hold)
    process.start()
    theirs.close()
    ours.recv()
    outcome: list[object] = []

    def alter() -> None:
        try:
            outcome.append(store.alter_topic("t", partitions=2).partition_count)
        except SegmentlogError as error:
            outcome.append(error)

    thread = beside(alter)
    assert thread.is_alive()
    process.kill()
    process.join()
    thread.join(10)
    assert outcome == [2]


def test_who_opens_a_partition_syncs_names_only_while_somebody_changes_some(store: LogStore) -> None:
    """Opening a partition syncs names only during a change, and after an incomplete one."""
    synced: list[str] = []

    class Noting(FileSystem):
        def sync_folder(self, path: str) -> None:
            synced.append(path)
            super().sync_folder(path)

    store.topic("t").partition(0).append([b"1"])
    note = Path(store.path) / "@administration"
    for before, size, wanted in [
        (lambda: store.create_topic("v"), 0, []),
        (lambda: store.delete_topic("v"), 2, []),
        (lambda: os.truncate(note, 1), 1, [f"{store.path}/t", store.path]),
        (lambda: store.alter_topic("u", segment_records=7), 0, []),
    ]:
        before()
        assert note.stat().st_size == size
        with LogStore(store.path, background=False, fs=Noting()) as other:
            synced.clear()
            other.topic("t").partition(0)
            assert synced == wanted
