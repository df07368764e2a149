"""Power cuts during Produce requests, at any call to the disk: the answers that clients got still hold after it.

Several partitions, acks=1 and all, and idempotent producers that repeat requests without an answer. Some batches are
too large, and answers wait for an fsync while the next request runs. Everything below the sockets is the server's own
code, but its fsyncs run when the trial chooses, and not in threads.

SEGMENTLOG_SERVER_CUTS  lives of a server, each with dozens of power cuts
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from typing import Any

import pytest
from delivery_trial import PATH, simulated_paths
from logs import FakeClock
from seeds import seeds, share
from server.wire_client import Desk, request_bytes
from wire import Sent, foreign, read_foreign

from segmentlog.format.wire import WIRE_HEADER, WireHeader
from segmentlog.security.acls import OpenAuthorizer
from segmentlog.server.ack_waiter import AckWaiter, _Waiter
from segmentlog.server.broker import Broker
from segmentlog.server.codec.apis import APIS
from segmentlog.server.codec.framing import decode_response_header
from segmentlog.server.codec.generated.fetch import FetchPartition, FetchRequest, FetchTopic
from segmentlog.server.codec.generated.init_producer_id import InitProducerIdRequest
from segmentlog.server.codec.generated.offset_for_leader_epoch import (
    OffsetForLeaderEpochRequest,
    OffsetForLeaderPartition,
    OffsetForLeaderTopic,
)
from segmentlog.server.codec.generated.produce import PartitionProduceData, ProduceRequest, TopicProduceData
from segmentlog.server.codec.kafka_errors import ErrorCode
from segmentlog.server.response_queue import PendingResponse
from segmentlog.server.server_settings import ServerSettings
from segmentlog.server.worker_cluster import WorkerCluster, WorkerNode
from segmentlog.storage.file_operations import replace_file
from segmentlog.store import LogStore
from segmentlog.testing import SimulatedDisk
from segmentlog.testing.simulated_disk import CrashPoint

LIVES = int(os.environ.get("SEGMENTLOG_SERVER_CUTS", "36"))
_PARTITIONS = 2
_STEPS = 14
_CUTS = 3
"""In the middle of each step."""
_PRODUCERS = 2
_IN_FLIGHT_MAX = 3
_CONFIG = {"segment_records": 9, "max_message_bytes": 600, "index_interval_bytes": 100}

Where = tuple[int, int]
"""Partition and offset."""


class _Request:
    """One that was sent: its batches by partition, and what is known of its answer."""

    def __init__(
        self, acks: int, producer: int | None, batches: dict[int, list[bytes]], sequence: int, producer_id: int = -1
    ) -> None:
        self.acks = acks
        self.producer = producer
        self.producer_id = producer_id
        self.batches = batches
        self.sequence = sequence
        self.answer: Any = None

    def encoded(self) -> bytes:
        """Return the batch as bytes, the same each time it is sent."""
        data = []
        for number, values in self.batches.items():
            made = (-1, -1, -1) if self.producer is None else (self.producer_id, 0, self.sequence)
            records = foreign([Sent(b"k", value) for value in values], producer=made)
            data.append(PartitionProduceData(number, records))
        request = ProduceRequest(None, self.acks, 1000, [TopicProduceData("t", partition_data=data)])
        return request_bytes(0, 7, request, 7)[4:]


class _Told:
    """Facts that clients know: they only grow, and survive the death of the machine."""

    def __init__(self) -> None:
        self.acked: dict[Where, bytes] = {}
        """With acks=all."""
        self.named: dict[Where, bytes] = {}
        """Every record whose offset was ever told, by an answer or by a fetch."""
        self.read: dict[Where, tuple[bytes, int]] = {}
        """Records that fetches returned, with the epoch of their batch."""
        self.watermarks = [0] * _PARTITIONS

    def copy(self) -> _Told:
        """Return a copy of the current state."""
        made = _Told()
        made.acked, made.named, made.read = dict(self.acked), dict(self.named), dict(self.read)
        made.watermarks = list(self.watermarks)
        return made

    def name(self, where: Where, value: bytes) -> None:
        """Note an acknowledged offset."""
        assert self.named.setdefault(where, value) == value, "one offset, two records"


class _Late(AckWaiter):
    """Syncs when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.owed: list[Any] = []

    def when_durable(self, partition: Any, base_offset: int, end_offset: int, done: Any) -> None:
        self.owed.append((partition, _Waiter(base_offset, end_offset, done)))

    def sync(self, count: int) -> None:
        """Run ``count`` of the pending fsyncs, the oldest first."""
        for partition, waiter in self.owed[:count]:
            waiter.done(self._reach(partition, [waiter]))
        del self.owed[:count]


class _Machine:
    """A server on a disk."""

    def __init__(self, disk: SimulatedDisk, clock: FakeClock, *, durable_reads: bool) -> None:
        self.disk = disk
        self.store = LogStore(PATH, fs=disk.process(), clock=clock, background=False)
        if "t" not in self.store.topics():
            self.store.create_topic("t", _PARTITIONS)
        cluster = WorkerCluster("c", [WorkerNode(1, "localhost", 9092)], 1)
        self.broker = Broker(self.store, cluster, ServerSettings(durable_reads=durable_reads), OpenAuthorizer())
        self.late = self.broker.fsync_waiter = self.broker.ack_waiter = _Late()
        self.desk = Desk(self.broker)
        self._later: list[tuple[_Request, Any]] = []

    def send(self, request: _Request) -> None:
        """Have it done; its answer may wait."""
        self._later.append((request, self.desk.dispatcher.handle(self.desk.connection, memoryview(request.encoded()))))

    def assign_id(self) -> int:
        """Return the producer id that a client gets."""
        answer = self.desk.ask(22, 4, InitProducerIdRequest(None))
        assert answer.error_code == 0
        return int(answer.producer_id)

    def hear(self, told: _Told) -> None:
        """Take the answers that are there, in their order."""
        while self._later:
            request, answer = self._later[0]
            buffers = answer.buffers if isinstance(answer, PendingResponse) else answer
            if buffers is None:
                return
            del self._later[0]
            data = memoryview(b"".join(buffers))[4:]
            decoded = APIS[0].codec.decode_response(data, decode_response_header(data, APIS[0], 7)[1], 7)
            request.answer = decoded
            for one in decoded.responses[0].partition_responses:
                values = request.batches[one.index]
                if sum(map(len, values)) > _CONFIG["max_message_bytes"]:
                    assert one.error_code == ErrorCode.MESSAGE_TOO_LARGE
                    continue
                assert one.error_code == 0, ErrorCode(one.error_code)
                for offset, value in enumerate(values, one.base_offset):
                    told.name((one.index, offset), value)
                    if request.acks == -1:
                        told.acked[one.index, offset] = value

    def fetch(self, told: _Told) -> dict[Where, bytes]:
        """Return all records that a client gets."""
        found: dict[Where, bytes] = {}
        for number in range(_PARTITIONS):
            offset = 0
            while True:
                part = FetchPartition(number, fetch_offset=offset, partition_max_bytes=400)
                wanted = FetchTopic("t", partitions=[part])
                answer = self.desk.ask(1, 11, FetchRequest(max_wait_ms=0, max_bytes=400, topics=[wanted]))
                data = answer.responses[0].partitions[0]
                assert data.error_code == 0, (number, offset, ErrorCode(data.error_code))
                told.watermarks[number] = max(told.watermarks[number], data.high_watermark)
                for header, batch in _batches(data.records):
                    assert offset <= header.base_offset + header.last_offset_delta < data.high_watermark
                    for at, record in read_foreign(batch) if header.record_count else ():
                        assert record.value is not None
                        assert (number, at) not in found
                        found[number, at] = record.value
                        told.name((number, at), record.value)
                        told.read[number, at] = record.value, header.leader_epoch
                    offset = header.base_offset + header.last_offset_delta + 1
                if not data.records:
                    break
        values = list(found.values())
        assert len(values) == len(set(values)), "each record once"
        return found

    def end_of(self, number: int, epoch: int) -> int:
        """Return where an epoch ended, as a client learns it (KIP-320); -1: the client must start again."""
        asked = OffsetForLeaderTopic("t", [OffsetForLeaderPartition(number, -1, epoch)])
        answer = self.desk.ask(23, 4, OffsetForLeaderEpochRequest(-2, [asked]))
        return int(answer.topics[0].partitions[0].end_offset)

    def close(self) -> None:
        """Close the server without finishing pending fsyncs."""
        self.broker.close()
        self.store.close()


def _batches(records: Any) -> Iterator[tuple[WireHeader, bytes]]:
    data = memoryview(records or b"")
    while data:
        header = WireHeader._make(WIRE_HEADER.unpack_from(data))
        yield header, bytes(data[: 12 + header.batch_length])
        data = data[12 + header.batch_length :]


class _Life:
    """A server, its clients, and power cuts."""

    def __init__(self, seed: str, fsync: str, *, durable_reads: bool) -> None:
        self.rng = random.Random(seed)
        self.clock = FakeClock()
        self.durable_reads = durable_reads
        self.told = _Told()
        self.disk = SimulatedDisk()
        self.disk.make_folders(PATH)
        stored = {"format": 1, "store_id": "00"}
        replace_file(self.disk.process(), f"{PATH}/store.json", json.dumps(stored).encode())
        self.config = {"fsync": fsync, **_CONFIG}
        self.in_flight: list[_Request] = []
        self.sequences = [0] * _PRODUCERS
        self.producer_ids: list[int] = []
        """Producer id of each producer: assigned once, and used through all power cuts."""
        self.count = self.cuts = self.lost = 0

    def run(self) -> None:
        """Live."""
        with simulated_paths(lambda: self.disk):
            machine = self.start(self.disk)
            machine.store.alter_topic("t", self.config)
            self.producer_ids = [machine.assign_id() for _ in range(_PRODUCERS)]
            for _ in range(_STEPS):
                moments: list[tuple[CrashPoint, _Told]] = []
                alive = self.disk
                alive.on_effect = lambda: moments.append((alive.point(), self.told.copy()))  # noqa: B023
                self.step(machine)
                alive.on_effect = None
                moments.append((alive.point(), self.told.copy()))
                chosen = self.rng.sample(moments[:-1], min(len(moments) - 1, _CUTS)) + moments[-1:]
                for point, told in chosen:
                    for disk in point.crashes(self.rng, 2):
                        self.look(disk, told)
                self.disk = alive
                if self.rng.random() < 0.3:
                    machine = self.go_on_after_a_cut(machine, alive)
            machine.close()

    def start(self, disk: SimulatedDisk) -> _Machine:
        """Start a machine on this disk."""
        self.disk = disk
        return _Machine(disk, self.clock, durable_reads=self.durable_reads)

    def step(self, machine: _Machine) -> None:
        """Do one action of the clients or of the disk."""
        what = self.rng.randrange(10)
        if what < 6:
            request = self.request()
            self.in_flight.append(request)
            machine.send(request)
        elif what < 9:
            machine.late.sync(self.rng.randint(1, 4))
        else:
            machine.fetch(self.told)
        machine.hear(self.told)
        self.in_flight = [one for one in self.in_flight if one.answer is None]

    def request(self) -> _Request:
        """Create a request to one or two partitions.

        An idempotent producer uses one partition, and has few requests in flight.
        """
        producer = self.rng.choice((None, *range(_PRODUCERS)))
        if producer is not None and sum(one.producer == producer for one in self.in_flight) >= _IN_FLIGHT_MAX:
            producer = None
        numbers = [producer] if producer is not None else self.rng.sample(range(_PARTITIONS), self.rng.randint(1, 2))
        is_large = producer is None and self.rng.random() < 0.2
        batches = {number: self.values(is_large and number == numbers[0]) for number in numbers}
        sequence = 0
        if producer is not None:
            sequence = self.sequences[producer]
            self.sequences[producer] += len(batches[producer])
        producer_id = -1 if producer is None else self.producer_ids[producer]
        return _Request(
            -1 if producer is not None else self.rng.choice((-1, 1)), producer, batches, sequence, producer_id
        )

    def values(self, is_large: bool) -> list[bytes]:
        """Return values that were never sent before, in a batch that is accepted or rejected."""
        self.count += 1
        if is_large:
            return [b"%d " % self.count + bytes(700)]
        return [b"%d %d" % (self.count, number) for number in range(self.rng.randint(1, 4))]

    # ------------------------------------------------------------ after a power cut

    def look(self, disk: SimulatedDisk, told: _Told) -> dict[Where, bytes]:
        """Compare the log of a machine that starts on this disk with the facts that clients know."""
        self.cuts += 1
        machine = self.start(disk)
        after = told.copy()
        found = machine.fetch(after)
        self.check(machine, told, found)
        # The server continues: new records get offsets that were never acknowledged.
        request = _Request(-1, None, {number: self.values(False) for number in range(_PARTITIONS)}, 0)
        machine.send(request)
        machine.late.sync(_PARTITIONS)
        machine.hear(after)
        assert request.answer is not None
        machine.close()
        return found

    def check(self, machine: _Machine, told: _Told, found: dict[Where, bytes]) -> None:
        """Check the facts from before the power cut."""
        for where, value in told.acked.items():
            assert found.get(where) == value, "what was acknowledged with acks=all is there, where it was said to be"
        if self.durable_reads:
            for where, (value, _) in told.read.items():
                assert found.get(where) == value, "what was read is there"
            for number, watermark in enumerate(told.watermarks):
                assert machine.store.open_partition("t", number).log_end_offset >= watermark
        ends: dict[Where, int] = {}
        for (number, offset), (value, epoch) in told.read.items():
            if (number, epoch) not in ends:
                ends[number, epoch] = machine.end_of(number, epoch)
            if offset < ends[number, epoch]:
                assert found.get((number, offset)) == value, "what was read is there, or its epoch ended before it"
            else:
                self.lost += 1

    def go_on_after_a_cut(self, machine: _Machine, alive: SimulatedDisk) -> _Machine:
        """Clients come again: idempotent producers send what was not answered, and each record is there once."""
        survivors = list(alive.point().crashes(self.rng, 3))
        machine.close()
        if not survivors:
            return self.start(alive)
        machine = self.start(self.rng.choice(survivors))
        again = [one for one in self.in_flight if one.producer is not None]
        self.in_flight = again
        for request in again:
            machine.send(request)
        machine.late.sync(len(machine.late.owed))
        machine.hear(self.told)
        assert all(one.answer is not None for one in again)
        self.in_flight = []
        found = machine.fetch(self.told)
        for request in again:
            for number, values in request.batches.items():
                assert [value for (where, _), value in found.items() if where == number and value in values] == values
        return machine


def live(count: int, seed: str, fsync: str, *, durable_reads: bool) -> None:
    """Run ``count`` lives."""
    lives = [_Life(f"{seed} {number}", fsync, durable_reads=durable_reads) for number in range(count)]
    for life in lives:
        life.run()
    cuts, lost = sum(life.cuts for life in lives), sum(life.lost for life in lives)
    assert cuts > count * _STEPS
    print(f"{cuts} power cuts, after which {lost} records were gone that had been read")


@pytest.mark.parametrize("durable_reads", [False, True])
@pytest.mark.parametrize("fsync", ["never", "always", "5records"])
@pytest.mark.parametrize("seed", seeds("produce power cuts"))
@pytest.mark.long
def test_what_producers_and_consumers_were_told_survives_power_cuts(fsync: str, durable_reads: bool, seed: int) -> None:
    """Acknowledged records exist once, at their offset.

    No offset gets two records. Lost records that were read are after the end of their epoch; with durable reads none is
    lost.
    """
    live(max(share(LIVES, "produce power cuts") // 6, 1), str(seed), fsync, durable_reads=durable_reads)


def test_an_answer_before_the_disk_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial detects a server that acknowledges records that are only written."""
    monkeypatch.setattr(_Late, "_reach", lambda self, partition, waiters: None)
    with pytest.raises(AssertionError, match="acks=all"):
        live(20, "lies", "never", durable_reads=False)
