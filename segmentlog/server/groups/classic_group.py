"""The state machine of a group of the classic protocol: requests and time go in, answers come out.

    Empty ──join──▶ PreparingRebalance ──all have joined, or time-out──▶ CompletingRebalance
                      ▲    │ no member remains: Empty                      │ the leader has assigned
                      └────┴─────── a member joins, leaves or changes ─── Stable

Each waiting caller passes a token. The group answers each token once, by an entry in `ClassicGroup.answers`, during the
same call or a later one. The caller must call `expire` at `next_deadline_ms` at the latest. If `is_changed` is set
after a call, the caller must save `snapshot` before it sends the answers. `restore` continues from a snapshot. It
contains the members that have received a generation, and omits members that are still joining for the first time.

The rules are those of Kafka's `GroupCoordinator` (4.x: `ClassicGroup`), with KIP-345 (static members), KIP-394 (member
ids before membership) and KIP-814 (a leader that may skip its assignment). There are two differences:

- A static member that returns with other topics starts a rebalance. In Kafka it does so only if another protocol
  is elected, and until the next rebalance the member gets no partitions of the new topics.
- A static member that was away during a rebalance expires only by its session time-out. In Kafka it also expires if it
  does not ask for its assignment in time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from segmentlog.groups.server_group_file import SavedGroup
from segmentlog.records import PartitionId
from segmentlog.server.codec.kafka_errors import ErrorCode
from segmentlog.server.groups.classic_types import (
    NEW_MEMBER_JOIN_TIMEOUT_MS,
    ClassicMember,
    GroupSettings,
    GroupState,
    JoinAnswer,
    JoinRequest,
    SyncAnswer,
    elect_protocol,
)
from segmentlog.server.groups.members import ClassicMembers, TopicsOf


class ClassicGroup(ClassicMembers):
    """A group of the classic protocol. Not thread-safe; no call blocks."""

    def __init__(self, settings: GroupSettings, topics_of: TopicsOf = lambda protocol_type, metadata: ()) -> None:
        super().__init__(settings, topics_of)
        self._join_deadline_ms = 0
        self._is_initial = self._has_new_members = False
        self._remaining_delay_ms = 0
        self._sync_deadline_ms = 0

    # ------------------------------------------------------------ joining

    def would_add_member(self, request: JoinRequest) -> bool:
        """Return whether `join` would add a member, provided that it does not refuse the request."""
        if self._join_error(request) is not ErrorCode.NONE:
            return False
        if request.member_id:
            return request.member_id in self._pending_ids
        return request.instance_id not in self._static and not (
            request.requires_known_member_id and request.instance_id is None
        )

    def join(self, token: object, request: JoinRequest, now_ms: int) -> None:
        """Handle a JoinGroup request."""
        error = self._join_error(request)
        if error is not ErrorCode.NONE:
            self.answers.append((token, JoinAnswer(error=error, member_id=request.member_id)))
        elif request.member_id in self._pending_ids:
            del self._pending_ids[request.member_id]
            self._add(token, request, request.member_id, now_ms)
        elif request.member_id:
            self._rejoin(token, request, now_ms)
        elif request.instance_id in self._static:
            self._replace_static_member(token, request, now_ms)
        elif request.requires_known_member_id and request.instance_id is None:
            self._pending_ids[request.new_member_id] = now_ms + request.session_timeout_ms
            answer = JoinAnswer(error=ErrorCode.MEMBER_ID_REQUIRED, member_id=request.new_member_id)
            self.answers.append((token, answer))
        else:
            self._add(token, request, request.new_member_id, now_ms)

    def _add(self, token: object, request: JoinRequest, member_id: str, now_ms: int) -> None:
        if not self.members:
            self.protocol_type, self.leader = request.protocol_type, member_id
        self.members[member_id] = ClassicMember(
            member_id,
            request.instance_id,
            request.client_id,
            request.client_host,
            request.session_timeout_ms,
            request.rebalance_timeout_ms,
            request.protocols,
            now_ms + NEW_MEMBER_JOIN_TIMEOUT_MS,
            is_new=True,
            join_token=token,
        )
        if request.instance_id is not None:
            self._static[request.instance_id] = member_id
        self._has_new_members = True
        self._prepare_rebalance(now_ms)

    def _rejoin(self, token: object, request: JoinRequest, now_ms: int) -> None:
        member = self.members[request.member_id]
        is_same = member.protocols == request.protocols
        leads = member.id == self.leader
        if is_same and (self.state is GroupState.COMPLETING or (self.state is GroupState.STABLE and not leads)):
            # The member's last answer was lost, or it asks for its assignment. The other members are not affected.
            member.deadline_ms = now_ms + member.session_timeout_ms
            told = self.state is GroupState.COMPLETING and leads
            self.answers.append((token, self._join_answer(member, with_members=told)))
            return
        self._update_member(member, request)
        self._wait_to_join(member, token)
        self._prepare_rebalance(now_ms)

    def _replace_static_member(self, token: object, request: JoinRequest, now_ms: int) -> None:
        """Change the process of a static member. The new process has another member id, and keeps the assignment."""
        assert request.instance_id is not None
        old = self.members[self._static[request.instance_id]]
        self._fail_waiting(old, ErrorCode.FENCED_INSTANCE_ID)
        topics = self.topics_of(old)
        leads = old.id == self.leader
        member = ClassicMember(
            request.new_member_id,
            old.instance_id,
            "",
            "",
            0,
            0,
            (),
            now_ms + (NEW_MEMBER_JOIN_TIMEOUT_MS if old.is_new else request.session_timeout_ms),
            old.assignment,
            old.is_new,
        )
        self._update_member(member, request)
        self.members = {
            known.id: known for known in (member if other is old else other for other in self.members.values())
        }
        self._static[request.instance_id] = member.id
        if old.id in self._pending_sync:
            self._pending_sync.discard(old.id)
            self._pending_sync.add(member.id)
        if leads:
            self.leader = member.id
        protocol = elect_protocol(self.members.values())
        if self.state is GroupState.STABLE and protocol == self.protocol and self.topics_of(member) == topics:
            self.is_changed = True
            skips = leads and request.supports_skipping_assignment
            answer = self._join_answer(member, with_members=skips, skip_assignment=skips)
            if leads and not skips:
                # An older client that sees itself as leader would compute an assignment. It does not if the answer
                # names its former id as the leader.
                answer = self._join_answer(member, with_members=False, leader=old.id)
            self.answers.append((token, answer))
            return
        self._wait_to_join(member, token)
        self._prepare_rebalance(now_ms)

    def _wait_to_join(self, member: ClassicMember, token: object) -> None:
        if member.join_token is not None:  # a connection that the client has abandoned
            self.answers.append((member.join_token, self._join_failure(member, ErrorCode.REBALANCE_IN_PROGRESS)))
        member.join_token = token

    # ------------------------------------------------------------ rebalance: all members join

    def _prepare_rebalance(self, now_ms: int) -> None:
        if self.state is GroupState.PREPARING:
            self._complete_join_if_ready(now_ms)
            return
        if self.state is GroupState.COMPLETING:
            for member in self.members.values():
                member.assignment = b""
                self._answer_sync(member, SyncAnswer(error=ErrorCode.REBALANCE_IN_PROGRESS), now_ms)
        self._is_initial = self.state is GroupState.EMPTY
        self.state = GroupState.PREPARING
        self._pending_sync.clear()
        timeout_ms = self._longest_rebalance_ms()
        if not self._is_initial:
            self._join_deadline_ms = now_ms + timeout_ms
            self._complete_join_if_ready(now_ms)
            return
        self._has_new_members = False
        delay_ms = min(self._settings.initial_rebalance_delay_ms, timeout_ms)
        self._remaining_delay_ms = timeout_ms - delay_ms
        self._join_deadline_ms = now_ms + delay_ms
        if not delay_ms:
            self._complete_join(now_ms)

    def _complete_join_if_ready(self, now_ms: int) -> None:
        """Complete the join phase before its time-out if every expected member has joined."""
        waits = self._is_initial or self._pending_ids or not all(other.is_joining for other in self.members.values())
        if not waits or not self.members:
            self._complete_join(now_ms)

    def _handle_join_timeout(self, now_ms: int) -> None:
        delay_ms = min(self._settings.initial_rebalance_delay_ms, self._remaining_delay_ms)
        if self._is_initial and self._has_new_members and delay_ms:
            self._has_new_members = False
            self._remaining_delay_ms -= delay_ms
            self._join_deadline_ms = now_ms + delay_ms
        else:
            self._complete_join(now_ms)

    def _complete_join(self, now_ms: int) -> None:
        """Start the next generation with the members that have joined, and static members that are away."""
        for member in [other for other in self.members.values() if not other.is_joining and other.instance_id is None]:
            self.expired_ids.append(member.id)
            self._remove(member)
        joined = [member for member in self.members.values() if member.is_joining]
        if self.members and not joined:
            self._join_deadline_ms = now_ms + max(self._longest_rebalance_ms(), 1)
            return
        self.generation += 1
        self.is_changed = True
        self._is_initial = False
        if not joined:
            self.state, self.protocol, self.leader = GroupState.EMPTY, "", ""
            return
        if not self.members[self.leader].is_joining:
            self.leader = joined[0].id
        self.protocol = elect_protocol(self.members.values())
        self.state = GroupState.COMPLETING
        self._pending_sync = {member.id for member in joined}
        self._sync_deadline_ms = now_ms + max(self._longest_rebalance_ms(), 1)
        for member in self.members.values():
            member.assignment = b""
        for member in joined:
            answer = self._join_answer(member, with_members=member.id == self.leader)
            self.answers.append((member.join_token, answer))
            member.join_token, member.is_new = None, False
            member.deadline_ms = now_ms + member.session_timeout_ms

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
        """Handle a SyncGroup request: a member asks for its assignment; the leader's request contains all
        assignments."""
        error = self._request_error(member_id, instance_id, generation)
        if error is ErrorCode.NONE and (
            (protocol_type is not None and protocol_type != self.protocol_type)
            or (protocol is not None and protocol != self.protocol)
        ):
            error = ErrorCode.INCONSISTENT_GROUP_PROTOCOL
        if error is ErrorCode.NONE and self.state is GroupState.PREPARING:
            error = ErrorCode.REBALANCE_IN_PROGRESS
        given = dict(assignments)
        if error is ErrorCode.NONE and sum(map(len, given.values())) > self._settings.group_bytes:
            error = ErrorCode.INVALID_REQUEST
        if error is not ErrorCode.NONE:
            self.answers.append((token, SyncAnswer(error=error)))
            return
        member = self.members[member_id]
        self._pending_sync.discard(member_id)
        if member.sync_token is not None:  # a connection that the client has abandoned
            self.answers.append((member.sync_token, SyncAnswer(error=ErrorCode.REBALANCE_IN_PROGRESS)))
        member.sync_token = token
        if self.state is GroupState.COMPLETING:
            if member_id != self.leader:
                return
            for other in self.members.values():
                other.assignment = given.get(other.id, b"")
            self.state = GroupState.STABLE
            self.is_changed = True
        for other in self.members.values():
            answer = SyncAnswer(protocol_type=self.protocol_type, protocol=self.protocol, assignment=other.assignment)
            self._answer_sync(other, answer, now_ms)

    def _answer_sync(self, member: ClassicMember, answer: SyncAnswer, now_ms: int) -> None:
        if member.sync_token is not None:
            self.answers.append((member.sync_token, answer))
            member.sync_token = None
            member.deadline_ms = now_ms + member.session_timeout_ms

    # ------------------------------------------------------------ heartbeats and departures

    def heartbeat(self, member_id: str, generation: int, now_ms: int, *, instance_id: str | None = None) -> ErrorCode:
        """Handle a Heartbeat request."""
        error = self._request_error(member_id, instance_id, generation)
        if error is ErrorCode.NONE:
            self._extend_session(member_id, now_ms)
            if self.state is GroupState.PREPARING:
                return ErrorCode.REBALANCE_IN_PROGRESS
        return error

    def _extend_session(self, member_id: str, now_ms: int) -> None:
        member = self.members[member_id]
        if not member.is_new:
            member.deadline_ms = now_ms + member.session_timeout_ms

    def may_commit(
        self, member_id: str, generation: int, now_ms: int, *, partitions: Collection[PartitionId] = (),
        instance_id: str | None = None, is_transactional: bool = False,
    ) -> ErrorCode:  # fmt: skip
        """Return NONE if offsets may be committed for this member, else the error. Extends the member's session.

        Ignores ``partitions``: each generation assigns all partitions again.
        """
        if self.state is GroupState.DEAD:
            return ErrorCode.COORDINATOR_NOT_AVAILABLE
        if generation < 0 and not member_id and instance_id is None:
            # Not a member, but a tool, or a consumer with manually assigned partitions.
            may = is_transactional or self.state is GroupState.EMPTY
            return ErrorCode.NONE if may else ErrorCode.UNKNOWN_MEMBER_ID
        if generation < 0 and self.state is GroupState.EMPTY:
            return ErrorCode.NONE
        error = self._request_error(member_id, instance_id, generation)
        if error is ErrorCode.NONE:
            self._extend_session(member_id, now_ms)
            if self.state is GroupState.COMPLETING and not is_transactional:
                return ErrorCode.REBALANCE_IN_PROGRESS
        return error

    def leave(self, leavers: Sequence[tuple[str, str | None]], now_ms: int) -> list[tuple[str, ErrorCode]]:
        """Handle a LeaveGroup request: pairs of member id and instance id.

        If a member id is empty, remove the member with the instance id. Return member id and error of each pair.
        """
        results = []
        for member_id, instance_id in leavers:
            known = member_id or self._static.get(instance_id or "", "")
            error = ErrorCode.NONE
            if self.state is GroupState.DEAD:
                error = ErrorCode.COORDINATOR_NOT_AVAILABLE
            elif known in self._pending_ids and instance_id is None:
                del self._pending_ids[known]
            else:
                error = self._member_error(known, instance_id)
                if error is ErrorCode.NONE:
                    # Save the group: otherwise a coordinator that restarts would wait for the removed member.
                    self.is_changed |= not self.members[known].is_new
                    self._remove(self.members[known])
            results.append((known or member_id, error))
        self._rebalance_if_reduced(now_ms)
        return results

    def drop_waiting(self, token: object, now_ms: int) -> None:
        """Remove the member whose request waits with this token, because its connection was lost.

        A static member stays in the group: it may return until its session expires.
        """
        for member in self.members.copy().values():
            if token not in (member.join_token, member.sync_token):
                continue
            if member.instance_id is None or member.is_new:
                self.is_changed |= not member.is_new
                self._remove(member)
            else:
                self._fail_waiting(member, ErrorCode.REBALANCE_IN_PROGRESS)
                member.deadline_ms = now_ms + member.session_timeout_ms
        self._rebalance_if_reduced(now_ms)

    def _rebalance_if_reduced(self, now_ms: int) -> None:
        """Start a rebalance after members were removed. If a rebalance is running, complete its join phase once every
        expected member has joined.
        """
        has_lost_members, self._has_lost_members = self._has_lost_members, False
        if self.state is GroupState.PREPARING:
            self._complete_join_if_ready(now_ms)
        elif has_lost_members and self.state in (GroupState.STABLE, GroupState.COMPLETING):
            self._prepare_rebalance(now_ms)

    # ------------------------------------------------------------ time-outs

    def next_deadline_ms(self) -> int | None:
        """Return the time at which `expire` must be called next, or None; `extend_deadlines` changes this time."""
        deadlines = [member.deadline_ms for member in self.members.values() if not member.is_waiting]
        deadlines.extend(self._pending_ids.values())
        if self.state is GroupState.PREPARING:
            deadlines.append(self._join_deadline_ms)
        if self._pending_sync:
            deadlines.append(self._sync_deadline_ms)
        return min(deadlines, default=None)

    def extend_deadlines(self, by_ms: int) -> None:
        """Extend all deadlines by a period in which the server could not handle heartbeats."""
        for member in self.members.values():
            member.deadline_ms += by_ms
        self._pending_ids = {promised: until_ms + by_ms for promised, until_ms in self._pending_ids.items()}
        self._join_deadline_ms += by_ms
        self._sync_deadline_ms += by_ms

    def expire(self, now_ms: int) -> None:
        """Remove members whose session or join has timed out, and complete phases that have timed out."""
        for promised in [one for one, until_ms in self._pending_ids.items() if now_ms >= until_ms]:
            del self._pending_ids[promised]
        overdue = [other for other in self.members.values() if not other.is_waiting and now_ms >= other.deadline_ms]
        if self._pending_sync and now_ms >= self._sync_deadline_ms:
            overdue += [self.members[other] for other in self._pending_sync if self.members[other] not in overdue]
        for member in overdue:
            self.expired_ids.append(member.id)
            self._remove(member)
        self._rebalance_if_reduced(now_ms)
        if self.state is GroupState.PREPARING and now_ms >= self._join_deadline_ms:
            self._handle_join_timeout(now_ms)

    # ------------------------------------------------------------ restart

    def restore(self, saved: SavedGroup, now_ms: int) -> None:
        """Continue from a snapshot, in a new group. All sessions start again; no member has to rejoin."""
        self.generation = saved.generation
        self.protocol_type, self.protocol = saved.protocol_type, saved.protocol
        for saved_member in saved.members:
            self.members[saved_member.id] = ClassicMember(
                saved_member.id,
                saved_member.instance_id,
                saved_member.client_id,
                saved_member.client_host,
                saved_member.session_timeout_ms,
                saved_member.rebalance_timeout_ms,
                saved_member.protocols,
                now_ms + saved_member.session_timeout_ms,
                saved_member.assignment,
            )
            if saved_member.instance_id is not None:
                self._static[saved_member.instance_id] = saved_member.id
        if not self.members:
            return
        self.leader = saved.leader if saved.leader in self.members else next(iter(self.members))
        self.state = GroupState(saved.state)
        if self.state is GroupState.PREPARING:
            self._join_deadline_ms = now_ms + max(self._longest_rebalance_ms(), 1)
        elif self.state is GroupState.COMPLETING:
            self._pending_sync = set(self.members.copy())
            self._sync_deadline_ms = now_ms + max(self._longest_rebalance_ms(), 1)
