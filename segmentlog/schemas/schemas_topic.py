"""Reads and appends to topic ``_schemas``, and assigns schema ids, under one lock of the store.

    @schemas        16 hex digits: XXH3-64 of the rest; a newline; JSON: {context: highest id assigned in it}

A process that assigns an id holds the lock and has read the topic to its end. The file `@schemas` keeps ids from being
assigned twice. The topic alone cannot: a permanent deletion or a repair may remove a schema, while records with its id
still exist.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Final

import msgspec
import xxhash

from segmentlog.errors import (
    CorruptBatch,
    LogTruncated,
    OffsetOutOfRange,
    RecordTooLarge,
    UnknownTopic,
    UnreadableBatch,
)
from segmentlog.format.file_names import FILE_LOCK_SUFFIX, SCHEMAS_FILE, SCHEMAS_TOPIC
from segmentlog.log.partition import Partition
from segmentlog.schemas.registry_errors import NotPermitted, SchemaTooLarge
from segmentlog.schemas.registry_records import Pairs
from segmentlog.schemas.registry_state import RegistryState
from segmentlog.storage import fork_safety
from segmentlog.storage.file_locks import ProcessLock
from segmentlog.storage.file_operations import read_file, replace_file
from segmentlog.storage.interrupt_safe import interrupt_safe_context
from segmentlog.topics.internal_compaction import InternalCompaction
from segmentlog.topics.topic_registry import Topics

logger = logging.getLogger("segmentlog")

_SETTINGS: Final[dict[str, object]] = {"cleanup.policy": "compact"}
_HASH_BYTES: Final = 17
ID_MAX: Final = (1 << 31) - 1
"""Highest schema id: clients read ids as signed 32-bit integers."""
_highest_decoder = msgspec.json.Decoder(dict[str, int])


class SchemaJournal:
    """The registry's state and its topic. Each access first reads new records. Safe for threads and processes."""

    def __init__(self, topics: Topics) -> None:
        self._topics = topics
        self._path = f"{topics.path}/{SCHEMAS_FILE}"
        self._mutex = fork_safety.reentrant_lock(self, "_mutex")
        self._lock = ProcessLock(topics.fs, self._path + FILE_LOCK_SUFFIX)
        self._compaction = InternalCompaction()
        self._unreadable: set[int] = set()
        """Offsets of unreadable batches that were logged."""
        self._discard_state()
        fork_safety.on_fork(self, "_discard_state")

    def _discard_state(self) -> None:
        """Discard the state, and read the topic from its start.

        A forked child needs this: a thread of the parent may have been changing the state during the fork.
        """
        self._state = RegistryState()
        self._position = 0
        self._log: Partition | None = None

    @interrupt_safe_context
    def reading(self) -> Iterator[RegistryState]:
        """Yield the state, updated with all records of the topic. Other threads cannot change it within the block."""
        with self._mutex:
            self._catch_up()
            yield self._state

    @interrupt_safe_context
    def writing(self) -> Iterator[RegistryState]:
        """Yield the state as `reading` does, and hold the store's lock, so that no other process can append.

        Raises `ReadOnlyStore`, and `NotPermitted` if the topic's settings could lose schemas.
        """
        self._topics.check_writable("change schemas")
        with self._lock.hold(), self._mutex:
            self._catch_up()
            if self._log is not None:
                self._check_topic_settings(self._log)
            yield self._state

    # ------------------------------------------------------------ reading

    def _catch_up(self) -> None:
        log = self._find_log()
        if log is None:
            return
        try:
            self._apply_new_records(log)
        except (LogTruncated, OffsetOutOfRange):  # records in the state no longer exist: rebuild the state
            self._state, self._position = RegistryState(), log.log_start_offset
            self._apply_new_records(log)

    def _apply_new_records(self, log: Partition) -> None:
        while self._position != log.log_end_offset:
            before = self._position
            for batch in log.read(self._position, on_skip=self._skip):
                for key, value in zip(batch.keys, batch.values, strict=True):
                    self._state.apply_record(key, value)
                self._compaction.count()
                self._position = batch.next_offset
            if self._position == before:
                break

    def _skip(self, base_offset: int, end_offset: int, damage: CorruptBatch) -> None:
        """Skip an unreadable batch and log it once: the registry still serves all other schemas."""
        if not isinstance(damage, UnreadableBatch):
            raise damage
        self._position = end_offset
        if damage.offset not in self._unreadable:
            self._unreadable.add(damage.offset)
            logger.error(
                "topic %s: skipped unreadable offsets %d to %d. Schemas and settings in them are missing: register them"
                " again. %s", SCHEMAS_TOPIC, base_offset, end_offset - 1, damage,
            )  # fmt: skip

    def _find_log(self) -> Partition | None:
        if self._log is None or self._log.is_stale:
            self._state, self._position = RegistryState(), 0
            try:
                self._log = self._topics.topic(SCHEMAS_TOPIC).partition(0)
            except UnknownTopic:
                self._log = None
            else:
                self._position = self._log.log_start_offset
        return self._log

    # ------------------------------------------------------------ writing

    def _check_topic_settings(self, log: Partition) -> None:
        """Raise `NotPermitted` if the topic deletes old records, or has several partitions and so no order."""
        if "delete" in str(log.config.cleanup_policy):
            raise NotPermitted(
                f"topic {SCHEMAS_TOPIC} has cleanup.policy={log.config.cleanup_policy}, which would delete old schemas."
                f" Nothing was changed. Run: segmentlog alter {SCHEMAS_TOPIC} -c cleanup.policy=compact"
            )
        if self._topics.topic(SCHEMAS_TOPIC).partition_count != 1:
            raise NotPermitted(
                f"topic {SCHEMAS_TOPIC} has more than one partition, so the order of its records is unknown. Nothing"
                " was changed. Copy it into a topic with one partition"
            )

    def append(self, pairs: Pairs) -> None:
        """Append records as one durable batch, and apply them to the state. Call it within `writing`.

        Raises `SchemaTooLarge`, `DiskFull` and the other errors of `Partition.append`. If the fsync failed,
        the records were appended but may be lost. After any other error, no record was appended.
        """
        if self._find_log() is None:
            self._log = self._topics.internal_topic(SCHEMAS_TOPIC, 1, _SETTINGS).partition(0)
        log = self._log
        assert log is not None
        try:
            log.append([value for _, value in pairs], [key for key, _ in pairs], ack="durable")
        except RecordTooLarge as error:
            raise SchemaTooLarge(
                f"the schema is too large for topic {SCHEMAS_TOPIC}, and was not registered: {error}"
            ) from None
        self._apply_new_records(log)
        self._compaction.compact_if_due(log)

    def make_durable(self) -> None:
        """Sync every record that was read: another process may have crashed between its append and its fsync."""
        if self._log is not None and not self._topics.read_only:
            self._log.sync_upto(self._position)

    def assign_id(self, context: str) -> int:
        """Return a new schema id, which no schema of the context has or had. Call it within `writing`.

        The file `@schemas` contains the id, synced, when this returns. Raises `NotPermitted` if the context already
        has the highest possible id, for example by an import.
        """
        known = self._read_highest()
        number = max(known.get(context, 0), self._state.highest.get(context, 0)) + 1
        if number > ID_MAX:
            raise NotPermitted(
                f"Context {context} already has id {ID_MAX}, the highest possible; the schema was not registered."
                " Register it in another context"
            )
        self._write_highest({**known, context: number})
        return number

    def store_highest_ids(self) -> None:
        """Store the highest assigned ids, before a deletion removes their schemas. Call it within `writing`."""
        known = self._read_highest()
        wanted = {**known}
        for context, number in self._state.highest.items():
            wanted[context] = max(number, known.get(context, 0))
        if wanted != known:
            self._write_highest(wanted)

    def _read_highest(self) -> dict[str, int]:
        try:
            data = read_file(self._topics.fs, self._path)
        except FileNotFoundError:
            return {}
        text = data[_HASH_BYTES:]
        try:
            if data[:_HASH_BYTES] == b"%016x\n" % xxhash.xxh3_64_intdigest(text):
                return _highest_decoder.decode(text)
        except msgspec.DecodeError:
            pass
        logger.warning(
            "schema registry: %s is damaged; new ids continue after the highest id in topic %s", self._path,
            SCHEMAS_TOPIC,
        )  # fmt: skip
        return {}

    def _write_highest(self, highest: dict[str, int]) -> None:
        text = msgspec.json.encode(highest) + b"\n"
        replace_file(self._topics.fs, self._path, b"%016x\n" % xxhash.xxh3_64_intdigest(text) + text)
