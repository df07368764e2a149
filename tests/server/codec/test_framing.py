"""Headers of messages, and records that are not copied."""

from __future__ import annotations

import kafka.errors
import pytest
from kafka.protocol.api_header import RequestHeader as TheirHeader

from segmentlog.server.codec.apis import APIS
from segmentlog.server.codec.framing import (
    decode_header,
    decode_response_header,
    frame_request,
    frame_response,
)
from segmentlog.server.codec.generated import api_versions, fetch, metadata, produce
from segmentlog.server.codec.kafka_errors import ErrorCode
from segmentlog.server.codec.primitives import MalformedMessage


@pytest.mark.parametrize("client_id", [None, "", "kcat", "x" * 127, "x" * 128, "x" * 3000])
@pytest.mark.parametrize(("key", "version"), [(0, 7), (0, 9), (17, 1), (18, 3), (18, 99)])
def test_request_headers_come_back(key, version, client_id):
    """This holds in old and in flexible versions, and in one that is too new for the codec."""
    api = APIS[key]
    size, header, body = _split(frame_request(api, version, 1234, client_id, [b"body"]))
    assert size == len(header) + len(body)
    decoded = decode_header(memoryview(header + body))
    assert decoded[:4] == (key, version, 1234, client_id)
    assert (header + body)[decoded.body_at :] == b"body"
    theirs = TheirHeader(request_api_key=key, request_api_version=version, correlation_id=1234, client_id=client_id)
    assert header == bytes(theirs.encode(flexible=api.is_flexible(version)))
    for end in range(decoded.body_at):
        with pytest.raises(MalformedMessage):
            decode_header(memoryview(header[:end]))


def test_headers_of_unknown_apis_are_read():
    """The answer can then report the error."""
    assert decode_header(memoryview(b"\x03\xe8\x00\x07\x00\x00\x00\x05\x00\x01a")) == (1000, 7, 5, "a", 11)


def test_response_headers_come_back():
    """Flexible versions have tagged fields in it, only ApiVersions has none ever."""
    for key, version, size in ((0, 7, 4), (0, 9, 5), (18, 0, 4), (18, 3, 4), (18, 4, 4)):
        total, header, body = _split(frame_response(APIS[key], version, 77, [b"bo", memoryview(b"dy")]))
        assert (len(header), total, body) == (size, size + 4, b"body")
        assert decode_response_header(memoryview(header + body), APIS[key], version) == (77, size)


def test_an_unknown_version_of_api_versions_is_answered_in_version_0():
    """The answer has error 35, and the body of the request is not read."""
    request = memoryview(b"\x00\x12\x00\x63\x00\x00\x00\x01\x00\x01a\x00whatever this is")
    header = decode_header(request)
    api = APIS[header.api_key]
    assert header.api_version > api.max_version
    body = api_versions.encode_response(
        api_versions.ApiVersionsResponse(error_code=ErrorCode.UNSUPPORTED_VERSION), version=0
    )
    assert b"".join(frame_response(api, 0, header.correlation_id, body)) == (
        b"\x00\x00\x00\x0a\x00\x00\x00\x01\x00\x23\x00\x00\x00\x00"
    )


@pytest.mark.parametrize("version", [3, 7, 9, 13])
def test_records_of_a_request_are_a_view_of_it(version):
    """Zero copies: what is decoded is the request's own memory."""
    records = bytes(range(256)) * 10
    partitions = [produce.PartitionProduceData(0, records), produce.PartitionProduceData(1, None)]
    topics = [produce.TopicProduceData(partition_data=[*partitions, produce.PartitionProduceData(2, b"")])]
    encoded = b"".join(produce.encode_request(produce.ProduceRequest(topic_data=topics), version))
    first, second, third = produce.decode_request(memoryview(encoded), 0, version).topic_data[0].partition_data
    assert isinstance(first.records, memoryview)
    assert first.records.obj is encoded
    assert first.records == records
    assert second.records is None
    assert third.records == b""


@pytest.mark.parametrize("version", range(4, 19))
def test_records_of_a_response_are_put_out_as_they_are(version):
    """Buffers of records are in the result themselves, a list of them one after another."""
    several = [memoryview(b"one"), bytearray(b"two")]
    one, none, empty = memoryview(b"x" * 200), None, b""
    partitions = [fetch.PartitionData(records=records) for records in (several, one, none, empty, [])]
    response = fetch.FetchResponse(responses=[fetch.FetchableTopicResponse(partitions=partitions)])
    buffers = fetch.encode_response(response, version)
    for buffer in (*several, one):
        assert any(made is buffer for made in buffers)
    assert [type(buffer) for buffer in buffers] == [bytes, memoryview, bytearray, bytes, memoryview, bytes]
    decoded = fetch.decode_response(memoryview(b"".join(buffers)), 0, version)
    assert [partition.records for partition in decoded.responses[0].partitions] == [b"onetwo", one, None, b"", b""]


def test_a_response_without_records_is_one_buffer():
    """Most responses are then sent with one plain call."""
    assert len(metadata.encode_response(metadata.MetadataResponse(), 13)) == 1


def test_error_codes_are_those_of_another_client():
    """kafka-python's codes and ours have the same names, but for those that Kafka has renamed since."""
    theirs = {(error.errno, error.message) for error in vars(kafka.errors).values() if _has_code(error)}
    ours = {(code.value, code.name) for code in ErrorCode}
    assert len(ours & theirs) > 90
    assert {code for code, _ in theirs - ours} == {-1, 0, 6, 10, 17, 39}


def _has_code(error):
    return isinstance(error, type) and isinstance(getattr(error, "errno", None), int)


def _split(buffers):
    """(size, header, body), of which the body was given."""
    whole = b"".join(buffers[:1])
    return int.from_bytes(whole[:4], "big"), whole[4:], b"".join(buffers[1:])
