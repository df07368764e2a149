"""docs/format.md says what the bytes are: its dump, its reader, its tables and its hash are checked here."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from batches import NOW_MS, Columns, batch_bytes, columns, expected_records, offsets, read_batch
from hypothesis import given
from hypothesis import strategies as st
from wire import Sent, foreign, stored

from segmentlog.format.batch import BatchHeader, decode_header
from segmentlog.format.checkpoint import Checkpoint
from segmentlog.format.index_file import OFFSET_ENTRY, TIME_ENTRY, encode_entries
from segmentlog.format.wire import WireHeader, parse_wire_batch
from segmentlog.format.wire_records import varint
from segmentlog.storage.state_page import LogState, SyncState

PAGE = (Path(__file__).parents[2] / "docs" / "format.md").read_text()
GOLDEN = Path(__file__).parent / "golden"
EXAMPLE = Columns(
    [b"hello", b"world"], [b"k1", None], [NOW_MS, NOW_MS + 5], [(("trace", b"\x07"),), ()]
)  # fmt: skip


class Line(NamedTuple):
    """One line of the dump: where its bytes lie, the bytes, and what the page says they are."""

    position: int
    data: bytes
    field: str
    value: str


def dump(title: str = "A worked example") -> list[Line]:
    """Return the lines of a worked example."""
    block = section(title).split("```text\n")[1].split("```")[0]
    lines = [line for line in block.splitlines()[1:] if line]
    found = [re.fullmatch(r"([0-9a-f]{4})  ((?:[0-9a-f]{2} )+) +(\S+) +(\S.*)", line) for line in lines]
    assert all(found), "every line has a position, bytes, a field and a value"
    return [Line(int(one[1], 16), bytes.fromhex(one[2]), one[3], one[4]) for one in found if one]


def section(title: str) -> str:
    """Return the text below a heading of the page, up to the next heading."""
    return re.split(r"^#+ .*$", PAGE.split(f"# {title}\n")[1], maxsplit=1, flags=re.MULTILINE)[0]


def table_column(title: str, column: int) -> list[str]:
    """Return the texts between backquotes in one column of the tables of a section."""
    rows = [row.split("|")[1:-1] for row in section(title).splitlines() if row.startswith("|")]
    return [found for row in rows if len(row) > column for found in re.findall(r"`([^`]+)`", row[column])]


def test_the_dump_is_the_batch():
    """The bytes on the page are those that the records of the example are encoded to."""
    lines = dump()
    assert b"".join(line.data for line in lines) == batch_bytes(EXAMPLE, 1000, epoch=3)
    assert list(read_batch(b"".join(line.data for line in lines))) == expected_records(EXAMPLE, 1000, epoch=3)


def test_the_positions_in_the_dump_are_right():
    """Each line begins where the previous one ends, and the page has their sum."""
    position = 0
    for line in dump():
        assert line.position == position, line.field
        position += len(line.data)
    assert f"All {position} bytes:" in section("A worked example")


def test_the_header_in_the_dump_is_annotated_rightly():
    """Every field of the header is in the dump, in order, with the value of its bytes."""
    lines = dump()
    header = decode_header(memoryview(b"".join(line.data for line in lines)), 0)
    fields = lines[: len(BatchHeader.__struct_fields__)]
    assert [line.field for line in fields] == list(BatchHeader.__struct_fields__)
    for line in fields:
        expected = getattr(header, line.field)
        assert ast.literal_eval(line.value) == (expected.decode() if isinstance(expected, bytes) else expected)


def test_the_payload_in_the_dump_is_annotated_rightly():
    """Every item of every column has a line, whose text describes its bytes."""
    batch = read_batch(b"".join(line.data for line in dump()))
    items: dict[str, Any] = {"keys": batch.keys, "values": batch.values, "headers": batch.headers}
    described = set()
    for line in dump()[len(BatchHeader.__struct_fields__) :]:
        name, *path = re.findall(r"\w+", line.field)
        described.add(line.field)
        if name == "timestamps":
            assert int.from_bytes(line.data, "little", signed=True) == int(line.value)
            assert batch.timestamps[int(path[0])] == NOW_MS + int(line.value)
            continue
        item = items[name]
        for step in path:
            item = item[int(step)]
        if line.value.startswith("array of "):
            assert len(item) == int(line.value.removeprefix("array of "))
            assert line.data == bytes([0x90 | len(item)])
        else:
            text = None if line.value == "nil" else ast.literal_eval(line.value)
            assert item == (text if text is None or isinstance(item, str) else text.encode("latin-1"))
            assert msgspec.msgpack.decode(line.data) == item
    assert {f"{name}[{at}]" for name in ("timestamps", "keys", "values", "headers") for at in (0, 1)} <= described


def test_the_example_of_kafkas_layout():
    """Its bytes are those of such a batch at this place, each line describes them, and their sum is right."""
    lines = dump("An example of Kafka's layout")
    data = b"".join(line.data for line in lines)
    records = [Sent(b"k1", b"hello", NOW_MS, (("trace", b"\x07"),)), Sent(None, b"world", NOW_MS + 5)]
    assert data == stored(foreign(records), 1000, 3)
    assert [line.position for line in lines] == [sum(len(one.data) for one in lines[:at]) for at in range(len(lines))]
    assert f"All {len(data)} bytes:" in section("An example of Kafka's layout")
    ours, theirs = len(BatchHeader.__struct_fields__), len(WireHeader._fields)
    headers = (decode_header(memoryview(data), 0), parse_wire_batch(data[96:]))
    for header, part in zip(headers, (lines[:ours], lines[ours : ours + theirs]), strict=True):
        for line in part:
            expected = getattr(header, line.field)
            assert ast.literal_eval(line.value) == (expected.decode() if isinstance(expected, bytes) else expected)
    for line in lines[ours + theirs :]:
        value = ast.literal_eval(line.value)
        plain = value.encode("latin-1") if isinstance(value, str) else varint(value)
        assert line.data == plain


def test_the_fields_of_kafkas_header_are_on_the_page():
    """The page has the fields in order."""
    assert table_column("Kafka's layout", 1)[: len(WireHeader._fields)] == list(WireHeader._fields)


def test_the_sizes_on_the_page_add_up():
    """The sum that the page spells out is that of the column sizes in its dump."""
    sizes = [int(line.value) for line in dump() if line.field.endswith("s_size")]
    (raw_size,) = [int(line.value) for line in dump() if line.field == "raw_size"]
    assert " + ".join(map(str, sizes)) + f" = {raw_size}" in section("A worked example")
    assert sum(sizes) == raw_size


# ---------------------------------------------------------------- the reader on the page


@pytest.fixture(scope="module")
def reader() -> dict[str, Any]:
    """Return the Python on the page, run."""
    code = section("A reader").split("```python\n")[1].split("```")[0]
    assert "segmentlog" not in code
    namespace: dict[str, Any] = {}
    exec(compile(code, "docs/format.md", "exec"), namespace)
    return namespace


@given(
    given=st.lists(columns(max_size=5), min_size=1, max_size=4),
    base_offset=offsets,
    codec=st.sampled_from([0, 3, 4]),
    append_time_ms=st.none() | st.integers(0, 2**62),
)
def test_the_reader_on_the_page_reads_segments(reader, given, base_offset, codec, append_time_ms):
    """Forty lines of Python that know this page only read the records that segmentlog wrote."""
    data, offset, expected = b"", base_offset % 2**60, []
    first = offset
    for one in given:
        data += batch_bytes(one, offset, codec=codec, append_time_ms=append_time_ms)
        expected += expected_records(one, offset)
        offset = expected[-1].offset + 1
    found = list(reader["read_segment"](data, first, len(data)))
    assert [(at, key, value, [tuple(pair) for pair in headers]) for at, _, key, value, headers in found] == [
        (one.offset, one.key, one.value, list(one.headers)) for one in expected
    ]
    times = [one.timestamp if append_time_ms is None else append_time_ms for one in expected]
    assert [timestamp for _, timestamp, *_ in found] == times


@pytest.mark.parametrize("name", sorted(path.stem for path in GOLDEN.glob("*.batch")))
def test_the_reader_on_the_page_reads_golden_batches(reader, name):
    """The page describes what older versions wrote, too."""
    data = (GOLDEN / f"{name}.batch").read_bytes()
    golden = json.loads((GOLDEN / f"{name}.json").read_text())
    next_offset, epoch, records, behind = reader["read_batch"](data, 0)
    header = golden["header"]
    assert behind == len(data)
    assert epoch == header["partition_epoch"]
    assert next_offset == header["base_offset"] + header["last_offset_delta"] + 1
    expected = [] if header["attributes"] & 32 else golden["records"]
    assert [record[0] for record in records] == [one["offset"] for one in expected]
    assert [record[3] for record in records] == [
        None if one["value"] is None else one["value"].encode("latin-1") for one in expected
    ]


def test_the_reader_on_the_page_notices_damage(reader):
    """It refuses a flip of any byte, a cut anywhere, and decreasing offsets, as the page demands of a reader."""
    data = batch_bytes(EXAMPLE, 1000, epoch=3)
    for at in range(len(data)):
        flipped = bytearray(data)
        flipped[at] ^= 0x10
        for damaged in (bytes(flipped), data[:at]):
            with pytest.raises(ValueError, match=r"."):
                reader["read_batch"](damaged, 0)
    with pytest.raises(ValueError, match="go back"):
        list(reader["read_segment"](data + data, 1000, 2 * len(data)))


# ---------------------------------------------------------------- the tables on the page


def test_the_tables_name_every_field_in_order():
    """The page must name each field of a batch header, an index entry, a checkpoint and a state page."""
    assert table_column("A batch", 1)[: len(BatchHeader.__struct_fields__)] == list(BatchHeader.__struct_fields__)
    assert table_column("`.index` and `.timeindex`", 2) == [*OFFSET_ENTRY.names, *TIME_ENTRY.names]
    names = table_column("`checkpoint`", 1)
    assert names[-len(Checkpoint.__struct_fields__) :] == list(Checkpoint.__struct_fields__)
    names = table_column("The state page", 1)
    fields = [*LogState.__struct_fields__, *SyncState.__struct_fields__]
    assert names[-len(fields) :] == fields
    text = section("The state page")
    assert f"a block of {len(LogState.__struct_fields__)} fields, written under the lock on `lock`" in text
    assert f"a block of {len(SyncState.__struct_fields__)} fields, written under the lock on `state`" in text


def test_the_positions_in_the_header_table_are_right():
    """The positions in the table of the batch header are those of the dump."""
    rows = re.findall(r"^\| (\d+) \| `(\w+)`", section("A batch"), flags=re.MULTILINE)
    lines = dump()[: len(BatchHeader.__struct_fields__)]
    assert [(int(position), field) for position, field in rows] == [(line.position, line.field) for line in lines]


@given(relative=st.integers(0, 2**32 - 1), position=st.integers(1, 2**32 - 1), stamp=st.integers(0, 2**63 - 1))
def test_the_hash_on_the_page_is_that_of_the_index(relative, position, stamp):
    """The formula, typed off the page, gives the check of every entry."""
    assert "x     = max_timestamp + 0x9E3779B97F4A7C15" in PAGE
    mask = 2**64 - 1
    x = (stamp + 0x9E3779B97F4A7C15) & mask
    x = ((x ^ ((position << 32 | relative) * 0xC2B2AE3D27D4EB4F & mask)) * 0x9E3779B97F4A7C15) & mask
    check = ((x ^ (x >> 32)) * 0xC2B2AE3D27D4EB4F & mask) >> 32
    _, times = encode_entries(np.array([relative], "<u4"), np.array([position], "<u4"), np.array([stamp], "<i8"))
    assert int(np.frombuffer(times, TIME_ENTRY)["check"][0]) == check
