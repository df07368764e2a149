"""Configurations of groups that a server coordinates: one file for all groups.

    @groups/@configs        16 hex digits: XXH3-64 of the rest; a newline; JSON: {group: {key: number}}

Any process of a server may change the file, and all processes read it. As in Kafka, a group may have a configuration
before it has members, and keeps it when the group is deleted.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from typing import Final

import msgspec
import xxhash

from segmentlog.errors import InvalidConfig
from segmentlog.format.file_names import CONFIGS_FILE, FILE_LOCK_SUFFIX, GROUPS_FOLDER
from segmentlog.storage import fork_safety
from segmentlog.storage.file_locks import ProcessLock
from segmentlog.storage.file_operations import read_file, replace_file
from segmentlog.storage.fs import FileSystem
from segmentlog.topics.topic_registry import Topics

logger = logging.getLogger("segmentlog")

CONFIGURED_MAX: Final = 10_000
"""How many groups can have a configuration. Every process keeps all configurations in memory."""
_HASH_BYTES: Final = 17

GroupConfig = Mapping[str, int]
_FileVersion = tuple[int, int, int]
_decoder = msgspec.json.Decoder(dict[str, dict[str, int]])


class GroupConfigs:
    """The configurations of a store's groups. Thread-safe, and safe with other processes."""

    def __init__(self, topics: Topics) -> None:
        self._topics = topics
        self._fs: FileSystem = topics.fs
        self._store_path = topics.path
        self._folder = f"{topics.path}/{GROUPS_FOLDER}"
        self._path = f"{self._folder}/{CONFIGS_FILE}"
        self._mutex = fork_safety.lock(self, "_mutex")
        self._lock = ProcessLock(self._fs, self._path + FILE_LOCK_SUFFIX)
        self._read: tuple[_FileVersion, dict[str, dict[str, int]]] | None = None

    def find(self, group: str) -> GroupConfig:
        """Return the current configuration of a group: only the keys that are set."""
        return self._all().get(group, {})

    def alter(self, group: str, change: Callable[[GroupConfig], GroupConfig]) -> None:
        """Replace a group's configuration by the result of ``change``. Durable when it returns.

        Raises what ``change`` raises, `InvalidConfig` if too many groups have a configuration, `DiskFull`, OSError.
        """
        self._topics.check_writable("configure groups")
        with contextlib.suppress(FileExistsError):
            self._fs.mkdir(self._folder)
            self._fs.sync_folder(self._store_path)
        with self._lock.hold(), self._mutex:
            known = dict(self._load())
            wanted = dict(change(known.get(group, {})))
            if wanted == known.get(group, {}):
                return
            known[group] = wanted
            if not wanted:
                del known[group]
            elif len(known) > CONFIGURED_MAX:
                raise InvalidConfig("group", group, f"{CONFIGURED_MAX} other groups have a configuration already")
            text = msgspec.json.encode(known) + b"\n"
            replace_file(self._fs, self._path, b"%016x\n" % xxhash.xxh3_64_intdigest(text) + text)

    def _all(self) -> Mapping[str, Mapping[str, int]]:
        try:
            found = self._fs.stat(self._path)
        except FileNotFoundError:
            return {}
        read = self._read
        if read is not None and read[0] == (found.st_ino, found.st_mtime_ns, found.st_size):
            return read[1]
        with self._mutex:
            return self._load()

    def _load(self) -> Mapping[str, Mapping[str, int]]:
        """Read the file if it has changed. The caller holds the mutex."""
        try:
            found = self._fs.stat(self._path)
            known = (found.st_ino, found.st_mtime_ns, found.st_size)
            if self._read is None or self._read[0] != known:
                self._read = (known, self._decode(read_file(self._fs, self._path)))
        except FileNotFoundError:
            self._read = None
        return self._read[1] if self._read is not None else {}

    def _decode(self, data: bytes) -> dict[str, dict[str, int]]:
        text = data[_HASH_BYTES:]
        try:
            if data[:_HASH_BYTES] == b"%016x\n" % xxhash.xxh3_64_intdigest(text):
                return _decoder.decode(text)
        except msgspec.DecodeError:
            pass
        logger.warning("%s is damaged: all groups use the server's settings; set the configurations again", self._path)
        return {}
