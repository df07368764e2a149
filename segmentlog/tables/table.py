"""A topic as a table: the latest value of each key.

The topic is read once. Only the location of the latest record of each key stays in memory, 32 bytes per key
(`segmentlog.tables.key_table`); values stay in the log, and a look-up reads the batch of its record. `refresh` reads
records appended since.

    a record with a key       becomes the value of the key
    a record, null value      deletes the key
    a record, null key        affects no key; `keyless_count` counts such records

Within a partition, the record with the higher offset counts. If a key was written to several partitions (because
partitions were added), the latest record of the partition with the latest timestamp counts; for equal timestamps, the
record in the highest partition.
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
from segmentlog.tables.table_source import TableOutdated, TableSource
from segmentlog.topics.topic_registry import Topics

if TYPE_CHECKING:
    from segmentlog.log.partition import Isolation

_CACHED_BATCHES: Final = 16
_SMALL: Final = 1024


class Table(Mapping[bytes, bytes]):
    """The latest value of each key of a topic, over all its partitions: a read-only mapping.

    `LogStore.table` creates it. It shows the topic as it was at the last `refresh`, or else when the table was created.
    With ``follow``, an access refreshes the table first if the topic has changed. ``isolation`` and ``durable_only``
    are those of a consumer.

    Keys of up to 15 bytes are distinguished exactly. Two longer keys count as one key if 120 bits of their hashes are
    equal. A look-up compares the key of the record that it reads, so it never returns the value of another key. But
    ``len`` counts such a pair as one key.

    Compaction or retention may delete a record after the table has read it. An access that does not find its record
    refreshes the table and looks the key up again. If the newest record of a key was deleted, the key counts as
    deleted.

    Thread-safe: one lock is held while the table's state is read or changed. The last 16 batches that look-ups read
    stay decoded. A table has no `close`; once its store is closed, accesses raise `StoreClosed`. Raises `UnknownTopic`.
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
        self._is_changing = False
        """Whether a change is running, or was started by a thread that does not exist in this forked child."""
        self._seed = secrets.randbits(64)
        self._reset()
        self._check_limits()
        self.refresh()
        self._check_limits()

    def __repr__(self) -> str:
        return f"<Table {self._topic.name}, {len(self._keys)} keys>"

    @property
    def nbytes(self) -> int:
        """Bytes that the entries of the keys take in memory, without the batches that look-ups cache."""
        return self._keys.nbytes

    @property
    def keyless_count(self) -> int:
        """Number of records with a null key."""
        return sum(source.keyless_count for source in self._sources)

    # ------------------------------------------------------------ refreshing

    def refresh(self) -> int:
        """Read new records, remove deleted ones, and return the number of records read.

        After a truncation, or when a second partition was added, the whole topic is read again. On a table `as_of` an
        offset, it reads nothing and returns 0.
        """
        with self._lock:
            if self._is_changing:
                self._reset()
            self._check_usable()
            self._is_changing = True
            try:
                count = self._catch_up()
            except Exception:  # records read so far count
                self._is_changing = False
                raise
            self._is_changing = False
            return count

    def _catch_up(self) -> int:
        while True:
            try:
                self._add_partitions()
                return sum(source.catch_up(self._keys) for source in self._sources)
            except (TableOutdated, LogTruncated):
                self._reset()

    def _reset(self) -> None:
        """Make the table empty, so that the next refresh reads the whole topic."""
        self._sources: list[TableSource] = []
        self._add_partitions()
        self._keys = KeyTable(self._seed, keep_dead=len(self._sources) > 1, small=self._small_run)
        self._batches: OrderedDict[tuple[int, int], RecordBatch] = OrderedDict()

    def _add_partitions(self) -> None:
        count = len(self._limits) if self._limits is not None else self._topic.partition_count
        if len(self._sources) == 1 < count:
            # With one partition, tombstones are not kept. With two, they must delete values of the other partition.
            raise TableOutdated
        for number in range(len(self._sources), count):
            source = TableSource(
                self._topic.partition(number),
                self._seed,
                isolation=self._isolation,
                durable_only=self._durable_only,
                limit=None if self._limits is None else self._limits[number],
            )
            self._sources.append(source)

    def _check_usable(self) -> None:
        """Raise `StoreClosed`, or `UnknownTopic` if the topic was deleted or renamed meanwhile."""
        if self._topics.open_partition(self._topic.name, 0, self._topic.id) is not self._sources[0].log:
            raise UnknownTopic(self._topic.name, "it was deleted or renamed while in use")

    def _prepare_access(self) -> None:
        """Check that the store is open. With ``follow``, refresh the table if the topic has changed."""
        if self._is_changing:
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
        """Return the record with the value of a key; None if the key has no value.

        Raises TypeError for a key that is not bytes. For a table `as_of` an offset it raises `OffsetOutOfRange` if the
        record was deleted or compacted away since.
        """
        low, high = identity_of(_check_key(key), self._seed)
        with self._lock:
            self._prepare_access()
            while (place := self._keys.find(low, high)) is not None:
                record = self._read_record(key, *place)
                if record is not None:
                    return record if record.key == key and not self._is_expired(record) else None
                self._check_limits()
                self.refresh()
                if self._keys.find(low, high) == place:
                    self._keys.mark_deleted(low, high)
            return None

    def _read_record(self, key: bytes, partition: int, offset: int) -> Record | None:
        """Return the record of ``key`` at an offset; None if it no longer exists.

        Reads the record's key from the log only if ``key`` is long: the identity of a short key is exact.
        """
        batch = self._cached_batch(partition, offset)
        if batch is None:
            batch = self._sources[partition].batch_at(offset)
            if batch is None:
                return None
            self._batches[partition, batch.header.base_offset] = batch
            self._batches.move_to_end((partition, batch.header.base_offset))
            if len(self._batches) > _CACHED_BATCHES:
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

    def _cached_batch(self, partition: int, offset: int) -> RecordBatch | None:
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
        for batch, wanted in self._current_batches():
            keys = batch.keys
            yield from (keys[at] for at in wanted)  # type: ignore[misc]

    def items(self) -> ItemsView[bytes, bytes]:
        """Return a view of (key, value) pairs by partition and offset, read sequentially from the log.

        The pairs are those at the start of the iteration. If a record is deleted before the iteration reaches it, its
        key is omitted; on a table `as_of` an offset, the iteration then ends with `OffsetOutOfRange`.
        """
        return _Items(self)

    def values(self) -> ValuesView[bytes]:
        """Return a view of the values, in the order of `items`."""
        return _Values(self)

    def pairs(self) -> Iterator[tuple[bytes, bytes]]:
        """Iterate over the pairs of `items`."""
        for batch, wanted in self._current_batches():
            keys, values = batch.keys, batch.values
            yield from ((keys[at], values[at]) for at in wanted)  # type: ignore[misc]

    def _current_batches(self) -> Iterator[tuple[RecordBatch, list[int]]]:
        """Yield batches with at least one current value, and the indexes of the records that hold current values."""
        with self._lock:
            self._prepare_access()
            keys = self._keys.snapshot()
            positions = [(source, source.start, source.position) for source in self._sources]
        for source, start, end in positions:
            for batch in source.surviving_batches(start, end):
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
        """Return the table as it was when the log ended at an offset, built from the records below it. Immutable.

        ``offsets`` is one offset for a topic with one partition, or an offset for every partition: ``{0: 17, 1: 4}``.
        Raises `OffsetOutOfRange` for an offset outside the log or below `Partition.compacted_below`: compaction has
        removed records there, and some of them may have been the latest of their keys at that offset. Later accesses
        raise the same error once compaction or retention has reached the offset. Raises `InvalidConfig` unless every
        partition has an offset.
        """
        count = self._topic.partition_count
        if isinstance(offsets, Mapping):
            limits = {as_partition(number): as_offset("offsets", offset) for number, offset in offsets.items()}
        else:
            limits = {0: as_offset("offsets", offsets)}
        if set(limits) != set(range(count)):
            expected = f"an offset for each partition of topic {self._topic.name!r}, 0 to {count - 1}"
            raise InvalidConfig("offsets", offsets, expected)
        return Table(
            self._topics,
            self._topic.name,
            isolation=self._isolation,
            durable_only=self._durable_only,
            limits=limits,
            small_run=self._small_run,
        )

    def _check_limits(self) -> None:
        """Raise `OffsetOutOfRange` if the log has lost records that this table `as_of` an offset needs."""
        for source in self._sources:
            source.check_limit()

    def changes(self, timeout_s: float | None = None) -> Iterator[Record]:
        """Iterate over changes after the current state: the record, whose value is None for a deleted key.

        The table includes each record before the iteration returns it, and may include later records. The iteration
        waits for more records, and ends when none arrived for ``timeout_s``; with None, it never ends. New partitions
        are read from their beginning. Raises `LogTruncated` if records that it returned are truncated, and
        `OffsetOutOfRange` if retention deletes records before it has read them. A table `as_of` an offset has no
        changes.
        """
        if self._limits is not None:
            return
        with self._lock:
            self._prepare_access()
            positions = {source.number: source.position for source in self._sources}
        with contextlib.closing(Watch()) as watch:
            watch.add(self._topic.folder, folder=True)  # detects new partitions
            waiting_since = time.monotonic()
            while True:
                for record in self._changes_after(positions):
                    yield record
                    waiting_since = time.monotonic()
                left_s = WAIT_S if timeout_s is None else min(WAIT_S, waiting_since + timeout_s - time.monotonic())
                if left_s <= 0:
                    return
                self._wait(watch, positions, left_s)

    def _changes_after(self, positions: dict[int, int]) -> Iterator[Record]:
        """Yield the records with keys from ``positions`` on, and advance ``positions``.

        The table includes the records of a batch before this yields them.
        """
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
        """Sleep until an append wakes this reader, or until the time is up."""
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


def _check_key(key: object) -> bytes:
    if not isinstance(key, bytes):
        hint = ": encode it first, key.encode()" if isinstance(key, str) else ""
        raise TypeError(f"keys are bytes, not {type(key).__name__}{hint}")
    return key
