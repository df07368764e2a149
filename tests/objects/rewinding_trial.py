"""A store with a random history, of which is known what was appended; restores of it to times and to offsets."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from logs import FakeClock, NoSyncFileSystem
from objects.buckets import Memory
from wire import append_sent

from segmentlog.groups.committed_offsets import encode
from segmentlog.inspection.store_inspection import inspect_store
from segmentlog.log.partition import Partition
from segmentlog.objects.restore.restore import Restored, restore
from segmentlog.objects.upload.shipper import Shipper
from segmentlog.producing.producer import Producer
from segmentlog.records import TopicPartition
from segmentlog.store import LogStore

PLACES = tuple(TopicPartition(*place) for place in (("a", 0), ("a", 1), ("b", 0), ("c", 0)))
_WRITERS = 3


class Kept(NamedTuple):
    """A record that was appended: when, and in which transaction (0: none) if it was committed."""

    value: bytes
    timestamp: int
    transaction: int


class Committing:
    """A stand-in for a consumer in a transaction, with offsets to commit."""

    def __init__(self, store: LogStore, now_ms: int) -> None:
        self._store, self._now_ms = store, now_ms

    @contextlib.contextmanager
    def committing(self, positions: Mapping[Any, int] | None = None, *, metadata: str = "") -> Iterator[Any]:
        """Yield the encoded offsets, like a consumer."""
        ids = {tp: self._store.topic(tp.topic).id for tp in positions or {}}
        yield encode("group", positions or {}, ids.__getitem__, metadata=metadata, committed_ms=self._now_ms)


class Trial:
    """One history."""

    def __init__(self, folder: Path, seed: str, *, forgetful: bool = False) -> None:
        self.folder = folder
        self._forgetful = forgetful
        """The log of decisions is compacted in the end: of most transactions nothing tells but their markers."""
        self.rng = random.Random(seed)
        self.clock = FakeClock()
        self.bucket = Memory()
        self.records: dict[TopicPartition, dict[int, Kept]] = {tp: {} for tp in PLACES}
        self.transactions: dict[int, set[tuple[TopicPartition, int]]] = {}
        """Records of each committed transaction, except deleted ones."""
        self._wrote_to: dict[int, set[TopicPartition]] = {}
        self.store = LogStore(folder / "store", background=False, fs=NoSyncFileSystem(), clock=self.clock)
        for name, partitions in (("a", 2), ("b", 1), ("c", 1)):
            self.store.create_topic(name, partitions, segment_records=self.rng.choice((3, 10, 1000)), fsync="always")
        self._producers: list[Producer] = []

    def close(self) -> None:
        """Close the producers and the store."""
        for producer in self._producers:
            producer.close()
        self.store.close()

    def log(self, tp: TopicPartition, store: LogStore | None = None) -> Partition:
        """Return a partition of it."""
        return (store or self.store).topic(tp.topic).partition(tp.partition)

    # ------------------------------------------------------------ the history

    def run(self, steps: int) -> None:
        """Do random work in ``steps`` steps, and ship it."""
        self._producers = [self.store.producer(name=f"writer-{number}") for number in range(_WRITERS)]
        shipper = Shipper(self.store._topics, self.bucket, parallel=0)
        self.is_open = False
        for _ in range(steps):
            self.clock.advance(self.rng.choice((2, 5, 1000) if self._forgetful else (0, 0, 1, 5, 1000)))
            self.rng.choice((self.append, self.append, self.transact, self.transact, self.transact, self.cut))()
            if self.rng.random() < 0.1:
                shipper.ship()
        if self.rng.random() < 0.5:  # a transaction that stays open
            self._producers[0].begin_transaction()
            self._send(self._producers[0], 0)
            self._producers[0].flush()
            self.is_open = True
        if self._forgetful:
            decisions = self.store.topic("__transaction_state").partition(0)
            decisions.roll()
            decisions.compact()
            for log in map(self.log, PLACES):
                log.flush()
        shipper.ship()
        shipper.close()

    def append(self) -> None:
        """Append some records, through the library or as a Kafka client."""
        tp = self.rng.choice(PLACES)
        values = [b"%d" % self.rng.randrange(1 << 40) for _ in range(self.rng.randint(1, 4))]
        log = self.log(tp)
        base = (
            append_sent(log, values, codec=self.rng.choice((0, 1))) if self.rng.random() < 0.3 else log.append(values)
        )
        for offset, value in enumerate(values, base):
            self.records[tp][offset] = Kept(value, self.clock.now_ms(), 0)

    def _send(self, producer: Producer, number: int) -> list[tuple[TopicPartition, bytes]]:
        sent = []
        for tp in self.rng.sample(PLACES, self.rng.randint(1, 3)):
            values = [b"%d %d" % (number, self.rng.randrange(1 << 40)) for _ in range(self.rng.randint(1, 3))]
            producer.send_many(tp.topic, values, partition=tp.partition, timestamps=[self.clock.now_ms()] * len(values))
            sent += [(tp, value) for value in values]
        return sent

    def transact(self) -> None:
        """Run a transaction over some partitions; sometimes with offsets, sometimes aborted."""
        producer = self.rng.choice(self._producers)
        number = len(self.transactions) + 1
        self.transactions[number] = set()
        with contextlib.suppress(ZeroDivisionError), producer.transaction():
            sent = self._send(producer, number)
            producer.flush()
            if self.rng.random() < 0.3:
                tp = self.rng.choice(PLACES)
                positions = {tp: self.log(tp).log_end_offset}
                producer.commit_offsets(Committing(self.store, self.clock.now_ms()), positions)
            if self.rng.random() < 0.2:
                del self.transactions[number]
                self._note(sent, -1)
                raise ZeroDivisionError
            self._note(sent, number)

    def _note(self, sent: list[tuple[TopicPartition, bytes]], number: int) -> None:
        """Find the offsets of the sent records by their values, which are unique."""
        wanted = {(tp, value) for tp, value in sent}
        self._wrote_to[number] = {tp for tp, _ in sent}
        for tp in {tp for tp, _ in sent}:
            for offset, value in _values(self.log(tp)).items():
                if (tp, value) in wanted:
                    self.records[tp][offset] = Kept(value, self.clock.now_ms(), number)
                    if number > 0:
                        self.transactions[number].add((tp, offset))

    def cut(self) -> None:
        """Truncate or trim a plain topic; lost records are noted."""
        if self.rng.random() < 0.7:
            return
        tp = self.rng.choice(PLACES)
        log = self.log(tp)
        if self.rng.random() < 0.5:
            log.trim(self.rng.randint(log.log_start_offset, log.last_stable_offset))
            # Checks of transactions count the records that exist.
            for offset in [offset for offset in self.records[tp] if offset < log.log_start_offset]:
                self._forget(tp, offset)
        elif not any(record.transaction for record in self.records[tp].values()):
            log.truncate(self.rng.randint(log.log_start_offset, log.log_end_offset))
            for offset in [offset for offset in self.records[tp] if offset not in _offsets(log)]:
                self._forget(tp, offset)

    def _forget(self, tp: TopicPartition, offset: int) -> None:
        gone = self.records[tp].pop(offset)
        if gone.transaction > 0:
            self.transactions[gone.transaction].discard((tp, offset))

    # ------------------------------------------------------------ restores

    def restore_at_random(self, number: int) -> None:
        """Restore to a time or to offsets, and check the result."""
        folder = self.folder / f"restored-{number}"
        if self.rng.random() < 0.5:
            times = [one.timestamp for of in self.records.values() for one in of.values()] or [0]
            at = self.rng.choice(times) + self.rng.choice((-1, 0, 1))
            wanted = {
                tp: min((offset for offset, one in of.items() if one.timestamp > at), default=None)
                for tp, of in self.records.items()
            }
            restored = restore(self.bucket, str(folder), at=at, fs=NoSyncFileSystem(), clock=self.clock, parallel=0)
        else:
            offsets = {
                tp: self.rng.randint(self.log(tp).log_start_offset, self.log(tp).shipped_offset)
                for tp in self.rng.sample(PLACES, self.rng.randint(1, 4))
            }
            wanted = {tp: offsets.get(tp) for tp in PLACES}
            restored = restore(
                self.bucket, str(folder), offsets=offsets, fs=NoSyncFileSystem(), clock=self.clock, parallel=0
            )
        self.check(folder, restored, wanted)

    def check(self, folder: Path, restored: Restored, wanted: Mapping[TopicPartition, int | None]) -> None:
        """Check a restored store."""
        damage = [str(finding) for finding in inspect_store(str(folder)) if finding.severity == "damage"]
        assert not damage
        cuts = {TopicPartition(cut.topic, cut.partition): cut.offset for cut in restored.cuts}
        parts = {
            TopicPartition(topic.name, part.number): part
            for topic in restored.manifest.topics for part in topic.partitions
        }  # fmt: skip
        with LogStore(folder, background=False, fs=NoSyncFileSystem(), clock=self.clock) as store:
            for _ in range(3):
                store.finish_transactions()
            committed = {tp: _offsets(self.log(tp, store), isolation="read_committed") for tp in PLACES}
            for tp in PLACES:
                self._check_partition(tp, self.log(tp, store), cuts.get(tp), wanted[tp])
            self._check_transactions(committed, cuts)
            self._check_further(committed, cuts, wanted)
            self._check_positions(store, cuts)
            with store.producer(name="writer-0") as producer, producer.transaction():
                for tp in PLACES:
                    producer.send_many(tp.topic, [b"on"], partition=tp.partition)
            for tp in PLACES:
                log, part = self.log(tp, store), parts[tp]
                (on,) = [offset for offset, value in _values(log, "read_committed").items() if value == b"on"]
                assert on >= part.offset_grant + (tp in cuts), "an offset that somebody else may have been given"
                assert log.epoch > part.epoch
        damage = [str(finding) for finding in inspect_store(str(folder)) if finding.severity == "damage"]
        assert not damage

    def _check_partition(self, tp: TopicPartition, log: Partition, cut: int | None, wanted: int | None) -> None:
        known = {
            offset: one.value for offset, one in self.records[tp].items() if cut is None or offset < cut
        }  # fmt: skip
        found = _values(log)
        unknown = set(found) - set(known)
        assert {offset: found.get(offset) for offset in known} == known, tp
        assert all(found[offset].startswith(b"0 ") for offset in unknown), "more than was appended, or left out"
        assert cut is None or all(offset < cut for offset in found), f"{tp} shows what lies behind the cut at {cut}"
        if wanted is not None and any(offset >= wanted for offset in self.records[tp]):
            assert cut is not None, f"{tp} should end at {wanted}"
            assert cut <= wanted, f"{tp} should end at {wanted}, and does at {cut}"
        if cut is not None:
            assert any(lost.base_offset <= cut < lost.end_offset for lost in log.lost_ranges())

    def _check_further(
        self, committed: Mapping[TopicPartition, set[int]], cuts: Mapping[TopicPartition, int],
        wanted: Mapping[TopicPartition, int | None],
    ) -> None:  # fmt: skip
        """Check that each partition with an earlier cut than requested shared a transaction that could not be kept."""
        hidden = [
            self._wrote_to[number] for number, records in self.transactions.items()
            if not any(offset in committed[tp] for tp, offset in records)
        ]  # fmt: skip
        for tp, cut in cuts.items():
            upto = wanted[tp]
            if any(cut <= offset and (upto is None or offset < upto) for offset in self.records[tp]):
                why = f"{tp} is cut at {cut}, and {upto} was asked for, for no reason"
                assert self._forgetful or any(tp in of and len(of & cuts.keys()) > 1 for of in hidden), why

    def _check_positions(self, store: LogStore, cuts: Mapping[TopicPartition, int]) -> None:
        if "group" not in store.groups.names():
            return
        for entry in store.groups.describe("group").partitions:
            if entry.committed is not None:
                tp = TopicPartition(entry.topic, entry.partition)
                assert entry.committed.offset <= cuts.get(tp, entry.committed.offset), (
                    f"a position behind the cut: {tp}"
                )
                log = self.log(tp, store)
                position = max(entry.committed.offset, log.log_start_offset)
                if tp in cuts and not self._was_lost(tp, position):
                    log.check_position(position)

    def _was_lost(self, tp: TopicPartition, position: int) -> bool:
        """Return whether the shipped history also lost a record of a group at this offset: by a truncation."""
        return any(lost.base_offset < position < lost.end_offset for lost in self.log(tp).lost_ranges())

    def _check_transactions(
        self, committed: Mapping[TopicPartition, set[int]], cuts: Mapping[TopicPartition, int]
    ) -> None:
        for number, records in self.transactions.items():
            shown = {(tp, offset) for tp, offset in records if offset in committed[tp]}
            assert shown in (set(), records), f"transaction {number} is torn: {records - shown} are missing"
            if not any(tp in cuts for tp, _ in records):
                assert shown == records, f"transaction {number} is gone, and nothing of it was cut"
        for tp, of in self.records.items():
            for offset, one in of.items():
                assert not (one.transaction < 0 and offset in committed[tp]), "aborted, and shown"
                if one.transaction == 0 and offset < cuts.get(tp, offset + 1):
                    assert offset in committed[tp]


def _values(log: Partition, isolation: Any = "read_uncommitted") -> dict[int, bytes]:
    return {
        offset: value or b""
        for batch in log.read(log.log_start_offset, isolation=isolation)
        for offset, value in zip(batch.offsets.tolist(), batch.values, strict=True)
    }


def _offsets(log: Partition, isolation: Any = "read_uncommitted") -> set[int]:
    return set(_values(log, isolation))
