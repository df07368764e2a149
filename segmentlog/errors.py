"""Exceptions that carry evidence.

Every error keeps what it knows as attributes (path, position, expected, found, ...) and
turns it into one sentence that says what happened, where, and what to do about it.
Arguments go to ``Exception.__init__`` unchanged, so that every error survives pickling
(a consumer may live in another process than whoever handles its errors).
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from segmentlog.records import LostRange


class SegmentlogError(Exception):
    """The root of everything this library raises on purpose."""


class InvalidConfig(SegmentlogError, ValueError):
    """A configuration key that does not exist, or a value it does not take."""

    def __init__(self, key: str, value: object, accepted: str) -> None:
        super().__init__(key, value, accepted)
        self.key, self.value, self.accepted = key, value, accepted

    def __str__(self) -> str:
        return f"{self.key} = {self.value!r} is not valid: {self.accepted}"


class InvalidTopicName(SegmentlogError, ValueError):
    """A topic name outside Kafka's rule, or one that this library keeps for itself."""

    def __init__(self, name: object, rule: str) -> None:
        super().__init__(name, rule)
        self.name, self.rule = name, rule

    def __str__(self) -> str:
        return f"topic name {self.name!r} is not valid: {self.rule}"


class InvalidRecord(SegmentlogError, TypeError):
    """A value, key, header or timestamp that a record cannot hold, or that its topic does not accept."""

    def __init__(
        self, column: str, index: int, found: str, expected: str, indices: tuple[int, ...] | None = None
    ) -> None:
        super().__init__(column, index, found, expected, indices)
        self.column, self.index, self.found, self.expected = column, index, found, expected
        self.indices = (index,) if indices is None else indices
        """Of all such records, as far as they were looked for; ``index`` is the first."""

    def __str__(self) -> str:
        return f"{self.column}[{self.index}] is {self.found}; expected {self.expected}"

    @property
    def has_no_key(self) -> bool:
        """Whether the record lacks a key that the topic needs."""
        return (self.column, self.found) == ("keys", "None")

    @property
    def reason(self) -> str:
        """What is wrong with the record, for a message that names the record itself and not its place in a list."""
        if self.has_no_key:
            return f"it has no key; expected {self.expected}"
        return f"its {self.column.removesuffix('s')} is {self.found}; expected {self.expected}"


class SerializationError(SegmentlogError, ValueError):
    """A key or a value that the producer's serializer cannot make bytes of; nothing of the call was sent.

    ``column`` is "keys" or "values"; ``index`` the record's in the call; ``__cause__`` what the serializer raised.
    """

    def __init__(self, topic: str, column: str, index: int, why: str) -> None:
        super().__init__(topic, column, index, why)
        self.topic, self.column, self.index, self.why = topic, column, index, why

    def __str__(self) -> str:
        return f"topic {self.topic!r}: {self.column}[{self.index}] cannot be serialized: {self.why}; nothing was sent"


class DeserializationError(SegmentlogError, ValueError):
    """A key or a value that the consumer's deserializer can make nothing of. The consumer's position is this record's.

    ``column`` is "key" or "value", ``data`` its bytes; ``__cause__`` is what the deserializer raised.
    """

    def __init__(self, topic: str, partition: int, offset: int, column: str, why: str, data: bytes | None) -> None:
        super().__init__(topic, partition, offset, column, why, data)
        self.topic, self.partition, self.offset = topic, partition, offset
        self.column, self.why, self.data = column, why, data

    def __str__(self) -> str:
        return (
            f"{self.topic}/{self.partition}: the {self.column} at offset {self.offset} cannot be deserialized:"
            f" {self.why}; seek to {self.offset + 1} to go on behind it, or see `on_bad`"
        )


class OtherInput(SegmentlogError):
    """What a named producer is to send is not the input that it has sent from."""


class UnknownTopic(SegmentlogError, LookupError):
    """No such topic (or no such partition of it), or it was deleted or renamed while in use."""

    def __init__(self, topic: str, why: str = "it does not exist") -> None:
        super().__init__(topic, why)
        self.topic, self.why = topic, why

    def __str__(self) -> str:
        return f"topic {self.topic!r}: {self.why}"


class TopicExists(SegmentlogError):
    """A topic of that name is there already; nothing was changed."""

    def __init__(self, topic: str, why: str = "choose another name, or delete it first") -> None:
        super().__init__(topic, why)
        self.topic, self.why = topic, why

    def __str__(self) -> str:
        return f"topic {self.topic!r} exists already; {self.why}"


class RecordTooLarge(SegmentlogError, ValueError):
    """One record alone is larger than a batch may be; nothing of the call was appended to its partition."""

    def __init__(self, size_bytes: int, limit_bytes: int, index: int = 0) -> None:
        super().__init__(size_bytes, limit_bytes, index)
        self.size_bytes, self.limit_bytes, self.index = size_bytes, limit_bytes, index

    def __str__(self) -> str:
        return (
            f"record {self.index} of the call takes {self.size_bytes} bytes, over max.message.bytes"
            f" = {self.limit_bytes}; nothing was appended to its partition; raise max.message.bytes or split the record"
        )


class InvalidWireBatch(SegmentlogError, ValueError):
    """A batch of Kafka's protocol that a client must not send, or that was damaged on its way; nothing was appended.

    ``reason`` is one word, for who has to translate it: magic, length, crc, control, delete_horizon, count, codec,
    producer, producer_id, timestamp, records, size, transaction. ``indices`` are the positions in the batch of the
    records that are wrong, at most 10,000 of them; empty where the batch as a whole is.
    """

    def __init__(self, reason: str, why: str, indices: tuple[int, ...] = ()) -> None:
        super().__init__(reason, why, indices)
        self.reason, self.why, self.indices = reason, why, indices

    def __str__(self) -> str:
        return f"the Kafka batch was refused ({self.reason}): {self.why}; nothing was appended"

    @classmethod
    def unassigned(cls, producer_id: int) -> InvalidWireBatch:
        """Return the error for a batch whose producer id is not its sender's."""
        why = f"producer id {producer_id} is not one that this store assigned to the user; open a new producer"
        return cls("producer_id", why)


class OffsetOutOfRange(SegmentlogError, LookupError):
    """An offset below the log start or beyond the log end."""

    def __init__(self, log: str, offset: int, log_start_offset: int, log_end_offset: int) -> None:
        super().__init__(log, offset, log_start_offset, log_end_offset)
        self.log, self.offset = log, offset
        self.log_start_offset, self.log_end_offset = log_start_offset, log_end_offset

    def __str__(self) -> str:
        return (
            f"{self.log}: offset {self.offset} is outside the log, which holds offsets"
            f" [{self.log_start_offset}, {self.log_end_offset})"
        )


class LogTruncated(SegmentlogError, LookupError):
    """A position inside a range of offsets that a crash or a truncation took away.

    Offsets are never given to other records, so whoever was at this position has read
    records (or been told of offsets) that no longer exist. History resumes at
    ``lost.end_offset``, in epoch ``lost.epoch``.
    """

    def __init__(self, log: str, offset: int, lost: LostRange) -> None:
        super().__init__(log, offset, lost)
        self.log, self.offset, self.lost = log, offset, lost

    def __str__(self) -> str:
        return (
            f"{self.log}: offset {self.offset} lies in the lost range [{self.lost.base_offset},"
            f" {self.lost.end_offset}) ({self.lost.reason}); history resumes at offset"
            f" {self.lost.end_offset} in epoch {self.lost.epoch}"
        )


class CorruptBatch(SegmentlogError):
    """Bytes on disk that are not what was written there; or, as `UnreadableBatch`, that never held records.

    ``position`` is a byte position in the file ``path``; ``expected`` and ``found`` say what
    the check that failed looked for.
    """

    def __init__(self, path: str, position: int, expected: str, found: str, offset: int = -1) -> None:
        super().__init__(path, position, expected, found, offset)
        self.path, self.position, self.expected, self.found = path, position, expected, found
        self.offset = offset

    def __str__(self) -> str:
        at_offset = f" (offset {self.offset})" if self.offset >= 0 else ""
        return (
            f"{self.path}: damaged at byte {self.position}{at_offset}: expected {self.expected}, found"
            f" {self.found}; 'segmentlog verify' tells the extent, 'segmentlog repair' cuts it out"
        )


class UnreadableBatch(CorruptBatch):
    """A batch whose checksums are right and whose records do not decode: the disk returned what its writer stored.

    offset, next_offset   the batch has the offsets ``[offset, next_offset)``; reading can continue at ``next_offset``
    record_count          how many records its header announces
    reason                why its records do not decode
    path, position        the segment file, and the byte in it at which the batch begins; "" and 0 if there is no file
    """

    def __init__(self, path: str, position: int, reason: str, offset: int, next_offset: int, record_count: int) -> None:
        super().__init__(path, position, "records that decode", reason, offset)
        self.args = (path, position, reason, offset, next_offset, record_count)  # it is pickled by these
        self.reason, self.next_offset, self.record_count = reason, next_offset, record_count

    def __str__(self) -> str:
        where = f"{self.path}: the batch at byte {self.position}" if self.path else "a batch"
        return (
            f"{where} (offsets [{self.offset}, {self.next_offset}), {self.record_count} records) cannot be read:"
            f" {self.reason}. Its checksum is right, so the disk returned what was stored, and nothing was removed."
            f" Continue at offset {self.next_offset}, or remove the batch with 'segmentlog repair --drop-unreadable'"
        )


class DiskFull(SegmentlogError, OSError):
    """No room on the disk. What was asked for was not done; the log is as before, and works again once there is room.

    ``size_bytes`` is what there was no room for; 0 when it was a name in a folder, or nobody knows.
    """

    def __init__(self, path: str, size_bytes: int = 0) -> None:
        super().__init__(path, size_bytes)
        self.errno = errno.ENOSPC  # an OSError of two arguments takes the first for it
        self.path, self.size_bytes = path, size_bytes

    def __str__(self) -> str:
        for_what = f" for {self.size_bytes} more bytes; nothing was appended" if self.size_bytes else ""
        return f"{self.path}: no room on the disk{for_what}; free some space and try again"


class LocalError(SegmentlogError, OSError):
    """A limit or a right of this process kept it from its files. The disk, the log and other processes are well.

    ``errno`` is the system's number, ``why`` its words and what became of the call. The same call works again,
    on the same objects, once the cause is gone. With ``appended`` the records of a durable append were appended, and
    are not known to be on disk, as ``why`` says: `Partition.flush` sees to that; appended again they are twice there.
    """

    def __init__(self, number: int, why: str, path: str, *, appended: bool = False) -> None:
        super().__init__(number, why, path)  # as OSError has them: it is pickled by these
        self.why, self.path, self.appended = why, path, appended

    def __str__(self) -> str:
        remedy = _REMEDIES.get(self.errno or 0, "do away with the cause")
        return f"{self.path}: {self.why}; {remedy}, and try again"


_REMEDIES = {
    errno.EMFILE: "close files of this process, or raise its limit (ulimit -n)",
    errno.ENFILE: "close files on this machine, or raise its limit (fs.file-max)",
    errno.ENOMEM: "give the process more memory or maps (ulimit -v, vm.max_map_count)",
    errno.EACCES: "see to the permissions",
    errno.EPERM: "see to the permissions",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f)",
    errno.ENOLCK: "free locks on this machine",
}


class PartitionFailed(SegmentlogError):
    """The partition refuses appends: an fsync failed (and is never retried), or a write that may have touched the file.

    Nothing else fails a partition: what a process may not open, map or lock is its own affair, a `LocalError`.
    """

    def __init__(self, log: str, why: str) -> None:
        super().__init__(log, why)
        self.log, self.why = log, why

    def __str__(self) -> str:
        return (
            f"{self.log}: refuses appends since {self.why}; records up to the durable offset are safe;"
            " close the store, look at the disk, and open it again"
        )


class GrantExhausted(SegmentlogError):
    """A partition that is shipped has handed out all offsets that the object store knows of; it needs to be shipped."""

    def __init__(self, log: str, ceiling: int) -> None:
        super().__init__(log, ceiling)
        self.log, self.ceiling = log, ceiling

    def __str__(self) -> str:
        return (
            f"{self.log}: nothing is appended at offset {self.ceiling} or above before the store was shipped again;"
            " see that the object store can be reached and that somebody ships ('segmentlog ship --follow'),"
            " or end shipping for good ('segmentlog ship --stop')"
        )


class NotShipped(SegmentlogError):
    """Records that were to be shipped are on this machine's disk, and nobody knows whether they are anywhere else."""

    def __init__(self, log: str, base_offset: int, end_offset: int, why: str) -> None:
        super().__init__(log, base_offset, end_offset, why)
        self.log, self.base_offset, self.end_offset, self.why = log, base_offset, end_offset, why

    def __str__(self) -> str:
        return (
            f"{self.log}: offsets {self.base_offset} to {self.end_offset - 1} are on disk here, and not known to be"
            f" in the object store: {self.why}; they are shipped as soon as it is possible"
        )


class StoreFenced(SegmentlogError):
    """The store belongs to another machine by now: what was appended here would be two histories of one log."""

    def __init__(self, what: str, owner: str) -> None:
        super().__init__(what, owner)
        self.what, self.owner = what, owner

    def __str__(self) -> str:
        return (
            f"{self.what}: taken over by {self.owner}; nothing is appended here any more,"
            " reads go on; records that were not shipped before are in this copy alone"
        )


class ObjectStoreError(SegmentlogError):
    """An object store did not do what it was asked to. ``retriable``: the same may work in a moment."""

    def __init__(self, url: str, what: str, why: str, retriable: bool = True) -> None:
        super().__init__(url, what, why, retriable)
        self.url, self.what, self.why, self.retriable = url, what, why, retriable

    def __str__(self) -> str:
        return f"{self.url}: {self.what}: {self.why}"


class SegmentGone(ObjectStoreError):
    """A segment that lies in an object store alone is not there any more: ``what`` is the object that it was.

    Somebody has deleted it, or another machine has taken the store over and has no use for it. `segmentlog repair`
    makes a lost range of its offsets.
    """

    def __init__(self, url: str, what: str, why: str) -> None:
        super().__init__(url, what, why, False)
        self.args = (url, what, why)


class ShippingRefused(SegmentlogError):
    """What lies in the object store and what this store is do not go together; nothing was changed."""

    def __init__(self, url: str, why: str) -> None:
        super().__init__(url, why)
        self.url, self.why = url, why

    def __str__(self) -> str:
        return f"{self.url}: {self.why}"


class PartitionBusy(SegmentlogError):
    """Another process is in the middle of something in the partition, or its topic, and did not finish it in time."""

    def __init__(self, log: str, what: str) -> None:
        super().__init__(log, what)
        self.log, self.what = log, what

    def __str__(self) -> str:
        return f"{self.log}: another process is at work in it without a pause; stop it to {self.what}"


class ReadOnlyStore(SegmentlogError):
    """A call wants to write to a store that is open read-only. ``why`` says why it is, where nobody asked for that."""

    def __init__(self, path: str, what: str, why: str = "") -> None:
        super().__init__(path, what, why)
        self.path, self.what, self.why = path, what, why

    def __str__(self) -> str:
        because = f", as {self.why}" if self.why else ""
        return f"{self.path}: cannot {self.what}: the store is open read-only{because}"


class StoreClosed(SegmentlogError):
    """The store, topic, producer or consumer was closed before this call."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what

    def __str__(self) -> str:
        return f"{self.what} is closed"


class StoreVersionError(SegmentlogError):
    """The folder is no store, or was written by a version of the format that this one cannot read."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(path, why)
        self.path, self.why = path, why

    def __str__(self) -> str:
        return f"{self.path}: {self.why}"


class ProducerFenced(SegmentlogError):
    """A newer instance of the same producer has taken over, or its transaction was aborted; this one must stop."""

    def __init__(self, producer: str, epoch: int, current_epoch: int, why: str = "a newer instance took over") -> None:
        super().__init__(producer, epoch, current_epoch, why)
        self.producer, self.epoch, self.current_epoch, self.why = producer, epoch, current_epoch, why

    def __str__(self) -> str:
        return (
            f"producer {self.producer}: {self.why} (epoch {self.current_epoch}, this one has {self.epoch});"
            " nothing was appended; close it, and open a new producer if this process is to go on"
        )


class ProducerBusy(SegmentlogError):
    """A named producer cannot be opened now: a transaction of its last instance is being decided."""

    def __init__(self, producer: str, why: str) -> None:
        super().__init__(producer, why)
        self.producer, self.why = producer, why

    def __str__(self) -> str:
        return f"producer {self.producer!r} cannot be opened: {self.why}"


class ProducerHeld(SegmentlogError):
    """A name is that of a client of a server, or of a producer of the library: the two never share one."""

    def __init__(self, producer: str, holder: str) -> None:
        super().__init__(producer, holder)
        self.producer, self.holder = producer, holder

    def __str__(self) -> str:
        return (
            f"the name {self.producer!r} belongs to {self.holder}: producers of the library count their records over"
            " all instances, Kafka's begin at 0 in each; take another name"
        )


class OutOfOrderSequence(SegmentlogError):
    """A producer's batch whose sequence does not follow its last one: something in between is missing."""

    def __init__(self, log: str, producer_id: int, expected: int, found: int) -> None:
        super().__init__(log, producer_id, expected, found)
        self.log, self.producer_id, self.expected, self.found = log, producer_id, expected, found

    def __str__(self) -> str:
        return (
            f"{self.log}: producer {self.producer_id} appends sequence {self.found} where {self.expected} is next;"
            " nothing was appended; open a new producer and go on behind what the log holds"
        )


class TransactionAborted(SegmentlogError):
    """The transaction was aborted; nothing of it is visible to ``read_committed`` readers."""

    def __init__(self, producer: str, why: str) -> None:
        super().__init__(producer, why)
        self.producer, self.why = producer, why

    def __str__(self) -> str:
        return f"the transaction of producer {self.producer} was aborted: {self.why}; begin another one"


class ConsumerFenced(SegmentlogError):
    """A group member commits a position of a partition that is not its own any more: another member has it."""

    def __init__(self, group: str, member: str, what: str) -> None:
        super().__init__(group, member, what)
        self.group, self.member, self.what = group, member, what

    def __str__(self) -> str:
        return (
            f"group {self.group!r}: member {self.member} {self.what}; nothing was committed;"
            " what it read since its last commit is read again by another member"
        )


class ConsumerBusy(SegmentlogError):
    """A consumer was asked for records by a thread while another one's iteration over it was under way."""

    def __init__(self, user: int, thread: int) -> None:
        super().__init__(user, thread)
        self.user, self.thread = user, thread

    def __str__(self) -> str:
        return (
            f"thread {self.user} is iterating over the consumer, and thread {self.thread} asks for records of it, too:"
            " give each thread a consumer of its own (with group= they share the partitions), or end that iteration"
        )


class GroupNotEmpty(SegmentlogError):
    """Positions of a group cannot be reset or deleted while members are at work.

    ``holder`` says who, when they are clients of a server.
    """

    def __init__(self, group: str, members: int, holder: str = "") -> None:
        super().__init__(group, members, holder)
        self.group, self.members, self.holder = group, members, holder

    def __str__(self) -> str:
        if self.holder:
            return f"group {self.group!r} is held by {self.holder}; stop them first"
        return f"group {self.group!r} has {self.members} live members; stop them first"


class GroupHeld(SegmentlogError):
    """A group has members of the other kind: clients of a server and members of this library do not share one.

    ``members`` of them as far as that is known, ``holder`` says who they are.
    """

    def __init__(self, group: str, members: int, holder: str) -> None:
        super().__init__(group, members, holder)
        self.group, self.members, self.holder = group, members, holder

    def __str__(self) -> str:
        return (
            f"group {self.group!r} is held by {self.holder}: stop them and join again, or join another group;"
            " positions stay, and either kind goes on where the other stopped"
        )
