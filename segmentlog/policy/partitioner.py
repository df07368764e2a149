"""Which partition a record goes to, decided by its key.

`HashPartitioner` sends a key where Kafka's Java client sends it: murmur2 with Kafka's seed, the sign bit
dropped, modulo the number of partitions. So a topic that is mirrored from or to Kafka keeps its keys in
their partitions. `RangePartitioner` keeps neighbouring keys together.

murmur2 is here twice: for one key in plain Python, where numpy's overhead of a microsecond a call would be
most of the cost, and for a list of keys in numpy, which does all of them at once. A test proves them equal.
"""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import repeat
from operator import is_, lt
from struct import Struct
from typing import Protocol, cast

import numpy as np
import numpy.typing as npt

from segmentlog.errors import InvalidRecord, RecordTooLarge

Keys = Sequence[bytes | None]
Partitions = npt.NDArray[np.int32]
Hashes = npt.NDArray[np.uint32]
Lengths = npt.NDArray[np.int64]
Rows = npt.NDArray[np.intp]
"""Indices of records in a list, ascending."""

_SEED = 0x9747B28C
_M = 0x5BD1E995
_MASK = 0xFFFFFFFF
_POSITIVE = 0x7FFFFFFF
_WORD = np.dtype("<u4")

# By the number of bytes after the last whole word: which bytes of the word there are the key's, and the
# multiplication that follows them, which murmur2 leaves out when there are none.
_TAIL_MASK = np.array([0, 0xFF, 0xFFFF, 0xFFFFFF], np.uint32)
_TAIL_FACTOR = np.array([1, _M, _M, _M], np.uint32)

# Fewer keys than this are hashed one by one: numpy's calls would cost more than the work in them.
_FEW_KEYS = 24


class Partitioner(Protocol):
    """Anything that maps keys to partitions."""

    def partitions(self, keys: Keys, partition_count: int, sticky: int) -> Partitions:
        """A partition in [0, partition_count) for each key; `sticky` for a record without a key."""


@dataclass(frozen=True, slots=True)
class HashPartitioner:
    """Equal keys share a partition, different keys are spread evenly, as Kafka's Java client does it."""

    def partitions(self, keys: Keys, partition_count: int, sticky: int) -> Partitions:
        """See `partitions_for_keys`."""
        return partitions_for_keys(keys, partition_count, sticky)


@dataclass(frozen=True, slots=True)
class RangePartitioner:
    """Keys below `bounds[0]` go to partition 0, those from there to below `bounds[1]` to 1, and so on.

    `n` bounds make `n + 1` partitions. Keys compare as bytes. Raises ValueError unless the bounds strictly
    ascend, TypeError unless they are bytes.
    """

    bounds: Sequence[bytes]

    def __post_init__(self) -> None:
        bounds = tuple(self.bounds)
        for index, bound in enumerate(bounds):
            if not isinstance(bound, bytes):
                raise TypeError(f"bounds[{index}] is {bound!r}; a bound is bytes, as keys are")
        for index, ascends in enumerate(map(lt, bounds, bounds[1:])):
            if not ascends:
                raise ValueError(
                    f"bounds[{index + 1}] = {bounds[index + 1]!r} is not above bounds[{index}] ="
                    f" {bounds[index]!r}; bounds must strictly ascend"
                )
        object.__setattr__(self, "bounds", bounds)

    def partitions(self, keys: Keys, partition_count: int, sticky: int) -> Partitions:
        """A partition for each key, `sticky` for None. Raises ValueError unless there is one bound fewer than
        there are partitions."""
        if partition_count != len(self.bounds) + 1:
            raise ValueError(
                f"{len(self.bounds)} bounds divide keys among {len(self.bounds) + 1} partitions,"
                f" and the topic has {partition_count}"
            )
        _check_sticky(sticky, partition_count)
        return _choose(self._partitions_of, keys, sticky)

    def _partitions_of(self, keys: Sequence[bytes]) -> Partitions:
        # bisect, not np.searchsorted: numpy's bytes lose trailing zero bytes, which order keys here.
        return np.fromiter(map(partial(bisect_right, self.bounds), keys), np.int32, len(keys))


def partition_for_key(key: bytes, partition_count: int) -> int:
    """Where Kafka's Java client sends a record with this key. Raises ValueError for no partitions."""
    _check_sticky(0, partition_count)
    return (murmur2(key) & _POSITIVE) % partition_count


def partitions_for_keys(keys: Keys, partition_count: int, fallback: int) -> Partitions:
    """`partition_for_key` of every key at once, and `fallback` for every None: int32, as long as `keys`.

    Raises ValueError if `fallback` is not one of the partitions.
    """
    _check_sticky(fallback, partition_count)

    def hash_partitions(keys: Sequence[bytes]) -> Partitions:
        hashes = _murmur2_of_all(keys) & np.uint32(_POSITIVE)
        return (hashes % np.uint32(partition_count)).astype(np.int32)

    return _choose(hash_partitions, keys, fallback)


def partitions_for_joined_keys(keys: bytes, lengths: Lengths, partition_count: int) -> Partitions:
    """`partitions_for_keys` of keys that lie one behind the other, ``lengths`` bytes each: for who has no list of them.

    Raises ValueError for no partitions.
    """
    _check_sticky(0, partition_count)
    if not len(lengths):
        return np.zeros(0, np.int32)
    hashes = _murmur2_of_joined(keys + bytes(4), lengths) & np.uint32(_POSITIVE)
    return (hashes % np.uint32(partition_count)).astype(np.int32)


def rows_by_partition(partitions: npt.NDArray[np.signedinteger]) -> dict[int, Rows | None]:
    """The rows that go to each partition, in their order, by ascending partition; None where it is all of them."""
    counts = np.bincount(partitions)
    numbers = counts.nonzero()[0]
    if len(numbers) <= 1:
        return dict.fromkeys(numbers.tolist())
    order = np.argsort(partitions, kind="stable")
    counts = counts[numbers]
    ends = np.cumsum(counts)
    places = zip(numbers.tolist(), (ends - counts).tolist(), ends.tolist(), strict=True)
    return {number: order[start:end] for number, start, end in places}


def error_of_rows(error: Exception, rows: Rows | None) -> Exception:
    """Return what an append of these rows raised, with the record's index in the whole list."""
    if rows is None:
        return error
    if isinstance(error, RecordTooLarge):
        return RecordTooLarge(error.size_bytes, error.limit_bytes, int(rows[error.index]))
    if isinstance(error, InvalidRecord):
        indices = tuple(rows[list(error.indices)].tolist())
        return InvalidRecord(error.column, indices[0], error.found, error.expected, indices)
    return error


def ranks_of(rows_of: Mapping[int, Rows | None]) -> npt.NDArray[np.int64] | None:
    """For each row how many rows before it go to the same partition; None where that is its index."""
    rows = [some for some in rows_of.values() if some is not None]
    if not rows:
        return None
    order = np.concatenate(rows)
    counts = np.fromiter(map(len, rows), np.int64, len(rows))
    ranks = np.empty(len(order), np.int64)
    ranks[order] = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
    return ranks


def _choose(choice: Callable[[Sequence[bytes]], Partitions], keys: Keys, sticky: int) -> Partitions:
    """The choice for every key, `sticky` for None. Raises TypeError for a key that is neither."""
    try:
        return choice(cast(Sequence[bytes], keys))
    except TypeError:
        # Looked for only now: a look at every key for a None costs half of what hashing it does.
        is_null = np.fromiter(map(is_, keys, repeat(None)), np.bool_, len(keys))
        if not is_null.any():
            raise
    chosen = choice([b"" if key is None else key for key in keys])
    chosen[is_null] = sticky
    return chosen


def _check_sticky(sticky: int, partition_count: int) -> None:
    if not 0 <= sticky < partition_count:
        raise ValueError(f"partition {sticky} is not one of {partition_count}")


# --- one key ------------------------------------------------------------------------------------------


def murmur2(key: bytes) -> int:
    """The 32-bit murmur2 of a key as Kafka has it: seeded with 0x9747b28c, and signed as Java's int is."""
    length = len(key)
    h = _after_words(_SEED ^ length, _words_reader(length >> 2)(key))
    if length & 3:
        h = (h ^ int.from_bytes(key[length & ~3 :], "little")) * _M & _MASK
    h = (h ^ h >> 13) * _M & _MASK
    h ^= h >> 15
    return h - (1 << 32) if h > _POSITIVE else h


def _after_words(h: int, words: Sequence[int]) -> int:
    for word in words:
        k = word * _M & _MASK
        h = (h * _M & _MASK) ^ ((k ^ k >> 24) * _M & _MASK)
    return h


@lru_cache(maxsize=256)
def _words_reader(word_count: int) -> Callable[[bytes], tuple[int, ...]]:
    return Struct(f"<{word_count}I").unpack_from


# --- many keys ----------------------------------------------------------------------------------------


def _murmur2_of_all(keys: Sequence[bytes]) -> Hashes:
    """The murmur2 of each key, unsigned. Raises TypeError for a key that is not bytes."""
    if len(keys) < _FEW_KEYS:
        return np.fromiter((murmur2(key) & _MASK for key in keys), np.uint32, len(keys))
    return _murmur2_of_joined(b"".join(keys) + bytes(4), _lengths(keys))


def _murmur2_of_joined(padded: bytes, lengths: Lengths) -> Hashes:
    """Of keys that lie one behind the other, padded with four bytes: the last one's tail, too, is read as a word."""
    longest = int(lengths.max())
    if longest == lengths.min():
        # The keys are the rows of a matrix, and word w of each is a column of it.
        def column(w: int, count: int) -> Hashes:
            return np.ndarray((count,), _WORD, padded, offset=4 * w, strides=(longest,))

        hashes, too_long = _murmur2_longest_first(lengths, column, column(longest >> 2, len(lengths)))
        for index in range(too_long):
            hashes[index] = murmur2(padded[longest * index : longest * (index + 1)]) & _MASK
        return hashes

    # Longest first: the keys that have a word w are then the first so many.
    order = np.argsort(-lengths, kind="stable")
    starts = (np.cumsum(lengths) - lengths)[order]
    lengths = lengths[order]
    # The word at every byte of the blob, aligned or not, without a copy.
    word_at = np.ndarray((len(padded) - 3,), _WORD, padded, strides=(1,))
    in_order, too_long = _murmur2_longest_first(
        lengths, lambda w, count: word_at[starts[:count] + 4 * w], word_at[starts + (lengths & ~3)]
    )
    hashes = np.empty(len(lengths), np.uint32)
    hashes[order] = in_order
    for at, index in enumerate(order[:too_long].tolist()):
        hashes[index] = murmur2(padded[starts[at] : starts[at] + lengths[at]]) & _MASK
    return hashes


def _lengths(keys: Sequence[bytes]) -> Lengths:
    # np.fromiter took 41 ns a key, bytearray 27: most keys are shorter than 256 bytes.
    try:
        return np.frombuffer(bytearray(map(len, keys)), np.uint8).astype(np.int64)
    except ValueError:
        return np.fromiter(map(len, keys), np.int64, len(keys))


def _murmur2_longest_first(lengths: Lengths, column: Callable[[int, int], Hashes], tails: Hashes) -> tuple[Hashes, int]:
    """The hashes, and how many at the front are not done: a few keys that are much longer than the rest.

    `column(w, count)` gives word w of the first `count` keys; `tails` is what follows each key's whole words.
    """
    m, shift = np.uint32(_M), np.uint32(24)
    h = lengths.astype(np.uint32) ^ np.uint32(_SEED)
    fewer_words = -(lengths >> 2)  # ascending, as searchsorted wants it
    w, having = 0, len(lengths)
    while (having := int(np.searchsorted(fewer_words[:having], -w))) >= _FEW_KEYS:
        k = column(w, having) * m
        k ^= k >> shift
        k *= m
        h[:having] *= m
        h[:having] ^= k
        w += 1

    tail_lengths = lengths & 3
    h ^= tails & _TAIL_MASK[tail_lengths]
    h *= _TAIL_FACTOR[tail_lengths]
    h ^= h >> np.uint32(13)
    h *= m
    h ^= h >> np.uint32(15)
    return h, having
