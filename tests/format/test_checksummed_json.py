"""A checksum in JSON: every changed byte is found."""

from __future__ import annotations

import json

import pytest

from segmentlog.format.checksummed_json import ChecksumMismatch, add_checksum, remove_checksum


def test_the_text_comes_back() -> None:
    """The text with its checksum is JSON, too."""
    text = b'{"a":[1,2],"b":"\xc3\xa4"}'
    data = add_checksum(text)
    assert remove_checksum(data) == text
    assert list(json.loads(data)) == ["xxh3_64", "a", "b"]


def test_every_changed_byte_is_found() -> None:
    """Each changed byte, each prefix, and appended bytes are detected."""
    data = add_checksum(b'{"a":[1,2],"b":"c"}')
    for position in range(len(data)):
        changed = data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :]
        for damaged in (changed, data[:position], data + data[:position] + b"x"):
            with pytest.raises(ChecksumMismatch):
                remove_checksum(damaged)
