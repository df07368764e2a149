"""A batch in a reader's hands: slices of it are what slices of its lists are."""

from __future__ import annotations

import pytest
from batches import NOW_MS, Columns, batch_bytes, codecs, columns, forge, offsets, read_batch
from hypothesis import given
from hypothesis import strategies as st

from segmentlog.errors import UnreadableBatch
from segmentlog.format.batch_codecs import CODEC_LZ4
from segmentlog.format.record_batch import RecordBatch

bounds = st.integers(-3, 25)


def rows(batch: RecordBatch) -> list[tuple[object, ...]]:
    """Return the records of a batch, taken from its columns."""
    return list(
        zip(
            batch.offsets.tolist(), batch.timestamps.tolist(), batch.keys, batch.values, batch.headers, strict=True
        )
    )  # fmt: skip


@given(given=columns(), codec=codecs, first=st.tuples(bounds, st.none() | bounds), second=st.tuples(bounds, bounds))
def test_a_slice_holds_the_records_it_names(given, codec, first, second):
    """A slice, and a slice of a slice, hold the records that slicing a list would give, however far out of range."""
    batch = read_batch(batch_bytes(given, 100, codec=codec))
    expected = rows(batch)
    part = batch
    for start, stop in (first, second):
        part = part.slice(start, stop)
        expected = expected[max(start, 0) : None if stop is None else max(stop, 0)]
        assert len(part) == len(expected)
        assert rows(part) == expected
        assert [(one.offset, one.timestamp, one.key, one.value, one.headers) for one in part] == expected


@given(given=columns(), base_offset=offsets, ahead=st.integers(-5, 40))
def test_reading_from_an_offset_gives_what_is_at_it_or_after(given, base_offset, ahead):
    """From an offset on, a batch returns exactly the records at or after it, with or without gaps."""
    batch = read_batch(batch_bytes(given, base_offset))
    part = read_batch(batch_bytes(given, base_offset))
    assert part.skip_to(base_offset + ahead) == bool(len(part))
    assert part.offsets.tolist() == [offset for offset in batch.offsets.tolist() if offset >= base_offset + ahead]
    assert part.next_offset == batch.next_offset


@given(given=columns(), start=bounds, stop=bounds)
def test_the_bounds_of_a_slice_are_those_of_its_records(given, start, stop):
    """base_offset is the first record's; no record of the batch lies between the last one and next_offset."""
    batch = read_batch(batch_bytes(given, 100))
    part = batch.slice(start, stop)
    following = [offset for offset in batch.offsets.tolist() if offset >= part.next_offset]
    if len(part):
        assert part.base_offset == part.offsets[0]
        assert part.next_offset > part.offsets[-1]
        assert len(following) == len(batch) - part._stop
    else:
        assert part.base_offset == part.next_offset
    assert f"[{part.base_offset}, {part.next_offset})" in repr(part)


def test_a_batch_that_ends_in_a_gap_goes_on_behind_it():
    """If the last records of a batch were compacted away, reading continues at the end of the batch."""
    data = forge(batch_bytes([b"a", b"b"], 10), last_offset_delta=9)
    batch = read_batch(data)
    assert batch.next_offset == 20
    assert not batch.skip_to(15)
    assert (len(batch), batch.values, batch.next_offset) == (0, [], 20)


def test_what_was_decompressed_is_shared_with_slices():
    """A slice of a batch that was decompressed does not decompress it again."""
    batch = read_batch(batch_bytes([b"x" * 500, b"y" * 500], codec=CODEC_LZ4))
    assert batch.values[1] == b"y" * 500
    assert batch.slice(1)._columns is batch._columns is not None


def test_columns_are_decoded_once():
    """Asking for a column twice gives the same list."""
    batch = read_batch(batch_bytes(Columns([b"a"], [b"k"], [1], [(("h", None),)])))
    for name in ("values", "keys", "headers", "offsets", "timestamps"):
        assert getattr(batch, name) is getattr(batch, name)


@pytest.mark.parametrize(
    ("column", "fields"),
    [
        ("values", {"values_size": 6, "keys_size": 7}),
        ("keys", {"values_size": 6, "keys_size": 7}),
        ("headers", {"headers_size": 5, "values_size": 4, "keys_size": 4}),
        ("timestamps", {"timestamps_size": 5, "keys_size": 0, "values_size": 8}),
    ],
)
def test_a_column_that_does_not_decode_is_told_with_its_place(column, fields):
    """A column that its checksum covers and that is none raises UnreadableBatch with the place of the batch."""
    data = forge(batch_bytes(Columns([b"abc", None], [b"d", b""]), 50), **fields)
    batch = read_batch(b"\0" * 10 + data, 10)
    batch._path = "x.log"
    with pytest.raises(UnreadableBatch) as caught:
        getattr(batch, column)
    assert (caught.value.path, caught.value.position) == ("x.log", 10)
    assert (caught.value.offset, caught.value.next_offset, caught.value.record_count) == (50, 52, 2)


def test_a_batch_becomes_arrow():
    """Every column is in Arrow, with times as milliseconds in UTC, and nulls as nulls."""
    pytest.importorskip("pyarrow")
    given = Columns([b"a", None], [None, b"k"], [NOW_MS, NOW_MS + 1], [(("h", b"1"), ("h", None)), ()])
    table = read_batch(batch_bytes(given, 7)).to_arrow()
    assert table.schema.names == ["offset", "timestamp", "key", "value", "headers"]
    assert str(table.schema.field("timestamp").type) == "timestamp[ms, tz=UTC]"
    found = table.set_column(1, "timestamp", table["timestamp"].cast("int64")).to_pylist()
    assert found == [
        {
            "offset": 7, "timestamp": NOW_MS, "key": None, "value": b"a",
            "headers": [{"key": "h", "value": b"1"}, {"key": "h", "value": None}],
        },
        {"offset": 8, "timestamp": NOW_MS + 1, "key": b"k", "value": None, "headers": []},
    ]  # fmt: skip
