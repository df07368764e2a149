"""Members of a classic group: the checks of every request, and the snapshot that `group_manager` saves.

The state transitions are in `classic_group`.
"""

from __future__ import annotations

from collections.abc import Callable

from segmentlog.groups.server_group_file import SavedGroup, SavedMember
from segmentlog.server.codec.kafka_errors import ErrorCode
from segmentlog.server.groups.classic_types import (
    ClassicMember,
    GroupSettings,
    GroupState,
    JoinAnswer,
    JoinRequest,
    SyncAnswer,
    common_protocols,
    metadata_size_bytes,
)

Answer = JoinAnswer | SyncAnswer
TopicsOf = Callable[[str, bytes], tuple[str, ...]]
"""Return the topics that a member subscribes to, from its protocol type and metadata; empty if they are unknown."""


class ClassicMembers:
    """The members of a classic group, and the member ids assigned to clients that have not joined yet."""

    def __init__(self, settings: GroupSettings, topics_of: TopicsOf = lambda protocol_type, metadata: ()) -> None:
        self.state = GroupState.EMPTY
        self.generation = 0
        self.protocol_type = ""
        self.protocol = ""
        self.leader = ""
        self.members: dict[str, ClassicMember] = {}
        self.answers: list[tuple[object, Answer]] = []
        self.is_changed = False
        self.expired_ids: list[str] = []
        """Ids of expired members, to be logged."""
        self._settings = settings
        self._topics_of = topics_of
        self._static: dict[str, str] = {}
        self._pending_ids: dict[str, int] = {}
        """Member ids assigned to clients that have not joined yet, with the time when each id expires."""
        self._pending_sync: set[str] = set()
        self._has_lost_members = False

    @property
    def is_empty(self) -> bool:
        """Return whether the group exists and has no members."""
        return self.state is GroupState.EMPTY

    @property
    def is_idle(self) -> bool:
        """Return whether the group can be dropped from memory: it has no members, and no client has got a member id."""
        return self.state in (GroupState.EMPTY, GroupState.DEAD) and not self._pending_ids

    # ------------------------------------------------------------ checks

    def _join_error(self, request: JoinRequest) -> ErrorCode:
        settings = self._settings
        if self.state is GroupState.DEAD:
            return ErrorCode.COORDINATOR_NOT_AVAILABLE
        if not settings.min_session_timeout_ms <= request.session_timeout_ms <= settings.max_session_timeout_ms:
            return ErrorCode.INVALID_SESSION_TIMEOUT
        if self._is_full(request):
            return ErrorCode.GROUP_MAX_SIZE_REACHED
        if not request.protocol_type or not request.protocols:
            return ErrorCode.INCONSISTENT_GROUP_PROTOCOL
        if self.members:
            common = common_protocols(self.members.values())
            if request.protocol_type != self.protocol_type or common.isdisjoint(name for name, _ in request.protocols):
                return ErrorCode.INCONSISTENT_GROUP_PROTOCOL
        if request.member_id and request.member_id not in self._pending_ids:
            return self._member_error(request.member_id, request.instance_id)
        return ErrorCode.NONE

    def _is_full(self, request: JoinRequest) -> bool:
        most = self._settings.max_size
        if not request.member_id and request.instance_id is None and len(self._pending_ids) >= most:
            return True
        known = self._static.get(request.instance_id or "", request.member_id)
        others_bytes = sum(
            metadata_size_bytes(member.protocols) for member in self.members.values() if member.id != known
        )
        if others_bytes + metadata_size_bytes(request.protocols) > self._settings.group_bytes:
            return True
        if self.state is GroupState.PREPARING:
            return sum(member.is_joining for member in self.members.values() if member.id != known) >= most
        return known not in self.members and len(self.members) >= most

    def _member_error(self, member_id: str, instance_id: str | None) -> ErrorCode:
        if instance_id is not None:
            known = self._static.get(instance_id)
            if known is not None and known != member_id:
                return ErrorCode.FENCED_INSTANCE_ID
            if known is None:
                return ErrorCode.UNKNOWN_MEMBER_ID
        return ErrorCode.NONE if member_id in self.members else ErrorCode.UNKNOWN_MEMBER_ID

    def _request_error(self, member_id: str, instance_id: str | None, generation: int) -> ErrorCode:
        if self.state is GroupState.DEAD:
            return ErrorCode.COORDINATOR_NOT_AVAILABLE
        error = self._member_error(member_id, instance_id)
        if error is ErrorCode.NONE and generation != self.generation:
            return ErrorCode.ILLEGAL_GENERATION
        return error

    # ------------------------------------------------------------ changing a member

    def _update_member(self, member: ClassicMember, request: JoinRequest) -> None:
        member.client_id, member.client_host = request.client_id, request.client_host
        member.session_timeout_ms = request.session_timeout_ms
        member.rebalance_timeout_ms = request.rebalance_timeout_ms
        member.protocols = request.protocols

    def _fail_waiting(self, member: ClassicMember, error: ErrorCode) -> None:
        if member.join_token is not None:
            self.answers.append((member.join_token, self._join_failure(member, error)))
        if member.sync_token is not None:
            self.answers.append((member.sync_token, SyncAnswer(error=error)))
        member.join_token = member.sync_token = None

    def _remove(self, member: ClassicMember) -> None:
        self._fail_waiting(member, ErrorCode.UNKNOWN_MEMBER_ID)
        del self.members[member.id]
        self._pending_sync.discard(member.id)
        if member.instance_id is not None:
            del self._static[member.instance_id]
        if member.id == self.leader:
            self.leader = next(iter(self.members), "")
        self._has_lost_members = True

    # ------------------------------------------------------------ answers

    def _join_answer(
        self, member: ClassicMember, *, with_members: bool, skip_assignment: bool = False, leader: str | None = None
    ) -> JoinAnswer:
        members = self.members.values() if with_members else ()
        return JoinAnswer(
            member_id=member.id, generation=self.generation, protocol_type=self.protocol_type, protocol=self.protocol,
            leader=self.leader if leader is None else leader, skip_assignment=skip_assignment,
            members=tuple((member.id, member.instance_id, member.metadata(self.protocol)) for member in members),
        )  # fmt: skip

    @staticmethod
    def _join_failure(member: ClassicMember, error: ErrorCode) -> JoinAnswer:
        return JoinAnswer(error=error, member_id=member.id)

    def topics_of(self, member: ClassicMember) -> set[str]:
        """Return the topics that a member subscribes to; empty if its metadata cannot be decoded."""
        metadata = member.metadata(self.protocol) or (member.protocols[0][1] if member.protocols else b"")
        return set(self._topics_of(self.protocol_type, metadata))

    @property
    def subscribed_topics(self) -> set[str]:
        """Return the topics that any member subscribes to."""
        return {topic for member in self.members.values() for topic in self.topics_of(member)}

    def _longest_rebalance_ms(self) -> int:
        return max((member.rebalance_timeout_ms for member in self.members.values()), default=0)

    # ------------------------------------------------------------ snapshots

    def snapshot(self) -> SavedGroup:
        """Return the state to save: all that clients know, or are about to receive."""
        known = [member for member in self.members.values() if not member.is_new]
        return SavedGroup(
            held=bool(self.members), state=self.state.value, generation=self.generation,
            protocol_type=self.protocol_type, protocol=self.protocol,
            leader=self.leader if any(member.id == self.leader for member in known) else "",
            session_timeout_ms=max((member.session_timeout_ms for member in self.members.values()), default=0),
            members=tuple(
                SavedMember(
                    member.id, member.instance_id, member.client_id, member.client_host, member.session_timeout_ms,
                    member.rebalance_timeout_ms, member.protocols, member.assignment,
                )
                for member in known
            ),
        )  # fmt: skip

    def raise_generation(self, generation: int) -> None:
        """Raise the group's generation to this number, which the group had under another coordinator or protocol. Never
        lower it.
        """
        self.generation = max(self.generation, generation)

    def end(self, error: ErrorCode = ErrorCode.COORDINATOR_NOT_AVAILABLE) -> None:
        """Mark the group as dead, because it was deleted or has moved. Waiting requests are answered with ``error``."""
        for member in self.members.values():
            self._fail_waiting(member, error)
        self.members, self.state = {}, GroupState.DEAD
        self._static, self._pending_ids, self._pending_sync = {}, {}, set()
