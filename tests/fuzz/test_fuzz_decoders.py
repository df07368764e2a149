"""Hostile bytes: whatever is in a file, decoding it gives a value or the documented error, soon, and in little memory.

SEGMENTLOG_FUZZ_EXAMPLES is the number of examples of each property.
"""

from __future__ import annotations

import json
import struct
import tracemalloc
from collections.abc import Callable
from typing import Any

import cramjam
import msgspec
import pytest
from batches import Columns, batch_bytes, columns, forge, unpack_header
from fuzz.decoders import DECODERS, forged_file, forged_slot, fuzzed, fuzzed_slowly, segment, state, topic_json_by_store
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from wire import foreign, sent, stored

from segmentlog.errors import CorruptBatch, InvalidTopicName
from segmentlog.format.batch import HEADER_SIZE, check_payload, decode_header
from segmentlog.format.batch_codecs import CODEC_LZ4, CODECS
from segmentlog.format.checkpoint import Checkpoint, encode_slot
from segmentlog.format.control import encode_marker
from segmentlog.format.file_names import check_topic_name
from segmentlog.format.index_file import encode_entries
from segmentlog.format.producer_snapshot import (
    AbortedTransaction,
    ProducerEntry,
    SequenceRun,
    encode_aborted,
    encode_snapshot,
)
from segmentlog.format.record_batch import RecordBatch
from segmentlog.records import EpochStart, LostRange

# ---------------------------------------------------------------- what goes in

u8, u16, u32, u64 = (st.integers(0, 2**bits - 1) for bits in (8, 16, 32, 64))
edges = st.sampled_from([0, 1, 2, 95, 96, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63 - 2, 2**62])
blobs = st.none() | st.binary(max_size=20)


@st.composite
def mutated(draw: st.DrawFn, original: st.SearchStrategy[bytes]) -> bytes:
    """Bytes that were right: flipped here and there, cut, with pieces of themselves in other places."""
    data = bytearray(draw(original))
    for _ in range(draw(st.integers(1, 4))):
        at, to = draw(st.integers(0, len(data))), draw(st.integers(0, len(data)))
        kind = draw(st.integers(0, 4))
        if kind == 0 and at < len(data):
            data[at] ^= draw(st.integers(1, 255))
        elif kind == 1:
            data[at:at] = draw(st.binary(max_size=12))
        elif kind == 2:
            del data[min(at, to) : max(at, to)]
        elif kind == 3:
            data[at:at] = data[min(at, to) : max(at, to)][:300]
        else:
            data[at : at + 8] = draw(edges).to_bytes(8, "little")[: len(data[at : at + 8])]
    return bytes(data)


@st.composite
def whole_batch(draw: st.DrawFn) -> bytes:
    """Return a batch as it should be."""
    codec = draw(st.sampled_from([codec.number for codec in CODECS]))
    made: Columns = draw(columns(max_size=8))
    if draw(st.integers(0, 3)) == 0:
        return stored(foreign(draw(sent()), draw(st.integers(0, 4))), draw(st.integers(0, 1000)))
    if codec:  # small ones are not compressed
        made = Columns([b"v" * 300, *made.values[1:]], made.keys, made.timestamps, made.headers, made.offset_deltas)
    return batch_bytes(made, draw(st.integers(0, 1000)), codec=codec)


@st.composite
def forged_fields(draw: st.DrawFn) -> bytes:
    """Return a batch with fields of its header, or its payload, changed, and checksums that match."""
    data = draw(whole_batch())
    header = unpack_header(data)
    payload = draw(st.none() | mutated(st.just(data[HEADER_SIZE:])))
    fields: dict[str, Any] = {}
    sizes = {
        "attributes": 16, "partition_epoch": 32, "last_offset_delta": 32, "record_count": 32, "payload_size": 32,
        "raw_size": 32, "timestamps_size": 32, "keys_size": 32, "values_size": 32, "headers_size": 32,
    }  # fmt: skip
    for name in draw(st.lists(st.sampled_from(sorted(sizes)), max_size=4, unique=True)):
        near = st.integers(-9, 9).map(lambda by, name=name: header[name] + by)
        fields[name] = draw(near | st.integers(0, 2**32 - 1)) % 2 ** sizes[name]
    if draw(st.booleans()):
        fields["base_offset"] = draw(st.integers(-(2**63), 2**63 - 1))
    for name in ("base_timestamp", "max_timestamp"):
        if draw(st.booleans()):
            fields[name] = draw(st.integers(-(2**63), 2**63 - 1))
    if payload is not None and draw(st.booleans()):
        fields |= {"payload_size": len(payload), "raw_size": len(payload)}
    return forge(data, payload=payload, **fields)


segments = st.lists(whole_batch(), min_size=1, max_size=4).map(b"".join)
"""Offsets go back in most of them."""

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=5,
)
documents = st.fixed_dictionaries(
    {}, optional={"format": st.just(1) | json_values, "store_id": json_values, "partitions": json_values,
                  "config": json_values | st.dictionaries(
                      st.sampled_from(["retention.ms", "segment.bytes", "fsync", "compression.type"]), json_values)},
).map(lambda one: json.dumps(one).encode())  # fmt: skip
hostile_json = [
    b"[" * 100_000,
    b'{"format": 1, "store_id": ' + b'{"a":' * 100_000,
    b'{"format": 1, "partitions": 1e999, "config": {}, "store_id": "x"}',
    b'{"format": 1, "partitions": 1000000000000000000, "config": {}}',
    b'{"format": 1, "partitions": ' + b"9" * 5000 + b', "config": {}}',
    b'{"format": 1, "partitions": -1, "config": {}}',
    b'{"format": 1, "partitions": true, "config": {}}',
    b'{"format": 1, "partitions": NaN, "config": {}}',
    b'{"format": 1, "partitions": 1, "config": []}',
    b'{"format": 1, "store_id": "\\ud800"}',
    b"\xff\xfe{\0}\0",
]


# ---------------------------------------------------------------- properties


@pytest.mark.parametrize("name", DECODERS)
@fuzzed
@given(data=st.binary(max_size=400))
def test_random_bytes(name: str, data: bytes) -> None:
    """Every decoder gets random bytes."""
    DECODERS[name](data)


@pytest.mark.parametrize("name", ["batch", "forged_batch", "walks"])
@fuzzed
@given(data=mutated(segments))
def test_mutated_batches(name: str, data: bytes) -> None:
    """Decoders get the bytes of batches with something wrong."""
    DECODERS[name](data)


@fuzzed
@given(data=forged_fields())
def test_forged_batches(data: bytes) -> None:
    """Right checksums over headers and columns that are not."""
    DECODERS["batch"](data)
    DECODERS["walks"](data)


@fuzzed
@given(
    items=st.lists(blobs | st.integers() | st.text(max_size=5) | st.lists(blobs, max_size=3), max_size=40),
    count=st.integers(0, 60),
)
def test_columns_of_other_types(items: list[Any], count: int) -> None:
    """MessagePack that is right, of things that are not."""
    items = [item if not isinstance(item, int) or -(2**63) <= item < 2**64 else 0 for item in items]
    DECODERS["columns"](struct.pack("<H", count) + msgspec.msgpack.encode(items))


@fuzzed
@given(data=mutated(st.lists(st.tuples(u32, u32, st.integers(0, 2**63 - 1)), min_size=1, max_size=9).map(
    lambda rows: b"".join(encode_entries(*_arrays(rows)))
)))  # fmt: skip
def test_mutated_indexes(data: bytes) -> None:
    """The indexes have wrong entries."""
    DECODERS["index"](data)


def _arrays(rows: list[tuple[int, int, int]]) -> Any:
    import numpy as np

    relative, positions, stamps = zip(*rows, strict=True)
    return np.array(relative, np.uint32), np.array(positions, np.uint32), np.array(stamps, np.int64)


wild = st.integers(-2, 300) | st.integers(-(2**63), 2**64 - 1)
checkpoints = st.builds(
    Checkpoint, wild, wild, wild, wild, wild, st.booleans(), st.text(max_size=5),
    st.lists(st.builds(EpochStart, wild, wild), max_size=3).map(tuple),
    st.lists(st.builds(LostRange, wild, wild, wild, st.just("why"), wild), max_size=3).map(tuple),
)  # fmt: skip


@fuzzed
@given(data=mutated(st.builds(encode_slot, checkpoints, st.integers(0, 2**64 - 1))))
def test_mutated_checkpoints(data: bytes) -> None:
    """Slots with something wrong, and bodies with something wrong under a right checksum."""
    DECODERS["checkpoint"](data)
    DECODERS["checkpoint"](forged_slot(data[24:]) * 2)


any_number = st.integers(-(2**63), 2**63 - 1) | st.integers(-2, 20)
entries = st.lists(
    st.builds(
        ProducerEntry, any_number, any_number,
        st.lists(st.builds(SequenceRun, any_number, any_number, any_number), max_size=6).map(tuple),
        any_number, any_number, any_number, any_number,
    ),
    max_size=4,
)  # fmt: skip
aborts = st.lists(st.builds(AbortedTransaction, any_number, any_number, any_number), max_size=5)


@fuzzed
@given(data=mutated(st.builds(encode_snapshot, entries) | st.builds(encode_aborted, any_number, aborts)))
def test_mutated_files_of_producers(data: bytes) -> None:
    """Snapshots and lists of aborts with something wrong, and with any body under a right checksum."""
    DECODERS["producers"](data)


@fuzzed
@given(body=json_values.map(lambda one: msgspec.msgpack.encode(_small(one))))
def test_files_of_producers_of_other_types(body: bytes) -> None:
    """MessagePack that is right, of things that are not."""
    DECODERS["producers"](body)


def _small(item: Any) -> Any:
    """Replace numbers that MessagePack cannot store."""
    if isinstance(item, list):
        return [_small(one) for one in item]
    if isinstance(item, dict):
        return {key: _small(value) for key, value in item.items()}
    return item if not isinstance(item, int) or -(2**63) <= item < 2**64 else 0


def marker_bytes(producer_id: int, epoch: int, committed: bool, first_offset: int) -> bytes:
    """Return a control batch as it should be."""
    made = encode_marker(producer_id, epoch, committed=committed, first_offset=first_offset, now_ms=1)
    return bytes(made.placed_at(9, 1)) + bytes(made.payload)


markers = st.builds(
    marker_bytes, st.integers(-1, 2**63 - 1), st.integers(-1, 2**15 - 1), st.booleans(), st.integers(0, 2**63)
)


@fuzzed
@given(data=mutated(markers))
def test_mutated_markers(data: bytes) -> None:
    """Control batches with something wrong: also where only their payload is, under right checksums."""
    DECODERS["marker"](data)
    DECODERS["forged_marker"](data[HEADER_SIZE:])
    DECODERS["forged_batch"](data)


@fuzzed
@given(words=st.dictionaries(st.integers(0, 90), u64, max_size=40))
def test_state_pages(words: dict[int, int]) -> None:
    """Decoders get pages with any numbers in any words."""
    page = bytearray(4096)
    for word, value in words.items():
        struct.pack_into("=Q", page, 8 * word, value)
    state(bytes(page))


@pytest.mark.parametrize("name", ["store_json", "topic_json"])
@fuzzed
@given(data=documents | mutated(documents))
def test_json_documents(name: str, data: bytes) -> None:
    """Decoders get JSON that may be another document."""
    DECODERS[name](data)


@pytest.mark.parametrize("data", hostile_json, ids=range(len(hostile_json)))
def test_hostile_json(data: bytes) -> None:
    """Endless nesting and numbers that are not finite cause a finding."""
    DECODERS["topic_json"](data)


@pytest.mark.parametrize("number", range(len(hostile_json)))
@pytest.mark.parametrize("name", ["store_json", "topic_json_by_store"])
def test_hostile_json_by_store(name: str, number: int) -> None:
    """The store reports hostile JSON with one of its errors."""
    (DECODERS | {"topic_json_by_store": topic_json_by_store})[name](hostile_json[number])


@fuzzed
@given(data=documents | mutated(documents))
def test_topic_documents_by_store(data: bytes) -> None:
    """The store reads or refuses any topic document."""
    topic_json_by_store(data)


@fuzzed
@given(name=st.text(max_size=300) | st.integers() | st.none() | st.binary(max_size=5) | st.lists(u8, max_size=2))
@example("a" * 250)
@example("..")
@example("\ud800")
def test_topic_names(name: object) -> None:
    """A name that is allowed stays inside its folder; any other is refused, whatever it is."""
    try:
        allowed = check_topic_name(name)
    except InvalidTopicName as error:
        str(error)
    else:
        assert allowed == name
        assert not {"/", "\0"} & set(allowed)
        assert allowed.strip(".")


# ---------------------------------------------------------------- as a partition


@settings(fuzzed_slowly, suppress_health_check=[HealthCheck.too_slow])
@given(
    data=st.binary(max_size=300) | segments | mutated(segments) | st.lists(forged_fields(), max_size=3).map(b"".join)
)
def test_a_segment_as_a_partition(data: bytes) -> None:
    """A segment of whatever bytes can be verified, opened, read and appended to, or says why not."""
    segment(data)


def _is_far_from_the_end(checkpoint: Checkpoint) -> bool:
    """Return whether offsets and epochs leave room to continue. Otherwise appends end in a struct.error."""
    offsets = [checkpoint.recovery_offset, checkpoint.recovery_segment, checkpoint.offset_ceiling]
    offsets += [one.end_offset for one in checkpoint.lost_ranges]
    epochs = [one.epoch for one in (*checkpoint.epochs, *checkpoint.lost_ranges)]
    return max(offsets) < 2**62 and max(epochs) < 2**31


@settings(fuzzed_slowly, suppress_health_check=[HealthCheck.too_slow])
@given(
    data=segments,
    checkpoint=checkpoints.filter(lambda one: one.epochs and _is_far_from_the_end(one)),
    twice=st.booleans(),
)
@example(  # a position that no index entry can hold
    data=batch_bytes([b"x"]), checkpoint=Checkpoint(1, 1, 1 << 32, epochs=(EpochStart(0, 0),)), twice=False
)
@example(  # the segment begins after the offset that should be in it
    data=batch_bytes([b"x"]), checkpoint=Checkpoint(0, 1, 0, 1, 0, False, epochs=(EpochStart(0, 0),)), twice=True
)
@example(  # the segment is missing, after the last one
    data=batch_bytes([b"x"]), checkpoint=Checkpoint(1, 1, 0, 1, 0, False, epochs=(EpochStart(0, 0),)), twice=True
)
def test_a_forged_checkpoint(data: bytes, checkpoint: Checkpoint, twice: bool) -> None:
    """A checkpoint that claims anything at all, under a right checksum, beside a segment."""
    slot = encode_slot(checkpoint, 1).ljust(4096, b"\0")
    segment(data, {"checkpoint": slot + (slot if twice else bytes(4096))})


@settings(fuzzed_slowly, suppress_health_check=[HealthCheck.too_slow])
@given(data=segments, index=mutated(st.binary(max_size=64)), times=mutated(st.binary(max_size=128)))
def test_forged_indexes(data: bytes, index: bytes, times: bytes) -> None:
    """A segment is read beside indexes with any contents."""
    segment(data, {f"{0:020d}.index": index, f"{0:020d}.timeindex": times})


@settings(fuzzed_slowly, suppress_health_check=[HealthCheck.too_slow])
@given(
    data=st.lists(markers | whole_batch(), min_size=1, max_size=4).map(b"".join),
    snapshot=st.builds(encode_snapshot, entries) | st.binary(max_size=40),
    aborted=st.builds(encode_aborted, st.integers(0, 500), aborts) | st.binary(max_size=40),
)
def test_forged_files_of_producers(data: bytes, snapshot: bytes, aborted: bytes) -> None:
    """A snapshot and a list of aborts that claim anything at all, beside a segment with markers."""
    stem = f"{0:020d}"
    segment(data, {f"{stem}.snapshot": snapshot, f"{stem}.txnindex": aborted})


# ---------------------------------------------------------------- memory


def peak_of(action: Callable[[], object]) -> int:
    """Bytes that Python and what it calls had allocated at most."""
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def read(data: bytes) -> None:
    """Decode a batch as far as its values."""
    view = memoryview(data)
    header = decode_header(view, 0)
    _ = RecordBatch(header, check_payload(view, 0, header)).values


@pytest.mark.parametrize("raw_size", [500 << 20, (512 << 20) - 1, 2**32 - 1, 512 << 20])
@pytest.mark.parametrize("codec", [codec.number for codec in CODECS])
def test_a_few_bytes_do_not_take_500_megabytes(raw_size: int, codec: int) -> None:
    """A header that claims far more than its payload can hold is refused before anything is allocated for it."""
    small = batch_bytes([b"v" * 300] * 4, codec=codec)
    for count in (4, raw_size, raw_size // 2):
        for other in ({}, {"payload_size": raw_size}):
            data = forge(small, raw_size=raw_size, values_size=raw_size, record_count=count % 2**32, **other)

            def refused(data: bytes = data) -> None:
                with pytest.raises(CorruptBatch):
                    read(data)

            assert peak_of(refused) < 4 << 20


@pytest.mark.parametrize("size", [1000, 100_000])
def test_memory_is_bounded_by_what_lies_there(size: int) -> None:
    """LZ4 makes 255 bytes of one at best, and a null of one byte takes eight in a list: never more than that."""
    count = size * 200
    values = b"\xdd" + count.to_bytes(4, "big") + b"\xc0" * count
    payload = bytes(cramjam.lz4.compress_block(values, store_size=False))
    data = forge(
        batch_bytes([b"x"]), payload=payload, attributes=CODEC_LZ4, payload_size=len(payload), raw_size=len(values),
        values_size=len(values), record_count=count, last_offset_delta=count - 1,
    )  # fmt: skip
    assert peak_of(lambda: read(data)) < 255 * 10 * len(payload) + (1 << 20)


def test_a_column_that_announces_too_much() -> None:
    """The numbers of items in MessagePack are believed no further than there are bytes."""
    for body in (b"\xdd\xff\xff\xff\xff", b"\x91\xc6\xff\xff\xff\xff", b"\x91\xdd\xff\xff\xff\xff", b"\x91" * 5000):
        data = struct.pack("<H", 0) + body
        assert peak_of(lambda data=data: DECODERS["columns"](data)) < 1 << 20
        made = forge(
            batch_bytes([b"x"]), payload=body, payload_size=len(body), raw_size=len(body), values_size=len(body),
        )  # fmt: skip
        assert peak_of(lambda made=made: DECODERS["batch"](made)) < 1 << 20


def test_a_file_of_producers_that_announces_too_much() -> None:
    """Arrays are believed no further than there are bytes."""
    for body in (b"\xdd\xff\xff\xff\xff", b"\x92\x01\xdd\xff\xff\xff\xff", b"\x91\x93\x01\x01\xdd\xff\xff\xff\xff"):
        for magic in (b"SLP\x01", b"SLT\x01"):
            made = forged_file(magic, body)
            assert peak_of(lambda made=made: DECODERS["producers"](made)) < 1 << 20
