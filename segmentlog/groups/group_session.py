"""A consumer's membership in its group: polls, acquires and releases partitions, commits offsets."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, Protocol

from segmentlog.arguments import as_positions
from segmentlog.errors import ConsumerFenced, UnknownTopic
from segmentlog.groups.committed_offsets import CommittedOffset, CommittedOffsetsView, Encoded, encode
from segmentlog.groups.group_member import GroupMember
from segmentlog.records import PartitionId, TopicPartition
from segmentlog.storage import fork_safety
from segmentlog.storage.interrupt_safe import interrupt_safe_context
from segmentlog.topics.topic_registry import Topics

logger = logging.getLogger("segmentlog")

Rebalanced = Callable[[list[TopicPartition]], None]
"""Called with the partitions that were assigned, revoked or lost."""

_PENDING_S: Final = 0.02
"""How often to check whether a transaction that commits an offset has been decided."""


class PartitionReader(Protocol):
    """The methods of a consumer's read positions that a group session calls."""

    def start_partition(
        self, tp: TopicPartition, topic_id: str, committed: CommittedOffset | None, *, is_new: bool
    ) -> None:
        """Read a partition from its committed offset, or from the consumer's start position.

        Raises `UnknownTopic`, also if another topic has the name now.
        """

    def reads(self, tp: TopicPartition) -> bool:
        """Return whether the partition is being read."""

    def stop(self, partitions: Iterable[TopicPartition]) -> None:
        """Return no more records of these partitions to the application, but keep their positions."""

    def drop(self, partitions: Iterable[TopicPartition]) -> None:
        """Forget these partitions and their positions."""

    def take_deleted(self) -> list[TopicPartition]:
        """Return partitions whose topics were deleted or renamed since the last call."""

    def positions_to_commit(self, *, is_processing: bool) -> dict[TopicPartition, tuple[int, int]]:
        """Return the offset to commit and its epoch, for each partition.

        ``is_processing``: the application is still processing the last returned record or batch, so the offset is
        before it.
        """

    def epoch_at(self, tp: TopicPartition, offset: int) -> int:
        """Return the epoch of the record before an offset; -1 if it is unknown."""


_SOON_S = 0.01
"""Interval between two writes of `commit_soon`. Only the last commit of an interval is written."""


def _is_offset(offset: object) -> bool:
    return type(offset) is int and 0 <= offset < 1 << 63


class GroupSession:
    """The membership of one consumer. The consuming thread calls `poll`; any thread may call `close` and `commit`."""

    def __init__(
        self,
        topics: Topics,
        committed_offsets: CommittedOffsetsView,
        finish_transactions: Callable[[], object],
        group: str,
        member: GroupMember,
        reader: PartitionReader,
        *,
        auto_commit: bool,
        auto_commit_interval_ms: int,
        on_assigned: Rebalanced | None,
        on_revoked: Rebalanced | None,
        on_lost: Rebalanced | None,
    ) -> None:
        self.group = group
        self.member = member
        self._topics = topics
        self._committed_offsets = committed_offsets
        self._finish_transactions = finish_transactions
        self._reader = reader
        self._auto_commit = auto_commit
        self._interval_s = auto_commit_interval_ms / 1000
        self._on_assigned, self._on_revoked, self._on_lost = on_assigned, on_revoked, on_lost
        self._mutex = fork_safety.reentrant_lock(self, "_mutex")
        self._waiting: set[TopicPartition] = set()
        """Partitions that are locked, but not read yet: an open transaction commits their offset."""
        self._is_acquiring = False
        """Whether partitions are being locked. After an interrupt, ``_waiting`` may lack some of them."""
        self._committed_by_self: dict[TopicPartition, int] = {}
        self._pending_check_s = 0.0
        self._deferred: dict[TopicPartition, tuple[int, int]] = {}
        """Offsets of `commit_soon` that are not written yet."""
        self._deferred_metadata = ""
        self._deferred_due_s = 0.0
        member.join()
        self._joined_counts = self._topics_now()
        """Partition counts at the join, by topic id. Partitions beyond these are new."""
        self._commit_due_s = time.monotonic() + self._interval_s

    def _topics_now(self) -> dict[str, int]:
        found = {}
        for name, count in self.member.folder.resolve_topics(self.member.topics).items():
            with contextlib.suppress(UnknownTopic):  # deleted meanwhile
                found[self._topics.topic(name).id] = count
        return found

    # ------------------------------------------------------------ polling

    def poll(self, *, ended: bool = False, is_processing: bool = False) -> None:
        """Send a heartbeat, react to a new assignment, and commit if auto-commit is due.

        All records that were returned before this call count as processed. With ``is_processing`` the application is
        still processing the last returned record or batch, which does not count then.
        """
        self.member.check_process()
        with self._mutex:
            self._flush_quietly()
            if self._is_acquiring:
                self._record_acquired()
            if self._auto_commit and time.monotonic() >= self._commit_due_s:
                self._commit_due_s = time.monotonic() + self._interval_s
                self._commit_quietly(self._processed(is_processing=is_processing))
            if gone := self._reader.take_deleted():
                self._release_deleted(gone, is_processing=is_processing)
            if self.member.poll(ended=ended):
                self._rebalance(is_processing=is_processing)
            if self._waiting and time.monotonic() >= self._pending_check_s:
                self._start_reading()

    @property
    def is_settled(self) -> bool:
        """Return whether every assigned partition is being read."""
        return self.member.is_settled and not self._waiting

    @property
    def wait_s(self) -> float:
        """Return how long the consumer may sleep before the next poll, in seconds."""
        return min(self.member.wait_s, _PENDING_S) if self._waiting else self.member.wait_s

    def _rebalance(self, *, is_processing: bool) -> None:
        member = self.member
        is_evicted, revoked = member.refresh()
        if is_evicted:
            self._rejoin_after_eviction()
            is_evicted, revoked = member.refresh()
            if is_evicted:
                return  # evicted again: the next poll handles it
        if revoked:
            self._revoke(revoked, is_processing=is_processing)
        self._is_acquiring = True
        acquired = member.acquire()
        self._reader.drop(acquired)  # an interrupted release may have left them in the reader
        self._record_acquired()
        if acquired:
            self._start_reading()

    def _record_acquired(self) -> None:
        self._waiting.update([tp for tp, fd in self.member.owned.items() if fd >= 0 and not self._reader.reads(tp)])
        self._is_acquiring = False

    def _rejoin_after_eviction(self) -> None:
        """Drop all partitions after other members have evicted this one, and join again."""
        reading = sorted(self.member.owned.keys() - self._waiting)
        logger.warning("group %s: member %s was evicted by other members; it joins again", self.group, self.member.id)
        self._reader.drop(reading)
        self._waiting.clear()
        self._committed_by_self.clear()
        self._deferred.clear()
        self.member.end_membership()
        try:
            listener = self._on_lost or self._on_revoked
            if reading and listener is not None:
                listener(reading)
        finally:
            self.member.join()

    def _revoke(self, partitions: list[TopicPartition], *, is_processing: bool) -> None:
        reading = [tp for tp in partitions if tp not in self._waiting]
        # Before `stop`, which hides the record being processed.
        positions = self._processed(is_processing=is_processing)
        self._reader.stop(reading)
        try:
            if self._auto_commit:
                self._commit_quietly({tp: positions[tp] for tp in reading if tp in positions})
            if reading and self._on_revoked is not None:
                self._on_revoked(reading)
        finally:
            self._flush_quietly()
            self._release(partitions)

    def _release_deleted(self, partitions: Iterable[TopicPartition], *, is_processing: bool) -> None:
        """Release partitions of deleted or renamed topics, even if the assignment has new topics of the same names."""
        if revoked := [tp for tp in partitions if tp in self.member.owned]:
            self._revoke(revoked, is_processing=is_processing)

    def _release(self, partitions: Iterable[TopicPartition]) -> None:
        partitions = list(partitions)
        self.member.release(partitions)
        self._waiting.difference_update(partitions)
        for tp in partitions:
            self._committed_by_self.pop(tp, None)
        self._reader.drop(partitions)

    def _start_reading(self) -> None:
        """Start to read locked partitions, except those whose offset an open transaction commits."""
        self._pending_check_s = time.monotonic() + _PENDING_S
        # Leave out partitions whose release was interrupted: their locks are no longer held.
        self._waiting.intersection_update([tp for tp, fd in self.member.owned.items() if fd >= 0])
        held = {tp: PartitionId(self.member.topic_ids[tp], tp.partition) for tp in self._waiting.copy()}
        pending = self._committed_offsets.pending_by_topic_id(self.group)
        if not pending.isdisjoint(held.values()):
            self._finish_transactions()
            pending = self._committed_offsets.pending_by_topic_id(self.group)
        positions = self._committed_offsets.by_topic_id(self.group)
        started = [tp for tp in held if self._reader.reads(tp)]  # an interrupted call has started to read them
        self._waiting.difference_update(started)
        try:
            for tp, partition in sorted(held.items()):
                if partition in pending or tp in started:
                    continue
                known = positions.get(partition)
                try:
                    is_new = tp.partition >= self._joined_counts.get(partition.topic_id, 0)
                    self._reader.start_partition(tp, partition.topic_id, known, is_new=is_new)
                except UnknownTopic:  # deleted: the next assignment omits it, or contains a new topic of the name
                    self._waiting.discard(tp)
                    self.member.release([tp])
                    continue
                self._waiting.discard(tp)
                if known is not None:
                    self._committed_by_self[tp] = known.offset
                started.append(tp)
        finally:  # if one partition fails, those before it are being read
            if started and self._on_assigned is not None:
                self._on_assigned(started)

    # ------------------------------------------------------------ committing

    def commit(
        self, positions: Mapping[Any, int] | None, *, metadata: str, sync: bool
    ) -> dict[TopicPartition, tuple[int, int]]:
        """Commit offsets, by default those after the last returned records. Return the offsets with their epochs."""
        self.member.check_process()
        self._committed_offsets.open_or_create_log()  # without the mutex: creating the topic syncs
        with self._mutex:
            self._flush_deferred()
            offsets = self.with_epochs(positions)
            end_offset = self._append(offsets, metadata)
        if sync and end_offset:
            # Sync without the group's lock: no process may hold that lock for as long as an fsync takes.
            self._committed_offsets.sync(end_offset)
        return offsets

    def _append(self, offsets: Mapping[TopicPartition, tuple[int, int]], metadata: str) -> int:
        """Append offsets to ``__consumer_offsets``. Return the offset after the appended records."""
        if not offsets:
            return 0
        keys, values = self._encode(offsets, metadata)
        with self.member.committing(offsets):
            end_offset = self._committed_offsets.append(keys, values)
        self._committed_by_self.update({tp: offset for tp, (offset, _) in offsets.items()})
        return end_offset

    def commit_soon(self, positions: Mapping[Any, int] | None, *, metadata: str) -> None:
        """Commit within `_SOON_S` seconds, or at the next call of this session if that is later.

        If the offset of a partition is committed again before that, only the last offset is written.
        """
        self.member.check_process()
        with self._mutex:
            offsets = self.with_epochs(positions)
            if metadata != self._deferred_metadata or not all(_is_offset(offset) for offset, _ in offsets.values()):
                self._flush_deferred()
                self._encode(offsets, metadata)  # raises for invalid offsets and metadata
                self._deferred_metadata = metadata
            self._deferred.update(offsets)
            if time.monotonic() >= self._deferred_due_s:
                self._flush_deferred()

    def _flush_deferred(self) -> None:
        if not self._deferred:
            return
        offsets, self._deferred = self._deferred, {}
        self._committed_offsets.open_or_create_log()
        self._append(offsets, self._deferred_metadata)
        self._deferred_due_s = time.monotonic() + _SOON_S

    def _flush_quietly(self) -> None:
        """Write the offsets of `commit_soon`. If this member was fenced, log a warning instead of raising an error."""
        try:
            self._flush_deferred()
        except ConsumerFenced as error:
            logger.warning("%s", error)

    @interrupt_safe_context
    def committing(self, positions: Mapping[Any, int] | None, *, metadata: str = "") -> Iterator[Encoded]:
        """Yield keys and values to append to ``__consumer_offsets``. No other member can acquire the partitions within
        the block.
        """
        self.member.check_process()
        self._committed_offsets.open_or_create_log()  # without the mutex, as in `commit`
        with self._mutex:
            self._flush_deferred()
            offsets = self.with_epochs(positions)
            encoded = self._encode(offsets, metadata)
            with self.member.committing(offsets):
                # Recorded before the outcome is known: auto-commit must not overwrite what a transaction has committed.
                self._committed_by_self.update({tp: offset for tp, (offset, _) in offsets.items()})
                yield encoded

    def _encode(self, offsets: Mapping[TopicPartition, tuple[int, int]], metadata: str) -> Encoded:
        return encode(
            self.group, offsets, self._topic_id_of, metadata=metadata, committed_ms=self.member.now_ms(),
            generation=self.member.generation, member=self.member.id,
        )  # fmt: skip

    def _topic_id_of(self, tp: TopicPartition) -> str:
        """Return the id of the topic that this member reads, even if another topic has its name now."""
        topic_id = self.member.topic_ids.get(tp)
        return self._topics.topic(tp.topic).id if topic_id is None else topic_id

    def with_epochs(self, positions: Mapping[Any, int] | None) -> dict[TopicPartition, tuple[int, int]]:
        """Return the offsets to commit with their epochs. Raises `UnknownTopic` for a partition that does not exist."""
        if positions is None:
            return self._reader.positions_to_commit(is_processing=False)
        found: dict[TopicPartition, tuple[int, int]] = {}
        for tp, offset in as_positions("positions", positions).items():
            if tp not in self.member.owned:
                self._topics.topic(tp.topic).partition(tp.partition)
            found[tp] = (offset, self._reader.epoch_at(tp, offset))
        return found

    def _commit_quietly(self, positions: Mapping[TopicPartition, tuple[int, int]]) -> None:
        """Auto-commit the offsets that have changed. If this member was fenced, log a warning instead of raising an
        error.
        """
        moved = {tp: offset for tp, (offset, _) in positions.items() if self._committed_by_self.get(tp) != offset}
        if moved:
            try:
                self.commit(moved, metadata="", sync=False)
            except ConsumerFenced as error:
                logger.warning("%s", error)

    def _processed(self, *, is_processing: bool) -> dict[TopicPartition, tuple[int, int]]:
        """Return the offsets that auto-commit may commit. ``is_processing``: see `poll`.

        The application may itself have committed the offset after the record that it is processing. Then auto-commit
        does not move the offset back.
        """
        current = self._reader.positions_to_commit(is_processing=False)
        if not is_processing:
            return current
        return {
            tp: position
            for tp, position in self._reader.positions_to_commit(is_processing=True).items()
            if not position[0] < self._last_committed(tp) <= current[tp][0]
        }

    def _last_committed(self, tp: TopicPartition) -> int:
        """Return the offset that this member committed last, or is about to commit; -1 if there is none."""
        soon = self._deferred.get(tp)
        return self._committed_by_self.get(tp, -1) if soon is None else soon[0]

    def committed(self, tp: TopicPartition) -> CommittedOffset | None:
        """Return the group's committed offset in a partition, whichever member owns it."""
        with self._mutex:
            self._flush_quietly()
        with contextlib.suppress(UnknownTopic):
            return self._committed_offsets.by_topic_id(self.group).get(PartitionId(self._topic_id_of(tp), tp.partition))
        return None

    # ------------------------------------------------------------ closing

    def close(self) -> None:
        """Commit if auto-commit is on, release all partitions, and leave the group."""
        if self.member.is_foreign:
            return
        with self._mutex:
            if self._is_acquiring:
                self._record_acquired()
            owned = list(self.member.owned)
            reading = sorted(set(owned) - self._waiting)
            try:
                # Before `stop`, which hides the record being processed.
                processed = self._processed(is_processing=True)
                self._reader.stop(reading)
                if self._auto_commit:
                    self._commit_quietly(processed)
                if reading and self._on_revoked is not None:
                    self._on_revoked(reading)
            finally:
                try:
                    self._flush_quietly()
                    self.member.leave()
                finally:
                    self._release(owned)
