"""A server whose store is shipped: the meaning of acks=all, and responses while the object store is unreachable."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli.processes import arguments_of
from server.scraping import RawClient, get, scrape, value
from waiting import wait_until
from wire import Sent, foreign

import segmentlog
from segmentlog.errors import HandOverInProgress, InvalidConfig, ShippingRefused, StoreFenced, UnknownTopic
from segmentlog.objects.bucket.local_bucket import LocalBucket
from segmentlog.objects.manifest.load import require_manifest
from segmentlog.objects.restore.restore import restore
from segmentlog.objects.takeover import take_over
from segmentlog.server.codec.generated import produce
from segmentlog.server.codec.kafka_errors import ErrorCode
from segmentlog.server.embedded import Server
from segmentlog.server.error_codes import coordinator_code_of
from segmentlog.store import LogStore

confluent_kafka = pytest.importorskip("confluent_kafka")

_PRODUCE = 0


@pytest.fixture
def bucket(tmp_path: Path) -> LocalBucket:
    """Return the bucket that the store is shipped to."""
    return LocalBucket(str(tmp_path / "bucket"))


@pytest.fixture
def server(tmp_path: Path, bucket: LocalBucket) -> Iterator[Server]:
    """Serve with acks=all waiting for the object store, which is uploaded to rarely unless a request waits."""
    with segmentlog.serve(
        tmp_path / "store", port=0, metrics="127.0.0.1:0", acks_all="shipped", ship=bucket.url,
        ship_interval_ms=3_600_000,
    ) as server:  # fmt: skip
        server.store.create_topic("t", 2, fsync="never")
        yield server


def restored(bucket: LocalBucket, folder: Path, isolation: Any = "read_uncommitted") -> list[bytes | None]:
    """Return the values that a restore shows."""
    restore(bucket, str(folder))
    with LogStore(folder, background=False) as store:
        store.finish_transactions()
        return [record.value for record in store.consumer("t", isolation=isolation)]


def told(server: Server, values: list[bytes], *, acks: int = -1, partition: int = 0) -> ErrorCode:
    """Return the response to a client that produces a batch."""
    data = produce.PartitionProduceData(partition, foreign([Sent(None, value) for value in values]))
    request = produce.ProduceRequest(acks=acks, topic_data=[produce.TopicProduceData("t", partition_data=[data])])
    with RawClient(server.bootstrap_servers) as client:
        answer = client.ask(_PRODUCE, request, 9)
    return ErrorCode(answer.responses[0].partition_responses[0].error_code)


@contextlib.contextmanager
def gone(bucket: LocalBucket, tmp_path: Path) -> Iterator[None]:
    """Make the object store unavailable during the block."""
    place = tmp_path / "bucket"
    place.rename(tmp_path / "away")
    place.write_text("a file stands there")
    yield
    place.unlink()
    (tmp_path / "away").rename(place)


# ---------------------------------------------------------------- acknowledged


def test_acks_all_is_answered_once_the_object_store_has_it(tmp_path: Path, server: Server, bucket: LocalBucket) -> None:
    """This holds for any partition; many waiting requests are shipped together."""
    producer = confluent_kafka.Producer({"bootstrap.servers": server.bootstrap_servers, "acks": "all", "linger.ms": 0})
    failed: list[Any] = []
    for number in range(20):
        producer.produce(
            "t",
            b"%d" % number,
            partition=number % 2,
            on_delivery=lambda error, _: failed.append(error) if error else None,
        )
    assert producer.flush(30) == 0
    assert not failed
    assert sorted(restored(bucket, tmp_path / "restored"), key=lambda value: int(value or b"-1")) == [
        b"%d" % number for number in range(20)
    ]


def test_acks_1_waits_for_nobody(tmp_path: Path, server: Server, bucket: LocalBucket) -> None:
    """The records are shipped at the end of the interval."""
    assert told(server, [b"x"], acks=1) is ErrorCode.NONE
    assert server.store.topic("t").partition(0).shipped_offset == 0
    assert told(server, [b"y"], partition=1) is ErrorCode.NONE
    assert restored(bucket, tmp_path / "restored") == [b"y"], "what was not on disk has to wait"


def test_a_transaction_is_in_the_object_store_when_its_end_is_answered(
    tmp_path: Path, server: Server, bucket: LocalBucket
) -> None:
    """Everything that it decides is there, and so are a group's offsets when their commit is answered."""
    producer = confluent_kafka.Producer(
        {"bootstrap.servers": server.bootstrap_servers, "transactional.id": "etl", "linger.ms": 0}
    )
    producer.init_transactions(30)
    producer.begin_transaction()
    producer.produce("t", b"one", partition=0)
    producer.produce("t", b"two", partition=1)
    producer.commit_transaction(30)
    assert sorted(map(bytes, filter(None, restored(bucket, tmp_path / "one", "read_committed")))) == [b"one", b"two"]
    consumer = confluent_kafka.Consumer(
        {"bootstrap.servers": server.bootstrap_servers, "group.id": "g", "enable.auto.commit": False}
    )
    consumer.commit(offsets=[confluent_kafka.TopicPartition("t", 0, 1)], asynchronous=False)
    consumer.close()
    restore(bucket, str(tmp_path / "two"))
    with LogStore(tmp_path / "two", background=False) as store:
        (found,) = store.groups.describe("g").partitions
        assert found.committed is not None
        assert found.committed.offset == 1


# ---------------------------------------------------------------- while it cannot be


def test_clients_are_told_to_try_again_while_the_object_store_is_gone(
    tmp_path: Path, server: Server, bucket: LocalBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is Kafka's for too few replicas. acks=1 works, the server stays ready, and metrics show the failure."""
    address = server.metrics_address
    assert address is not None
    monkeypatch.setattr("segmentlog.log.append.wait_shipped.WAIT_S", 0.3)
    assert told(server, [b"first"]) is ErrorCode.NONE
    found = scrape(address)
    assert value(found, "segmentlog_partition_shipped_offset", topic="t", partition=0) == 1
    assert value(found, "segmentlog_ship_failing") == 0
    with gone(bucket, tmp_path):
        assert told(server, [b"second"]) is ErrorCode.NOT_ENOUGH_REPLICAS_AFTER_APPEND
        assert told(server, [b"third"], acks=1) is ErrorCode.NONE
        found = scrape(address)
        assert value(found, "segmentlog_ship_failing") == 1
        assert value(found, "segmentlog_partition_unshipped_records", topic="t", partition=0) == 2
        assert get(address, "/readyz")[0] == 200
    assert told(server, [b"fourth"]) is ErrorCode.NONE
    wait_until(lambda: value(scrape(address), "segmentlog_ship_failing") == 0)
    values = restored(bucket, tmp_path / "restored")
    assert values == [b"first", b"second", b"third", b"fourth"]


@pytest.mark.long
def test_nobody_waits_for_more_offsets_in_the_thread_that_serves_all(
    tmp_path: Path, bucket: LocalBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client whose partition has used up its offset grant gets a retriable error at once."""
    for name in ("log.append.appender.OFFSET_CEILING_STEP", "log.offset_grants.OFFSET_CEILING_STEP"):
        monkeypatch.setattr(f"segmentlog.{name}", 4)
    monkeypatch.setattr("segmentlog.policy.upload_policy.GRANT_MIN", 10)
    with segmentlog.serve(
        tmp_path / "store", port=0, ship=bucket.url, ship_interval_ms=10, acks_all="shipped"
    ) as server:
        server.store.create_topic("t", fsync="never")
        assert told(server, [b"first"]) is ErrorCode.NONE
        with gone(bucket, tmp_path):
            wait_until(lambda: "ship" in server.store.health())
            left = 1000  # how many appends succeed depends on the rate before
            while told(server, [b"x"], acks=1) is not ErrorCode.NOT_ENOUGH_REPLICAS:
                left -= 1
                assert left
            # A request that waited would time out at the client.
            monkeypatch.setattr("segmentlog.log.append.wait_shipped.GRANT_WAIT_S", 3600.0)
            for _ in range(20):
                assert told(server, [b"x"], acks=1) is ErrorCode.NOT_ENOUGH_REPLICAS
        wait_until(lambda: told(server, [b"again"]) is ErrorCode.NONE)


def test_clients_of_a_machine_that_was_taken_over_are_sent_away(
    tmp_path: Path, server: Server, bucket: LocalBucket
) -> None:
    """A broker that leads nothing answers this way."""
    assert told(server, [b"first"]) is ErrorCode.NONE
    take_over(bucket, str(tmp_path / "elsewhere"))
    assert told(server, [b"second"]) is ErrorCode.NOT_LEADER_OR_FOLLOWER
    assert told(server, [b"third"], acks=1) is ErrorCode.NOT_LEADER_OR_FOLLOWER
    with pytest.raises(StoreFenced):
        server.store.topic("t").partition(0).append([b"fourth"])


def test_clients_retry_while_the_store_is_handed_over(tmp_path: Path, server: Server, bucket: LocalBucket) -> None:
    """They look for the leader again, as after an election, and continue at this machine if the hand-over fails."""
    assert told(server, [b"first"]) is ErrorCode.NONE
    codes = []

    def ask() -> None:
        while not require_manifest(bucket)[0].is_handed_over:
            time.sleep(0.01)
        codes.extend([told(server, [b"second"]), told(server, [b"second"], acks=1)])

    client = threading.Thread(target=ask)
    client.start()
    with pytest.raises(ShippingRefused, match="no machine took it over"):
        server.store.shipping.hand_over(wait_ms=1_000)
    client.join()
    assert codes == [ErrorCode.NOT_LEADER_OR_FOLLOWER] * 2
    assert told(server, [b"second"]) is ErrorCode.NONE


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (HandOverInProgress("__consumer_offsets/0"), ErrorCode.NOT_COORDINATOR),
        (StoreFenced("__consumer_offsets/0", "m2"), ErrorCode.NOT_COORDINATOR),
        (UnknownTopic("t", "it was deleted"), ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
    ],
)
def test_a_coordinator_sends_clients_to_another_coordinator(error: Exception, code: ErrorCode) -> None:
    """Clients raise NOT_LEADER_OR_FOLLOWER of a commit to the application; they retry NOT_COORDINATOR."""
    assert coordinator_code_of(error) is code


# ---------------------------------------------------------------- how it is begun


def workers_of(process: subprocess.Popen[str]) -> list[int]:
    """Return the processes that the server has started."""
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def test_a_store_that_is_open_is_not_shipped_by_its_server(tmp_path: Path, bucket: LocalBucket) -> None:
    """The process that opens a store decides whether it is shipped."""
    with LogStore(tmp_path / "store") as store, pytest.raises(InvalidConfig, match="given when the store is opened"):
        segmentlog.serve(store, port=0, ship=bucket.url)


def test_workers_of_the_command_ship_as_well(tmp_path: Path, bucket: LocalBucket) -> None:
    """One of them ships; after a kill, another one takes its place."""
    command = arguments_of(
        tmp_path / "store", "serve", "--listen", "127.0.0.1:0", "--workers", "2", "--ship", bucket.url,
        "--ship-interval", "200ms", "--acks-all", "shipped",
    )  # fmt: skip
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    at_first: list[int] = []
    try:
        assert process.stderr is not None
        address = process.stderr.readline().split("listening on ")[1].split(",")[0]
        producer = confluent_kafka.Producer({"bootstrap.servers": address, "enable.idempotence": True, "linger.ms": 0})
        for number in range(6):
            producer.produce("t", b"%d" % number)
            assert producer.flush(60) == 0
            if number in (1, 3):  # either of the two that there were at first is the one that ships
                wait_until(lambda: len(workers_of(process)) == 2)
                at_first = at_first or workers_of(process)
                os.kill(at_first[number // 2], signal.SIGKILL)
        assert restored(bucket, tmp_path / "restored") == [b"%d" % number for number in range(6)]
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode == 0
