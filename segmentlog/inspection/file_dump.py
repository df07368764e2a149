"""Describe the content of one file of a partition, damaged or not, as text and as JSON."""

from __future__ import annotations

import base64
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import msgspec
from msgspec.structs import asdict

from segmentlog.errors import UnreadableBatch
from segmentlog.format.batch import CONTROL, LOG_APPEND_TIME, TRANSACTIONAL
from segmentlog.format.batch_codecs import codec_name
from segmentlog.format.checkpoint import MalformedCheckpoint, decode_slot
from segmentlog.format.examine import DamagedRange, IntactBatch, examine_segment
from segmentlog.format.file_names import REMOTE_SUFFIX, parse_segment_name
from segmentlog.format.index_file import OFFSET_ENTRY, TIME_ENTRY, decode_entries
from segmentlog.format.producer_snapshot import (
    MalformedProducerFile,
    ProducerEntry,
    decode_aborted,
    decode_end,
    decode_snapshot,
)
from segmentlog.format.record_batch import RecordBatch
from segmentlog.format.scan import SegmentContext, looks_like_batch, scan_past_damage
from segmentlog.format.stub import MalformedStub, decode_stub
from segmentlog.format.wire_codecs import WIRE_CODEC_NAMES
from segmentlog.inspection.segment_inspection import segment_context
from segmentlog.quantities import format_time
from segmentlog.storage.fs import FileSystem
from segmentlog.storage.state_page import ABORTS_WORD, PAGE_SIZE, PRODUCERS_WORD, StateDamaged, StatePage
from segmentlog.storage.state_page_check import distrust_reason

Document = dict[str, Any]
Line = tuple[Document, str]
"""One item of the file: as JSON (``type`` is "damage" for damaged items), and as a line of text."""
Report = Callable[[str], None]


def describe_file(path: str, data: bytes, start: int, records: bool, report: Report) -> Iterator[Line]:
    """Yield the items of a file, whose name determines its format. A file with an unknown name is read as a segment.

    start    for a segment: begin with the first batch at or after this byte
    records  for a segment: also yield the records of each batch
    report   called with additional remarks
    """
    name = os.path.basename(path)
    if name.endswith((".index", ".timeindex")):
        return _index_lines(path, report)
    if name.endswith(".txnindex"):
        return _aborted_lines(data)
    if name.endswith(".snapshot"):
        return _snapshot_lines(data)
    if name.endswith(REMOTE_SUFFIX):
        return _stub_lines(data)
    if name == "producers":
        return _end_snapshot_lines(data)
    if name == "checkpoint":
        return _checkpoint_lines(data)
    if name == "state":
        return _state_lines(path, data)
    return segment_lines(path, data, start, records, report)


# ---------------------------------------------------------------- a segment


def segment_lines(path: str, data: bytes, start: int, records: bool, report: Report) -> Iterator[Line]:
    """Yield the batches of a segment, and with ``records`` their records."""
    view = memoryview(data)
    name = os.path.basename(path)
    context = partial(segment_context, FileSystem(), path, parse_segment_name(name) or 0)
    start = _first_batch(view, start, context, report)
    batches = count = 0
    for item in examine_segment(view, start, len(data), path, expected_offset=0, context=context):
        if not isinstance(item, IntactBatch):
            yield _broken_line(item)
            continue
        batches, count = batches + 1, count + item.header.record_count
        yield _batch_line(item)
        if item.unreadable is not None:
            yield _unreadable_line(item, item.unreadable)
        elif records:
            yield from _record_lines(item.batch)
    report(f"{batches:,} batches, {count:,} records, {len(data) - start:,} bytes")


def _first_batch(view: memoryview, start: int, context: Callable[[], SegmentContext], report: Report) -> int:
    """Return the position of the first batch at or after ``start``, or else of the first bytes that look like a batch.

    Without either, return ``start``.
    """
    if not start:
        return 0
    for position, _ in scan_past_damage(view, 0, len(view), 0, context):
        if position >= start:
            return position
    found = looks_like_batch(view, start, len(view))
    if found is None:
        return start
    report(f"the bytes at {found} look like a batch, but may be part of a record's value")
    return found


def _batch_line(item: IntactBatch) -> Line:
    header = item.header
    marks = [
        name
        for name, bit in (("LogAppendTime", LOG_APPEND_TIME), ("transactional", TRANSACTIONAL), ("control", CONTROL))
        if header.attributes & bit
    ]
    codec = f"Kafka {WIRE_CODEC_NAMES[header.codec]}" if header.is_kafka else codec_name(header.codec)
    flaw = item.flaw or item.wrong_time
    fields = asdict(header)
    del fields["magic"]
    document: Document = {"type": "batch", "position": item.position, "size_bytes": header.size_bytes, **fields}
    document |= {"layout": "kafka" if header.is_kafka else "columns"}
    document |= {"codec": codec, "marks": marks, "flaw": flaw, "delete_horizon_ms": header.delete_horizon_ms}
    horizon_ms = header.delete_horizon_ms
    has_first = horizon_ms is not None and item.unreadable is None
    first_ms = int(item.batch.timestamps[0]) if has_first else header.base_timestamp
    times = f"{format_time(first_ms)} to {format_time(header.max_timestamp)}, " if header.record_count else ""
    text = (
        f"batch at {item.position}: offsets [{header.base_offset}, {header.next_offset}), {header.record_count}"
        f" records, epoch {header.partition_epoch}, {times}{codec}, {header.size_bytes} bytes ({header.raw_size} raw)"
    )
    if horizon_ms is not None:
        text += f", tombstones until {format_time(horizon_ms)}"
    if header.producer_id >= 0:
        text += f", producer {header.producer_id} epoch {header.producer_epoch}"
        text += f" sequence {header.base_sequence}" if header.base_sequence >= 0 else ""
    if header.is_control:
        marker = item.marker
        kind = None if marker is None else "commit" if marker.committed else "abort"
        document |= {"marker": kind, "first_offset": None if marker is None else marker.first_offset}
        if marker is not None:
            text += f", {kind} of the transaction that began at offset {marker.first_offset}"
    if marks:
        text += f", {' '.join(marks)}"
    if flaw:
        text += f"; flaw: {flaw}"
    return document, text


def _unreadable_line(item: IntactBatch, error: UnreadableBatch) -> Line:
    header = item.header
    document: Document = {
        "type": "unreadable", "position": item.position, "size_bytes": header.size_bytes,
        "base_offset": header.base_offset, "next_offset": header.next_offset, "record_count": header.record_count,
        "why": error.reason,
    }  # fmt: skip
    return document, f"  unreadable: its checksum is right, but its records do not decode: {error.reason}"


def _record_lines(batch: RecordBatch) -> Iterator[Line]:
    for record in batch.records():
        document: Document = {
            "type": "record",
            "offset": record.offset,
            "timestamp": record.timestamp,
            "key": _text(record.key),
            "value": _text(record.value),
            "headers": [[name, _text(value)] for name, value in record.headers],
        }
        key, value = _format_bytes(record.key), _format_bytes(record.value)
        text = f"  {record.offset}  {format_time(record.timestamp)}  {key}  {value}"
        if record.headers:
            text += "  " + " ".join(f"{name}={_format_bytes(value)}" for name, value in record.headers)
        yield document, text


def _text(blob: bytes | None) -> str | Document | None:
    """Return text as it is, and other bytes as base64, as `export` writes them."""
    if blob is None:
        return None
    try:
        return blob.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(blob).decode()}


def _format_bytes(blob: bytes | None) -> str:
    return "null" if blob is None else ascii(blob)[1:]


def _broken_line(item: DamagedRange) -> Line:
    size = item.end_position - item.position
    document: Document = {"type": "zeros" if item.blank else "damage", "position": item.position, "size_bytes": size}
    if item.blank:
        return document, f"zeros at {item.position}: {size} bytes"
    error = item.error
    document |= {"at": error.position, "expected": error.expected, "found": error.found}
    following = "no intact batch follows"
    if item.following_offset is not None:
        document["following_offset"] = item.following_offset
        following = f"the next intact batch is at {item.end_position}, offset {item.following_offset}"
    return document, (
        f"damage at {item.position}: {size} bytes: expected {error.expected} at {error.position},"
        f" found {error.found}; {following}"
    )


# ---------------------------------------------------------------- the other files


def _index_lines(path: str, report: Report) -> Iterator[Line]:
    """Yield the entries of both index files of a segment together: an entry is valid only if both files agree."""
    stem = path.rpartition(".")[0]
    data = []
    for suffix in (".index", ".timeindex"):
        try:
            with open(stem + suffix, "rb") as file:
                data.append(file.read())
        except FileNotFoundError:
            report(f"{stem}{suffix} is missing; an entry is valid only if both files agree")
            data.append(b"")
    offsets, times, _ = decode_entries(*data)
    name = os.path.basename(stem)
    base = int(name) if name.isdecimal() else 0
    for number in range(len(offsets)):
        relative, position = map(int, offsets[number].item())
        stamp = int(times[number]["max_timestamp"])
        document: Document = {
            "type": "entry", "entry": number, "offset": base + relative, "relative_offset": relative,
            "position": position, "max_timestamp_before": stamp,
        }  # fmt: skip
        yield document, f"{number}: offset {base + relative} at byte {position}, before it up to {format_time(stamp)}"
    lengths = len(data[0]) // OFFSET_ENTRY.itemsize, len(data[1]) // TIME_ENTRY.itemsize
    if len(offsets) < max(lengths):
        text = (
            f"invalid from entry {len(offsets)} on; the files have {lengths[0]} and {lengths[1]} entries; rebuilt when"
            " needed"
        )
        yield {"type": "damage", "entry": len(offsets), "entries": lengths}, text


def _aborted_lines(data: bytes) -> Iterator[Line]:
    try:
        segment_bytes, aborted = decode_aborted(data)
    except MalformedProducerFile as error:
        yield {"type": "damage", "size_bytes": len(data), "why": str(error)}, f"damaged: {error}; rebuilt when needed"
        return
    document: Document = {"type": "aborts", "segment_bytes": segment_bytes, "count": len(aborted)}
    yield document, f"{len(aborted)} aborted transactions of a segment of {segment_bytes} bytes"
    for abort in aborted:
        document = {
            "type": "abort", "producer_id": abort.producer_id, "first_offset": abort.first_offset,
            "last_offset": abort.last_offset,
        }  # fmt: skip
        yield (
            document,
            f"producer {abort.producer_id}: from offset {abort.first_offset} to its marker at {abort.last_offset}",
        )


def _stub_lines(data: bytes) -> Iterator[Line]:
    try:
        stub = decode_stub(data)
    except MalformedStub as error:
        document: Document = {"type": "damage", "size_bytes": len(data), "why": str(error)}
        yield document, f"damaged: {error}; 'segmentlog ship' writes it again"
        return
    fields = msgspec.structs.asdict(stub)
    yield {"type": "stub", **fields}, "\n".join(f"{key}: {value}" for key, value in fields.items())


def _snapshot_lines(data: bytes) -> Iterator[Line]:
    try:
        entries = decode_snapshot(data)
    except MalformedProducerFile as error:
        yield {"type": "damage", "size_bytes": len(data), "why": str(error)}, f"damaged: {error}; it is ignored"
        return
    yield from _entry_lines(entries)


def _end_snapshot_lines(data: bytes) -> Iterator[Line]:
    try:
        left = decode_end(data)
    except MalformedProducerFile as error:
        yield {"type": "damage", "size_bytes": len(data), "why": str(error)}, f"damaged: {error}; it is ignored"
        return
    document = {"type": "end", "epoch": left.epoch, "base_offset": left.base_offset, "position": left.position}
    yield document, f"up to byte {left.position} of the segment {left.base_offset}, in epoch {left.epoch}"
    yield from _entry_lines(left.entries)


def _entry_lines(entries: list[ProducerEntry]) -> Iterator[Line]:
    for entry in entries:
        document: Document = {"type": "producer", **asdict(entry), "last_sequence": entry.last_sequence}
        document["runs"] = [asdict(run) for run in entry.runs]
        text = (
            f"producer {entry.producer_id}: epoch {entry.epoch}, last sequence {entry.last_sequence},"
            f" ends at offset {entry.next_offset}, last append {format_time(entry.appended_ms)}"
        )
        if entry.wraps:
            text += f", wrapped {entry.wraps} times"
        if entry.transaction_offset >= 0:
            text += f", transaction open since offset {entry.transaction_offset}"
        runs = " ".join(f"{run.sequence}+{run.count}@{run.offset}" for run in entry.runs)
        yield document, text + (f"\n  runs (sequence+count@offset): {runs}" if runs else "")


def _checkpoint_lines(data: bytes) -> Iterator[Line]:
    half = len(data) // 2
    for slot in (0, 1):
        try:
            sequence, checkpoint = decode_slot(data[slot * half : (slot + 1) * half])
        except MalformedCheckpoint as error:
            yield {"type": "damage", "slot": slot, "position": slot * half, "why": str(error)}, f"slot {slot}: {error}"
            continue
        fields = msgspec.structs.asdict(checkpoint)
        document: Document = {"type": "slot", "slot": slot, "sequence": sequence, **fields}
        lines = [f"slot {slot}: sequence {sequence}"]
        for key, value in fields.items():
            lines += [f"  {key}: {value}"] if not isinstance(value, tuple) else _format_nested(key, value)
        yield document, "\n".join(lines)


def _format_nested(key: str, values: tuple[Any, ...]) -> list[str]:
    rows = [" ".join(f"{name}={value}" for name, value in msgspec.structs.asdict(entry).items()) for entry in values]
    return [f"  {key}:", *(f"    {row}" for row in rows)] if rows else [f"  {key}: none"]


def _state_lines(path: str, data: bytes) -> Iterator[Line]:
    if len(data) < PAGE_SIZE:
        yield {"type": "damage", "size_bytes": len(data)}, f"{len(data)} bytes long, but a state page has {PAGE_SIZE}"
        return
    page = StatePage(bytearray(data[:PAGE_SIZE]))
    fs = FileSystem()
    fd = fs.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        reason = distrust_reason(fs, os.path.dirname(os.path.abspath(path)), page, fd)
    finally:
        fs.close(fd)
    flags = {
        "live": reason is None, "doubt": reason or "none", "mount_id": page.mount_id,
        "header_is_sound": page.header_is_sound, "writing": page.writing, "failed": page.failed,
        "config_version": page.config_version, "moved": page.moved, "waiting_until_ms": page.waiting_until_ms,
        "has_producers": bool(page.words[PRODUCERS_WORD]), "aborts": page.words[ABORTS_WORD],
    }  # fmt: skip
    yield {"type": "page", **flags}, "\n".join(f"{key}: {value}" for key, value in flags.items())
    blocks: tuple[tuple[str, Callable[[], msgspec.Struct]], ...] = (("log", page.log.read), ("sync", page.sync.read))
    for name, read in blocks:
        try:
            fields = msgspec.structs.asdict(read())
        except StateDamaged:
            yield {"type": "damage", "block": name}, f"{name}: damaged; the next open recovers the log"
            continue
        text = "\n".join([f"{name}:", *(f"  {key}: {value}" for key, value in fields.items())])
        yield {"type": name, **fields}, text
