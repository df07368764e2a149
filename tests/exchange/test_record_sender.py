"""A list that fails stops `produce` and `import`, and their advice on resuming is right."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from logs import values

from segmentlog.errors import DiskFull, RecordTooLarge
from segmentlog.exchange.record_sender import BadRecord, OutgoingRecords, RecordSender, ResumingSender
from segmentlog.exchange.resumed_input import ResumedInput
from segmentlog.policy.partitioner import partition_for_key
from segmentlog.store import LogStore
from segmentlog.testing.fault_injection import FaultyFileSystem

VALUES = [b"%03d" % number for number in range(60)]
LIST = 10


@pytest.fixture
def fs() -> FaultyFileSystem:
    """Return the file system of the store."""
    return FaultyFileSystem()


@pytest.fixture
def store(tmp_path: Path, fs: FaultyFileSystem) -> Iterator[LogStore]:
    """Yield a store with topics of one and of three partitions; every append from now on is a batch."""
    with LogStore(tmp_path / "store", background=False, fs=fs) as store:
        with store.producer() as producer:
            for name, partitions in (("one", 1), ("three", 3)):
                store.create_topic(name, partitions=partitions)
                for number in range(partitions):
                    producer.send_many(name, [b"first"], partition=number)
        yield store


def _appended(store: LogStore, topic: str) -> list[list[bytes | None]]:
    """Return the values that the test sent, by partition."""
    return [values(log)[1:] for log in store.topic(topic).partitions()]


def _send(
    store: LogStore, fs: FaultyFileSystem, topic: str, *, skip: int = 0, name: str | None = None, fails_at: int = 0
) -> tuple[RecordSender, DiskFull | None, list[tuple[int, int, int]]]:
    """Send all values but the first ``skip``, in lists, keyed by their last digit; a write may fail."""
    told: list[tuple[int, int, int]] = []
    failure = None
    with store.producer(name=name) as producer:
        limit = store.topic(topic).config.max_message_bytes if topic == "three" else None
        options: tuple[Any, ...] = (producer, topic, None, (), lambda *place: told.append(place), limit, skip)
        if name is None:
            sender = RecordSender(*options)
        else:
            sender = ResumingSender(ResumedInput(store.topic(topic), producer, store.transactions), *options)
            producer.last_sequence(topic, 0)
        if fails_at:
            fs.fail("pwritev", errno.ENOSPC, call=fails_at)
        try:
            for start in range(skip, len(VALUES), LIST):
                part: list[bytes | None] = list(VALUES[start : start + LIST])
                sender.first = sender.number
                sender.send(OutgoingRecords(part, [value[-1:] for value in part if value]))
        except DiskFull as error:
            failure = error
    fs.heal()
    return sender, failure, told


@pytest.mark.parametrize("fails_at", range(1, 7))
def test_a_list_that_fails_is_gone_on_with(store: LogStore, fs: FaultyFileSystem, fails_at: int) -> None:
    """With --skip, the rest is appended: one partition has every record once, in order."""
    sender, failure, told = _send(store, fs, "one", fails_at=fails_at)
    assert isinstance(failure, DiskFull)
    assert sender.number == sender.records == LIST * (fails_at - 1)
    advice = sender.how_to_resume(failure)
    assert advice.endswith(f"resume with --skip {sender.number}") if sender.number else advice == ""
    assert _appended(store, "one") == [VALUES[: sender.number]]
    again, failure, more = _send(store, fs, "one", skip=sender.number)
    assert failure is None
    assert again.records == len(VALUES) - sender.records
    assert sum(count for *_, count in told + more) == len(VALUES)
    assert _appended(store, "one") == [VALUES]


@pytest.mark.parametrize("fails_at", range(1, 8))
def test_what_some_partitions_have_of_a_list_is_counted(store: LogStore, fs: FaultyFileSystem, fails_at: int) -> None:
    """Keyed records go to several partitions, and one write of a list fails. No record before --skip is missing, and
    it says how many of those after it are there already."""
    sender, failure, told = _send(store, fs, "three", fails_at=fails_at)
    assert isinstance(failure, DiskFull)
    there = {value for part in _appended(store, "three") for value in part}
    assert sender.records == len(there) == sum(count for *_, count in told)
    assert set(VALUES[: sender.number]) <= there
    assert VALUES[sender.number] not in there
    beyond = [value for value in VALUES[sender.number :] if value in there]
    advice = sender.how_to_resume(failure)
    assert (f"--skip {sender.number}" in advice) == (sender.number > 0)
    if beyond:
        assert f"{len(beyond)} later record" in advice
        named = re.search(r"partitions? ([\d, ]+);", advice)
        assert named is not None
        assert {int(number) for number in named[1].split(", ")} == {
            partition_for_key(value[-1:], 3) for value in beyond
        }
    _send(store, fs, "three", skip=sender.number)
    found = _appended(store, "three")
    for number, part in enumerate(found):
        wanted = [value for value in VALUES if partition_for_key(value[-1:], 3) == number]
        twice = [value for value in beyond if partition_for_key(value[-1:], 3) == number]
        assert sorted(value for value in part if value) == sorted(wanted + twice)


@pytest.mark.parametrize("topic", ["one", "three"])
@pytest.mark.parametrize("fails_at", range(3, 12, 2))
def test_a_named_producer_has_each_record_once(
    store: LogStore, fs: FaultyFileSystem, topic: str, fails_at: int
) -> None:
    """A run whose writes fail, each another one, is run again with the same input: all partitions are in order."""
    for call in (fails_at, fails_at, 0):
        sender, failure, _ = _send(store, fs, topic, name="etl", fails_at=call)
        assert failure is None or "run the command again" in sender.how_to_resume(failure)
    assert failure is None
    for number, part in enumerate(_appended(store, topic)):
        assert part == [v for v in VALUES if topic == "one" or partition_for_key(v[-1:], 3) == number]


def test_a_record_that_headers_make_too_large_goes_alone(store: LogStore) -> None:
    """Headers count: records after it that belong to other partitions do not arrive, only to be sent again."""
    store.alter_topic("three", max_message_bytes=2000)
    with store.producer() as producer:
        sender = RecordSender(producer, "three", None, (("h", b"x" * 500),), None, 2000)
        lists = OutgoingRecords([b"%d" % number for number in range(9)], [b"%d" % number for number in range(9)])
        lists.headers = [[("own", b"y" * 2500)] if number == 4 else [] for number in range(9)]
        with pytest.raises(ValueError, match="record 5 takes"):
            sender.send(lists)
    assert sender.number == 4
    assert sorted(value for part in _appended(store, "three") for value in part if value) == [b"0", b"1", b"2", b"3"]


KEYS = [next(b"%d" % key for key in range(99) if partition_for_key(b"%d" % key, 3) == number) for number in range(3)]
"""One key for each partition of the topic "three"."""


def _send_after_the_limit_fell(
    store: LogStore, partitions: list[int], large: dict[int, int], name: str | None = None
) -> tuple[RecordSender, Exception]:
    """Send one list with these partitions; records of ``large`` have a size over the limit."""
    with store.producer(name=name) as producer:
        arguments: tuple[Any, ...] = (producer, "three", None, (), None, 100_000)
        if producer.name is None:
            sender = RecordSender(*arguments)
        else:
            sender = ResumingSender(ResumedInput(store.topic("three"), producer, store.transactions), *arguments)
        store.alter_topic("three", max_message_bytes=500)
        contents: list[bytes | None] = [b"%d" % number for number in range(len(partitions))]
        for number, size_bytes in large.items():
            contents[number] = b"x" * size_bytes
        with pytest.raises((ValueError, DiskFull)) as failure:
            sender.send(OutgoingRecords(contents, [KEYS[number] for number in partitions]))
    return sender, failure.value


@pytest.mark.parametrize("name", [None, "etl"])
@pytest.mark.parametrize(
    ("partitions", "large"),
    [
        ([0, 0, 0, 0, 0, 1], {5: 1000}),
        ([0, 0, 1, 1, 1, 1], {5: 1000}),
        ([0, 0, 1, 1, 1, 2], {4: 1000, 5: 1000}),
        ([0, 0, 1, 2, 2, 1], {4: 1000, 5: 1000}),
        ([1, 1, 1, 1], {1: 1000, 3: 1000}),
        ([1, 1], {0: 1000}),
    ],
)
def test_no_record_is_appended_twice_after_the_limit_fell(
    store: LogStore, partitions: list[int], large: dict[int, int], name: str | None
) -> None:
    """The limit falls during the command. Only records before the large one are appended; the error names it."""
    sender, error = _send_after_the_limit_fell(store, partitions, large, name=name)
    before = min(large)
    assert type(error) is ValueError
    assert f"record {before + 1} takes" in str(error)
    assert sender.number == before
    if name is None:
        assert f"--skip {before + 1}" in str(error)
        assert sender.records == before
        assert sender.how_to_resume(error).partition("; ")[2] == (f"resume with --skip {before}" if before else "")
    for number, part in enumerate(_appended(store, "three")):
        assert part == [b"%d" % row for row in range(before) if partitions[row] == number]


def test_records_after_the_one_that_is_too_large_are_counted(store: LogStore) -> None:
    """The limit fell, and another partition has its records of the list, also one that comes later in the input."""
    sender, error = _send_after_the_limit_fell(store, [0, 1, 1, 0], {2: 1000})
    assert isinstance(error, RecordTooLarge)
    assert _appended(store, "three") == [[b"0", b"3"], [], []]
    assert sender.records == 2
    assert sender.number == 1
    assert "1 later record was also appended, in partition 0" in sender.how_to_resume(error)


@pytest.mark.parametrize("separate", [0, 3])
def test_a_record_without_a_key_is_named_by_its_place_in_the_input(store: LogStore, separate: int) -> None:
    """The topic is compacted; the partitions before it have their records of the list."""
    store.alter_topic("three", {"cleanup.policy": "compact"})
    with store.producer() as producer:
        sender = RecordSender(producer, "three", None, (), None, 1000)
        values_: list[bytes | None] = [b"%d" % number for number in range(8)]
        keys: list[bytes | None] = [KEYS[number] for number in (1, 1, 0, 1, 1, 1, 1, 1)]
        keys[6] = None  # a record without a key also goes to partition 0
        if separate:  # the large record is sent alone: the ones before it are a list of their own
            values_[separate] = b"x" * 950
        sender.first = sender.number
        with pytest.raises(BadRecord) as bad:
            sender.send(OutgoingRecords(values_, keys))
    assert bad.value.index == 6
