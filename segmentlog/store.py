"""The public store object. It creates its parts at their first use, and delegates calls to them."""

from __future__ import annotations

import logging
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from segmentlog.arguments import as_bool, as_int, as_mapping
from segmentlog.clients import Clients
from segmentlog.clock import Clock
from segmentlog.closing import close_dropped, open_stores
from segmentlog.config import TopicConfig
from segmentlog.defaults import (
    CLEANER_BUFFER_BYTES,
    OFFSETS_RETENTION_MINUTES,
    REMOTE_CACHE_BYTES,
    SHIP_INTERVAL_MS,
)
from segmentlog.errors import InvalidConfig, SegmentlogError, StoreClosed
from segmentlog.format.file_names import OFFSETS_TOPIC, TRANSACTIONS_TOPIC, check_topic_name, is_topic_id
from segmentlog.inspection.scrubber import ScrubReport
from segmentlog.log.partition import Partition
from segmentlog.records import RecoveryMode, RecoveryReport
from segmentlog.storage import fork_safety
from segmentlog.storage.fs import FileSystem
from segmentlog.storage.interrupt_check import failures_ignored, is_interrupt
from segmentlog.storage.lazy_remote_reader import LazyRemoteReader
from segmentlog.topics.topic_registry import Topic as Topic
from segmentlog.topics.topic_registry import Topics
from segmentlog.weak_sets import members_of

if TYPE_CHECKING:
    from segmentlog.groups.committed_offsets import CommittedOffsetsView
    from segmentlog.groups.group_admin import Groups
    from segmentlog.log.partition import Isolation
    from segmentlog.objects.replica.remote_store import RemoteStore
    from segmentlog.objects.tier.remote_reader import RemoteReader
    from segmentlog.objects.upload.service import ShippingService
    from segmentlog.objects.upload.shipper import ShipResult
    from segmentlog.schemas.registry import SchemaRegistry
    from segmentlog.tables.table import Table
    from segmentlog.transactions.transaction_coordinator import Transactions

logger = logging.getLogger("segmentlog")


class LogStore(Clients):
    """An open store. Get one from `segmentlog.open`; close it, or use it in a ``with`` statement. Thread-safe.

    Any number of processes may have a store open. A forked child may continue to use it: the child opens the files
    again.

    If the program drops a store and all objects from it without `close`, a thread closes it later, with a
    ResourceWarning.
    """

    _is_complete = False

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        create: bool = True,
        read_only: bool = False,
        background: bool = True,
        recovery: RecoveryMode = "tail",
        scrub_bytes_per_s: int | None = None,
        cleaner_dedupe_buffer_bytes: int = CLEANER_BUFFER_BYTES,
        cleaner_io_max_bytes_per_second: int | None = None,
        offsets_retention_minutes: int = OFFSETS_RETENTION_MINUTES,
        ship: str | None = None,
        ship_topics: Iterable[str] = (),
        ship_interval_ms: int = SHIP_INTERVAL_MS,
        ship_bytes: int | None = None,
        ship_bytes_per_s: int | None = None,
        only_topics: Iterable[str] = (),
        cache_bytes: int = REMOTE_CACHE_BYTES,
        cache_dir: str | os.PathLike[str] | None = None,
        refresh_ms: int = SHIP_INTERVAL_MS,
        fs: FileSystem | None = None,
        clock: Clock | None = None,
    ) -> None:
        create, read_only = as_bool("create", create), as_bool("read_only", read_only)
        background = as_bool("background", background)
        self._attached: RemoteStore | None = None
        url = path if isinstance(path, str) and "://" in path else None
        if url is not None:
            if ship is not None:
                raise InvalidConfig(
                    "ship", ship, "omit it: a store that is read from an object store cannot be shipped"
                )
            from segmentlog.objects.replica.remote_store import RemoteStore

            self._attached = RemoteStore(url, topics=only_topics, cache_bytes=cache_bytes, cache_dir=cache_dir,
                                      refresh_ms=refresh_ms, threads=background, clock=clock)  # fmt: skip
            path, fs, create, read_only = self._attached.path, self._attached.fs, False, True
        elif only_topics:
            raise InvalidConfig(
                "only_topics", only_topics, "give it only for a store that is opened by its URL in an object store"
            )
        self.path = _as_path(path)
        self.url = url
        """The URL, if the store is read from an object store; None for a store in a folder."""
        if not isinstance(recovery, str) or recovery not in ("strict", "tail", "salvage"):
            raise InvalidConfig("recovery", recovery, "'strict', 'tail' or 'salvage'")
        if type(offsets_retention_minutes) is not int or offsets_retention_minutes < 1:
            raise InvalidConfig("offsets.retention.minutes", offsets_retention_minutes, "a whole number of at least 1")
        self._offsets_retention_ms = offsets_retention_minutes * 60_000
        clock = clock or Clock()
        clock.steady_ms()  # from this call on, the clock detects jumps of the wall clock
        self._mutex = fork_safety.reentrant_lock(self, "_mutex")
        self._group_offsets: CommittedOffsetsView | None = None
        self._groups: Groups | None = None
        self._transactions: Transactions | None = None
        self._schemas: SchemaRegistry | None = None
        self._shipping: ShippingService | None = None
        self._members = weakref.WeakSet()
        fs, cache_bytes = fs or FileSystem(), as_int("cache_bytes", cache_bytes, 1)

        def make_tiered() -> RemoteReader:
            from segmentlog.objects.tier.remote_reader import RemoteReader

            return RemoteReader(cache_bytes=cache_bytes, cache_dir=cache_dir)

        self._remote_reader: LazyRemoteReader[RemoteReader] = LazyRemoteReader(fs, make_tiered)
        """Reads evicted segments, whose bytes only the object store has."""
        if self._attached is None:
            self._remote_reader.install()
        if ship is not None:
            self._remote_reader.add_url(ship)
        self._topics = Topics(
            fs,
            clock,
            self.path,
            create=create,
            read_only=read_only,
            recovery=recovery,
            background=background,
            scrub_bytes_per_s=scrub_bytes_per_s,
            cleaner_buffer_bytes=cleaner_dedupe_buffer_bytes,
            cleaner_io_bytes_per_s=cleaner_io_max_bytes_per_second,
            expire=self._run_periodic_work,
            finish_transactions=self.finish_transactions,
            holds_producer=self._holds_producer,
            shown_path="" if self._attached is None else self._attached.url,
        )
        self.recovery: RecoveryMode = recovery
        self.read_only = self._topics.read_only
        self.store_id = self._topics.store_id
        open_stores.add(self)
        fork_safety.on_fork(self, "_forget_parent")
        self._is_complete = True
        self._topics.background.ensure_running()
        if ship is not None:
            try:
                self.shipping.start(
                    ship, topics=ship_topics, interval_ms=ship_interval_ms, max_bytes=ship_bytes,
                    bytes_per_s=ship_bytes_per_s, threads=background,
                )  # fmt: skip
            except BaseException:
                self.close()
                raise

    def _forget_parent(self) -> None:
        """In a forked child: forget the members of groups, which belong to the parent process."""
        self._members = weakref.WeakSet()

    def __enter__(self) -> LogStore:
        self._topics.check_open()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __del__(self) -> None:
        if self._is_complete and not self._topics.is_closed and not sys.is_finalizing():
            close_dropped(self)
            warnings.warn(f"store {self.path} was not closed", ResourceWarning, stacklevel=1, source=self)

    def __repr__(self) -> str:
        return f"<LogStore {self.path if self._attached is None else self._attached.url}>"

    @property
    def fs(self) -> FileSystem:
        """The file system for the files in `path`, for code that inspects them."""
        return self._topics.fs

    def check_writable(self, what: str) -> None:
        """Raise `ReadOnlyStore` with a message that the store cannot ``what``, or `StoreClosed`."""
        self._topics.check_writable(what)

    # ------------------------------------------------------------ topics

    def topics(self, *, internal: bool = False) -> list[str]:
        """Return the sorted names of the topics; ``internal`` adds the store's internal topics."""
        return self._topics.names(internal=as_bool("internal", internal))

    def topic(self, name: str) -> Topic:
        """Return the topic with that name. Raises `UnknownTopic`."""
        return self._topics.topic(name)

    def create_topic(
        self,
        name: str,
        partitions: int | None = None,
        config: Mapping[str, object] | None = None,
        *,
        exist_ok: bool = False,
        **options: object,
    ) -> Topic:
        """Create a topic. ``options`` are keys of the topic config with underscores; ``config`` also accepts dots.

        partitions  number of partitions; default: one
        exist_ok    return the topic if it exists already, whichever process created it. Its configuration remains
                    unchanged, even if it differs from ``config``: use `alter_topic`. Without ``partitions``, the topic
                    may have any number of partitions.

        Durable when it returns. Raises `TopicExists` (with ``exist_ok`` only if the topic has another number of
        partitions than ``partitions``), `InvalidTopicName`, `InvalidConfig`.
        """
        self._topics.check_writable("create a topic")
        check_topic_name(name)
        config = as_mapping("config", config, _CONFIG_EXPECTED)
        settings = TopicConfig.from_mapping({**config, **options})
        if as_bool("exist_ok", exist_ok):
            return self._topics.ensure(name, partitions, settings)
        return self._topics.create(name, 1 if partitions is None else partitions, settings)

    def alter_topic(
        self,
        name: str,
        config: Mapping[str, object] | None = None,
        *,
        partitions: int | None = None,
        **options: object,
    ) -> Topic:
        """Change keys of a topic's configuration, or add partitions, even while other processes use the topic.

        After an increase of partitions, a key may be sent to another partition than before. The number cannot decrease.
        Durable when it returns; later appends use the new configuration.
        """
        self._topics.check_writable("alter a topic")
        check_topic_name(name)
        config = as_mapping("config", config, _CONFIG_EXPECTED)
        return self._topics.alter(name, {**config, **options}, partitions)

    def delete_topic(self, name: str, topic_id: str | None = None) -> None:
        """Delete a topic with all its records and the groups' committed offsets. Its users get `UnknownTopic`.

        A new topic with the same name is a different topic, and is never mistaken for the deleted one. With
        ``topic_id``, raises `UnknownTopic` and deletes nothing if the name belongs to another topic. Raises
        `PartitionBusy` if another process keeps the topic locked, and `ProcessLimitError` if this user may not write
        the topic's files; nothing was changed.
        """
        self._topics.check_writable("delete a topic")
        check_topic_name(name)
        if topic_id is not None and not is_topic_id(topic_id):
            raise InvalidConfig("topic_id", topic_id, "the id of a topic: see `Topic.id`")
        self._topics.delete(name, topic_id)
        self._delete_orphaned_offsets()

    def rename_topic(self, name: str, new_name: str) -> Topic:
        """Rename a topic. Processes that use the old name get `UnknownTopic`.

        Groups and open transactions continue under the new name, because they know the topic by its `Topic.id`. Raises
        `PartitionBusy` and `ProcessLimitError` as `delete_topic` does.
        """
        self._topics.check_writable("rename a topic")
        check_topic_name(name)
        check_topic_name(new_name)
        return self._topics.rename(name, new_name)

    def topic_names(self, topic_ids: Iterable[str]) -> dict[str, str]:
        """Return topic names by id, for display: at least those of ``topic_ids`` that exist."""
        return self._topics.topic_names(topic_ids)

    def open_partition(self, name: str, number: int, topic_id: str | None = None) -> Partition:
        """Return a partition; always the same object. Raises `UnknownTopic`.

        With ``topic_id``, raises `UnknownTopic` also if the name belongs to another topic now.
        """
        return self._topics.open_partition(name, number, topic_id)

    def opened_partitions(self) -> list[Partition]:
        """Return the partitions that this process has open."""
        return self._topics.opened_partitions()

    def recovery_reports(self) -> dict[tuple[str, int], RecoveryReport]:
        """Return the recovery report of each partition that this process has opened."""
        return self._topics.recovery_reports()

    # ------------------------------------------------------------ services of producers and consumers

    def _create_offsets_log(self) -> Partition:
        """Return the log of committed offsets, for transactions that commit offsets."""
        return self.group_offsets.open_or_create_log()

    @property
    def transactions(self) -> Transactions:
        """The transaction coordinator: names of producers and their transactions."""
        if self._transactions is None:
            from segmentlog.transactions.transaction_coordinator import Transactions

            with self._mutex:
                self._transactions = self._transactions or Transactions(self._topics)
        return self._transactions

    def finish_transactions(self, now_ms: int | None = None) -> float:
        """Finish transactions of dead or slow processes; with ``background`` a thread calls this.

        ``now_ms`` is monotonic. Returns the seconds until the next call is due.
        """
        if self._topics.is_closed or self.read_only or not self._topics.has(TRANSACTIONS_TOPIC):
            return 1.0
        try:
            return self.transactions.finish(now_ms)
        except StoreClosed:  # closed meanwhile
            return 1.0

    def _holds_producer(self, producer_id: int) -> bool:
        """Return whether a producer name may have this producer id; True as long as the names are not read yet."""
        transactions = self._transactions
        if self._topics.is_closed:
            return True
        with failures_ignored(SegmentlogError):
            if not self._topics.has(TRANSACTIONS_TOPIC):
                return False
            return transactions is None or transactions.may_have_producer_id(producer_id)
        return True

    @property
    def group_offsets(self) -> CommittedOffsetsView:
        """The committed offsets of all groups."""
        if self._group_offsets is None:
            from segmentlog.groups.committed_offsets import CommittedOffsetsView

            with self._mutex:
                self._group_offsets = self._group_offsets or CommittedOffsetsView(self._topics)
        return self._group_offsets

    @property
    def groups(self) -> Groups:
        """The consumer groups: list, describe, reset, delete."""
        self._topics.check_open()
        if self._groups is None:
            from segmentlog.groups.group_admin import Groups

            with self._mutex:
                self._groups = self._groups or Groups(self._topics, self.group_offsets)
        return self._groups

    @property
    def schemas(self) -> SchemaRegistry:
        """The schema registry: subjects, versions, ids, settings; see docs/schemas.md."""
        self._topics.check_open()
        if self._schemas is None:
            from segmentlog.schemas.registry import SchemaRegistry

            with self._mutex:
                self._schemas = self._schemas or SchemaRegistry(self._topics)
        return self._schemas

    def _delete_orphaned_offsets(self) -> None:
        """Delete committed offsets of topics that do not exist any more.

        No other topic can get these offsets, even if this runs late: they are stored under the topic's id.
        """
        if self._topics.has(OFFSETS_TOPIC):
            self.group_offsets.delete_offsets_of_topics(self._topics.missing(self.group_offsets.topic_ids()))

    def _run_periodic_work(self, now_ms: int) -> None:
        """Run the periodic work of the whole store: finish incomplete changes of topics, expire committed offsets."""
        self._topics.administration.sweep()
        if self._topics.has(OFFSETS_TOPIC) and self.groups.expire_if_due(now_ms, self._offsets_retention_ms):
            self._delete_orphaned_offsets()

    def table(
        self, topic: str, *, follow: bool = False, isolation: Isolation = "read_uncommitted", durable_only: bool = False
    ) -> Table:
        """Return the topic as a table: a read-only mapping of the latest value of each key; see `Table`."""
        from segmentlog.tables.table import Table

        self._topics.check_open()
        return Table(self._topics, topic, follow=follow, isolation=isolation, durable_only=durable_only)

    # ------------------------------------------------------------ shipping

    @property
    def shipping(self) -> ShippingService:
        """Shipping to an object store: start, stop, status; see docs/replicate.md. Thread-safe."""
        if self._shipping is None:
            from segmentlog.objects.upload.service import ShippingService

            with self._mutex:
                self._shipping = self._shipping or ShippingService(self._topics)
        return self._shipping

    def ship(
        self, url: str, *, topics: Iterable[str] = (), bytes_per_s: int | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> ShipResult:  # fmt: skip
        """Upload everything appended so far to an object store; return once it is stored there.

        ``topics`` are names and patterns. If it is empty, the topics of the last call are shipped; in the first call,
        all topics. ``bytes_per_s`` limits the upload. ``progress`` is called with (bytes uploaded, total bytes).

        Raises `ShippingRefused` (the URL has another store, another process is shipping, or a partition cannot be
        shipped), `StoreFenced`, `ObjectStoreError`, `InvalidConfig`.
        """
        self._remote_reader.add_url(url)
        return self.shipping.ship(url, topics=topics, bytes_per_s=bytes_per_s, progress=progress)

    def ship_tick(self, now_ms: int | None = None) -> float:
        """Run one cycle of shipping, for a store opened with ``ship``; with ``background`` a thread calls this.

        Returns the seconds until the next cycle. Raises the errors of `ship`.
        """
        return self.shipping.run_cycle(now_ms)

    def refresh_tick(self) -> bool:
        """Read new uploads from the URL of the store. With ``background`` a thread calls this.

        Return False if there are none. Raises `ObjectStoreError`, `ShippingRefused`, and `InvalidConfig` for a
        store that was opened in a folder.
        """
        if self._attached is None:
            raise InvalidConfig("path", self.path, "the URL of an object store")
        self._topics.check_open()
        return self._attached.refresh()

    # ------------------------------------------------------------ background, closing

    def flush_tick(self, now_ms: int | None = None) -> float:
        """Run one cycle of the flusher; see `BackgroundWork.flush_tick`. With ``background`` a thread calls this.

        It also closes producers that were dropped with unsent records.
        """
        if self._producers is not None:
            self._producers.close_dropped()
        return self._topics.background.flush_tick(now_ms)

    def retention_tick(self, now_ms: int | None = None) -> float:
        """Run one cycle of retention; see `BackgroundWork.retention_tick`. With ``background`` a thread calls this."""
        self._topics.check_writable("delete old segments")
        return self._topics.background.retention_tick(now_ms)

    def cleaner_tick(self, now_ms: int | None = None) -> float:
        """Run one cycle of compaction; see `BackgroundWork.cleaner_tick`. With ``background`` a thread calls this."""
        self._topics.check_writable("compact")
        return self._topics.background.cleaner_tick(now_ms)

    def scrub_tick(self, now_ms: int | None = None) -> float:
        """Run one cycle of the scrubber; see `BackgroundWork.scrub_tick`. With ``background`` a thread calls this."""
        self._topics.check_open()
        return self._topics.background.scrub_tick(now_ms)

    def scrub_report(self) -> ScrubReport:
        """Return how much the scrubber has checked, and the damage it has found. Empty while scrubbing is off."""
        return self._topics.background.scrub_report()

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._topics.is_closed

    @property
    def is_shipped(self) -> bool:
        """Whether a process uploads this store to an object store now."""
        return self._topics.ship_signals.is_shipping

    def health(self) -> dict[str, str]:
        """Return problems by name: partitions that reject appends, and background work that keeps failing."""
        problems = self._topics.health()
        if self._transactions is not None:
            for producer, why in self._transactions.errors.items():
                problems[f"transaction of {producer}"] = f"cannot be finished: {why}"
        if self._attached is not None:
            if self._attached.status.error:
                problems["object store"] = self._attached.status.error
        elif self._topics.is_replica:
            from segmentlog.objects.replica.replica import replica_status

            status = replica_status(self.path, fs=self._topics.fs, clock=self._topics.clock)
            if status is not None and status.error:
                problems["replica"] = status.error
            from segmentlog.objects.standby.machine_role import read_machine_role

            role = read_machine_role(self._topics.fs, self.path, self._topics.clock.now_ms())
            if role is not None and role.problem:
                problems["standby"] = role.problem
        if (tiered := self._remote_reader.reader) is not None:
            problems |= tiered.health()
        return problems if self._shipping is None else problems | self._shipping.health()

    def close(self) -> None:
        """Flush and close the producers, fsync everything that this process appended, and close the store. Idempotent.

        Group members leave their groups; those with ``auto_commit`` commit. Every producer and partition is closed even
        if one fails; the first error is raised at the end.
        """
        first = None if self._producers is None else self._producers.close()
        for consumer in members_of(self._members):
            try:
                consumer.close()
            except Exception as error:  # its locks are released nevertheless
                if is_interrupt(error):
                    raise
                logger.warning("%s: a consumer could not be closed cleanly: %s", self.path, error)
                if not isinstance(error, SegmentlogError | OSError):  # raised by a callback
                    first = first or error
        if self._shipping is not None:
            self._shipping.close()
        try:
            self._topics.close()
        except (SegmentlogError, OSError) as error:
            if is_interrupt(error):
                raise
            first = first or error
        if self._attached is not None:
            self._attached.close()
        self._remote_reader.close()
        open_stores.discard(self)
        if first is not None:
            raise first

    @property
    def unsent_count(self) -> int:
        """Number of records that were sent by producers of this store, but are not appended yet."""
        return 0 if self._producers is None else self._producers.unsent_count


def _as_path(path: object) -> str:
    """Return an absolute path; `~` is the home folder, as in a shell. Raises `InvalidConfig`."""
    expected = "the path of a folder"
    if not isinstance(path, str | bytes | os.PathLike) or not (text := os.fsdecode(path)) or "\0" in text:
        raise InvalidConfig("path", path, expected)
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        raise InvalidConfig("path", path, expected) from None
    return os.path.abspath(os.path.expanduser(text))


_CONFIG_EXPECTED = "a mapping of keys of the topic config to their values"
