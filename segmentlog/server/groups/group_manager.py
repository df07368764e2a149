"""Groups in memory: loaded when they are asked for, saved before anybody is told, looked after as time goes by.

Each group has a lock, held while it is asked and while what it decided is saved: nobody is told what a restart would
not know. One thread looks after the time-outs of all of them. When something cannot be saved, the group is forgotten,
whoever waits is sent away, and the next to ask finds what the file says.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

import msgspec

from segmentlog.clock import Clock
from segmentlog.errors import GroupHeld, InvalidConfig, SegmentlogError
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
"""How often the worker says that it lives while it holds groups."""
_TELL_EVERY_MS: Final = 10_000
"""How often the log hears that a group refuses clients, who try again and again."""
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
        """In a forked child: groups and connections are the parent's."""
        self._is_closed = True
        self._entries = {}
        self._mutex = threading.Lock()
        self._deadlines.forget_thread()

    # ------------------------------------------------------------ a group in memory

    @contextlib.contextmanager
    def _locked(self, group: str) -> Iterator[Entry]:
        """A group, loaded if need be, its lock held."""
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
                    entry.lock.acquire()  # at once: nobody else knows of it yet
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
            logger.error("group %s: it cannot be read: %s", entry.name, error)
            raise Unavailable(ErrorCode.COORDINATOR_NOT_AVAILABLE) from error
        if saved.is_consumer:
            entry.machine = ConsumerGroup(settings, self._catalog)
        entry.machine.restore(saved, self._now_ms())
        entry.is_held = saved.held
        entry.told_generation = saved.generation
        if entry.machine.members:
            logger.info("group %s: %d members go on in generation %d", entry.name, len(saved.members), saved.generation)
        self._settle(entry)

    def settings_of(self, group: str) -> GroupSettings:
        """Those of all groups, but for what somebody has set for this one. Raises OSError."""
        return configured(self.settings, self._configs.find(group))

    def _claim(self, entry: Entry, session_timeout_ms: int, protocol_type: str) -> None:
        """Have the file say that the group is the clients', before the first one joins. Raises `GroupHeld`."""
        saved = msgspec.structs.replace(
            entry.machine.snapshot(), session_timeout_ms=session_timeout_ms, protocol_type=protocol_type
        )
        try:
            entry.machine.raise_generation(self._remote.claim(entry.name, saved))
        except GroupHeld:
            raise
        except (SegmentlogError, OSError) as error:
            self._give_up(entry, error)
            raise Unavailable(ErrorCode.COORDINATOR_NOT_AVAILABLE) from error
        entry.is_held = True

    def _settle(self, entry: Entry) -> None:
        """Save what was decided, then tell those who wait."""
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
            # Who is told now has a whole session from now on, and heartbeats that came meanwhile wait for the lock as
            # `_expire` may: of a disk that takes longer than a session all members would be given up.
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
        logger.info("group %s: the classic protocol from now on: no member speaks another", entry.name)

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
        """Give everybody the answer that is there; with ``error`` that one in its place."""
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
        """For what looks at the topics: when it cannot, half of something may have been decided."""
        try:
            yield
        except (SegmentlogError, OSError) as error:
            self._give_up(entry, error, "its topics cannot be looked at")
            raise Unavailable(ErrorCode.COORDINATOR_NOT_AVAILABLE) from error

    def _give_up(self, entry: Entry, error: Exception, what: str = "what it decided cannot be saved") -> None:
        """What the file says counts, and not what is in memory."""
        logger.error("group %s: %s: %s", entry.name, what, error)
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

    def _tell_once(self, group: str, error: GroupHeld) -> None:
        now_ms = self._now_ms()
        if now_ms - self._told_ms.get(group, -_TELL_EVERY_MS) >= _TELL_EVERY_MS:
            if len(self._told_ms) >= _TOLD_MAX:
                self._told_ms.clear()
            self._told_ms[group] = now_ms
            logger.warning("a client of the server is refused: %s", error)

    # ------------------------------------------------------------ time

    def _now_ms(self) -> int:
        return self._clock.monotonic_ms()

    def take_up(self) -> None:
        """Have the sessions of all members run from now on, whether anybody asks for their groups or not.

        A group may be another worker's than before, when there are more of them now. That one's lock is held again, so
        the group would be held for ever by members of whom nobody expects to hear.
        """
        try:
            self._begin()
        except Unavailable:  # the process that had this number before is not gone yet: who asks first begins
            pass
        except (SegmentlogError, OSError) as error:
            logger.warning("groups are not looked after until a client asks for one: %s", error)

    def _begin(self) -> None:
        with self._mutex:
            if self._is_closed:
                raise Unavailable(ErrorCode.COORDINATOR_NOT_AVAILABLE)
            if self._has_begun:
                return
            if not self._remote.begin():
                # The process that had this number before is not gone yet.
                raise Unavailable(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS)
            self._deadlines.start()
            self._has_begun = True

    def _arm(self, entry: Entry) -> None:
        due_ms = entry.machine.next_deadline_ms()
        if due_ms is not None and (entry.armed_ms is None or due_ms < entry.armed_ms):
            entry.armed_ms = due_ms
            self._deadlines.add(due_ms, entry.name)

    def tick(self) -> float | None:
        """Do what is due; after how many seconds there may be something again. None: when somebody comes."""
        if not self._has_looked:
            self._has_looked = True
            self._look()
        while (due := self._deadlines.pop(self._now_ms())) is not None:
            self._expire(*due)
        next_ms = self._deadlines.first_ms()
        if next_ms is None:
            return None
        # What is due may be of groups that are gone by now: then it wakes up for nothing, and that seldom.
        now_ms = self._now_ms()
        if not 0 <= now_ms - self._beaten_ms < BEAT_MS:
            self._beaten_ms = now_ms
            self._remote.beat()
        return max(min(next_ms, self._beaten_ms + BEAT_MS) - now_ms, 1) / 1000

    def _look(self) -> None:
        """Load what clients held when this worker was there last: who does not come again is to be given up."""
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

    # ------------------------------------------------------------ the end

    def close(self) -> None:
        """Send away all who wait. The members stay members: they go on at whoever coordinates their groups next."""
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
