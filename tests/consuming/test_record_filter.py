"""Which records a filter finds: by key, value, JSON path and header, forwards and from the end."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
from seeds import seeds

import segmentlog
from segmentlog.consuming.record_filter import RecordFilter, key_bytes
from segmentlog.errors import InvalidConfig
from segmentlog.log.partition import Partition
from segmentlog.schemas.any_values import document_decoder
from segmentlog.schemas.avro_values import AvroSerializer
from segmentlog.schemas.json_values import JsonSerializer
from segmentlog.store import LogStore


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LogStore]:
    """Provide an empty store."""
    with segmentlog.open(tmp_path / "store", background=False) as opened:
        yield opened


@pytest.fixture
def log(store: LogStore) -> Partition:
    """300 records in batches of several sizes, some without keys or headers."""
    log = store.create_topic("t", fsync="never", segment_records=40).partition(0)
    for first in range(0, 300, 5):
        values = [b'{"at": %d, "third": %d}' % (at, at % 3) for at in range(first, first + 5)]
        keys = [b"k%d" % (at % 10) if at % 4 else None for at in range(first, first + 5)] if first % 2 else None
        headers = [[("h", b"%d" % (at % 5))] for at in range(first, first + 5)] if first % 3 else None
        log.append(values, keys=keys, headers=headers)
    return log


FILTERS = [
    RecordFilter(), RecordFilter.parse(key="k3"), RecordFilter.parse(key_prefix="k"), RecordFilter.parse(value='3": 1'),
    RecordFilter.parse(path="third == 2"), RecordFilter.parse(header="h = 3"), RecordFilter.parse(header="h"),
    RecordFilter.parse(key_prefix="k", path="at > 150", header="h==1"), RecordFilter.parse(key="nobody"),
    RecordFilter(key=b""),
]  # fmt: skip


@pytest.mark.parametrize("wanted", FILTERS)
def test_parts_have_the_records_that_fit(log: Partition, wanted: RecordFilter) -> None:
    """They have the same records in the same order as `records`."""
    one_by_one = [record for batch in log.read(0) for record in wanted.records(batch)]
    in_parts = [record for batch in log.read(0) for part in wanted.parts(batch) for record in part]
    assert in_parts == one_by_one
    if wanted.matches_all:
        assert len(one_by_one) == 300


@pytest.mark.parametrize("seed", seeds("record-filter"))
def test_the_last_ones_are_found_from_the_end(log: Partition, seed: int) -> None:
    """The search finds the requested number of records, or all that fit, before any end."""
    chance = random.Random(seed)
    for wanted in FILTERS:
        for _ in range(5):
            count, end = chance.randrange(70), chance.randrange(301)
            fitting = [
                record.offset for batch in log.read(0) for record in wanted.records(batch) if record.offset < end
            ]
            found = [record.offset for part in wanted.last(log, count, end) for record in part]
            assert found == (fitting[-count:] if count else [])


def test_the_last_ones_take_little_memory(store: LogStore) -> None:
    """Memory is bounded by the returned parts, for any number of earlier matches."""
    log = store.create_topic("large", fsync="never", compression_type="lz4").partition(0)
    for size in (200, 300):
        for _ in range(size):
            log.append([b"hit" + bytes(1000) if size == 200 else b"miss"] * 64)
    tracemalloc.start()
    try:
        found = RecordFilter.parse(value="hit").last(log, 5, log.log_end_offset)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert [record.offset for part in found for record in part] == list(range(200 * 64 - 5, 200 * 64))
    assert peak_bytes < 3 << 20  # all that fit have 13 MB


def test_the_last_ones_beyond_a_lost_range(log: Partition) -> None:
    """Offsets that a truncation took away are skipped."""
    log.truncate(250)
    log.append([b'{"third": 2}'])
    found = [
        record.offset
        for part in RecordFilter.parse(path="third == 2").last(log, 3, log.log_end_offset)
        for record in part
    ]
    assert found == [245, 248, log.log_end_offset - 1]


def test_a_path_looks_into_values_that_are_written_by_a_schema(store: LogStore) -> None:
    """Avro and JSON Schema values are decoded by the registry. A value that cannot be decoded does not match."""
    clicks = {"type": "record", "name": "Click", "fields": [{"name": "page", "type": "string"}]}
    store.create_topic("avro")
    store.create_topic("json")
    with store.producer(serializer=AvroSerializer(store.schemas, clicks)) as producer:
        producer.send_many("avro", [{"page": "/home"}, {"page": "/cart"}])
    with store.producer(serializer=JsonSerializer(store.schemas, {"type": "object"})) as producer:
        producer.send_many("json", [{"page": "/home"}, {"page": "/cart"}])
    store.topic("avro").partition(0).append([b'{"page": "/cart"}', b"\0\0\0\1\0/cart", b"\0\0\0\0\1/cart", b"\0", None])
    wanted = RecordFilter.parse(path="page == '/cart'", decode=document_decoder(store.schemas))
    for topic, offsets in (("avro", [1, 2]), ("json", [1])):
        found = [record.offset for batch in store.topic(topic).partition(0).read(0) for record in wanted.records(batch)]
        assert found == offsets


@pytest.mark.parametrize("header", ["=", "= 7", "==7", " =x"])
def test_a_header_needs_a_name(header: str) -> None:
    """A filter without a name would find nothing, so it is refused."""
    with pytest.raises(InvalidConfig, match="NAME or NAME=VALUE"):
        RecordFilter.parse(header=header)


def test_keys_are_typed_as_text_or_as_bytes() -> None:
    """``0x`` counts only before hexadecimal digits."""
    assert key_bytes("user-1") == b"user-1"
    assert key_bytes("0x00ff") == b"\x00\xff"
    assert key_bytes("0xyz") == b"0xyz"
    assert key_bytes("é") == "é".encode()
