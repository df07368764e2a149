"""The state machine of a group of the consumer protocol, with its time-outs and its classic members.

While a group migrates, some members send JoinGroup, SyncGroup and Heartbeat requests of the classic protocol. The rules
of `consumer_heartbeat` determine the answers: the generation is the member's epoch, and the assignment consists of its
partitions. The answer to a Heartbeat signals a rebalance when the member must fetch or release partitions. The group
has no leader, and answers every request at once. The methods have the same names as those of `ClassicGroup`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from segmentlog.policy.reconciliation import Stage
from segmentlog.records import PartitionId
from segmentlog.server.codec.kafka_errors import ErrorCode
from segmentlog.server.groups.classic_types import JoinAnswer, JoinRequest, SyncAnswer, metadata_size_bytes
from segmentlog.server.groups.consumer_heartbeat import HeartbeatHandler
from segmentlog.server.groups.consumer_types import STATIC_LEAVE_EPOCH, ClassicProtocolState, ConsumerMember
from segmentlog.server.groups.subscriptions import encode_partitions, subscription_of


class ConsumerGroup(HeartbeatHandler):
    """A group of the consumer protocol. Not thread-safe; no call blocks."""

    # ------------------------------------------------------------ joining

    def would_add_member(self, request: JoinRequest) -> bool:
        """Return whether `join` would add a member, provided that it does not refuse the request."""
        is_known = request.member_id in self.members or request.instance_id in self._static
        is_sent_away = request.requires_known_member_id and request.instance_id is None and not request.member_id
        return not is_known and not is_sent_away

    def join(self, token: object, request: JoinRequest, now_ms: int) -> None:
        """Handle a JoinGroup request."""
        error = self._join_error(request)
        member_id = request.member_id
        if error is ErrorCode.NONE and not member_id:
            member_id = request.new_member_id
            if request.requires_known_member_id and request.instance_id is None:
                error = ErrorCode.MEMBER_ID_REQUIRED
        if error is not ErrorCode.NONE:
            self.answers.append((token, JoinAnswer(error=error, member_id=member_id)))
            return
        held_by = self.members.get(self._static.get(request.instance_id or "", member_id))
        if held_by is None:
            member = ConsumerMember(member_id, request.instance_id)
            self._add(member)
        elif held_by.id != member_id:
            member = self._replace_static_member(held_by, member_id)
        else:
            member = held_by
        self._join(member, request, now_ms, is_new=held_by is None)
        answer = JoinAnswer(
            member_id=member_id, generation=member.holding.epoch, protocol_type=self.protocol_type,
            protocol=request.protocols[0][0],
        )  # fmt: skip
        self.answers.append((token, answer))

    def _join(self, member: ConsumerMember, request: JoinRequest, now_ms: int, *, is_new: bool) -> None:
        subscription = subscription_of(request.protocols[0][1])
        assert subscription is not None
        before = (member.topics, member.regex, member.rack_id, member.classic is not None)
        topics = sorted({topic for topic in subscription.topics if request.may_see(topic)})
        member.topics, member.regex, member.matched = tuple(topics), "", ()
        member.rack_id, member.assignor = subscription.rack_id, None
        member.client_id, member.client_host = request.client_id, request.client_host
        member.rebalance_timeout_ms = request.rebalance_timeout_ms
        member.classic = ClassicProtocolState(
            request.session_timeout_ms,
            request.protocols,
            sync_deadline_ms=now_ms + max(request.rebalance_timeout_ms, 1),
        )
        self.is_changed = True
        has_changed = is_new or before != (member.topics, member.regex, member.rack_id, True)
        if self._topics_changed(now_ms, at_once=has_changed) or has_changed:
            self._start_epoch()
        owned: dict[str, list[int]] = {}
        for part in subscription.owned_partitions:
            owned.setdefault(part.topic, []).extend(part.partitions)
        self._reconcile(member, self.ids_of(owned), now_ms)
        member.deadline_ms = now_ms + request.session_timeout_ms
        self._track_deadline(member)

    def _join_error(self, request: JoinRequest) -> ErrorCode:
        settings = self._settings
        if self._is_dead:
            return ErrorCode.COORDINATOR_NOT_AVAILABLE
        if not settings.min_session_timeout_ms <= request.session_timeout_ms <= settings.max_session_timeout_ms:
            return ErrorCode.INVALID_SESSION_TIMEOUT
        known = self._static.get(request.instance_id or "", request.member_id)
        if self._is_full(known, metadata_size_bytes(request.protocols)):
            return ErrorCode.GROUP_MAX_SIZE_REACHED
        if request.protocol_type != self.protocol_type or not request.protocols:
            return ErrorCode.INCONSISTENT_GROUP_PROTOCOL
        common = {name for name, _ in request.protocols}
        for other in self.all():
            if other.classic is not None and other.id != known:
                common.intersection_update(name for name, _ in other.classic.protocols)
        if not common:
            return ErrorCode.INCONSISTENT_GROUP_PROTOCOL
        subscription = subscription_of(request.protocols[0][1])
        if subscription is None:
            return ErrorCode.INCONSISTENT_GROUP_PROTOCOL
        return self._identity_error(request, has_partitions=bool(subscription.owned_partitions))

    def _identity_error(self, request: JoinRequest, *, has_partitions: bool) -> ErrorCode:
        """Return an error if another member uses the id or instance id of the request, or the member has expired."""
        if request.instance_id is not None:
            holder = self.members.get(self._static.get(request.instance_id, ""))
            if holder is None:
                return ErrorCode.UNKNOWN_MEMBER_ID if request.member_id else ErrorCode.NONE
            if request.member_id:
                error = self._member_error(request.member_id, request.instance_id)
                return error if holder.classic else error or ErrorCode.UNKNOWN_MEMBER_ID
            is_disconnected = holder.classic is not None or holder.holding.epoch == STATIC_LEAVE_EPOCH
            return ErrorCode.NONE if is_disconnected else ErrorCode.UNRELEASED_INSTANCE_ID
        member = self.members.get(request.member_id)
        if member is not None:
            return ErrorCode.NONE if member.classic is not None else ErrorCode.UNKNOWN_MEMBER_ID
        # The server may have assigned the id a moment ago, or before the group changed its protocol. But if the client
        # reports partitions, it was a member and has expired, and other members may read these partitions now.
        return ErrorCode.UNKNOWN_MEMBER_ID if request.member_id and has_partitions else ErrorCode.NONE

    # ------------------------------------------------------------ assignment

    def sync(
        self,
        token: object,
        member_id: str,
        generation: int,
        assignments: Iterable[tuple[str, bytes]],
        now_ms: int,
        *,
        instance_id: str | None = None,
        protocol_type: str | None = None,
        protocol: str | None = None,
    ) -> None:
        """Handle a SyncGroup request. Ignore assignments of a client that still considers itself the leader."""
        error = self._request_error(member_id, instance_id, generation)
        if error is not ErrorCode.NONE:
            self.answers.append((token, SyncAnswer(error=error)))
            return
        member = self.members[member_id]
        assert member.classic is not None
        # Until the member has joined again, it uses the protocol that the classic group elected.
        offers = [name for name, _ in member.classic.protocols]
        chosen = offers[0] if protocol is None else protocol
        if protocol_type not in (None, self.protocol_type) or chosen not in offers:
            error = ErrorCode.INCONSISTENT_GROUP_PROTOCOL
        elif member.holding.epoch != self.generation and member.holding.stage is not Stage.REVOKING:
            self._expect_to_join(member, now_ms)
            error = ErrorCode.REBALANCE_IN_PROGRESS
        if error is not ErrorCode.NONE:
            self.answers.append((token, SyncAnswer(error=error)))
            return
        member.classic.sync_deadline_ms = None
        member.deadline_ms = now_ms + member.classic.session_timeout_ms
        self._track_deadline(member)
        assignment = encode_partitions(self.names_of(member.holding.assigned))
        answer = SyncAnswer(protocol_type=self.protocol_type, protocol=chosen, assignment=assignment)
        self.answers.append((token, answer))

    def _request_error(self, member_id: str, instance_id: str | None, generation: int) -> ErrorCode:
        if self._is_dead:
            return ErrorCode.COORDINATOR_NOT_AVAILABLE
        error = self._member_error(member_id, instance_id)
        if error is ErrorCode.NONE and self.members[member_id].classic is None:
            return ErrorCode.UNKNOWN_MEMBER_ID
        if error is ErrorCode.NONE and self.members[member_id].holding.epoch != generation:
            return ErrorCode.ILLEGAL_GENERATION
        return error

    def _expect_to_join(self, member: ConsumerMember, now_ms: int) -> None:
        assert member.classic is not None
        if member.classic.join_deadline_ms is None:
            member.classic.join_deadline_ms = now_ms + max(member.rebalance_timeout_ms, 1)
            self._track_deadline(member)

    # ------------------------------------------------------------ heartbeats and departures

    def heartbeat(self, member_id: str, generation: int, now_ms: int, *, instance_id: str | None = None) -> ErrorCode:
        """Handle a Heartbeat request. Return an error if the member must join again, to fetch or release partitions."""
        error = self._request_error(member_id, instance_id, generation)
        if error is not ErrorCode.NONE:
            return error
        member = self.members[member_id]
        member.deadline_ms = now_ms + self._session_ms(member)
        self._track_deadline(member)
        holding = member.holding
        lacking = member.target - holding.assigned
        if (
            holding.epoch != self.generation
            or holding.stage is Stage.REVOKING
            or (holding.stage is Stage.AWAITING and any(self._is_free_for(member, partition) for partition in lacking))
        ):
            self._expect_to_join(member, now_ms)
            return ErrorCode.REBALANCE_IN_PROGRESS
        return ErrorCode.NONE

    def may_commit(
        self, member_id: str, generation: int, now_ms: int, *, partitions: Collection[PartitionId] = (),
        instance_id: str | None = None, is_transactional: bool = False,
    ) -> ErrorCode:  # fmt: skip
        """Return NONE if offsets of these partitions may be committed for this member in this epoch, else the error.

        The epoch may be older than the member's (KIP-1251), because the answer with the new epoch may not have reached
        the member. Then the member must have held all partitions since the older epoch: no other member can have
        committed offsets of them meanwhile. Otherwise the whole request is refused, as in Kafka.
        """
        if self._is_dead:
            return ErrorCode.COORDINATOR_NOT_AVAILABLE
        if generation < 0 and not self.members:
            return ErrorCode.NONE
        if generation < 0 and not member_id and instance_id is None and is_transactional:
            return ErrorCode.NONE
        error = self._member_error(member_id, instance_id)
        if error is ErrorCode.NONE:
            member = self.members[member_id]
            epoch = member.holding.epoch
            has_held_all = generation < epoch and all(
                self._has_held_since(member, partition, generation) for partition in partitions
            )
            if generation != epoch and not has_held_all:
                return ErrorCode.STALE_MEMBER_EPOCH if member.classic is None else ErrorCode.ILLEGAL_GENERATION
        return error

    def may_fetch(self, member_id: str | None, epoch: int) -> ErrorCode:
        """Return NONE if this client may fetch committed offsets, else the error. The client need not be a member."""
        if not member_id and epoch < 0:
            return ErrorCode.NONE
        member = self.members.get(member_id or "")
        if member is None:
            return ErrorCode.UNKNOWN_MEMBER_ID
        return ErrorCode.NONE if epoch == member.holding.epoch else ErrorCode.STALE_MEMBER_EPOCH

    def leave(self, leavers: Sequence[tuple[str, str | None]], now_ms: int) -> list[tuple[str, ErrorCode]]:
        """Handle a LeaveGroup request, as `classic_group` does. By instance id, members of either protocol can
        leave."""
        results = []
        has_changed = False
        for member_id, instance_id in leavers:
            known = member_id or self._static.get(instance_id or "", "")
            error = ErrorCode.COORDINATOR_NOT_AVAILABLE if self._is_dead else self._member_error(known, instance_id)
            if error is ErrorCode.NONE and self.members[known].classic is None and member_id:
                error = ErrorCode.UNKNOWN_MEMBER_ID
            if error is ErrorCode.NONE:
                self._remove(self.members[known])
                has_changed = True
            results.append((known or member_id, error))
        if has_changed:
            self._start_reduced_epoch()
        return results

    def drop_waiting(self, token: object, now_ms: int) -> None:
        """Do nothing: no request waits in a group of this protocol."""

    # ------------------------------------------------------------ time-outs

    def next_deadline_ms(self) -> int | None:
        """Return the earliest time at which `expire` may have work; None for an empty group."""
        return self._earliest_due_ms if self.members else None

    def extend_deadlines(self, by_ms: int) -> None:
        """Extend all deadlines by a period in which the server could not handle heartbeats."""
        for member in self.all():
            member.extend_deadlines(by_ms)
        self._earliest_due_ms = min((member.due_ms for member in self.all()), default=None)

    def expire(self, now_ms: int) -> None:
        """Remove members whose session, join, sync or revocation has timed out."""
        overdue = [member for member in self.all() if now_ms >= member.due_ms]
        for member in overdue:
            self.expired_ids.append(member.id)
            self._remove(member)
        if overdue:
            self._start_reduced_epoch()
        self._earliest_due_ms = min((member.due_ms for member in self.all()), default=None)
