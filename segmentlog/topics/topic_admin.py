"""Creates, alters, renames and deletes topics while other processes use them, and upgrades a store.

Every change holds one lock across processes, on the file ``@administration``. One step of each change is decisive. If a
process dies during a change, the next process repeats the steps after the decisive step, or removes what the steps
before it have created:

             before                              decisive step           after
    create   @temporary-ID, with all its contents   rename it to NAME
    alter    the folders of new partitions,      topic.json              the config word of each state page
             @altering-ID
    rename   @altering-ID                        rename it to NEW_NAME   the moved word of each state page
    delete                                       rename it @deleted-ID   the moved word, then remove the files
    upgrade  store.json: upgrade has begun       every topic.json        both words, then store.json: upgrade done

The config word and the moved word of a state page announce changes to processes that have the partition open. A change
increments its word after its decisive step. A process that opens a partition reads the words first, and the topic's
settings afterwards. If it reads the old word, it notices later that the word has changed. If it reads the new word, it
also reads the new settings.

Other processes can see a step before it is on disk, and the process that does the step may die before it syncs the
step. Therefore, if the lock's file shows an incomplete change, a process that opens a partition first syncs the folders
that contain it (`sync_names`).

Upgrade from format 1: processes of the older release cache settings until a word changes. Then they read topic.json
again, find an unknown format, and stop. So this release writes data that the older release cannot read only after every
word has changed.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
from collections.abc import Callable, Iterator

from msgspec.structs import replace

from segmentlog.config import TopicConfig
from segmentlog.errors import (
    DiskFull,
    InvalidConfig,
    PartitionBusy,
    ProcessLimitError,
    StoreVersionError,
    TopicExists,
    UnknownTopic,
)
from segmentlog.format.file_names import (
    ADMINISTRATION_FILE,
    ALTERING_PREFIX,
    DELETED_PREFIX,
    FORMAT_VERSION,
    MAKING_PREFIX,
    READABLE_FORMATS,
    STATE_FILE,
    STORE_FILE,
    new_topic_id,
)
from segmentlog.storage.file_locks import ProcessLock, folder_exclusively_locked
from segmentlog.storage.file_operations import read_file, replace_file
from segmentlog.storage.fs import NO_ROOM, FileSystem
from segmentlog.storage.grant_file import read_grant, write_grant
from segmentlog.storage.interrupt_check import failures_ignored
from segmentlog.storage.state_page import PAGE_SIZE, StatePage
from segmentlog.topics.store_file import check_not_set_aside
from segmentlog.topics.topic_folders import TopicFile, TopicFolders, check_partition_count

logger = logging.getLogger("segmentlog")


_LOCK_WAIT_S = 30.0
_IN_PROGRESS = 1
"""Size of the lock's file during a change, and after a process has died in a change."""
_LEFT_BEHIND = 2
"""Size of the lock's file when all names are on disk, but folders may have to be removed."""


class TopicAdmin:
    """Creates, alters, renames and deletes topics. Thread-safe, and safe with other processes."""

    def __init__(self, fs: FileSystem, path: str, topics: TopicFolders) -> None:
        self._fs = fs
        self._path = path
        self._topics = topics
        self._lock = ProcessLock(fs, f"{path}/{ADMINISTRATION_FILE}")

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Prevent changes of topics within the block. The caller must not hold the store's mutex."""
        with self._lock.hold():
            yield

    @contextlib.contextmanager
    def _changing(self, *, leaves: bool = False) -> Iterator[None]:
        """Hold the lock, after finishing the changes of processes that have died.

        The size of the lock's file shows whether a change is incomplete; a size can be set even on a full disk. If the
        file is empty, the store's folder need not be scanned, which may have thousands of topics. ``leaves``: the
        change leaves a folder that must be removed.
        """
        with self._lock.hold() as fd:
            check_not_set_aside(self._fs, self._path)
            if size := self._fs.fstat(fd).st_size:
                self.sweep()
                if size != _LEFT_BEHIND:
                    self._fs.sync_folder(self._path)  # other processes may have seen names that are not on disk yet
            self._set_progress(fd, _IN_PROGRESS)
            try:
                yield
            except (
                InvalidConfig,
                ProcessLimitError,
                PartitionBusy,
                TopicExists,
                UnknownTopic,
            ):  # refused: nothing was changed
                self._set_progress(fd, 0)
                raise
            self._set_progress(fd, _LEFT_BEHIND if leaves else 0)

    def sync_names(self, name: str) -> None:
        """Sync the topic's folder and the store's folder, if an incomplete change may not be on disk.

        Otherwise a power cut could delete the topic's folder together with durable records in it.
        """
        try:
            if self._fs.stat(f"{self._path}/{ADMINISTRATION_FILE}").st_size in (0, _LEFT_BEHIND):
                return
        except FileNotFoundError:  # no process has changed topics since the store was copied
            return
        self._fs.sync_folder(f"{self._path}/{name}")
        self._fs.sync_folder(self._path)

    def _set_progress(self, fd: int, size: int) -> None:
        with failures_ignored():  # the change itself is complete, and the next process that opens the store cleans up
            self._fs.ftruncate(fd, size)

    # ------------------------------------------------------------ changes

    def create(self, name: str, partitions: int, settings: TopicConfig) -> str:
        """Create a topic, durably; return its id. Raises `TopicExists`, `InvalidConfig`, `DiskFull`."""
        check_partition_count(partitions)
        folder = f"{self._path}/{name}"
        with self._changing():
            if self._fs.exists(folder, follow=False):
                raise TopicExists(name)
            # Created under a temporary name, so that no process sees an incomplete topic.
            temporary = f"{self._path}/{MAKING_PREFIX}{os.urandom(16).hex()}"
            file = TopicFile(partitions, settings, settings.max_message_bytes, new_topic_id())
            try:
                self._fs.mkdir(temporary)
                for number in range(partitions):
                    self._fs.mkdir(f"{temporary}/{number}")
                self._topics.write(temporary, file, is_new=True)
                self._fs.rename(temporary, folder)
            except OSError as error:
                with failures_ignored():
                    self._fs.remove_tree(temporary)
                if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
                    raise TopicExists(name) from None
                if error.errno in NO_ROOM:
                    raise DiskFull(folder, 0) from error
                raise
            self._fs.sync_folder(self._path)
        return file.topic_id

    def alter(self, name: str, changes: dict[str, object], partitions: int | None) -> str:
        """Change a topic's settings, durably; return its id. Later appends use them. Raises `InvalidConfig`."""
        with self._changing():
            file = self.read_upgraded(name)
            self._check_writable(name, "alter")
            settings = file.config.replace(changes)
            wanted = file.partitions if partitions is None else partitions
            check_partition_count(wanted)
            if wanted < file.partitions:
                least = f"{file.partitions} or more: partitions cannot be removed, as their records cannot be moved"
                raise InvalidConfig("partitions", wanted, least)
            folder = f"{self._path}/{name}"
            granted = read_grant(self._fs, f"{folder}/0")
            for number in range(file.partitions, wanted):
                with contextlib.suppress(FileExistsError):
                    self._fs.mkdir(f"{folder}/{number}")
                # Otherwise another machine that takes over the store and adds the same partition would assign the same
                # offsets.
                if granted is not None:
                    write_grant(self._fs, f"{folder}/{number}", replace(granted, end_offset=0))
            self._fs.sync_folder(folder)
            largest = max(file.largest_batch_bytes, settings.max_message_bytes)
            changed = file._replace(partitions=wanted, config=settings, largest_batch_bytes=largest)
            with self._leaving_note(file.topic_id):
                self._topics.write(folder, changed)
                self._notify_handles(folder, StatePage.count_config_change)
        return file.topic_id

    @contextlib.contextmanager
    def _leaving_note(self, topic_id: str) -> Iterator[None]:
        """Keep a file during the block. If this process dies, the next change finds it and sets the words again."""
        note = f"{self._path}/{ALTERING_PREFIX}{topic_id}"
        with failures_ignored():
            self._fs.close(self._fs.open(note, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666))
        yield
        with failures_ignored():
            self._fs.unlink(note)

    def rename(self, name: str, new_name: str) -> str:
        """Rename a topic, durably; return its id.

        Raises `UnknownTopic`, `TopicExists`, `PartitionBusy`, `ProcessLimitError`.
        """
        with self._changing():
            file = self.read_upgraded(name)
            folder = f"{self._path}/{new_name}"
            if self._fs.exists(folder, follow=False):
                raise TopicExists(new_name)
            self._check_writable(name, "rename")
            with self._moving(name, "rename it"), self._leaving_note(file.topic_id):
                self._fs.rename(f"{self._path}/{name}", folder)
                self._notify_handles(folder, StatePage.count_move)
            self._fs.sync_folder(self._path)
        return file.topic_id

    def delete(self, name: str, topic_id: str | None = None) -> tuple[str, str]:
        """Delete a topic, durably. Return its id, and the folder that remains, for `remove`.

        Raises `UnknownTopic`, also if the topic has another id than ``topic_id``; `PartitionBusy`, `ProcessLimitError`.
        """
        with self._changing(leaves=True):
            # Compare the id under the lock: another process may have recreated the topic since it was looked up.
            file = self._topics.read(name, topic_id)
            self._check_writable(name, "delete")
            gone = f"{self._path}/{DELETED_PREFIX}{os.urandom(16).hex()}"
            with self._moving(name, "delete it"):
                self._fs.rename(f"{self._path}/{name}", gone)
                self._notify_handles(gone, StatePage.count_move)
            self._fs.sync_folder(self._path)
        return file.topic_id, gone

    def set_aside(self, name: str, folder: str) -> None:
        """Move the folder ``name`` of the store to ``folder``. Call under the lock. Then call `notify_moved`.

        Raises `PartitionBusy` if a process uses files in the folder for long.
        """
        with self._moving(name, "set it aside"):
            self._fs.rename(f"{self._path}/{name}", folder)
            self.notify_moved(folder)

    def notify_moved(self, folder: str) -> None:
        """Let all processes with open partitions of a topic look up the topic again."""
        self._notify_handles(folder, StatePage.count_move)

    def _check_writable(self, name: str, what: str) -> None:
        """Raise `ProcessLimitError` unless this process may write the topic's folders and each state page.

        Otherwise the folder could be renamed while processes that have its partitions open would not notice it.
        """
        folder = f"{self._path}/{name}"
        partitions = [f"{folder}/{number}" for number in self._fs.listdir(folder) if number.isdecimal()]
        for path in (folder, *partitions, *(f"{partition}/{STATE_FILE}" for partition in partitions)):
            if why := self._fs.why_unwritable(path):
                raise ProcessLimitError(errno.EACCES, f"cannot {what} the topic, as {why}; nothing was changed", folder)

    @contextlib.contextmanager
    def _moving(self, name: str, what: str) -> Iterator[None]:
        """Within the block, prevent other processes from using files of the topic by name: see `Handle.folder_locked`.

        They hold the folder's lock for moments, or for as long as a recovery takes. The wait for the lock is limited: a
        process may be stopped (SIGSTOP) while it holds the lock, and all changes of topics would have to wait for it.
        """
        with folder_exclusively_locked(self._fs, f"{self._path}/{name}", _LOCK_WAIT_S) as is_free:
            if not is_free:
                raise PartitionBusy(name, what)
            yield

    def remove(self, gone: str) -> None:
        """Remove the folder of a deleted topic. Several processes may do it at the same time."""
        while self._fs.exists(gone, follow=False):
            with contextlib.suppress(FileNotFoundError):
                self._fs.remove_tree(gone)

    def _notify_handles(self, folder: str, change: Callable[[StatePage], None]) -> None:
        """Change a word in every partition's state page, so that processes with the partition open notice."""
        for number in self._fs.listdir(folder):
            if not number.isdecimal():
                continue
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                fd = self._fs.open(f"{folder}/{number}/{STATE_FILE}", os.O_RDWR | os.O_CLOEXEC)
                try:
                    if self._fs.fstat(fd).st_size >= PAGE_SIZE:
                        page = StatePage.map(self._fs, fd, writable=True)
                        if page is not None:
                            change(page)
                            page.close()
                finally:
                    self._fs.close(fd)

    # ------------------------------------------------------------ changes of dead processes

    def sweep(self) -> None:
        """Finish or remove the incomplete changes of dead processes. Costs a scan of the store's folder."""
        if not any(map(_is_left_behind, self._fs.listdir(self._path))):
            return
        with self.locked():  # under the lock, living processes can only remove deleted folders
            for name in sorted(filter(_is_left_behind, self._fs.listdir(self._path))):
                # Do not raise, because the caller has other work to do: the next process finishes what fails here.
                with failures_ignored(StoreVersionError):
                    self._finish_change(name)

    def _finish_change(self, name: str) -> None:
        """Finish one incomplete change. If this fails, the next process tries again."""
        path = f"{self._path}/{name}"
        if name.startswith(ALTERING_PREFIX):
            self._finish_alteration(path, name.removeprefix(ALTERING_PREFIX))
            return
        if name.startswith(DELETED_PREFIX):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                self._notify_handles(path, StatePage.count_move)  # other processes may have the partitions open
        self.remove(path)

    def _finish_alteration(self, note: str, topic_id: str) -> None:
        name = self._topics.name_of(topic_id)
        if name is None:
            self._topics.check_all_read()
        else:
            self._notify_handles(f"{self._path}/{name}", StatePage.count_config_change)
            self._notify_handles(f"{self._path}/{name}", StatePage.count_move)
            self._fs.sync_folder(f"{self._path}/{name}")
        with contextlib.suppress(FileNotFoundError):
            self._fs.unlink(note)

    # ------------------------------------------------------------ ids, formats

    def name_of(self, topic_id: str) -> str:
        """Return the current name of a topic. Raises `UnknownTopic` only if the topic was certainly deleted.

        Callers discard the data of deleted topics for good. Therefore the call raises `StoreVersionError` if any topic
        cannot be read: it may be the topic with this id.
        """
        name = self._topics.name_of(topic_id)
        if name is None:
            with self.locked():  # try again under the lock: the topic may have been renamed during the first try
                name = self._topics.name_of(topic_id)
                if name is None:
                    self._topics.check_all_read()
        if name is None:
            raise UnknownTopic(topic_id, "there is no topic with this id any more")
        return name

    def read_upgraded(self, name: str) -> TopicFile:
        """Return a topic's settings. If an older release has created the topic, upgrade it to the current format."""
        file = self._topics.read(name)
        if file.format == FORMAT_VERSION:
            return file
        with self.locked():
            file = self._topics.read(name)
            if file.format != FORMAT_VERSION:
                # Assign a new id, not the id that is derived from the name: a topic that was renamed since the upgrade
                # may have that id.
                folder = f"{self._path}/{name}"
                self._topics.write(folder, file._replace(topic_id=new_topic_id()))
                self._notify_old_release(folder)
                file = self._topics.read(name)
        return file

    def upgrade(self) -> None:
        """Upgrade a store of an older format, durably; continue an interrupted upgrade."""
        with self.locked():
            path = f"{self._path}/{STORE_FILE}"
            document = json.loads(read_file(self._fs, path))
            if not needs_upgrade(document):
                return
            if document["format"] != FORMAT_VERSION:
                logger.info(
                    "%s: upgrading the store from format %d to %d", self._path, document["format"], FORMAT_VERSION
                )
                old_format = document["format"]
                document = {**document, "format": FORMAT_VERSION, "upgraded_from": old_format, "upgrading": True}
                self._write_store_file(path, document)
            names = self._topics.names(internal=True)
            for name in names:
                try:
                    file = self._topics.read(name)
                except StoreVersionError as error:  # it could not be opened before the upgrade either
                    logger.warning("%s", error)
                    continue
                if file.format != FORMAT_VERSION:
                    self._topics.write(f"{self._path}/{name}", file)
            for name in names:
                self._notify_old_release(f"{self._path}/{name}")
            del document["upgrading"]
            self._write_store_file(path, document)

    def _write_store_file(self, path: str, document: dict[str, object]) -> None:
        replace_file(self._fs, path, json.dumps(document, indent=2).encode() + b"\n")

    def _notify_old_release(self, folder: str) -> None:
        """Make processes of an older release read topic.json again; they stop, as they do not know its format.

        Both words must change. With the config word alone, only the first append would raise an error, and the next
        append would succeed. With the moved word, every append looks up the topic, and raises.
        """
        self._notify_handles(folder, StatePage.count_config_change)
        self._notify_handles(folder, StatePage.count_move)


def needs_upgrade(document: dict[str, object]) -> bool:
    """Return whether a ``store.json`` has an older format, or an upgrade is incomplete."""
    return document["format"] in READABLE_FORMATS[:-1] or bool(document.get("upgrading"))


def _is_left_behind(name: str) -> bool:
    return name.startswith((MAKING_PREFIX, DELETED_PREFIX, ALTERING_PREFIX))
