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
from segmentlog.groups.server_groups import NewPosition
from segmentlog.log.producer_state import ProducerStamp
from segmentlog.records import TopicPartition
from segmentlog.server.codec.kafka_errors import ErrorCode
from segmentlog.server.groups.cached_group import Entry, Unavailable, Waiter
from segmentlog.server.groups.classic_group import Group
from segmentlog.server.groups.classic_types import JoinAnswer, JoinRequest, State, SyncAnswer
from segmentlog.server.groups.consumer_group import ConsumerGroup
from segmentlog.server.groups.consumer_types import JOINS, Beat, Heartbeat
from segmentlog.server.groups.group_manager import GroupKeeper
from segmentlog.server.groups.migration import Machine, may_upgrade, upgraded
from segmentlog.server.groups.subscriptions import CONSUMER, topics_of

if TYPE_CHECKING:
    from segmentlog.log.partition import Partition

logger = logging.getLogger("segmentlog")

_PREFIX_MAX: Final = 255
_LOOK_S: Final = 0.2
"""How often a waiting request checks whether its client is still connected."""

Appended = tuple["Partition", int, int]
"""Committed offsets in their log: the partition, the first offset, and the offset after the last one."""


def _never() -> bool:
    return False


class GroupCoordinator(GroupKeeper):
    """The groups of one worker. Thread-safe. Every method with a group name may raise `Unavailable`.

    ``worker`` is the number of the worker, which stays the same after a restart. ``coordinates`` returns whether the
    worker coordinates a group.
    """

    # ------------------------------------------------------------ requests of clients

    def join(self, group: str, request: JoinRequest, is_left: Callable[[], bool] = _never) -> JoinAnswer:
        """Join a group, and wait for the other members. Returns after the rebalance, or once ``is_left`` returns
        True."""
        if not group:
            return JoinAnswer(error=ErrorCode.INVALID_GROUP_ID, member_id=request.member_id)
        waiter = Waiter()
        with self._locked(group) as entry:
            if isinstance(entry.machine, ConsumerGroup) and entry.machine.state is State.EMPTY:
                self._turn(entry, Group(self.settings, topics_of))
            if not entry.is_held and entry.machine.would_add(request):
                try:
                    self._claim(entry, request.session_timeout_ms, request.protocol_type)
                except GroupInUse as error:
                    self._tell_once(group, error)
                    return JoinAnswer(error=ErrorCode.INCONSISTENT_GROUP_PROTOCOL, member_id=request.member_id)
            with self._or_given_up(entry):
                entry.machine.join(waiter, request, self._now_ms())
            self._settle(entry)
        self._wait(group, waiter, is_left)
        assert isinstance(waiter.answer, JoinAnswer)
        return waiter.answer

    def beat(self, group: str, request: Heartbeat) -> Beat:
        """Handle a heartbeat of the consumer protocol: a member joins, stays or leaves."""
        with self._locked(group) as entry:
            former, machine = entry.machine, entry.machine
            with self._or_given_up(entry):
                settings = self.settings_of(group)
            if isinstance(machine, Group):
                if request.epoch != JOINS:
                    # The member has expired, and the group has returned to the classic protocol or is deleted. Kafka
                    # does not ask such a member to join again either.
                    return Beat(error=ErrorCode.UNKNOWN_MEMBER_ID, message="the group has no such members")
                if not may_upgrade(machine, settings):
                    return Beat(
                        error=ErrorCode.GROUP_ID_NOT_FOUND,
                        message=f"group {group} uses the classic protocol, and its members cannot be migrated",
                    )
                with self._or_given_up(entry):
                    machine = upgraded(machine, settings, self._catalog, self._now_ms())
            if not entry.is_held and machine.would_add_by_beat(request):
                try:
                    self._claim(entry, settings.consumer_session_timeout_ms, CONSUMER)
                except GroupInUse as error:
                    self._tell_once(group, error)
                    return Beat(error=ErrorCode.GROUP_ID_NOT_FOUND, message=str(error))
                machine.raise_generation(former.generation)
            with self._or_given_up(entry):
                machine.configure(settings)
                answer = machine.beat(request, self._now_ms())
            if isinstance(former, Group) and answer.error is ErrorCode.NONE:
                if former.members:
                    logger.info("group %s: uses the consumer protocol from now on, as a member of it has joined", group)
                former.end(ErrorCode.REBALANCE_IN_PROGRESS)
                self._turn(entry, machine)
            self._settle(entry)
        return answer

    @staticmethod
    def _turn(entry: Entry, machine: Machine) -> None:
        """Replace the state machine by that of the other protocol."""
        machine.raise_generation(entry.machine.generation)
        machine.answers += entry.machine.answers
        entry.machine.answers = []
        entry.machine = machine

    def new_member_id(self, prefix: str) -> str:
        """Return a new unique member id. The prefix is cut to 255 characters, as other members receive the id."""
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
        is_left: Callable[[], bool] = _never,
    ) -> SyncAnswer:
        """Return the member's assignment. Waits until the leader has sent it, or until ``is_left`` returns True."""
        waiter = Waiter()
        with self._locked(group) as entry:
            entry.machine.sync(
                waiter, member_id, generation, assignments, self._now_ms(),
                instance_id=instance_id, protocol_type=protocol_type, protocol=protocol,
            )  # fmt: skip
            self._settle(entry)
        self._wait(group, waiter, is_left)
        assert isinstance(waiter.answer, SyncAnswer)
        return waiter.answer

    def _wait(self, group: str, waiter: Waiter, is_left: Callable[[], bool]) -> None:
        """Wait for the answer. A client that disconnects meanwhile leaves the group."""
        while not waiter.event.wait(_LOOK_S):
            if is_left():
                entry = self._entries.get(group)
                if entry is not None:
                    self._withdraw(entry, waiter)

    def _withdraw(self, entry: Entry, waiter: Waiter) -> None:
        with entry.lock:
            if entry.is_gone:  # all waiters have an answer
                return
            logger.info("group %s: a member has disconnected while it waited for the others", entry.name)
            with contextlib.suppress(Unavailable):
                entry.machine.withdraw(waiter, self._now_ms())
                self._settle(entry)
            self._drop_if_idle(entry)

    def heartbeat(self, group: str, member_id: str, generation: int, *, instance_id: str | None = None) -> ErrorCode:
        """Handle a heartbeat of the classic protocol."""
        with self._locked(group) as entry:
            error = entry.machine.heartbeat(member_id, generation, self._now_ms(), instance_id=instance_id)
            if isinstance(entry.machine, ConsumerGroup):
                self._arm(entry)  # a member that is asked to join again has a deadline
        return error

    def leave(self, group: str, leavers: Sequence[tuple[str, str | None]]) -> list[tuple[str, ErrorCode]]:
        """Remove members by their ids or instance ids. Return member id and error of each."""
        with self._locked(group) as entry:
            results = entry.machine.leave(leavers, self._now_ms())
            self._settle(entry)
        return results

    def may_fetch(self, group: str, member_id: str | None, epoch: int) -> ErrorCode:
        """Return NONE if this member may fetch committed offsets in this epoch, else the error."""
        with self._locked(group) as entry:
            machine = entry.machine
            return machine.may_fetch(member_id, epoch) if isinstance(machine, ConsumerGroup) else ErrorCode.NONE

    def commit(
        self,
        group: str,
        positions: Sequence[NewPosition],
        *,
        member_id: str = "",
        generation: int = -1,
        instance_id: str | None = None,
        stamp: ProducerStamp | None = None,
    ) -> tuple[ErrorCode, Appended | None]:
        """Append committed offsets, for a member, or for a client outside of the group. Raises what an append raises.

        Return an error, and the appended range, which the caller must sync; None if nothing was appended. ``stamp`` is
        the producer of the transaction that the offsets belong to.
        """
        with self._locked(group) as entry:
            machine = entry.machine
            error = machine.may_commit(
                member_id, generation, self._now_ms(), instance_id=instance_id, is_transactional=stamp is not None
            )
            if error is not ErrorCode.NONE or not positions:
                return error, None
            if machine.members:
                return error, self._remote.commit(group, positions, generation, member_id, stamp)
            try:
                return error, self._remote.commit_alone(group, positions, stamp)
            except GroupInUse as held:
                self._tell_once(group, held)
                return ErrorCode.UNKNOWN_MEMBER_ID, None

    # ------------------------------------------------------------ requests of tools

    @contextlib.contextmanager
    def looking_at(self, group: str) -> Iterator[Machine]:
        """Yield the group's state machine, locked: the group does not change within the block."""
        with self._locked(group) as entry:
            yield entry.machine

    def forget(self, group: str, partitions: Sequence[TopicPartition]) -> ErrorCode | dict[TopicPartition, ErrorCode]:
        """Delete committed offsets of topics that no member subscribes to. Return an error for all, or one for each."""
        groups = self._store.groups
        with self._locked(group) as entry:
            machine = entry.machine
            if machine.state is State.EMPTY:
                if group not in groups.names():
                    return ErrorCode.GROUP_ID_NOT_FOUND
                subscribed: set[str] = set()
            elif machine.protocol_type != CONSUMER:
                return ErrorCode.NON_EMPTY_GROUP
            else:
                subscribed = machine.subscribed
            codes = {}
            for topic in {tp.topic for tp in partitions}:
                some = [tp for tp in partitions if tp.topic == topic]
                code = ErrorCode.GROUP_SUBSCRIBED_TO_TOPIC
                if topic not in subscribed:
                    with contextlib.suppress(GroupNotEmpty):
                        groups.forget(group, some)
                        code = ErrorCode.NONE
                codes.update(dict.fromkeys(some, code))
            return codes

    def delete(self, group: str) -> ErrorCode:
        """Delete a group without members, and its committed offsets."""
        with self._locked(group) as entry:
            if entry.machine.state is not State.EMPTY:
                return ErrorCode.NON_EMPTY_GROUP
            try:
                self._store.groups.delete(group)
            except InvalidConfig:
                return ErrorCode.GROUP_ID_NOT_FOUND
            entry.machine.end()
            self._drop(entry)
        return ErrorCode.NONE
