"""Coordinates groups for the connections of one worker: callers wait for the answers of the state machines.

`group_manager` loads, saves and expires the groups.
"""

from __future__ import annotations

import contextlib
import logging
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

from segmentlog.errors import GroupInUse, GroupNotEmpty, InvalidConfig
from segmentlog.groups.server_groups import OffsetCommit
from segmentlog.log.producer_state import ProducerStamp
from segmentlog.records import PartitionId, TopicPartition
from segmentlog.server.codec.kafka_errors import ErrorCode
from segmentlog.server.groups.cached_group import AnswerWaiter, CachedGroup, GroupUnavailable
from segmentlog.server.groups.classic_group import ClassicGroup
from segmentlog.server.groups.classic_types import GroupState, JoinAnswer, JoinRequest, SyncAnswer
from segmentlog.server.groups.consumer_group import ConsumerGroup
from segmentlog.server.groups.consumer_types import JOIN_EPOCH, HeartbeatAnswer, HeartbeatFields
from segmentlog.server.groups.group_manager import GroupManager
from segmentlog.server.groups.migration import GroupStateMachine, may_upgrade, upgrade_group
from segmentlog.server.groups.subscriptions import CONSUMER, topics_of

if TYPE_CHECKING:
    from segmentlog.log.partition import Partition

logger = logging.getLogger("segmentlog")

_PREFIX_MAX: Final = 255
_DISCONNECT_CHECK_S: Final = 0.2
"""Interval at which a waiting request checks whether its client is still connected."""

AppendedOffsets = tuple["Partition", int, int]
"""Committed offsets in their log: the partition, the first offset, and the offset after the last one."""


def _never() -> bool:
    return False


class GroupCoordinator(GroupManager):
    """The groups of one worker. Thread-safe. Every method with a group name may raise `GroupUnavailable`.

    ``worker`` is the number of the worker, which stays the same after a restart. ``is_coordinator_of`` returns whether
    the worker coordinates a group.
    """

    # ------------------------------------------------------------ requests of clients

    def join(self, group: str, request: JoinRequest, is_disconnected: Callable[[], bool] = _never) -> JoinAnswer:
        """Join a group, and wait for the other members. Returns after the rebalance, or once ``is_disconnected``
        returns True."""
        if not group:
            return JoinAnswer(error=ErrorCode.INVALID_GROUP_ID, member_id=request.member_id)
        waiter = AnswerWaiter()
        with self._locked(group) as cached:
            if isinstance(cached.machine, ConsumerGroup) and cached.machine.state is GroupState.EMPTY:
                self._switch_protocol(cached, ClassicGroup(self.settings, topics_of))
            if not cached.is_claimed and cached.machine.would_add_member(request):
                try:
                    self._claim(cached, request.session_timeout_ms, request.protocol_type)
                except GroupInUse as error:
                    self._warn_refused(group, error)
                    return JoinAnswer(error=ErrorCode.INCONSISTENT_GROUP_PROTOCOL, member_id=request.member_id)
            with self._dropping_on_error(cached):
                cached.machine.join(waiter, request, self._now_ms())
            self._save_and_answer(cached)
        self._wait(group, waiter, is_disconnected)
        assert isinstance(waiter.answer, JoinAnswer)
        return waiter.answer

    def consumer_heartbeat(self, group: str, request: HeartbeatFields) -> HeartbeatAnswer:
        """Handle a heartbeat of the consumer protocol: a member joins, stays or leaves."""
        with self._locked(group) as cached:
            former, machine = cached.machine, cached.machine
            with self._dropping_on_error(cached):
                settings = self.settings_of(group)
            if isinstance(machine, ClassicGroup):
                if request.epoch != JOIN_EPOCH:
                    # The member has expired, and the group has returned to the classic protocol or is deleted. Kafka
                    # does not ask such a member to join again either.
                    return HeartbeatAnswer(error=ErrorCode.UNKNOWN_MEMBER_ID, message="the group has no such members")
                if not may_upgrade(machine, settings):
                    return HeartbeatAnswer(
                        error=ErrorCode.GROUP_ID_NOT_FOUND,
                        message=f"group {group} uses the classic protocol, and its members cannot be migrated",
                    )
                with self._dropping_on_error(cached):
                    machine = upgrade_group(machine, settings, self._catalog, self._now_ms())
            if not cached.is_claimed and machine.would_add_consumer(request):
                try:
                    self._claim(cached, settings.consumer_session_timeout_ms, CONSUMER)
                except GroupInUse as error:
                    self._warn_refused(group, error)
                    return HeartbeatAnswer(error=ErrorCode.GROUP_ID_NOT_FOUND, message=str(error))
                machine.raise_generation(former.generation)
            with self._dropping_on_error(cached):
                machine.configure(settings)
                answer = machine.consumer_heartbeat(request, self._now_ms())
            if isinstance(former, ClassicGroup) and answer.error is ErrorCode.NONE:
                if former.members:
                    logger.info("group %s: uses the consumer protocol from now on: a member of it has joined", group)
                former.end(ErrorCode.REBALANCE_IN_PROGRESS)
                self._switch_protocol(cached, machine)
            self._save_and_answer(cached)
        return answer

    @staticmethod
    def _switch_protocol(cached: CachedGroup, machine: GroupStateMachine) -> None:
        """Replace the state machine by that of the other protocol."""
        machine.raise_generation(cached.machine.generation)
        machine.answers += cached.machine.answers
        cached.machine.answers = []
        cached.machine = machine

    def new_member_id(self, prefix: str) -> str:
        """Return a new unique member id. Truncate its prefix to 255 characters: other members receive the id."""
        return f"{prefix[:_PREFIX_MAX]}-{uuid.uuid4()}"

    def sync(
        self,
        group: str,
        member_id: str,
        generation: int,
        assignments: Sequence[tuple[str, bytes]],
        *,
        instance_id: str | None = None,
        protocol_type: str | None = None,
        protocol: str | None = None,
        is_disconnected: Callable[[], bool] = _never,
    ) -> SyncAnswer:
        """Return the member's assignment. Waits until the leader has sent it, or until ``is_disconnected`` returns
        True."""
        waiter = AnswerWaiter()
        with self._locked(group) as cached:
            cached.machine.sync(
                waiter, member_id, generation, assignments, self._now_ms(),
                instance_id=instance_id, protocol_type=protocol_type, protocol=protocol,
            )  # fmt: skip
            self._save_and_answer(cached)
        self._wait(group, waiter, is_disconnected)
        assert isinstance(waiter.answer, SyncAnswer)
        return waiter.answer

    def _wait(self, group: str, waiter: AnswerWaiter, is_disconnected: Callable[[], bool]) -> None:
        """Wait for the answer. If the client disconnects meanwhile, remove the member from the group."""
        while not waiter.event.wait(_DISCONNECT_CHECK_S):
            if is_disconnected():
                cached = self._entries.get(group)
                if cached is not None:
                    self._drop_disconnected(cached, waiter)

    def _drop_disconnected(self, cached: CachedGroup, waiter: AnswerWaiter) -> None:
        with cached.lock:
            if cached.is_dropped:  # all waiters have an answer
                return
            logger.info("group %s: a member disconnected while it waited for the other members", cached.name)
            with contextlib.suppress(GroupUnavailable):
                cached.machine.drop_waiting(waiter, self._now_ms())
                self._save_and_answer(cached)
            self._drop_if_idle(cached)

    def heartbeat(self, group: str, member_id: str, generation: int, *, instance_id: str | None = None) -> ErrorCode:
        """Handle a heartbeat of the classic protocol."""
        with self._locked(group) as cached:
            error = cached.machine.heartbeat(member_id, generation, self._now_ms(), instance_id=instance_id)
            if isinstance(cached.machine, ConsumerGroup):
                self._schedule(cached)  # a member that must join again has a deadline, which the timer must handle
        return error

    def leave(self, group: str, leavers: Sequence[tuple[str, str | None]]) -> list[tuple[str, ErrorCode]]:
        """Remove members by their ids or instance ids. Return member id and error of each."""
        with self._locked(group) as cached:
            results = cached.machine.leave(leavers, self._now_ms())
            self._save_and_answer(cached)
        return results

    def may_fetch(self, group: str, member_id: str | None, epoch: int) -> ErrorCode:
        """Return NONE if this member may fetch committed offsets in this epoch, else the error."""
        with self._locked(group) as cached:
            machine = cached.machine
            return machine.may_fetch(member_id, epoch) if isinstance(machine, ConsumerGroup) else ErrorCode.NONE

    def commit_offsets(
        self,
        group: str,
        positions: Sequence[OffsetCommit],
        *,
        member_id: str = "",
        generation: int = -1,
        instance_id: str | None = None,
        stamp: ProducerStamp | None = None,
    ) -> tuple[ErrorCode, AppendedOffsets | None]:
        """Append committed offsets of a member, or of a client outside of the group. Raises the errors of an append.

        Return (error, appended range), with None as range if nothing was appended. The caller must sync the range.
        An error applies to all ``positions``. ``stamp`` is the producer of the transaction to which the offsets belong.
        """
        with self._locked(group) as cached:
            machine = cached.machine
            error = machine.may_commit(
                member_id, generation, self._now_ms(),
                partitions=[PartitionId(position.topic_id, position.partition) for position in positions],
                instance_id=instance_id, is_transactional=stamp is not None,
            )  # fmt: skip
            if error is not ErrorCode.NONE or not positions:
                return error, None
            if machine.members:
                return error, self._server_groups.commit_offsets(group, positions, generation, member_id, stamp)
            try:
                return error, self._server_groups.commit_without_members(group, positions, stamp)
            except GroupInUse as held:
                self._warn_refused(group, held)
                return ErrorCode.UNKNOWN_MEMBER_ID, None

    # ------------------------------------------------------------ requests of tools

    @contextlib.contextmanager
    def locked_group(self, group: str) -> Iterator[GroupStateMachine]:
        """Yield the group's state machine, locked: the group does not change within the block."""
        with self._locked(group) as cached:
            yield cached.machine

    def delete_offsets(
        self, group: str, partitions: Sequence[TopicPartition]
    ) -> ErrorCode | dict[TopicPartition, ErrorCode]:
        """Delete committed offsets of topics without subscribers. Return an error for all, or one for each."""
        groups = self._store.groups
        with self._locked(group) as cached:
            machine = cached.machine
            if machine.state is GroupState.EMPTY:
                if group not in groups.names():
                    return ErrorCode.GROUP_ID_NOT_FOUND
                subscribed_topics: set[str] = set()
            elif machine.protocol_type != CONSUMER:
                return ErrorCode.NON_EMPTY_GROUP
            else:
                subscribed_topics = machine.subscribed_topics
            codes = {}
            for topic in {tp.topic for tp in partitions}:
                of_topic = [tp for tp in partitions if tp.topic == topic]
                code = ErrorCode.GROUP_SUBSCRIBED_TO_TOPIC
                if topic not in subscribed_topics:
                    with contextlib.suppress(GroupNotEmpty):
                        groups.delete_offsets(group, of_topic)
                        code = ErrorCode.NONE
                codes.update(dict.fromkeys(of_topic, code))
            return codes

    def delete(self, group: str) -> ErrorCode:
        """Delete a group without members, and its committed offsets."""
        with self._locked(group) as cached:
            if cached.machine.state is not GroupState.EMPTY:
                return ErrorCode.NON_EMPTY_GROUP
            try:
                self._store.groups.delete(group)
            except InvalidConfig:
                return ErrorCode.GROUP_ID_NOT_FOUND
            cached.machine.end()
            self._drop(cached)
        return ErrorCode.NONE
