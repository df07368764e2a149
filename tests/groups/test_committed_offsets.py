"""Committed offsets: their encoding, and the view that follows their topic."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from leftovers import opened

import segmentlog
from segmentlog.errors import InvalidConfig, InvalidTopicName, TopicExists
from segmentlog.format.batch import TRANSACTIONAL
from segmentlog.format.control import encode_marker
from segmentlog.format.encode import encode_batch
from segmentlog.format.file_names import OFFSETS_TOPIC
from segmentlog.format.record_batch import RecordBatch
from segmentlog.groups.committed_offsets import CommittedOffset, CommittedOffsetsView, decode_key, encode
from segmentlog.log.partition import Partition
from segmentlog.log.producer_state import ProducerStamp
from segmentlog.records import PartitionId, TopicPartition
from segmentlog.store import LogStore

_T0, _T1 = TopicPartition("t", 0), TopicPartition("t", 1)
_ID = "6a2bd7f4-3a4c-4f0e-9c3b-b3a9a3e54d10"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LogStore]:
    """Provide a store with the topic ``t``."""
    with segmentlog.open(tmp_path / "store", background=False) as store:
        store.create_topic("t", partitions=2)
        yield store


def _id_of(tp: TopicPartition) -> str:
    return _ID


def _commit(offsets: CommittedOffsetsView, group: str, **positions: int) -> None:
    named = {TopicPartition("t", int(name[1:])): offset for name, offset in positions.items()}
    offsets.append(*encode(group, named, lambda tp: offsets._topics.topic(tp.topic).id, committed_ms=7))


def test_records_are_messagepack_arrays() -> None:
    """Key: version, group, topic id, partition. Value: offset, epoch, metadata, time, generation, member."""
    keys, values = encode("g", {_T1: (5, 2)}, _id_of, metadata="m", committed_ms=9, generation=3, member="x")
    assert [msgspec.msgpack.decode(key or b"") for key in keys] == [[2, "g", _ID, 1]]
    assert [msgspec.msgpack.decode(value or b"") for value in values] == [[5, 2, "m", 9, 3, "x"]]
    assert decode_key(keys[0], "any store") == ("g", PartitionId(_ID, 1))


def test_keys_of_format_1_name_the_topic() -> None:
    """Keys of format 1 contain topic names; they belong to the id that the topic got in the upgrade."""
    where = PartitionId("734a2093-e192-51db-a4fe-d3c3138589d7", 1)
    assert decode_key(msgspec.msgpack.encode((1, "g", "t", 1)), "00" * 16) == ("g", where)


def test_what_is_no_position_is_refused() -> None:
    """Invalid offsets are refused: negative, of another type, too large; and metadata over 4,096 characters."""
    for offset in (-1, True, 1.5, None, 1 << 63):
        with pytest.raises(InvalidConfig, match="t/0"):
            encode("g", {_T0: offset}, _id_of, committed_ms=0)  # type: ignore[dict-item]
    # Java counts UTF-16 units: a character beyond U+FFFF counts twice.
    for letter, most in (("x", 4096), ("é", 4096), ("日", 4096), ("😀", 2048)):
        encode("g", {_T0: 0}, _id_of, metadata=letter * most, committed_ms=0)
        with pytest.raises(InvalidConfig, match="4,096 characters"):
            encode("g", {_T0: 0}, _id_of, metadata=letter * (most + 1), committed_ms=0)


def test_the_view_follows_the_log(store: LogStore) -> None:
    """The last commit of each partition counts, in other open stores, too; deletions delete."""
    offsets = store.group_offsets
    assert not offsets.exists
    assert (offsets.committed("g"), offsets.groups(), offsets.pending("g")) == ({}, [], set())
    assert store.topics(internal=True) == ["t"]  # asking makes nothing
    _commit(offsets, "g", p0=1, p1=2)
    _commit(offsets, "g", p0=5)
    _commit(offsets, "h", p0=9)
    with segmentlog.open(store.path, read_only=True) as other:
        assert other.group_offsets.groups() == ["g", "h"]
        assert offsets.committed("g") == other.group_offsets.committed("g") == {
            _T0: CommittedOffset(5, committed_ms=7), _T1: CommittedOffset(2, committed_ms=7),
        }  # fmt: skip
        _commit(offsets, "g", p1=3)
        offsets.append(*offsets.encode_deletion("h", [PartitionId(store.topic("t").id, 0)]))
        assert other.group_offsets.committed("g")[_T1].offset == 3
        assert other.group_offsets.groups() == ["g"]
        assert other.group_offsets.committed("h") == {}


def test_the_topic_is_compacted_and_internal(store: LogStore) -> None:
    """The topic is internal, and a compaction changes no committed offset."""
    offsets = store.group_offsets
    for number in range(50):
        _commit(offsets, "g", p0=number, p1=number)
    assert store.topics() == ["t"]
    assert store.topics(internal=True) == [OFFSETS_TOPIC, "t"]
    config = store.topic(OFFSETS_TOPIC).config
    assert (config.cleanup_policy, config.segment_bytes) == ("compact", 16 << 20)
    with pytest.raises((InvalidTopicName, TopicExists)):
        store.create_topic(OFFSETS_TOPIC)
    before = offsets.committed("g")
    partition = store.topic(OFFSETS_TOPIC).partition(0)
    partition.roll()
    assert partition.compact().records_after < 10
    assert offsets.committed("g") == before
    with segmentlog.open(store.path, read_only=True) as other:
        assert other.group_offsets.committed("g") == before


def test_no_marker_is_missed_that_goes_while_the_topic_is_read(
    store: LogStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A marker that is compacted away during the read is not missed: the next marker is not taken for it."""
    topics = store._topics
    view = CommittedOffsetsView(topics)
    _commit(view, "g", p0=1)
    log = view.open_or_create_log()
    for position, committed in ((5, True), (9, False)):
        keys, values = encode("g", {_T0: position}, lambda tp: topics.topic(tp.topic).id, committed_ms=7)
        log.roll()
        view.append(keys, values, ProducerStamp(7, 0, -1, transactional=True))
        log.roll()
        log.end_transaction(7, 0, committed=committed)
    log.roll()
    real, passes = Partition.read, [log.compact, log.compact]

    def read(self: Partition, *args: Any, **options: Any) -> Iterator[RecordBatch]:
        for batch in real(self, *args, **options):
            yield batch
            while passes and batch.header.attributes & TRANSACTIONAL:
                passes.pop()()

    monkeypatch.setattr(Partition, "read", read)
    fresh = CommittedOffsetsView(topics)
    assert [one.offset for one in fresh.committed("g").values()] == [5]
    assert not passes
    assert not fresh.pending("g")


def test_keys_of_another_version_are_ignored(store: LogStore) -> None:
    """Keys of an unknown version are ignored: a later version may write them."""
    offsets = store.group_offsets
    offsets.append([msgspec.msgpack.encode((3, "g", "t", 0)), b"junk"], [b"x", b"y"])
    _commit(offsets, "g", p0=1)
    assert offsets.committed("g") == {_T0: CommittedOffset(1, committed_ms=7)}


def _transact(store: LogStore, producer_id: int, group: str, offset: int) -> None:
    keys, values = encode(group, {_T0: offset}, lambda tp: store.topic(tp.topic).id, committed_ms=7)
    batch = encode_batch(
        values, keys, now_ms=1, attributes=TRANSACTIONAL, producer_id=producer_id, producer_epoch=0, base_sequence=0
    )
    store.group_offsets.open_or_create_log()._appender.place([batch], 1)


def _decide(store: LogStore, producer_id: int, *, committed: bool) -> None:
    marker = encode_marker(producer_id, 0, committed=committed, first_offset=0, now_ms=1)
    store.group_offsets.open_or_create_log()._appender.place([marker], 1)


def test_positions_of_a_transaction_count_once_it_is_committed(store: LogStore) -> None:
    """Offsets of a transaction are pending until its commit, and dropped by an abort."""
    offsets = store.group_offsets
    _commit(offsets, "g", p0=1)
    _transact(store, 7, "g", 10)
    _transact(store, 8, "g", 20)
    assert offsets.pending("g") == {_T0}
    assert offsets.pending("h") == set()
    assert offsets.committed("g")[_T0].offset == 1
    _decide(store, 7, committed=True)
    assert offsets.committed("g")[_T0].offset == 10
    assert offsets.pending("g") == {_T0}
    _decide(store, 8, committed=False)
    assert offsets.committed("g")[_T0].offset == 10
    assert offsets.pending("g") == set()
    _transact(store, 7, "g", 30)
    _commit(offsets, "g", p0=40)
    _decide(store, 7, committed=True)
    assert offsets.committed("g")[_T0].offset == 40
    with segmentlog.open(store.path, read_only=True) as other:
        assert other.group_offsets.committed("g")[_T0].offset == 40


def test_many_make_the_topic_at_once(store: LogStore) -> None:
    """Processes that create the topic at the same time share it."""
    stores = [opened(segmentlog.open(store.path, background=False)) for _ in range(4)]
    errors: list[BaseException] = []

    def commit(number: int) -> None:
        try:
            _commit(stores[number].group_offsets, f"g{number}", p0=number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=commit, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not errors
    assert store.group_offsets.groups() == ["g0", "g1", "g2", "g3"]
    for one in stores:
        one.close()


def test_a_log_that_was_cut_is_read_anew(store: LogStore) -> None:
    """After a truncation, the view contains the remaining offsets."""
    offsets = store.group_offsets
    _commit(offsets, "g", p0=1)
    _commit(offsets, "g", p0=2)
    _commit(offsets, "g", p0=3)
    assert offsets.committed("g")[_T0].offset == 3
    store.topic(OFFSETS_TOPIC).partition(0).truncate(1)
    _commit(offsets, "h", p0=1)
    assert offsets.committed("g")[_T0].offset == 1
