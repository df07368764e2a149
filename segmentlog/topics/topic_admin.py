"""Making, altering, renaming and deleting topics, beside whoever uses them; and the upgrade of a store.

All of it under one lock across processes, on the file ``@administration``. In each change one step
counts, and what comes before or after it can be done again by whoever finds it undone:

             before                              the step                after
    make     @making-ID, with all that is in it  rename it to NAME
    alter    the folders of new partitions,      topic.json              the config word of each state page
             @altering-ID
    rename   @altering-ID                        rename it to NEW_NAME   the moved word of each state page
    delete                                       rename it @deleted-ID   the moved word, then remove the files
    upgrade  store.json: one is under way        every topic.json        both words, then store.json: it is done

Words come after what they speak of: who opens a partition reads them first, and then asks what the topic is. So an
open handle either was there before the word changed, and sees that, or has read the topic as it is now.

Others see a step before it is on disk, and where its process died nobody is about to put it there: who opens a
partition while the lock's file says that somebody is at it syncs the names that led there itself (`sync_names`).

The upgrade from format 1: processes of the release that wrote it keep the settings that they have read until a
word changes. Then they read topic.json again, find a format that they do not know, and stop. So nothing
that only this release understands is written before every word has changed.
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
from segmentlog.topics.topic_folders import TopicFile, TopicFolders, check_partition_count

logger = logging.getLogger("segmentlog")


_PATIENCE_S = 30.0
_AT_WORK = 1
"""How long the lock's file is while somebody changes something, or after he died in it."""
_LEFT_BEHIND = 2
"""And when all names are on disk, and there may be something to be removed."""


class Administration:
    """Changes which topics there are, and what they are. Thread-safe; any number of processes have one."""

    def __init__(self, fs: FileSystem, path: str, topics: TopicFolders) -> None:
        self._fs = fs
        self._path = path
        self._topics = topics
        self._lock = ProcessLock(fs, f"{path}/{ADMINISTRATION_FILE}")

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep everybody from changing topics within. Before the store's own mutex, never within it."""
        with self._lock.held():
            yield

    @contextlib.contextmanager
    def _changing(self, *, leaves: bool = False) -> Iterator[None]:
        """Under the lock, once what others died in is brought to its end.

        The lock's file is empty unless there may be such a thing, so that nobody has to look through a folder of
        thousands of topics for it; how long it is says what (a length takes no room on a full disk). ``leaves``: there
        is something to be removed afterwards.
        """
        with self._lock.held() as fd:
            if size := self._fs.fstat(fd).st_size:
                self.sweep()
                if size != _LEFT_BEHIND:
                    self._fs.sync_folder(self._path)  # what that process did others have seen, on disk or not
            self._note(fd, _AT_WORK)
            try:
                yield
            except (
                InvalidConfig,
                ProcessLimitError,
                PartitionBusy,
                TopicExists,
                UnknownTopic,
            ):  # refused: nothing was begun
                self._note(fd, 0)
                raise
            self._note(fd, _LEFT_BEHIND if leaves else 0)

    def sync_names(self, name: str) -> None:
        """Put the name of a topic that was just read on disk, and those in its folder, unless they are there anyway.

        Else what is appended durably could go with the folder that it is in.
        """
        try:
            if self._fs.stat(f"{self._path}/{ADMINISTRATION_FILE}").st_size in (0, _LEFT_BEHIND):
                return
        except FileNotFoundError:  # of a store that nobody has changed since it was copied
            return
        self._fs.sync_folder(f"{self._path}/{name}")
        self._fs.sync_folder(self._path)

    def _note(self, fd: int, size: int) -> None:
        with failures_ignored():  # whoever opens the store looks anyway, and what was done is done
            self._fs.ftruncate(fd, size)

    # ------------------------------------------------------------ changes

    def make(self, name: str, partitions: int, settings: TopicConfig) -> str:
        """Make a topic, durably; its id. Raises `TopicExists`, `InvalidConfig`, `DiskFull`."""
        check_partition_count(partitions)
        folder = f"{self._path}/{name}"
        with self._changing():
            if self._fs.exists(folder, follow=False):
                raise TopicExists(name)
            # Made aside and renamed: nobody ever sees half a topic.
            making = f"{self._path}/{MAKING_PREFIX}{os.urandom(16).hex()}"
            file = TopicFile(partitions, settings, settings.max_message_bytes, new_topic_id())
            try:
                self._fs.mkdir(making)
                for number in range(partitions):
                    self._fs.mkdir(f"{making}/{number}")
                self._topics.write(making, file, is_new=True)
                self._fs.rename(making, folder)
            except OSError as error:
                with failures_ignored():
                    self._fs.remove_tree(making)
                if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
                    raise TopicExists(name) from None
                if error.errno in NO_ROOM:
                    raise DiskFull(folder, 0) from error
                raise
            self._fs.sync_folder(self._path)
        return file.topic_id

    def alter(self, name: str, changes: dict[str, object], partitions: int | None) -> str:
        """Change a topic's settings, durably; its id. Appends that come after it see it. Raises `InvalidConfig`."""
        with self._changing():
            file = self.adopt(name)
            self._check_writable(name, "alter")
            settings = file.config.replace(changes)
            wanted = file.partitions if partitions is None else partitions
            check_partition_count(wanted)
            if wanted < file.partitions:
                least = f"{file.partitions} or more: records of a partition cannot be moved"
                raise InvalidConfig("partitions", wanted, least)
            folder = f"{self._path}/{name}"
            granted = read_grant(self._fs, f"{folder}/0")
            for number in range(file.partitions, wanted):
                with contextlib.suppress(FileExistsError):
                    self._fs.mkdir(f"{folder}/{number}")
                if granted is not None:  # or whoever takes over, and adds one, would hand out the same offsets
                    write_grant(self._fs, f"{folder}/{number}", replace(granted, ceiling=0))
            self._fs.sync_folder(folder)
            largest = max(file.largest_batch_bytes, settings.max_message_bytes)
            changed = file._replace(partitions=wanted, config=settings, largest_batch_bytes=largest)
            with self._noted(file.topic_id):
                self._topics.write(folder, changed)
                self._tell(folder, StatePage.count_config_change)
        return file.topic_id

    @contextlib.contextmanager
    def _noted(self, topic_id: str) -> Iterator[None]:
        """Should this process die in the middle of it, the next one to change anything tells those who have it open."""
        note = f"{self._path}/{ALTERING_PREFIX}{topic_id}"
        with failures_ignored():
            self._fs.close(self._fs.open(note, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666))
        yield
        with failures_ignored():
            self._fs.unlink(note)

    def rename(self, name: str, new_name: str) -> str:
        """Give a topic another name, durably; its id.

        Raises `UnknownTopic`, `TopicExists`, `PartitionBusy`, `ProcessLimitError`.
        """
        with self._changing():
            file = self.adopt(name)
            folder = f"{self._path}/{new_name}"
            if self._fs.exists(folder, follow=False):
                raise TopicExists(new_name)
            self._check_writable(name, "rename")
            with self._moving(name, "rename it"), self._noted(file.topic_id):
                self._fs.rename(f"{self._path}/{name}", folder)
                self._tell(folder, StatePage.count_move)
            self._fs.sync_folder(self._path)
        return file.topic_id

    def delete(self, name: str, topic_id: str | None = None) -> tuple[str, str]:
        """Take a topic away, durably; its id, and the folder that is left of it, for `remove`.

        Raises `UnknownTopic`, also when the topic has another id than ``topic_id``; `PartitionBusy`,
        `ProcessLimitError`.
        """
        with self._changing(leaves=True):
            # Compare the id under the lock: another process may have recreated the topic since it was looked up.
            file = self._topics.read(name, topic_id)
            self._check_writable(name, "delete")
            gone = f"{self._path}/{DELETED_PREFIX}{os.urandom(16).hex()}"
            with self._moving(name, "delete it"):
                self._fs.rename(f"{self._path}/{name}", gone)
                self._tell(gone, StatePage.count_move)
            self._fs.sync_folder(self._path)
        return file.topic_id, gone

    def _check_writable(self, name: str, what: str) -> None:
        """Raise `ProcessLimitError` unless this process may write the topic's folders and each state page.

        The process may be allowed to rename the folder all the same. Then the change would be made, and no process
        that has a partition open would notice it.
        """
        folder = f"{self._path}/{name}"
        partitions = [f"{folder}/{number}" for number in self._fs.listdir(folder) if number.isdecimal()]
        for path in (folder, *partitions, *(f"{partition}/{STATE_FILE}" for partition in partitions)):
            if why := self._fs.why_unwritable(path):
                raise ProcessLimitError(errno.EACCES, f"cannot {what} the topic, as {why}; nothing was changed", folder)

    @contextlib.contextmanager
    def _moving(self, name: str, what: str) -> Iterator[None]:
        """While nobody goes by the names of files in the topic's folder, in whatever partition: see `Handle.staying`.

        What they do there takes moments, and a recovery its time. Whoever was stopped in it by a signal (SIGSTOP)
        is not waited for for ever: every other change of topics would wait, too.
        """
        with folder_exclusively_locked(self._fs, f"{self._path}/{name}", _PATIENCE_S) as is_free:
            if not is_free:
                raise PartitionBusy(name, what)
            yield

    def remove(self, gone: str) -> None:
        """Remove what is left of a deleted topic. Several may be at it at the same time."""
        while self._fs.exists(gone, follow=False):
            with contextlib.suppress(FileNotFoundError):
                self._fs.remove_tree(gone)

    def _tell(self, folder: str, change: Callable[[StatePage], None]) -> None:
        """Change a word of the state page of every partition that has one, for all processes to see."""
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

    # ------------------------------------------------------------ who was killed

    def sweep(self) -> None:
        """Complete, or take away, what processes that are gone left behind. Costs a look at the store's folder."""
        if not any(map(_is_left_behind, self._fs.listdir(self._path))):
            return
        with self.locked():  # nobody who is alive is at it now, but for removing what is deleted
            for name in sorted(filter(_is_left_behind, self._fs.listdir(self._path))):
                # No reason to fail for whoever has something else to do.
                with failures_ignored(StoreVersionError):
                    self._sweep_one(name)

    def _sweep_one(self, name: str) -> None:
        """What cannot be brought to its end now stays for the next one."""
        path = f"{self._path}/{name}"
        if name.startswith(ALTERING_PREFIX):
            self._finish_alteration(path, name.removeprefix(ALTERING_PREFIX))
            return
        if name.startswith(DELETED_PREFIX):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                self._tell(path, StatePage.count_move)  # before the files go, to whoever has them open
        self.remove(path)

    def _finish_alteration(self, note: str, topic_id: str) -> None:
        name = self._topics.name_of(topic_id)
        if name is None:
            self._topics.check_all_read()
        else:
            self._tell(f"{self._path}/{name}", StatePage.count_config_change)
            self._tell(f"{self._path}/{name}", StatePage.count_move)
            self._fs.sync_folder(f"{self._path}/{name}")
        with contextlib.suppress(FileNotFoundError):
            self._fs.unlink(note)

    # ------------------------------------------------------------ ids, formats

    def name_of(self, topic_id: str) -> str:
        """The name that a topic has now. Raises `UnknownTopic`, and only when there is no such topic any more.

        What is decided of a topic that is gone is not made good again: where one cannot be read, which may be it,
        that raises `StoreVersionError`.
        """
        name = self._topics.name_of(topic_id)
        if name is None:
            with self.locked():  # it may have been renamed while the folder was read
                name = self._topics.name_of(topic_id)
                if name is None:
                    self._topics.check_all_read()
        if name is None:
            raise UnknownTopic(topic_id, "there is no topic with this id any more")
        return name

    def adopt(self, name: str) -> TopicFile:
        """What a topic is, once it is of today's format: a process of an older release may just have made it."""
        file = self._topics.read(name)
        if file.format == FORMAT_VERSION:
            return file
        with self.locked():
            file = self._topics.read(name)
            if file.format != FORMAT_VERSION:
                # Not the id of its name, which another topic may have, that was renamed since the upgrade.
                folder = f"{self._path}/{name}"
                self._topics.write(folder, file._replace(topic_id=new_topic_id()))
                self._tell_old_release(folder)
                file = self._topics.read(name)
        return file

    def upgrade(self) -> None:
        """Make a store of an older format one of today's, durably; goes on where one was killed in it."""
        with self.locked():
            path = f"{self._path}/{STORE_FILE}"
            document = json.loads(read_file(self._fs, path))
            if not needs_upgrade(document):
                return
            if document["format"] != FORMAT_VERSION:
                logger.info("%s: upgrading it from format %d to %d", self._path, document["format"], FORMAT_VERSION)
                of_before = document["format"]
                document = {**document, "format": FORMAT_VERSION, "upgraded_from": of_before, "upgrading": True}
                self._write_store_file(path, document)
            names = self._topics.names(internal=True)
            for name in names:
                try:
                    file = self._topics.read(name)
                except StoreVersionError as error:  # as before: it does not open, and the others do
                    logger.warning("%s", error)
                    continue
                if file.format != FORMAT_VERSION:
                    self._topics.write(f"{self._path}/{name}", file)
            for name in names:
                self._tell_old_release(f"{self._path}/{name}")
            del document["upgrading"]
            self._write_store_file(path, document)

    def _write_store_file(self, path: str, document: dict[str, object]) -> None:
        replace_file(self._fs, path, json.dumps(document, indent=2).encode() + b"\n")

    def _tell_old_release(self, folder: str) -> None:
        """Have processes of an older release read topic.json, which they do not know: they stop.

        Both words: the first append that finds the configuration changed raises what it finds there, and the next one
        would go on. A topic that was moved is looked up at every append.
        """
        self._tell(folder, StatePage.count_config_change)
        self._tell(folder, StatePage.count_move)


def needs_upgrade(document: dict[str, object]) -> bool:
    """Whether a ``store.json`` is of an older format, or of an upgrade that did not come to its end."""
    return document["format"] in READABLE_FORMATS[:-1] or bool(document.get("upgrading"))


def _is_left_behind(name: str) -> bool:
    return name.startswith((MAKING_PREFIX, DELETED_PREFIX, ALTERING_PREFIX))
