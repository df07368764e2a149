"""Every reader can read what the server acknowledges. It refuses anything else, with the record and the reason."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from leftovers import opened
from logs import NoSyncFileSystem
from raw_batches import ACCEPTED, HOUR_MS, PACKERS, REFUSED, batch, record, records
from server.transactions.clients import Client
from server.wire_client import Desk
from wire import read_foreign

from segmentlog.cli import cli
from segmentlog.cli.common import run
from segmentlog.config import TopicConfig
from segmentlog.format.batch import TRANSACTIONAL
from segmentlog.security.acls import OpenAuthorizer
from segmentlog.server.broker import Broker
from segmentlog.server.codec.apis import APIS
from segmentlog.server.codec.generated.fetch import FetchPartition, FetchRequest, FetchTopic
from segmentlog.server.codec.generated.init_producer_id import InitProducerIdRequest
from segmentlog.server.codec.generated.produce import PartitionProduceData, ProduceRequest, TopicProduceData
from segmentlog.server.codec.kafka_errors import ErrorCode
from segmentlog.server.server_settings import ServerSettings
from segmentlog.server.worker_cluster import WorkerCluster, WorkerNode
from segmentlog.store import LogStore

BEYOND_AIOKAFKA = (
    "a header's name that is no UTF-8",
    "lz4: linked blocks",
    "zstd: two frames",
    "zstd: a skippable frame",
)
"""Records that Java's clients read and aiokafka does not."""
VERSIONS = range(APIS[0].min_version, APIS[0].max_version + 1)
_INIT_PRODUCER_ID = 22


@pytest.fixture
def store(tmp_path: Path) -> LogStore:
    """Return a store with topic ``t`` of two partitions."""
    made = opened(LogStore(tmp_path / "store", background=False, fs=NoSyncFileSystem()))
    made.create_topic("t", 2, {"max.message.bytes": 2 << 20, "retention.ms": -1})
    return made


@pytest.fixture
def desk(store: LogStore) -> Iterator[Desk]:
    """Provide a server of the store, without sockets."""
    broker = Broker(
        store, WorkerCluster("c", [WorkerNode(1, "localhost", 9092)], 1), ServerSettings(), OpenAuthorizer()
    )
    yield Desk(broker)
    broker.close()


def now_ms() -> int:
    """Return the time of the server's clock."""
    return time.time_ns() // 1_000_000


def produce(
    desk: Desk, *batches: bytes, version: int = 7, name: str | None = None, topic: str = "t", partition: int = 0
) -> list[Any]:
    """Send batches to partitions from ``partition`` on in one request; return the answers of the partitions."""
    parts = [PartitionProduceData(partition + at, memoryview(data)) for at, data in enumerate(batches)]
    data = TopicProduceData(topic, partition_data=parts)
    if version >= 13:
        import uuid

        data.topic_id = uuid.UUID(desk.broker.store.topic(topic).id).bytes
    answer = desk.ask(0, version, ProduceRequest(name, -1, 1000, [data]))
    return list(answer.responses[0].partition_responses)


def idempotent(desk: Desk) -> tuple[int, int]:
    """Return a producer id and its epoch, as a client gets them."""
    told = desk.ask(_INIT_PRODUCER_ID, 4, InitProducerIdRequest(None, 60_000))
    return told.producer_id, told.producer_epoch


def check_readers(store: LogStore, topic: str, expected: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Check that every reader reaches the end of every partition, with ``expected`` records; verify finds nothing."""
    from segmentlog.http.rest.record_json import lines
    from segmentlog.spark.arrow_batches import ArrowRows  # noqa: F401  (needs pyarrow, which every test has)

    logs = store.topic(topic).partitions()
    by_library = [record for log in logs for found in log.read(log.log_start_offset) for record in found.records()]
    assert len(by_library) == expected
    as_rest = b"".join(lines(found, "text") for log in logs for found in log.read(log.log_start_offset))
    assert as_rest.count(b"\n") == expected
    with store.consumer(topic) as consumer:
        assert sum(1 for _ in consumer) == expected
    store.close()
    capsys.readouterr()
    assert run(cli, ["--dir", str(store.path), "verify", topic]) == 0, capsys.readouterr().out
    capsys.readouterr()
    assert run(cli, ["--dir", str(store.path), "consume", topic, "--json"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == expected


def fetched(desk: Desk, partition: int = 0) -> list[bytes]:
    """Return the batches of a partition as a client gets them."""
    wanted = FetchTopic("t", partitions=[FetchPartition(partition, partition_max_bytes=1 << 26)])
    answer = desk.ask(1, 11, FetchRequest(max_wait_ms=0, max_bytes=1 << 26, topics=[wanted]))
    data, found = bytes(answer.responses[0].partitions[0].records or b""), []
    while data:
        size = int.from_bytes(data[8:12], "big") + 12
        found.append(data[:size])
        data = data[size:]
    return found


# ---------------------------------------------------------------- what is refused


def check_refused(store: LogStore, told: Any, name: str, version: int) -> None:
    """Check that the answer has the code, the record and the reason, and that no record was stored."""
    case = REFUSED[name]
    assert told.error_code == case.code, (ErrorCode(told.error_code).name, told.error_message)
    assert told.base_offset == -1
    if version >= 8:
        named = [one.batch_index for one in told.record_errors]
        assert case.index is None or named == [case.index]
        assert told.error_message
        assert case.words in told.error_message
        assert case.index is None or f"record {case.index}" in told.error_message
    assert store.open_partition("t", 0).log_end_offset == 0


@pytest.mark.parametrize("name", REFUSED)
def test_a_batch_that_no_reader_could_read_is_refused(store: LogStore, desk: Desk, name: str) -> None:
    """Plain, idempotent and in a transaction; nothing of it is stored, and the other partition gets its records."""
    make = REFUSED[name].make
    bad, good = produce(desk, make(now_ms()), batch(now_ms(), records(2), 2), version=8)
    check_refused(store, bad, name, 8)
    assert (good.error_code, good.base_offset) == (0, 0)

    numbers = (*idempotent(desk), 0)
    check_refused(store, produce(desk, make(now_ms(), producer=numbers), version=8)[0], name, 8)
    # Its numbers are not used up.
    assert produce(desk, batch(now_ms(), records(1), 1, producer=numbers), partition=1)[0].error_code == 0

    client = Client(desk, is_new=False)
    assert client.begin() == 0
    assert client.add(0) == [0]
    made = make(now_ms(), producer=(*client.numbers, 0), attributes=TRANSACTIONAL)
    check_refused(store, produce(desk, made, version=8, name=client.name)[0], name, 8)
    assert client.write(b"v") == 0
    assert client.end() == 0


@pytest.mark.parametrize("version", VERSIONS)
def test_every_version_refuses_it(store: LogStore, desk: Desk, version: int) -> None:
    """The record and the message are in the answers that have room for them."""
    for name in ("one record announced, two there", "offset deltas 0, 0", "a wrong CRC", "timestamp 2^62"):
        check_refused(store, produce(desk, REFUSED[name].make(now_ms()), version=version)[0], name, version)
    assert produce(desk, batch(now_ms(), records(3), 3), version=version)[0].error_code == 0


def test_the_records_of_many_refusals_fit_into_one_answer(desk: Desk) -> None:
    """A request may name a partition again and again, and lose 10,000 records each time."""
    data = memoryview(batch(now_ms(), PACKERS["zstd"][1](records(10_000)), 10_000, codec=4, base_timestamp=1 << 62))
    parts = [PartitionProduceData(0, data) for _ in range(40)]
    request = ProduceRequest(None, -1, 1000, [TopicProduceData("t", partition_data=parts)])
    told = desk.ask(0, 8, request).responses[0].partition_responses
    named = [len(one.record_errors) for one in told]
    assert len(named) == 40
    assert (max(named), min(named)) == (10_000, 1)
    assert sum(named) <= desk.broker.settings.limits.answer_elements + 40


def test_nothing_refused_is_read(store: LogStore, desk: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    """Among good batches: every reader finds those, and nothing else."""
    expected = 0
    for name, case in REFUSED.items():
        assert "MiB" in name or produce(desk, case.make(now_ms()))[0].error_code == case.code
        assert produce(desk, batch(now_ms(), records(2), 2))[0].error_code == 0
        expected += 2
    check_readers(store, "t", expected, capsys)


def test_every_record_that_is_too_late_is_named(store: LogStore, desk: Desk) -> None:
    """A client can then send the other records again."""
    late = [record(at, timestamp_delta=at % 2 * 2 * HOUR_MS) for at in range(6)]
    (told,) = produce(desk, batch(now_ms(), b"".join(late), 6), version=8)
    assert told.error_code == ErrorCode.INVALID_TIMESTAMP
    assert [one.batch_index for one in told.record_errors] == [1, 3, 5]


# ---------------------------------------------------------------- what is accepted


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_is_unusual_and_right_is_read(
    store: LogStore, desk: Desk, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every reader gets it as the clients sent it."""
    case, count = ACCEPTED[name]
    for partition in (0, 1):
        (told,) = produce(desk, case.make(now_ms()), partition=partition, version=8)
        assert told.error_code == 0, told.error_message
        (sent,) = fetched(desk, partition)
        if name not in BEYOND_AIOKAFKA:
            assert len(read_foreign(sent)) == count
    check_readers(store, "t", 2 * count, capsys)


@pytest.mark.parametrize("said", [0, -1, 1 << 62, -(1 << 62)])
@pytest.mark.parametrize("numbered", [False, True])
def test_the_largest_timestamp_is_corrected(store: LogStore, desk: Desk, said: int, numbered: bool) -> None:
    """As in Kafka, the CRC is corrected, too, so a search by time finds the record, and retention sees its age."""
    now = now_ms()
    payload = record() + record(1, timestamp_delta=700) + record(2, timestamp_delta=-50)
    producer = (*idempotent(desk), 0) if numbered else (-1, -1, -1)
    made = batch(now, payload, 3, max_timestamp=said, producer=producer)
    for _ in range(2):
        assert produce(desk, made)[0].error_code == 0
    log = store.open_partition("t", 0)
    assert log.log_end_offset == (3 if numbered else 6), "a batch that is sent again is recognized"
    assert log.max_timestamp(0) == now + 700
    assert log.offset_for_timestamp(now + 700) == 1
    sent = fetched(desk)[0]
    assert [one.timestamp for _, one in read_foreign(sent)] == [now, now + 700, now - 50]
    assert int.from_bytes(sent[35:43], "big", signed=True) == now + 700


# ---------------------------------------------------------------- the limits of timestamps


@pytest.mark.parametrize(
    ("config", "ahead_ms", "is_taken"),
    [
        ({}, 30 * 60_000, True),
        ({}, 2 * HOUR_MS, False),
        ({}, -(10**12), True),
        ({"message.timestamp.after.max.ms": 5 * HOUR_MS}, 4 * HOUR_MS, True),
        ({"message.timestamp.after.max.ms": 5 * HOUR_MS}, 6 * HOUR_MS, False),
        ({"message.timestamp.after.max.ms": 2**63 - 1}, 10**12, True),
        ({"message.timestamp.after.max.ms": 2**63 - 1}, 1 << 62, False),
        ({"message.timestamp.before.max.ms": HOUR_MS}, -2 * HOUR_MS, False),
        ({"message.timestamp.before.max.ms": HOUR_MS}, -HOUR_MS // 2, True),
        ({"message.timestamp.type": "LogAppendTime"}, 2 * HOUR_MS, True),
        (
            {"message.timestamp.type": "LogAppendTime", "message.timestamp.before.max.ms": HOUR_MS}, -2 * HOUR_MS, True,
        ),
    ],
)  # fmt: skip
def test_how_far_a_timestamp_may_be_from_the_clock(
    store: LogStore, desk: Desk, config: dict[str, Any], ahead_ms: int, is_taken: bool
) -> None:
    """The topic says it; an hour ahead where it does not. Topics with LogAppendTime do not ask."""
    store.create_topic("limited", config=config)
    made = batch(now_ms() + ahead_ms, records(1), 1)
    (told,) = produce(desk, made, topic="limited")
    assert told.error_code == (0 if is_taken else ErrorCode.INVALID_TIMESTAMP)
    assert produce(desk, batch(-1, records(1), 1), topic="limited")[0].error_code == 0, "no timestamp at all"


def test_the_message_says_which_limit(store: LogStore, desk: Desk) -> None:
    """The message also says how far the record is from the limit."""
    store.create_topic("limited", config={"message.timestamp.before.max.ms": HOUR_MS})
    (told,) = produce(desk, batch(now_ms() - 3 * HOUR_MS, records(1), 1), topic="limited", version=8)
    assert "message.timestamp.before.max.ms" in told.error_message
    assert "1h" in told.error_message
    assert "nothing was appended" in told.error_message


def test_a_compacted_topic_needs_keys(store: LogStore, desk: Desk) -> None:
    """The answer names every record without a key."""
    store.create_topic("compacted", config={"cleanup.policy": "compact"})
    payload = record(0) + record(1, None) + record(2, None)
    (told,) = produce(desk, batch(now_ms(), payload, 3), topic="compacted", version=8)
    assert told.error_code == ErrorCode.INVALID_RECORD
    assert [one.batch_index for one in told.record_errors] == [1, 2]


def test_a_request_without_acks_that_is_refused_ends_the_connection(desk: Desk) -> None:
    """The client could not learn of the error in another way."""
    from segmentlog.server.frames import BadFrame

    part = PartitionProduceData(0, memoryview(REFUSED["offset deltas 0, 0"].make(now_ms())))
    with pytest.raises(BadFrame, match="INVALID_RECORD"):
        desk.ask(0, 7, ProduceRequest(None, 0, 1000, [TopicProduceData("t", partition_data=[part])]))


def test_the_limits_are_keys_of_the_topic(store: LogStore, desk: Desk) -> None:
    """They have Kafka's defaults, as its tools read them."""
    from segmentlog.policy.kafka_configs import describe

    found = {entry.name: entry for entry in describe(TopicConfig())}
    after, before = found["message.timestamp.after.max.ms"], found["message.timestamp.before.max.ms"]
    assert (after.value, after.is_default) == ("3600000", True)
    assert (before.value, before.is_default) == (str(2**63 - 1), True)
    changed = {entry.name: entry for entry in describe(TopicConfig(message_timestamp_after_max_ms=3_600_000))}
    assert not changed["message.timestamp.after.max.ms"].is_default
