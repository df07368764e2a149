"""The topics of a store and their partitions, opened when they are asked for. Knows nothing of who uses them."""

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
from segmentlog.topics.background_work import Background
from segmentlog.topics.compaction_scheduler import PartitionName
from segmentlog.topics.descriptor_budget import budget
from segmentlog.topics.store_file import open_store_file
from segmentlog.topics.topic_admin import Administration, needs_upgrade
from segmentlog.topics.topic_folders import TopicFile, TopicFolders, check_partition_count

logger = logging.getLogger("segmentlog")

_T = TypeVar("_T")
_NOT_PERMITTED: Final = frozenset((errno.EACCES, errno.EPERM))


class Topic:
    """A topic of an open store. Thread-safe; get one from `LogStore.topic`.

    It stands for the topic, and not for its name: once that was deleted or renamed everything raises
    `UnknownTopic`, also when another topic has got the name.
    """

    def __init__(self, topics: Topics, name: str, topic_id: str) -> None:
        self._topics = topics
        self.name = name
        self.id = topic_id
        """A UUID: the topic's own as long as it is there, whatever it is called."""
        self.folder = f"{topics.path}/{name}"

    def __repr__(self) -> str:
        return f"<Topic {self.name}, {self.partition_count} partitions>"

    @property
    def config(self) -> TopicConfig:
        """The configuration as it is on disk now."""
        return self._topics.read_topic_file(self.name, self.id).config

    @property
    def partition_count(self) -> int:
        """How many partitions there are now."""
        return self._topics.read_topic_file(self.name, self.id).partitions

    def partition(self, number: int) -> Partition:
        """A partition, opened (and recovered if need be) when it is first asked for. Raises `UnknownTopic`."""
        return self._topics.open_partition(self.name, number, self.id)

    def find_lost_range_end(self, number: int, offset: int) -> tuple[int, int] | None:
        """Return (the end of the lost range that starts at ``offset``, the epoch there); None where none starts there.

        Opens no partition. Raises OSError, and what `Partition.check_position` does of one that is open here.
        """
        return self._topics.find_lost_range_end(self.name, number, self.id, offset)

    def partitions(self) -> list[Partition]:
        """All of them, opened."""
        return [self.partition(number) for number in range(self.partition_count)]


class Topics:
    """A folder of topics in one process. Thread-safe; knows of no producer, no group and no transaction.

    ``expire`` (called with a clock in ms that never jumps ahead) and ``finish_transactions`` are what background work
    does for those who do; a partition that is opened with undecided transactions calls ``finish_transactions``, too.
    Partitions call ``holds_producer`` before they forget a named producer, under their append lock.
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
        """``shown_path``: what errors call the store, where ``path`` is not what it was opened at."""
        self.fs = fs
        self.clock = clock
        self.path = path
        self._shown_path = shown_path or path
        self.is_replica = fs.exists(f"{path}/{REPLICA_FILE}")
        """Kept up with a store elsewhere: nobody appends to it here."""
        self.read_only_why = "" if read_only else self._why_read_only()
        """Why nothing can be written, where the caller did not ask for ``read_only``; empty where it can."""
        self.read_only = read_only or bool(self.read_only_why)
        self.recovery = recovery
        self._finish_transactions = finish_transactions
        self._holds_producer = holds_producer
        self._mutex = fork_safety.reentrant_lock(self, "_mutex")
        self._partitions: dict[tuple[str, int], Partition] = {}
        self._folders = TopicFolders(fs, path)
        self.administration = Administration(fs, path, self._folders)
        self.is_closed = False
        self.ship_signals = ShipSignals(fs, path)
        self.background = Background(
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
        self._neighbour = None if self.read_only else NetworkMark.warn_and_create(fs, path, clock.now_ms())
        fork_safety.on_fork(self, "_forget_parent")

    def _forget_parent(self) -> None:
        """In a forked child: the mark is the parent's to remove, and of the same machine."""
        self._neighbour = None

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
        if not why and self.fs.exists(f"{self.path}/{STORE_FILE}"):  # else it is to be created, which says what fails
            why = self.fs.why_unwritable(self.path)
        if why:
            logger.warning("%s: opened read-only, as %s", self.path, why)
        return why

    def _open(self, create: bool) -> str:
        """Read the store's own file, or make the store; its id."""
        document = open_store_file(self.fs, self.path, create, self.clock.now_ms())
        store_id = self._folders.store_id = str(document["store_id"])
        if not self.read_only and needs_upgrade(document):
            self.administration.upgrade()
        return store_id

    # ------------------------------------------------------------ topics

    def names(self, *, internal: bool = False) -> list[str]:
        """Names of the topics, sorted; those of the store itself only with ``internal``."""
        self.check_open()
        return self._folders.names(internal=internal)

    def topic(self, name: str) -> Topic:
        """The topic of that name. Raises `UnknownTopic`."""
        self.check_open()
        check_topic_name(name, internal=True)
        return Topic(self, name, self._settled_file(name).topic_id)

    def _settled_file(self, name: str) -> TopicFile:
        """What a topic is, in the format of today where this process may write it."""
        return self._folders.read(name) if self.read_only else self.administration.adopt(name)

    def create(self, name: str, partitions: int, settings: TopicConfig) -> Topic:
        """Make a topic, durably. Raises `TopicExists`, `InvalidTopicName`, `InvalidConfig`."""
        self.check_writable("create a topic")
        return Topic(self, name, self.administration.make(name, partitions, settings))

    def ensure(self, name: str, partitions: int | None, settings: TopicConfig) -> Topic:
        """The topic of that name, created with these settings if it does not exist; an existing topic stays as it is.

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
                f"it has {topic.partition_count} partitions, and {partitions} were asked for; nothing was changed."
                " Leave the number out to accept any, or add partitions with alter_topic or 'segmentlog alter'"
            )
            raise TopicExists(name, why)
        return topic

    def internal_topic(self, name: str, partitions: int = 1, config: Mapping[str, object] | None = None) -> Topic:
        """A topic of the store itself, made if it is not there, by whoever comes first."""
        try:
            return self.topic(name)
        except UnknownTopic:
            with contextlib.suppress(TopicExists):
                self.create(name, partitions, TopicConfig.from_mapping(config or {}))
            return self.topic(name)

    def has(self, name: str) -> bool:
        """Whether there is such a topic, the store's own included."""
        return self.fs.exists(f"{self.path}/{name}/{TOPIC_FILE}")

    def alter(self, name: str, changes: dict[str, object], partitions: int | None) -> Topic:
        """Change a topic's configuration, or add partitions, durably. Raises `UnknownTopic`, `InvalidConfig`."""
        self.check_writable("alter a topic")
        return Topic(self, name, self.administration.alter(name, changes, partitions))

    def delete(self, name: str, topic_id: str | None = None) -> None:
        """Delete a topic with everything in it. Whoever still uses it gets `UnknownTopic`.

        With ``topic_id``, raises `UnknownTopic` and deletes nothing when the name belongs to another topic.
        """
        self.check_writable("delete a topic")
        topic_id, gone = self.administration.delete(name, topic_id)
        with self._mutex:
            self._drop_partitions(name, topic_id)
        self.administration.remove(gone)

    def rename(self, name: str, new_name: str) -> Topic:
        """Give a topic another name, durably. Raises `UnknownTopic`, `TopicExists`."""
        self.check_writable("rename a topic")
        with self.administration.locked():
            self._folders.read(name)
            if self.fs.exists(f"{self.path}/{new_name}", follow=False):
                raise TopicExists(new_name)
            with self._mutex:
                self._close_partitions(name)
            return Topic(self, new_name, self.administration.rename(name, new_name))

    def missing(self, topic_ids: Iterable[str]) -> set[str]:
        """Those ids that no topic has any more, as far as that is known: none where a topic cannot be read."""
        wanted = set(topic_ids)
        with self.administration.locked():  # or a topic that is being renamed would look like one that is gone
            gone = wanted - self._folders.by_id().keys()
            try:
                if gone:
                    self._folders.check_all_read()
            except StoreVersionError:  # told by whoever opens it
                return set()
            return gone

    def read_topic_file(self, name: str, topic_id: str | None = None) -> TopicFile:
        """A topic's settings as they are on disk. Raises `UnknownTopic`, `StoreVersionError`.

        With ``topic_id`` the name has to be that topic's still.
        """
        return self._folders.read(name, topic_id)

    def topic_name(self, topic_id: str) -> str:
        """The name that a topic has now. Raises `UnknownTopic` when there is none with this id any more."""
        if self.read_only:
            name = self._folders.name_of(topic_id) or self._folders.name_of(topic_id)
            if name is None:
                raise UnknownTopic(topic_id, "there is no topic with this id")
            return name
        return self.administration.name_of(topic_id)

    def topic_names(self, topic_ids: Iterable[str]) -> dict[str, str]:
        """The names of those of these topics that there are, and maybe of more; for people."""
        return self._folders.names_of(topic_ids)

    # ------------------------------------------------------------ partitions

    def open_partition(self, name: str, number: int, topic_id: str | None = None) -> Partition:
        """A partition of this store, the same object every time. Raises `UnknownTopic`.

        With ``topic_id`` also when the name is another topic's by now.
        """
        self.check_open()
        if number.__class__ is not int:
            number = as_partition(number)
        partition = self._partitions.get((name, number))
        if partition is not None and not partition.is_stale and topic_id == partition.topic_id:
            return partition
        topic_id = self._settled_file(name).topic_id if topic_id is None else topic_id
        if partition is not None and not partition.is_stale and topic_id == partition.topic_id:
            return partition
        with self._mutex:
            self.check_open()
            file = self.read_topic_file(name, topic_id)
            partition = self._partitions.get((name, number))
            if partition is not None and not partition.is_stale and partition.topic_id == file.topic_id:
                return partition
            if partition is not None:  # whoever still has it may read on what it has mapped
                partition.handle.close_if_idle()
            if not isinstance(number, int) or not 0 <= number < file.partitions:
                raise UnknownTopic(name, f"it has no partition {number!r}, only 0 to {file.partitions - 1}")
            try:
                if not self.read_only:
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
                # The person who restored the store knows of it: no warning, and no line for each reading command.
                level = logging.INFO if report.verdict == "restored" else logging.WARNING
                logger.log(level, "%s/%d: %s: %s", name, number, report.verdict, report.why)
        if partition.last_stable_offset < partition.log_end_offset:
            self._finish_transactions()  # whoever comes first after a crash finishes what it left undecided
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
        """Open a partition; read-only where this process may read its files and not write them."""
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
            on_roll=self.background.rolled,
            ship_signals=self.ship_signals,
            holds_producer=self._holds_producer,
        )

    def _why_unwritable(self, folder: str) -> str:
        """The first file of a partition, or the folder itself, that this process may not write; empty for none."""
        for path in (folder, *(f"{folder}/{name}" for name in sorted(self.fs.listdir(folder)))):
            if why := self.fs.why_unwritable(path):
                return why
        return ""

    def on_partition(self, where: PartitionId, do: Callable[[Partition], _T]) -> _T:
        """What ``do`` returns for a partition of a topic, which it may be told anew under the topic's new name.

        Raises `UnknownTopic` when there is no such topic any more, and whatever ``do`` raises.
        """
        while True:
            name = self.topic_name(where.topic_id)
            try:
                log = self.open_partition(name, where.partition, where.topic_id)
            except UnknownTopic:
                if self._folders.name_of(where.topic_id) == name:
                    raise
                continue  # renamed in between
            try:
                return do(log)
            except UnknownTopic:
                if not log.is_stale:
                    raise
            except StoreClosed:
                # Renamed by this process: that takes it out of the store, and whoever just closes it does not.
                if self.is_closed or self._partitions.get((log.topic, log.number)) is log:
                    raise

    def _opened(self, handle: Handle) -> None:
        if self.fs.takes_descriptors:
            budget.opened(handle)
        self.background.ensure_running()

    def recovery_reports(self) -> dict[tuple[str, int], RecoveryReport]:
        """What opening found, for each partition that was opened so far."""
        return {key: partition.recovery_report for key, partition in self._partitions.copy().items()}

    def _drop_partitions(self, name: str, topic_id: str) -> None:
        """Those of that topic: another thread may have made one anew under the name, and opened it."""
        for key in [key for key, log in self._partitions.copy().items() if key[0] == name and log.topic_id == topic_id]:
            self._partitions[key].abandon()
            del self._partitions[key]  # after: what an interrupt leaves is closed with the store, or the next time

    def _close_partitions(self, name: str) -> None:
        for key in [key for key in self._partitions.copy() if key[0] == name]:
            self._partitions[key].close()
            del self._partitions[key]

    def opened_partitions(self) -> list[Partition]:
        """The partitions that this process has open."""
        return list(self._partitions.copy().values())

    def let_go_of_moved(self) -> None:
        """Close and forget the partitions of topics that were deleted or renamed, by whatever process."""
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
            raise InvalidConfig("scrub_bytes_per_s", bytes_per_s, "a whole number of bytes a second, or None for off")
        return Scrubber(self.fs, self._scrub_targets, bytes_per_s)

    def _scrub_targets(self) -> Iterator[ScrubTarget]:
        for name, _ in self.all_partitions():
            yield ScrubTarget(name.topic, name.number, f"{self.path}/{name.topic}/{name.number}")

    def all_partitions(self) -> Iterator[tuple[PartitionName, TopicConfig]]:
        """Every partition of the store with its configuration, for background work.

        What keeps a topic's file from being read is raised at the end.
        """
        first: OSError | None = None
        with contextlib.suppress(StoreClosed):  # while the threads are being stopped
            for topic in self.names(internal=True):
                try:
                    found = self.read_topic_file(topic)
                except (UnknownTopic, StoreVersionError):  # deleted meanwhile, or told by others
                    continue
                except OSError as error:  # topics behind it are not to wait for that
                    if is_interrupt(error):
                        raise
                    first = first or error
                    continue
                for number in range(found.partitions):
                    yield PartitionName(topic, number), found.config
        if first is not None:
            raise first

    # ------------------------------------------------------------ all of it

    def health(self) -> dict[str, str]:
        """What is wrong, by name: failed partitions and background work that keeps failing."""
        problems = self.background.health()
        for (name, number), partition in self._partitions.copy().items():
            if partition.failed is not None:
                problems[f"{name}/{number}"] = partition.failed
        return problems

    def close(self) -> None:
        """End background work and close every partition, even if one fails: the first error is raised at the end."""
        with self._mutex:
            if self.is_closed and not self._partitions:
                return  # else it was interrupted on its way
            self.is_closed = True
        # Without the mutex: a tick may be waiting for it.
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
            if self._neighbour is not None and first is None:
                self._neighbour.remove()
        if first is not None:
            raise first

    def check_open(self) -> None:
        """Raise `StoreClosed`."""
        if self.is_closed:
            raise StoreClosed(f"store {self._shown_path}")

    def check_writable(self, what: str) -> None:
        """Raise `ReadOnlyStore` or `StoreClosed`."""
        self.check_open()
        if self.read_only:
            raise ReadOnlyStore(self._shown_path, what, self.read_only_why)
