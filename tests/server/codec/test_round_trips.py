"""Decoding an encoded message returns it, in every version of every message."""

from __future__ import annotations

from random import Random

import pytest
from codec_samples import codec_of, every_version, sample
from seeds import seeds

from segmentlog.server.codec.primitives import MalformedMessage

EVERY = [pytest.param(name, version, id=f"{name}-{version}") for name, version in every_version()]


@pytest.mark.parametrize("seed", seeds("codec"))
def test_what_is_encoded_comes_back(seed):
    """A message survives encoding and decoding, at any position in a buffer."""
    random = Random(seed)
    for name, version in every_version():
        codec = codec_of(name, version)
        for _ in range(5):
            message = sample(name, version, random)
            encoded = codec.encode(message)
            decoded = codec.decode(memoryview(encoded))
            assert decoded == message, (name, version)
            assert codec.encode(decoded) == encoded


@pytest.mark.long
@pytest.mark.parametrize(("name", "version"), EVERY)
def test_a_message_that_is_cut_short_is_malformed(name, version):
    """A cut at any byte raises this error, and no other."""
    codec = codec_of(name, version)
    for most in (0, 1, 2):
        encoded = memoryview(codec.encode(sample(name, version, Random(version), most)))
        for size in range(len(encoded)):
            with pytest.raises(MalformedMessage):
                codec.decode(encoded[:size])
