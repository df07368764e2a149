"""Hostile bytes are rejected as malformed, quickly and without side effects."""

from __future__ import annotations

import tracemalloc
from random import Random

import pytest
from codec_samples import codec_of, every_version, sample
from seeds import seeds

from segmentlog.server.codec.apis import APIS
from segmentlog.server.codec.compiler import namespace_of
from segmentlog.server.codec.framing import decode_header
from segmentlog.server.codec.generated import api_versions, delete_groups, fetch, metadata, produce
from segmentlog.server.codec.primitives import (
    ARRAY_MAX,
    ELEMENTS_MAX,
    TAGS_MAX,
    MalformedMessage,
    NotInVersion,
    UnsupportedVersion,
    uvarint,
)


@pytest.mark.parametrize("seed", seeds("codec hostile"))
def test_random_bytes_are_a_message_or_malformed(seed):
    """Decoding random bytes returns a message or raises `MalformedMessage`."""
    random = Random(seed)
    for name, version in every_version():
        codec = codec_of(name, version)
        for _ in range(20):
            noise = bytes(random.choice((0, 0, 1, 2, 127, 128, 255, random.randrange(256))) for _ in range(60))
            try:
                codec.decode(memoryview(noise))
            except MalformedMessage:
                pass


@pytest.mark.parametrize("seed", seeds("codec hostile"))
def test_damaged_messages_are_a_message_or_malformed(seed):
    """Decoding a message with changed, missing or repeated bytes returns a message or raises `MalformedMessage`."""
    random = Random(seed)
    for name, version in every_version():
        codec = codec_of(name, version)
        for _ in range(10):
            encoded = bytearray(codec.encode(sample(name, version, random)))
            for _ in range(random.randint(1, 3)):
                at = random.randrange(len(encoded) + 1)
                match random.randrange(3):
                    case 0:
                        encoded[at : at + 1] = bytes((random.choice((0, 127, 128, 255)),))
                    case 1:
                        del encoded[at : at + random.randint(1, 9)]
                    case 2:
                        encoded[at:at] = encoded[max(at - 9, 0) : at]
            try:
                codec.decode(memoryview(encoded))
            except MalformedMessage:
                pass


@pytest.mark.parametrize("count", [b"\x7f\xff\xff\xff", b"\x00\x0f\xff\xff", b"\xff\xff\xff\xfe", b"\x80\x00\x00\x00"])
def test_absurd_counts_cost_nothing(count):
    """An array that claims more elements than bytes follow is refused before anything is made for it."""
    tracemalloc.start()
    try:
        with pytest.raises(MalformedMessage):
            produce.decode_request(memoryview(b"\xff\xff" + bytes(6) + count + bytes(40)), 0, 7)
        with pytest.raises(MalformedMessage):
            fetch.decode_request(memoryview(bytes(29) + count + bytes(40)), 0, 7)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("size", [127, 128, 2**14, 2**21, 2**28, 2**31 - 1])
def test_absurd_sizes_cost_nothing(size):
    """This holds in flexible versions for strings, bytes, records and tagged fields."""
    produce_head = b"\x00" + bytes(6)
    for rest in (uvarint(size), b"\x02" + uvarint(size), b"\x02\x02a" + uvarint(size), b"\x02\x02a\x02" + bytes(4)):
        with pytest.raises(MalformedMessage):
            produce.decode_request(memoryview(produce_head + rest + uvarint(size) + b"abc"), 0, 9)
    with pytest.raises(MalformedMessage):
        api_versions.decode_request(memoryview(b"\x02a\x02b" + uvarint(size)), 0, 3)
    with pytest.raises(MalformedMessage):
        api_versions.decode_request(memoryview(b"\x02a\x02b\x01\x00" + uvarint(size) + b"abc"), 0, 3)


def most_used(decode, data):
    """Bytes that a decoder allocates at most, which has to find the data malformed; and the reason."""
    tracemalloc.start()
    try:
        with pytest.raises(MalformedMessage) as caught:
            decode(data)
        return tracemalloc.get_traced_memory()[1], str(caught.value)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("version", [1, 2], ids=["old", "compact"])
@pytest.mark.parametrize(("kind", "limit"), [("request", ELEMENTS_MAX), ("response", ARRAY_MAX)])
def test_too_many_elements_cost_nothing(kind, limit, version):
    """An array beyond the limit is refused before memory is allocated for it, although all its bytes are there."""
    assert ELEMENTS_MAX <= ARRAY_MAX == 1_000_000, "Kafka 4.4.0 decodes a million elements of an array"
    decode = getattr(delete_groups, f"decode_{kind}")
    head = b"" if kind == "request" else bytes(4)
    count = uvarint(limit + 2) if version == 2 else (limit + 1).to_bytes(4, "big")
    data = memoryview(head + count + bytes(4 * limit + 100))
    used, reason = most_used(lambda data: decode(data, 0, version), data)
    assert used < 100_000
    assert f"of {limit + 1} elements" in reason


def test_memory_grows_with_the_elements_that_arrive():
    """An array within the limits, of which the third element is malformed, has cost no more than three elements."""
    for count, head, rest in ((ELEMENTS_MAX, b"", bytes(2)), (ARRAY_MAX, bytes(4), bytes(6))):
        decode = delete_groups.decode_response if head else delete_groups.decode_request
        data = memoryview(head + count.to_bytes(4, "big") + rest * 2 + b"\x00\x01\xff" + bytes(4 * count))
        used, _ = most_used(lambda data, decode=decode: decode(data, 0, 1), data)
        assert used < 100_000


def test_a_struct_has_at_most_ten_thousand_tagged_fields():
    """Kafka's limit since 4.4.0: for structs that know tags, for those that know none, and for the header."""
    assert TAGS_MAX == 10_000
    known = b"".join(fetch.encode_request(fetch.FetchRequest(), 12))
    unknown = b"".join(api_versions.encode_request(api_versions.ApiVersionsRequest("client", "1"), 3))
    header = b"\x00\x12\x00\x03\x00\x00\x00\x05\x00\x01a\x00"
    for plain, decode in (
        (known, lambda data: fetch.decode_request(data, 0, 12)),
        (unknown, lambda data: api_versions.decode_request(data, 0, 3)),
        (header, decode_header),
    ):
        assert plain.endswith(b"\x00")
        decode(memoryview(plain[:-1] + uvarint(TAGS_MAX) + b"\x63\x00" * TAGS_MAX))
        more = memoryview(plain[:-1] + uvarint(TAGS_MAX + 1) + b"\x63\x00" * (TAGS_MAX + 1))
        used, reason = most_used(decode, more)
        assert used < 100_000
        assert "10001 tagged fields" in reason


@pytest.mark.parametrize("size", [b"\xff\xff\xff\xff\x0f", b"\xff\xff\xff\xff\xff\x01", b"\x80" * 12])
def test_sizes_beyond_31_bits_are_malformed(size):
    """An uvarint that is too large, or does not end."""
    with pytest.raises(MalformedMessage):
        api_versions.decode_request(memoryview(size + bytes(40)), 0, 3)


def test_strings_are_utf8():
    """Other bytes are malformed."""
    with pytest.raises(MalformedMessage):
        metadata.decode_request(memoryview(b"\x00\x00\x00\x01\x00\x02\xc3\x28\x01"), 0, 4)


def test_null_where_null_may_not_be_is_malformed():
    """Strings and arrays, in the old form and in the compact one."""
    for version, data in ((7, b"\xff\xff" + bytes(6) + b"\xff\xff\xff\xff"), (9, bytes(8))):
        with pytest.raises(MalformedMessage):
            produce.decode_request(memoryview(data), 0, version)
    for version, data in ((4, b"\x00\x00\x00\x01\xff\xff\x01"), (9, b"\x02\x00\x00\x01\x00\x00\x00")):
        with pytest.raises(MalformedMessage):
            metadata.decode_request(memoryview(data), 0, version)


def test_unknown_tagged_fields_are_skipped():
    """A newer client may say more than we know, of any length and with any tag."""
    plain = b"".join(api_versions.encode_request(api_versions.ApiVersionsRequest("client", "1"), 3))
    assert plain.endswith(b"\x00")
    more = plain[:-1] + b"\x02" + b"\x05\x03abc" + uvarint(70_000) + uvarint(300) + bytes(300)
    decoded = api_versions.decode_request(memoryview(more), 0, 3)
    assert decoded == api_versions.ApiVersionsRequest("client", "1")


def test_a_known_tagged_field_is_as_long_as_it_says():
    """Otherwise what follows would be read from the wrong place."""
    message = fetch.FetchRequest(cluster_id="abc")
    encoded = b"".join(fetch.encode_request(message, 12))
    assert encoded.endswith(b"\x01\x00\x04\x04abc")
    for wrong in (b"\x01\x00\x05\x04abc\x00", b"\x01\x00\x03\x04abc"):
        with pytest.raises(MalformedMessage):
            fetch.decode_request(memoryview(encoded[:-7] + wrong), 0, 12)


def test_what_follows_a_message_is_ignored():
    """As in Kafka's broker, a client that sends more than it should is served."""
    encoded = b"".join(metadata.encode_request(metadata.MetadataRequest(topics=[]), 4))
    assert metadata.decode_request(memoryview(encoded + b"more"), 0, 4) == metadata.MetadataRequest(topics=[])


def test_unknown_versions():
    """Versions that the codec does not have, whichever way it is asked."""
    for api in APIS.values():
        request = getattr(api.codec, f"{api.name}Request")()
        for version in (-1, api.min_version - 1, api.max_version + 2):
            with pytest.raises(UnsupportedVersion):
                api.codec.decode_request(memoryview(bytes(99)), 0, version)
            with pytest.raises(UnsupportedVersion):
                api.codec.encode_request(request, version)


def test_a_value_that_the_version_has_no_field_for_is_refused():
    """A default value is left out, and so is a field that the schema allows to leave out."""
    state = fetch.FetchRequest(replica_state=fetch.ReplicaState(1, 2))
    with pytest.raises(NotInVersion):
        fetch.encode_request(state, 14)
    assert fetch.decode_request(memoryview(b"".join(fetch.encode_request(state, 15))), 0, 15) == state
    rack = fetch.FetchRequest(rack_id="a")
    assert fetch.decode_request(memoryview(b"".join(fetch.encode_request(rack, 10))), 0, 10) == fetch.FetchRequest()


def test_none_is_refused_where_the_version_has_no_null():
    """Metadata of all topics is null from version 1 on; version 0 has no word for it."""
    assert metadata.encode_request(metadata.MetadataRequest(topics=None), 1)
    with pytest.raises(NotInVersion):
        metadata.encode_request(metadata.MetadataRequest(topics=None), 0)


@pytest.mark.parametrize("seed", seeds("codec elements"))
def test_elements_are_counted(seed, monkeypatch):
    """All arrays of a request together may have `ELEMENTS_MAX` elements, and not one more."""
    random = Random(seed)
    for name, version in every_version():
        if name.endswith("Response"):
            continue
        codec = codec_of(name, version)
        made = sample(name, version, random)
        encoded = memoryview(codec.encode(made))
        count = elements_of(codec.decode(encoded))
        if count:
            names = namespace_of(type(made))
            monkeypatch.setitem(names, "ELEMENTS_MAX", count)
            codec.decode(encoded)
            monkeypatch.setitem(names, "ELEMENTS_MAX", count - 1)
            with pytest.raises(MalformedMessage, match="elements"):
                codec.decode(encoded)
            monkeypatch.undo()


def elements_of(value: object) -> int:
    """Return the number of elements of all nested arrays."""
    if isinstance(value, list):
        return len(value) + sum(map(elements_of, value))
    return sum(elements_of(getattr(value, name)) for name in getattr(value, "__struct_fields__", ()))
