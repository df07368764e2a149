"""The identity of a key: exact for short keys, a seeded hash for long ones."""

from __future__ import annotations

import msgspec
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from segmentlog.format.key_hashes import MAX_EXACT, identities_of, identity_of, key_identities

KEYS = st.lists(st.none() | st.binary(max_size=40), max_size=40)
ALIKE = st.integers(0, 20).flatmap(lambda size: st.lists(st.binary(min_size=size, max_size=size), max_size=40))


def column(keys: list[bytes | None]) -> memoryview:
    """Return a keys column."""
    return memoryview(msgspec.msgpack.encode(keys))


@given(keys=KEYS | ALIKE, seed=st.integers(0, 2**64 - 1))
def test_every_way_gives_the_same_identity(keys: list[bytes | None], seed: int) -> None:
    """A column, a list, and single keys give the same identity, for keys of equal and of different lengths."""
    found, listed = key_identities(column(keys), len(keys), seed), identities_of(keys, seed)
    for at, key in enumerate(keys):
        if key is None:
            assert found.is_null is not None
            assert found.is_null[at]
        else:
            assert (int(found.low[at]), int(found.high[at])) == identity_of(key, seed)
            assert found.is_null is None or not found.is_null[at]
    assert found.low.tolist() == listed.low.tolist()
    assert found.high.tolist() == listed.high.tolist()


@given(one=st.binary(max_size=MAX_EXACT), other=st.binary(max_size=MAX_EXACT + 5))
def test_short_keys_are_never_taken_for_others(one: bytes, other: bytes) -> None:
    """A key of up to 15 bytes shares its identity with no other key of any length."""
    assert (identity_of(one) == identity_of(other)) == (one == other)


def test_zeros_at_the_end_count() -> None:
    """Padding does not make keys equal that differ in zeros only."""
    keys: list[bytes | None] = [b"", b"\0", b"\0\0", b"a", b"a\0", b"a" * 15, b"a" * 15 + b"\0", b"a" * 16, None]
    found = identities_of(keys)
    assert len(set(zip(found.low.tolist(), found.high.tolist(), strict=True))) == len(keys)


def test_another_seed_gives_long_keys_other_identities() -> None:
    """Two long keys cannot be prepared to agree under a seed that is drawn later; short keys need no seed."""
    long, short = b"k" * 16, b"k" * 15
    assert identity_of(long, 1) != identity_of(long, 2)
    assert identity_of(short, 1) == identity_of(short, 2)


def test_a_hundred_thousand_long_keys_are_all_different() -> None:
    """Keys that differ in a single byte have different hashes."""
    keys: list[bytes | None] = [b"a key of some length, number %d" % number for number in range(100_000)]
    found = identities_of(keys, 3)
    assert len(np.unique(np.stack([found.low, found.high], 1), axis=0)) == len(keys)


def test_a_column_without_keys_is_all_null() -> None:
    """A batch without keys stores the column like this."""
    found = key_identities(memoryview(b""), 3)
    assert found.is_null is not None
    assert found.is_null.tolist() == [True] * 3
