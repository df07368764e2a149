"""The store: a folder of topics, each a folder of partitions."""

from __future__ import annotations

import _thread
import atexit
import contextlib
import fcntl
import json
import logging
import os
import sys
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeVar

from segmentlog.arguments import as_bool, as_mapping, as_partition
from segmentlog.clock import Clock
from segmentlog.config import CLEANER_BUFFER_BYTES, TopicConfig
from segmentlog.errors import (
    InvalidConfig,
    ReadOnlyStore,
    SegmentlogError,
    StoreClosed,
    StoreVersionError,
    TopicExists,
    UnknownTopic,
)
from segmentlog.format.names import (
    FORMAT_VERSION,
    OFFSETS_TOPIC,
    READABLE_FORMATS,
    STORE_FILE,
    TOPIC_FILE,
    TRANSACTIONS_TOPIC,
    check_topic_name,
)
from segmentlog.inspection.scrubber import Scrubber, ScrubReport, ScrubTarget
from segmentlog.log.handle import Handle
from segmentlog.log.partition import Partition
from segmentlog.records import PartitionId, RecoveryMode
from segmentlog.storage import forks
from segmentlog.storage.fs import FileSystem, read_file, replace_file
from segmentlog.storage.network import NetworkMark
from segmentlog.topics.administration import Administration, needs_upgrade
from segmentlog.topics.background import Background, PartitionName
from segmentlog.topics.descriptors import budget
from segmentlog.topics.folders import TopicFile, TopicFolders

if TYPE_CHECKING:
    from segmentlog.consuming.consumer import Consumer, OffsetReset, Rebalanced, Start
    from segmentlog.groups.admin import Groups
    from segmentlog.groups.positions import GroupOffsets
    from segmentlog.log.partition import Ack, Isolation
    from segmentlog.policy.assignment import Strategy
    from segmentlog.policy.partitioner import Partitioner
    from segmentlog.producing.producer import Producer
    from segmentlog.tables.table import Table
    from segmentlog.transactions.transactions import Transactions

logger = logging.getLogger("segmentlog")


_T = TypeVar("_T")

OFFSETS_RETENTION_MINUTES: Final = 7 * 24 * 60
"""Kafka's `offsets.retention.minutes`."""


class Topic:
    """A topic of an open store. Thread-safe; get one from `LogStore.topic`.

    It stands for the topic, and not for its name: once that was deleted or renamed everything raises
    `UnknownTopic`, also when another topic has got the name.
    """

    def __init__(self, store: LogStore, name: str, topic_id: str) -> None:
        self._store = store
        self.name = name
        self.id = topic_id
        """A UUID: the topic's own as long as it is there, whatever it is called."""
        self.folder = f"{store.path}/{name}"

    def __repr__(self) -> str:
        return f"<Topic {self.name}, {self.partition_count} partitions>"

    @property
    def config(self) -> TopicConfig:
        """The configuration as it is on disk now."""
        return self._store.read_topic_file(self.name, self.id).config

    @property
    def partition_count(self) -> int:
        """How many partitions there are now."""
        return self._store.read_topic_file(self.name, self.id).partitions

    def partition(self, number: int) -> Partition:
        """A partition, opened (and recovered if need be) when it is first asked for. Raises `UnknownTopic`."""
        return self._store.open_partition(self.name, number, self.id)

    def partitions(self) -> list[Partition]:
        """All of them, opened."""
        return [self.partition(number) for number in range(self.partition_count)]


class LogStore:
    """A store: open one with `segmentlog.open`, close it or use it in a ``with``. Thread-safe.

    Any number of processes may have it open. After a fork the child may go on using it: it
    opens its files anew.

    One that is dropped, with everything that was got from it, is closed by a thread some time after that, with a
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
        fs: FileSystem | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.path = _as_path(path)
        create, read_only = as_bool("create", create), as_bool("read_only", read_only)
        background = as_bool("background", background)
        if not isinstance(recovery, str) or recovery not in ("strict", "tail", "salvage"):
            raise InvalidConfig("recovery", recovery, "'strict', 'tail' or 'salvage'")
        self._fs = fs or FileSystem()
        if type(offsets_retention_minutes) is not int or offsets_retention_minutes < 1:
            raise InvalidConfig("offsets.retention.minutes", offsets_retention_minutes, "a whole number from 1 on")
        self._offsets_retention_ms = offsets_retention_minutes * 60_000
        self.read_only = read_only or self._is_on_read_only_disk()
        self.recovery: RecoveryMode = recovery
        self._clock = clock or Clock()
        self._clock.steady_ms()  # from here on a jump of the wall clock is noticed
        self._mutex = forks.reentrant_lock(self, "_mutex")
        self._partitions: dict[tuple[str, int], Partition] = {}
        self._topics = TopicFolders(self._fs, self.path)
        self._administration = Administration(self._fs, self.path, self._topics)
        self._group_offsets: GroupOffsets | None = None
        self._groups: Groups | None = None
        self.members: weakref.WeakSet[Consumer] = weakref.WeakSet()
        """Consumers that are members of groups: they leave when the store is closed."""
        self.producers: weakref.WeakSet[Producer] = weakref.WeakSet()
        """They are flushed and closed with the store."""
        self.left_behind: deque[Producer] = deque()
        """Producers that were dropped with records yet to append."""
        self._transactions: Transactions | None = None
        self._closed = False
        self._background = Background(
            _Partitions(self),
            self._clock,
            threads=background,
            read_only=self.read_only,
            scrubber=self._make_scrubber(scrub_bytes_per_s),
            cleaner_buffer_bytes=cleaner_dedupe_buffer_bytes,
            cleaner_io_bytes_per_s=cleaner_io_max_bytes_per_second,
            expire=self._tidy_up,
            finish_transactions=self.finish_transactions,
        )
        self.store_id = self._topics.store_id = self._open(create and not self.read_only)
        if not self.read_only:
            self._administration.sweep()
        self._neighbour = None if self.read_only else NetworkMark.leave(self._fs, self.path, self._clock.now_ms())
        _open_stores.add(self)
        forks.on_fork(self, "_forget_parent")
        self._is_complete = True
        self._background.ensure_running()

    def _forget_parent(self) -> None:
        """In a forked child: the mark is the parent's to remove, and of the same machine."""
        self._neighbour = None
        self.members = weakref.WeakSet()
        self.left_behind = deque()

    def _is_on_read_only_disk(self) -> bool:
        try:
            read_only = self._fs.is_read_only(self.path)
        except OSError:  # not there yet
            return False
        if read_only:
            logger.warning("%s is on a read-only file system: opened read_only", self.path)
        return read_only

    def _open(self, create: bool) -> str:
        """Read the store's own file, making the store if that is wanted; its id."""
        store_file = f"{self.path}/{STORE_FILE}"
        try:
            text = read_file(self._fs, store_file)
        except NotADirectoryError:
            raise StoreVersionError(self.path, "it is not a folder; a store is one") from None
        except FileNotFoundError:
            if not create:
                why = f"there is no store here (no {STORE_FILE}); check the path, or create one"
                raise StoreVersionError(self.path, why) from None
            return self._create(store_file)
        return self._check_store_file(store_file, text)

    def _create(self, store_file: str) -> str:
        if os.path.isdir(self.path) and any(name != "lost+found" for name in self._fs.listdir(self.path)):
            why = f"the folder is not empty and holds no store (no {STORE_FILE}); choose another one"
            raise StoreVersionError(self.path, why)
        try:
            os.makedirs(self.path, exist_ok=True)
        except OSError as error:
            raise StoreVersionError(self.path, f"the folder cannot be made: {error.strerror}") from error
        with forks.held_open(self._fs, self.path, os.O_RDONLY | os.O_DIRECTORY) as folder_fd:
            self._fs.flock(folder_fd, fcntl.LOCK_EX)  # of two processes that make it, one does
            if not os.path.exists(store_file):
                document = {
                    "format": FORMAT_VERSION,
                    "store_id": os.urandom(16).hex(),
                    "created_ms": self._clock.now_ms(),
                }
                replace_file(self._fs, store_file, json.dumps(document, indent=2).encode() + b"\n")
                self._fs.sync_folder(os.path.dirname(self.path))
        return self._check_store_file(store_file, read_file(self._fs, store_file))

    def _check_store_file(self, path: str, text: bytes) -> str:
        try:
            document = json.loads(text)
            version, store_id = document["format"], document["store_id"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise StoreVersionError(path, "damaged: it should be JSON with 'format' and 'store_id'") from None
        if version not in READABLE_FORMATS:
            known = " and ".join(map(str, READABLE_FORMATS))
            why = f"the store has format {version!r}, and this version of segmentlog reads format {known}"
            raise StoreVersionError(path, f"{why}; use the version that wrote it")
        self._topics.store_id = str(store_id)
        if not self.read_only and needs_upgrade(document):
            self._administration.upgrade()
        return str(store_id)

    def __enter__(self) -> LogStore:
        self._check_open()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __del__(self) -> None:
        # The collector has found that nobody can reach it any more, nor what belongs to it. Whatever thread comes by
        # runs this, at any point and with any lock held, so another one closes it, and brings it back for that.
        if self._is_complete and not self._closed and not sys.is_finalizing():
            _being_closed.add(self)
            try:
                _thread.start_new_thread(_begin_to_close, (self,))
            except RuntimeError:  # no thread to spare: its descriptors go by themselves, as if its process had died
                _being_closed.discard(self)
            warnings.warn(f"store {self.path} was not closed", ResourceWarning, stacklevel=1, source=self)

    def __repr__(self) -> str:
        return f"<LogStore {self.path}>"

    # ------------------------------------------------------------ topics

    def topics(self, *, internal: bool = False) -> list[str]:
        """Names of the topics, sorted; those of the store itself only with ``internal``."""
        self._check_open()
        return self._topics.names(internal=as_bool("internal", internal))

    def topic(self, name: str) -> Topic:
        """The topic of that name. Raises `UnknownTopic`."""
        self._check_open()
        check_topic_name(name, internal=True)
        return Topic(self, name, self._settled_file(name).topic_id)

    def _settled_file(self, name: str) -> TopicFile:
        """What a topic is, in the format of today where this process may write it."""
        return self._topics.read(name) if self.read_only else self._administration.adopt(name)

    def create_topic(
        self, name: str, partitions: int = 1, config: Mapping[str, object] | None = None, **options: object
    ) -> Topic:
        """Make a topic. ``options`` are keys of the topic config with underscores, ``config`` also takes dots.

        Durable when it returns. Raises `TopicExists`, `InvalidTopicName`, `InvalidConfig`.
        """
        self._check_writable("create a topic")
        check_topic_name(name)
        config = as_mapping("config", config, _CONFIG_WANTED)
        return self._make_topic(name, partitions, TopicConfig.from_mapping({**config, **options}))

    def internal_topic(self, name: str, partitions: int = 1, config: Mapping[str, object] | None = None) -> Topic:
        """A topic of the store itself, made if it is not there, by whoever comes first."""
        try:
            return self.topic(name)
        except UnknownTopic:
            self._check_writable("create a topic")
            with contextlib.suppress(TopicExists):
                self._make_topic(name, partitions, TopicConfig.from_mapping(config or {}))
            return self.topic(name)

    def _make_topic(self, name: str, partitions: int, settings: TopicConfig) -> Topic:
        return Topic(self, name, self._administration.make(name, partitions, settings))

    def alter_topic(
        self,
        name: str,
        config: Mapping[str, object] | None = None,
        *,
        partitions: int | None = None,
        **options: object,
    ) -> Topic:
        """Change keys of a topic's configuration, or add partitions, while it is in use, by whatever process.

        Keys with more partitions may go elsewhere from now on. There cannot be fewer. Durable
        when it returns; appends that come after it see it.
        """
        self._check_writable("alter a topic")
        check_topic_name(name)
        config = as_mapping("config", config, _CONFIG_WANTED)
        return Topic(self, name, self._administration.alter(name, {**config, **options}, partitions))

    def delete_topic(self, name: str) -> None:
        """Delete a topic with everything in it, and groups' positions. Whoever still uses it gets `UnknownTopic`.

        One that is made anew under the name is another topic: nothing that knew this one takes it for it.
        """
        self._check_writable("delete a topic")
        check_topic_name(name)
        gone = self._administration.delete(name)
        with self._mutex:
            self._drop_partitions(name)
        self._administration.remove(gone)
        self._forget_positions()

    def rename_topic(self, name: str, new_name: str) -> Topic:
        """Give a topic another name. Who uses it under the old one gets `UnknownTopic`.

        Groups go on under the new name, and so do transactions that are open: they know the topic by its `Topic.id`.
        """
        self._check_writable("rename a topic")
        check_topic_name(name)
        check_topic_name(new_name)
        with self._administration.locked():
            self._topics.read(name)
            if os.path.lexists(f"{self.path}/{new_name}"):
                raise TopicExists(new_name)
            with self._mutex:
                self._close_partitions(name)
            return Topic(self, new_name, self._administration.rename(name, new_name))

    def read_topic_file(self, name: str, topic_id: str | None = None) -> TopicFile:
        """A topic's settings as they are on disk. Raises `UnknownTopic`, `StoreVersionError`.

        With ``topic_id`` the name has to be that topic's still.
        """
        file = self._topics.read(name)
        if topic_id is not None and file.topic_id != topic_id:
            raise UnknownTopic(name, "it was deleted or renamed while it was in use, and another one has the name")
        return file

    def topic_name(self, topic_id: str) -> str:
        """The name that a topic has now. Raises `UnknownTopic` when there is none with this id any more."""
        if self.read_only:
            name = self._topics.name_of(topic_id) or self._topics.name_of(topic_id)
            if name is None:
                raise UnknownTopic(topic_id, "there is no topic with this id")
            return name
        return self._administration.name_of(topic_id)

    def topic_names(self, topic_ids: Iterable[str]) -> dict[str, str]:
        """The names of those of these topics that there are, and maybe of more; for people."""
        return self._topics.names_of(topic_ids)

    # ------------------------------------------------------------ partitions

    def open_partition(self, name: str, number: int, topic_id: str | None = None) -> Partition:
        """A partition of this store, the same object every time. Raises `UnknownTopic`.

        With ``topic_id`` also when the name is another topic's by now.
        """
        self._check_open()
        if number.__class__ is not int:
            number = as_partition(number)
        partition = self._partitions.get((name, number))
        if partition is not None and not partition.is_stale and topic_id == partition.topic_id:
            return partition
        topic_id = self._settled_file(name).topic_id if topic_id is None else topic_id
        if partition is not None and not partition.is_stale and topic_id == partition.topic_id:
            return partition
        with self._mutex:
            self._check_open()
            file = self.read_topic_file(name, topic_id)
            partition = self._partitions.get((name, number))
            if partition is not None and not partition.is_stale and partition.topic_id == file.topic_id:
                return partition
            if partition is not None:  # whoever still has it may read on what it has mapped
                partition.handle.release()
            if not isinstance(number, int) or not 0 <= number < file.partitions:
                raise UnknownTopic(name, f"it has no partition {number!r}, only 0 to {file.partitions - 1}")
            try:
                partition = Partition(
                    f"{self.path}/{name}/{number}",
                    name,
                    number,
                    lambda: self.read_topic_file(name, file.topic_id).config,
                    topic_id=file.topic_id,
                    load_batch_limit=lambda: self.read_topic_file(name, file.topic_id).largest_batch_bytes,
                    fs=self._fs,
                    clock=self._clock,
                    read_only=self.read_only,
                    recovery=self.recovery,
                    background=self._background.has_threads,
                    on_open=self._opened,
                    on_roll=self._background.rolled,
                )
            except FileNotFoundError:
                self.read_topic_file(name, file.topic_id)  # deleted or renamed meanwhile?
                raise
            self._partitions[name, number] = partition
            policy = partition.config.fsync
            if policy.kind == "ms" and policy.amount < 1000:
                self._background.flush_soon()
            report = partition.recovery_report
            if report.verdict not in ("new", "clean", "live"):
                logger.warning("%s/%d: %s: %s", name, number, report.verdict, report.why)
        if partition.last_stable_offset < partition.log_end_offset:
            self.finish_transactions()  # whoever comes first after a crash finishes what it left undecided
        return partition

    def on_partition(self, where: PartitionId, do: Callable[[Partition], _T]) -> _T:
        """What ``do`` returns for a partition of a topic, which it may be told anew under the topic's new name.

        Raises `UnknownTopic` when there is no such topic any more, and whatever ``do`` raises.
        """
        while True:
            name = self.topic_name(where.topic_id)
            try:
                log = self.open_partition(name, where.partition, where.topic_id)
            except UnknownTopic:
                if self._topics.name_of(where.topic_id) == name:
                    raise
                continue  # renamed in between
            try:
                return do(log)
            except UnknownTopic:
                if not log.is_stale:
                    raise
            except StoreClosed:
                # Renamed by this process: that takes it out of the store, and whoever just closes it does not.
                if self._closed or self._partitions.get((log.topic, log.number)) is log:
                    raise

    def _opened(self, handle: Handle) -> None:
        budget.opened(handle)
        self._background.ensure_running()

    def recovery_reports(self) -> dict[tuple[str, int], Any]:
        """What opening found, for each partition that was opened so far."""
        return {key: partition.recovery_report for key, partition in list(self._partitions.items())}

    def _drop_partitions(self, name: str) -> None:
        for key in [key for key in self._partitions if key[0] == name]:
            self._partitions[key].abandon()
            del self._partitions[key]  # after: what an interrupt leaves is closed with the store, or the next time

    def _close_partitions(self, name: str) -> None:
        for key in [key for key in self._partitions if key[0] == name]:
            self._partitions[key].close()
            del self._partitions[key]

    # ------------------------------------------------------------ producing and consuming

    def producer(
        self,
        *,
        linger_ms: float = 5,
        batch_size: int = 256 * 1024,
        partitioner: Partitioner | None = None,
        ack: Ack | None = None,
        name: str | None = None,
        enable_idempotence: bool = True,
        transaction_timeout_ms: int = 60_000,
    ) -> Producer:
        """A producer that gathers records into batches; see `Producer`."""
        from segmentlog.producing.producer import Producer

        self._check_writable("produce")
        return Producer(
            self,
            name=name,
            enable_idempotence=enable_idempotence,
            transaction_timeout_ms=transaction_timeout_ms,
            linger_ms=linger_ms,
            batch_size=batch_size,
            partitioner=partitioner,
            ack=ack,
            background=self._background.has_threads,
        )

    def consumer(
        self,
        *topics: str | tuple[str, int],
        start: Start = "earliest",
        follow: bool = False,
        isolation: Isolation = "read_uncommitted",
        durable_only: bool = False,
        fetch_bytes: int = 1 << 20,
        skip_damaged: bool = False,
        auto_offset_reset: OffsetReset | None = None,
        group: str | None = None,
        auto_commit: bool = False,
        auto_commit_interval_ms: int = 5000,
        assignment_strategy: Strategy = "sticky",
        max_poll_interval_ms: int = 300_000,
        max_poll_records: int = 500,
        client_id: str = "",
        on_assigned: Rebalanced | None = None,
        on_revoked: Rebalanced | None = None,
        on_lost: Rebalanced | None = None,
    ) -> Consumer:
        """A consumer of topics, partitions or patterns, alone or as a member of a group; see `Consumer`."""
        from segmentlog.consuming.consumer import Consumer

        self._check_open()
        return Consumer(
            self,
            topics,
            start=start,
            follow=follow,
            isolation=isolation,
            durable_only=durable_only,
            fetch_bytes=fetch_bytes,
            skip_damaged=skip_damaged,
            auto_offset_reset=auto_offset_reset,
            group=group,
            auto_commit=auto_commit,
            auto_commit_interval_ms=auto_commit_interval_ms,
            assignment_strategy=assignment_strategy,
            max_poll_interval_ms=max_poll_interval_ms,
            max_poll_records=max_poll_records,
            client_id=client_id,
            on_assigned=on_assigned,
            on_revoked=on_revoked,
            on_lost=on_lost,
        )

    @property
    def transactions(self) -> Transactions:
        """Names of producers and their transactions."""
        if self._transactions is None:
            from segmentlog.transactions.transactions import Transactions

            with self._mutex:
                self._transactions = self._transactions or Transactions(self, self._fs, self._clock)
        return self._transactions

    def finish_transactions(self, now_ms: int | None = None) -> float:
        """End the transactions of processes that are gone, or that took too long; with ``background`` a thread does it.

        ``now_ms`` is monotonic. Returns the seconds until it should be asked again.
        """
        if self._closed or self.read_only or not self._has_internal(TRANSACTIONS_TOPIC):
            return 1.0
        try:
            return self.transactions.finish(now_ms)
        except StoreClosed:  # meanwhile
            return 1.0

    def _has_internal(self, topic: str) -> bool:
        return os.path.exists(f"{self.path}/{topic}/{TOPIC_FILE}")

    def opened_partitions(self) -> list[Partition]:
        """The partitions that this process has open."""
        return list(self._partitions.values())

    @property
    def group_offsets(self) -> GroupOffsets:
        """The committed positions of all groups."""
        if self._group_offsets is None:
            from segmentlog.groups.positions import GroupOffsets

            with self._mutex:
                self._group_offsets = self._group_offsets or GroupOffsets(self)
        return self._group_offsets

    @property
    def groups(self) -> Groups:
        """The consumer groups: list, describe, reset, delete."""
        self._check_open()
        if self._groups is None:
            from segmentlog.groups.admin import Groups

            with self._mutex:
                self._groups = self._groups or Groups(self, self._fs, self._clock, self.group_offsets)
        return self._groups

    def _forget_positions(self) -> None:
        """Forget groups' positions in topics that are gone. Nobody takes them for another topic's: it may be late."""
        if self._has_internal(OFFSETS_TOPIC):
            seen = self.group_offsets.topic_ids()
            with self._administration.locked():  # or a topic that is being renamed would look like one that is gone
                gone = seen - self._topics.by_id().keys()
            self.group_offsets.forget_topics(gone)

    def _tidy_up(self, now_ms: int) -> None:
        """What background work does for the store now and then."""
        self._administration.sweep()
        if self._has_internal(OFFSETS_TOPIC) and self.groups.expire_tick(now_ms, self._offsets_retention_ms):
            self._forget_positions()

    def table(
        self, topic: str, *, follow: bool = False, isolation: Isolation = "read_uncommitted", durable_only: bool = False
    ) -> Table:
        """The topic as a table: a read-only mapping of the latest value of each key; see `Table`."""
        from segmentlog.tables.table import Table

        self._check_open()
        return Table(self, topic, follow=follow, isolation=isolation, durable_only=durable_only)

    # ------------------------------------------------------------ background, closing

    def _make_scrubber(self, bytes_per_s: int | None) -> Scrubber | None:
        if bytes_per_s is None:
            return None
        if not isinstance(bytes_per_s, int) or isinstance(bytes_per_s, bool) or bytes_per_s < 1:
            raise InvalidConfig("scrub_bytes_per_s", bytes_per_s, "a whole number of bytes a second, or None for off")
        return Scrubber(self._fs, self._scrub_targets, bytes_per_s)

    def _scrub_targets(self) -> Iterator[ScrubTarget]:
        for name, _ in self._all_partitions():
            yield ScrubTarget(name.topic, name.number, f"{self.path}/{name.topic}/{name.number}")

    def _all_partitions(self) -> Iterator[tuple[PartitionName, TopicConfig]]:
        """Every partition of the store with its configuration, for background work.

        What keeps a topic's file from being read is raised at the end.
        """
        first: OSError | None = None
        with contextlib.suppress(StoreClosed):  # while the threads are being stopped
            for topic in self.topics(internal=True):
                try:
                    found = self.read_topic_file(topic)
                except (UnknownTopic, StoreVersionError):  # deleted meanwhile, or told by others
                    continue
                except OSError as error:  # topics behind it are not to wait for that
                    first = first or error
                    continue
                for number in range(found.partitions):
                    yield PartitionName(topic, number), found.config
        if first is not None:
            raise first

    def flush_tick(self, now_ms: int | None = None) -> float:
        """One turn of the flusher; see `Background.flush_tick`. With ``background`` a thread does it.

        Producers that were dropped with records yet to append are closed here.
        """
        while self.left_behind:
            self.left_behind.popleft().close()
        return self._background.flush_tick(now_ms)

    def retention_tick(self, now_ms: int | None = None) -> float:
        """One turn of retention; see `Background.retention_tick`. With ``background`` a thread does it."""
        self._check_writable("delete old segments")
        return self._background.retention_tick(now_ms)

    def cleaner_tick(self, now_ms: int | None = None) -> float:
        """One turn of compaction; see `Background.cleaner_tick`. With ``background`` a thread does it."""
        self._check_writable("compact")
        return self._background.cleaner_tick(now_ms)

    def scrub_tick(self, now_ms: int | None = None) -> float:
        """One turn of the scrubber; see `Background.scrub_tick`. With ``background`` a thread does it."""
        self._check_open()
        return self._background.scrub_tick(now_ms)

    def scrub_report(self) -> ScrubReport:
        """How much the scrubber has checked so far, and the damage it knows of. Empty while scrubbing is off."""
        return self._background.scrub_report()

    def health(self) -> dict[str, str]:
        """What is wrong, by name: failed partitions and background work that keeps failing. Empty when all is well."""
        problems = self._background.health()
        if self._transactions is not None:
            for producer, why in self._transactions.troubles.items():
                problems[f"transaction of {producer}"] = f"cannot be finished: {why}"
        for (name, number), partition in list(self._partitions.items()):
            if partition.failed is not None:
                problems[f"{name}/{number}"] = partition.failed
        return problems

    def close(self) -> None:
        """Flush and close the producers, fsync everything appended here and leave a clean store. Idempotent.

        Members of groups leave them; those with ``auto_commit`` commit. Every producer and every partition
        is closed even if one fails; the first error is raised at the end.
        """
        first = self._close_producers()
        for consumer in list(self.members):
            try:
                consumer.close()
            except (SegmentlogError, OSError) as error:  # its locks are free all the same
                logger.warning("%s: a consumer could not be closed cleanly: %s", self.path, error)
        with self._mutex:
            if self._closed and not self._partitions:
                return  # else it was interrupted on its way
            self._closed = True
        # Without the mutex: a tick may be waiting for it.
        self._background.close()
        with self._mutex:
            for partition in self._partitions.values():
                try:
                    partition.close()
                except (SegmentlogError, OSError) as error:
                    first = first or error
            self._partitions.clear()
            _open_stores.discard(self)
            if self._neighbour is not None and first is None:
                self._neighbour.remove()
        if first is not None:
            raise first

    def _close_producers(self) -> Exception | None:
        """Flush and close them all; the first error, with a note of what was left unsent."""
        first: Exception | None = None
        for producer in [*self.producers, *self.left_behind]:
            unsent_count = producer.unsent_count
            try:
                producer.close()
            except (SegmentlogError, OSError) as error:
                name = f"producer {producer.name!r}" if producer.name else "a producer without a name"
                error.add_note(f"when the store was closed, with {unsent_count} records of {name} yet to append")
                first = first or error
        self.left_behind.clear()
        return first

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosed(f"store {self.path}")

    def check_writable(self, what: str) -> None:
        """Raise `ReadOnlyStore` or `StoreClosed`, for the store's own rooms."""
        self._check_writable(what)

    def _check_writable(self, what: str) -> None:
        self._check_open()
        if self.read_only:
            raise ReadOnlyStore(self.path, what)


class _Partitions:
    """The store as background work sees it."""

    def __init__(self, store: LogStore) -> None:
        self._store = store

    def opened(self) -> list[Partition]:
        return list(self._store._partitions.values())

    def names(self) -> Iterator[tuple[PartitionName, TopicConfig]]:
        return self._store._all_partitions()

    def open(self, name: PartitionName) -> Partition:
        return self._store.open_partition(*name)


def _as_path(path: object) -> str:
    """An absolute path; `~` is one's home, as in a shell. Raises `InvalidConfig`."""
    wanted = "the path of a folder"
    if not isinstance(path, str | bytes | os.PathLike) or not (text := os.fsdecode(path)) or "\0" in text:
        raise InvalidConfig("path", path, wanted)
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        raise InvalidConfig("path", path, wanted) from None
    return os.path.abspath(os.path.expanduser(text))


_CONFIG_WANTED = "a mapping of keys of the topic config to their values"


_open_stores: weakref.WeakSet[LogStore] = weakref.WeakSet()


class _BeingClosed(set[LogStore]):
    """Dropped ones; a forked child leaves them to its parent."""


_being_closed = _BeingClosed()
forks.on_fork(_being_closed, "clear")
_CLOSING_S: Final = 10.0


def _begin_to_close(store: LogStore) -> None:
    """In a thread that `threading` does not know: starting one that it knows takes locks, as no finalizer may."""
    try:
        threading.Thread(target=_close_dropped, args=(store,), name="segmentlog-close", daemon=True).start()
    except RuntimeError:
        _being_closed.discard(store)


def _close_dropped(store: LogStore) -> None:
    """Close a store that nobody can reach any more."""
    try:
        for partition in store.opened_partitions():
            partition.handle.found_again()
        store.close()
    except Exception as error:
        logger.warning("%s was dropped without being closed, and cannot be closed cleanly: %s", store.path, error)
    finally:
        _being_closed.discard(store)


@atexit.register
def _close_stores() -> None:
    """A program that ends without closing its store still leaves it clean."""
    for store in list(_open_stores):
        unsent_count = sum(producer.unsent_count for producer in store.producers)
        if unsent_count:
            text = f"{store.path}: {unsent_count} records are appended only as the program ends: close their producer"
            warnings.warn(text, ResourceWarning, stacklevel=1)
        try:
            store.close()
        except Exception as error:
            logger.warning("%s: not closed cleanly as the program ends: %s", store.path, error)
    ends_s = time.monotonic() + _CLOSING_S
    while _being_closed and time.monotonic() < ends_s:
        time.sleep(0.005)
