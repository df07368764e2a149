"""A consumer's life in its group: what it polls, hands over, takes, and commits."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, Protocol

from segmentlog.arguments import as_positions
from segmentlog.errors import ConsumerFenced, UnknownTopic
from segmentlog.groups.committed_offsets import CommittedOffset, CommittedPositions, Encoded, encode
from segmentlog.groups.group_member import Member
from segmentlog.records import PartitionId, TopicPartition
from segmentlog.storage import fork_safety
from segmentlog.storage.interrupt_safe import interrupt_safe_context
from segmentlog.topics.topic_registry import Topics

logger = logging.getLogger("segmentlog")

Rebalanced = Callable[[list[TopicPartition]], None]
"""Told which partitions came, or go."""

_PENDING_S: Final = 0.02
"""How often to look whether a transaction that commits a position was decided."""


class PartitionReader(Protocol):
    """What a session needs of the consumer: its cursors."""

    def start_reading(
        self, tp: TopicPartition, topic_id: str, committed: CommittedOffset | None, *, is_new: bool
    ) -> None:
        """Read a partition from its committed position, or from where the consumer says.

        Raises `UnknownTopic` also when another topic has the name by now.
        """

    def is_reading(self, tp: TopicPartition) -> bool:
        """Whether it was begun, and not forgotten since."""

    def stop(self, partitions: Iterable[TopicPartition]) -> None:
        """Hand out no more of these."""

    def drop(self, partitions: Iterable[TopicPartition]) -> None:
        """Forget these."""

    def pop_deleted(self) -> list[TopicPartition]:
        """Those whose topics are found to be gone, as no more than a pattern named them."""

    def positions_to_commit(self, *, settled: bool) -> dict[TopicPartition, tuple[int, int]]:
        """Offsets and epochs; ``settled``: without the record that the application is working on."""

    def epoch_at(self, tp: TopicPartition, offset: int) -> int:
        """Epoch of the record before a position; -1 when it is not known any more."""


_SOON_S = 0.01
"""Of commits that need not wait for anything, one in so long is written: positions overwrite each other."""


def _is_offset(offset: object) -> bool:
    return type(offset) is int and 0 <= offset < 1 << 63


class GroupSession:
    """One consumer's membership. `poll` is for the consuming thread; `close` and `commit` for any."""

    def __init__(
        self,
        topics: Topics,
        positions: CommittedPositions,
        finish_transactions: Callable[[], object],
        group: str,
        member: Member,
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
        self._offsets = positions
        self._finish_transactions = finish_transactions
        self._reader = reader
        self._auto_commit = auto_commit
        self._interval_s = auto_commit_interval_ms / 1000
        self._on_assigned, self._on_revoked, self._on_lost = on_assigned, on_revoked, on_lost
        self._mutex = fork_safety.reentrant_lock(self, "_mutex")
        self._held: set[TopicPartition] = set()
        """Locked, but not read yet: a transaction that commits their position is not decided."""
        self._is_taking = False
        """Partitions are being locked, and may not be among ``_held`` yet: whoever does that may be interrupted."""
        self._known_positions: dict[TopicPartition, int] = {}
        self._look_at_pending_s = 0.0
        self._soon: dict[TopicPartition, tuple[int, int]] = {}
        """Positions to commit before long: what `commit_soon` was told last."""
        self._soon_metadata = ""
        self._soon_due_s = 0.0
        member.join()
        self._known = self._topics_now()
        """Partition counts, as it joined, by the topics' ids: what is not among these has appeared since."""
        self._commit_due_s = time.monotonic() + self._interval_s

    def _topics_now(self) -> dict[str, int]:
        found = {}
        for name, count in self.member.folder.resolve(self.member.topics).items():
            with contextlib.suppress(UnknownTopic):  # deleted meanwhile
                found[self._topics.topic(name).id] = count
        return found

    # ------------------------------------------------------------ polling

    def poll(self, *, ended: bool = False, settled: bool = False) -> None:
        """Take part: be seen alive, hear of a new assignment, let go and take over, commit when it is time.

        The caller has processed everything that it was handed; ``settled``: but for what it may be working on still.
        """
        self.member.check_process()
        with self._mutex:
            self._flush_quietly()
            if self._is_taking:
                self._note_taken()
            if self._auto_commit and time.monotonic() >= self._commit_due_s:
                self._commit_due_s = time.monotonic() + self._interval_s
                self._commit_quietly(self._processed(settled=settled))
            if gone := self._reader.pop_deleted():
                self._let_go_of_gone(gone, settled=settled)
            if self.member.poll(ended=ended):
                self._rebalance(settled=settled)
            if self._held and time.monotonic() >= self._look_at_pending_s:
                self._begin_held()

    @property
    def is_settled(self) -> bool:
        """Whether everything that is assigned is being read."""
        return self.member.is_settled and not self._held

    @property
    def wait_s(self) -> float:
        """How long it may sleep before the next poll."""
        return min(self.member.wait_s, _PENDING_S) if self._held else self.member.wait_s

    def _rebalance(self, *, settled: bool) -> None:
        member = self.member
        lost, revoked = member.refresh()
        if lost:
            self._lose()
            lost, revoked = member.refresh()
            if lost:
                return  # evicted again at once: the next poll sees to it
        if revoked:
            self._revoke(revoked, settled=settled)
        self._is_taking = True
        taken = member.acquire()
        self._reader.drop(taken)  # there when letting go of one was interrupted
        self._note_taken()
        if taken:
            self._begin_held()

    def _note_taken(self) -> None:
        self._held.update([tp for tp, fd in self.member.owned.items() if fd >= 0 and not self._reader.is_reading(tp)])
        self._is_taking = False

    def _lose(self) -> None:
        """Others have taken this member for dead: it holds nothing any more, and joins anew."""
        told = sorted(self.member.owned.keys() - self._held)
        logger.warning("group %s: member %s was evicted, and joins again", self.group, self.member.id)
        self._reader.drop(told)
        self._held.clear()
        self._known_positions.clear()
        self._soon.clear()
        self.member.end_membership()
        try:
            listener = self._on_lost or self._on_revoked
            if told and listener is not None:
                listener(told)
        finally:
            self.member.join()

    def _revoke(self, partitions: list[TopicPartition], *, settled: bool) -> None:
        told = [tp for tp in partitions if tp not in self._held]
        positions = self._processed(settled=settled)  # before anything is stopped, which would hide what is in hand
        self._reader.stop(told)
        try:
            if self._auto_commit:
                self._commit_quietly({tp: positions[tp] for tp in told if tp in positions})
            if told and self._on_revoked is not None:
                self._on_revoked(told)
        finally:
            self._flush_quietly()
            self._hand_over(partitions)

    def _let_go_of_gone(self, partitions: Iterable[TopicPartition], *, settled: bool) -> None:
        """Their topics were deleted or renamed. The assignment may say the same names still, and mean others."""
        if revoked := [tp for tp in partitions if tp in self.member.owned]:
            self._revoke(revoked, settled=settled)

    def _hand_over(self, partitions: Iterable[TopicPartition]) -> None:
        partitions = list(partitions)
        self.member.hand_over(partitions)
        self._held.difference_update(partitions)
        for tp in partitions:
            self._known_positions.pop(tp, None)
        self._reader.drop(partitions)

    def _begin_held(self) -> None:
        """Begin to read what is locked, unless a transaction has yet to say from where."""
        self._look_at_pending_s = time.monotonic() + _PENDING_S
        # But for those whose handing over was interrupted.
        self._held.intersection_update([tp for tp, fd in self.member.owned.items() if fd >= 0])
        held = {tp: PartitionId(self.member.topic_ids[tp], tp.partition) for tp in self._held.copy()}
        pending = self._offsets.undecided(self.group)
        if not pending.isdisjoint(held.values()):
            self._finish_transactions()
            pending = self._offsets.undecided(self.group)
        positions = self._offsets.positions(self.group)
        begun = [tp for tp in held if self._reader.is_reading(tp)]  # by a call that was interrupted
        self._held.difference_update(begun)
        try:
            for tp, where in sorted(held.items()):
                if where in pending or tp in begun:
                    continue
                known = positions.get(where)
                try:
                    is_new = tp.partition >= self._known.get(where.topic_id, 0)
                    self._reader.start_reading(tp, where.topic_id, known, is_new=is_new)
                except UnknownTopic:  # deleted: the next assignment is without it, or with another one of that name
                    self._held.discard(tp)
                    self.member.hand_over([tp])
                    continue
                self._held.discard(tp)
                if known is not None:
                    self._known_positions[tp] = known.offset
                begun.append(tp)
        finally:  # though another one cannot be begun: these are read from now on
            if begun and self._on_assigned is not None:
                self._on_assigned(begun)

    # ------------------------------------------------------------ committing

    def commit(
        self, positions: Mapping[Any, int] | None, *, metadata: str, sync: bool
    ) -> dict[TopicPartition, tuple[int, int]]:
        """Commit positions, by default those behind what was handed out; returns them with their epochs."""
        self.member.check_process()
        self._offsets.make_log()  # not under the lock: making it takes an fsync
        with self._mutex:
            self._flush_soon()
            named = self.named(positions)
            end_offset = self._append(named, metadata)
        if sync and end_offset:
            # Outside of the group's lock, which nobody should hold for as long as a disk takes.
            self._offsets.sync(end_offset)
        return named

    def _append(self, named: Mapping[TopicPartition, tuple[int, int]], metadata: str) -> int:
        """Write positions; the offset behind the last record of them."""
        if not named:
            return 0
        keys, values = self._encode(named, metadata)
        with self.member.committing(named):
            end_offset = self._offsets.append(keys, values)
        self._known_positions.update({tp: offset for tp, (offset, _) in named.items()})
        return end_offset

    def commit_soon(self, positions: Mapping[Any, int] | None, *, metadata: str) -> None:
        """Commit within `_SOON_S`, or at the next call if that is later; of several commits only the last counts."""
        self.member.check_process()
        with self._mutex:
            named = self.named(positions)
            if metadata != self._soon_metadata or not all(_is_offset(offset) for offset, _ in named.values()):
                self._flush_soon()
                self._encode(named, metadata)  # raises for what is none
                self._soon_metadata = metadata
            self._soon.update(named)
            if time.monotonic() >= self._soon_due_s:
                self._flush_soon()

    def _flush_soon(self) -> None:
        if not self._soon:
            return
        named, self._soon = self._soon, {}
        self._offsets.make_log()
        self._append(named, self._soon_metadata)
        self._soon_due_s = time.monotonic() + _SOON_S

    def _flush_quietly(self) -> None:
        """The same where being fenced is no error: what is lost is read again by another member."""
        try:
            self._flush_soon()
        except ConsumerFenced as error:
            logger.warning("%s", error)

    @interrupt_safe_context
    def committing(self, positions: Mapping[Any, int] | None, *, metadata: str = "") -> Iterator[Encoded]:
        """Keys and values to append to ``__consumer_offsets`` within; nobody can take the partitions as long."""
        self.member.check_process()
        self._offsets.make_log()  # as in `commit`
        with self._mutex:
            self._flush_soon()
            named = self.named(positions)
            encoded = self._encode(named, metadata)
            with self.member.committing(named):
                # Said before it is known to be so: what a transaction has committed, auto-commit must not take back.
                self._known_positions.update({tp: offset for tp, (offset, _) in named.items()})
                yield encoded

    def _encode(self, named: Mapping[TopicPartition, tuple[int, int]], metadata: str) -> Encoded:
        return encode(
            self.group, named, self._topic_id_of, metadata=metadata, committed_ms=self.member.now_ms(),
            generation=self.member.generation, member=self.member.id,
        )  # fmt: skip

    def _topic_id_of(self, tp: TopicPartition) -> str:
        """Of the topic that this member reads under that name, which may be another one's by now."""
        topic_id = self.member.topic_ids.get(tp)
        return self._topics.topic(tp.topic).id if topic_id is None else topic_id

    def named(self, positions: Mapping[Any, int] | None) -> dict[TopicPartition, tuple[int, int]]:
        """Positions with their epochs. Raises `UnknownTopic` for a partition that there is not."""
        if positions is None:
            return self._reader.positions_to_commit(settled=False)
        found: dict[TopicPartition, tuple[int, int]] = {}
        for tp, offset in as_positions("positions", positions).items():
            if tp not in self.member.owned:
                self._topics.topic(tp.topic).partition(tp.partition)
            found[tp] = (offset, self._reader.epoch_at(tp, offset))
        return found

    def _commit_quietly(self, positions: Mapping[TopicPartition, tuple[int, int]]) -> None:
        """Commit those that moved, for auto-commit: being fenced is no error there, what is lost is read again."""
        moved = {tp: offset for tp, (offset, _) in positions.items() if self._known_positions.get(tp) != offset}
        if moved:
            try:
                self.commit(moved, metadata="", sync=False)
            except ConsumerFenced as error:
                logger.warning("%s", error)

    def _processed(self, *, settled: bool) -> dict[TopicPartition, tuple[int, int]]:
        """Positions that auto-commit may commit; ``settled``: without what the application may be working on.

        But not before what it has itself committed of that.
        """
        current = self._reader.positions_to_commit(settled=False)
        if not settled:
            return current
        return {
            tp: position
            for tp, position in self._reader.positions_to_commit(settled=True).items()
            if not position[0] < self._known_position(tp) <= current[tp][0]
        }

    def _known_position(self, tp: TopicPartition) -> int:
        """What this member committed last, or is about to; -1 for nothing."""
        soon = self._soon.get(tp)
        return self._known_positions.get(tp, -1) if soon is None else soon[0]

    def committed(self, tp: TopicPartition) -> CommittedOffset | None:
        """The group's position in a partition, whoever owns it."""
        with self._mutex:
            self._flush_quietly()
        with contextlib.suppress(UnknownTopic):
            return self._offsets.positions(self.group).get(PartitionId(self._topic_id_of(tp), tp.partition))
        return None

    # ------------------------------------------------------------ ending

    def close(self) -> None:
        """Commit if that is automatic, hand everything over, and leave."""
        if self.member.is_foreign:
            return
        with self._mutex:
            if self._is_taking:
                self._note_taken()
            owned = list(self.member.owned)
            told = sorted(set(owned) - self._held)
            try:
                # Before anything is stopped, which would hide what the application is working on.
                processed = self._processed(settled=True)
                self._reader.stop(told)
                if self._auto_commit:
                    self._commit_quietly(processed)
                if told and self._on_revoked is not None:
                    self._on_revoked(told)
            finally:
                try:
                    self._flush_quietly()
                    self.member.leave()
                finally:
                    self._hand_over(owned)
