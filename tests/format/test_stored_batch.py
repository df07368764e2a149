"""Finished batches that have no place yet: read back from where they wait, stamped, and gaps that hold no record."""

from __future__ import annotations

import pytest
from batches import Columns, batch_bytes, columns, forge, read_batch, read_everything, unpack_header
from hypothesis import given
from hypothesis import strategies as st

from segmentlog.errors import CorruptBatch
from segmentlog.format.batch import HEADER_SIZE, TRANSACTIONAL
from segmentlog.format.batch_codecs import CODEC_LZ4, CODEC_NONE, CODECS
from segmentlog.format.encode import encode_gap
from segmentlog.format.stored_batch import read_stored_batch


def placed(batch: object, base_offset: int = 0, epoch: int = 0) -> bytes:
    """Return the batch as a log stores it."""
    return bytes(batch.placed_at(base_offset, epoch)) + bytes(batch.payload)  # type: ignore[attr-defined]


@given(
    columns().filter(len),
    st.sampled_from([codec.number for codec in CODECS]),
    st.integers(0, 2**40),
    st.integers(0, 2**31),
)
def test_what_is_read_back_is_what_was_encoded(one: Columns, codec: int, base_offset: int, epoch: int) -> None:
    """The decoded batch can be placed at any offset, with the same bytes as the encoded one."""
    data = batch_bytes(one, 0, codec=codec)
    batch = read_stored_batch(memoryview(data), 0, "file")
    assert batch.size_bytes == len(data)
    assert batch.record_count == len(one)
    assert placed(batch, base_offset, epoch) == batch_bytes(one, base_offset, epoch=epoch, codec=codec)
    assert read_everything(placed(batch, base_offset, epoch))[0].offset >= base_offset


def test_batches_one_after_another() -> None:
    """Each batch is read at its own position."""
    parts = [batch_bytes([b"%d" % n] * (n + 1)) for n in range(4)]
    view = memoryview(b"".join(parts))
    position = 0
    for n, part in enumerate(parts):
        batch = read_stored_batch(view, position, "file")
        assert (batch.record_count, batch.size_bytes) == (n + 1, len(part))
        position += batch.size_bytes
    assert position == len(view)


@given(st.data())
def test_every_byte_counts(data: st.DataObject) -> None:
    """A bit that has changed anywhere, or an end that is missing, is damage with file and position."""
    good = batch_bytes([b"value"] * 3, codec=CODEC_NONE)
    bad = bytearray(good)
    if data.draw(st.booleans()):
        bad[data.draw(st.integers(0, len(bad) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    else:
        del bad[data.draw(st.integers(0, len(bad) - 1)) :]
    with pytest.raises(CorruptBatch) as told:
        read_stored_batch(memoryview(b"." * 7 + bytes(bad)), 7, "the file")
    assert told.value.path == "the file"
    assert told.value.position >= 7


@given(st.integers(0, 2**61), st.integers(0, 32_000), st.integers(0, 2**31 - 1), st.booleans(), st.sampled_from([0, 1]))
def test_stamps(producer_id: int, epoch: int, sequence: int, transactional: bool, codec: int) -> None:
    """The producer's numbers are in the header, the rest is as it was, and both checksums are right."""
    plain = batch_bytes([b"v" * 100] * 5, codec=(CODEC_NONE, CODEC_LZ4)[codec])
    batch = read_stored_batch(memoryview(plain), 0, "")
    batch.set_producer(7, 7, 7, transactional=not transactional)  # the second call must overwrite all of this
    batch.set_producer(producer_id, epoch, sequence, transactional=transactional)
    found, before = unpack_header(placed(batch, 0)), unpack_header(plain)
    assert (found["producer_id"], found["producer_epoch"], found["base_sequence"]) == (producer_id, epoch, sequence)
    assert bool(found["attributes"] & TRANSACTIONAL) == transactional
    assert found["attributes"] & ~TRANSACTIONAL == before["attributes"]
    changed = {"producer_id", "producer_epoch", "base_sequence", "attributes", "header_checksum"}
    assert {name: found[name] for name in found.keys() - changed} == {
        name: before[name] for name in before.keys() - changed
    }
    assert read_batch(placed(batch, 0)).values == [b"v" * 100] * 5


@pytest.mark.parametrize("count", [1, 2, 1000, 2**32])
def test_gaps(count: int) -> None:
    """A batch may have offsets and no record: a reader skips it."""
    batch = encode_gap(count)
    assert batch.size_bytes == HEADER_SIZE + 1
    read = read_batch(placed(batch, 100, 3))
    assert len(read) == 0
    assert (read.header.base_offset, read.header.next_offset, read.epoch) == (100, 100 + count, 3)


def test_a_forged_batch_is_read_as_it_says() -> None:
    """A header with a right checksum and a wrong size is damage all the same."""
    with pytest.raises(CorruptBatch):
        read_stored_batch(memoryview(forge(batch_bytes([b"x"] * 3), payload_size=2**31)), 0, "")
