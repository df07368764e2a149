"""Every decoder as a function of bytes: it ends, and raises only documented errors.

Hypothesis and atheris use these functions. Any exception that leaves one of them is a bug.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import xxhash
from batches import forge
from hypothesis import Phase, settings
from logs import FakeClock, NoSyncFileSystem, open_log
from wire import encoded, forged

from segmentlog.config import TopicConfig
from segmentlog.errors import CorruptBatch, InvalidTopicName, InvalidWireBatch, SegmentlogError, StoreVersionError
from segmentlog.format.batch import (
    CONTROL,
    HEADER_SIZE,
    KAFKA_LAYOUT,
    WIRE_HEADER_SIZE,
    check_payload,
    decode_header,
)
from segmentlog.format.checkpoint import MalformedCheckpoint, decode_checkpoint, decode_slot
from segmentlog.format.columns import (
    MalformedColumn,
    decode_blobs,
    decode_headers,
    decode_offsets,
    decode_timestamps,
)
from segmentlog.format.control import Marker, decode_marker
from segmentlog.format.decoded_batch import record_batch
from segmentlog.format.encode import encode_batch
from segmentlog.format.examine import IntactBatch, examine_segment
from segmentlog.format.file_names import check_topic_name, parse_segment_name, segment_name
from segmentlog.format.index_file import decode_entries
from segmentlog.format.producer_snapshot import (
    KEPT_RUNS,
    AbortedTransaction,
    MalformedProducerFile,
    ProducerEntry,
    decode_aborted,
    decode_snapshot,
)
from segmentlog.format.scan import SegmentContext, scan_batches, skip_damage
from segmentlog.format.wire import check_wire_batch, parse_wire_batch
from segmentlog.format.wire_conversion import to_wire_batches
from segmentlog.format.wire_records import decode_records
from segmentlog.inspection.finding import Tally
from segmentlog.inspection.partition_inspection import inspect_partition
from segmentlog.inspection.small_files import check_store_file, read_topic_file
from segmentlog.storage.state_page import PAGE_SIZE, StateDamaged, StatePage
from segmentlog.store import LogStore

EXAMPLES = int(os.environ.get("SEGMENTLOG_FUZZ_EXAMPLES", "120"))
"""Examples of each property; a night's run takes a hundred thousand."""

_PHASES = (Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink)
fuzzed = settings(max_examples=EXAMPLES, deadline=20_000, phases=_PHASES)
"""The deadline stops endless loops; slow examples may pass."""
fuzzed_slowly = settings(fuzzed, max_examples=max(EXAMPLES // 4, 1))


def batch(data: bytes) -> None:
    """Header, payload, every column, every record, slices of it."""
    view = memoryview(data)
    with contextlib.suppress(CorruptBatch):
        header = decode_header(view, 0, "path")
        whole = record_batch(header, check_payload(view, 0, header, "path"), path="path")
        for column in ("values", "keys", "headers", "offsets", "timestamps"):
            with contextlib.suppress(CorruptBatch):
                assert len(getattr(whole, column)) == header.record_count
        part = whole.slice(header.record_count // 3, header.record_count // 2 + 1)
        for look in (whole, part):
            with contextlib.suppress(CorruptBatch):
                assert len(list(look.records())) == len(look)
        with contextlib.suppress(CorruptBatch):
            whole.skip_to(header.base_offset + header.last_offset_delta // 2)
            _ = whole.base_offset, whole.next_offset, list(whole)
        with contextlib.suppress(CorruptBatch):
            for wire in to_wire_batches(whole) if not header.is_kafka else ():
                assert parse_wire_batch(wire).size_bytes == len(wire)


def forged_batch(data: bytes) -> None:
    """Decode the batch with valid checksums, so that later checks are reached."""
    if len(data) >= HEADER_SIZE:
        forged = forge(b"SLB\x01" + data[4:])
        # Random data seldom has sizes that agree, and is refused at once: correct the sizes too.
        batch(forged)
        payload_size = len(data) - HEADER_SIZE
        batch(forge(forged, payload_size=payload_size))
        batch(forge(forged, payload_size=payload_size, raw_size=payload_size, attributes=0))
        sizes = {"payload_size": payload_size, "raw_size": payload_size, "values_size": payload_size}
        sizes |= dict.fromkeys(("timestamps_size", "keys_size", "headers_size"), 0)
        for codec in range(5):
            batch(forge(forged, attributes=KAFKA_LAYOUT | codec, **sizes))


def wire(data: bytes) -> None:
    """Decode the bytes as a batch of a client: unchanged, and with valid length, magic and CRC."""
    for sent in (data, made_right(data)):
        with contextlib.suppress(InvalidWireBatch):
            header = check_wire_batch(sent)
            made = encoded(sent)
            batch(bytes(made.placed_at(7, 0, 5)) + bytes(made.payload))
            with contextlib.suppress(ValueError):
                decode_records(memoryview(sent), header.codec, header.record_count)


def made_right(data: bytes) -> bytes:
    """Return the bytes under a header that a server accepts."""
    if len(data) < WIRE_HEADER_SIZE:
        return data
    count = int.from_bytes(data[59:61], "big") % 20 + 1
    good = {"batch_length": len(data) - 12, "magic": 2, "record_count": count, "last_offset_delta": count - 1}
    return forged(data, attributes=data[22] % 5, base_timestamp=5, max_timestamp=9, producer_id=-1, **good)


def wire_records(data: bytes) -> None:
    """Decode the bytes as Kafka's records with each codec: a decoded record is complete."""
    for codec in range(5):
        payload = memoryview(bytes(WIRE_HEADER_SIZE) + data[1:])
        with contextlib.suppress(ValueError):
            found = decode_records(payload, codec, data[0] % 9 if data else 0)
            assert len(found.keys()) == len(found.values()) == len(found.headers()) == found.count
            again = decode_records(memoryview(bytes(WIRE_HEADER_SIZE) + found.kept(None, 12345)), 0, found.count)
            assert again.values() == found.values()
            assert again.headers() == found.headers()
            assert again.timestamp_deltas.tolist() == (found.timestamp_deltas + np.int64(12345)).tolist()


def walks(data: bytes) -> None:
    """Walk, search and examine the bytes as a segment."""
    view = memoryview(data)
    for payloads in (False, True):
        with contextlib.suppress(CorruptBatch):
            for position, header in scan_batches(view, 0, len(view), "path", expected_offset=0, payloads=payloads):
                assert position + header.size_bytes <= len(view)
    for limit in (1, 100, 1 << 20):
        found, offset = skip_damage(view, 0, 0, SegmentContext(batch_limit=limit))
        assert 0 < found <= len(view) or not data
        assert offset is None or found < len(view)
    position = 0
    for item in examine_segment(view, 0, len(view), "path", expected_offset=0):
        assert item.position == position < item.end_position
        position = item.end_position
        if isinstance(item, IntactBatch) and item.unreadable is None:
            assert len(list(item.batch.records())) == len(item.batch.key_identities().low) == len(item.batch)
    assert position == len(view)


def columns(data: bytes) -> None:
    """Decode each kind of column, with every number of records that the first bytes may mean."""
    if len(data) < 3:
        return
    count, view = int.from_bytes(data[:2], "little") % (len(data) + 1) + 1, memoryview(data)[2:]
    base = int.from_bytes(data[:8], "little", signed=True)
    announced = {count, view[0] & 0x0F or 1, int.from_bytes(view[1:3], "big") or 1}
    for number in announced:
        for decode in (decode_blobs, decode_headers):
            with contextlib.suppress(MalformedColumn):
                assert len(decode(view, number)) == number
    for numbers in (decode_timestamps, decode_offsets):
        with contextlib.suppress(MalformedColumn):
            assert len(numbers(view, count, abs(base) >> 1)) == count


def index(data: bytes) -> None:
    """Decode both index files; accepted entries ascend."""
    for cut in (len(data) // 3, len(data) // 3 // 8 * 8, len(data)):
        offsets, times, _ = decode_entries(data[:cut], data[cut:])
        assert len(offsets) == len(times)
        assert (np.diff(offsets["position"].astype(np.int64)) > 0).all()
        assert (np.diff(offsets["relative_offset"].astype(np.int64)) > 0).all()


def checkpoint(data: bytes) -> None:
    """Decode a checkpoint file, and a slot of it."""
    sequence, found, damaged = decode_checkpoint(data)
    assert found is not None or (damaged and sequence == 0)
    for slot in (data, forged_slot(data), forged_slot(data[1:])):
        with contextlib.suppress(MalformedCheckpoint):
            assert decode_slot(slot)[1].epoch >= 0


def forged_slot(body: bytes, sequence: int = 1) -> bytes:
    """Return a slot with this body and the right checksum."""
    prefix = struct.pack("<4sIQ", b"SLC\x01", len(body), sequence)
    return prefix + struct.pack("<Q", xxhash.xxh3_64_intdigest(prefix + body)) + body


def marker(data: bytes) -> None:
    """Decode a batch as a control batch: the end of a transaction, another kind, or malformed."""
    view = memoryview(data)
    with contextlib.suppress(CorruptBatch):
        header = decode_header(view, 0, "path")
        payload = check_payload(view, 0, header, "path")
        with contextlib.suppress(ValueError):
            found = decode_marker(header, payload)
            assert found is None or isinstance(found, Marker)


def forged_marker(data: bytes) -> None:
    """Decode a control batch with a payload of one key and one value, with valid checksums."""
    cut = data[0] % 8 if data else 0
    key, value = data[1 : 1 + cut], data[1 + cut :]
    for keys, values in (([key], [value]), ([data[:4]], [data[4:18]]), ([None], [value]), ([key], [None])):
        made = encode_batch(values, keys, now_ms=1, attributes=CONTROL, producer_id=1, producer_epoch=0)
        whole = bytes(made.placed_at(7, 0)) + bytes(made.payload)
        marker(whole)
        walks(whole)


def producers(data: bytes) -> None:
    """Decode a ``.snapshot`` and a ``.txnindex``, or raise `MalformedProducerFile`."""
    for file in (data, forged_file(b"SLP\x01", data), forged_file(b"SLP\x01", data[16:])):
        with contextlib.suppress(MalformedProducerFile):
            for entry in decode_snapshot(file):
                assert isinstance(entry, ProducerEntry)
                _ = entry.next_sequence, entry.last_number, entry.runs[:KEPT_RUNS]
    for file in (data, forged_file(b"SLT\x01", data), forged_file(b"SLT\x01", data[16:])):
        with contextlib.suppress(MalformedProducerFile):
            size_bytes, aborted = decode_aborted(file)
            assert isinstance(size_bytes, int)
            assert all(isinstance(one, AbortedTransaction) for one in aborted)


def forged_file(magic: bytes, body: bytes) -> bytes:
    """Return a file of producers with this body and the right checksum."""
    prefix = struct.pack("<4sI", magic, len(body))
    return prefix + struct.pack("<Q", xxhash.xxh3_64_intdigest(prefix + body)) + body


def state(data: bytes) -> None:
    """Decode a state page: it is valid for this folder, or it is not."""
    page = StatePage(bytearray(data[:PAGE_SIZE].ljust(PAGE_SIZE, b"\0")))
    assert page.is_valid_for("another boot", os.stat("/")) is False
    _ = page.header_is_sound
    for block in (page.log, page.sync):
        with contextlib.suppress(StateDamaged):
            block.read()


def names(data: bytes) -> None:
    """Names of topics and of files."""
    text = data.decode("utf-8", "surrogateescape")
    with contextlib.suppress(InvalidTopicName):
        assert "/" not in check_topic_name(text)
        assert check_topic_name(text, internal=True) == text
    for name in (text, text + ".log", text[-20:].rjust(20, "0") + ".log"):
        base = parse_segment_name(name)
        assert base is None or segment_name(base) + ".log" == name


def store_json(data: bytes) -> None:
    """``store.json``, by the store and by verify."""
    with TemporaryDirectory(prefix="fuzz-") as folder:
        Path(folder, "store.json").write_bytes(data)
        with contextlib.suppress(StoreVersionError):
            LogStore(folder, read_only=True, background=False).close()
        list(check_store_file(NoSyncFileSystem(), folder))


def topic_json(data: bytes) -> None:
    """``topic.json``, by verify; what it believes can be worked through."""
    with TemporaryDirectory(prefix="fuzz-") as folder:
        Path(folder, "topic.json").write_bytes(data)
        count, _, _ = read_topic_file(NoSyncFileSystem(), folder)
        assert count is None or 1 <= count <= 100_000


def topic_json_by_store(data: bytes) -> None:
    """``topic.json``, by the store."""
    with TemporaryDirectory(prefix="fuzz-") as folder:
        Path(folder, "store.json").write_bytes(b'{"format": 1, "store_id": "x"}')
        os.mkdir(f"{folder}/t")
        Path(folder, "t", "topic.json").write_bytes(data)
        with LogStore(folder, read_only=True, background=False) as store, contextlib.suppress(SegmentlogError):
            assert 1 <= store.topic("t").partition_count <= 100_000


def segment(data: bytes, files: dict[str, bytes] | None = None) -> None:
    """Verify, open, read and append to a partition with this one segment (and other files)."""
    with TemporaryDirectory(prefix="fuzz-") as folder:
        for name, content in {segment_name(0) + ".log": data, **(files or {})}.items():
            Path(folder, name).write_bytes(content)
        fs = NoSyncFileSystem()
        inspect_partition(fs, folder, "t", 0, TopicConfig(), Tally())
        for read_only in (True, False):
            with contextlib.suppress(SegmentlogError):
                partition = open_log(Path(folder), fs=fs, clock=FakeClock(), read_only=read_only)
                try:
                    _use(partition, read_only)
                finally:
                    partition.close()
        inspect_partition(fs, folder, "t", 0, TopicConfig(), Tally())


def _use(partition: object, read_only: bool) -> None:
    end = partition.log_end_offset  # type: ignore[attr-defined]
    with contextlib.suppress(SegmentlogError):
        for found in partition.read(partition.log_start_offset, on_skip=lambda *told: None):  # type: ignore[attr-defined]
            with contextlib.suppress(CorruptBatch):
                list(found)
    with contextlib.suppress(SegmentlogError):
        partition.offset_for_timestamp(1)  # type: ignore[attr-defined]
    with contextlib.suppress(SegmentlogError):
        partition.segments()  # type: ignore[attr-defined]
    if not read_only:
        assert partition.append([b"new"]) >= end  # type: ignore[attr-defined]


DECODERS: dict[str, Callable[[bytes], None]] = {
    "batch": batch,
    "forged_batch": forged_batch,
    "wire": wire,
    "wire_records": wire_records,
    "walks": walks,
    "columns": columns,
    "index": index,
    "checkpoint": checkpoint,
    "marker": marker,
    "forged_marker": forged_marker,
    "producers": producers,
    "state": state,
    "names": names,
    "store_json": store_json,
    "topic_json": topic_json,
}
