"""Kafka's batches: what a client sent is read and checked here, what is made here is read by a client."""

from __future__ import annotations

import gzip
import resource
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import cramjam
import lz4.frame
import numpy as np
import pytest
import xxhash
from batches import forge, read_batch, unpack_header
from hypothesis import example, given
from hypothesis import strategies as st
from wire import CODECS, NOW_MS, Sent, encoded, foreign, forged, read_foreign, sent, stored

from segmentlog.errors import CorruptBatch, InvalidWireBatch, RecordTooLarge
from segmentlog.format import wire_codecs
from segmentlog.format.batch import HEADER_SIZE, KAFKA_LAYOUT, LOG_APPEND_TIME, PLACE_SIZE, WIRE_HEADER_SIZE
from segmentlog.format.examine import IntactBatch, examine_segment
from segmentlog.format.stored_batch import read_stored_batch
from segmentlog.format.wire import check_wire_batch, pack_wire_batch, parse_wire_batch
from segmentlog.format.wire_batch import EncodedWireBatch
from segmentlog.format.wire_codecs import PADDING, compress_records, decompress_records
from segmentlog.format.wire_encode import empty_wire_batch, encode_wire_batch
from segmentlog.format.wire_record_batch import WireRecordBatch
from segmentlog.format.wire_records import MalformedRecord, decode_records, varint

GOLDEN = bytes.fromhex(
    "00000000000000000000"  # two records, encoded by aiokafka 0.14
    "0053ffffffff021bc3f3ef0000000000010000018bcfe568000000018bcfe56805ffffffffffffffffffffffffffff00000002"
    "2a000000046b310a68656c6c6f020a7472616365020716000a02010a776f726c6400"
)
A_FEW = [
    Sent(b"k1", b"hello", NOW_MS, (("trace", b"\7"),)),
    Sent(None, b"world", NOW_MS + 5),
    Sent(b"", b"", NOW_MS - 70),
    Sent(b"k2", None, NOW_MS + 2**33, (("a", None), ("", b""), ("ä" * 40, b"x" * 300))),
]
MANY = [Sent(b"key %d" % n, b"v" * (n % 150), NOW_MS + n // 7 - n % 5) for n in range(10_000)]


def as_sent(data: bytes) -> list[tuple[int, Sent]]:
    """Return every record of a stored batch as a reader of the library sees it."""
    found = read_batch(data).records()
    return [(one.offset, Sent(one.key, one.value, one.timestamp, one.headers)) for one in found]


# ---------------------------------------------------------------- reading what others made


def test_golden_bytes() -> None:
    """Bytes of another implementation are read, and encoding gives the same bytes."""
    two = [Sent(b"k1", b"hello", NOW_MS, (("trace", b"\7"),)), Sent(None, b"world", NOW_MS + 5)]
    assert as_sent(stored(GOLDEN, 1)) == [(1, two[0]), (2, two[1])]
    assert made(two, epoch=2**32 - 1)[16:] == GOLDEN[16:]


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
@pytest.mark.parametrize("records", [A_FEW, MANY, [Sent(None, None)], [Sent(b"k", b"v", -1)]], ids=len)
def test_what_a_client_sent_is_read(records: list[Sent], codec: int) -> None:
    """With each codec, readers see keys, values, headers and timestamps as sent, with nulls and missing ones."""
    data = foreign(records, codec)
    assert check_wire_batch(data).codec == codec
    assert as_sent(stored(data, 1000, 3)) == [(1000 + at, one) for at, one in enumerate(records)]


@given(sent(), st.sampled_from(list(CODECS.values())), st.integers(0, 2**62), st.integers(0, 2**32 - 1))
def test_any_records_are_read(records: list[Sent], codec: int, base_offset: int, epoch: int) -> None:
    """Both headers have the batch's position, for readers and for clients; the records stay as they were sent."""
    data = foreign(records, codec, producer=(7, 1, 5))
    lying = stored(data, base_offset, epoch)
    assert as_sent(lying) == [(base_offset + at, one) for at, one in enumerate(records)]
    assert read_foreign(lying[HEADER_SIZE:]) == as_sent(lying)
    assert lying[HEADER_SIZE + PLACE_SIZE :] == data[PLACE_SIZE:]
    found, wire = unpack_header(lying), parse_wire_batch(lying[HEADER_SIZE:])
    assert (wire.base_offset, wire.leader_epoch) == (base_offset, epoch & 0x7FFFFFFF)
    assert found["attributes"] == wire.attributes | KAFKA_LAYOUT
    assert found["payload_size"] == found["raw_size"] == found["values_size"] == len(data) == wire.size_bytes
    names = ["last_offset_delta", "base_timestamp", "max_timestamp", "producer_id", "producer_epoch", "base_sequence"]
    assert [found[name] for name in names] == [getattr(wire, name) for name in names]
    (item,) = examine_segment(memoryview(lying), 0, len(lying), "", expected_offset=base_offset)
    assert isinstance(item, IntactBatch)
    assert not item.flaw


@given(sent(), st.sampled_from(list(CODECS.values())), st.data())
def test_parts_of_a_batch(records: list[Sent], codec: int, data: st.DataObject) -> None:
    """A slice, or the rest after an offset, shows the same records as a list would, decoded before or not."""
    count = len(records)
    batch = read_batch(stored(foreign(records, codec), 50))
    if data.draw(st.booleans()):
        assert len(batch.values) == count
    start = data.draw(st.integers(0, count))
    stop = data.draw(st.integers(start, count))
    part = batch.slice(start, stop)
    assert part.values == [one.value for one in records[start:stop]]
    assert part.keys == [one.key for one in records[start:stop]]
    assert part.headers == [one.headers for one in records[start:stop]]
    assert part.timestamps.tolist() == [one.timestamp for one in records[start:stop]]
    assert part.offsets.tolist() == list(range(50 + start, 50 + stop))
    assert (part.base_offset, part.next_offset) == (50 + start, 50 + stop)
    assert len(part.key_identities().low) == stop - start
    behind = read_batch(stored(foreign(records, codec), 50))
    assert behind.skip_to(50 + start) == (start < count)
    assert [(one.offset, one.value) for one in behind.records()] == [
        (50 + at, records[at].value) for at in range(start, count)
    ]


@pytest.mark.parametrize("make", [
    lambda raw: lz4.frame.compress(raw),
    lambda raw: lz4.frame.compress(raw, block_size=lz4.frame.BLOCKSIZE_MAX4MB, content_checksum=True),
    lambda raw: lz4.frame.compress(raw, block_linked=False, block_checksum=True, store_size=False),
], ids=["usual", "4 MB blocks", "checked blocks"])  # fmt: skip
@pytest.mark.parametrize("size", [0, 1, 100, 65_536, 65_537, 1_000_000])
def test_lz4_frames_of_every_kind(make: Any, size: int) -> None:
    """Frames are read whatever their blocks are, up to the last byte that may be, and no further."""
    raw = (b"0123456789" * (size // 10 + 1))[:size]
    framed = memoryview(make(raw))
    assert decompress_records(3, framed, size) == raw + bytes(PADDING)
    if size > 1:
        with pytest.raises(ValueError, match=r"more than|lz4"):
            decompress_records(3, framed, size - 1)


@pytest.mark.parametrize("codec", [1, 2, 3, 4])
@pytest.mark.parametrize("size", [0, 1, 100, 65_536, 1_000_000])
def test_codecs_and_their_bound(codec: int, size: int) -> None:
    """Data decompresses if the bound is its size, and not if the bound is a byte less."""
    raw = (b"0123456789" * (size // 10 + 1))[:size]
    stored_ = memoryview(compress_records(codec, raw))
    assert decompress_records(codec, stored_, size) == raw + bytes(PADDING)
    if size > 1:
        with pytest.raises(ValueError, match="more than"):
            decompress_records(codec, stored_, size - 1)


def test_both_framings_of_snappy() -> None:
    """One raw block, as librdkafka sends, and blocks after Java's header."""
    raw = b"some records " * 9000
    for made in (bytes(cramjam.snappy.compress_raw(raw)), compress_records(2, raw)):
        assert decompress_records(2, memoryview(made), len(raw)) == raw + bytes(PADDING)


# ---------------------------------------------------------------- what a server refuses


def changed_byte(data: bytes, at: int) -> bytes:
    """Return the data with another byte at one place."""
    return data[:at] + bytes((data[at] ^ 0x55,)) + data[at + 1 :]


GOOD = foreign(A_FEW, producer=(5, 0, 7))
REFUSED = {
    "an old message set": ("magic", changed_byte(GOOD, 16)),
    "nothing": ("length", b""),
    "a header cut short": ("length", GOOD[:60]),
    "records cut short": ("length", GOOD[:-1]),
    "two batches": ("length", GOOD + GOOD),
    "a length below the header's": ("length", forged(GOOD, batch_length=3)),
    "a negative length": ("length", forged(GOOD, batch_length=-1)),
    "a bit in the records": ("crc", changed_byte(GOOD, len(GOOD) - 3)),
    "a bit in the header": ("crc", changed_byte(GOOD, 30)),
    "a control batch": ("control", forged(GOOD, attributes=1 << 5)),
    "a delete horizon": ("delete_horizon", forged(GOOD, attributes=1 << 6)),
    "an unknown codec": ("codec", forged(GOOD, attributes=5)),
    "no record": ("count", forged(GOOD, record_count=0, last_offset_delta=-1)),
    "a negative count": ("count", forged(GOOD, record_count=-4, last_offset_delta=-5)),
    "offsets beyond the records": ("count", forged(GOOD, last_offset_delta=9)),
    "a producer without a sequence": ("producer", forged(GOOD, base_sequence=-1)),
    "a producer without an epoch": ("producer", forged(GOOD, producer_epoch=-1)),
    "a transaction of nobody": ("producer", forged(GOOD, producer_id=-1, attributes=1 << 4)),
}


@pytest.mark.parametrize(("reason", "data"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused_and_why(reason: str, data: bytes) -> None:
    """The error has a message that a server can translate."""
    with pytest.raises(InvalidWireBatch) as told:
        encoded(data)
    assert told.value.reason == reason
    assert reason in str(told.value)


def test_every_cut_is_refused() -> None:
    """A batch that ends anywhere before its end is refused."""
    for end in range(len(GOOD)):
        with pytest.raises(InvalidWireBatch):
            encoded(memoryview(GOOD)[:end])


def test_every_byte_behind_the_place_is_checked() -> None:
    """A byte that changed on the way is detected; the first 16 are the batch's place, which the log writes."""
    for at in range(PLACE_SIZE, len(GOOD)):
        with pytest.raises(InvalidWireBatch):
            encoded(changed_byte(GOOD, at))
    assert stored(changed_byte(GOOD, 3)) == stored(changed_byte(GOOD, 13)) == stored(GOOD)


def test_the_limit_is_of_bytes_as_they_are_sent() -> None:
    """The limit counts the header and the bytes as they are sent, compressed or not."""
    encoded(GOOD, len(GOOD))
    with pytest.raises(RecordTooLarge) as told:
        encoded(GOOD, len(GOOD) - 1)
    assert (told.value.size_bytes, told.value.limit_bytes) == (len(GOOD), len(GOOD) - 1)


def test_a_client_that_says_log_append_time_is_not_believed() -> None:
    """The records keep their timestamps, and Kafka's clients see those."""
    data = forged(GOOD, attributes=LOG_APPEND_TIME)
    lying = stored(data, 5)
    assert as_sent(lying) == [(5 + at, one) for at, one in enumerate(A_FEW)] == read_foreign(lying[HEADER_SIZE:])


# ---------------------------------------------------------------- placing


def test_nothing_of_what_was_sent_is_changed_or_copied() -> None:
    """A server's buffer is written as it is: placing a batch changes but its own two headers, as often as one likes."""
    data = bytearray(GOOD)
    batch = encoded(memoryview(data).toreadonly())
    assert isinstance(batch.payload, memoryview)
    assert batch.payload.obj is data
    for base_offset in (0, 77, 2**62):
        head = bytes(batch.placed_at(base_offset, 9))
        assert len(head) + len(batch.payload) == batch.size_bytes == HEADER_SIZE + len(data)
        assert [at for at, _ in as_sent(head + batch.payload)] == list(range(base_offset, base_offset + 4))
    assert data == GOOD


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_log_append_time(codec: int) -> None:
    """Every record has the time of the append, for the library and for Kafka's clients, with right checksums."""
    lying = stored(foreign(A_FEW, codec), 10, 2, append_time_ms=NOW_MS + 12345)
    found = unpack_header(lying)
    assert found["max_timestamp"] == NOW_MS + 12345
    assert found["base_timestamp"] == parse_wire_batch(lying[HEADER_SIZE:]).base_timestamp == NOW_MS
    expected = [(10 + at, one._replace(timestamp=NOW_MS + 12345)) for at, one in enumerate(A_FEW)]
    assert as_sent(lying) == expected == read_foreign(lying[HEADER_SIZE:])
    (item,) = examine_segment(memoryview(lying), 0, len(lying), "", expected_offset=10)
    assert isinstance(item, IntactBatch)
    assert not item.flaw


def test_a_stamp_says_what_the_batch_does() -> None:
    """The producer's numbers are under the client's CRC: others are refused."""
    batch = encoded(GOOD)
    before = bytes(batch.placed_at(0, 0))
    batch.set_producer(5, 0, 7, transactional=False)
    assert bytes(batch.placed_at(0, 0)) == before
    for numbers in ((6, 0, 7), (5, 1, 7), (5, 0, 8)):
        with pytest.raises(ValueError, match="producer"):
            batch.set_producer(*numbers, transactional=False)
    with pytest.raises(ValueError, match="transactional"):
        batch.set_producer(5, 0, 7, transactional=True)


@given(sent(), st.sampled_from(list(CODECS.values())), st.integers(0, 2**31 - 1))
def test_a_batch_is_extended(records: list[Sent], codec: int, behind: int) -> None:
    """If compaction extends the end of a batch, both headers say so, and the records stay."""
    batch = encoded(foreign(records, codec))
    last = max(len(records) - 1, behind)
    batch.extend_to(last)
    lying = bytes(batch.placed_at(3, 0)) + bytes(batch.payload)
    assert read_batch(lying).next_offset == 3 + last + 1
    assert parse_wire_batch(lying[HEADER_SIZE:]).last_offset_delta == last
    assert as_sent(lying) == [(3 + at, one) for at, one in enumerate(records)] == read_foreign(lying[HEADER_SIZE:])


@given(sent(), st.sampled_from(list(CODECS.values())))
def test_a_stored_batch_is_placed_elsewhere(records: list[Sent], codec: int) -> None:
    """The result is the same as for the client's batch."""
    data = foreign(records, codec, producer=(9, 2, 4))
    moved = read_stored_batch(memoryview(stored(data, 100, 7)), 0)
    assert isinstance(moved, EncodedWireBatch)
    assert bytes(moved.placed_at(5, 8)) + bytes(moved.payload) == stored(data, 5, 8)
    moved.set_producer(9, 2, 4, transactional=False)


# ---------------------------------------------------------------- damage, and lies


def test_every_byte_on_disk_is_covered() -> None:
    """A checksum covers each byte, or our header says which byte must be there."""
    lying = stored(foreign(A_FEW, 1), 123456, 7)
    for at in range(len(lying)):
        for flip in (1, 0x80, 0xFF):
            with pytest.raises(CorruptBatch):
                read_batch(lying[:at] + bytes((lying[at] ^ flip,)) + lying[at + 1 :])


@pytest.mark.parametrize("field", ["last_offset_delta", "base_timestamp", "max_timestamp", "producer_id",
                                   "producer_epoch", "base_sequence", "record_count", "attributes"])  # fmt: skip
def test_headers_that_disagree_are_told(field: str) -> None:
    """Both checksums are right, but the headers differ: verify says how."""
    wire = parse_wire_batch(GOOD)
    other = {"attributes": 1 << 4}.get(field, getattr(wire, field) + 1)
    if field == "last_offset_delta":
        batch = encoded(GOOD)
        batch.extend_to(9)
        lying = bytearray(bytes(batch.placed_at(0, 0)) + bytes(batch.payload))
        inside = forged(GOOD)
    else:
        lying = bytearray(stored(GOOD))
        inside = forged(GOOD, **{field: other})
    made = forge(bytes(lying), payload=inside)
    items = list(examine_segment(memoryview(made), 0, len(made), "", expected_offset=0))
    assert not isinstance(items[0], IntactBatch) or items[0].flaw


@given(st.binary(max_size=300), st.integers(0, 20), st.sampled_from(list(CODECS.values())))
def test_records_that_are_none(data: bytes, count: int, codec: int) -> None:
    """Any bytes decode to records or raise ValueError."""
    payload = memoryview(GOOD[:WIRE_HEADER_SIZE] + data)
    try:
        found = decode_records(payload, codec, count)
    except ValueError:
        return
    assert len(found.values()) == len(found.keys()) == len(found.headers()) == count


@given(sent(), st.data())
def test_one_lie_in_a_record(records: list[Sent], data: st.DataObject) -> None:
    """A byte of the records that is another one: ValueError, or other records, and never more than the bytes hold."""
    raw = bytearray(foreign(records)[WIRE_HEADER_SIZE:])
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.sampled_from([0, 1, 0x7F, 0x80, 0xFE, 0xFF]))
    try:
        found = decode_records(memoryview(bytes(WIRE_HEADER_SIZE) + raw), 0, len(records))
    except ValueError:
        return
    assert sum(len(value or b"") for value in found.values()) <= len(raw)


BOMBS = {
    "gzip": lambda: gzip.compress(bytes(200 << 20), 9),
    "gzip of members": lambda: gzip.compress(bytes(4 << 20), 9) * 50,
    "snappy": lambda: b"\x80\x80\x80\x80\x0f" + b"\0" * 100_000,
    "lz4": lambda: lz4.frame.compress(bytes(200 << 20)),
    "lz4 of frames": lambda: lz4.frame.compress(bytes(4 << 20)) * 50,
    "zstd": lambda: bytes(cramjam.zstd.compress(bytes(200 << 20))),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_goes_off_within_bounds(name: str) -> None:
    """A few bytes that become very many end in an error, and take no more memory than the bound."""
    bomb = memoryview(BOMBS[name]())
    assert len(bomb) < 1 << 20
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r"more than|claims"):
            decompress_records(CODECS[name.split()[0]], bomb, 8 << 20)
        assert tracemalloc.get_traced_memory()[1] < 40 << 20
    finally:
        tracemalloc.stop()


def test_zstd_that_claims_terabytes() -> None:
    """Blocks of one byte that stand for 128 KiB each are counted before anything is made of them."""
    block = struct.pack("<I", (1 << 17) << 3 | 1 << 1)[:3] + b"\0"
    frame = b"\x28\xb5\x2f\xfd" + b"\0\x58" + block * 250_000 + b"\1\0\0"
    with pytest.raises(ValueError, match=r"more than|zstd"):
        decompress_records(4, memoryview(frame), 1 << 20)


# ---------------------------------------------------------------- making them


def made(records: list[Sent], codec: int = 0, **fields: Any) -> bytes:
    """Return the records as the library renders them."""
    return encode_wire_batch(
        [one.key for one in records],
        [one.value for one in records],
        [one.headers for one in records],
        np.array([one.timestamp for one in records], np.int64),
        codec=codec,
        **{"base_offset": 0, "epoch": 0, **fields},
    )


@given(sent(), st.sampled_from(list(CODECS.values())))
def test_what_is_made_here_is_read_by_a_client(records: list[Sent], codec: int) -> None:
    """Encoding the same records gives the same bytes as a client's, if they are not compressed."""
    data = made(records, codec, base_offset=7, epoch=3)
    assert read_foreign(data) == [(7 + at, one) for at, one in enumerate(records)]
    check_wire_batch(data)
    if not codec:
        assert made(records)[16:] == foreign(records)[16:]


def test_columns_that_are_not_there() -> None:
    """Without keys or headers, records are encoded with null keys and empty headers."""
    plain = [one._replace(key=None, headers=()) for one in MANY]
    values, times = [one.value for one in plain], np.array([one.timestamp for one in plain], np.int64)
    assert encode_wire_batch(None, values, None, times, base_offset=0, epoch=0)[16:] == foreign(plain)[16:]


def test_offsets_with_gaps_and_a_later_end() -> None:
    """After a compaction, offsets stay as they are, and the batch ends where it ended before."""
    deltas = np.array([0, 3, 64, 2**31 - 2], np.int64)
    data = made(A_FEW, offset_deltas=deltas, base_offset=100, last_offset_delta=2**31 - 1)
    assert [at for at, _ in read_foreign(data)] == [100, 103, 164, 100 + 2**31 - 2]
    assert parse_wire_batch(data).last_offset_delta == 2**31 - 1
    with pytest.raises(ValueError, match="last offset delta"):
        made(A_FEW, offset_deltas=deltas, last_offset_delta=2**31)


def test_a_delete_horizon() -> None:
    """It replaces the base timestamp in the header, and the records keep their timestamps."""
    data = made(A_FEW, delete_horizon_ms=NOW_MS + 10**9)
    header = parse_wire_batch(data)
    assert header.base_timestamp == NOW_MS + 10**9
    assert header.attributes == 1 << 6
    assert [one.timestamp for _, one in read_foreign(data)] == [one.timestamp for one in A_FEW]


def test_an_empty_batch() -> None:
    """It has no record, but offsets."""
    data = empty_wire_batch(10, 2**31 - 1, 5)
    assert read_foreign(data) == []
    header = parse_wire_batch(data)
    assert (header.base_offset, header.last_offset_delta, header.record_count) == (10, 2**31 - 1, 0)
    encoded = EncodedWireBatch(data, header, xxhash.xxh3_64_intdigest(data[PLACE_SIZE:]))
    lying = bytes(encoded.placed_at(3, 0)) + bytes(encoded.payload)
    assert as_sent(lying) == []
    assert read_batch(lying).next_offset == 3 + 2**31


@pytest.mark.parametrize("sizes", [[100] * 300, [3, 3, *[9] * 200, *[5000] * 40], [9000] * 50, [63, 64] * 99])
def test_records_of_one_size_and_of_others(sizes: list[int]) -> None:
    """Runs of one size are stepped over together, and nothing is the other for it."""
    records = [Sent(None, b"%d" % n * (size // 3), NOW_MS) for n, size in enumerate(sizes)]
    assert [one for _, one in as_sent(stored(foreign(records)))] == records


def timestamp_deltas(numbers: list[bytes]) -> list[int]:
    """Return the timestamp deltas of records with these encoded numbers."""
    bodies = [b"\0" + number + varint(offset) + b"\1\1\0" for offset, number in enumerate(numbers)]
    records = b"".join(varint(len(body)) + body for body in bodies)
    decoded = decode_records(memoryview(bytes(WIRE_HEADER_SIZE) + records), 0, len(numbers))
    assert decoded.offset_deltas.tolist() == list(range(len(numbers)))
    return list(decoded.timestamp_deltas.tolist())


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=40))
@example([0])
@example([2**63 - 1, -(2**63)] * 20)
def test_varints(numbers: list[int]) -> None:
    """Every 64-bit number survives, in a few records, which are read one by one, and in many."""
    written = [varint(number) for number in numbers]
    assert timestamp_deltas(written) == numbers
    for number, alone in zip(numbers, written, strict=True):
        assert timestamp_deltas([alone]) == [number]


@pytest.mark.parametrize("count", [1, 40])
def test_varints_of_other_writers(count: int) -> None:
    """Trailing zero groups do not change a number. A number of more than 64 bits, or in 11 bytes, is malformed."""
    assert timestamp_deltas([b"\x82\x80\x80\x00"] * count) == [1] * count
    assert timestamp_deltas([b"\xfe" + b"\xff" * 8 + b"\x01"] * count) == [2**63 - 1] * count
    for malformed in (b"\xfe" + b"\xff" * 8 + b"\x03", b"\x82" + b"\x80" * 9 + b"\x00"):
        with pytest.raises(MalformedRecord, match="record 0: its timestamp delta is malformed"):
            timestamp_deltas([malformed] * count)


def test_names_of_headers_that_are_no_utf8() -> None:
    """They do not make a record unreadable: readers see what Java's clients see, and the stored bytes stay."""
    body = b"\0\0\0\1\1" + varint(1) + varint(2) + b"\xff\xfe" + varint(1) + b"x"
    data = pack_wire_batch(
        varint(len(body)) + body, base_offset=0, leader_epoch=0, attributes=0, last_offset_delta=0,
        base_timestamp=NOW_MS, max_timestamp=NOW_MS, record_count=1,
    )  # fmt: skip
    batch = read_batch(stored(data))
    assert isinstance(batch, WireRecordBatch)
    assert batch.headers == [(("\ufffd\ufffd", b"x"),)]
    assert bytes(batch.payload)[PLACE_SIZE:] == data[PLACE_SIZE:]


def test_room_that_is_not_used_takes_no_memory() -> None:
    """The buffer for decompressed records may be much larger than the records."""

    def memory_bytes() -> int:
        fields = Path("/proc/self/statm").read_text().split()
        return int(fields[1]) * resource.getpagesize()

    def decode(stored: memoryview, buffer: Any) -> int:
        assert len(buffer) == room + PADDING
        assert memory_bytes() - before < room // 4
        buffer[: len(stored)] = stored
        return len(stored)

    room, before = 256 << 20, memory_bytes()
    assert wire_codecs._into(decode, memoryview(b"records"), room, room) == b"records" + bytes(PADDING)
