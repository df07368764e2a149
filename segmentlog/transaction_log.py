"""What the topic ``__transaction_state`` says of each producer's name: the last record of it counts.

key    MessagePack array: version (1), name
value  MessagePack array: `TransactionState`; null: forgotten
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

import msgspec

from segmentlog.errors import LogTruncated, OffsetOutOfRange, UnknownTopic
from segmentlog.format.names import TRANSACTIONS_TOPIC
from segmentlog.format.producers import ProducerEntry
from segmentlog.records import TopicPartition
from segmentlog.storage import forks
from segmentlog.tidy import Tidy
from segmentlog.workers import logger

if TYPE_CHECKING:
    from segmentlog.partition.partition import Ack, Partition
    from segmentlog.store import LogStore

_VERSION: Final = 1
_SETTINGS: Final[dict[str, object]] = {"cleanup.policy": "compact", "segment.bytes": 16 << 20}

Status = Literal["Empty", "Ongoing", "PrepareCommit", "PrepareAbort", "CompleteCommit", "CompleteAbort"]


class Unsettled(msgspec.Struct, frozen=True, array_like=True):
    """A commit's marker that may not be on disk yet: should a crash take it, this says what it said."""

    topic: str
    partition: int
    offset: int
    epoch: int
    """Of the partition when it was written: as long as that is so nothing was lost."""


class TransactionState(msgspec.Struct, frozen=True, array_like=True):
    """What the last record of a name says."""

    producer_id: int
    epoch: int
    status: Status = "Empty"
    timeout_ms: int = 60_000
    started_ms: int = 0
    """Wall clock at the transaction's first append."""
    updated_ms: int = 0
    partitions: tuple[TopicPartition, ...] = ()
    """That the transaction writes to, or wrote to last."""
    unsettled: tuple[Unsettled, ...] = ()
    previous_id: int = -1
    """Under which the name went on counting before it ran out of epochs."""
    resume: dict[str, int] = {}
    """How many partitions a topic had when a job began that is to go on as it began."""
    ends: tuple[int, ...] = ()
    """Of a commit: the offset behind what it wrote, for each of ``partitions``. What begins later is another one."""
    note: str | None = None
    """What the last commit of the name left with its decision: there with it, or not at all."""
    started_up_ms: int = 0
    """Monotonic clock at the transaction's first append: what it may take is measured by it. Of this boot: who
    began it in another one is dead."""

    def said(self, tp: TopicPartition, entry: ProducerEntry) -> bool | None:
        """What was decided about the transaction that the producer has open there: committed or not.

        None: nothing, and it is nobody's business but its owner's. A power cut may have taken
        markers and states, whatever was written later in other files.
        """
        first_offset = entry.transaction_offset
        if any((one.topic, one.partition) == tp and first_offset < one.offset for one in self.unsettled):
            return True
        if tp in self.partitions and entry.epoch == self.epoch:
            if self.status in ("PrepareCommit", "CompleteCommit"):
                return first_offset < dict(zip(self.partitions, self.ends, strict=True))[tp]
            if self.status == "Ongoing":
                return None
        return False

    def is_overdue(self, up_ms: int) -> bool:
        """Whether the transaction takes longer than it may, as of ``up_ms``, monotonic."""
        return 0 < self.started_up_ms < up_ms - self.timeout_ms

    @property
    def is_open(self) -> bool:
        """Whether somebody still has something to do about it."""
        return self.status in ("Ongoing", "PrepareCommit", "PrepareAbort")


class TransactionLog:
    """A view of the topic that reads what was appended since it last looked. Thread-safe."""

    def __init__(self, store: LogStore) -> None:
        self._store = store
        self._mutex = forks.reentrant_lock(self, "_mutex")
        self._tidy = Tidy()
        self._forget()
        forks.on_fork(self, "_forget")

    def _forget(self) -> None:
        """Begin at the start. In a forked child: another thread of the parent may have been at it."""
        self._states: dict[str, TransactionState] = {}
        self._position = 0
        self._log: Partition | None = None

    def states(self) -> dict[str, TransactionState]:
        """The last state of each name, as it is now."""
        with self._mutex:
            log = self._find_log(create=False)
            if log is None:
                return {}
            try:
                self._follow(log)
            except (LogTruncated, OffsetOutOfRange):  # what it had read is gone: it says nothing any more
                self._states, self._position = {}, log.log_start_offset
                self._follow(log)
            return dict(self._states)

    def _follow(self, log: Partition) -> None:
        if self._position != log.log_end_offset:
            for batch in log.read(self._position):
                for key, value in zip(batch.keys, batch.values, strict=True):
                    self._take_in(key, value)
                self._tidy.count()
                self._position = batch.next_offset

    def _take_in(self, key: bytes | None, value: bytes | None) -> None:
        try:
            version, name = _key_decoder.decode(key or b"")
        except msgspec.DecodeError:
            return
        if version != _VERSION:
            return
        if value is None:
            self._states.pop(name, None)
        else:
            try:
                self._states[name] = _state_decoder.decode(value)
            except msgspec.DecodeError as error:
                logger.warning("%s: the state of producer %s is not to be read: %s", TRANSACTIONS_TOPIC, name, error)

    def _find_log(self, *, create: bool) -> Partition | None:
        if self._log is None or self._log.is_stale:
            self._states, self._position = {}, 0
            try:
                if create:
                    self._log = self._store.internal_topic(TRANSACTIONS_TOPIC, 1, _SETTINGS).partition(0)
                else:
                    self._log = self._store.topic(TRANSACTIONS_TOPIC).partition(0)
            except UnknownTopic:
                self._log = None
        return self._log

    def tidy(self) -> None:
        """Keep the topic short."""
        with self._mutex:
            if self._log is not None and not self._log.is_stale:
                self._tidy.tidy(self._log)

    def write(self, name: str, state: TransactionState | None, ack: Ack = "written") -> None:
        """Append the state of a name; None forgets it."""
        log = self._find_log(create=True)
        assert log is not None
        value = None if state is None else msgspec.msgpack.encode(state)
        log.append([value], [msgspec.msgpack.encode((_VERSION, name))], ack=ack)


_key_decoder = msgspec.msgpack.Decoder(tuple[int, str])
_state_decoder = msgspec.msgpack.Decoder(TransactionState)
