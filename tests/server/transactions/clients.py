"""A transactional client of Kafka's, request by request, in the old protocol of transactions or in the new one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from server.wire_client import Desk
from wire import Sent, foreign, read_foreign

from segmentlog.format.batch import CONTROL, TRANSACTIONAL
from segmentlog.format.wire import WireHeader, parse_wire_batch
from segmentlog.server.codec.generated.add_offsets_to_txn import AddOffsetsToTxnRequest
from segmentlog.server.codec.generated.add_partitions_to_txn import AddPartitionsToTxnRequest, AddPartitionsToTxnTopic
from segmentlog.server.codec.generated.end_txn import EndTxnRequest
from segmentlog.server.codec.generated.fetch import FetchPartition, FetchRequest, FetchTopic
from segmentlog.server.codec.generated.init_producer_id import InitProducerIdRequest
from segmentlog.server.codec.generated.produce import PartitionProduceData, ProduceRequest, TopicProduceData
from segmentlog.server.codec.generated.txn_offset_commit import (
    TxnOffsetCommitRequest,
    TxnOffsetCommitRequestPartition,
    TxnOffsetCommitRequestTopic,
)
from segmentlog.server.topic_ids import wire_id
from segmentlog.store import LogStore
from segmentlog.transactions.server_transactions import ProducerIdAndEpoch

_BY_ID = 6
NOBODY = ProducerIdAndEpoch(-1, -1)


class Client:
    """One instance of a transactional id. Errors are returned as Kafka's codes."""

    def __init__(self, desk: Desk, name: str = "app", *, is_new: bool) -> None:
        self.desk = desk
        self.name = name
        self.is_new = is_new
        self.numbers = NOBODY
        self.sequences: dict[tuple[str, int], int] = {}

    def begin(self, timeout_ms: int = 60_000, expected: ProducerIdAndEpoch = NOBODY, version: int = 5) -> int:
        """InitProducerId."""
        request = InitProducerIdRequest(self.name, timeout_ms)
        if version >= 3:
            request.producer_id, request.producer_epoch = expected
        answer = self.desk.ask(22, version, request)
        if not answer.error_code:
            self._go_on_as(ProducerIdAndEpoch(answer.producer_id, answer.producer_epoch))
        return answer.error_code  # type: ignore[no-any-return]

    def _go_on_as(self, numbers: ProducerIdAndEpoch) -> None:
        if numbers != self.numbers:
            self.sequences.clear()
        self.numbers = numbers

    def add(self, *partitions: int, topic: str = "t", version: int = 3) -> list[int]:
        """AddPartitionsToTxn; the code of each."""
        request = AddPartitionsToTxnRequest(
            v3_and_below_transactional_id=self.name, v3_and_below_producer_id=self.numbers.producer_id,
            v3_and_below_producer_epoch=self.numbers.epoch,
            v3_and_below_topics=[AddPartitionsToTxnTopic(topic, list(partitions))],
        )  # fmt: skip
        (result,) = self.desk.ask(24, version, request).results_by_topic_v3_and_below
        return [one.partition_error_code for one in result.results_by_partition]

    def batch(self, *values: bytes, partition: int = 0, topic: str = "t") -> bytes:
        """Return the next batch as bytes."""
        sequence = self.sequences.get((topic, partition), 0)
        self.sequences[topic, partition] = sequence + len(values)
        sent = [Sent(b"k", value) for value in values]
        return foreign(sent, producer=(*self.numbers, sequence), transactional=True)

    def send(
        self, data: bytes, *, partition: int = 0, topic: str = "t", version: int | None = None, acks: int = -1
    ) -> int:
        """Produce."""
        name = self.name
        topics = [TopicProduceData(topic, partition_data=[PartitionProduceData(partition, memoryview(data))])]
        request = ProduceRequest(name, acks, 1000, topics)
        answer = self.desk.ask(0, version or (12 if self.is_new else 10), request)
        return answer.responses[0].partition_responses[0].error_code  # type: ignore[no-any-return]

    def write(self, *values: bytes, partition: int = 0, topic: str = "t") -> int:
        """Send values within the transaction, with all requests that this takes."""
        if not self.is_new:
            (code,) = self.add(partition, topic=topic)
            if code:
                return code
        return self.send(self.batch(*values, partition=partition, topic=topic), partition=partition, topic=topic)

    def end(
        self, *, committed: bool = True, version: int | None = None, numbers: ProducerIdAndEpoch | None = None
    ) -> int:
        """EndTxn."""
        asked = numbers or self.numbers
        answer = self.desk.ask(26, version or (5 if self.is_new else 3), EndTxnRequest(self.name, *asked, committed))
        if not answer.error_code and self.is_new:
            self._go_on_as(ProducerIdAndEpoch(answer.producer_id, answer.producer_epoch))
        return answer.error_code  # type: ignore[no-any-return]

    def add_offsets(self, group: str = "g") -> int:
        """AddOffsetsToTxn."""
        return self.desk.ask(25, 3, AddOffsetsToTxnRequest(self.name, *self.numbers, group)).error_code  # type: ignore[no-any-return]

    def commit_offset(
        self, offset: int, *, group: str = "g", topic: str = "t", partition: int = 0, **options: Any
    ) -> int:
        """TxnOffsetCommit, and in the old protocol what goes before it."""
        if not self.is_new and (code := self.add_offsets(group)):
            return code
        return self.send_offset(offset, group=group, topic=topic, partition=partition, **options)

    def send_offset(
        self, offset: int, *, group: str, topic: str, partition: int, topic_id: bytes = b"", **options: Any
    ) -> int:
        """TxnOffsetCommit alone; from version 6 on by the topic's id."""
        version = options.pop("version", 6 if self.is_new else 3)
        asked = TxnOffsetCommitRequestTopic(topic, partitions=[TxnOffsetCommitRequestPartition(partition, offset)])
        if version >= _BY_ID:
            asked.name, asked.topic_id = "", topic_id or self._id_of(topic)
        request = TxnOffsetCommitRequest(self.name, group, *self.numbers, topics=[asked], **options)
        answer = self.desk.ask(28, version, request)
        (told,) = answer.topics
        assert (told.name, told.topic_id) == (asked.name, asked.topic_id)
        return told.partitions[0].error_code  # type: ignore[no-any-return]

    def _id_of(self, topic: str) -> bytes:
        store = self.desk.broker.store
        return wire_id(store.topic(topic).id) if topic in store.topics() else bytes(15) + b"\7"


def batches(data: bytes) -> list[tuple[WireHeader, bytes]]:
    """Return the batches in a response to a fetch."""
    found, at = [], 0
    while at < len(data):
        header = parse_wire_batch(data[at:])
        found.append((header, data[at : at + header.size_bytes]))
        at += header.size_bytes
    return found


def fetched(desk: Desk, partition: int = 0, topic: str = "t") -> list[bytes | None]:
    """Return the values of a Kafka client with ``read_committed``, which leaves out aborted records itself."""
    asked = FetchPartition(partition, partition_max_bytes=1 << 20)
    request = FetchRequest(isolation_level=1, topics=[FetchTopic(topic, partitions=[asked])])
    answer = desk.ask(1, 12, request).responses[0].partitions[0]
    assert answer.error_code == 0
    coming = sorted((one.first_offset, one.producer_id) for one in answer.aborted_transactions or ())
    open_ids: set[int] = set()
    values: list[bytes | None] = []
    for header, data in batches(bytes(answer.records or b"")):
        while coming and coming[0][0] <= header.base_offset + header.last_offset_delta:
            open_ids.add(coming.pop(0)[1])
        if header.attributes & CONTROL:
            ((_, marker),) = read_foreign(data)
            if marker.key == b"\0\0\0\0":
                open_ids.discard(header.producer_id)
        elif not (header.attributes & TRANSACTIONAL and header.producer_id in open_ids):
            values += [one.value for _, one in read_foreign(data)]
    return values


def read(store: LogStore, partition: int = 0, topic: str = "t") -> list[bytes | None]:
    """Return the values that a reader of the library with ``read_committed`` gets."""
    log = store.topic(topic).partition(partition)
    return [value for batch in log.read(log.log_start_offset, isolation="read_committed") for value in batch.values]


def both(desk: Desk, partition: int = 0, topic: str = "t") -> Sequence[bytes | None]:
    """Return what both consumers read, which must be the same."""
    seen = read(desk.broker.store, partition, topic)
    assert fetched(desk, partition, topic) == seen
    return seen
