"""Bytes that were written once stay readable, and stay what is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from batches import HEADER_FIELDS, Columns, batch_bytes, read_batch, unpack_header

from segmentlog.format.batch import BatchHeader, decode_header
from segmentlog.format.batch_codecs import BY_NUMBER, CODEC_NONE
from segmentlog.format.checkpoint import SLOT_SIZE, Checkpoint, Compacted, decode_checkpoint, decode_slot, encode_slot
from segmentlog.format.index_file import decode_entries, encode_entries
from segmentlog.records import EpochStart, LostRange

GOLDEN = Path(__file__).parent / "golden"
NAMES = sorted(path.stem for path in GOLDEN.glob("*.batch"))
NOW_MS = 1_700_000_000_000

NEWER_CHECKPOINT = Checkpoint(
    recovery_offset=5000,
    recovery_segment=4000,
    recovery_position=123_456,
    log_start_offset=17,
    offset_ceiling=1_005_000,
    clean=False,
    boot_id="11111111-2222-3333-4444-555555555555",
    epochs=(EpochStart(0, 0), EpochStart(1, 3000)),
    lost_ranges=(LostRange(2900, 3000, 1, "offsets may have been handed out", NOW_MS),),
)


def load(name: str) -> tuple[bytes, dict[str, Any]]:
    """(bytes of the batch, what its JSON says about it)."""
    return (GOLDEN / f"{name}.batch").read_bytes(), json.loads((GOLDEN / f"{name}.json").read_text())


def blobs(texts: list[str | None] | None) -> list[bytes | None] | None:
    """Return a column of byte strings from its form in JSON."""
    return texts if texts is None else [None if text is None else text.encode("latin-1") for text in texts]


def headers(rows: list[list[list[Any]]] | None) -> list[Any] | None:
    """Return a column of headers from its form in JSON."""
    return rows if rows is None else [tuple((name, (blobs([value]) or [])[0]) for name, value in one) for one in rows]


def encode_again(case: dict[str, Any]) -> bytes:
    """Return the bytes that today's encoder makes of a golden input."""
    given = dict(case)
    columns = Columns(
        blobs(given.pop("values")) or [],
        blobs(given.pop("keys", None)),
        given.pop("timestamps", None),
        headers(given.pop("headers", None)),
        given.pop("offset_deltas", None),
    )
    return batch_bytes(columns, given.pop("base_offset", 0), now_ms=NOW_MS, **given)


def test_there_are_golden_batches_of_every_kind():
    """The golden batches include every codec, every column and both widths of timestamps."""
    found = [load(name)[1]["header"] for name in NAMES]
    assert {header["attributes"] & 7 for header in found} == set(BY_NUMBER)
    for size in ("timestamps_size", "keys_size", "headers_size"):
        assert {bool(header[size]) for header in found} == {False, True}
    assert {header["timestamps_size"] // header["record_count"] for header in found} == {0, 4, 8}
    assert any(load(name)[1]["input"].get("offset_deltas") for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_golden_batch_reads_as_it_was_written(name):
    """A batch written by an older version gives back every field, and every record to the byte."""
    data, golden = load(name)
    header = decode_header(memoryview(data), 0)
    golden["header"]["magic"] = golden["header"]["magic"].encode("latin-1")
    assert {field: getattr(header, field) for field in HEADER_FIELDS} == golden["header"]
    assert header.size_bytes == len(data)
    found = [
        {
            "offset": record.offset,
            "timestamp": record.timestamp,
            "key": record.key,
            "value": record.value,
            "headers": record.headers,
        }
        for record in read_batch(data)
    ]
    expected = golden["records"]
    for decode, column in ((blobs, "key"), (blobs, "value"), (headers, "headers")):
        for one, item in zip(expected, decode([one[column] for one in expected]) or [], strict=True):
            one[column] = item
    assert found == expected


@pytest.mark.parametrize("name", [name for name in NAMES if load(name)[1]["header"]["attributes"] & 7 == CODEC_NONE])
def test_an_uncompressed_batch_is_written_as_ever(name):
    """Encoding a golden input gives the golden file, byte for byte."""
    data, golden = load(name)
    assert encode_again(golden["input"]) == data


@pytest.mark.parametrize("name", [name for name in NAMES if load(name)[1]["header"]["attributes"] & 7 != CODEC_NONE])
def test_a_compressed_batch_is_written_with_the_same_header(name):
    """A newer release of a codec may find shorter bytes; everything else equals the golden file."""
    data, golden = load(name)
    fresh = encode_again(golden["input"])
    differ = {"payload_size", "payload_checksum", "header_checksum"}
    old, new = unpack_header(data), unpack_header(fresh)
    assert {field: old[field] for field in old.keys() - differ} == {field: new[field] for field in new.keys() - differ}
    assert list(read_batch(fresh)) == list(read_batch(data))


def test_the_header_is_the_struct_that_the_tests_spell_out():
    """A field that is added, removed or moved must be changed in this second list of them, too."""
    assert BatchHeader.__struct_fields__ == tuple(HEADER_FIELDS)


def test_a_golden_checkpoint_reads_as_it_was_written():
    """The newer one of the two slots counts, with all fields that were written."""
    data = (GOLDEN / "checkpoint.bin").read_bytes()
    assert len(data) == 2 * SLOT_SIZE
    assert decode_checkpoint(data) == (9, NEWER_CHECKPOINT, False)
    assert decode_slot(data[:SLOT_SIZE]) == (8, Checkpoint(boot_id="11111111-2222-3333-4444-555555555555"))


def test_a_checkpoint_is_written_as_ever():
    """The bytes of a slot are those of the golden file."""
    compacted = msgspec.structs.replace(
        NEWER_CHECKPOINT, compacted=Compacted(200, 3, 1_700_000_086_400_000, 250), has_producers=True
    )
    assert encode_slot(compacted, 9) == (GOLDEN / "checkpoint_compacted.bin").read_bytes()
    assert decode_slot(encode_slot(compacted, 9)) == (9, compacted)


def test_a_golden_index_reads_and_is_written_as_ever():
    """Both files of an index decode to the golden entries, and these encode to the files."""
    offset_bytes = (GOLDEN / "segment.index").read_bytes()
    time_bytes = (GOLDEN / "segment.timeindex").read_bytes()
    expected = json.loads((GOLDEN / "segment.index.json").read_text())
    entries, times, whole = decode_entries(offset_bytes, time_bytes)
    assert whole
    assert entries.tolist() == [(relative, position) for relative, position, _ in expected]
    assert [(stamp, relative) for stamp, relative, _ in times.tolist()] == [
        (stamp, relative) for relative, _, stamp in expected
    ]
    columns = np.array(expected, np.int64).T
    again = encode_entries(columns[0].astype(np.uint32), columns[1].astype(np.uint32), columns[2])
    assert again == (offset_bytes, time_bytes)
