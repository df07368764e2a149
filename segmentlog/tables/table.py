"""A topic as a table: the latest value of each key.

The topic is read once. What stays in memory is where the latest record of each key is, 32
bytes a key (`segmentlog.tables.key_table`); values stay in the log, and a look-up reads the one
batch that its record lies in. `refresh` reads what was appended since.

    a record with a key       is the key's value from now on
    one with a null value     deletes the key
    one with a null key       says nothing about any key; `keyless_count` counts them

Within a partition the record with the higher offset counts. Of a key that was written to
several partitions (partitions were added to the topic) the latest record of the partition
where its timestamp is latest counts; of equal timestamps, the one in the highest partition.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections import OrderedDict
from collections.abc import ItemsView, Iterator, Mapping, ValuesView
from typing import TYPE_CHECKING, Final

import numpy as np

from segmentlog.arguments import as_bool, as_offset, as_partition
from segmentlog.consuming.wakeup import WAIT_S, announce_waiting
from segmentlog.errors import InvalidConfig, LogTruncated, UnknownTopic
from segmentlog.format.key_hashes import MAX_EXACT, identity_of
from segmentlog.format.record_batch import RecordBatch
from segmentlog.policy.expiry import expiry_times, is_expired
from segmentlog.records import Record
from segmentlog.storage import fork_safety
from segmentlog.storage.watch import Watch
from segmentlog.tables.key_table import KeyTable
from segmentlog.tables.table_source import Rewritten, Source
from segmentlog.topics.topic_registry import Topics

if TYPE_CHECKING:
    from segmentlog.log.partition import Isolation

_KEPT_BATCHES: Final = 16
_SMALL: Final = 1024


class Table(Mapping[bytes, bytes]):
    """The latest value of each key of a topic, over all its partitions: a read-only mapping.

    Get one from `LogStore.table`. It shows the topic as it was when the table was made, and
    after each `refresh`; with ``follow`` every access refreshes it first if the topic has
    changed. ``isolation`` and ``durable_only`` are those of a consumer.

    Keys of up to 15 bytes are told apart exactly; of longer ones two count as one key when
    120 bits of their hashes agree. The key of the record that is read is compared, so that a
    wrong value is never returned, but ``len`` counts such a pair as one.

    A record may go after the table met it: a newer one stands in its place after compaction,
    or retention deleted it. An access that meets such a record refreshes the table and tries
    again; a record that is gone for good counts as deleted.

    Thread-safe: one lock is held by whatever reads or changes the table's state. A batch that was
    read is kept decoded, the last 16 of them. Nothing needs closing; once the store is closed,
    accesses raise `StoreClosed`. Raises `UnknownTopic`.
    """

    def __init__(
        self,
        topics: Topics,
        topic_name: str,
        follow: bool = False,
        isolation: Isolation = "read_uncommitted",
        durable_only: bool = False,
        *,
        limits: Mapping[int, int] | None = None,
        small_run: int = _SMALL,
    ) -> None:
        follow, durable_only = as_bool("follow", follow), as_bool("durable_only", durable_only)
        self._topics = topics
        self._topic = topics.topic(topic_name)
        self._follow = follow
        self._isolation: Isolation = isolation
        self._durable_only = durable_only
        self._limits = limits
        self._small_run = small_run
        self._lock = fork_safety.reentrant_lock(self, "_lock")
        self._torn = False
        """A change is being made, or was, by a thread that is not there in this forked child."""
        self._seed = secrets.randbits(64)
        self._reset()
        self._check_limits()
        self.refresh()
        self._check_limits()

    def __repr__(self) -> str:
        return f"<Table {self._topic.name}, {len(self._keys)} keys>"

    @property
    def nbytes(self) -> int:
        """Bytes that the table takes at rest, without the batches that it keeps decoded."""
        return self._keys.nbytes

    @property
    def keyless_count(self) -> int:
        """Records with a null key that were met."""
        return sum(source.keyless_count for source in self._sources)

    # ------------------------------------------------------------ keeping up

    def refresh(self) -> int:
        """Take in what was appended, and forget what was deleted from the front; returns how many records it read.

        After a truncation, or when a second partition was added, the whole topic is read anew.
        A table `as_of` an offset has nothing to read: 0.
        """
        with self._lock:
            if self._torn:
                self._reset()
            self._check_usable()
            self._torn = True
            try:
                count = self._catch_up()
            except Exception:  # what it took in up to there counts
                self._torn = False
                raise
            self._torn = False
            return count

    def _catch_up(self) -> int:
        while True:
            try:
                self._add_partitions()
                return sum(source.catch_up(self._keys) for source in self._sources)
            except (Rewritten, LogTruncated):
                self._reset()

    def _reset(self) -> None:
        """An empty table that has read nothing."""
        self._sources: list[Source] = []
        self._add_partitions()
        self._keys = KeyTable(self._seed, keep_dead=len(self._sources) > 1, small=self._small_run)
        self._batches: OrderedDict[tuple[int, int], RecordBatch] = OrderedDict()

    def _add_partitions(self) -> None:
        count = len(self._limits) if self._limits is not None else self._topic.partition_count
        if len(self._sources) == 1 < count:
            raise Rewritten  # tombstones of the first one were not kept
        for number in range(len(self._sources), count):
            source = Source(
                self._topic.partition(number),
                self._seed,
                isolation=self._isolation,
                durable_only=self._durable_only,
                limit=None if self._limits is None else self._limits[number],
            )
            self._sources.append(source)

    def _check_usable(self) -> None:
        """Raise `StoreClosed`, or `UnknownTopic` when the topic was deleted or renamed meanwhile."""
        if self._topics.open_partition(self._topic.name, 0, self._topic.id) is not self._sources[0].log:
            raise UnknownTopic(self._topic.name, "it was deleted or renamed while in use")

    def _prepare_access(self) -> None:
        """What every access begins with: is the store open, and for a table that follows, has the topic changed?"""
        if self._torn:
            self.refresh()
        self._check_usable()
        if self._follow and (
            len(self._sources) != self._topic.partition_count or any(source.has_changed() for source in self._sources)
        ):
            self.refresh()

    # ------------------------------------------------------------ one key

    def __getitem__(self, key: bytes) -> bytes:
        record = self.record(key)
        if record is None or record.value is None:
            raise KeyError(key)
        return record.value

    def record(self, key: bytes) -> Record | None:
        """The whole record that holds the value of a key; None when the key has none.

        Raises TypeError for a key that is not bytes. Of a table `as_of` an offset it raises
        `OffsetOutOfRange` when the record has been deleted or compacted away since.
        """
        low, high = identity_of(_checked(key), self._seed)
        with self._lock:
            self._prepare_access()
            while (place := self._keys.find(low, high)) is not None:
                record = self._read(key, *place)
                if record is not None:
                    return record if record.key == key and not self._is_expired(record) else None
                self._check_limits()
                self.refresh()
                if self._keys.find(low, high) == place:
                    self._keys.bury(low, high)
            return None

    def _read(self, key: bytes, partition: int, offset: int) -> Record | None:
        """The record at an offset; None when it is gone. A short key is known to be the record's own."""
        batch = self._kept_batch(partition, offset)
        if batch is None:
            batch = self._sources[partition].batch_at(offset)
            if batch is None:
                return None
            self._batches[partition, batch.header.base_offset] = batch
            self._batches.move_to_end((partition, batch.header.base_offset))
            if len(self._batches) > _KEPT_BATCHES:
                self._batches.popitem(last=False)
        at = int(batch.offsets.searchsorted(np.int64(offset)))
        if at == len(batch) or batch.offsets[at] != offset:
            return None
        return Record(
            batch.topic,
            partition,
            offset,
            int(batch.timestamps[at]),
            key if len(key) <= MAX_EXACT else batch.keys[at],
            batch.values[at],
            batch.headers[at],
            batch.epoch,
        )

    def _is_expired(self, record: Record) -> bool:
        log = self._sources[record.partition].log
        return is_expired(record.timestamp, record.headers, log.config.record_ttl_ms, log.handle.clock.now_ms())

    def _kept_batch(self, partition: int, offset: int) -> RecordBatch | None:
        for place, batch in reversed(self._batches.items()):
            if place[0] == partition and batch.base_offset <= offset < batch.next_offset:
                self._batches.move_to_end(place)
                return batch
        return None

    # ------------------------------------------------------------ all keys

    def __len__(self) -> int:
        with self._lock:
            self._prepare_access()
            return len(self._keys)

    def __iter__(self) -> Iterator[bytes]:
        for batch, wanted in self._current():
            keys = batch.keys
            yield from (keys[at] for at in wanted)  # type: ignore[misc]

    def items(self) -> ItemsView[bytes, bytes]:
        """(key, value) pairs by partition and offset, read from the log from front to end.

        They are those of the moment when the iteration begins, except that a key whose record is deleted or
        replaced and compacted away before the iteration comes to it is left out (of a table `as_of`
        an offset: `OffsetOutOfRange` at the end).
        """
        return _Items(self)

    def values(self) -> ValuesView[bytes]:
        """The values, in the order of `items`."""
        return _Values(self)

    def pairs(self) -> Iterator[tuple[bytes, bytes]]:
        """What iterating over `items` does."""
        for batch, wanted in self._current():
            keys, values = batch.keys, batch.values
            yield from ((keys[at], values[at]) for at in wanted)  # type: ignore[misc]

    def _current(self) -> Iterator[tuple[RecordBatch, list[int]]]:
        """Batches that hold values of keys, with the indices of those records."""
        with self._lock:
            self._prepare_access()
            keys = self._keys.snapshot()
            positions = [(source, source.start, source.position) for source in self._sources]
        for source, start, end in positions:
            for batch in source.batches_still_there(start, end):
                low, high, is_null = batch.key_identities(self._seed)
                current = keys.are_current(source.number, low, high, batch.offsets)
                if is_null is not None:
                    current &= ~is_null
                ends_ms = expiry_times(batch, source.log.config.record_ttl_ms)
                if ends_ms is not None:
                    current &= ends_ms > source.log.handle.clock.now_ms()
                if current.any():
                    yield batch, np.flatnonzero(current).tolist()
        self._check_limits()

    # ------------------------------------------------------------ at another time

    def as_of(self, offsets: int | Mapping[int, int]) -> Table:
        """The table as it was when the log ended at an offset: made of the records below it. It never changes.

        ``offsets`` is one offset for a topic of one partition, or an offset for every partition:
        ``{0: 17, 1: 4}``. Raises `OffsetOutOfRange` for an offset outside of the log, and for one
        below `Partition.compacted_below`: compaction has removed records there because newer ones
        follow, and some of them were the latest of their keys at that offset. It raises the same
        from an access later on, once compaction or retention got there. Raises `InvalidConfig` unless
        every partition has an offset.
        """
        count = self._topic.partition_count
        if isinstance(offsets, Mapping):
            limits = {as_partition(number): as_offset("offsets", offset) for number, offset in offsets.items()}
        else:
            limits = {0: as_offset("offsets", offsets)}
        if set(limits) != set(range(count)):
            wanted = f"an offset for each partition of topic {self._topic.name!r}, 0 to {count - 1}"
            raise InvalidConfig("offsets", offsets, wanted)
        return Table(
            self._topics,
            self._topic.name,
            isolation=self._isolation,
            durable_only=self._durable_only,
            limits=limits,
            small_run=self._small_run,
        )

    def _check_limits(self) -> None:
        """Raise `OffsetOutOfRange` unless the log can still tell the state that `as_of` asked for."""
        for source in self._sources:
            source.check_limit()

    def changes(self, timeout_s: float | None = None) -> Iterator[Record]:
        """Every change from where the table stands now, as it comes: the record, its value None for a deleted key.

        The table has taken a record in when it is handed out, and maybe some that follow. It
        waits for more until nothing came for ``timeout_s``; None: for ever. Partitions that are
        added meanwhile are read from their beginning. Raises `LogTruncated` when records that
        it has handed out were truncated, `OffsetOutOfRange` when retention overtakes it. Of a
        table `as_of` an offset there are none.
        """
        if self._limits is not None:
            return
        with self._lock:
            self._prepare_access()
            positions = {source.number: source.position for source in self._sources}
        with contextlib.closing(Watch()) as watch:
            watch.add(self._topic.folder, folder=True)  # partitions may be added
            waiting_since = time.monotonic()
            while True:
                for record in self._changes_behind(positions):
                    yield record
                    waiting_since = time.monotonic()
                left_s = WAIT_S if timeout_s is None else min(WAIT_S, waiting_since + timeout_s - time.monotonic())
                if left_s <= 0:
                    return
                self._wait(watch, positions, left_s)

    def _changes_behind(self, positions: dict[int, int]) -> Iterator[Record]:
        """Records with keys behind the positions, which move on; those of a batch once the table has them."""
        self.refresh()
        for source in list(self._sources):
            number, log = source.number, source.log
            start = positions.setdefault(number, log.log_start_offset)
            end_offset = source.end_offset()
            for batch in source.batches(start, end_offset):
                positions[number] = batch.next_offset
                if source.position < batch.next_offset:
                    self.refresh()
                yield from (record for record in batch.records() if record.key is not None)
            positions[number] = max(positions[number], end_offset)

    def _wait(self, watch: Watch, positions: Mapping[int, int], timeout_s: float) -> None:
        """Sleep until an appender wakes whoever follows, or the time is up."""
        self._prepare_access()
        watch.drain()
        must_poll = announce_waiting(watch, (source.log for source in self._sources))
        if all(source.end_offset() <= positions.get(source.number, 0) for source in self._sources):
            watch.wait(timeout_s, poll=must_poll)


class _Items(ItemsView[bytes, bytes]):
    _mapping: Table

    def __iter__(self) -> Iterator[tuple[bytes, bytes]]:
        return self._mapping.pairs()


class _Values(ValuesView[bytes]):
    _mapping: Table

    def __iter__(self) -> Iterator[bytes]:
        return (value for _, value in self._mapping.pairs())


def _checked(key: object) -> bytes:
    if not isinstance(key, bytes):
        hint = ": encode it first, key.encode()" if isinstance(key, str) else ""
        raise TypeError(f"keys are bytes, not {type(key).__name__}{hint}")
    return key
