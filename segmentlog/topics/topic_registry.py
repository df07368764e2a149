"""The topics of an open store and their partitions, which are opened on first use."""

from __future__ import annotations

import contextlib
import errno
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, TypeVar

from segmentlog.arguments import as_partition
from segmentlog.clock import Clock
from segmentlog.config import TopicConfig
from segmentlog.errors import (
    InvalidConfig,
    ReadOnlyStore,
    SegmentlogError,
    StoreClosed,
    StoreVersionError,
    TopicExists,
    UnknownTopic,
)
from segmentlog.format.file_names import REPLICA_FILE, STORE_FILE, TOPIC_FILE, check_topic_name
from segmentlog.inspection.scrubber import Scrubber, ScrubTarget
from segmentlog.log.handle import Handle
from segmentlog.log.partition import Partition
from segmentlog.log.state_peek import epoch_at, find_lost_range_end
from segmentlog.records import PartitionId, RecoveryMode, RecoveryReport
from segmentlog.storage import fork_safety
from segmentlog.storage.fs import FileSystem
from segmentlog.storage.interrupt_check import is_interrupt
from segmentlog.storage.network import NetworkMark
from segmentlog.storage.ship_signals import ShipSignals
from segmentlog.topics.background_work import BackgroundWork
from segmentlog.topics.compaction_scheduler import PartitionName
from segmentlog.topics.descriptor_budget import budget
from segmentlog.topics.store_file import check_not_set_aside, open_store_file
from segmentlog.topics.topic_admin import TopicAdmin, needs_upgrade
from segmentlog.topics.topic_folders import TopicFile, TopicFolders, check_partition_count

logger = logging.getLogger("segmentlog")

_T = TypeVar("_T")
_NOT_PERMITTED: Final = frozenset((errno.EACCES, errno.EPERM))


class Topic:
    """A topic of an open store. Thread-safe; get one from `LogStore.topic`.

    The object belongs to the topic, not to its name. After the topic was deleted or renamed, every call raises
    `UnknownTopic`, also if another topic has the name.
    """

    def __init__(self, topics: Topics, name: str, topic_id: str) -> None:
        self._topics = topics
        self.name = name
        self.id = topic_id
        """A UUID. It stays the same when the topic is renamed."""
        self.folder = f"{topics.path}/{name}"

    def __repr__(self) -> str:
        return f"<Topic {self.name}, {self.partition_count} partitions>"

    @property
    def config(self) -> TopicConfig:
        """The configuration as it is on disk now."""
        return self._topics.read_topic_file(self.name, self.id).config

    @property
    def partition_count(self) -> int:
        """The current number of partitions."""
        return self._topics.read_topic_file(self.name, self.id).partitions

    def partition(self, number: int) -> Partition:
        """Return a partition; open it, and recover it if necessary, on first use. Raises `UnknownTopic`."""
        return self._topics.open_partition(self.name, number, self.id)

    def find_lost_range_end(self, number: int, offset: int) -> tuple[int, int] | None:
        """Return the end of the lost range that starts at ``offset``, and the epoch at its end; None without a range.

        Does not open the partition. Raises OSError. If this process has the partition open already, also raises the
        errors of `Partition.check_position`.
        """
        return self._topics.find_lost_range_end(self.name, number, self.id, offset)

    def partitions(self) -> list[Partition]:
        """Return all partitions, opened."""
        return [self.partition(number) for number in range(self.partition_count)]


class Topics:
    """The topics of a store in one process, with their open partitions and background work. Thread-safe.

    The caller passes functions that need groups and transactions, which this class does not know:

    expire                background work calls it with a time in ms (`Clock.steady_ms`) to expire committed offsets
    finish_transactions   background work calls it, and opening a partition that has undecided transactions
    holds_producer        a partition calls it under its append lock: whether to keep the state of this producer id
    """

    def __init__(
        self,
        fs: FileSystem,
        clock: Clock,
        path: str,
        *,
        create: bool,
        read_only: bool,
        recovery: RecoveryMode,
        background: bool,
        scrub_bytes_per_s: int | None,
        cleaner_buffer_bytes: int,
        cleaner_io_bytes_per_s: int | None,
        expire: Callable[[int], None],
        finish_transactions: Callable[[], float],
        holds_producer: Callable[[int], bool],
        shown_path: str = "",
    ) -> None:
        """Open the store in ``path``. ``shown_path``: name of the store in errors, if it is not ``path``."""
        self.fs = fs
        self.clock = clock
        self.path = path
        self._shown_path = shown_path or path
        self.is_replica = fs.exists(f"{path}/{REPLICA_FILE}")
        """Whether the store follows another store. No process may append to it then."""
        self.read_only_why = "" if read_only else self._why_read_only()
        """Why the store is read-only although the caller has not requested it; otherwise empty."""
        self.read_only = read_only or bool(self.read_only_why)
        self.recovery = recovery
        self._finish_transactions = finish_transactions
        self._holds_producer = holds_producer
        self._mutex = fork_safety.reentrant_lock(self, "_mutex")
        self._partitions: dict[tuple[str, int], Partition] = {}
        self._folders = TopicFolders(fs, path)
        self.administration = TopicAdmin(fs, path, self._folders)
        self.is_closed = False
        self.ship_signals = ShipSignals(fs, path)
        self.background = BackgroundWork(
            self,
            clock,
            threads=background,
            read_only=self.read_only,
            scrubber=self._make_scrubber(scrub_bytes_per_s),
            cleaner_buffer_bytes=cleaner_buffer_bytes,
            cleaner_io_bytes_per_s=cleaner_io_bytes_per_s,
            expire=expire,
            finish_transactions=finish_transactions,
        )
        self.store_id = self._open(create and not self.read_only)
        if not self.read_only:
            self.administration.sweep()
        self._network_mark = None if self.read_only else NetworkMark.warn_and_create(fs, path, clock.now_ms())
        fork_safety.on_fork(self, "_discard_parent_state")

    def _discard_parent_state(self) -> None:
        """Forget the network mark in a forked child: the parent removes it."""
        self._network_mark = None

    def _why_read_only(self) -> str:
        if self.is_replica:
            return "it is a replica"
        try:
            is_on_read_only_disk = self.fs.is_read_only(self.path)
        except OSError as error:  # there is no store yet
            if is_interrupt(error):
                raise
            return ""
        why = "it is on a read-only file system" if is_on_read_only_disk else ""
        # If the file is missing, the store is created next, and the creation reports errors.
        if not why and self.fs.exists(f"{self.path}/{STORE_FILE}"):
            why = self.fs.why_unwritable(self.path)
        if why:
            logger.warning("%s: opened read-only, as %s", self.path, why)
        return why

    def _open(self, create: bool) -> str:
        """Read the store's own file, or create the store. Return its id."""
        document = open_store_file(self.fs, self.path, create, self.clock.now_ms())
        store_id = self._folders.store_id = str(document["store_id"])
        if not self.read_only and needs_upgrade(document):
            self.administration.upgrade()
        return store_id

    # ------------------------------------------------------------ topics

    def names(self, *, internal: bool = False) -> list[str]:
        """Return the sorted names of the topics; with ``internal`` also those of internal topics."""
        self.check_open()
        return self._folders.names(internal=internal)

    def topic(self, name: str) -> Topic:
        """Return the topic with this name. Raises `UnknownTopic`."""
        self.check_open()
        check_topic_name(name, internal=True)
        return Topic(self, name, self._upgraded_file(name).topic_id)

    def _upgraded_file(self, name: str) -> TopicFile:
        """Return a topic's settings, upgraded to the current format if this process may write."""
        return self._folders.read(name) if self.read_only else self.administration.read_upgraded(name)

    def create(self, name: str, partitions: int, settings: TopicConfig) -> Topic:
        """Create a topic, durably. Raises `TopicExists`, `InvalidTopicName`, `InvalidConfig`."""
        self.check_writable("create a topic")
        return Topic(self, name, self.administration.create(name, partitions, settings))

    def ensure(self, name: str, partitions: int | None, settings: TopicConfig) -> Topic:
        """Return the topic with this name; create it with these settings if it does not exist.

        Raises `TopicExists` if it exists with another number of partitions than ``partitions``, `InvalidTopicName`,
        `InvalidConfig`.
        """
        self.check_writable("create a topic")
        wanted = 1 if partitions is None else partitions
        check_partition_count(wanted)
        if not self.has(name):
            with contextlib.suppress(TopicExists):  # another process may create it in the meantime
                self.create(name, wanted, settings)
        topic = self.topic(name)
        if partitions is not None and topic.partition_count != partitions:
            why = (
                f"it has {topic.partition_count} partitions, but {partitions} were asked for; nothing was changed."
                " Omit the number to accept any, or add partitions with alter_topic or 'segmentlog alter'"
            )
            raise TopicExists(name, why)
        return topic

    def internal_topic(self, name: str, partitions: int = 1, config: Mapping[str, object] | None = None) -> Topic:
        """Return an internal topic of the store; create it if it does not exist."""
        try:
            return self.topic(name)
        except UnknownTopic:
            with contextlib.suppress(TopicExists):
                self.create(name, partitions, TopicConfig.from_mapping(config or {}))
            return self.topic(name)

    def has(self, name: str) -> bool:
        """Return whether the topic exists; internal topics count."""
        return self.fs.exists(f"{self.path}/{name}/{TOPIC_FILE}")

    def alter(self, name: str, changes: dict[str, object], partitions: int | None) -> Topic:
        """Change a topic's configuration, or add partitions, durably. Raises `UnknownTopic`, `InvalidConfig`."""
        self.check_writable("alter a topic")
        return Topic(self, name, self.administration.alter(name, changes, partitions))

    def delete(self, name: str, topic_id: str | None = None) -> None:
        """Delete a topic with all its data. Other users of the topic get `UnknownTopic`.

        With ``topic_id``, raises `UnknownTopic` and deletes nothing if the name belongs to another topic.
        """
        self.check_writable("delete a topic")
        topic_id, gone = self.administration.delete(name, topic_id)
        with self._mutex:
            self._drop_partitions(name, topic_id)
        self.administration.remove(gone)

    def rename(self, name: str, new_name: str) -> Topic:
        """Rename a topic, durably. Raises `UnknownTopic`, `TopicExists`."""
        self.check_writable("rename a topic")
        with self.administration.locked():
            self._folders.read(name)
            if self.fs.exists(f"{self.path}/{new_name}", follow=False):
                raise TopicExists(new_name)
            with self._mutex:
                self._close_partitions(name)
            return Topic(self, new_name, self.administration.rename(name, new_name))

    def missing(self, topic_ids: Iterable[str]) -> set[str]:
        """Return the ids whose topics were certainly deleted. If a topic's file cannot be read, return an empty set."""
        wanted = set(topic_ids)
        with self.administration.locked():  # without it, a topic that is being renamed would look deleted
            gone = wanted - self._folders.by_id().keys()
            try:
                if gone:
                    self._folders.check_all_read()
            except StoreVersionError:  # reported to the process that opens the topic
                return set()
            return gone

    def read_topic_file(self, name: str, topic_id: str | None = None) -> TopicFile:
        """Return a topic's settings as they are on disk. Raises `UnknownTopic`, `StoreVersionError`.

        With ``topic_id``, raises `UnknownTopic` if the name belongs to another topic.
        """
        return self._folders.read(name, topic_id)

    def topic_name(self, topic_id: str) -> str:
        """Return the current name of a topic. Raises `UnknownTopic` if no topic has this id any more."""
        if self.read_only:
            name = self._folders.name_of(topic_id) or self._folders.name_of(topic_id)
            if name is None:
                raise UnknownTopic(topic_id, "there is no topic with this id")
            return name
        return self.administration.name_of(topic_id)

    def topic_names(self, topic_ids: Iterable[str]) -> dict[str, str]:
        """Return names of topics by id, for display: at least those of the given topics that exist."""
        return self._folders.names_of(topic_ids)

    # ------------------------------------------------------------ partitions

    def open_partition(self, name: str, number: int, topic_id: str | None = None) -> Partition:
        """Return a partition of this store, the same object every time. Raises `UnknownTopic`.

        With ``topic_id``, raises `UnknownTopic` also if the name belongs to another topic now.
        """
        self.check_open()
        if number.__class__ is not int:
            number = as_partition(number)
        partition = self._partitions.get((name, number))
        if partition is not None and not partition.is_stale and topic_id == partition.topic_id:
            return partition
        topic_id = self._upgraded_file(name).topic_id if topic_id is None else topic_id
        if partition is not None and not partition.is_stale and topic_id == partition.topic_id:
            return partition
        with self._mutex:
            self.check_open()
            file = self.read_topic_file(name, topic_id)
            partition = self._partitions.get((name, number))
            if partition is not None and not partition.is_stale and partition.topic_id == file.topic_id:
                return partition
            if partition is not None:  # callers that use it may continue to read data that they have mapped
                partition.handle.close_if_idle()
            if not isinstance(number, int) or not 0 <= number < file.partitions:
                raise UnknownTopic(name, f"it has no partition {number!r}, only 0 to {file.partitions - 1}")
            try:
                if not self.read_only:
                    check_not_set_aside(self.fs, self.path)
                    self.administration.sync_names(name)
                partition = self._make_partition(name, number, file.topic_id)
            except FileNotFoundError:
                self.read_topic_file(name, file.topic_id)  # deleted or renamed meanwhile?
                raise
            self._partitions[name, number] = partition
            policy = partition.config.fsync
            if policy.kind == "ms" and policy.amount < 1000:
                self.background.flush_soon()
            report = partition.recovery_report
            if report.verdict not in ("new", "clean", "live"):
                # Do not warn after a restore: the user requested it, and each reading command would print a warning.
                level = logging.INFO if report.verdict == "restored" else logging.WARNING
                logger.log(level, "%s/%d: %s: %s", name, number, report.verdict, report.why)
        if partition.last_stable_offset < partition.log_end_offset:
            self._finish_transactions()  # the first process after a crash ends transactions that are still open
        return partition

    def find_lost_range_end(self, name: str, number: int, topic_id: str, offset: int) -> tuple[int, int] | None:
        """See `Topic.find_lost_range_end`."""
        partition = self._partitions.get((name, number))
        if partition is None or partition.is_stale or partition.topic_id != topic_id:
            return find_lost_range_end(self.fs, f"{self.path}/{name}/{number}", offset)
        if not partition.epoch or offset >= partition.log_end_offset:
            return None
        end_offset = partition.check_position(offset)
        return None if end_offset == offset else (end_offset, epoch_at(partition.epochs(), end_offset))

    def _make_partition(self, name: str, number: int, topic_id: str) -> Partition:
        """Open a partition. If this process may read its files but not write them, open it read-only."""
        if self.read_only:
            return self._new_partition(name, number, topic_id, self.read_only_why)
        try:
            return self._new_partition(name, number, topic_id)
        except OSError as error:
            why = self._why_unwritable(f"{self.path}/{name}/{number}") if error.errno in _NOT_PERMITTED else ""
            if not why:
                raise
            logger.warning("%s/%d: opened read-only, as %s", name, number, why)
            return self._new_partition(name, number, topic_id, why)

    def _new_partition(self, name: str, number: int, topic_id: str, read_only_why: str = "") -> Partition:
        return Partition(
            f"{self.path}/{name}/{number}",
            name,
            number,
            lambda: self.read_topic_file(name, topic_id).config,
            topic_id=topic_id,
            load_batch_limit=lambda: self.read_topic_file(name, topic_id).largest_batch_bytes,
            fs=self.fs,
            clock=self.clock,
            read_only=self.read_only or bool(read_only_why),
            read_only_why=read_only_why,
            recovery=self.recovery,
            background=self.background.has_threads,
            on_open=self._opened,
            on_roll=self.background.on_segment_sealed,
            ship_signals=self.ship_signals,
            holds_producer=self._holds_producer,
        )

    def _why_unwritable(self, folder: str) -> str:
        """Return which file of a partition this process may not write; empty if it may write all of them."""
        for path in (folder, *(f"{folder}/{name}" for name in sorted(self.fs.listdir(folder)))):
            if why := self.fs.why_unwritable(path):
                return why
        return ""

    def on_partition(self, partition_id: PartitionId, do: Callable[[Partition], _T]) -> _T:
        """Call ``do`` with the partition that has this id, and return the result of ``do``.

        If the topic is renamed meanwhile, ``do`` may be called again. Raises `UnknownTopic` if the topic was deleted,
        and the errors of ``do``.
        """
        while True:
            name = self.topic_name(partition_id.topic_id)
            try:
                log = self.open_partition(name, partition_id.partition, partition_id.topic_id)
            except UnknownTopic:
                if self._folders.name_of(partition_id.topic_id) == name:
                    raise
                continue  # renamed meanwhile
            try:
                return do(log)
            except UnknownTopic:
                if not log.is_stale:
                    raise
            except StoreClosed:
                # A rename in this process closes the partition and removes it from `_partitions`: try again. If it is
                # still in `_partitions`, the store was closed.
                if self.is_closed or self._partitions.get((log.topic, log.number)) is log:
                    raise

    def _opened(self, handle: Handle) -> None:
        if self.fs.takes_descriptors:
            budget.register(handle)
        self.background.ensure_running()

    def recovery_reports(self) -> dict[tuple[str, int], RecoveryReport]:
        """Return the recovery report of each partition that was opened so far."""
        return {key: partition.recovery_report for key, partition in self._partitions.copy().items()}

    def _drop_partitions(self, name: str, topic_id: str) -> None:
        """Close and forget the open partitions of a deleted topic, but not those of a new topic of the same name."""
        for key in [key for key, log in self._partitions.copy().items() if key[0] == name and log.topic_id == topic_id]:
            self._partitions[key].abandon()
            # After an interrupt, the next call closes the remaining partitions, or `close` does.
            del self._partitions[key]

    def _close_partitions(self, name: str) -> None:
        for key in [key for key in self._partitions.copy() if key[0] == name]:
            self._partitions[key].close()
            del self._partitions[key]

    def opened_partitions(self) -> list[Partition]:
        """Return the partitions that this process has open."""
        return list(self._partitions.copy().values())

    def close_moved_partitions(self) -> None:
        """Close the partitions of topics that any process has deleted or renamed."""
        for key, partition in self._partitions.copy().items():
            if partition.handle.is_moved:
                with self._mutex:
                    if self._partitions.get(key) is partition and partition.handle.close_if_idle():
                        del self._partitions[key]

    # ------------------------------------------------------------ background work

    def _make_scrubber(self, bytes_per_s: int | None) -> Scrubber | None:
        if bytes_per_s is None:
            return None
        if not isinstance(bytes_per_s, int) or isinstance(bytes_per_s, bool) or bytes_per_s < 1:
            raise InvalidConfig("scrub_bytes_per_s", bytes_per_s, "a whole number of bytes per second, or None for off")
        return Scrubber(self.fs, self._scrub_targets, bytes_per_s)

    def _scrub_targets(self) -> Iterator[ScrubTarget]:
        for name, _ in self.all_partitions():
            yield ScrubTarget(name.topic, name.number, f"{self.path}/{name.topic}/{name.number}")

    def all_partitions(self) -> Iterator[tuple[PartitionName, TopicConfig]]:
        """Yield every partition of the store with its configuration, for background work.

        If the file of a topic cannot be read, the error is raised at the end.
        """
        first: OSError | None = None
        with contextlib.suppress(StoreClosed):  # while the threads are being stopped
            for topic in self.names(internal=True):
                try:
                    found = self.read_topic_file(topic)
                except (UnknownTopic, StoreVersionError):  # deleted meanwhile; damage is reported elsewhere
                    continue
                except OSError as error:  # later topics must not wait for this one
                    if is_interrupt(error):
                        raise
                    first = first or error
                    continue
                for number in range(found.partitions):
                    yield PartitionName(topic, number), found.config
        if first is not None:
            raise first

    # ------------------------------------------------------------ health, closing

    def health(self) -> dict[str, str]:
        """Return errors by name: failed partitions, and background work that keeps failing."""
        problems = self.background.health()
        for (name, number), partition in self._partitions.copy().items():
            if partition.failed is not None:
                problems[f"{name}/{number}"] = partition.failed
        return problems

    def close(self) -> None:
        """Stop background work and close every partition. If some fail, the first error is raised at the end."""
        with self._mutex:
            if self.is_closed and not self._partitions:
                return  # else an earlier close was interrupted
            self.is_closed = True
        # Without the mutex: a background thread may be waiting for it.
        self.background.close()
        first: Exception | None = None
        with self._mutex:
            for partition in self._partitions.values():
                try:
                    partition.close()
                except (SegmentlogError, OSError) as error:
                    if is_interrupt(error):
                        raise
                    first = first or error
            self._partitions.clear()
            if self._network_mark is not None and first is None:
                self._network_mark.remove()
        if first is not None:
            raise first

    def check_open(self) -> None:
        """Raise `StoreClosed` if the store is closed."""
        if self.is_closed:
            raise StoreClosed(f"store {self._shown_path}")

    def check_writable(self, what: str) -> None:
        """Raise `ReadOnlyStore` or `StoreClosed` if the caller cannot do ``what``, for example "create a topic"."""
        self.check_open()
        if self.read_only:
            raise ReadOnlyStore(self._shown_path, what, self.read_only_why)
        check_not_set_aside(self.fs, self.path)
