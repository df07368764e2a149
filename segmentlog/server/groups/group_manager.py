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
from segmentlog.groups.server_groups import RemoteGroups
from segmentlog.server.codec.kafka_errors import ErrorCode
from segmentlog.server.groups.cached_group import Entry, Unavailable, Waiter
from segmentlog.server.groups.classic_group import Group
from segmentlog.server.groups.classic_types import GroupSettings, JoinAnswer, State, SyncAnswer
from segmentlog.server.groups.consumer_group import ConsumerGroup
from segmentlog.server.groups.group_config import configured
from segmentlog.server.groups.migration import Machine, downgraded
from segmentlog.server.groups.subscriptions import topics_of, with_descriptions
from segmentlog.server.groups.timer_thread import Deadlines
from segmentlog.server.groups.topic_catalog import StoreCatalog
from segmentlog.storage import fork_safety

if TYPE_CHECKING:
    from segmentlog.store import LogStore

logger = logging.getLogger("segmentlog")

BEAT_MS: Final = 1_000
"""How often a worker that holds groups renews its heartbeat file."""
_TELL_EVERY_MS: Final = 10_000
"""How often a warning is logged for a group that refuses clients, which retry many times a second."""
_TOLD_MAX: Final = 1_000


class GroupKeeper:
    """The groups of one worker. Thread-safe."""

    def __init__(
        self,
        store: LogStore,
        clock: Clock | None = None,
        settings: GroupSettings | None = None,
        *,
        worker: int = 0,
        coordinates: Callable[[str], bool] = lambda group: True,
    ) -> None:
        self.settings = settings or GroupSettings()
        self._store = store
        self._clock = clock or Clock()
        self._coordinates = coordinates
        self._remote: RemoteGroups = store.groups.remote(worker)
        self._entries: dict[str, Entry] = {}
        self._configs = store.groups.configs
        self._catalog = StoreCatalog(store, self._clock)
        self._deadlines = Deadlines(self.tick, "segmentlog-groups")
        self._mutex = threading.Lock()
        self._has_begun = self._has_looked = self._is_closed = False
        self._beaten_ms = 0
        self._told_ms: dict[str, int] = {}
        fork_safety.on_fork(self, "_forget_parent")

    def _forget_parent(self) -> None:
        """Drop all groups in a forked child: groups and connections belong to the parent."""
        self._is_closed = True
        self._entries = {}
        self._mutex = threading.Lock()
        self._deadlines.forget_thread()

    # ------------------------------------------------------------ groups in memory

    @contextlib.contextmanager
    def _locked(self, group: str) -> Iterator[Entry]:
        """Yield a group with its lock held; load it first if necessary."""
        if not self._has_begun:
            self._begin()
        while True:
            if self._is_closed:
                raise Unavailable(ErrorCode.COORDINATOR_NOT_AVAILABLE)
            entry = self._entries.get(group)
            if entry is None:
                with self._mutex:
                    if self._is_closed or group in self._entries:
                        continue
                    entry = self._entries[group] = Entry(group, Group(self.settings, topics_of))
                    entry.lock.acquire()  # never blocks: no other thread can see the entry before the mutex is released
                try:
                    self._load(entry)
                    yield entry
                finally:
                    self._drop_if_idle(entry)
                    entry.lock.release()
                return
            with entry.lock:
                if entry.is_gone:
                    continue
                try:
                    yield entry
                finally:
                    self._drop_if_idle(entry)
                return

    def _load(self, entry: Entry) -> None:
        try:
            saved = self._remote.load(entry.name)
            settings = self.settings_of(entry.name)
        except InvalidConfig:
            raise Unavailable(ErrorCode.INVALID_GROUP_ID) from None
        except (SegmentlogError, OSError) as error:
            self._drop(entry)
            logger.error(
                "group %s: its file cannot be read: %s; clients get an error and will retry", entry.name, error
            )
            raise Unavailable(ErrorCode.COORDINATOR_NOT_AVAILABLE) from error
        if saved.is_consumer:
            entry.machine = ConsumerGroup(settings, self._catalog)
        entry.machine.restore(saved, self._now_ms())
        entry.is_held = saved.held
        entry.told_generation = saved.generation
        if entry.machine.members:
            logger.info(
                "group %s: %d members continue in generation %d", entry.name, len(saved.members), saved.generation
            )
        self._settle(entry)

    def settings_of(self, group: str) -> GroupSettings:
        """Return the settings of a group: the server's, overridden by the group's configuration. Raises OSError."""
        return configured(self.settings, self._configs.find(group))

    def _claim(self, entry: Entry, session_timeout_ms: int, protocol_type: str) -> None:
        """Record clients as owners of the group in its file, before the first one joins. Raises `GroupInUse`."""
        saved = msgspec.structs.replace(
            entry.machine.snapshot(), session_timeout_ms=session_timeout_ms, protocol_type=protocol_type
        )
        try:
            entry.machine.raise_generation(self._remote.claim(entry.name, saved))
        except GroupInUse:
            raise
        except (SegmentlogError, OSError) as error:
            self._give_up(entry, error)
            raise Unavailable(ErrorCode.COORDINATOR_NOT_AVAILABLE) from error
        entry.is_held = True

    def _settle(self, entry: Entry) -> None:
        """Save the group if it has changed, then deliver the answers."""
        machine = entry.machine
        if isinstance(machine, ConsumerGroup) and machine.wants_classic:
            self._downgrade(entry, machine)
            machine = entry.machine
        is_held = not machine.is_empty
        if machine.is_changed or is_held != entry.is_held:
            began_ms = self._now_ms()
            try:
                self._remote.save(entry.name, with_descriptions(machine.snapshot()))
            except (SegmentlogError, OSError) as error:
                self._give_up(entry, error)
                raise Unavailable(ErrorCode.COORDINATOR_NOT_AVAILABLE) from error
            # Members get a whole session from now on: `_expire` may wait for the lock before heartbeats that arrived
            # during the save. A disk that is slower than a session would expire all members otherwise.
            if took_ms := self._now_ms() - began_ms:
                machine.put_off(took_ms)
            machine.is_changed = False
            entry.is_held = is_held
            self._tell_of_generation(entry)
        for member in machine.given_up:
            logger.info("group %s: member %s was not heard of any more", entry.name, member)
        machine.given_up.clear()
        self._tell(machine)
        self._arm(entry)

    def _downgrade(self, entry: Entry, machine: ConsumerGroup) -> None:
        entry.machine = downgraded(machine, self.settings, self._now_ms())
        entry.machine.answers, entry.machine.given_up = machine.answers, machine.given_up
        logger.info("group %s: uses the classic protocol from now on, as no other members are left", entry.name)

    @staticmethod
    def _tell_of_generation(entry: Entry) -> None:
        machine = entry.machine
        if machine.generation != entry.told_generation and machine.state is not State.PREPARING:
            entry.told_generation = machine.generation
            logger.info(
                "group %s: generation %d has %d members", entry.name, machine.generation, len(machine.members),
                extra={"group": entry.name, "count": len(machine.members)},
            )  # fmt: skip

    @staticmethod
    def _tell(machine: Machine, error: ErrorCode | None = None) -> None:
        """Deliver the pending answers; with ``error``, deliver this error instead of each answer."""
        answers, machine.answers = machine.answers, []
        for token, answer in answers:
            assert isinstance(token, Waiter)
            if error is None:
                token.tell(answer)
            elif isinstance(answer, JoinAnswer):
                token.tell(JoinAnswer(error=error, member_id=answer.member_id))
            else:
                token.tell(SyncAnswer(error=error))

    @contextlib.contextmanager
    def _or_given_up(self, entry: Entry) -> Iterator[None]:
        """Drop the group if the block fails to read the topics: its state may be changed by half."""
        try:
            yield
        except (SegmentlogError, OSError) as error:
            self._give_up(entry, error, "its topics cannot be read")
            raise Unavailable(ErrorCode.COORDINATOR_NOT_AVAILABLE) from error

    def _give_up(self, entry: Entry, error: Exception, problem: str = "it cannot be saved") -> None:
        """Drop the group from memory. The next request loads it from its file."""
        logger.error("group %s: %s: %s; its waiting clients get an error and will retry", entry.name, problem, error)
        entry.machine.end()
        self._tell(entry.machine, ErrorCode.COORDINATOR_NOT_AVAILABLE)
        self._drop(entry)

    def _drop_if_idle(self, entry: Entry) -> None:
        if entry.machine.is_idle and not entry.is_held:
            self._drop(entry)

    def _drop(self, entry: Entry) -> None:
        entry.is_gone = True
        with self._mutex:
            if self._entries.get(entry.name) is entry:
                del self._entries[entry.name]

    def _tell_once(self, group: str, error: GroupInUse) -> None:
        now_ms = self._now_ms()
        if now_ms - self._told_ms.get(group, -_TELL_EVERY_MS) >= _TELL_EVERY_MS:
            if len(self._told_ms) >= _TOLD_MAX:
                self._told_ms.clear()
            self._told_ms[group] = now_ms
            logger.warning("the server refuses a client: %s", error)

    # ------------------------------------------------------------ time-outs

    def _now_ms(self) -> int:
        return self._clock.monotonic_ms()

    def take_up(self) -> None:
        """Start the sessions of all members of this worker's groups, without waiting for a request.

        After a change of the number of workers, a group may belong to another worker than before. This worker then
        renews the lock of a group whose members may be gone, so it must expire them itself.
        """
        try:
            self._begin()
        except Unavailable:  # the former process with this number still runs: the first request starts the sessions
            pass
        except (SegmentlogError, OSError) as error:
            logger.warning("sessions of group members are not expired until a client sends a request: %s", error)

    def _begin(self) -> None:
        with self._mutex:
            if self._is_closed:
                raise Unavailable(ErrorCode.COORDINATOR_NOT_AVAILABLE)
            if self._has_begun:
                return
            if not self._remote.begin():
                # The former process with this number still runs.
                raise Unavailable(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS)
            self._deadlines.start()
            self._has_begun = True

    def _arm(self, entry: Entry) -> None:
        due_ms = entry.machine.next_deadline_ms()
        if due_ms is not None and (entry.armed_ms is None or due_ms < entry.armed_ms):
            entry.armed_ms = due_ms
            self._deadlines.add(due_ms, entry.name)

    def tick(self) -> float | None:
        """Handle all due time-outs. Return after how many seconds to call again; None: after `Deadlines.add`."""
        if not self._has_looked:
            self._has_looked = True
            self._look()
        while (due := self._deadlines.pop(self._now_ms())) is not None:
            self._expire(*due)
        next_ms = self._deadlines.first_ms()
        if next_ms is None:
            return None
        # Due times of groups that were dropped cause some wake-ups without work.
        now_ms = self._now_ms()
        if not 0 <= now_ms - self._beaten_ms < BEAT_MS:
            self._beaten_ms = now_ms
            self._remote.beat()
        return max(min(next_ms, self._beaten_ms + BEAT_MS) - now_ms, 1) / 1000

    def _look(self) -> None:
        """Load the groups that clients held when this worker stopped, so that members that do not return expire."""
        for group in self._remote.held():
            if self._coordinates(group):
                with contextlib.suppress(Unavailable), self._locked(group):
                    pass

    def _expire(self, due_ms: int, group: str) -> None:
        entry = self._entries.get(group)
        if entry is None:
            return
        with entry.lock:
            if entry.is_gone or entry.armed_ms != due_ms:
                return
            entry.armed_ms = None
            with contextlib.suppress(Unavailable):
                entry.machine.expire(self._now_ms())
                self._settle(entry)
            self._drop_if_idle(entry)

    # ------------------------------------------------------------ closing

    def close(self) -> None:
        """Answer all waiting clients with an error. Members stay in their groups and continue at the next
        coordinator."""
        with self._mutex:
            self._is_closed = True
            entries = list(self._entries.values())
        for entry in entries:
            with entry.lock:
                entry.machine.end()
                self._tell(entry.machine, ErrorCode.COORDINATOR_NOT_AVAILABLE)
                self._drop(entry)
        self._deadlines.close()
        self._remote.close()
