"""A batch comes back as it was written, or not at all: damage never passes for data."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import cramjam
import numpy as np
import pytest
from batches import (
    HEADER_FIELDS,
    NOW_MS,
    Columns,
    batch_bytes,
    codecs,
    columns,
    expected_records,
    forge,
    offsets,
    read_batch,
    read_everything,
    unpack_header,
)
from hypothesis import assume, given
from hypothesis import strategies as st

from segmentlog.errors import CorruptBatch, RecordTooLarge, UnreadableBatch
from segmentlog.format.batch import (
    CODEC_MASK,
    CONTROL,
    HEADER_SIZE,
    KAFKA_LAYOUT,
    LOG_APPEND_TIME,
    MAX_RAW_SIZE,
    TRANSACTIONAL,
    check_payload,
    decode_header,
    decompress,
)
from segmentlog.format.batch_codecs import CODEC_LZ4, CODEC_NAMES, CODEC_NONE, CODECS, UNCOMPRESSED
from segmentlog.format.encode import encode_batch

FULL = Columns(
    [b"value 1", None, b"value 3" * 50],
    [b"k1", b"k2", None],
    [NOW_MS, NOW_MS - 5, NOW_MS + 5],
    [(("name", b"x"),), (), (("a", None), ("b", b""))],
    [0, 3, 9],
)
"""A batch with every column."""

every_codec = pytest.mark.parametrize("codec", [codec.number for codec in CODECS], ids=CODEC_NAMES)


def is_refused(data: bytes | memoryview) -> bool:
    """Return whether a reader of the whole batch gets `CorruptBatch`."""
    try:
        read_everything(data)
    except CorruptBatch:
        return True
    return False


# ---------------------------------------------------------------- round trips


@pytest.mark.long
@given(given=columns(), base_offset=offsets, epoch=st.integers(0, 2**32 - 1), codec=codecs)
def test_a_batch_comes_back(given, base_offset, epoch, codec):
    """Every record has its offset, epoch, timestamp, key, value and headers after decoding."""
    data = batch_bytes(given, base_offset, epoch=epoch, codec=codec)
    assert list(read_batch(data).records()) == expected_records(given, base_offset, epoch=epoch)


@given(
    given=columns(),
    attributes=st.integers(0, 2**16 - 1).map(lambda bits: bits & ~CODEC_MASK & ~LOG_APPEND_TIME & ~KAFKA_LAYOUT),
    producer_id=st.integers(-1, 2**63 - 1),
    producer_epoch=st.integers(-1, 2**15 - 1),
    base_sequence=st.integers(-1, 2**31 - 1),
)
def test_a_header_carries_what_it_was_given(given, attributes, producer_id, producer_epoch, base_sequence):
    """Producer, sequence and attributes are those given; counts, sizes and times are those of the columns."""
    data = batch_bytes(
        given,
        7,
        epoch=3,
        attributes=attributes,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        base_sequence=base_sequence,
    )
    header = decode_header(memoryview(data), 0)
    times = given.timestamps or [NOW_MS]
    deltas = given.offset_deltas or range(len(given))
    assert header.attributes == attributes
    assert (header.producer_id, header.producer_epoch, header.base_sequence) == (
        producer_id,
        producer_epoch,
        base_sequence,
    )
    assert (header.base_timestamp, header.max_timestamp) == (times[0], max(times))
    assert (header.record_count, header.last_offset_delta) == (len(given), deltas[-1])
    assert (header.base_offset, header.next_offset, header.partition_epoch) == (7, 8 + deltas[-1], 3)
    assert header.size_bytes == len(data)
    columns = header.timestamps_size + header.keys_size + header.values_size + header.headers_size
    assert header.raw_size == header.payload_size == header.offset_deltas_size + columns
    assert header.is_control == bool(attributes & CONTROL)


def test_a_batch_knows_its_attributes():
    """Transactional and control are bits of their own; neither touches the codec."""
    data = batch_bytes([b"x" * 500], codec=CODEC_LZ4, attributes=TRANSACTIONAL | CONTROL)
    header = decode_header(memoryview(data), 0)
    assert header.codec == CODEC_LZ4
    assert header.is_control
    assert header.attributes & TRANSACTIONAL


@given(given=columns(), append_time_ms=st.integers(0, 2**63 - 1))
def test_log_append_time_is_every_records_time(given, append_time_ms):
    """Under LogAppendTime all records have the time of the append, whatever the sender said."""
    batch = read_batch(batch_bytes(given, 5, append_time_ms=append_time_ms))
    assert batch.header.attributes & LOG_APPEND_TIME
    assert (batch.header.base_timestamp, batch.header.max_timestamp) == (append_time_ms, append_time_ms)
    assert {record.timestamp for record in batch} == {append_time_ms} == set(batch.timestamps.tolist())


@given(given=columns(), first=offsets, second=offsets)
def test_a_batch_can_be_placed_anywhere(given, first, second):
    """Moving a batch to another offset and epoch changes the header only: the payload is not touched."""
    batch = encode_batch(given.values, given.keys, now_ms=NOW_MS, compression=UNCOMPRESSED)
    payload = bytes(batch.payload)
    for base_offset, epoch in ((first, 1), (second, 2)):
        data = bytes(batch.placed_at(base_offset, epoch)) + bytes(batch.payload)
        assert data[HEADER_SIZE:] == payload
        header = decode_header(memoryview(data), 0)
        assert (header.base_offset, header.partition_epoch) == (base_offset, epoch)
        assert batch.size_bytes == len(data) == header.size_bytes


@every_codec
def test_a_batch_is_read_where_it_lies(codec):
    """A batch between other bytes is read from its position, and no byte around it counts."""
    data = batch_bytes(FULL, 40, codec=codec)
    view = memoryview(b"\xff" * 33 + data + b"\xff" * 50)
    assert read_everything(view, 33) == read_everything(data)


def test_a_payload_that_does_not_shrink_is_stored_raw():
    """Compression never makes a batch larger: random bytes are stored as they are, and say so."""
    noise = np.random.default_rng(1).bytes(5000)
    header = decode_header(memoryview(batch_bytes([noise], codec=CODEC_LZ4)), 0)
    assert (header.codec, header.payload_size) == (CODEC_NONE, header.raw_size)


def test_the_best_compression_is_not_taken_for_a_forgery():
    """Megabytes of one byte, the most that LZ4 can shrink anything, read back."""
    value = bytes(8 << 20)
    data = batch_bytes([value], codec=CODEC_LZ4)
    assert len(data) * 200 < len(value)
    assert read_batch(data).values == [value]


def test_a_batch_beyond_the_limit_is_refused_with_its_size():
    """Columns that take more than the limit raise RecordTooLarge, which says how much they take."""
    assert encode_batch([b"x" * 95], now_ms=0, limit_bytes=98).size_bytes == HEADER_SIZE + 98
    with pytest.raises(RecordTooLarge) as caught:
        encode_batch([b"x" * 96], now_ms=0, limit_bytes=98)
    assert (caught.value.size_bytes, caught.value.limit_bytes) == (99, 98)


def test_a_scratch_buffer_serves_batch_after_batch():
    """Longer and shorter batches built one after another in one buffer do not leak into each other."""
    scratch = bytearray()
    for size in (10, 1000, 3, 300, 0):
        batch = encode_batch([b"x" * size, b"y"], now_ms=1, compression=UNCOMPRESSED, scratch=scratch)
        data = bytes(batch.placed_at(0, 0)) + bytes(batch.payload)
        assert read_batch(data).values == [b"x" * size, b"y"]


# ---------------------------------------------------------------- damage


@every_codec
@pytest.mark.parametrize("bits", [0x01, 0x80, 0xFF])
def test_a_flip_of_any_byte_is_detected(codec, bits):
    """Whichever byte of a batch changes, lengths and checksums included, reading it raises CorruptBatch."""
    data = bytearray(batch_bytes(FULL, 2**33, epoch=5, codec=codec))
    for position in range(len(data)):
        data[position] ^= bits
        assert is_refused(data), f"byte {position}"
        data[position] ^= bits
    assert not is_refused(data)


@every_codec
def test_a_flip_in_the_header_is_detected_without_the_payload(codec):
    """A walk over headers detects a damaged one, too: 88 bytes and their checksum are one unit."""
    data = bytearray(batch_bytes(FULL, 2**33, epoch=5, codec=codec))
    for position in range(HEADER_SIZE):
        data[position] ^= 0x10
        with pytest.raises(CorruptBatch) as caught:
            decode_header(memoryview(data), 0, "a.log")
        assert (caught.value.path, caught.value.position) == ("a.log", 0)
        data[position] ^= 0x10


@every_codec
def test_a_batch_cut_short_anywhere_is_detected(codec):
    """A batch that ends before its last byte is torn, and said to be, at every length."""
    data = memoryview(batch_bytes(FULL, 2**33, epoch=5, codec=codec))
    for size in range(len(data)):
        with pytest.raises(CorruptBatch):
            decode_header(data[:size], 0)
    assert decode_header(data, 0).size_bytes == len(data)


def test_a_position_behind_the_end_is_no_batch():
    """Reading after the last byte raises CorruptBatch, which reports that 0 bytes were found."""
    data = memoryview(batch_bytes(FULL))
    with pytest.raises(CorruptBatch, match="found 0 bytes"):
        decode_header(data, len(data) + 5)


def test_zeros_are_no_batch():
    """Preallocated space is never taken for a batch."""
    with pytest.raises(CorruptBatch, match="magic"):
        decode_header(memoryview(bytes(500)), 100)


def test_damage_is_told_with_place_and_evidence():
    """The error says in which file, at which byte, at which offset, and what was expected there."""
    data = bytearray(b"\0" * 7 + batch_bytes(FULL, 123))
    data[7 + HEADER_SIZE + 5] ^= 1
    with pytest.raises(CorruptBatch) as caught:
        check_payload(memoryview(data), 7, decode_header(memoryview(data), 7), "some.log")
    error = caught.value
    assert (error.path, error.position, error.offset) == ("some.log", 7 + HEADER_SIZE, 123)
    assert "payload checksum" in error.expected
    assert error.found.startswith("0x")


@given(data=st.binary(max_size=400))
def test_arbitrary_bytes_are_no_batch(data):
    """Bytes that are not a batch raise CorruptBatch, and no other error."""
    with pytest.raises(CorruptBatch):
        read_everything(data)


@given(given=columns(max_size=5), codec=codecs, mutate=st.data())
def test_a_mutated_batch_is_refused(given, codec, mutate):
    """Any change of any bytes of a batch raises CorruptBatch, and no other error."""
    data = batch_bytes(given, 9, codec=codec)
    other = bytearray(data)
    for _ in range(mutate.draw(st.integers(1, 4))):
        other[mutate.draw(st.integers(0, len(data) - 1))] = mutate.draw(st.integers(0, 255))
    assume(other != data)
    assert is_refused(other)


# ---------------------------------------------------------------- forgeries: the checksums are right


def field_values(field: str) -> st.SearchStrategy[Any]:
    """Return a strategy of all values of a header field, with extreme ones and those near zero often."""
    size = {"H": (0, 2**16), "h": (-(2**15), 2**15), "I": (0, 2**32), "i": (-(2**31), 2**31)}
    low, end = size.get(HEADER_FIELDS[field], (-(2**63), 2**63))
    return st.integers(low, end - 1) | st.sampled_from([low, end - 1]) | st.integers(0, 40)


@st.composite
def forgeries(draw: st.DrawFn) -> bytes:
    """Return a batch with some header fields, or bytes of the payload, made up, and checksums that vouch for them."""
    data = batch_bytes(draw(columns(max_size=5)), draw(offsets), codec=draw(codecs))
    names = [name for name in HEADER_FIELDS if name not in ("magic", "payload_checksum", "header_checksum")]
    chosen = draw(st.lists(st.sampled_from(names), max_size=3, unique=True))
    payload = bytearray(data[HEADER_SIZE:])
    for _ in range(draw(st.integers(0, 3))):
        payload[draw(st.integers(0, len(payload) - 1))] = draw(st.integers(0, 255))
    return forge(data, payload=bytes(payload), **{name: draw(field_values(name)) for name in chosen})


@given(data=forgeries())
def test_a_forged_batch_is_a_batch_or_refused(data):
    """A forged batch with matching checksums is read completely, or raises CorruptBatch."""
    is_refused(data)


ABSURD: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "no records": lambda header: {"record_count": 0},
    "records without bytes": lambda header: {"record_count": 2**32 - 1, "last_offset_delta": 2**32 - 1},
    "more records than bytes of values": lambda header: {"record_count": header["values_size"] + 1},
    "more records than offsets": lambda header: {"last_offset_delta": header["record_count"] - 2},
    "a payload beyond the file": lambda header: {"payload_size": header["payload_size"] + 1},
    "four gigabytes of payload": lambda header: {"payload_size": 2**32 - 1},
    "half a gigabyte from 100 bytes": lambda header: {"raw_size": 2**29, "attributes": CODEC_LZ4},
    "four gigabytes raw": lambda header: {"raw_size": 2**32 - 1, "attributes": CODEC_LZ4},
    "raw that is not the payload": lambda header: {"raw_size": header["raw_size"] + 1, "attributes": CODEC_NONE},
    "columns beyond the payload": lambda header: {"keys_size": header["raw_size"] + 1},
    "columns that end early": lambda header: {"values_size": header["values_size"] - 1},
    "columns of four gigabytes each": lambda header: {
        name: 2**32 - 1 for name in ("timestamps_size", "keys_size", "values_size", "headers_size")
    },
    "an unknown codec": lambda header: {"attributes": 5},
    "a negative offset": lambda header: {"base_offset": -1},
    "an offset that does not end in an i64": lambda header: {"base_offset": 2**63 - 1 - header["last_offset_delta"]},
    "the last offset of all": lambda header: {"base_offset": 2**63 - 1},
}


@every_codec
@pytest.mark.parametrize("absurd", ABSURD.values(), ids=ABSURD)
def test_an_absurd_header_is_refused_from_the_header_alone(absurd, codec):
    """A header that claims what cannot be is refused before anything is decompressed or allocated for it."""
    value = b"compressible " * 40
    data = batch_bytes([value, value], 10, codec=codec)
    forged = memoryview(forge(data, **absurd(unpack_header(data))))
    tracemalloc.start()
    try:
        with pytest.raises(CorruptBatch):
            decode_header(forged, 0)
        assert tracemalloc.get_traced_memory()[1] < 64 << 10
    finally:
        tracemalloc.stop()


def test_the_last_offsets_of_all_can_be_used():
    """A batch may end right below the largest offset that has one after it."""
    data = batch_bytes([b"a", b"b"], 2**63 - 3)
    assert read_batch(data).offsets.tolist() == [2**63 - 3, 2**63 - 2]
    assert read_batch(data).next_offset == 2**63 - 1


@pytest.mark.parametrize(
    ("raw_size", "payload"),
    [
        (2000, bytes(cramjam.lz4.compress_block(bytes(1000), store_size=False))),  # claims more than it holds
        (500, bytes(cramjam.lz4.compress_block(bytes(1000), store_size=False))),  # and less
        (1000, b"\xff" * 40),
        (1000, bytes(cramjam.lz4.compress_block(bytes(1000), store_size=False))[:-1]),
    ],
    ids=["longer", "shorter", "noise", "cut"],
)
def test_lz4_that_does_not_give_what_the_header_says_is_refused(raw_size, payload):
    """A payload that does not decompress to the size in the header is unreadable; the decoder does not crash."""
    data = batch_bytes([bytes(994)], codec=CODEC_LZ4)
    forged = forge(data, payload=payload, payload_size=len(payload), raw_size=raw_size, values_size=raw_size)
    header = decode_header(memoryview(forged), 0)
    with pytest.raises(ValueError, match=r"."):
        decompress(header, check_payload(memoryview(forged), 0, header))
    with pytest.raises(UnreadableBatch, match="cannot be read"):
        read_everything(forged)


def test_a_forged_batch_cannot_make_a_reader_take_more_than_the_largest_raw_size():
    """The memory for decompressing has two bounds: the largest raw size, and 255 times the stored size."""
    payload = bytes(4000)
    data = batch_bytes([b"x" * 300], codec=CODEC_LZ4)
    bound = 255 * len(payload)
    assert bound < MAX_RAW_SIZE
    fields: dict[str, Any] = {"payload": payload, "payload_size": len(payload)}
    decode_header(memoryview(forge(data, raw_size=bound, values_size=bound, **fields)), 0)
    with pytest.raises(CorruptBatch):
        decode_header(memoryview(forge(data, raw_size=bound + 1, values_size=bound + 1, **fields)), 0)
