"""Payloads that were changed under right checksums: one check decides, and no access to a batch contradicts it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
from batches import Columns, batch_bytes, codecs, columns, forge, read_batch
from cores import WAYS, use_way
from hypothesis import given, settings
from hypothesis import strategies as st
from raw_batches import batch as raw_batch
from raw_batches import record
from wire import CODECS, NOW_MS, Sent, foreign, forged, sent, stored

from segmentlog.errors import UnreadableBatch
from segmentlog.format.batch import WIRE_HEADER_SIZE, claimed_header, header_flaw
from segmentlog.format.decoded_batch import record_batch
from segmentlog.format.examine import IntactBatch, examine_segment
from segmentlog.format.record_batch import RecordBatch
from segmentlog.format.wire_conversion import to_wire_batches
from segmentlog.log.recovery.truncate_tail import split_batch

ACCESSES: dict[str, Callable[[RecordBatch], Any]] = {
    "values": lambda batch: batch.values,
    "keys": lambda batch: batch.keys,
    "headers": lambda batch: batch.headers,
    "offsets": lambda batch: batch.offsets,
    "timestamps": lambda batch: batch.timestamps,
    "records": lambda batch: list(batch.records()),
    "identities": lambda batch: batch.key_identities(7),
    "nulls": lambda batch: batch.values_may_be_null(),
    "has": lambda batch: (batch.has_keys, batch.has_headers, batch.has_gaps, batch.raw_size_bytes),
    "places": lambda batch: (batch.base_offset, batch.next_offset, len(batch), repr(batch)),
    "columns": lambda batch: (len(batch.keys_column), len(batch.values_column)),
    "slice": lambda batch: list(batch.slice(1, 3).records()),
    "slice's end": lambda batch: batch.slice(1, 2).next_offset,
    "skip": lambda batch: record_batch(batch.header, batch.payload).skip_to(batch.header.base_offset + 1),
    "wire": lambda batch: b"".join(to_wire_batches(batch)),
    "split": lambda batch: split_batch(batch, batch.header.next_offset),
}
if importlib.util.find_spec("pyarrow"):
    ACCESSES["arrow"] = lambda batch: batch.to_arrow()


def check_every_access(data: bytes, order: list[str]) -> bool:
    """Return whether the batch is readable, and check that every access agrees."""
    try:
        read_batch(data).check()
    except UnreadableBatch as error:
        unreadable: UnreadableBatch | None = error
    else:
        unreadable = None
    batch = read_batch(data)
    for name in order:
        refused = None
        try:
            ACCESSES[name](batch)
        except UnreadableBatch as error:
            refused = error
        assert refused is None or unreadable is not None, (name, refused)
    (item,) = examine_segment(memoryview(data), 0, len(data), "", expected_offset=0)
    assert isinstance(item, IntactBatch)
    assert (item.unreadable is None) == (unreadable is None)
    if unreadable is not None:
        with pytest.raises(UnreadableBatch):
            list(read_batch(data).records())
    return unreadable is None


def changed(draw: st.DataObject, raw: bytes) -> bytes:
    """Draw a variant with up to three bytes changed, added, or cut out in pieces."""
    made = bytearray(raw)
    for _ in range(draw.draw(st.integers(1, 3))):
        at = draw.draw(st.integers(0, max(len(made) - 1, 0)))
        what = draw.draw(st.sampled_from(["change", "change", "change", "cut", "add"]))
        if what == "add" or not made:
            made[at:at] = draw.draw(st.binary(min_size=1, max_size=3))
        elif what == "cut":
            del made[at : at + draw.draw(st.integers(1, 5))]
        else:
            made[at] = draw.draw(st.sampled_from([0, 1, 0x7F, 0x80, 0xC0, 0xFE, 0xFF]) | st.integers(0, 255))
    return bytes(made)


orders = st.permutations(list(ACCESSES))


@settings(max_examples=50, deadline=None)
@given(columns(), codecs, orders, st.data())
def test_columns(made: Columns, codec: int, order: list[str], data: st.DataObject) -> None:
    """A payload of columns, compressed or not, of which bytes are others."""
    whole = batch_bytes(made, 50, codec=codec)
    assert check_every_access(whole, order)
    payload = changed(data, whole[96:])
    fields = {"payload_size": len(payload)} | ({"raw_size": len(payload)} if not whole[4] & 7 else {})
    spoilt = forge(whole, payload=payload, **fields)
    if header_flaw(claimed_header(memoryview(spoilt), 0)) is None:  # else it is damage
        check_every_access(spoilt, order)


@settings(max_examples=50, deadline=None)
@given(sent(), st.sampled_from(list(CODECS.values())), orders, st.data())
def test_batches_of_kafka(records: list[Sent], codec: int, order: list[str], data: st.DataObject) -> None:
    """A client's records, compressed or not, of which bytes are others, or whose number is another one."""
    whole = foreign(records, codec)
    assert check_every_access(stored(whole, 50), order)
    made = whole[:WIRE_HEADER_SIZE] + changed(data, whole[WIRE_HEADER_SIZE:])
    count = len(records) + data.draw(st.sampled_from([0, 0, 1]))
    fields = {"batch_length": len(made) - 12, "record_count": count, "last_offset_delta": count - 1}
    check_every_access(stored(forged(made, **fields), 50), order)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("access", ["values", "keys", "headers", "timestamps", "records", "nulls", "columns"])
def test_a_wrong_header_is_refused_by_every_access(way: str, access: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that does not use headers refuses the same batches, with and without the compiled core."""
    use_way(way, monkeypatch)
    null_name = b"\2\1\0"
    payload = b"".join(record(delta, headers=null_name if delta == 20 else b"\0") for delta in range(40))
    data = stored(raw_batch(NOW_MS, payload, 40), 50)
    with pytest.raises(UnreadableBatch, match="record 20: the name of a header"):
        ACCESSES[access](read_batch(data))
