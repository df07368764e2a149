"""Records of one length each, put together as tables."""

from __future__ import annotations

import numpy as np
import pytest

from segmentlog.format.columns import array_of
from segmentlog.format.splice import as_table
from segmentlog.format.wire_encode import encode_wire_batch
from segmentlog.format.wire_tables import encode_tables


@pytest.mark.parametrize("count", [32, 63, 64, 65, 8191, 8192, 8300, 20_000])
@pytest.mark.parametrize("key_size", [None, 0, 1, 63, 64, 200])
@pytest.mark.parametrize("value_size", [0, 1, 63, 64, 255])
def test_tables_are_encoded_as_lists_are(count: int, key_size: int | None, value_size: int) -> None:
    """Keys and values of one length each make the same bytes, whether they come as tables or as lists."""
    if count > 100 and (key_size or 0) + value_size > 130:
        count = 100  # many large records would only be slow: the counts test the bounds of the deltas
    values = [bytes([number % 251]) * value_size for number in range(count)]
    keys = None if key_size is None else [bytes([number % 7]) * key_size for number in range(count)]
    value_table = as_table(memoryview(array_of(values)), count)
    key_table = None if keys is None else as_table(memoryview(array_of(keys)), count)
    assert value_table is not None
    for steps in (0, 1, 63, 70_000, -5):
        timestamps = 1_700_000_000_000 + np.arange(count, dtype=np.int64) * steps
        as_lists = encode_wire_batch(keys, values, None, timestamps, base_offset=7, epoch=3)
        assert encode_wire_batch(key_table, value_table, None, timestamps, base_offset=7, epoch=3) == as_lists


def test_numbers_that_vary_too_much_are_no_tables() -> None:
    """Timestamps whose deltas are long and short by turns cost more as tables; the bytes are the same."""
    values = [b"value"] * 1000
    table = as_table(memoryview(array_of(values)), 1000)
    assert table is not None
    timestamps = np.where(np.arange(1000) % 2, 10**12, 10**12 + 10**6).astype(np.int64)
    assert encode_tables(None, table, timestamps - timestamps[0], np.arange(1000, dtype=np.int64)) is None
    as_lists = encode_wire_batch(None, values, None, timestamps, base_offset=0, epoch=0)
    assert encode_wire_batch(None, table, None, timestamps, base_offset=0, epoch=0) == as_lists
