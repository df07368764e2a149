"""Identities of keys in 16 bytes, for maps of millions of keys without a Python object per key.

    key of up to 15 bytes   the key itself, padded with zeros; its length in the last byte
    longer key              XXH3-128 of the key with the caller's seed; 255 in the last byte
    null                    zeros; 254 in the last byte

Short keys never collide. Two longer keys have the same identity only if 120 bits of their hashes
agree. If the seed is drawn at random for each use, an attacker cannot prepare such a pair. With a
thousand million keys the probability of a collision is below 10^-18 per use.
"""

from __future__ import annotations

from itertools import repeat
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from segmentlog.format.columns import array_prefix, decode_blobs

IDENTITY_BYTES: Final = 16
MAX_EXACT: Final = 15
"""Longest key, in bytes, that is its own identity."""

_LONG: Final = 255
_NULL: Final = 254
_BIN8: Final = 0xC4
# MessagePack's mark of a byte string of up to 255 bytes. A byte with its length follows.

_hash = xxhash.xxh3_128_digest

Uint64Array = npt.NDArray[np.uint64]


class KeyIdentities(NamedTuple):
    """The identities of ``n`` keys as two arrays u64[n], and which of the keys are null."""

    low: Uint64Array
    high: Uint64Array
    is_null: npt.NDArray[np.bool_] | None
    """None when no key is null."""


def key_identities(column: memoryview, count: int, seed: int = 0) -> KeyIdentities:
    """Return the identities of a keys column (see `segmentlog.format.columns`). Raise `MalformedColumn`.

    Short keys that all have the same length never become Python objects: this takes a few ns a key,
    against 100 otherwise.
    """
    if not len(column):
        words = np.zeros((count, 2), np.uint64)
        words[:, 1] = np.uint64(_NULL << 56)
        return KeyIdentities(words[:, 0], words[:, 1], np.ones(count, np.bool_))
    prefix = len(array_prefix(column, count))
    if count == 0:
        empty = np.zeros(0, np.uint64)
        return KeyIdentities(empty, empty, None)
    width, odd = divmod(len(column) - prefix, count)
    size = width - 2
    if not odd and prefix + width >= 8 and 0 < size <= MAX_EXACT:  # at least eight bytes before the first key's end
        marks = np.ndarray((count,), "<u2", column, prefix, (width,))
        if (marks == (size << 8 | _BIN8)).all():
            return _of_one_length(column, count, prefix + 2, size)
    return identities_of(decode_blobs(column, count), seed)


def _of_one_length(column: memoryview, count: int, start: int, size: int) -> KeyIdentities:
    """Return the identities of keys of ``size`` bytes each, the first at ``start``. Reads keys as 8-byte integers."""
    width = size + 2
    # The last eight bytes of each key; of a shorter key also the bytes before it, which are shifted out below.
    last = np.ndarray((count,), "<u8", column, start + size - 8, (width,))
    mark = np.uint64(size << 56)
    if size <= 8:
        return KeyIdentities(last >> np.uint64(8 * (8 - size)), np.full(count, mark), None)
    low = np.ndarray((count,), "<u8", column, start, (width,)).astype(np.uint64)
    return KeyIdentities(low, last >> np.uint64(8 * (16 - size)) | mark, None)


def identities_of(keys: list[bytes | None], seed: int = 0) -> KeyIdentities:
    """Return the identities of a list of keys."""
    count = len(keys)
    is_null = None
    if None in keys:
        is_null = np.fromiter((key is None for key in keys), np.bool_, count)
    plain: list[bytes] = [key or b"" for key in keys]
    sizes = np.fromiter(map(len, plain), np.int64, count)
    # numpy truncates longer keys and pads shorter keys with zeros, in C.
    words = np.array(plain, f"S{IDENTITY_BYTES}").view(np.uint8).reshape(count, IDENTITY_BYTES)
    words[:, MAX_EXACT] = sizes.astype(np.uint8)
    long = np.flatnonzero(sizes > MAX_EXACT)
    if len(long):
        digests = b"".join(map(_hash, [plain[index] for index in long.tolist()], repeat(seed)))
        words[long] = np.frombuffer(digests, np.uint8).reshape(-1, IDENTITY_BYTES)
        words[long, MAX_EXACT] = _LONG
    if is_null is not None:
        words[is_null, MAX_EXACT] = _NULL
    return _as_words(words, is_null)


def identity_of(key: bytes, seed: int = 0) -> tuple[int, int]:
    """Return the identity of one key as two numbers: (low, high)."""
    if len(key) <= MAX_EXACT:
        data = key.ljust(MAX_EXACT, b"\0") + bytes((len(key),))
    else:
        data = _hash(key, seed)[:MAX_EXACT] + bytes((_LONG,))
    return int.from_bytes(data[:8], "little"), int.from_bytes(data[8:], "little")


def _as_words(words: npt.NDArray[np.uint8], is_null: npt.NDArray[np.bool_] | None) -> KeyIdentities:
    pairs = words.view("<u8")
    return KeyIdentities(pairs[:, 0], pairs[:, 1], is_null)
