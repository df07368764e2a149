"""What the topic ``__transaction_state`` says of each producer's name: the last record of it counts.

key    MessagePack array: version (2), name
value  MessagePack array: `TransactionState`; null: forgotten

A state speaks of topics by their ids, so that a transaction goes on in one that was renamed, and not in
another one that has got the name. Records of version 1 (format 1 of the store) hold the names; each
stands for the id that topic has had since the upgrade.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final, Literal

import msgspec
from msgspec.structs import replace

from segmentlog.errors import LogTruncated, OffsetOutOfRange, UnknownTopic
from segmentlog.format.file_names import TRANSACTIONS_TOPIC, topic_id_of_name
from segmentlog.format.producer_snapshot import ProducerEntry
from segmentlog.records import PartitionId
from segmentlog.storage import fork_safety
from segmentlog.topics.internal_compaction import Tidy
from segmentlog.topics.topic_registry import Topics

if TYPE_CHECKING:
    from segmentlog.log.partition import Ack, Partition

logger = logging.getLogger("segmentlog")

_VERSION: Final = 2
_VERSION_BY_NAME: Final = 1
_SETTINGS: Final[dict[str, object]] = {"cleanup.policy": "compact", "segment.bytes": 16 << 20}

EPOCH_MAX: Final = 32_000
"""Epochs are 16 bits; a name that was opened so often goes on under another id."""

Status = Literal["Empty", "Ongoing", "PrepareCommit", "PrepareAbort", "CompleteCommit", "CompleteAbort"]


class Unsettled(msgspec.Struct, frozen=True, array_like=True):
    """A commit's marker that may not be on disk yet: should a crash take it, this says what it said."""

    topic_id: str
    partition: int
    offset: int
    """Where it is, or one behind that: of who did not live to tell, the last one that there was."""
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
    partitions: tuple[PartitionId, ...] = ()
    """That the transaction writes to, or wrote to last."""
    unsettled: tuple[Unsettled, ...] = ()
    previous_id: int = -1
    """Under which the name went on counting before it ran out of epochs."""
    resume: dict[str, int] = {}
    """How many partitions a topic, by its id, had when a job began that is to go on as it began."""
    ends: tuple[int, ...] = ()
    """Of a commit: the offset behind what it wrote, for each of ``partitions``. What begins later is another one."""
    note: str | None = None
    """What the last commit of the name left with its decision: there with it, or not at all. For a remote name: why
    its last commit failed, so that the transaction was aborted; None after every other end."""
    started_up_ms: int = 0
    """Monotonic clock at the transaction's first append: what it may take is measured by it. Of this boot: who
    began it in another one is dead."""
    remote: bool = False
    """The name is that of a server's client: see `transactions.server_transactions`."""
    last_epoch: int = -1
    """Of a remote name: under which the transaction was written that is decided, or about to be; -1 while nobody has
    begun to decide. Under an ``epoch`` that a client got for its last one (KIP-360): that one."""
    epochs: tuple[int, ...] = ()
    """Of each of ``partitions`` when a remote transaction began to write to it: another one now, and a crash may have
    taken what it wrote."""
    log_epoch: int = 0
    """That this log had when a remote name was last decided about: another one now, and a crash may have taken what
    was said of it since."""

    @property
    def data_epoch(self) -> int:
        """Under which the transaction was written."""
        return self.epoch if self.last_epoch < 0 else self.last_epoch

    @property
    def is_writable(self) -> bool:
        """Whether a transaction is open, and nobody has begun to decide about it."""
        return self.status == "Ongoing" and self.last_epoch < 0

    def wrote(self, where: PartitionId) -> bool:
        """Whether it was decided to commit what was written there. All before that is on disk then, too."""
        return self.status == "PrepareCommit" and dict(zip(self.partitions, self.ends, strict=True)).get(where, 0) > 0

    def said(self, where: PartitionId, entry: ProducerEntry) -> bool | None:
        """What was decided about the transaction that the producer has open there: committed or not.

        None: nothing, and it is nobody's business but its owner's. A power cut may have taken
        markers and states, whatever was written later in other files.
        """
        first_offset = entry.transaction_offset
        if any(
            (marker.topic_id, marker.partition) == where and first_offset < marker.offset for marker in self.unsettled
        ):
            return True
        if where in self.partitions and entry.epoch == (self.data_epoch if self.remote else self.epoch):
            if self.status in ("PrepareCommit", "CompleteCommit"):
                return first_offset < dict(zip(self.partitions, self.ends, strict=True))[where]
            if self.status == "Ongoing":
                return None
        return False

    def is_overdue(self, up_ms: int) -> bool:
        """Whether the transaction takes longer than it may, as of ``up_ms``, monotonic."""
        if self.remote and self.started_up_ms > up_ms:
            return up_ms > self.timeout_ms  # it was begun before this boot
        return 0 < self.started_up_ms < up_ms - self.timeout_ms

    @property
    def is_open(self) -> bool:
        """Whether somebody still has something to do about it."""
        return self.status in ("Ongoing", "PrepareCommit", "PrepareAbort")


class TransactionLog:
    """A view of the topic that reads what was appended since it last looked. Thread-safe."""

    def __init__(self, topics: Topics) -> None:
        self._topics = topics
        self._mutex = fork_safety.reentrant_lock(self, "_mutex")
        self._tidy = Tidy()
        self._begin_anew()
        fork_safety.on_fork(self, "_begin_anew")

    def _begin_anew(self) -> None:
        """Begin at the start. In a forked child: another thread of the parent may have been at it."""
        self._states: dict[str, TransactionState] = {}
        self._holders: dict[int, str] = {}
        """The name that has each producer id."""
        self._old_records: set[str] = set()
        """Names of which the log holds a record of version 1: who forgets them forgets that, too."""
        self._position = 0
        self._log: Partition | None = None

    def states(self) -> dict[str, TransactionState]:
        """The last state of each name, as it is now."""
        with self._mutex:
            self._catch_up()
            return dict(self._states)

    def find(self, name: str) -> TransactionState | None:
        """The last state of one name, as it is now."""
        with self._mutex:
            self._catch_up()
            return self._states.get(name)

    def holds(self, producer_id: int) -> bool:
        """Return whether a name has this producer id, or had it before it ran out of epochs; as it is now."""
        with self._mutex:
            self._catch_up()
            return producer_id in self._holders

    @property
    def is_open(self) -> bool:
        """Whether `holds` need not open the topic first."""
        return self._log is not None and not self._log.is_stale

    def _catch_up(self) -> None:
        log = self._find_log(create=False)
        if log is None:
            return
        try:
            self._follow(log)
        except (LogTruncated, OffsetOutOfRange):  # what it had read is gone: it says nothing any more
            self._states, self._holders, self._position = {}, {}, log.log_start_offset
            self._follow(log)

    @property
    def epoch(self) -> int:
        """Of the topic's partition: another one than before, and a crash may have taken the last records of it."""
        log = self._find_log(create=True)
        assert log is not None
        return log.epoch

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
        if version not in (_VERSION, _VERSION_BY_NAME):
            return
        if version == _VERSION_BY_NAME:
            (self._old_records.discard if value is None else self._old_records.add)(name)
        if value is None:
            self._note(name, None)
        else:
            try:
                state = _state_decoder.decode(value)
                self._note(name, state if version == _VERSION else self._by_id(state))
            except msgspec.DecodeError as error:
                logger.warning("%s: the state of producer %s is not to be read: %s", TRANSACTIONS_TOPIC, name, error)

    def _note(self, name: str, state: TransactionState | None) -> None:
        before = self._states.pop(name, None)
        for producer_id in () if before is None else (before.producer_id, before.previous_id):
            if self._holders.get(producer_id) == name:
                del self._holders[producer_id]
        if state is not None:
            self._states[name] = state
            self._holders[state.producer_id] = name
            if state.previous_id >= 0:
                self._holders[state.previous_id] = name

    def _by_id(self, state: TransactionState) -> TransactionState:
        """A state in which topics go by their names."""

        def id_of(name: str) -> str:
            return topic_id_of_name(self._topics.store_id, name)

        return replace(
            state,
            partitions=tuple(PartitionId(id_of(topic), partition) for topic, partition in state.partitions),
            unsettled=tuple(replace(marker, topic_id=id_of(marker.topic_id)) for marker in state.unsettled),
            resume={id_of(topic): count for topic, count in state.resume.items()},
        )

    def _find_log(self, *, create: bool) -> Partition | None:
        if self._log is None or self._log.is_stale:
            self._states, self._holders, self._position = {}, {}, 0
            self._old_records.clear()
            try:
                if create:
                    self._log = self._topics.internal_topic(TRANSACTIONS_TOPIC, 1, _SETTINGS).partition(0)
                else:
                    self._log = self._topics.topic(TRANSACTIONS_TOPIC).partition(0)
            except UnknownTopic:
                self._log = None
        return self._log

    def wait_shipped(self) -> None:
        """Return once the object store has all that was decided durably, and so all that it was decided about."""
        log = self._find_log(create=True)
        assert log is not None
        log.wait_shipped(log.durable_offset)

    def sync(self) -> None:
        """Put what was read so far on disk, whoever wrote it."""
        with self._mutex:
            if self._log is not None:
                self._log.sync_upto(self._position)

    def tidy(self) -> None:
        """Keep the topic short."""
        with self._mutex:
            if self._log is not None and not self._log.is_stale:
                self._tidy.tidy(self._log)

    def write(self, name: str, state: TransactionState | None, ack: Ack = "written") -> None:
        """Append the state of a name; None forgets it."""
        log = self._find_log(create=True)
        assert log is not None
        if state is not None:
            log.append([encode_state(state)], [encode_key(name)], ack=ack)
            return
        self.states()
        # Both, or what stands under the other key would count again once a compaction has removed this.
        versions = (_VERSION_BY_NAME, _VERSION) if name in self._old_records else (_VERSION,)
        log.append([None] * len(versions), [encode_key(name, version) for version in versions], ack=ack)


def encode_key(name: str, version: int = _VERSION) -> bytes:
    """The key of the records that say what a name does."""
    return msgspec.msgpack.encode((version, name))


def encode_state(state: TransactionState) -> bytes:
    """The value of such a record; of a name of the library without what only others have."""
    if state.remote:
        return msgspec.msgpack.encode(state)
    return msgspec.msgpack.encode(msgspec.structs.astuple(state)[:_LOCAL_FIELDS])


def decode_state(value: bytes) -> TransactionState | None:
    """What such a record says; None when it cannot be read."""
    try:
        return _state_decoder.decode(value)
    except msgspec.DecodeError:
        return None


_LOCAL_FIELDS: Final = TransactionState.__struct_fields__.index("remote")

_key_decoder = msgspec.msgpack.Decoder(tuple[int, str])
_state_decoder = msgspec.msgpack.Decoder(TransactionState)
