"""Keys go where Kafka sends them, one at a time or many at once."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from segmentlog.policy.partitioner import (
    HashPartitioner,
    Partitioner,
    RangePartitioner,
    murmur2,
    partition_for_key,
    partitions_for_keys,
)

# Kafka's own, from its UtilsTest.
KAFKA_VECTORS = {
    b"21": -973932308,
    b"foobar": -790332482,
    b"a-little-bit-long-string": -985981536,
    b"a-little-bit-longer-string": -1486304829,
    b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
    b"abc": 479470107,
}

few_keys = st.lists(st.binary(max_size=20), max_size=60)
# One length for all: the path on which keys are the rows of a matrix.
equal_keys = st.integers(0, 40).flatmap(
    lambda length: st.lists(st.binary(min_size=length, max_size=length), min_size=24, max_size=60)
)
# So that a few keys are much longer than all others.
ragged_keys = st.tuples(few_keys, st.lists(st.binary(min_size=200, max_size=400), max_size=30)).map(
    lambda pair: pair[0] + pair[1]
)


def one_by_one(keys, partition_count, sticky):
    """Return what `partitions_for_keys` must return, one key at a time."""
    return [sticky if key is None else partition_for_key(key, partition_count) for key in keys]


@pytest.mark.parametrize(("key", "expected"), KAFKA_VECTORS.items(), ids=repr)
def test_murmur2_is_kafkas(key, expected):
    """One key hashes to what Kafka's own test demands."""
    assert murmur2(key) == expected


@pytest.mark.parametrize("repeats", [1, 10])
def test_many_keys_at_once_hash_as_kafka_hashes_them(repeats):
    """A list of keys of all lengths, short or long enough for numpy, meets Kafka's own test as well."""
    keys = list(KAFKA_VECTORS) * repeats
    expected = [(signed & 0x7FFFFFFF) % 1000 for signed in KAFKA_VECTORS.values()] * repeats
    assert partitions_for_keys(keys, 1000, 0).tolist() == expected


@settings(deadline=None)
@given(keys=st.one_of(few_keys, equal_keys, ragged_keys), partition_count=st.integers(1, 2**31 - 1))
@example(keys=[b""] * 30, partition_count=7)
@example(keys=[b"abcd"] * 30, partition_count=7)
@example(keys=[bytes(300)] * 30, partition_count=7)
@example(keys=[b"k"] * 30 + [bytes(70_000)], partition_count=7)
def test_many_at_once_equals_one_at_a_time(keys, partition_count):
    """The vectorised hash and the plain one agree, for any number and lengths of keys."""
    chosen = partitions_for_keys(keys, partition_count, 0)
    assert chosen.dtype == np.int32
    assert chosen.tolist() == one_by_one(keys, partition_count, 0)


@settings(deadline=None)
@given(keys=st.lists(st.none() | st.binary(max_size=6), max_size=60), sticky=st.integers(0, 4))
def test_records_without_a_key_go_to_the_sticky_partition(keys, sticky):
    """None gets the sticky partition; the keys around it are not disturbed, an empty key is a key."""
    assert partitions_for_keys(keys, 5, sticky).tolist() == one_by_one(keys, 5, sticky)


def test_keys_spread_evenly():
    """Ten thousand numbered keys fill twelve partitions to within a tenth of each other."""
    keys = [b"user-%d" % number for number in range(10_000)]
    counts = np.bincount(partitions_for_keys(keys, 12, 0), minlength=12)
    assert counts.min() > 0.9 * len(keys) / 12
    assert counts.max() < 1.1 * len(keys) / 12


@pytest.mark.parametrize("count", [1, 100])
@pytest.mark.parametrize("partitioner", [HashPartitioner(), RangePartitioner([b"m"])])
def test_a_key_that_is_not_bytes_is_refused(partitioner, count):
    """A str among the keys raises TypeError, with and without None among them."""
    for others in ([b"a"] * count, [None] * count):
        with pytest.raises(TypeError):
            partitioner.partitions([*others, "text"], 2, 0)


@pytest.mark.parametrize(("partition_count", "sticky"), [(0, 0), (-1, 0), (3, 3), (3, -1)])
def test_a_partition_that_does_not_exist_is_refused(partition_count, sticky):
    """Without partitions, or with a sticky partition that does not exist, the call raises."""
    with pytest.raises(ValueError, match="is not one of"):
        partitions_for_keys([b"k"], partition_count, sticky)


def test_no_partitions_for_a_single_key():
    """The error is the same for one key."""
    with pytest.raises(ValueError, match="partition 0 is not one of the 0 partitions"):
        partition_for_key(b"k", 0)


@settings(deadline=None)
@given(
    bounds=st.sets(st.binary(max_size=4), max_size=6).map(sorted),
    keys=st.lists(st.none() | st.binary(max_size=4), max_size=40),
)
@example(bounds=[b"a", b"a\0"], keys=[b"", b"a", b"a\0", b"a\0\0", b"b", None])
def test_ranges_keep_keys_in_order(bounds, keys):
    """A key's partition is how many bounds are not above it, trailing zero bytes counted."""
    sticky = len(bounds)
    chosen = RangePartitioner(bounds).partitions(keys, len(bounds) + 1, sticky)
    assert chosen.dtype == np.int32
    expected = [sticky if key is None else sum(bound <= key for bound in bounds) for key in keys]
    assert chosen.tolist() == expected


@pytest.mark.parametrize("bounds", [[b"b", b"a"], [b"a", b"a"]])
def test_range_bounds_must_ascend(bounds):
    """Bounds out of order or repeated are refused, and the message shows the two."""
    with pytest.raises(ValueError, match=r"bounds\[1\] = b'a' is not above bounds\[0\]"):
        RangePartitioner(bounds)


def test_range_bounds_must_be_bytes():
    """A str bound is refused when it is given, not when the first key meets it."""
    with pytest.raises(TypeError, match=r"bounds\[1\] is 'b'"):
        RangePartitioner([b"a", "b"])


def test_ranges_fit_the_topic():
    """One bound makes two partitions: a topic of three is refused."""
    with pytest.raises(ValueError, match="1 bounds divide keys among 2 partitions, but the topic has 3"):
        RangePartitioner([b"m"]).partitions([b"a"], 3, 0)


def test_partitioners_are_values():
    """Both implement the protocol, compare by what they do, and copy the bounds they are given."""
    bounds = [b"m"]
    by_range: Partitioner = RangePartitioner(bounds)
    bounds.append(b"z")
    assert by_range == RangePartitioner((b"m",))
    by_hash: Partitioner = HashPartitioner()
    assert by_hash.partitions([b"k", None], 9, 4).tolist() == [partition_for_key(b"k", 9), 4]
