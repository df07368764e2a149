"""Handles ConsumerGroupHeartbeat: members join, reconcile their partitions, and leave.

Every request is answered at once; no call waits. When a member's heartbeat arrives, `segmentlog.policy.reconciliation`
computes which partitions it must release and which it gets. The rules are those of KIP-848 as Kafka 4.x implements
them, with two differences:

- The target assignment is computed together with the epoch, so a group never has the state "Assigning".
- At a member's heartbeat, the group itself looks up the topics that match the member's regular expression, among the
  topics that the member may see.
"""

from __future__ import annotations

from segmentlog.policy.reconciliation import Holding, Stage, reconcile
from segmentlog.policy.topic_pattern import BadPattern
from segmentlog.server.codec.kafka_errors import ErrorCode
from segmentlog.server.groups.consumer_members import ConsumerMembers
from segmentlog.server.groups.consumer_types import (
    ASSIGNORS,
    JOIN_EPOCH,
    LEAVE_EPOCH,
    STATIC_LEAVE_EPOCH,
    ConsumerMember,
    HeartbeatAnswer,
    HeartbeatFields,
    Partitions,
    by_topic,
)


class HeartbeatRefused(Exception):
    """A heartbeat that is rejected and changes nothing."""

    def __init__(self, error: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.error = error


class HeartbeatHandler(ConsumerMembers):
    """Part of a consumer group that handles ConsumerGroupHeartbeat requests; the base of `ConsumerGroup`."""

    def consumer_heartbeat(self, request: HeartbeatFields, now_ms: int) -> HeartbeatAnswer:
        """Handle a ConsumerGroupHeartbeat request. May raise the errors of the catalog: the caller must
        then reload the group."""
        if self._is_dead:
            return HeartbeatAnswer(error=ErrorCode.COORDINATOR_NOT_AVAILABLE, member_id=request.member_id)
        try:
            if request.epoch in (LEAVE_EPOCH, STATIC_LEAVE_EPOCH):
                return self._handle_leave(request)
            return self._handle_heartbeat(request, now_ms)
        except HeartbeatRefused as refused:
            return HeartbeatAnswer(error=refused.error, message=str(refused), member_id=request.member_id)

    def would_add_consumer(self, request: HeartbeatFields) -> bool:
        """Return whether `consumer_heartbeat` would add a member, provided that it does not refuse the request."""
        is_known = request.member_id in self.members or request.instance_id in self._static
        return request.epoch == JOIN_EPOCH and not is_known

    def _handle_heartbeat(self, request: HeartbeatFields, now_ms: int) -> HeartbeatAnswer:
        matched = self._check_request(request)
        known = self._find_member(request)
        is_new = known is None
        if known is None:
            member = ConsumerMember(request.member_id, request.instance_id)
            self._add(member)
        elif request.epoch == JOIN_EPOCH and known.holding.epoch == STATIC_LEAVE_EPOCH:
            member = self._replace_static_member(known, request.member_id)
        else:
            member = known
        has_changed = self._update_member(member, request, matched) or is_new
        if self._topics_changed(now_ms, at_once=has_changed) or has_changed:
            self._start_epoch()
        before = member.holding
        owned = request.owned if request.epoch != JOIN_EPOCH else frozenset()
        self._reconcile(member, owned, now_ms)
        member.deadline_ms = now_ms + self._settings.consumer_session_timeout_ms
        self._track_deadline(member)
        is_assignment_sent = (
            request.epoch in (JOIN_EPOCH, before.previous_epoch)  # the last answer may have been lost
            or request.is_full
            or member.holding.assigned != before.assigned
        )
        return HeartbeatAnswer(
            member_id=member.id,
            epoch=member.holding.epoch,
            heartbeat_ms=self._settings.consumer_heartbeat_interval_ms,
            assigned=by_topic(member.holding.assigned) if is_assignment_sent else None,
        )

    def _reconcile(self, member: ConsumerMember, owned: Partitions | None, now_ms: int) -> None:
        before = member.holding
        self._set_holding(
            member,
            reconcile(
                before, member.target, self.generation, owned, lambda partition: self._is_free_for(member, partition)
            ),
        )
        after = member.holding
        if after.stage is not Stage.REVOKING or member.classic is not None:
            member.revoked_by_ms = None
        elif before.stage is not Stage.REVOKING or after.epoch != before.epoch:
            member.revoked_by_ms = now_ms + member.rebalance_timeout_ms

    # ------------------------------------------------------------ checks

    def _check_request(self, request: HeartbeatFields) -> tuple[str, ...]:
        """Return the topics that the member's expression matches. Raises `HeartbeatRefused`."""
        if request.assignor is not None and request.assignor not in ASSIGNORS:
            raise HeartbeatRefused(
                ErrorCode.UNSUPPORTED_ASSIGNOR,
                f"assignor {request.assignor!r:.100} does not exist; choose one of {', '.join(ASSIGNORS)}",
            )
        known = self.members.get(self._static.get(request.instance_id or "", request.member_id))
        size_bytes = sum(map(len, (*(request.topics or ()), request.regex or "", request.rack_id or "")))
        if (size_bytes or known is None) and self._is_full(known.id if known else "", size_bytes):
            raise HeartbeatRefused(ErrorCode.GROUP_MAX_SIZE_REACHED, "the group has the maximum number of members")
        regex = request.regex
        if regex is None and known is not None and request.epoch != JOIN_EPOCH:
            regex = known.regex
        if not regex:
            return ()
        try:
            return tuple(name for name in self._matching(regex) if request.may_see(name))
        except BadPattern as error:
            raise HeartbeatRefused(
                ErrorCode.INVALID_REGULAR_EXPRESSION, f"{regex!r:.100} is not a valid expression: {error}"
            ) from None

    def _find_member(self, request: HeartbeatFields) -> ConsumerMember | None:
        """Return the member that sent the request, or None if it is new. Raises `HeartbeatRefused`."""
        member = self.members.get(request.member_id)
        if request.instance_id is not None:
            holder = self.members.get(self._static.get(request.instance_id, ""))
            if request.epoch == JOIN_EPOCH and holder is not member:
                if holder is None:
                    raise HeartbeatRefused(ErrorCode.FENCED_INSTANCE_ID, "the member has joined without an instance id")
                if holder.holding.epoch != STATIC_LEAVE_EPOCH or member is not None:
                    raise HeartbeatRefused(
                        ErrorCode.UNRELEASED_INSTANCE_ID, f"member {holder.id} still uses this instance id"
                    )
                return holder
            if request.epoch != JOIN_EPOCH and holder is not None and holder is not member:
                raise HeartbeatRefused(ErrorCode.FENCED_INSTANCE_ID, f"member {holder.id} uses this instance id now")
            member = holder
        if (member is None and request.epoch != JOIN_EPOCH) or (member is not None and member.classic is not None):
            raise HeartbeatRefused(ErrorCode.UNKNOWN_MEMBER_ID, f"{request.member_id} is not a member of the group")
        if member is not None and request.epoch != JOIN_EPOCH:
            self._check_epoch(member.holding, request)
        return member

    @staticmethod
    def _check_epoch(holding: Holding, request: HeartbeatFields) -> None:
        if request.epoch == holding.epoch:
            return
        # A member that missed the last answer repeats its former epoch and owns its former partitions or fewer. No
        # other member has got any of them since, so the request is safe.
        has_missed_it = request.epoch == holding.previous_epoch and request.epoch < holding.epoch
        if not has_missed_it or request.owned is None or not request.owned <= holding.held:
            raise HeartbeatRefused(
                ErrorCode.FENCED_MEMBER_EPOCH,
                f"the member is in epoch {holding.epoch}, not {request.epoch}; it must join again",
            )

    # ------------------------------------------------------------ subscriptions

    def _update_member(self, member: ConsumerMember, request: HeartbeatFields, matched: tuple[str, ...]) -> bool:
        """Store what the member reports. Return whether the report can change the target assignment."""
        before = (member.topics, member.regex, member.matched, member.assignor, member.rack_id)
        client_before = (member.client_id, member.client_host, member.rebalance_timeout_ms)
        is_joining = request.epoch == JOIN_EPOCH
        if request.topics is not None or is_joining:
            member.topics = tuple(sorted(set(request.topics or ())))
        if request.regex is not None or is_joining:
            member.regex = request.regex or ""
        member.matched = tuple(sorted(matched))
        if request.assignor is not None or is_joining:
            member.assignor = request.assignor
        if request.rack_id is not None or is_joining:
            member.rack_id = request.rack_id
        if request.rebalance_timeout_ms >= 0:
            member.rebalance_timeout_ms = request.rebalance_timeout_ms
        member.client_id, member.client_host = request.client_id, request.client_host
        has_changed = before != (member.topics, member.regex, member.matched, member.assignor, member.rack_id)
        client = (member.client_id, member.client_host, member.rebalance_timeout_ms)
        self.is_changed |= has_changed or client != client_before
        return has_changed

    # ------------------------------------------------------------ leaving

    def _handle_leave(self, request: HeartbeatFields) -> HeartbeatAnswer:
        error = self._member_error(request.member_id, request.instance_id)
        if error is not ErrorCode.NONE or self.members[request.member_id].classic is not None:
            raise HeartbeatRefused(
                error or ErrorCode.UNKNOWN_MEMBER_ID,
                f"{request.member_id} is not a member of the group, or another member uses its instance id",
            )
        member = self.members[request.member_id]
        if request.epoch == STATIC_LEAVE_EPOCH and member.instance_id is not None:
            # The static member will join again, maybe under another id, and will then keep its partitions. It has
            # released the partitions that it had to revoke.
            self._set_holding(
                member,
                Holding(epoch=STATIC_LEAVE_EPOCH, previous_epoch=STATIC_LEAVE_EPOCH, assigned=member.holding.assigned),
            )
            member.revoked_by_ms = None
        else:
            self._remove(member)
            self._start_reduced_epoch()
        return HeartbeatAnswer(member_id=request.member_id, epoch=request.epoch)

    def _start_reduced_epoch(self) -> None:
        """Start an epoch after members have been removed."""
        wanted = self.subscribed_topics
        self._shapes = {name: shape for name, shape in self._shapes.items() if name in wanted}
        if not self.should_downgrade:  # classic members would not know an epoch that starts just before the downgrade
            self._start_epoch()
