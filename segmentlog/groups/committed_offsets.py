"""Committed offsets of consumer groups: records of the compacted topic ``__consumer_offsets``.

    key    MessagePack array: version (2), group, topic id, partition
    value  MessagePack array: offset, epoch, metadata, committed_ms, generation, member; null: deleted

Only the topic stores the offsets. `CommittedOffsetsView` is a view of it in memory, which reads the new records at each
call. Offsets committed in a transaction take effect when the transaction is committed. Until then they are pending, and
no member starts to read their partitions.

A committed offset belongs to a topic's id, so a rename of the topic does not affect it. If a topic is deleted, and a
topic of the same name is created, the new topic has no committed offsets. Keys of version 1 (format 1 of the store)
contain the topic's name. They belong to the id that the topic of this name got in the upgrade, not to a later topic of
the same name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from segmentlog.errors import InvalidConfig, LogTruncated, OffsetOutOfRange, UnknownTopic
from segmentlog.format.batch import TRANSACTIONAL
from segmentlog.format.control import decode_marker
from segmentlog.format.file_names import OFFSETS_TOPIC, topic_id_of_name
from segmentlog.format.record_batch import RecordBatch
from segmentlog.records import PartitionId, TopicPartition
from segmentlog.storage import fork_safety
from segmentlog.topics.internal_compaction import InternalCompaction
from segmentlog.topics.topic_registry import Topics

if TYPE_CHECKING:
    from segmentlog.log.partition import Partition
    from segmentlog.log.producer_state import ProducerStamp

_T = TypeVar("_T")

METADATA_MAX: Final = 4096
"""Longest metadata of a commit, in UTF-16 code units. Despite its name, Kafka's ``offset.metadata.max.bytes`` also
counts these units."""
_VERSION: Final = 2
_VERSION_BY_NAME: Final = 1
_SETTINGS: Final[dict[str, object]] = {
    "cleanup.policy": "compact",
    "segment.bytes": 16 << 20,
    "min.cleanable.dirty.ratio": 0.5,
}


class CommittedOffset(msgspec.Struct, frozen=True, array_like=True):
    """An offset that a group has committed for a partition, and the metadata of the commit."""

    offset: int
    """Offset of the next record to read."""
    epoch: int = -1
    """Leader epoch of the last record that was read; -1 if unknown."""
    metadata: str = ""
    committed_ms: int = 0
    generation: int = -1
    """Generation of the group in which a member committed it; -1: not committed by a member."""
    member: str = ""


Positions = Mapping[TopicPartition, int | tuple[int, int]]
"""Offsets to commit, optionally each with the epoch of the record before it."""

Encoded = tuple[list[bytes | None], list[bytes | None]]
"""Keys and values of records, in two lists."""


def encode(
    group: str,
    positions: Positions,
    topic_id_of: Callable[[TopicPartition], str],
    *,
    metadata: str = "",
    committed_ms: int,
    generation: int = -1,
    member: str = "",
) -> Encoded:
    """Return keys and values of the records that commit ``positions``. Raises `InvalidConfig` for an invalid offset."""
    if not isinstance(metadata, str) or not is_metadata(metadata):
        raise InvalidConfig("metadata", metadata, f"text of at most {METADATA_MAX:,} characters")
    keys: list[bytes | None] = []
    values: list[bytes | None] = []
    for tp, position in positions.items():
        offset, epoch = position if isinstance(position, tuple) else (position, -1)
        if not isinstance(offset, int) or isinstance(offset, bool) or not 0 <= offset < 1 << 63:
            raise InvalidConfig(f"offset of {tp}", offset, "a whole number from 0 to 2**63 - 1")
        keys.append(encode_key(group, PartitionId(topic_id_of(tp), tp.partition)))
        values.append(
            msgspec.msgpack.encode(CommittedOffset(offset, epoch, metadata, committed_ms, generation, member))
        )
    return keys, values


def is_metadata(text: str) -> bool:
    """Return whether a text may be committed with an offset."""
    return len(text) <= METADATA_MAX and len(text.encode("utf-16-le", "surrogatepass")) <= 2 * METADATA_MAX


def encode_key(group: str, partition: PartitionId) -> bytes:
    """Return the key of the records with the committed offset of a group in a partition."""
    return msgspec.msgpack.encode((_VERSION, group, *partition))


def decode_key(key: bytes | None, store_id: str) -> tuple[str, PartitionId] | None:
    """Return group and partition of a key; None for a key of an unknown version."""
    try:
        version, group, topic, partition = _key_decoder.decode(key or b"")
    except msgspec.DecodeError:
        return None
    if version == _VERSION_BY_NAME:
        topic = topic_id_of_name(store_id, topic)
    elif version != _VERSION:
        return None
    return group, PartitionId(topic, partition)


_key_decoder = msgspec.msgpack.Decoder(tuple[int, str, str, int])
offset_decoder = msgspec.msgpack.Decoder(CommittedOffset)


class _StoredOffset(msgspec.Struct, frozen=True):
    """A committed offset (None: deleted), and the offset of the record that contains it."""

    group: str
    partition: PartitionId
    committed: CommittedOffset | None
    record_offset: int


class CommittedOffsetsView:
    """The committed offsets of all groups, as one open store sees them. Thread-safe."""

    def __init__(self, topics: Topics) -> None:
        self._topics = topics
        self._log: Partition | None = None
        self._compaction = InternalCompaction()
        self._mutex = fork_safety.lock(self, "_mutex")
        self._reset_view()
        fork_safety.on_fork(self, "_reset_view")

    def _reset_view(self) -> None:
        """Drop the view, to read the log from its start.

        Also called in a forked child: another thread of the parent may have been changing the view.
        """
        self._position = 0
        self._generation = -1
        self._groups: dict[str, dict[PartitionId, _StoredOffset]] = {}
        self._keys_by_name: dict[tuple[str, PartitionId], bytes] = {}
        """Keys of version 1 in the log. To delete such an offset, both keys must be deleted."""
        self._pending: dict[int, list[_StoredOffset]] = {}

    # ------------------------------------------------------------ queries

    @property
    def exists(self) -> bool:
        """Return whether any offset was ever committed."""
        return self._open() is not None

    def committed(self, group: str) -> dict[TopicPartition, CommittedOffset]:
        """Return a group's offsets by the current names of the topics, without those of deleted topics."""
        return self._named(self.by_topic_id(group))

    def by_topic_id(self, group: str) -> dict[PartitionId, CommittedOffset]:
        """Return a group's offsets by topic id, including those of deleted topics."""
        with self._mutex:
            self._catch_up()
            entries = self._groups.get(group, {})
            return {partition: entry.committed for partition, entry in entries.items() if entry.committed is not None}

    def pending(self, group: str) -> set[TopicPartition]:
        """Return the partitions whose offset is part of an open transaction."""
        return set(self._named(dict.fromkeys(self.pending_by_topic_id(group))))

    def pending_by_topic_id(self, group: str) -> set[PartitionId]:
        """Return the partitions whose offset is part of an open transaction, by topic id."""
        with self._mutex:
            self._catch_up()
            return {entry.partition for entries in self._pending.values() for entry in entries if entry.group == group}

    def _named(self, found: Mapping[PartitionId, _T]) -> dict[TopicPartition, _T]:
        names = self._topics.topic_names({partition.topic_id for partition in found})
        return {
            TopicPartition(names[partition.topic_id], partition.partition): found[partition]
            for partition in found
            if partition.topic_id in names
        }

    def groups(self) -> list[str]:
        """Return the sorted names of the groups that have committed offsets in existing topics."""
        return [group for group in self.groups_with_any_offset() if self.committed(group)]

    def groups_with_any_offset(self) -> list[str]:
        """Return the sorted names of all groups with committed offsets, including those in deleted topics only."""
        with self._mutex:
            self._catch_up()
            return sorted(
                group
                for group, entries in self._groups.items()
                if any(entry.committed is not None for entry in entries.values())
            )

    # ------------------------------------------------------------ changes

    def topic_ids(self) -> set[str]:
        """Return the ids of all topics in which a group has a committed offset."""
        return {partition.topic_id for group in self.groups_with_any_offset() for partition in self.by_topic_id(group)}

    def delete_offsets_of_topics(self, topic_ids: Collection[str]) -> None:
        """Delete what all groups have committed in these deleted topics."""
        if not topic_ids:
            return
        for group in self.groups_with_any_offset():
            if gone := [partition for partition in self.by_topic_id(group) if partition.topic_id in topic_ids]:
                self.append(*self.encode_deletion(group, gone))

    def encode_deletion(self, group: str, partitions: Iterable[PartitionId]) -> Encoded:
        """Return keys and (null) values of the records that delete a group's offsets."""
        keys: list[bytes | None] = []
        for partition in partitions:
            keys.append(encode_key(group, partition))
            # Delete the version-1 key, too. Otherwise its offset would count again once a compaction has removed the
            # records of the new key.
            if by_name := self._keys_by_name.get((group, partition)):
                keys.append(by_name)
        return keys, [None] * len(keys)

    def append(self, keys: list[bytes | None], values: list[bytes | None], stamp: ProducerStamp | None = None) -> int:
        """Append records of `encode`, all or none, and return the offset after the last one. Does not sync.

        With a ``stamp`` the records are part of its transaction.
        """
        log = self.open_or_create_log()
        end_offset = log.append(values, keys, ack="written", producer=stamp) + len(values)
        with self._mutex:
            self._compaction.count()
            self._compaction.compact_if_due(log)
        return end_offset

    def sync(self, end_offset: int) -> None:
        """Sync the log up to an offset that `append` returned."""
        self.open_or_create_log().sync_upto(end_offset, end_offset - 1)

    def open_or_create_log(self) -> Partition:
        """Return the topic's only partition; create the topic first if it does not exist."""
        return self._open() or self._topics.internal_topic(OFFSETS_TOPIC, config=_SETTINGS).partition(0)

    # ------------------------------------------------------------ reading the log

    def _open(self) -> Partition | None:
        log = self._log
        if log is None or log.is_stale:
            try:
                log = self._log = self._topics.topic(OFFSETS_TOPIC).partition(0)
            except UnknownTopic:
                log = self._log = None
        return log

    def _catch_up(self) -> None:
        previous = self._log
        log = self._open()
        if log is not previous:
            self._reset_view()
        if log is None or (self._position and log.log_end_offset == self._position):
            return
        while True:
            end_offset, generation = log.log_end_offset, log.generation
            if self._pending and generation != self._generation:
                self._reset_view()  # a compaction may have removed the marker of a pending transaction
            self._generation = generation
            try:
                self._read(log)
            except (OffsetOutOfRange, LogTruncated):  # a truncation has removed records that were read
                self._reset_view()
                self._position = log.log_start_offset
                self._read(log)
            if log.generation == generation:
                break
            self._reset_view()  # a compaction during the read may have removed a marker, as above
        self._position = max(self._position, end_offset)

    def _read(self, log: Partition) -> None:
        for batch in log.read(max(self._position, log.log_start_offset), control=True):
            if batch.header.is_control:
                self._apply_marker(batch)
            else:
                self._add_batch(batch)
            self._position = batch.next_offset
            self._compaction.count()

    def _add_batch(self, batch: RecordBatch) -> None:
        entries = []
        for offset, key, value in zip(batch.offsets.tolist(), batch.keys, batch.values, strict=True):
            group_partition = decode_key(key, self._topics.store_id)
            if group_partition is not None:
                if key != encode_key(*group_partition):
                    self._track_key_by_name(group_partition, key, value)
                committed = None if value is None else offset_decoder.decode(value)
                entries.append(_StoredOffset(*group_partition, committed, offset))
        if batch.header.attributes & TRANSACTIONAL:
            self._pending.setdefault(batch.header.producer_id, []).extend(entries)
        else:
            self._apply(entries)

    def _track_key_by_name(
        self, group_partition: tuple[str, PartitionId], key: bytes | None, value: bytes | None
    ) -> None:
        if value is None or key is None:
            self._keys_by_name.pop(group_partition, None)
        else:
            self._keys_by_name[group_partition] = key

    def _apply_marker(self, batch: RecordBatch) -> None:
        marker = decode_marker(batch.header, batch.payload)
        if marker is not None:
            entries = self._pending.pop(marker.producer_id, [])
            if marker.committed:
                self._apply(entries)

    def _apply(self, entries: list[_StoredOffset]) -> None:
        for entry in entries:
            offsets = self._groups.setdefault(entry.group, {})
            previous = offsets.get(entry.partition)
            # If several transactions commit an offset of the same partition, the last record in the log counts, not the
            # last decision.
            if previous is None or previous.record_offset < entry.record_offset:
                offsets[entry.partition] = entry
