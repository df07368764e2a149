"""Messages between real clients and a real broker, byte for byte.

`captured/` has a file for each client: kcat 1.7.1, confluent-kafka 2.16, kafka-python 3.0, aiokafka 0.14 and the tools
of Kafka 4.3.1, all with a broker of that version. It also has clients and tools of Kafka 4.4.0 with its broker.
``tools/codec/capture.py`` recorded them. The files are never replaced: older clients stay in use.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from segmentlog.server.codec.apis import APIS
from segmentlog.server.codec.framing import decode_header, decode_response_header
from segmentlog.server.codec.generated import consumer_protocol

FILES = sorted((Path(__file__).parent / "captured").glob("*.txt"))


def frames(path):
    """(request or response, key, version, bytes) of each line."""
    for line in path.read_text().splitlines():
        word, key, version, digits = line.split()
        yield word, int(key), int(version), bytes.fromhex(digits)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_what_was_captured_comes_back(path):
    """Each message decodes and encodes to the same bytes, so no field was skipped."""
    count = 0
    for word, key, version, frame in frames(path):
        api, data = APIS[key], memoryview(frame)
        codec = api.codec
        if word == "request":
            header = decode_header(data)
            assert header[:2] == (key, version)
            message = codec.decode_request(data, header.body_at, version)
            buffers, body_at = codec.encode_request(message, version), header.body_at
        else:
            _, body_at = decode_response_header(data, api, version)
            buffers = codec.encode_response(codec.decode_response(data, body_at, version), version)
        assert b"".join(buffers) == frame[body_at:], (word, api, version)
        count += 1
    assert count > 10


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_what_members_say_to_each_other_comes_back(path):
    """Encode and decode the subscriptions and assignments inside of JoinGroup and SyncGroup."""
    count = 0
    for word, key, version, frame in frames(path):
        if word != "request" or key not in (11, 14):
            continue
        data = memoryview(frame)
        message = APIS[key].codec.decode_request(data, decode_header(data).body_at, version)
        for protocol in message.protocols if key == 11 else ():
            said, subscription = consumer_protocol.decode_subscription(memoryview(protocol.metadata))
            assert subscription.topics
            assert consumer_protocol.encode_subscription(subscription, said) == protocol.metadata
            count += 1
        for one in message.assignments if key == 14 else ():
            said, assignment = consumer_protocol.decode_assignment(memoryview(one.assignment))
            assert consumer_protocol.encode_assignment(assignment, said) == one.assignment
            count += 1
    assert count > 0
