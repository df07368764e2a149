"""The store: a folder of topics, each a folder of partitions."""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import json
import os
import threading
import weakref
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from segmentlog.arguments import as_bool, as_int, as_mapping, as_partition
from segmentlog.background import Background, PartitionName
from segmentlog.config import CLEANER_BUFFER_BYTES, TopicConfig
from segmentlog.descriptors import DescriptorBudget
from segmentlog.errors import (
    DiskFull,
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
    HIDDEN,
    INTERNAL_TOPICS,
    MAX_PARTITIONS,
    OFFSETS_TOPIC,
    STATE_FILE,
    STORE_FILE,
    TOPIC_FILE,
    TRANSACTIONS_TOPIC,
    check_topic_name,
)
from segmentlog.partition.handle import Clock, Handle
from segmentlog.partition.partition import Partition
from segmentlog.partition.scrubber import Scrubber, ScrubReport, ScrubTarget
from segmentlog.records import RecoveryMode
from segmentlog.storage.fs import NO_ROOM, FileSystem, read_file, replace_file
from segmentlog.storage.network import NetworkMark
from segmentlog.storage.state import PAGE_SIZE, StatePage
from segmentlog.workers import logger

if TYPE_CHECKING:
    from segmentlog.consumer import Consumer, OffsetReset, Rebalanced, Start
    from segmentlog.group_admin import Groups
    from segmentlog.group_offsets import GroupOffsets
    from segmentlog.partition.partition import Ack, Isolation
    from segmentlog.policy.assignment import Strategy
    from segmentlog.policy.partitioner import Partitioner
    from segmentlog.producer import Producer
    from segmentlog.table import Table
    from segmentlog.transactions import Transactions


OFFSETS_RETENTION_MINUTES: Final = 7 * 24 * 60
"""Kafka's `offsets.retention.minutes`."""


class Topic:
    """A topic of an open store. Thread-safe; get one from `LogStore.topic`."""

    def __init__(self, store: LogStore, name: str) -> None:
        self._store = store
        self.name = name
        self.folder = f"{store.path}/{name}"

    def __repr__(self) -> str:
        return f"<Topic {self.name}, {self.partition_count} partitions>"

    @property
    def config(self) -> TopicConfig:
        """The configuration as it is on disk now."""
        return self._store.read_topic_file(self.name).config

    @property
    def partition_count(self) -> int:
        """How many partitions there are now."""
        return self._store.read_topic_file(self.name).partitions

    def partition(self, number: int) -> Partition:
        """A partition, opened (and recovered if need be) when it is first asked for. Raises `UnknownTopic`."""
        return self._store.open_partition(self.name, number)

    def partitions(self) -> list[Partition]:
        """All of them, opened."""
        return [self.partition(number) for number in range(self.partition_count)]


class TopicFile(NamedTuple):
    """What topic.json says: how many partitions, the configuration, the most that a batch ever may have held."""

    partitions: int
    config: TopicConfig
    largest_batch_bytes: int


class LogStore:
    """A store: open one with `segmentlog.open`, close it or use it in a ``with``. Thread-safe.

    Any number of processes may have it open. After a fork the child may go on using it: it
    opens its files anew.
    """

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
        self._mutex = threading.RLock()
        self._partitions: dict[tuple[str, int], Partition] = {}
        self._topic_files: dict[str, tuple[tuple[int, int, int], TopicFile]] = {}
        self._group_offsets: GroupOffsets | None = None
        self._groups: Groups | None = None
        self.members: weakref.WeakSet[Consumer] = weakref.WeakSet()
        """Consumers that are members of groups: they leave when the store is closed."""
        self._transactions: Transactions | None = None
        self._closed = False
        self._budget = DescriptorBudget()
        self._background = Background(
            _Partitions(self),
            self._clock,
            threads=background,
            read_only=self.read_only,
            scrubber=self._make_scrubber(scrub_bytes_per_s),
            cleaner_buffer_bytes=cleaner_dedupe_buffer_bytes,
            cleaner_io_bytes_per_s=cleaner_io_max_bytes_per_second,
            expire=self._expire_groups,
            finish_transactions=self.finish_transactions,
        )
        self.store_id = self._open(create and not self.read_only)
        self._neighbour = None if self.read_only else NetworkMark.leave(self._fs, self.path, self._clock.now_ms())
        _open_stores.add(self)
        self._background.ensure_running()

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
        folder_fd = self._fs.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._fs.flock(folder_fd, fcntl.LOCK_EX)  # of two processes that make it, one does
            if not os.path.exists(store_file):
                document = {
                    "format": FORMAT_VERSION,
                    "store_id": os.urandom(16).hex(),
                    "created_ms": self._clock.now_ms(),
                }
                replace_file(self._fs, store_file, json.dumps(document, indent=2).encode() + b"\n")
                self._fs.sync_folder(os.path.dirname(self.path))
        finally:
            self._fs.close(folder_fd)
        return self._check_store_file(store_file, read_file(self._fs, store_file))

    @staticmethod
    def _check_store_file(path: str, text: bytes) -> str:
        try:
            document = json.loads(text)
            version, store_id = document["format"], document["store_id"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise StoreVersionError(path, "damaged: it should be JSON with 'format' and 'store_id'") from None
        if version != FORMAT_VERSION:
            why = f"the store has format {version!r}, and this version of segmentlog reads format {FORMAT_VERSION}"
            raise StoreVersionError(path, f"{why}; use the version that wrote it")
        return str(store_id)

    def __enter__(self) -> LogStore:
        self._check_open()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<LogStore {self.path}>"

    # ------------------------------------------------------------ topics

    def topics(self, *, internal: bool = False) -> list[str]:
        """Names of the topics, sorted; those of the store itself only with ``internal``."""
        self._check_open()
        as_bool("internal", internal)
        names = []
        for name in self._fs.listdir(self.path):
            if HIDDEN in name or (name in INTERNAL_TOPICS and not internal):
                continue
            if os.path.exists(f"{self.path}/{name}/{TOPIC_FILE}"):
                names.append(name)
        return sorted(names)

    def topic(self, name: str) -> Topic:
        """The topic of that name. Raises `UnknownTopic`."""
        self._check_open()
        check_topic_name(name, internal=True)
        self.read_topic_file(name)
        return Topic(self, name)

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
        partitions = _check_partition_count(partitions)
        folder = f"{self.path}/{name}"
        with self._mutex:
            if os.path.lexists(folder):
                raise TopicExists(name)
            # Made aside and renamed: nobody ever sees half a topic.
            making = f"{self.path}/{HIDDEN}making-{os.urandom(16).hex()}"
            try:
                self._fs.mkdir(making)
                for number in range(partitions):
                    self._fs.mkdir(f"{making}/{number}")
                self._write_topic_file(making, partitions, settings, settings.max_message_bytes)
                self._fs.rename(making, folder)
            except OSError as error:
                with contextlib.suppress(OSError):
                    self._fs.remove_tree(making)
                if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
                    raise TopicExists(name) from None
                if error.errno in NO_ROOM:
                    raise DiskFull(folder, 0) from error
                raise
            self._fs.sync_folder(self.path)
        return Topic(self, name)

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
        with self._mutex:
            count, current, largest = self.read_topic_file(name)
            settings = current.replace({**as_mapping("config", config, _CONFIG_WANTED), **options})
            wanted = count if partitions is None else _check_partition_count(partitions)
            if wanted < count:
                raise InvalidConfig("partitions", wanted, f"{count} or more: records of a partition cannot be moved")
            folder = f"{self.path}/{name}"
            for number in range(count, wanted):
                with contextlib.suppress(FileExistsError):
                    self._fs.mkdir(f"{folder}/{number}")
            self._fs.sync_folder(folder)
            self._write_topic_file(folder, wanted, settings, max(largest, settings.max_message_bytes))
            self._for_each_page(name, StatePage.count_config_change)
        return Topic(self, name)

    def delete_topic(self, name: str) -> None:
        """Delete a topic with everything in it, and groups' positions. Whoever still uses it gets `UnknownTopic`."""
        self._check_writable("delete a topic")
        check_topic_name(name)
        with self._mutex:
            self.read_topic_file(name)
            gone = f"{self.path}/{HIDDEN}deleted-{os.urandom(16).hex()}"
            self._for_each_page(name, StatePage.count_move)
            self._fs.rename(f"{self.path}/{name}", gone)
            self._fs.sync_folder(self.path)
            self._drop_partitions(name)
            self._fs.remove_tree(gone)
        self._forget_positions(name)

    def rename_topic(self, name: str, new_name: str) -> Topic:
        """Give a topic another name. Who uses it under the old one gets `UnknownTopic`; groups go on under the new."""
        self._check_writable("rename a topic")
        check_topic_name(name)
        check_topic_name(new_name)
        with self._mutex:
            self.read_topic_file(name)
            if os.path.lexists(f"{self.path}/{new_name}"):
                raise TopicExists(new_name)
            self._close_partitions(name)
            self._for_each_page(name, StatePage.count_move)
            self._fs.rename(f"{self.path}/{name}", f"{self.path}/{new_name}")
            self._fs.sync_folder(self.path)
        self._forget_positions(name, new_name)
        return Topic(self, new_name)

    def read_topic_file(self, name: str) -> TopicFile:
        """A topic's settings as they are on disk. Raises `UnknownTopic`, `StoreVersionError`."""
        path = f"{self.path}/{name}/{TOPIC_FILE}"
        try:
            found = self._fs.stat(path)
            version = (found.st_ino, found.st_mtime_ns, found.st_size)
            cached = self._topic_files.get(name)
            if cached is not None and cached[0] == version:
                return cached[1]
            document = json.loads(read_file(self._fs, path))
            if document["format"] != FORMAT_VERSION:
                raise StoreVersionError(path, f"the topic has format {document['format']!r}, not {FORMAT_VERSION}")
            count, config = document["partitions"], TopicConfig.from_mapping(document["config"])
            _check_partition_count(count)
            largest = max(int(document.get("largest_batch_bytes", 0)), config.max_message_bytes)
            parsed = TopicFile(count, config, largest)
            self._topic_files[name] = (version, parsed)  # every change is a new file
            return parsed
        except (FileNotFoundError, NotADirectoryError):
            raise UnknownTopic(name) from None
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise StoreVersionError(path, f"damaged ({error}); restore it from a backup or write it anew") from None

    def _write_topic_file(self, folder: str, partitions: int, config: TopicConfig, largest_batch_bytes: int) -> None:
        document = {
            "format": FORMAT_VERSION,
            "partitions": partitions,
            "config": config.to_mapping(),
            "largest_batch_bytes": largest_batch_bytes,
        }
        replace_file(self._fs, f"{folder}/{TOPIC_FILE}", json.dumps(document, indent=2).encode() + b"\n")

    def _for_each_page(self, name: str, change: Any) -> None:
        """Change a word of every partition's state page that there is, for all processes to see."""
        for number in range(self.read_topic_file(name).partitions):
            with contextlib.suppress(FileNotFoundError):
                fd = self._fs.open(f"{self.path}/{name}/{number}/{STATE_FILE}", os.O_RDWR | os.O_CLOEXEC)
                try:
                    if self._fs.fstat(fd).st_size >= PAGE_SIZE:
                        page = StatePage.map(self._fs, fd, writable=True)
                        if page is not None:
                            change(page)
                            page.close()
                finally:
                    self._fs.close(fd)

    # ------------------------------------------------------------ partitions

    def open_partition(self, name: str, number: int) -> Partition:
        """A partition of this store, the same object every time. Raises `UnknownTopic`."""
        self._check_open()
        if number.__class__ is not int:
            number = as_partition(number)
        partition = self._partitions.get((name, number))
        if partition is not None and not partition.is_stale:
            return partition
        with self._mutex:
            self._check_open()
            partition = self._partitions.get((name, number))
            if partition is not None and not partition.is_stale:
                return partition
            count = self.read_topic_file(name).partitions
            if not isinstance(number, int) or not 0 <= number < count:
                raise UnknownTopic(name, f"it has no partition {number!r}, only 0 to {count - 1}")
            partition = Partition(
                f"{self.path}/{name}/{number}",
                name,
                number,
                lambda: self.read_topic_file(name).config,
                load_batch_limit=lambda: self.read_topic_file(name).largest_batch_bytes,
                fs=self._fs,
                clock=self._clock,
                read_only=self.read_only,
                recovery=self.recovery,
                background=self._background.has_threads,
                on_open=self._opened,
                on_roll=self._background.rolled,
            )
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

    def _opened(self, handle: Handle) -> None:
        self._budget.opened(handle)
        self._background.ensure_running()

    def recovery_reports(self) -> dict[tuple[str, int], Any]:
        """What opening found, for each partition that was opened so far."""
        return {key: partition.recovery_report for key, partition in list(self._partitions.items())}

    def _drop_partitions(self, name: str) -> None:
        for key in [key for key in self._partitions if key[0] == name]:
            self._partitions.pop(key).abandon()

    def _close_partitions(self, name: str) -> None:
        for key in [key for key in self._partitions if key[0] == name]:
            self._partitions.pop(key).close()

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
        from segmentlog.producer import Producer

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
        from segmentlog.consumer import Consumer

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
            from segmentlog.transactions import Transactions

            with self._mutex:
                self._transactions = self._transactions or Transactions(self, self._fs, self._clock)
        return self._transactions

    def finish_transactions(self, now_ms: int | None = None) -> float:
        """End the transactions of processes that are gone, or that took too long; with ``background`` a thread does it.

        Returns the seconds until it should be asked again.
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
            from segmentlog.group_offsets import GroupOffsets

            with self._mutex:
                self._group_offsets = self._group_offsets or GroupOffsets(self)
        return self._group_offsets

    @property
    def groups(self) -> Groups:
        """The consumer groups: list, describe, reset, delete."""
        self._check_open()
        if self._groups is None:
            from segmentlog.group_admin import Groups

            with self._mutex:
                self._groups = self._groups or Groups(self, self._fs, self._clock, self.group_offsets)
        return self._groups

    def _forget_positions(self, topic: str, renamed_to: str | None = None) -> None:
        """A topic made anew under the name is another one: groups begin it anew."""
        if self._has_internal(OFFSETS_TOPIC):
            self.group_offsets.forget_topic(topic, renamed_to)

    def _expire_groups(self, now_ms: int) -> None:
        if self._has_internal(OFFSETS_TOPIC):
            self.groups.expire_tick(now_ms, self._offsets_retention_ms)

    def table(
        self, topic: str, *, follow: bool = False, isolation: Isolation = "read_uncommitted", durable_only: bool = False
    ) -> Table:
        """The topic as a table: a read-only mapping of the latest value of each key; see `Table`."""
        from segmentlog.table import Table

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
        """Every partition of the store with its configuration, for background work."""
        with contextlib.suppress(StoreClosed):  # while the threads are being stopped
            for topic in self.topics(internal=True):
                with contextlib.suppress(UnknownTopic, StoreVersionError):  # deleted meanwhile, or told by others
                    found = self.read_topic_file(topic)
                    for number in range(found.partitions):
                        yield PartitionName(topic, number), found.config

    def flush_tick(self, now_ms: int | None = None) -> float:
        """One turn of the flusher; see `Background.flush_tick`. With ``background`` a thread does it."""
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
        for (name, number), partition in list(self._partitions.items()):
            if partition.failed is not None:
                problems[f"{name}/{number}"] = partition.failed
        return problems

    def close(self) -> None:
        """fsync everything appended here and leave a clean store. Idempotent. Members of groups leave them.

        Every partition is closed even if one fails; the first error is raised at the end.
        """
        for consumer in list(self.members):
            with contextlib.suppress(SegmentlogError, OSError):  # its locks are free then, whatever it could not say
                consumer.close()
        with self._mutex:
            if self._closed:
                return
            self._closed = True
        # Without the mutex: a tick may be waiting for it.
        self._background.close()
        with self._mutex:
            first: Exception | None = None
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


def _check_partition_count(count: object) -> int:
    return as_int("partitions", count, 1, MAX_PARTITIONS)


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


@atexit.register
def _close_stores() -> None:
    """A program that ends without closing its store still leaves it clean."""
    for store in list(_open_stores):
        with contextlib.suppress(Exception):
            store.close()
