"""Groups in memory: loaded on first use, saved before clients are answered, expired by a timer.

Each group has a lock, which is held during a request and while its result is saved. So a client never receives an
answer that a restart would undo. One thread handles the time-outs of all groups. If a group cannot be saved, it is
dropped from memory, waiting clients get an error, and the next request loads the group from its file.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

import msgspec

from segmentlog.clock import Clock
from segmentlog.errors import GroupInUse, InvalidConfig, SegmentlogError
from segmentlog.groups.server_groups import ServerGroups
from segmentlog.server.codec.kafka_errors import ErrorCode
from segmentlog.server.groups.cached_group import AnswerWaiter, CachedGroup, GroupUnavailable
from segmentlog.server.groups.classic_group import ClassicGroup
from segmentlog.server.groups.classic_types import GroupSettings, GroupState, JoinAnswer, SyncAnswer
from segmentlog.server.groups.consumer_group import ConsumerGroup
from segmentlog.server.groups.group_config import configured
from segmentlog.server.groups.migration import GroupStateMachine, downgrade_group
from segmentlog.server.groups.subscriptions import topics_of, with_descriptions
from segmentlog.server.groups.timer_thread import TimerThread
from segmentlog.server.groups.topic_catalog import StoreCatalog
from segmentlog.storage import fork_safety

if TYPE_CHECKING:
    from segmentlog.store import LogStore

logger = logging.getLogger("segmentlog")

HEARTBEAT_FILE_MS: Final = 1_000
"""Interval at which a worker with groups renews its heartbeat file."""
_WARNING_INTERVAL_MS: Final = 10_000
"""Minimum time between two warnings about a group that refuses clients: they retry many times a second."""
_WARNED_GROUPS_MAX: Final = 1_000


class GroupManager:
    """The groups of one worker. Thread-safe."""

    def __init__(
        self,
        store: LogStore,
        clock: Clock | None = None,
        settings: GroupSettings | None = None,
        *,
        worker: int = 0,
        is_coordinator_of: Callable[[str], bool] = lambda group: True,
    ) -> None:
        self.settings = settings or GroupSettings()
        self._store = store
        self._clock = clock or Clock()
        self._is_coordinator_of = is_coordinator_of
        self._server_groups: ServerGroups = store.groups.server_groups(worker)
        self._entries: dict[str, CachedGroup] = {}
        self._configs = store.groups.configs
        self._catalog = StoreCatalog(store, self._clock)
        self._timers = TimerThread(self.run_due, "segmentlog-groups")
        self._mutex = threading.Lock()
        self._is_started = self._has_loaded_claimed_groups = self._is_closed = False
        self._heartbeat_ms = 0
        self._warned_ms: dict[str, int] = {}
        fork_safety.on_fork(self, "_discard_parent_state")

    def _discard_parent_state(self) -> None:
        """Drop all groups in a forked child: groups and connections belong to the parent."""
        self._is_closed = True
        self._entries = {}
        self._mutex = threading.Lock()
        self._timers.discard_thread()

    # ------------------------------------------------------------ groups in memory

    @contextlib.contextmanager
    def _locked(self, group: str) -> Iterator[CachedGroup]:
        """Yield a group with its lock held; load it first if necessary."""
        if not self._is_started:
            self._start()
        while True:
            if self._is_closed:
                raise GroupUnavailable(ErrorCode.COORDINATOR_NOT_AVAILABLE)
            cached = self._entries.get(group)
            if cached is None:
                with self._mutex:
                    if self._is_closed or group in self._entries:
                        continue
                    cached = self._entries[group] = CachedGroup(group, ClassicGroup(self.settings, topics_of))
                    cached.lock.acquire()  # does not wait: no other thread can have this group yet
                try:
                    self._load(cached)
                    yield cached
                finally:
                    self._drop_if_idle(cached)
                    cached.lock.release()
                return
            with cached.lock:
                if cached.is_dropped:
                    continue
                try:
                    yield cached
                finally:
                    self._drop_if_idle(cached)
                return

    def _load(self, cached: CachedGroup) -> None:
        try:
            saved = self._server_groups.load(cached.name)
            settings = self.settings_of(cached.name)
        except InvalidConfig:
            raise GroupUnavailable(ErrorCode.INVALID_GROUP_ID) from None
        except (SegmentlogError, OSError) as error:
            self._drop(cached)
            logger.error(
                "group %s: its file cannot be read: %s; clients get an error and will retry", cached.name, error
            )
            raise GroupUnavailable(ErrorCode.COORDINATOR_NOT_AVAILABLE) from error
        if saved.is_consumer:
            cached.machine = ConsumerGroup(settings, self._catalog)
        cached.machine.restore(saved, self._now_ms())
        cached.is_claimed = saved.held
        cached.logged_generation = saved.generation
        if cached.machine.members:
            logger.info(
                "group %s: %d members continue in generation %d", cached.name, len(saved.members), saved.generation
            )
        self._save_and_answer(cached)

    def settings_of(self, group: str) -> GroupSettings:
        """Return the settings of a group: the server's, overridden by the group's configuration. Raises OSError."""
        return configured(self.settings, self._configs.find(group))

    def _claim(self, cached: CachedGroup, session_timeout_ms: int, protocol_type: str) -> None:
        """Record clients as owners of the group in its file, before the first one joins. Raises `GroupInUse`."""
        saved = msgspec.structs.replace(
            cached.machine.snapshot(), session_timeout_ms=session_timeout_ms, protocol_type=protocol_type
        )
        try:
            cached.machine.raise_generation(self._server_groups.claim(cached.name, saved))
        except GroupInUse:
            raise
        except (SegmentlogError, OSError) as error:
            self._drop_failed(cached, error)
            raise GroupUnavailable(ErrorCode.COORDINATOR_NOT_AVAILABLE) from error
        cached.is_claimed = True

    def _save_and_answer(self, cached: CachedGroup) -> None:
        """Save the group if it has changed, then deliver the answers."""
        machine = cached.machine
        if isinstance(machine, ConsumerGroup) and machine.should_downgrade:
            self._downgrade(cached, machine)
            machine = cached.machine
        is_claimed = not machine.is_empty
        if machine.is_changed or is_claimed != cached.is_claimed:
            began_ms = self._now_ms()
            try:
                self._server_groups.save(cached.name, with_descriptions(machine.snapshot()))
            except (SegmentlogError, OSError) as error:
                self._drop_failed(cached, error)
                raise GroupUnavailable(ErrorCode.COORDINATOR_NOT_AVAILABLE) from error
            # Extend all deadlines, so that each member has a whole session from now on. Heartbeats that arrived during
            # the save still wait for the lock, and `_expire` may get the lock first. Without this, a save that takes
            # longer than a session would expire all members.
            if took_ms := self._now_ms() - began_ms:
                machine.extend_deadlines(took_ms)
            machine.is_changed = False
            cached.is_claimed = is_claimed
            self._log_generation(cached)
        for member in machine.expired_ids:
            logger.info("group %s: member %s has expired: it did not respond within its time-out", cached.name, member)
        machine.expired_ids.clear()
        self._deliver_answers(machine)
        self._schedule(cached)

    def _downgrade(self, cached: CachedGroup, machine: ConsumerGroup) -> None:
        cached.machine = downgrade_group(machine, self.settings, self._now_ms())
        cached.machine.answers, cached.machine.expired_ids = machine.answers, machine.expired_ids
        logger.info("group %s: uses the classic protocol from now on: only members of it remain", cached.name)

    @staticmethod
    def _log_generation(cached: CachedGroup) -> None:
        machine = cached.machine
        if machine.generation != cached.logged_generation and machine.state is not GroupState.PREPARING:
            cached.logged_generation = machine.generation
            logger.info(
                "group %s: generation %d has %d members", cached.name, machine.generation, len(machine.members),
                extra={"group": cached.name, "count": len(machine.members)},
            )  # fmt: skip

    @staticmethod
    def _deliver_answers(machine: GroupStateMachine, error: ErrorCode | None = None) -> None:
        """Deliver the pending answers; with ``error``, deliver this error instead of each answer."""
        answers, machine.answers = machine.answers, []
        for token, answer in answers:
            assert isinstance(token, AnswerWaiter)
            if error is None:
                token.set_answer(answer)
            elif isinstance(answer, JoinAnswer):
                token.set_answer(JoinAnswer(error=error, member_id=answer.member_id))
            else:
                token.set_answer(SyncAnswer(error=error))

    @contextlib.contextmanager
    def _dropping_on_error(self, cached: CachedGroup) -> Iterator[None]:
        """Drop the group if the block cannot read the topics: the block may have changed only a part of the group's
        state.
        """
        try:
            yield
        except (SegmentlogError, OSError) as error:
            self._drop_failed(cached, error, "its topics cannot be read")
            raise GroupUnavailable(ErrorCode.COORDINATOR_NOT_AVAILABLE) from error

    def _drop_failed(self, cached: CachedGroup, error: Exception, problem: str = "it cannot be saved") -> None:
        """Drop the group from memory. The next request loads it from its file."""
        logger.error("group %s: %s: %s; its waiting clients get an error and will retry", cached.name, problem, error)
        cached.machine.end()
        self._deliver_answers(cached.machine, ErrorCode.COORDINATOR_NOT_AVAILABLE)
        self._drop(cached)

    def _drop_if_idle(self, cached: CachedGroup) -> None:
        if cached.machine.is_idle and not cached.is_claimed:
            self._drop(cached)

    def _drop(self, cached: CachedGroup) -> None:
        cached.is_dropped = True
        with self._mutex:
            if self._entries.get(cached.name) is cached:
                del self._entries[cached.name]

    def _warn_refused(self, group: str, error: GroupInUse) -> None:
        now_ms = self._now_ms()
        if now_ms - self._warned_ms.get(group, -_WARNING_INTERVAL_MS) >= _WARNING_INTERVAL_MS:
            if len(self._warned_ms) >= _WARNED_GROUPS_MAX:
                self._warned_ms.clear()
            self._warned_ms[group] = now_ms
            logger.warning("the server refuses a client: %s", error)

    # ------------------------------------------------------------ time-outs

    def _now_ms(self) -> int:
        return self._clock.monotonic_ms()

    def start_sessions(self) -> None:
        """Start the sessions of all members of this worker's groups, without waiting for a request.

        After a change of the number of workers, a group may belong to another worker than before. When this worker
        loads such a group, clients remain its owners, although its members may be dead. So the worker must also expire
        the members.
        """
        try:
            self._start()
        except GroupUnavailable:  # the former process still runs: the first request starts the sessions
            pass
        except (SegmentlogError, OSError) as error:
            logger.warning("the sessions of group members cannot expire before a client sends a request: %s", error)

    def _start(self) -> None:
        with self._mutex:
            if self._is_closed:
                raise GroupUnavailable(ErrorCode.COORDINATOR_NOT_AVAILABLE)
            if self._is_started:
                return
            if not self._server_groups.lock_worker():
                # The former process with this number still runs.
                raise GroupUnavailable(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS)
            self._timers.start()
            self._is_started = True

    def _schedule(self, cached: CachedGroup) -> None:
        due_ms = cached.machine.next_deadline_ms()
        if due_ms is not None and (cached.timer_ms is None or due_ms < cached.timer_ms):
            cached.timer_ms = due_ms
            self._timers.schedule(due_ms, cached.name)

    def run_due(self) -> float | None:
        """Handle all due time-outs. Return the seconds until the next call, or None: after `TimerThread.schedule`."""
        if not self._has_loaded_claimed_groups:
            self._has_loaded_claimed_groups = True
            self._load_claimed_groups()
        while (due := self._timers.pop(self._now_ms())) is not None:
            self._expire(*due)
        next_ms = self._timers.first_ms()
        if next_ms is None:
            return None
        # A due time of a dropped group only wakes the thread without work.
        now_ms = self._now_ms()
        if not 0 <= now_ms - self._heartbeat_ms < HEARTBEAT_FILE_MS:
            self._heartbeat_ms = now_ms
            self._server_groups.write_heartbeat()
        return max(min(next_ms, self._heartbeat_ms + HEARTBEAT_FILE_MS) - now_ms, 1) / 1000

    def _load_claimed_groups(self) -> None:
        """Load the groups that clients owned when this worker stopped, so that members that do not return expire."""
        for group in self._server_groups.held_groups():
            if self._is_coordinator_of(group):
                with contextlib.suppress(GroupUnavailable), self._locked(group):
                    pass

    def _expire(self, due_ms: int, group: str) -> None:
        cached = self._entries.get(group)
        if cached is None:
            return
        with cached.lock:
            if cached.is_dropped or cached.timer_ms != due_ms:
                return
            cached.timer_ms = None
            with contextlib.suppress(GroupUnavailable):
                cached.machine.expire(self._now_ms())
                self._save_and_answer(cached)
            self._drop_if_idle(cached)

    # ------------------------------------------------------------ closing

    def close(self) -> None:
        """Answer all waiting clients with an error. Members stay in their groups; the next coordinator continues."""
        with self._mutex:
            self._is_closed = True
            entries = list(self._entries.values())
        for cached in entries:
            with cached.lock:
                cached.machine.end()
                self._deliver_answers(cached.machine, ErrorCode.COORDINATOR_NOT_AVAILABLE)
                self._drop(cached)
        self._timers.close()
        self._server_groups.close()
