"""The path of every append: encode, place, and sync as the caller or the topic's policy asks.

append_columns   encode (no lock) -> place (append lock) -> sync (sync lock), each in a module of this package
durable appends  the same, shared by all threads that wait at the same time (`group_commit`)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

from segmentlog.config import TopicConfig
from segmentlog.format.columns import Int64Array
from segmentlog.format.encode import EncodedBatch
from segmentlog.log.append.appender import Appender
from segmentlog.log.append.batch_encoding import CheckedColumns, check_timestamps, encode_columns_as_batches
from segmentlog.log.append.group_commit import GroupCommit
from segmentlog.log.append.syncer import Syncer
from segmentlog.log.append.wait_shipped import wait_shipped
from segmentlog.log.handle import Handle
from segmentlog.log.producer_state import ProducerStamp
from segmentlog.policy.flush import append_must_sync, background_sync_due
from segmentlog.storage.state_page import CONFIG_WORD

Ack = Literal["written", "durable", "shipped"]


_DURABLE: Final = ("durable", "shipped")


class AppendPipeline:
    """Appends to one partition. Thread-safe."""

    def __init__(self, handle: Handle, appender: Appender, syncer: Syncer, *, background: bool) -> None:
        self._handle = handle
        self._appender = appender
        self._syncer = syncer
        self.group = GroupCommit(handle, appender, syncer)
        self._background = background
        """Whether a background thread calls `sync_due` regularly. If none does, each append checks the sync policy."""

    def append_columns(
        self, columns: CheckedColumns, ack: Ack | None, create_ms: int | None, stamp: ProducerStamp | None
    ) -> int:
        """Append checked columns. Records without a timestamp get ``create_ms``, or the current time.

        Does not check timestamps: the caller checked them when it accepted the records, which may have waited since
        then.
        """
        handle = self._handle
        if not columns.values:
            return handle.page.log.read().log_end_offset
        config, now_ms = self._current_config(), handle.clock.now_ms()
        # Appends of a transaction do not wait for the disk: the commit waits once for all of them.
        if (ack in _DURABLE or config.fsync.kind == "always") and (stamp is None or not stamp.transactional):
            base_offset = self.group.append(
                columns if create_ms is None else columns.with_timestamps(create_ms), config, now_ms, stamp
            )
            if ack == "shipped":
                wait_shipped(handle, base_offset, base_offset + len(columns.values))
            return base_offset
        batches = encode_columns_as_batches(columns, config, now_ms if create_ms is None else create_ms, stamp=stamp)
        base_offset, next_offset = self._appender.place(batches, now_ms, stamp)
        self._sync_as_asked(ack, base_offset, next_offset, stamp)
        return base_offset

    def check_timestamps(self, timestamps: Int64Array) -> None:
        """Raise `InvalidRecord` for timestamps that are further from the clock than the topic accepts now."""
        check_timestamps(timestamps, self._current_config(), self._handle.clock.now_ms())

    def _current_config(self) -> TopicConfig:
        handle = self._handle
        if handle.page.words[CONFIG_WORD] != handle.config_version:
            handle.refresh_config()
        return handle.config

    def append_batches(self, batches: Sequence[EncodedBatch], ack: Ack | None, stamp: ProducerStamp | None) -> int:
        """Append encoded batches. With a ``stamp`` the sequence of that producer continues from batch to batch.

        A batch of a Kafka client already contains producer id, epoch and sequence; ``stamp`` must repeat them.
        """
        base_offset, next_offset = self.place(batches, stamp)
        self._sync_as_asked(ack, base_offset, next_offset, stamp)
        return base_offset

    def place(
        self, batches: Sequence[EncodedBatch], stamp: ProducerStamp | None, *, wakes: bool = True
    ) -> tuple[int, int]:
        """Append encoded batches without syncing. Return (offset of the first record, offset after the last)."""
        if stamp is not None:
            following = stamp
            for batch in batches:
                batch.set_producer(
                    following.producer_id, following.epoch, following.sequence, transactional=stamp.transactional
                )
                following = following.after(batch.last_offset_delta + 1)
        return self._appender.place(batches, self._handle.clock.now_ms(), stamp, wakes=wakes)

    # ------------------------------------------------------------ when an append is synced

    def _sync_as_asked(self, ack: Ack | None, base_offset: int, next_offset: int, stamp: ProducerStamp | None) -> None:
        """Sync as the caller of an append of these offsets asks, or as the policy requires."""
        if ack in _DURABLE or self._handle.config.fsync.kind == "always":
            self._syncer.sync_records(base_offset, next_offset)
            if ack == "shipped" and (stamp is None or not stamp.transactional):
                wait_shipped(self._handle, base_offset, next_offset)
        elif self.needs_sync():
            self._syncer.sync()

    def needs_sync(self) -> bool:
        """Return whether the policy (by count, size or age) requires a sync before the append returns."""
        handle = self._handle
        policy = handle.config.fsync
        if policy.kind == "always":
            return True
        if self._background and policy.kind not in ("records", "bytes"):
            return False
        log, sync = handle.page.log.read(), handle.page.sync.read()
        due = append_must_sync(
            policy,
            unsynced_records=log.log_end_offset - sync.durable_offset,
            unsynced_bytes=log.appended_bytes - sync.synced_bytes,
        )
        return due or (not self._background and self.sync_due())

    def sync_due(self, slack_ms: int = 0, now_ms: int | None = None) -> bool:
        """Return whether the policy requires an fsync now (monotonic milliseconds) or within ``slack_ms``."""
        handle = self._handle
        log, sync = handle.page.log.read(), handle.page.sync.read()
        return background_sync_due(
            handle.config.fsync,
            unsynced_records=log.log_end_offset - sync.durable_offset,
            unsynced_age_ms=(handle.clock.monotonic_ms() if now_ms is None else now_ms) - sync.synced_at_ms,
            sealed_unsynced=log.active_base_offset != sync.synced_base_offset,
            slack_ms=slack_ms,
        )

    # ------------------------------------------------------------ a clean close

    def close_cleanly(self) -> None:
        """Sync, and leave the log so that the next open has nothing to recover.

        Call this only in a process that has appended. If several processes have appended, the last one to close leaves
        the log so.
        """
        handle = self._handle
        self._syncer.sync()
        with handle.translating_errors("it was not left clean"), handle.append_locked():
            page = handle.page
            log = page.log.read()
            self._appender.close_cleanly(log)
            with handle.sync_locked():
                sync = page.sync.read()
                if sync.durable_offset != log.log_end_offset or page.writing or page.failed:
                    return  # another process appended meanwhile, and will close later
                # Change the page before the checkpoint: after a crash in between, the next append must reserve offsets
                # again.
                handle.ledger.release_reserved_offsets(log)
                self._syncer.advance_recovery_point(log, sync, offset_ceiling=log.log_end_offset, clean=True)
