"""A client on the server's own codec: topics made and deleted, offsets asked for, requests made for later.

For either server: it speaks versions that both have, and that name topics and not their ids.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec

from segmentlog.server.codec.apis import APIS
from segmentlog.server.codec.framing import decode_response_header, frame_request
from segmentlog.server.codec.generated.api_versions import ApiVersionsRequest
from segmentlog.server.codec.generated.create_topics import CreatableTopic, CreatableTopicConfig, CreateTopicsRequest
from segmentlog.server.codec.generated.delete_topics import DeleteTopicsRequest
from segmentlog.server.codec.generated.fetch import FetchPartition, FetchRequest, FetchTopic
from segmentlog.server.codec.generated.list_offsets import (
    ListOffsetsPartition,
    ListOffsetsRequest,
    ListOffsetsTopic,
)
from segmentlog.server.codec.generated.metadata import MetadataRequest, MetadataRequestTopic, MetadataResponse
from segmentlog.server.codec.generated.produce import PartitionProduceData, ProduceRequest, TopicProduceData

PRODUCE, FETCH, LIST_OFFSETS, METADATA, API_VERSIONS, CREATE_TOPICS, DELETE_TOPICS = 0, 1, 2, 3, 18, 19, 20
_VERSIONS = {PRODUCE: 9, FETCH: 12, LIST_OFFSETS: 6, METADATA: 9, API_VERSIONS: 3, CREATE_TOPICS: 6, DELETE_TOPICS: 5}

ALL, LEADER = -1, 1
"""What ``acks`` may be."""

_LATEST = -1
_PATIENCE_S = 60.0
_TIMEOUT_MS = 60_000

Address = tuple[str, int]

_base_and_length = struct.Struct(">qi").unpack_from
_last_delta = struct.Struct(">i").unpack_from
_LAST_DELTA_AT = 23
_BATCH_HEADER_BYTES = 61


class Refused(RuntimeError):
    """A server answered with an error."""


class Client:
    """One connection, one request at a time."""

    def __init__(self, address: Address, timeout_s: float = _PATIENCE_S) -> None:
        self._socket = connect(address, timeout_s)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()

    def ask(self, api_key: int, message: Any) -> Any:
        """Return the response. Raises EOFError when the server hangs up."""
        self.send(request(api_key, message))
        return self.receive(api_key)

    def send(self, framed: bytes) -> None:
        self._socket.sendall(framed)

    def receive(self, api_key: int) -> Any:
        """Return the next response, which must be of that kind."""
        return decode(api_key, self.receive_frame())

    def receive_frame(self) -> bytes:
        """Return the next response as it came, behind its size."""
        (size,) = struct.unpack(">i", self._receive(4))
        return self._receive(size)

    def _receive(self, size: int) -> bytes:
        data = bytearray(size)
        view, at = memoryview(data), 0
        while at < size:
            count = self._socket.recv_into(view[at:])
            if not count:
                raise EOFError("the server hung up")
            at += count
        return bytes(data)

    # ------------------------------------------------------------ what is asked

    def is_ready(self) -> bool:
        """Whether a broker is told, by two requests as every client begins with them."""
        self.ask(API_VERSIONS, ApiVersionsRequest("bench", "1"))
        return bool(self.ask(METADATA, MetadataRequest([])).brokers)

    def leaders(self, topic: str, *, patience_s: float = _PATIENCE_S) -> list[Address]:
        """Who leads each partition; waits until all of them are led."""
        deadline = time.monotonic() + patience_s
        wanted = MetadataRequest([MetadataRequestTopic(name=topic)], allow_auto_topic_creation=False)
        while True:
            response: MetadataResponse = self.ask(METADATA, wanted)
            nodes = {node.node_id: (node.host, node.port) for node in response.brokers}
            (found,) = response.topics
            partitions = sorted(found.partitions, key=lambda one: one.partition_index)
            if not found.error_code and partitions and all(one.leader_id in nodes for one in partitions):
                return [nodes[one.leader_id] for one in partitions]
            if time.monotonic() > deadline:
                raise Refused(f"{topic} is not led after {patience_s} s: error {found.error_code}")
            time.sleep(0.001)

    def end_of(self, topic: str, partition: int) -> int:
        """Return the log end offset once the server has opened the log: ask its leader."""
        deadline = time.monotonic() + _PATIENCE_S
        wanted = ListOffsetsTopic(topic, [ListOffsetsPartition(partition, -1, _LATEST)])
        while True:
            response = self.ask(LIST_OFFSETS, ListOffsetsRequest(-1, 0, [wanted]))
            answer = response.topics[0].partitions[0]
            if not answer.error_code:
                return int(answer.offset)
            if time.monotonic() > deadline:
                raise Refused(f"{topic}-{partition}: the end is not told: error {answer.error_code}")
            time.sleep(0.001)

    def create(self, topic: str, partitions: int, config: Mapping[str, str]) -> None:
        configs = [CreatableTopicConfig(name, value) for name, value in config.items()]
        wanted = CreatableTopic(topic, partitions, 1, [], configs)
        (result,) = self.ask(CREATE_TOPICS, CreateTopicsRequest([wanted], _TIMEOUT_MS)).topics
        if result.error_code:
            raise Refused(f"{topic} cannot be made: {result.error_code} {result.error_message or ''}")

    def delete(self, topic: str) -> None:
        request = DeleteTopicsRequest(topic_names=[topic], timeout_ms=_TIMEOUT_MS)
        (result,) = self.ask(DELETE_TOPICS, request).responses
        if result.error_code:
            raise Refused(f"{topic} cannot be deleted: {result.error_code} {result.error_message or ''}")


class Topic(msgspec.Struct, frozen=True):
    """A topic, and who leads each of its partitions."""

    name: str
    leaders: list[Address]

    def end(self) -> int:
        """How many records all of its partitions hold, of a topic of which nothing was deleted."""
        total = 0
        for address in set(self.leaders):
            with Client(address) as client:
                total += sum(
                    client.end_of(self.name, number) for number, one in enumerate(self.leaders) if one == address
                )
        return total


@contextmanager
def new_topic(
    address: Address, name: str, partitions: int = 1, config: Mapping[str, str] | None = None
) -> Iterator[Topic]:
    """Yield a topic whose partitions all have leaders, and delete it at the end."""
    with Client(address) as client:
        client.create(name, partitions, config or {})
        topic = Topic(name, client.leaders(name))
        topic.end()
        yield topic
        client.delete(name)


def connect(address: Address, timeout_s: float = _PATIENCE_S) -> socket.socket:
    sock = socket.create_connection(address, timeout=timeout_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


# ---------------------------------------------------------------- requests


def request(api_key: int, message: Any) -> bytes:
    """Return the bytes of a request."""
    api, version = APIS[api_key], _VERSIONS[api_key]
    return b"".join(frame_request(api, version, 1, "bench", api.codec.encode_request(message, version)))


def decode(api_key: int, frame: bytes) -> Any:
    """Return a response, of its bytes behind the size."""
    api, version, view = APIS[api_key], _VERSIONS[api_key], memoryview(frame)
    _, at = decode_response_header(view, api, version)
    return api.codec.decode_response(view, at, version)


def produce_request(topic: str, partition: int, batch: bytes, acks: int) -> bytes:
    """Return a request with one batch."""
    data = TopicProduceData(name=topic, partition_data=[PartitionProduceData(partition, batch)])
    return request(PRODUCE, ProduceRequest(None, acks, _TIMEOUT_MS, [data]))


def fetch_request(topic: str, partition: int, offset: int, max_bytes: int, *, max_wait_ms: int = 0) -> bytes:
    """Return a request for the records of one partition from an offset on.

    With ``max_wait_ms`` it waits for a record.
    """
    wanted = FetchPartition(partition, fetch_offset=offset, partition_max_bytes=max_bytes)
    topics = [FetchTopic(topic=topic, partitions=[wanted])]
    return request(FETCH, FetchRequest(max_wait_ms=max_wait_ms, min_bytes=1, topics=topics))


def check_produced(frame: bytes) -> int:
    """Return the base offset of an answer to `produce_request`. Raises `Refused`."""
    answer = decode(PRODUCE, frame).responses[0].partition_responses[0]
    if answer.error_code:
        raise Refused(f"a batch is refused: {answer.error_code} {answer.error_message or ''}")
    return int(answer.base_offset)


def fetched_records(frame: bytes) -> memoryview:
    """Return the batches of an answer to `fetch_request`; the last of them may be cut short. Raises `Refused`."""
    response = decode(FETCH, frame)
    code = response.error_code or response.responses[0].partitions[0].error_code
    if code:
        raise Refused(f"a fetch is refused: {code}")
    records = response.responses[0].partitions[0].records
    return memoryview(records or b"")


def next_offset(batches: memoryview) -> int | None:
    """Return the offset after the last complete batch, or None."""
    at, found = 0, None
    while at + _BATCH_HEADER_BYTES <= len(batches):
        base, length = _base_and_length(batches, at)
        if at + 12 + length > len(batches):
            break
        found = base + _last_delta(batches, at + _LAST_DELTA_AT)[0] + 1
        at += 12 + length
    return found


def fetches_of(
    topic: Topic, partition: int, max_bytes: int, *, limit: int | None = None
) -> tuple[list[bytes], list[int], int]:
    """Return (requests that read a partition from its beginning to its end, sizes of the answers, number of records).

    Requests and sizes are the same for every reader.
    """
    requests: list[bytes] = []
    sizes: list[int] = []
    offset = 0
    with Client(topic.leaders[partition]) as client:
        end = client.end_of(topic.name, partition)
        while offset < end and (limit is None or len(requests) < limit):
            wanted = fetch_request(topic.name, partition, offset, max_bytes)
            client.send(wanted)
            frame = client.receive_frame()
            reached = next_offset(fetched_records(frame))
            if reached is None:
                raise Refused(f"{topic.name}-{partition} ends at {end}, and nothing comes from {offset}")
            requests.append(wanted)
            sizes.append(len(frame))
            offset = reached
    return requests, sizes, offset
