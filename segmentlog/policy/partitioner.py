"""Choose the partition of a record by its key.

`HashPartitioner` chooses the same partition as Kafka's Java client: murmur2 with Kafka's seed, without the
sign bit, modulo the number of partitions. So keys stay in their partitions when a topic is mirrored from or
to Kafka. `RangePartitioner` keeps neighbouring keys together.

This module implements murmur2 twice: for one key in plain Python, where numpy's overhead of a microsecond per
call would dominate, and for a list of keys in numpy. A test checks that both agree.
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

# Indexed by the number of bytes after the last whole word: the mask of the key's bytes in the next word, and
# the factor that follows them, which murmur2 omits if there are no such bytes.
_TAIL_MASK = np.array([0, 0xFF, 0xFFFF, 0xFFFFFF], np.uint32)
_TAIL_FACTOR = np.array([1, _M, _M, _M], np.uint32)

# Fewer keys are hashed one by one: numpy's calls would cost more than the hashing.
_FEW_KEYS = 24


class Partitioner(Protocol):
    """Maps keys to partitions. Applications can supply their own."""

    def partitions(self, keys: Keys, partition_count: int, sticky: int) -> Partitions:
        """Return a partition in [0, partition_count) for each key, and `sticky` for a record without a key."""


@dataclass(frozen=True, slots=True)
class HashPartitioner:
    """Hashes keys like Kafka's Java client: equal keys share a partition, different keys are spread evenly."""

    def partitions(self, keys: Keys, partition_count: int, sticky: int) -> Partitions:
        """Return the result of `partitions_for_keys`."""
        return partitions_for_keys(keys, partition_count, sticky)


@dataclass(frozen=True, slots=True)
class RangePartitioner:
    """Maps ranges of keys to partitions: keys below `bounds[0]` to 0, then those below `bounds[1]` to 1, and so on.

    `n` bounds need `n + 1` partitions. Keys compare as bytes. Raises ValueError if the bounds do not strictly
    ascend, and TypeError if they are not bytes.
    """

    bounds: Sequence[bytes]

    def __post_init__(self) -> None:
        bounds = tuple(self.bounds)
        for index, bound in enumerate(bounds):
            if not isinstance(bound, bytes):
                raise TypeError(f"bounds[{index}] is {bound!r}, but must be bytes, like a key")
        for index, ascends in enumerate(map(lt, bounds, bounds[1:])):
            if not ascends:
                raise ValueError(
                    f"bounds[{index + 1}] = {bounds[index + 1]!r} is not above bounds[{index}] ="
                    f" {bounds[index]!r}; bounds must strictly ascend"
                )
        object.__setattr__(self, "bounds", bounds)

    def partitions(self, keys: Keys, partition_count: int, sticky: int) -> Partitions:
        """Return a partition for each key, and `sticky` for None.

        Raise ValueError unless there is one partition more than there are bounds.
        """
        if partition_count != len(self.bounds) + 1:
            raise ValueError(
                f"{len(self.bounds)} bounds divide keys among {len(self.bounds) + 1} partitions,"
                f" but the topic has {partition_count}"
            )
        _check_sticky(sticky, partition_count)
        return _choose(self._partitions_of, keys, sticky)

    def _partitions_of(self, keys: Sequence[bytes]) -> Partitions:
        # Rejected: np.searchsorted. numpy drops trailing zero bytes, which matter for the order of keys.
        return np.fromiter(map(partial(bisect_right, self.bounds), keys), np.int32, len(keys))


def partition_for_key(key: bytes, partition_count: int) -> int:
    """Return the partition that Kafka's Java client chooses for a key. Raise ValueError if there are no partitions."""
    _check_sticky(0, partition_count)
    return (murmur2(key) & _POSITIVE) % partition_count


def partitions_for_keys(keys: Keys, partition_count: int, fallback: int) -> Partitions:
    """Return `partition_for_key` of every key, and `fallback` for every None: int32[len(keys)].

    Raise ValueError if `fallback` is not one of the partitions.
    """
    _check_sticky(fallback, partition_count)

    def hash_partitions(keys: Sequence[bytes]) -> Partitions:
        hashes = _murmur2_of_all(keys) & np.uint32(_POSITIVE)
        return (hashes % np.uint32(partition_count)).astype(np.int32)

    return _choose(hash_partitions, keys, fallback)


def partitions_for_joined_keys(keys: bytes, lengths: Lengths, partition_count: int) -> Partitions:
    """Return `partitions_for_keys` of concatenated keys of ``lengths`` bytes each, for callers without a list.

    Raise ValueError if there are no partitions.
    """
    _check_sticky(0, partition_count)
    if not len(lengths):
        return np.zeros(0, np.int32)
    hashes = _murmur2_of_joined(keys + bytes(4), lengths) & np.uint32(_POSITIVE)
    return (hashes % np.uint32(partition_count)).astype(np.int32)


def rows_by_partition(partitions: npt.NDArray[np.signedinteger]) -> dict[int, Rows | None]:
    """Return the rows of each partition, in their order, by ascending partition; None if a partition gets all rows."""
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
    """Return the error of an append of these rows, with the index of the record in the whole list."""
    if rows is None:
        return error
    if isinstance(error, RecordTooLarge):
        return RecordTooLarge(error.size_bytes, error.limit_bytes, int(rows[error.index]))
    if isinstance(error, InvalidRecord):
        indices = tuple(rows[list(error.indices)].tolist())
        return InvalidRecord(error.column, indices[0], error.found, error.expected, indices)
    return error


def ranks_of(rows_of: Mapping[int, Rows | None]) -> npt.NDArray[np.int64] | None:
    """Return for each row how many earlier rows go to the same partition.

    Return None if all rows go to one partition: the index of a row is then the number of earlier rows.
    """
    rows = [some for some in rows_of.values() if some is not None]
    if not rows:
        return None
    order = np.concatenate(rows)
    counts = np.fromiter(map(len, rows), np.int64, len(rows))
    ranks = np.empty(len(order), np.int64)
    ranks[order] = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
    return ranks


def _choose(choice: Callable[[Sequence[bytes]], Partitions], keys: Keys, sticky: int) -> Partitions:
    """Return the partition that ``choice`` returns for each key, and `sticky` for None.

    Raise TypeError for a key of another type.
    """
    try:
        return choice(cast(Sequence[bytes], keys))
    except TypeError:
        # Search for None only now: checking every key for None takes half as long as hashing.
        is_null = np.fromiter(map(is_, keys, repeat(None)), np.bool_, len(keys))
        if not is_null.any():
            raise
    chosen = choice([b"" if key is None else key for key in keys])
    chosen[is_null] = sticky
    return chosen


def _check_sticky(sticky: int, partition_count: int) -> None:
    if not 0 <= sticky < partition_count:
        raise ValueError(f"partition {sticky} is not one of the {partition_count} partitions")


# --- one key ------------------------------------------------------------------------------------------


def murmur2(key: bytes) -> int:
    """Return Kafka's 32-bit murmur2 of a key: seeded with 0x9747b28c, and signed like Java's int."""
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
    """Return the murmur2 of each key, unsigned. Raise TypeError for a key that is not bytes."""
    if len(keys) < _FEW_KEYS:
        return np.fromiter((murmur2(key) & _MASK for key in keys), np.uint32, len(keys))
    return _murmur2_of_joined(b"".join(keys) + bytes(4), _lengths(keys))


def _murmur2_of_joined(padded: bytes, lengths: Lengths) -> Hashes:
    """Return the murmur2 of concatenated keys. Four bytes must follow: each key's last bytes are read as a word."""
    longest = int(lengths.max())
    if longest == lengths.min():
        # The keys are the rows of a matrix, and word w of each is a column of it.
        def column(w: int, count: int) -> Hashes:
            return np.ndarray((count,), _WORD, padded, offset=4 * w, strides=(longest,))

        hashes, too_long = _murmur2_longest_first(lengths, column, column(longest >> 2, len(lengths)))
        for index in range(too_long):
            hashes[index] = murmur2(padded[longest * index : longest * (index + 1)]) & _MASK
        return hashes

    # Longest first: then the keys that have a word w come before all keys that do not.
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
    """Return (the hashes, how many keys at the front the caller must hash itself: a few keys much longer than the
    rest).

    `column(w, count)` returns word w of the first `count` keys. `tails` are the words after each key's whole words.
    """
    m, shift = np.uint32(_M), np.uint32(24)
    h = lengths.astype(np.uint32) ^ np.uint32(_SEED)
    fewer_words = -(lengths >> 2)  # ascending, as searchsorted requires
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
