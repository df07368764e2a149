"""Records and columns for the core: valid, mutated or noise, each from a generator of random numbers.

It imports only the standard library, because a process with a sanitizer uses it, too.
"""

from __future__ import annotations

from random import Random
from typing import NamedTuple

_EDGES = (0x00, 0x01, 0x03, 0x7F, 0x80, 0x81, 0x90, 0xA0, 0xC0, 0xC4, 0xC5, 0xC6, 0xD9, 0xDB, 0xDC, 0xDD, 0xFE, 0xFF)
_SIZES = (0, 1, 2, 31, 32, 63, 64, 100, 127, 128, 255, 256, 300)
_NUMBERS = (0, 1, -1, 63, 64, -64, -65, 8191, 8192, 2**31 - 1, 2**31, -(2**31), 2**62, 2**63 - 1, -(2**63))


class Payload(NamedTuple):
    """Arguments of ``scan_records``: ``size`` bytes of ``data`` are meant to be ``count`` records."""

    data: bytes
    size: int
    count: int
    last_offset_delta: int


class Columns(NamedTuple):
    """Arguments of ``encode_columns``, except the deltas."""

    keys: bytes
    values: bytes
    headers: bytes
    count: int


def random_payload(rng: Random) -> Payload:
    """Return a payload of records: of eight payloads, two are valid, one is noise and five are mutated."""
    kind = rng.randrange(8)
    if kind == 0:
        data, count = rng.randbytes(rng.randrange(80)), rng.randrange(6)
    else:
        data, count = _valid_records(rng)
    last = count - 1
    if kind > 2:
        data = mutated(rng, data)
        if rng.randrange(6) == 0:
            count = max(count + rng.choice((-1, 1)), 0)
        if rng.randrange(6) == 0:
            last = rng.choice((last - 1, last + 1, 2**31 - 1))
    # The scan must not read the bytes that a decompressor leaves after the records.
    padding = rng.choice((b"", b"", bytes(16), b"\xff" * 16))
    return Payload(data + padding, len(data), count, last)


def random_columns(rng: Random) -> Columns:
    """Return columns: valid in half of the cases."""
    count = rng.choice((0, 1, 2, 5, 15, 16, 40))
    keys = b"" if rng.randrange(3) == 0 else _array(count) + b"".join(_blob(rng) for _ in range(count))
    values = _array(count) + b"".join(_blob(rng) for _ in range(count))
    headers = b"" if rng.randrange(3) else _array(count) + b"".join(_headers(rng) for _ in range(count))
    which = rng.randrange(6)
    if which == 3 and keys:
        keys = mutated(rng, keys)
    elif which == 4:
        values = mutated(rng, values)
    elif which == 5 and headers:
        headers = mutated(rng, headers)
    return Columns(keys, values, headers, count)


def random_deltas(rng: Random, count: int) -> tuple[list[int], list[int]]:
    """Return timestamp deltas of every size, and offset deltas, mostly 0, 1, 2 and so on."""
    offsets = list(range(count)) if rng.randrange(4) else [rng.choice(_NUMBERS) for _ in range(count)]
    return [rng.choice(_NUMBERS) if rng.randrange(3) == 0 else at for at in range(count)], offsets


def mutated(rng: Random, data: bytes) -> bytes:
    """Return bytes that differ in one to three places: changed, inserted, removed, doubled or cut off."""
    made = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        at = rng.randrange(len(made) + 1)
        kind = rng.randrange(8)
        if kind < 3 and at < len(made):
            made[at] = rng.choice(_EDGES) if kind else made[at] ^ 1 << rng.randrange(8)
        elif kind == 3 and at < len(made):
            made[at] = (made[at] + rng.choice((-2, -1, 1, 2))) & 0xFF
        elif kind == 4:
            made[at:at] = bytes([rng.choice(_EDGES)]) * rng.choice((1, 1, 4, 9))
        elif kind == 5:
            del made[at : at + rng.choice((1, 1, 2, 8))]
        elif kind == 6:
            made[at:at] = made[at : at + rng.randrange(1, 12)]
        else:
            del made[at:]
    return bytes(made)


def varint(rng: Random, number: int) -> bytes:
    """Return a number as Kafka encodes it; seldom with superfluous bytes at the end."""
    rest = (number << 1 ^ number >> 63) & 0xFFFFFFFFFFFFFFFF
    made = bytearray()
    while rest >= 128:
        made.append(rest & 127 | 128)
        rest >>= 7
    made.append(rest)
    if rng.randrange(200) == 0:
        made[-1] |= 128
        made.append(0)
    return bytes(made)


def _valid_records(rng: Random) -> tuple[bytes, int]:
    count = rng.choice((0, 1, 2, 3, 8, 30))
    size = rng.choice(_SIZES) if rng.randrange(2) else -1  # of every value, or each has its own
    records = []
    for at in range(count):
        body = [bytes([rng.choice((0, 0, 0, 1, 255))])]
        body.append(varint(rng, rng.choice(_NUMBERS) if rng.randrange(6) == 0 else at))
        body.append(varint(rng, at))
        body.append(_field(rng, rng.choice((0, 3, 20)) if rng.randrange(3) else -1))
        body.append(_field(rng, size if size >= 0 else rng.choice((-1, *_SIZES))))
        header_count = rng.choice((0, 0, 0, 0, 1, 3))
        body.append(varint(rng, header_count))
        for _ in range(header_count):
            body += (_field(rng, rng.randrange(8)), _field(rng, rng.randrange(-1, 70)))
        raw = b"".join(body)
        records.append(varint(rng, len(raw)) + raw)
    return b"".join(records), count


def _field(rng: Random, size: int) -> bytes:
    return varint(rng, size) + rng.randbytes(max(size, 0))


def _array(count: int) -> bytes:
    if count < 16:
        return bytes([0x90 | count])
    return b"\xdc" + count.to_bytes(2, "big") if count < 65_536 else b"\xdd" + count.to_bytes(4, "big")


def _blob(rng: Random) -> bytes:
    if rng.randrange(8) == 0:
        return b"\xc0"
    return _sized(rng, 0xC4, rng.choice(_SIZES))


def _sized(rng: Random, mark: int, size: int) -> bytes:
    width = 0 if size < 256 and rng.randrange(20) else rng.randrange(0 if size < 256 else 1, 3)
    return bytes([mark + width]) + size.to_bytes(1 << width, "big") + b"x" * size


def _headers(rng: Random) -> bytes:
    count = rng.choice((0, 0, 1, 2, 17))
    made = [_array(count)]
    for _ in range(count):
        size = rng.choice((0, 3, 31, 32, 70))
        name = bytes([0xA0 | size]) + b"n" * size if size < 32 else _sized(rng, 0xD9, size)
        made += (b"\x92", name, _blob(rng))
    return b"".join(made)
