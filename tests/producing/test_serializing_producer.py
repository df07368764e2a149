"""Producers and consumers of objects: the plug that serializers go into."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from logs import contents

import segmentlog
from segmentlog import DeserializationError, SerializationError, Undecodable, json_codec, text_codec
from segmentlog.store import LogStore


class Click(msgspec.Struct):
    """A value to send."""

    page: str
    count: int = 0


CODEC = json_codec(Click)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LogStore]:
    """Provide a new store with a topic."""
    with segmentlog.open(tmp_path / "store", background=False) as store:
        store.create_topic("clicks")
        yield store


def _clicks(count: int) -> list[Click | None]:
    return [Click(f"/{number}", number) for number in range(count)]


def test_objects_are_sent_and_come_back(store: LogStore) -> None:
    """`send` and `send_many` serialize values and keys; a tombstone and a missing key are None."""
    with store.producer(serializer=CODEC, key_serializer=text_codec(), name="typed") as producer:
        delivery = producer.send("clicks", Click("/a"), "ann", headers=[("h", b"1")], timestamp=5)
        producer.send("clicks", None, key="bob")
        producer.send_many("clicks", _clicks(3), keys=["x", None, "z"])
    assert delivery.result().timestamp == 5
    assert [record.value for record in contents(store.topic("clicks").partition(0))][:2] == [
        b'{"page":"/a","count":0}',
        None,
    ]
    with store.consumer("clicks", deserializer=CODEC, key_deserializer=text_codec()) as consumer:
        records = list(consumer)
    assert [record.value for record in records] == [Click("/a"), None, *_clicks(3)]
    assert [record.key for record in records] == ["ann", "bob", "x", None, "z"]
    assert records[0].headers == (("h", b"1"),)


def test_either_of_them_may_be_left_out(store: LogStore) -> None:
    """Without a serializer, values or keys are bytes."""
    with store.producer(key_serializer=text_codec()) as producer:
        producer.send("clicks", b"{}", "k")
        with pytest.raises(segmentlog.InvalidRecord):
            producer.send("clicks", "text", "k")  # type: ignore[arg-type]
    with store.consumer("clicks", key_deserializer=text_codec()) as consumer:
        assert [(record.key, record.value) for record in consumer] == [("k", b"{}")]
    with store.consumer("clicks", deserializer=json_codec()) as consumer:
        assert [(record.key, record.value) for record in consumer] == [(b"k", {})]


def test_batches_and_slices_of_them_have_objects(store: LogStore) -> None:
    """Columns of a batch hold objects; values in Arrow stay the encoded bytes."""
    with store.producer(serializer=CODEC) as producer:
        producer.send_many("clicks", _clicks(10))
    with store.consumer("clicks", deserializer=CODEC) as consumer:
        (batch,) = consumer.batches()
    assert batch.values == _clicks(10)
    assert batch.slice(3, 5).values == _clicks(10)[3:5]
    assert [record.value for record in batch.slice(8)] == _clicks(10)[8:]
    assert batch.keys == [None] * 10
    assert msgspec.json.decode(batch.to_arrow()["value"][9].as_py()) == {"page": "/9", "count": 9}


def test_an_async_iteration_has_objects(store: LogStore) -> None:
    """`async for` over the same consumer returns objects, too."""

    async def read() -> list[Click | None]:
        with store.consumer("clicks", deserializer=CODEC) as consumer:
            return [record.value async for record in consumer]

    with store.producer(serializer=CODEC) as producer:
        producer.send_many("clicks", _clicks(5))
    assert asyncio.run(read()) == _clicks(5)


def test_what_cannot_be_serialized_sends_nothing(store: LogStore) -> None:
    """The error has the index, the column and the cause; the producer still works."""
    with store.producer(serializer=CODEC, key_serializer=text_codec()) as producer:
        with pytest.raises(SerializationError, match=r"values\[0\] cannot be serialized.*nothing was sent") as raised:
            producer.send("clicks", object())  # type: ignore[arg-type]
        assert isinstance(raised.value.__cause__, TypeError)
        with pytest.raises(SerializationError, match=r"keys\[1\]") as raised:
            producer.send_many("clicks", _clicks(3), keys=["a", 3, "c"])  # type: ignore[list-item]
        assert (raised.value.topic, raised.value.index) == ("clicks", 1)
        assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)
        with pytest.raises(segmentlog.InvalidTopicName):
            producer.send("no/topic", Click(""))
        with pytest.raises(segmentlog.InvalidRecord, match="part of one str"):
            producer.send_many("clicks", "abc")  # type: ignore[arg-type]
        producer.send("clicks", Click("/after"))
    assert len(list(store.consumer("clicks"))) == 1


class _Odd:
    """A serializer that returns one value too few, or claims that the store is closed."""

    error: Exception | None = None

    def serialize(self, topic: str, values: Sequence[object]) -> list[bytes | None]:
        if self.error is not None:
            raise self.error
        return [b"x"] * max(len(values) - 1, 1)

    def deserialize(self, topic: str, data: Sequence[bytes | None]) -> Sequence[object]:
        if self.error is not None:
            raise self.error
        return [*data][:-1]


def test_what_is_not_about_an_object_is_raised_as_it_is(store: LogStore) -> None:
    """A serializer that has lost its registry; and one that makes fewer than it was given is refused."""
    odd = _Odd()
    with store.producer(serializer=odd) as producer:
        producer.send("clicks", 1)
        with pytest.raises(SerializationError, match="_Odd returned 2 values for 3 objects"):
            producer.send_many("clicks", [1, 2, 3])
        odd.error = segmentlog.StoreClosed("registry")
        with pytest.raises(segmentlog.StoreClosed):
            producer.send("clicks", 1)
        with pytest.raises(segmentlog.StoreClosed):
            producer.send_many("clicks", [1, 2])
    with store.consumer("clicks", deserializer=odd) as consumer:
        with pytest.raises(segmentlog.StoreClosed):
            next(consumer)
        assert consumer.position("clicks") == 0
        odd.error = None
        with pytest.raises(DeserializationError, match="_Odd returned 0 objects for 1 values"):
            next(consumer)


def _with_bad_ones(store: LogStore) -> None:
    good = CODEC.serialize("clicks", _clicks(10))
    log = store.topic("clicks").partition(0)
    log.append([*good[:4], b"bad", *good[5:8], b"{}", b"3"])


def test_a_bad_record_raises_where_it_is(store: LogStore) -> None:
    """All earlier records are returned, the position is its offset, and a seek past it works."""
    _with_bad_ones(store)
    with store.consumer("clicks", deserializer=CODEC) as consumer:
        found: list[Any] = []
        errors: list[DeserializationError] = []
        for _ in range(3):
            with pytest.raises(DeserializationError) as raised:
                found.extend(_counts(consumer))
            errors.append(raised.value)
            assert consumer.position("clicks") == raised.value.offset
            consumer.seek("clicks", 0, raised.value.offset + 1)
        assert list(consumer) == []
    assert found == [0, 1, 2, 3, 5, 6, 7]
    assert [(error.offset, error.column, error.data) for error in errors] == [
        (4, "value", b"bad"), (8, "value", b"{}"), (9, "value", b"3"),
    ]  # fmt: skip
    assert "clicks/0: the value at offset 4 cannot be deserialized" in str(errors[0])
    assert errors[0].__cause__ is not None
    assert str(pickle.loads(pickle.dumps(errors[0]))) == str(errors[0])


def _counts(consumer: Any) -> Iterator[int]:
    return (record.value.count for record in consumer)


def test_a_bad_record_raises_again_until_it_is_passed(store: LogStore) -> None:
    """This also holds between batches; earlier records of its batch are returned as a batch."""
    _with_bad_ones(store)
    with store.consumer("clicks", deserializer=CODEC) as consumer:
        batches = consumer.batches()
        assert next(batches).values == _clicks(10)[:4]
        for _ in range(2):
            with pytest.raises(DeserializationError):
                next(batches)
            batches = consumer.batches()
        assert consumer.positions() == {("clicks", 0): 4}


def test_bad_records_can_be_skipped(store: LogStore) -> None:
    """`Consumer.bad` lists the skipped records; the position is after all of them."""
    _with_bad_ones(store)
    with store.consumer("clicks", deserializer=CODEC, on_error="skip") as consumer:
        assert [record.offset for record in consumer] == [0, 1, 2, 3, 5, 6, 7]
        assert [error.offset for error in consumer.bad] == [4, 8, 9]
        assert consumer.position("clicks") == 10
        consumer.seek("clicks", 0, 2)
        assert [batch.offsets.tolist() for batch in consumer.batches()] == [[2, 3], [5, 6, 7]]
        assert consumer.lag() == {("clicks", 0): 0}


def test_bad_records_can_be_handed_over(store: LogStore) -> None:
    """The callback gets the bytes and the reason, for example for a dead-letter topic."""
    _with_bad_ones(store)
    with store.consumer("clicks", deserializer=CODEC, key_deserializer=text_codec(), on_error="yield") as consumer:
        values: list[Any] = [record.value for record in consumer]
    assert [value for value in values if isinstance(value, Click)] == [*_clicks(4), *_clicks(8)[5:]]
    bad = values[4]
    assert isinstance(bad, Undecodable)
    assert (bad.data, bad.error.offset) == (b"bad", 4)


def test_a_seek_in_the_middle_of_a_batch_with_bad_ones(store: LogStore) -> None:
    """Goes where it says, whatever pieces of the batch were to come."""
    _with_bad_ones(store)
    with store.consumer("clicks", deserializer=CODEC, on_error="skip") as consumer:
        offsets = []
        for record in consumer:
            offsets.append(record.offset)
            if offsets == [0, 1]:
                consumer.seek("clicks", 0, 6)
    assert offsets == [0, 1, 6, 7]


def test_a_group_commits_up_to_the_bad_record(store: LogStore) -> None:
    """The next member of the group gets the bad record again."""
    _with_bad_ones(store)
    for _ in range(2):
        with (
            store.consumer("clicks", deserializer=CODEC, group="g", auto_commit=True) as consumer,
            pytest.raises(DeserializationError),
        ):
            list(consumer)
        committed = consumer.committed("clicks")
        assert committed is not None
        assert committed.offset == 4


def test_what_is_no_serializer_is_refused(store: LogStore) -> None:
    """The constructors of producer and consumer refuse it."""
    for options in ({"serializer": 3}, {"key_serializer": json_codec}):
        with pytest.raises(segmentlog.InvalidConfig, match="a method `serialize`"):
            store.producer(**options)
    for options in ({"deserializer": 3}, {"key_deserializer": json_codec}):
        with pytest.raises(segmentlog.InvalidConfig, match="a method `deserialize`"):
            store.consumer("clicks", **options)
    with pytest.raises(segmentlog.InvalidConfig, match="on_error"):
        store.consumer("clicks", on_error="ignore")  # type: ignore[call-overload]


def test_what_the_checker_of_types_is_told(store: LogStore) -> None:
    """Records and batches have the types of the codecs; without any they are bytes."""
    with store.producer(serializer=CODEC) as producer:
        producer.send("clicks", Click("/typed"))
    with store.consumer("clicks", deserializer=CODEC) as consumer:
        for record in consumer:
            click: Click | None = record.value
            key: bytes | None = record.key
            assert click == Click("/typed")
            assert key is None
    with store.consumer("clicks") as plain:
        record_of_bytes: segmentlog.Record = next(plain)
        assert isinstance(record_of_bytes.value, bytes)
