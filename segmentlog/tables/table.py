"""A topic as a table: the latest value of each key.

A table reads the topic once. It keeps only the position of the latest record of each key in memory, 32
bytes a key (`segmentlog.tables.key_table`). Values stay in the log: a look-up reads one batch. `refresh`
reads the records that were appended since.

    a record with a key            sets the value of the key
    a record with a null value     deletes the key
    a record with a null key       has no effect; `keyless_count` counts them

Within a partition, the record with the highest offset is current. A key may have records in several
partitions if partitions were added to the topic. Then the partition whose last record of the key has the
latest timestamp decides; of equal timestamps, the highest partition.
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
from segmentlog.consuming.wakeup import WAIT_S, announce
from segmentlog.errors import InvalidConfig, LogTruncated, UnknownTopic
from segmentlog.format.key_hashes import MAX_EXACT, identity_of
from segmentlog.format.record_batch import RecordBatch
from segmentlog.policy.expiry import expiry_times, is_expired
from segmentlog.records import Record
from segmentlog.storage import fork_safety
from segmentlog.storage.watch import Watch
from segmentlog.tables.key_table import KeyTable
from segmentlog.tables.table_source import PartitionSource, Rewritten
from segmentlog.topics.topic_registry import Topics

if TYPE_CHECKING:
    from segmentlog.log.partition import Isolation

_KEPT_BATCHES: Final = 16
_SMALL: Final = 1024


class Table(Mapping[bytes, bytes]):
    """The latest value of each key of a topic, over all its partitions: a read-only mapping.

    Create a table with `LogStore.table`. It shows the topic as of its creation or of the last
    `refresh`. With ``follow`` every access first refreshes the table if the topic has changed.
    ``isolation`` and ``durable_only`` have the same meaning as for a consumer.

    Keys of up to 15 bytes are distinguished exactly. Two longer keys count as one if 120 bits of
    their hashes agree. Every look-up compares the key of the record that it reads, so it never
    returns a wrong value, but ``len`` counts such a pair as one key.

    Compaction may replace a record with a newer one, or retention may delete it, after the table
    has read it. An access to such a record refreshes the table and tries again. If the record no
    longer exists, its key counts as deleted.

    Thread-safe: all accesses share a lock. The table caches the last 16 batches decoded. It need
    not be closed; after the store is closed, accesses raise `StoreClosed`. Raises `UnknownTopic`.
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
        """A thread is changing the table; after a fork, that thread may not exist in this process."""
        self._seed = secrets.randbits(64)
        self._reset()
        self._check_limits()
        self.refresh()
        self._check_limits()

    def __repr__(self) -> str:
        return f"<Table {self._topic.name}, {len(self._keys)} keys>"

    @property
    def nbytes(self) -> int:
        """Bytes of the table, without its cached batches."""
        return self._keys.nbytes

    @property
    def keyless_count(self) -> int:
        """Number of records with a null key that the table has read."""
        return sum(source.keyless_count for source in self._sources)

    # ------------------------------------------------------------ refreshing

    def refresh(self) -> int:
        """Read appended records, drop records that retention deleted, and return the number of records read.

        After a truncation, or when a second partition was added, the table reads the whole topic again.
        A table `as_of` an offset returns 0.
        """
        with self._lock:
            if self._is_changing:
                self._reset()
            self._check_usable()
            self._is_changing = True
            try:
                count = self._catch_up()
            except Exception:  # the records that it has read so far are valid
                self._is_changing = False
                raise
            self._is_changing = False
            return count

    def _catch_up(self) -> int:
        while True:
            try:
                self._add_partitions()
                return sum(source.catch_up(self._keys) for source in self._sources)
            except (Rewritten, LogTruncated):
                self._reset()

    def _reset(self) -> None:
        """Make the table empty, so that it reads the topic again."""
        self._sources: list[PartitionSource] = []
        self._add_partitions()
        self._keys = KeyTable(self._seed, keep_dead=len(self._sources) > 1, small=self._small_run)
        self._batches: OrderedDict[tuple[int, int], RecordBatch] = OrderedDict()

    def _add_partitions(self) -> None:
        count = len(self._limits) if self._limits is not None else self._topic.partition_count
        if len(self._sources) == 1 < count:
            raise Rewritten  # the table has no tombstones of the first partition
        for number in range(len(self._sources), count):
            source = PartitionSource(
                self._topic.partition(number),
                self._seed,
                isolation=self._isolation,
                durable_only=self._durable_only,
                limit=None if self._limits is None else self._limits[number],
            )
            self._sources.append(source)

    def _check_usable(self) -> None:
        """Raise `StoreClosed`, or `UnknownTopic` if the topic was deleted or renamed."""
        if self._topics.open_partition(self._topic.name, 0, self._topic.id) is not self._sources[0].log:
            raise UnknownTopic(self._topic.name, "it was deleted or renamed while in use")

    def _prepare_access(self) -> None:
        """Check that the store is open, and refresh a table that follows its topic. Each access calls this first."""
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
        """Return the whole record with the value of a key, or None if the key has no value.

        Raise TypeError for a key that is not bytes. A table `as_of` an offset raises
        `OffsetOutOfRange` if retention or compaction has since removed the record.
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
                    self._keys.mark_deleted(low, high)
            return None

    def _read(self, key: bytes, partition: int, offset: int) -> Record | None:
        """Return the record at an offset, or None if it no longer exists. A short key need not be decoded."""
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
        """Return (key, value) pairs in the order of partition and offset. An iteration reads the whole log once.

        The pairs are those at the start of the iteration, except keys whose record is deleted or compacted away
        before the iteration reaches it: these are skipped. (A table `as_of` an offset raises `OffsetOutOfRange`
        at the end of such an iteration.)
        """
        return _Items(self)

    def values(self) -> ValuesView[bytes]:
        """Return the values, in the order of `items`."""
        return _Values(self)

    def pairs(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield the pairs of `items`."""
        for batch, wanted in self._current():
            keys, values = batch.keys, batch.values
            yield from ((keys[at], values[at]) for at in wanted)  # type: ignore[misc]

    def _current(self) -> Iterator[tuple[RecordBatch, list[int]]]:
        """Yield batches with current values, and the indices of the records with these values."""
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

    # ------------------------------------------------------------ earlier states, and changes

    def as_of(self, offsets: int | Mapping[int, int]) -> Table:
        """Return the table of the records below an offset. It never changes.

        ``offsets`` is an offset for a topic of one partition, or an offset for every partition:
        ``{0: 17, 1: 4}``.

        Raise `OffsetOutOfRange` for an offset outside of the log, and for an offset below
        `Partition.compacted_below`: compaction may have removed records that were the latest of their
        keys at that offset. Later accesses raise the same when compaction or retention reaches the
        offset. Raise `InvalidConfig` unless every partition has an offset.
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
        """Raise `OffsetOutOfRange` unless the log still has the state at the offsets of `as_of`."""
        for source in self._sources:
            source.check_limit()

    def changes(self, timeout_s: float | None = None) -> Iterator[Record]:
        """Yield every record with a key after the table's current state, as it is appended.

        A record with the value None deletes its key. When the iterator yields a record, the table includes
        that record, and maybe later ones. The iterator ends when no record came for ``timeout_s``; None: never.
        Partitions that are added during the iteration are read from their beginning.

        Raise `LogTruncated` if records that it has yielded were truncated, and `OffsetOutOfRange` if retention
        deletes records before they are read. A table `as_of` an offset has no changes.
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
                for record in self._changes_after(positions):
                    yield record
                    waiting_since = time.monotonic()
                left_s = WAIT_S if timeout_s is None else min(WAIT_S, waiting_since + timeout_s - time.monotonic())
                if left_s <= 0:
                    return
                self._wait(watch, positions, left_s)

    def _changes_after(self, positions: dict[int, int]) -> Iterator[Record]:
        """Yield records with keys from the positions on, and advance these. The table reads a batch first."""
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
        """Wait until a process appends, or until the timeout."""
        self._prepare_access()
        watch.drain()
        must_poll = announce(watch, (source.log for source in self._sources))
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
        raise TypeError(f"a key must be bytes, not {type(key).__name__}{hint}")
    return key
