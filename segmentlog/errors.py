"""Exceptions. Each has its facts as attributes (path, position, expected, found, ...).

The message states which object failed and why, what happened to the data, and what to do. Constructors pass their
arguments to ``Exception.__init__`` unchanged, so that every error survives pickling: a consumer may run in another
process than the code that handles its errors.

`docs/generate.py` generates `docs/errors.md` from the paragraphs *Cause*, *Data* and *Remedy* of the docstrings.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from segmentlog.records import LostRange


class SegmentlogError(Exception):
    """The base class of every exception that segmentlog raises on purpose.

    Cause: a failure that no subclass describes, for example a batch whose outcome is unknown after an interrupt. The
    message names it.

    Data: as the message says.

    Remedy: catch this class to handle every error of the library. Let other exceptions pass: they are errors of the
    program or of Python.
    """


class InvalidConfig(SegmentlogError, ValueError):
    """A setting or an argument is not valid.

    Cause: the key does not exist, or this value is not accepted.

    Data: nothing was changed.

    Remedy: the message lists the accepted values. ``docs/config.md`` has the settings of a topic.
    """

    def __init__(self, key: str, value: object, accepted: str) -> None:
        super().__init__(key, value, accepted)
        self.key, self.value, self.accepted = key, value, accepted

    def __str__(self) -> str:
        return f"{self.key} = {self.value!r} is not valid: {self.accepted}"


class InvalidTopicName(SegmentlogError, ValueError):
    """A topic cannot have this name.

    Cause: the name breaks Kafka's rule (1 to 249 of ``a-z A-Z 0-9 . _ -``), or is reserved for segmentlog.

    Data: nothing was changed.

    Remedy: choose another name.
    """

    def __init__(self, name: object, rule: str) -> None:
        super().__init__(name, rule)
        self.name, self.rule = name, rule

    def __str__(self) -> str:
        return f"topic name {self.name!r} is not valid: {self.rule}"


class InvalidRecord(SegmentlogError, TypeError):
    """A value, key, header or timestamp cannot be stored in a record of this topic.

    Cause: it has the wrong type; a record of a compacted topic has no key; a timestamp is out of range.

    Data: no record of the call was appended.

    Remedy: correct the record ``index`` of the call. ``indices`` lists all invalid records that the call found; some
    calls stop at the first.
    """

    def __init__(
        self, column: str, index: int, found: str, expected: str, indices: tuple[int, ...] | None = None
    ) -> None:
        super().__init__(column, index, found, expected, indices)
        self.column, self.index, self.found, self.expected = column, index, found, expected
        self.indices = (index,) if indices is None else indices
        """Indexes of the invalid records that the call found; ``index`` is the first. Some calls stop at the first."""

    def __str__(self) -> str:
        return f"{self.column}[{self.index}] is {self.found}; expected {self.expected}"

    @property
    def has_no_key(self) -> bool:
        """Whether the record lacks a key that the topic needs."""
        return (self.column, self.found) == ("keys", "None")

    @property
    def reason(self) -> str:
        """Why the record is invalid, without its index, for a message that already names the record."""
        if self.has_no_key:
            return f"it has no key; expected {self.expected}"
        return f"its {self.column.removesuffix('s')} is {self.found}; expected {self.expected}"


class SerializationError(SegmentlogError, ValueError):
    """The producer's serializer cannot turn a key or a value into bytes.

    Cause: the serializer raised an exception; ``__cause__`` is that exception.

    Data: no record of the call was sent.

    Remedy: correct the object ``index`` of the call. ``column`` is "keys" or "values".
    """

    def __init__(self, topic: str, column: str, index: int, why: str) -> None:
        super().__init__(topic, column, index, why)
        self.topic, self.column, self.index, self.why = topic, column, index, why

    def __str__(self) -> str:
        return f"topic {self.topic!r}: {self.column}[{self.index}] cannot be serialized: {self.why}; nothing was sent"


class DeserializationError(SegmentlogError, ValueError):
    """The consumer's deserializer cannot read a key or a value.

    Cause: the deserializer raised an exception; ``__cause__`` is that exception. Often another program wrote the
    record.

    Data: the record is unchanged. The consumer stays at this record.

    Remedy: skip the record with ``consumer.seek(error.topic, error.partition, error.offset + 1)``, or create the
    consumer with ``on_error="skip"``. ``column`` is "key" or "value", ``data`` its bytes.
    """

    def __init__(self, topic: str, partition: int, offset: int, column: str, why: str, data: bytes | None) -> None:
        super().__init__(topic, partition, offset, column, why, data)
        self.topic, self.partition, self.offset = topic, partition, offset
        self.column, self.why, self.data = column, why, data

    def __str__(self) -> str:
        return (
            f"{self.topic}/{self.partition}: the {self.column} at offset {self.offset} cannot be deserialized:"
            f" {self.why}. The consumer stays at this record. To skip it, seek to {self.offset + 1}, or create the"
            " consumer with on_error='skip'"
        )


class InputMismatch(SegmentlogError):
    """The input of this run differs from the input of the earlier runs of this named producer.

    Cause: ``produce --producer NAME`` ran with another file, or the file became shorter or was changed.

    Data: nothing was appended by this run.

    Remedy: use one producer name for one input. Run it again with the original input, or choose a new name.
    """


class UnknownTopic(SegmentlogError, LookupError):
    """The topic or the partition does not exist.

    Cause: the name is mistyped, the topic was not created yet, or it was deleted or renamed while in use.

    Data: nothing was changed.

    Remedy: create the topic with ``create_topic(..., exist_ok=True)``, or follow: a consumer with ``follow=True``
    waits for the topic. After a rename use the new name.
    """

    def __init__(self, topic: str, why: str = "it does not exist") -> None:
        super().__init__(topic, why)
        self.topic, self.why = topic, why

    def __str__(self) -> str:
        return f"topic {self.topic!r}: {self.why}"


class TopicExists(SegmentlogError):
    """A topic with this name exists already.

    Cause: another process or an earlier run created it; with ``exist_ok=True``: it has another number of partitions.

    Data: nothing was changed.

    Remedy: use ``exist_ok=True`` or ``segmentlog create --if-not-exists``, choose another name, or delete the topic
    first.
    """

    def __init__(self, topic: str, why: str = "choose another name, or delete it first") -> None:
        super().__init__(topic, why)
        self.topic, self.why = topic, why

    def __str__(self) -> str:
        return f"topic {self.topic!r} exists already; {self.why}"


class RecordTooLarge(SegmentlogError, ValueError):
    """One record alone is larger than a batch may be.

    Cause: the record takes more than ``max.message.bytes`` of its topic (1 MiB by default), before compression.

    Data: no record of the call was appended to the partition of this record.

    Remedy: raise ``max.message.bytes`` of the topic, or split the record.
    """

    def __init__(self, size_bytes: int, limit_bytes: int, index: int = 0) -> None:
        super().__init__(size_bytes, limit_bytes, index)
        self.size_bytes, self.limit_bytes, self.index = size_bytes, limit_bytes, index

    def __str__(self) -> str:
        return (
            f"record {self.index} of the call takes {self.size_bytes} bytes, over max.message.bytes"
            f" = {self.limit_bytes}; nothing was appended to its partition; raise max.message.bytes or split the record"
        )


class InvalidWireBatch(SegmentlogError, ValueError):
    """A batch in the format of Kafka's protocol was rejected.

    Cause: a client sent a batch that it must not send, or the batch was damaged on the way.

    Data: nothing was appended.

    Remedy: the message describes the fault. If a client fails repeatedly, update or correct it.

    ``reason`` is one word for programs: magic, length, crc, control, delete_horizon, count, codec, producer,
    producer_id, timestamp, records, size, transaction. ``indices`` are the positions of the wrong records in the
    batch, at most 10,000; empty if the batch as a whole is wrong.
    """

    def __init__(self, reason: str, why: str, indices: tuple[int, ...] = ()) -> None:
        super().__init__(reason, why, indices)
        self.reason, self.why, self.indices = reason, why, indices

    def __str__(self) -> str:
        return f"the Kafka batch was refused ({self.reason}): {self.why}; nothing was appended"

    @classmethod
    def unassigned(cls, producer_id: int) -> InvalidWireBatch:
        """Return the error for a batch whose producer id is not its sender's."""
        why = f"this store did not assign producer id {producer_id} to the user; open a new producer"
        return cls("producer_id", why)


class OffsetOutOfRange(SegmentlogError, LookupError):
    """The offset is before the log start offset or after the log end offset.

    Cause: retention or ``trim`` deleted the records, or the offset was never assigned.

    Data: nothing was changed. Deleted records cannot be read again.

    Remedy: continue at ``log_start_offset``; a consumer with ``auto_offset_reset="earliest"`` does so by itself. If
    retention is faster than your consumers, raise ``retention.ms``.
    """

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
    """The position is inside a range of offsets that a crash or a truncation removed.

    Cause: a power cut lost records that were not on disk, or ``truncate``, ``repair`` or a restore removed records.

    Data: the records of the range are lost. Their offsets are never assigned to other records. A reader with this
    position has read records that no longer exist.

    Remedy: undo what your program derived from the lost records, then continue at ``error.lost.end_offset``. Use
    ``durable_only=True`` to read only records that no power cut can lose.
    """

    def __init__(self, log: str, offset: int, lost: LostRange) -> None:
        super().__init__(log, offset, lost)
        self.log, self.offset, self.lost = log, offset, lost

    def __str__(self) -> str:
        return (
            f"{self.log}: offset {self.offset} is inside the lost range [{self.lost.base_offset},"
            f" {self.lost.end_offset}) ({self.lost.reason}); the log continues at offset"
            f" {self.lost.end_offset} in epoch {self.lost.epoch}"
        )


class CorruptBatch(SegmentlogError):
    """Bytes on disk are not the bytes that were written.

    Cause: the disk or the memory damaged them, or another program changed the file.

    Data: the batch cannot be read. Nothing was removed; all other records can be read.

    Remedy: follow the runbook for damage in ``docs/runbooks.md``. ``segmentlog verify`` finds the extent, ``segmentlog
    repair`` moves the damaged bytes to quarantine, and readers skip them with ``skip_damaged=True``.

    ``position`` is a byte position in the file ``path``; ``expected`` and ``found`` describe the check that failed.
    """

    def __init__(self, path: str, position: int, expected: str, found: str, offset: int = -1) -> None:
        super().__init__(path, position, expected, found, offset)
        self.path, self.position, self.expected, self.found = path, position, expected, found
        self.offset = offset

    def __str__(self) -> str:
        at_offset = f" (offset {self.offset})" if self.offset >= 0 else ""
        return (
            f"{self.path}: damaged at byte {self.position}{at_offset}: expected {self.expected}, found"
            f" {self.found}; 'segmentlog verify' finds the extent, 'segmentlog repair' removes the damage"
        )


class UnreadableBatch(CorruptBatch):
    """The checksums of a batch are right, but its records do not decode.

    Cause: the writer has stored a wrong batch, for example a Kafka client with a bug. The disk is not damaged.

    Data: the batch is stored unchanged. Its records cannot be read.

    Remedy: continue at ``next_offset``, read with ``skip_damaged=True``, or remove the batch with ``segmentlog repair
    --drop-unreadable``.

    offset, next_offset   the batch has the offsets ``[offset, next_offset)``; reading can continue at ``next_offset``
    record_count          how many records its header announces
    reason                why its records do not decode
    path, position        the segment file, and the byte in it at which the batch begins; "" and 0 if there is no file
    """

    def __init__(self, path: str, position: int, reason: str, offset: int, next_offset: int, record_count: int) -> None:
        super().__init__(path, position, "records that decode", reason, offset)
        self.args = (path, position, reason, offset, next_offset, record_count)  # pickling passes `args` to __init__
        self.reason, self.next_offset, self.record_count = reason, next_offset, record_count

    def __str__(self) -> str:
        where = f"{self.path}: the batch at byte {self.position}" if self.path else "a batch"
        return (
            f"{where} (offsets [{self.offset}, {self.next_offset}), {self.record_count} records) cannot be read:"
            f" {self.reason}. Its checksum is right, so the disk returned what was stored, and nothing was removed."
            f" Continue at offset {self.next_offset}, or remove the batch with 'segmentlog repair --drop-unreadable'"
        )


class DiskFull(SegmentlogError, OSError):
    """The disk has no room for what the call wanted to write.

    Cause: the file system is full, or a quota is used up (ENOSPC, EDQUOT).

    Data: nothing of the call was appended. The log is unchanged, and reading works.

    Remedy: free space, then send the failed records again in their order. Nothing has to be reopened.

    ``size_bytes`` is the number of bytes that did not fit; 0 if that is unknown, or if a new file had no room for its
    name.
    """

    def __init__(self, path: str, size_bytes: int = 0) -> None:
        super().__init__(path, size_bytes)
        self.errno = errno.ENOSPC  # OSError takes the first of two arguments, here the path, as errno
        self.path, self.size_bytes = path, size_bytes

    def __str__(self) -> str:
        for_what = f" for {self.size_bytes} more bytes; nothing was appended" if self.size_bytes else ""
        return f"{self.path}: no room on the disk{for_what}; free some space and try again"


class ProcessLimitError(SegmentlogError, OSError):
    """A limit or a missing permission of this process prevented the call.

    Cause: too many open files, not enough memory, no permission, a file size limit, an interrupted write (``errno``).

    Data: disk, log and other processes are not affected. ``why`` has the outcome of the call. If ``appended`` is
    true, the records of a durable append are in the log, but may not be on disk yet.

    Remedy: remove the cause, then repeat the call on the same objects. If ``appended`` is true, call `Partition.flush`
    instead: appending again would store the records twice.
    """

    def __init__(self, number: int, why: str, path: str, *, appended: bool = False) -> None:
        super().__init__(number, why, path)  # the order of OSError's arguments; pickling passes them to __init__
        self.why, self.path, self.appended = why, path, appended

    def __str__(self) -> str:
        remedy = _REMEDIES.get(self.errno or 0, "remove the cause")
        return f"{self.path}: {self.why}; {remedy}, and try again"


_REMEDIES = {
    errno.EMFILE: "close files of this process, or raise its limit (ulimit -n)",
    errno.ENFILE: "close files on this machine, or raise its limit (fs.file-max)",
    errno.ENOMEM: "give the process more memory or maps (ulimit -v, vm.max_map_count)",
    errno.EACCES: "correct the permissions",
    errno.EPERM: "correct the permissions",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f)",
    errno.ENOLCK: "free locks on this machine",
}


class PartitionFailed(SegmentlogError):
    """The partition rejects appends after an error that leaves the state of the disk unknown.

    Cause: an fsync failed, or a write failed that may have changed the file. A failed fsync is never retried, because
    the kernel may then report success for data that it dropped. The limits of one process raise `ProcessLimitError`
    instead.

    Data: records up to the durable offset are safe. Records after it are in the log, and a power cut can lose them.
    Nothing of the failed call is acknowledged; its records may or may not survive. Reading works.

    Remedy: check the disk. Then close the store in every process that has it open, and open it again. Opening writes
    the end of the log again and syncs it.
    """

    def __init__(self, log: str, why: str) -> None:
        super().__init__(log, why)
        self.log, self.why = log, why

    def __str__(self) -> str:
        return (
            f"{self.log}: refuses appends since {self.why}. Records up to the durable offset are safe."
            " Check the disk, then close the store in every process and open it again"
        )


class OffsetGrantExhausted(SegmentlogError):
    """A shipped partition has assigned all offsets that the object store granted.

    Cause: the store was not shipped for too long: the object store cannot be reached, or no process ships. After a
    takeover the first append to a partition may wait for an upload.

    Data: nothing of the call was appended. Reading works.

    Remedy: check that the object store can be reached, and run ``segmentlog ship --follow``. Appends work again after
    the next upload. To stop shipping permanently, run ``segmentlog ship --stop``.
    """

    def __init__(self, log: str, ceiling: int) -> None:
        super().__init__(log, ceiling)
        self.log, self.ceiling = log, ceiling

    def __str__(self) -> str:
        return (
            f"{self.log}: cannot append at offset {self.ceiling} or above until the store has been shipped. Nothing was"
            " appended. Check that the object store can be reached and that 'segmentlog ship --follow' is running, or"
            " stop shipping permanently ('segmentlog ship --stop')"
        )


class ShipUnconfirmed(SegmentlogError):
    """Records are on the local disk, but it is unknown whether they are in the object store.

    Cause: an append with ``ack="shipped"`` waited two minutes, no process ships the store, or the object store cannot
    be reached.

    Data: the records are in the log and on the local disk. They are shipped as soon as possible. The loss of this
    machine can lose them until then.

    Remedy: do not append the records again: they would be in the log twice. Check that the object store can be reached
    and that a process ships the store.
    """

    def __init__(self, log: str, base_offset: int, end_offset: int, why: str) -> None:
        super().__init__(log, base_offset, end_offset, why)
        self.log, self.base_offset, self.end_offset, self.why = log, base_offset, end_offset, why

    def __str__(self) -> str:
        return (
            f"{self.log}: offsets {self.base_offset} to {self.end_offset - 1} are on the local disk, and not known to"
            f" be in the object store: {self.why}. They are shipped as soon as possible; do not append them again"
        )


class StoreFenced(SegmentlogError):
    """Another machine has taken over the store.

    Cause: ``segmentlog takeover`` ran on another machine. An append here would create a second, diverging history.

    Data: nothing of the call was appended. Records that were not shipped before the takeover exist only in this copy.
    Reading works.

    Remedy: append on the machine that ``owner`` names. Copy records that only this store has, if you need them; then
    remove this store, or keep it as a store of its own with ``segmentlog ship --stop``.
    """

    def __init__(self, what: str, owner: str) -> None:
        super().__init__(what, owner)
        self.what, self.owner = what, owner

    def __str__(self) -> str:
        return (
            f"{self.what}: taken over by {self.owner}. Nothing was appended, and this copy rejects all appends. It can"
            " still be read; records that were not shipped before the takeover exist only here"
        )


class HandOverInProgress(StoreFenced):
    """Appends are stopped, because the store is being handed over to another machine.

    Cause: ``segmentlog takeover --hand-over`` runs on this machine. It lasts some seconds.

    Data: nothing of the call was appended. Everything that was appended before is shipped to the new owner.

    Remedy: append on the new owner. Or try again: appends on this machine raise `StoreFenced` with the name of the new
    owner, or work again if no machine took the store over in time.
    """

    def __init__(self, what: str) -> None:
        super().__init__(what, "")
        self.args = (what,)

    def __str__(self) -> str:
        return (
            f"{self.what}: the store is being handed over to another machine. Nothing was appended. Append on the new"
            " owner, or try again in some seconds"
        )


class ObjectStoreError(SegmentlogError):
    """A request to the object store failed.

    Cause: network, credentials, permissions, or a fault of the object store. ``why`` has the details.

    Data: nothing was lost. Shipping repeats failed uploads; local appends and reads continue.

    Remedy: if ``retriable`` is true, the same call may work later. Otherwise correct URL, credentials or permissions.
    """

    def __init__(self, url: str, what: str, why: str, retriable: bool = True) -> None:
        super().__init__(url, what, why, retriable)
        self.url, self.what, self.why, self.retriable = url, what, why, retriable

    def __str__(self) -> str:
        return f"{self.url}: {self.what}: {self.why}"


class SegmentGone(ObjectStoreError):
    """The only copy of an evicted segment is missing from the object store.

    Cause: the object ``what`` was deleted, possibly by another machine that took over the store.

    Data: the records of this segment cannot be read. All other records can.

    Remedy: restore the object from a backup or an older version of the bucket. Otherwise ``segmentlog repair`` turns
    its offsets into a lost range.
    """

    def __init__(self, url: str, what: str, why: str) -> None:
        super().__init__(url, what, why, False)
        self.args = (url, what, why)


class ConditionIgnored(ObjectStoreError):
    """The object store ignores the conditions of conditional puts, so two machines could overwrite each other.

    Cause: the object store reported success for a put although its condition (If-Match, If-None-Match) was false. Some
    servers that are compatible with S3 lack these conditions, or lose them when requests are simultaneous.

    Data: segmentlog refuses to ship to this object store, or to run a cluster on it. Another process may have
    overwritten the object ``what``.

    Remedy: use another object store, or a newer release of it. ``segmentlog cluster check URL`` tests an object store.
    """

    def __init__(self, url: str, what: str, why: str) -> None:
        super().__init__(url, what, why, False)
        self.args = (url, what, why)


class CoordinatorUnreachable(SegmentlogError):
    """The coordinator of a cluster (an object store, etcd or ZooKeeper) did not answer.

    Cause: the network, or a fault or an overload of the coordinator; ``why`` has the details.

    Data: nothing was lost. The leader continues to append and acknowledge. Leader and in-sync replicas stay the same
    until the coordinator answers.

    Remedy: check the address and the network, then try again.
    """

    def __init__(self, url: str, why: str) -> None:
        super().__init__(url, why)
        self.url, self.why = url, why

    def __str__(self) -> str:
        return f"{self.url}: the coordinator cannot be reached: {self.why}. Check the address and the network"


class CoordinatorRefused(SegmentlogError):
    """The coordinator of a cluster refused a request, or its document is unusable. Retries fail, too.

    Cause: wrong credentials, missing permissions, a bucket that does not exist; or the cluster document is missing,
    damaged, contradictory, or of a later release. ``why`` names the cause.

    Data: nothing was lost, and the leader continues. Leader and in-sync replicas stay the same.

    Remedy: correct the credentials, the permissions or the URL, or upgrade this machine. Never replace the document by
    an older version of it: the cluster would use its terms a second time, and could lose acknowledged records.
    """

    def __init__(self, url: str, why: str) -> None:
        super().__init__(url, why)
        self.url, self.why = url, why

    def __str__(self) -> str:
        return f"{self.url}: the coordinator cannot be used: {self.why}"


class ShippingRefused(SegmentlogError):
    """A command on an object store was refused, because the object store and the local folder do not fit together.

    Cause: another store is shipped to the URL, the target folder is not empty, another process is writing to the folder
    or the URL, or an object is damaged. The message names the cause.

    Data: nothing was changed.

    Remedy: choose another URL or an empty folder, or end the other process.
    """

    def __init__(self, url: str, why: str) -> None:
        super().__init__(url, why)
        self.url, self.why = url, why

    def __str__(self) -> str:
        return f"{self.url}: {self.why}"


class PartitionBusy(SegmentlogError):
    """Another process keeps the partition or topic locked, and did not release it in time.

    Cause: a rename, deletion or repair waited (up to 30 seconds) for a lock. The process that has it is suspended, or
    never releases it.

    Data: nothing was changed.

    Remedy: end that process, then repeat the call.
    """

    def __init__(self, log: str, what: str) -> None:
        super().__init__(log, what)
        self.log, self.what = log, what

    def __str__(self) -> str:
        return f"{self.log}: another process keeps it locked. Nothing was changed. Stop that process to {self.what}"


class ReadOnlyStore(SegmentlogError):
    """A call that writes was made on a store that is open read-only.

    Cause: it was opened with ``read_only=True``; it is a replica or open by its URL; or this user may not write its
    files.

    Data: nothing was changed.

    Remedy: open the store for writing, or correct the permissions that ``why`` names.
    """

    def __init__(self, path: str, what: str, why: str = "") -> None:
        super().__init__(path, what, why)
        self.path, self.what, self.why = path, what, why

    def __str__(self) -> str:
        because = f", as {self.why}" if self.why else ""
        return f"{self.path}: cannot {self.what}: the store is open read-only{because}"


class StoreClosed(SegmentlogError):
    """A store, topic, producer or consumer cannot be used, because it is closed or belongs to another process.

    Cause: it was closed before this call; it was created before ``fork()`` and cannot be used in the child (``why``
    says so); or an asyncio client is used outside of its ``async with``.

    Data: nothing of the call was appended or committed.

    Remedy: open a new one. After a fork create members of groups, named producers and asyncio clients in the child.
    """

    def __init__(self, what: str, why: str = "") -> None:
        super().__init__(what, why)
        self.what, self.why = what, why

    def __str__(self) -> str:
        return f"{self.what}: {self.why}" if self.why else f"{self.what} is closed"

    @classmethod
    def forked(cls, what: str) -> StoreClosed:
        """Return the error for an object of the parent process that a forked child must not use."""
        return cls(what, "it was created before fork() and cannot be used in the child process; create a new one there")


class StoreVersionError(SegmentlogError):
    """The folder is not a store, or it has a format that this version cannot read.

    Cause: the path is wrong, the store is of a newer version, or ``store.json`` or ``topic.json`` is damaged.

    Data: nothing was changed.

    Remedy: check the path. Use the version that wrote the store (``docs/upgrading.md``).
    """

    def __init__(self, path: str, why: str) -> None:
        super().__init__(path, why)
        self.path, self.why = path, why

    def __str__(self) -> str:
        return f"{self.path}: {self.why}"


class ProducerFenced(SegmentlogError):
    """The producer must stop: another instance replaced it, or its transaction was aborted.

    Cause: another instance opened the same producer name, or the transaction took longer than
    ``transaction_timeout_ms``, or ``segmentlog transactions abort`` was used.

    Data: nothing of the call was appended. An open transaction is aborted.

    Remedy: close the producer. Open a new one only if this process should continue; that fences the other instance.
    Give each process a name of its own.
    """

    def __init__(self, producer: str, epoch: int, current_epoch: int, why: str = "a newer instance took over") -> None:
        super().__init__(producer, epoch, current_epoch, why)
        self.producer, self.epoch, self.current_epoch, self.why = producer, epoch, current_epoch, why

    def __str__(self) -> str:
        return (
            f"producer {self.producer}: {self.why} (epoch {self.current_epoch}, this one has {self.epoch});"
            " nothing was appended; close it, and open a new producer if this process should continue"
        )


class ProducerBusy(SegmentlogError):
    """A named producer cannot be opened now.

    Cause: the outcome of the name's last transaction is undecided, or some partitions do not have it yet. For example,
    the process that finishes the transaction is suspended, or the disk is full.

    Data: nothing was changed. The transaction will be committed or aborted as a whole.

    Remedy: resume or kill the suspended process, or free disk space; then open the producer again.
    """

    def __init__(self, producer: str, why: str) -> None:
        super().__init__(producer, why)
        self.producer, self.why = producer, why

    def __str__(self) -> str:
        return f"producer {self.producer!r} cannot be opened: {self.why}"


class ProducerNameInUse(SegmentlogError):
    """The producer name is already used by a Kafka client of a server, or by a producer of the library.

    Cause: the name of a new producer of the library is the ``transactional.id`` of a client of a server, or the
    reverse. The two kinds of producers number their records differently, so they cannot share a name.

    Data: nothing was changed.

    Remedy: choose another name.
    """

    def __init__(self, producer: str, holder: str) -> None:
        super().__init__(producer, holder)
        self.producer, self.holder = producer, holder

    def __str__(self) -> str:
        return (
            f"the name {self.producer!r} belongs to {self.holder}. In the library, a new instance of a producer"
            " continues the sequence numbers of its name. A new instance of a Kafka client begins at 0. So they cannot"
            " share a name; choose another name"
        )


class OutOfOrderSequence(SegmentlogError):
    """The sequence number of a batch does not follow the last one of its producer.

    Cause: an earlier batch is missing. For example, the program has sent failed batches again in another order.

    Data: nothing of the call was appended.

    Remedy: open a new producer, and continue after the last record that the log holds.
    """

    def __init__(self, log: str, producer_id: int, expected: int, found: int) -> None:
        super().__init__(log, producer_id, expected, found)
        self.log, self.producer_id, self.expected, self.found = log, producer_id, expected, found

    def __str__(self) -> str:
        return (
            f"{self.log}: producer {self.producer_id} sent sequence {self.found}, but {self.expected} is next;"
            " nothing was appended; open a new producer and continue after the last record in the log"
        )


class TransactionAborted(SegmentlogError):
    """The transaction was aborted instead of committed.

    Cause: some of its records could not be appended, or a crash lost some of them; ``why`` says which.

    Data: readers with ``isolation="read_committed"`` see nothing of the transaction. Offsets that it should commit are
    unchanged.

    Remedy: remove the cause, begin a new transaction, and send all of it again.
    """

    def __init__(self, producer: str, why: str) -> None:
        super().__init__(producer, why)
        self.producer, self.why = producer, why

    def __str__(self) -> str:
        return f"the transaction of producer {self.producer} was aborted: {self.why}; begin a new transaction"


class ConsumerFenced(SegmentlogError):
    """A member of a group tried to commit an offset of a partition that it no longer has.

    Cause: the member requested no record for ``max_poll_interval_ms``, so another member got its partitions.

    Data: nothing was committed. Another member reads the records since the last commit again.

    Remedy: drop uncommitted work of that partition (``on_lost``), and poll again to rejoin. If work on a record takes
    long, raise ``max_poll_interval_ms`` or lower ``max_poll_records``.
    """

    def __init__(self, group: str, member: str, what: str) -> None:
        super().__init__(group, member, what)
        self.group, self.member, self.what = group, member, what

    def __str__(self) -> str:
        return (
            f"group {self.group!r}: member {self.member} {self.what}; nothing was committed;"
            " another member reads the records since its last commit again"
        )


class ConsumerBusy(SegmentlogError):
    """Two threads use one consumer at the same time.

    Cause: a thread requested records while another thread iterated over the consumer.

    Data: nothing was changed; the iteration of the first thread continues.

    Remedy: give each thread its own consumer. With ``group`` they share the partitions.
    """

    def __init__(self, user: int, thread: int) -> None:
        super().__init__(user, thread)
        self.user, self.thread = user, thread

    def __str__(self) -> str:
        return (
            f"thread {self.thread} requested records of a consumer while thread {self.user} iterates over it:"
            " give each thread its own consumer (with group= they share the partitions), or end that iteration"
        )


class GroupNotEmpty(SegmentlogError):
    """The committed offsets of a group cannot be reset or deleted while it has members.

    Cause: members of the library or clients of a server are in the group; ``holder`` describes them if they are
    clients.

    Data: nothing was changed.

    Remedy: stop the members, then repeat the call.
    """

    def __init__(self, group: str, members: int, holder: str = "") -> None:
        super().__init__(group, members, holder)
        self.group, self.members, self.holder = group, members, holder

    def __str__(self) -> str:
        if self.holder:
            return f"group {self.group!r} is held by {self.holder}; stop them first"
        return f"group {self.group!r} has {self.members} live members; stop them first"


class GroupInUse(SegmentlogError):
    """The group has members already, and clients of a server and members of the library cannot share a group.

    Cause: a consumer of the library joined a group of a server's clients, or the reverse. ``holder`` describes the
    present members, and ``members`` is their number, as far as it is known.

    Data: nothing was changed. Consumers of both kinds use the same committed offsets.

    Remedy: stop the present members and join again, or join another group.
    """

    def __init__(self, group: str, members: int, holder: str) -> None:
        super().__init__(group, members, holder)
        self.group, self.members, self.holder = group, members, holder

    def __str__(self) -> str:
        return (
            f"group {self.group!r} is held by {self.holder}. Stop them and join again, or join another group."
            " Committed offsets are kept: members of either kind continue at the offsets that the others committed"
        )


# Former names of exceptions. They also let pickles load that an earlier version wrote.
GrantExhausted = OffsetGrantExhausted
GroupHeld = GroupInUse
LocalError = ProcessLimitError
NotShipped = ShipUnconfirmed
OtherInput = InputMismatch
ProducerHeld = ProducerNameInUse
