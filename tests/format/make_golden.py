"""Create the files in ``golden/``. This ran once, and the files are committed: never create them again.

    python tests/format/make_golden.py

Each batch is two files: ``NAME.batch``, its bytes, and ``NAME.json``, its input and the records that it must decode to.
A new case gets new files; existing files are never overwritten: stores in the field hold bytes like these. Byte
strings are stored in the JSON as Latin-1.
"""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from segmentlog.format.batch import CONTROL, TRANSACTIONAL
from segmentlog.format.batch_codecs import CODEC_GZIP, CODEC_LZ4, CODEC_NONE, CODEC_SNAPPY, CODEC_ZSTD, compression_of
from segmentlog.format.checkpoint import SLOT_SIZE, Checkpoint, encode_slot
from segmentlog.format.encode import encode_batch
from segmentlog.format.index_file import encode_entries
from segmentlog.records import EpochStart, LostRange

GOLDEN = Path(__file__).parent / "golden"
NOW_MS = 1_700_000_000_000

_LINES = [f"line {number} of a text that LZ4 can do something about" for number in range(40)]

# Arguments of `encode_batch` and `placed_at`; those with default values are left out.
BATCHES: dict[str, dict[str, Any]] = {
    "plain": {"values": ["hello", "", "world"]},
    "one_null_value": {"values": [None], "base_offset": 2**40, "epoch": 7},
    "keyed": {"values": ["1", "2", "3"], "keys": ["a", "b", "a"], "base_offset": 10},
    "nulls": {"values": ["1", None, "", None], "keys": [None, "k", "", None]},
    "headers": {
        "values": ["x", "y", "z"],
        "headers": [[["trace", "\x00\x01"], ["trace", None]], [], [["Größe", ""]]],
    },
    "timestamps_i4": {"values": ["a", "b", "c"], "timestamps": [NOW_MS, NOW_MS - 1000, NOW_MS + 2**31 - 1]},
    "timestamps_i8": {"values": ["a", "b", "c"], "timestamps": [NOW_MS, 0, NOW_MS + 2**31]},
    "timestamps_equal": {"values": ["a", "b"], "timestamps": [5, 5]},
    "log_append_time": {
        "values": ["a", "b"], "timestamps": [1, 2], "base_offset": 3, "epoch": 1, "append_time_ms": NOW_MS + 5,
    },
    "offset_deltas": {"values": ["a", "b"], "keys": ["k", "l"], "offset_deltas": [3, 70_000], "base_offset": 100},
    "producer": {
        "values": ["a", "b"], "producer_id": 2**53 + 1, "producer_epoch": 3, "base_sequence": 41,
        "attributes": TRANSACTIONAL, "base_offset": 9,
    },
    "control": {"values": ["\x00\x00"], "keys": ["\x00\x01"], "attributes": TRANSACTIONAL | CONTROL, "producer_id": 1},
    "everything": {
        "values": ["v0", None, "v2"], "keys": ["k0", "k1", None], "timestamps": [NOW_MS, NOW_MS + 1, NOW_MS],
        "headers": [[], [["h", "1"]], [["h", None]]], "offset_deltas": [0, 2, 9],
        "base_offset": 2**62, "epoch": 2**32 - 1, "producer_id": 0, "producer_epoch": 0, "base_sequence": 2**31 - 1,
    },
    "array16": {"values": ["x"] * 16},
    "lz4": {"values": _LINES, "codec": CODEC_LZ4, "base_offset": 1000},
    "zstd": {"values": _LINES, "codec": CODEC_ZSTD, "base_offset": 1000},
    "gzip": {"values": _LINES, "codec": CODEC_GZIP, "base_offset": 1000},
    "snappy": {"values": _LINES, "codec": CODEC_SNAPPY, "base_offset": 1000},
    "lz4_everything": {
        "values": _LINES, "keys": [f"key {number % 4}" for number in range(40)],
        "timestamps": [NOW_MS + number for number in range(40)],
        "headers": [[["number", str(number)]] for number in range(40)],
        "offset_deltas": list(range(0, 80, 2)), "codec": CODEC_LZ4, "base_offset": 5, "epoch": 3,
    },
    "lz4_too_small": {"values": ["a" * 200], "codec": CODEC_LZ4},
}  # fmt: skip

CHECKPOINTS = [
    Checkpoint(boot_id="11111111-2222-3333-4444-555555555555"),
    Checkpoint(
        recovery_offset=5000,
        recovery_segment=4000,
        recovery_position=123_456,
        log_start_offset=17,
        offset_ceiling=1_005_000,
        clean=False,
        boot_id="11111111-2222-3333-4444-555555555555",
        epochs=(EpochStart(0, 0), EpochStart(1, 3000)),
        lost_ranges=(LostRange(2900, 3000, 1, "offsets may have been handed out", NOW_MS),),
    ),
]

INDEX_ENTRIES = [[10, 4100, NOW_MS], [25, 8300, NOW_MS], [26, 12_400, NOW_MS + 9], [2**32 - 1, 2**31 - 1, 2**63 - 1]]


_TOPIC_ID = "6a2bd7f4-3a4c-4f0e-9c3b-b3a9a3e54d10"
_STATE = [2**60 + 1, 3, "PrepareCommit", 60_000, NOW_MS, NOW_MS + 1]

# Records of the internal topics, as arrays that MessagePack holds: of both formats of a store.
INTERNAL_RECORDS: dict[str, tuple[list[Any], list[Any]]] = {
    "position": ([2, "billing", _TOPIC_ID, 4], [1000, 3, "half way", NOW_MS, 7, "member-1"]),
    "position_by_name": ([1, "billing", "orders", 4], [1000, 3, "half way", NOW_MS, 7, "member-1"]),
    "transaction": (
        [2, "etl-1"],
        [*_STATE, [[_TOPIC_ID, 0]], [[_TOPIC_ID, 1, 99, 2]], 17, {_TOPIC_ID: 3}, [42], "a note"],
    ),
    "transaction_by_name": (
        [1, "etl-1"],
        [*_STATE, [["orders", 0]], [["orders", 1, 99, 2]], 17, {"orders": 3}, [42], "a note"],
    ),
}


def make_batch(case: dict[str, Any]) -> bytes:
    """Return the batch that a case describes, placed."""
    timestamps, deltas = case.get("timestamps"), case.get("offset_deltas")
    options = {
        name: case[name]
        for name in ("attributes", "producer_id", "producer_epoch", "base_sequence")
        if name in case
    }  # fmt: skip
    batch = encode_batch(
        blobs(case["values"]),
        blobs(case.get("keys")),
        None if timestamps is None else np.array(timestamps, np.int64),
        headers(case.get("headers")),
        now_ms=NOW_MS,
        compression=compression_of(case.get("codec", CODEC_NONE)),
        offset_deltas=None if deltas is None else np.array(deltas, np.uint32),
        **options,
    )
    header = batch.placed_at(case.get("base_offset", 0), case.get("epoch", 0), case.get("append_time_ms"))
    return bytes(header) + bytes(batch.payload)


def blobs(texts: list[str | None] | None) -> Any:
    """Return a column of byte strings from its form in JSON."""
    return texts if texts is None else [None if text is None else text.encode("latin-1") for text in texts]


def headers(rows: list[list[list[str | None]]] | None) -> Any:
    """Return a column of headers from its form in JSON."""
    return rows if rows is None else [tuple((row[0], blobs(row[1:])[0]) for row in one) for one in rows]


def records(case: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the records that the batch must decode to, computed from the input."""
    count = len(case["values"])
    columns = {
        "offset": [case.get("base_offset", 0) + delta for delta in case.get("offset_deltas", range(count))],
        "timestamp": case.get("timestamps", [NOW_MS] * count),
        "key": case.get("keys", [None] * count),
        "value": case["values"],
        "headers": case.get("headers", [[]] * count),
    }
    if "append_time_ms" in case:
        columns["timestamp"] = [case["append_time_ms"]] * count
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def header_fields(data: bytes) -> dict[str, Any]:
    """Return the header of a batch, field by field, read without the library."""
    names = [
        *["magic", "attributes", "producer_epoch", "base_offset", "partition_epoch", "last_offset_delta"],
        *["base_timestamp", "max_timestamp", "producer_id", "base_sequence", "record_count", "payload_size"],
        *["raw_size", "timestamps_size", "keys_size", "values_size", "headers_size"],
        *["payload_checksum", "header_checksum"],
    ]
    fields = dict(zip(names, struct.unpack_from("<4sHhqIIqqqiIIIIIIIQQ", data), strict=True))
    return fields | {"magic": fields["magic"].decode("latin-1")}


def write_new(name: str, data: bytes) -> None:
    """Write a golden file that is not there yet; one that is there is left alone."""
    try:
        with open(GOLDEN / name, "xb") as file:
            file.write(data)
    except FileExistsError:
        sys.stderr.write(f"{name} is there already; golden files are not made again\n")


def write_json(name: str, document: object) -> None:
    """Write a golden JSON file that is not there yet."""
    write_new(name, json.dumps(document, indent=1, ensure_ascii=True).encode() + b"\n")


def main() -> None:
    """Write every file that is not there yet."""
    GOLDEN.mkdir(exist_ok=True)
    for name, case in BATCHES.items():
        data = make_batch(case)
        if not (GOLDEN / f"{name}.batch").exists():
            write_json(f"{name}.json", {"input": case, "header": header_fields(data), "records": records(case)})
        write_new(f"{name}.batch", data)
    slots = [encode_slot(checkpoint, 8 + at) for at, checkpoint in enumerate(CHECKPOINTS)]
    write_new("checkpoint.bin", b"".join(slot.ljust(SLOT_SIZE, b"\0") for slot in slots))
    columns = np.array(INDEX_ENTRIES, np.int64).T
    offsets, times = encode_entries(columns[0].astype(np.uint32), columns[1].astype(np.uint32), columns[2])
    write_new("segment.index", offsets)
    write_new("segment.timeindex", times)
    write_json("segment.index.json", INDEX_ENTRIES)
    for name, (key, value) in INTERNAL_RECORDS.items():
        write_new(f"{name}.key", msgspec.msgpack.encode(key))
        write_new(f"{name}.value", msgspec.msgpack.encode(value))


if __name__ == "__main__":
    main()
