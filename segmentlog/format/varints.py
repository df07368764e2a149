"""Encode Kafka's varints: 7 bits a byte, lowest bits first, zigzagged."""

from __future__ import annotations

from typing import Final


def varint(number: int) -> bytes:
    """Return the bytes of a signed number of up to 64 bits."""
    rest = (number << 1 ^ number >> 63) & 0xFFFFFFFFFFFFFFFF
    if rest < 128:
        return _ONE_BYTE[rest]
    encoded = bytearray()
    while rest >= 128:
        encoded.append(rest & 0x7F | 0x80)
        rest >>= 7
    encoded.append(rest)
    return bytes(encoded)


_ONE_BYTE: Final = [bytes((number,)) for number in range(128)]
