"""The topic ``__transaction_state``. The last record with the key of a name is the state of that named producer.

key    MessagePack array: version (2), name
value  MessagePack array: `TransactionState`; null: deleted

A state refers to topics by id. So a transaction continues in a renamed topic, and does not affect a new topic of the
old name. Records of version 1 (format 1 of the store) contain names instead of ids. Each name means the id that its
topic got in the upgrade.
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
from segmentlog.topics.internal_compaction import InternalCompaction
from segmentlog.topics.topic_registry import Topics

if TYPE_CHECKING:
    from segmentlog.log.partition import Ack, Partition

logger = logging.getLogger("segmentlog")

_VERSION: Final = 2
_VERSION_BY_NAME: Final = 1
_SETTINGS: Final[dict[str, object]] = {"cleanup.policy": "compact", "segment.bytes": 16 << 20}

EPOCH_MAX: Final = 32_000
"""Epochs have 16 bits. A name that exceeds this epoch continues with a new producer id."""

Status = Literal["Empty", "Ongoing", "PrepareCommit", "PrepareAbort", "CompleteCommit", "CompleteAbort"]


class UnconfirmedMarker(msgspec.Struct, frozen=True, array_like=True):
    """A commit marker that may not be on disk yet. If a crash loses the marker, this entry still shows the commit."""

    topic_id: str
    partition: int
    offset: int
    """Offset of the marker. If its writer died, a later offset: the last of the log when the marker was found."""
    epoch: int
    """Epoch of the partition when the marker was written. While the epoch is the same, the marker is not lost."""


class TransactionState(msgspec.Struct, frozen=True, array_like=True):
    """The state of a named producer: the value of the last record of its name."""

    producer_id: int
    epoch: int
    status: Status = "Empty"
    timeout_ms: int = 60_000
    started_ms: int = 0
    """Wall clock at the first append of the transaction."""
    updated_ms: int = 0
    partitions: tuple[PartitionId, ...] = ()
    """Partitions of the open transaction, or of the last one."""
    unconfirmed_markers: tuple[UnconfirmedMarker, ...] = ()
    previous_id: int = -1
    """Former producer id of the name, which ran out of epochs; -1 if there was none."""
    resume: dict[str, int] = {}
    """Partition counts of topics, by id, that `Producer.note_resume` has stored under the name."""
    ends: tuple[int, ...] = ()
    """For a commit: the offset after its last record, for each of ``partitions``. It does not include later records."""
    note: str | None = None
    """Metadata of the last commit. For a client of a server: the reason if its last commit was aborted, else None."""
    started_up_ms: int = 0
    """Monotonic clock at the first append, from which the time-out is measured. A time from an earlier boot does not
    matter, because all producers of that boot are dead."""
    is_server_name: bool = False
    """Whether the name belongs to a client of a server: see `transactions.server_transactions`."""
    last_epoch: int = -1
    """For a client of a server: the epoch of the transaction whose end has begun; -1 before that.

    If the client got ``epoch`` in exchange for its former epoch (KIP-360): that former epoch."""
    epochs: tuple[int, ...] = ()
    """For a client of a server: the epoch of each of ``partitions`` when it became part of the transaction. If a
    partition's epoch has changed, a crash may have lost records of the transaction."""
    log_epoch: int = 0
    """Epoch of this topic when the last decision about a client's name was made. If it has changed, a crash may have
    lost later states of the name."""

    @property
    def data_epoch(self) -> int:
        """Return the producer epoch under which the records of the transaction were written."""
        return self.epoch if self.last_epoch < 0 else self.last_epoch

    @property
    def is_writable(self) -> bool:
        """Return whether a transaction is open and accepts records: its end has not begun."""
        return self.status == "Ongoing" and self.last_epoch < 0

    def has_decided_commit(self, partition: PartitionId) -> bool:
        """Return whether a commit with records in this partition is decided. If so, all these records are on disk."""
        return (
            self.status == "PrepareCommit" and dict(zip(self.partitions, self.ends, strict=True)).get(partition, 0) > 0
        )

    def outcome_of(self, partition: PartitionId, entry: ProducerEntry) -> bool | None:
        """Return the outcome of the producer's open transaction in a partition: True for commit, False for abort.

        None: the transaction is undecided, and only its owner may decide. Every combination of state and records is
        possible: a power cut may lose a marker or a state, but keep later writes to other files.
        """
        first_offset = entry.transaction_offset
        if any(
            (marker.topic_id, marker.partition) == partition and first_offset < marker.offset
            for marker in self.unconfirmed_markers
        ):
            return True
        if partition in self.partitions and entry.epoch == (self.data_epoch if self.is_server_name else self.epoch):
            if self.status in ("PrepareCommit", "CompleteCommit"):
                return first_offset < dict(zip(self.partitions, self.ends, strict=True))[partition]
            if self.status == "Ongoing":
                return None
        return False

    def is_overdue(self, up_ms: int) -> bool:
        """Return whether the transaction has exceeded its time-out at the monotonic time ``up_ms``."""
        if self.is_server_name and self.started_up_ms > up_ms:
            return up_ms > self.timeout_ms  # it began before this boot
        return 0 < self.started_up_ms < up_ms - self.timeout_ms

    @property
    def is_open(self) -> bool:
        """Return whether the transaction is not complete yet."""
        return self.status in ("Ongoing", "PrepareCommit", "PrepareAbort")


class TransactionLog:
    """The states of all names, in memory. Each call first reads the new records of the topic. Thread-safe."""

    def __init__(self, topics: Topics) -> None:
        self._topics = topics
        self._mutex = fork_safety.reentrant_lock(self, "_mutex")
        self._compaction = InternalCompaction()
        self._reset_view()
        fork_safety.on_fork(self, "_reset_view")

    def _reset_view(self) -> None:
        """Drop the view, to read the topic from its start.

        Also called in a forked child: another thread of the parent may have been changing the view.
        """
        self._states: dict[str, TransactionState] = {}
        self._name_of_id: dict[int, str] = {}
        """The name that has each producer id."""
        self._old_records: set[str] = set()
        """Names with a record of version 1 in the log. To delete such a name, both records must be deleted."""
        self._position = 0
        self._log: Partition | None = None

    def states(self) -> dict[str, TransactionState]:
        """Return the current state of each name."""
        with self._mutex:
            self._catch_up()
            return dict(self._states)

    def find(self, name: str) -> TransactionState | None:
        """Return the current state of a name."""
        with self._mutex:
            self._catch_up()
            return self._states.get(name)

    def has_producer_id(self, producer_id: int) -> bool:
        """Return whether a name has this producer id, or had it before it ran out of epochs."""
        with self._mutex:
            self._catch_up()
            return producer_id in self._name_of_id

    @property
    def is_open(self) -> bool:
        """Return whether `has_producer_id` can answer without opening the topic."""
        return self._log is not None and not self._log.is_stale

    def _catch_up(self) -> None:
        log = self._find_log(create=False)
        if log is None:
            return
        try:
            self._read_new(log)
        except (LogTruncated, OffsetOutOfRange):  # the records that were read are lost, and no longer count
            self._states, self._name_of_id, self._position = {}, {}, log.log_start_offset
            self._read_new(log)

    @property
    def epoch(self) -> int:
        """Epoch of the topic's partition. If it has changed, a crash may have lost the last records."""
        log = self._find_log(create=True)
        assert log is not None
        return log.epoch

    def _read_new(self, log: Partition) -> None:
        if self._position != log.log_end_offset:
            for batch in log.read(self._position):
                for key, value in zip(batch.keys, batch.values, strict=True):
                    self._apply_record(key, value)
                self._compaction.count()
                self._position = batch.next_offset

    def _apply_record(self, key: bytes | None, value: bytes | None) -> None:
        try:
            version, name = _key_decoder.decode(key or b"")
        except msgspec.DecodeError:
            return
        if version not in (_VERSION, _VERSION_BY_NAME):
            return
        if version == _VERSION_BY_NAME:
            (self._old_records.discard if value is None else self._old_records.add)(name)
        if value is None:
            self._set_state(name, None)
        else:
            try:
                state = _state_decoder.decode(value)
                self._set_state(name, state if version == _VERSION else self._with_topic_ids(state))
            except msgspec.DecodeError as error:
                logger.warning("%s: the state of producer %s cannot be decoded: %s", TRANSACTIONS_TOPIC, name, error)

    def _set_state(self, name: str, state: TransactionState | None) -> None:
        before = self._states.pop(name, None)
        for producer_id in () if before is None else (before.producer_id, before.previous_id):
            if self._name_of_id.get(producer_id) == name:
                del self._name_of_id[producer_id]
        if state is not None:
            self._states[name] = state
            self._name_of_id[state.producer_id] = name
            if state.previous_id >= 0:
                self._name_of_id[state.previous_id] = name

    def _with_topic_ids(self, state: TransactionState) -> TransactionState:
        """Convert a state of version 1, which contains topic names."""

        def id_of(name: str) -> str:
            return topic_id_of_name(self._topics.store_id, name)

        return replace(
            state,
            partitions=tuple(PartitionId(id_of(topic), partition) for topic, partition in state.partitions),
            unconfirmed_markers=tuple(
                replace(marker, topic_id=id_of(marker.topic_id)) for marker in state.unconfirmed_markers
            ),
            resume={id_of(topic): count for topic, count in state.resume.items()},
        )

    def _find_log(self, *, create: bool) -> Partition | None:
        if self._log is None or self._log.is_stale:
            self._states, self._name_of_id, self._position = {}, {}, 0
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
        """Return once all durable decisions and their data are in the object store."""
        log = self._find_log(create=True)
        assert log is not None
        log.wait_shipped(log.durable_offset)

    def sync(self) -> None:
        """Sync all records that this view has read, including those of other processes."""
        with self._mutex:
            if self._log is not None:
                self._log.sync_upto(self._position)

    def compact_if_due(self) -> None:
        """Compact the topic if that is due."""
        with self._mutex:
            if self._log is not None and not self._log.is_stale:
                self._compaction.compact_if_due(self._log)

    def write(self, name: str, state: TransactionState | None, ack: Ack = "written") -> None:
        """Append the state of a name; None deletes the name."""
        log = self._find_log(create=True)
        assert log is not None
        if state is not None:
            log.append([encode_state(state)], [encode_key(name)], ack=ack)
            return
        self.states()
        # Write the record under both keys. Otherwise an older record under the other key would count again once a
        # compaction has removed this record.
        versions = (_VERSION_BY_NAME, _VERSION) if name in self._old_records else (_VERSION,)
        log.append([None] * len(versions), [encode_key(name, version) for version in versions], ack=ack)


def encode_key(name: str, version: int = _VERSION) -> bytes:
    """Return the key of a name's records."""
    return msgspec.msgpack.encode((version, name))


def encode_state(state: TransactionState) -> bytes:
    """Return the record value of a state. For a producer of the library, omit the fields of clients of a server."""
    if state.is_server_name:
        return msgspec.msgpack.encode(state)
    return msgspec.msgpack.encode(msgspec.structs.astuple(state)[:_LOCAL_FIELDS])


def decode_state(value: bytes) -> TransactionState | None:
    """Decode the state in a record's value. Return None for an invalid value."""
    try:
        return _state_decoder.decode(value)
    except msgspec.DecodeError:
        return None


_LOCAL_FIELDS: Final = TransactionState.__struct_fields__.index("is_server_name")

_key_decoder = msgspec.msgpack.Decoder(tuple[int, str])
_state_decoder = msgspec.msgpack.Decoder(TransactionState)
