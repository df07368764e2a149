"""Topics as stored on disk: folders with a ``topic.json``.

    {"format": 2, "id": "<UUID>", "partitions": 3, "config": {...}, "largest_batch_bytes": 1048588}

The name of the folder is the topic's name, which may change. The id is assigned when the topic is created, and never
changes. A topic of format 1 has no stored id; `topic_id_of_name` derives its id from the name.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from segmentlog.config import TopicConfig
from segmentlog.errors import InvalidConfig, InvalidTopicName, StoreVersionError, UnknownTopic
from segmentlog.format.file_names import (
    FORMAT_VERSION,
    HIDDEN,
    INTERNAL_TOPICS,
    MAX_PARTITIONS,
    READABLE_FORMATS,
    TOPIC_FILE,
    check_topic_name,
    is_topic_id,
    topic_id_of_name,
)
from segmentlog.storage.file_operations import read_file, replace_file, write_new_file
from segmentlog.storage.fs import FileSystem

_CONFIGS_MAX: Final = 256
"""Maximum number of cached configurations."""
_RACY_NS: Final = 100_000_000
"""A cached file is used again only if it was older than this when it was read. A younger file may have been replaced
after the read, by a file with the same inode, size and time, within the resolution of the file system's clock."""

_Version = tuple[int, int, int]


class TopicFile(NamedTuple):
    """Contents of topic.json. ``largest_batch_bytes`` is the largest `max.message.bytes` that the topic ever had."""

    partitions: int
    config: TopicConfig
    largest_batch_bytes: int
    topic_id: str
    format: int = FORMAT_VERSION


class TopicFolders:
    """Names, ids and settings of a store's topics, as they are on disk now. Thread-safe."""

    def __init__(self, fs: FileSystem, path: str) -> None:
        self._fs = fs
        self._path = path
        self.store_id = ""
        self._cached: dict[str, tuple[_Version, bool, TopicFile]] = {}
        self._configs: dict[str, TopicConfig] = {}
        self._names: dict[str, str] = {}

    def names(self, *, internal: bool = False) -> list[str]:
        """Return the sorted names of the topics; with ``internal`` also those of internal topics.

        Without the administration lock, a topic that is being renamed may be missing.
        """
        names = []
        for name in self._fs.listdir(self._path):
            if HIDDEN in name or (name in INTERNAL_TOPICS and not internal):
                continue
            try:
                if self._fs.exists(f"{self._path}/{name}/{TOPIC_FILE}"):
                    names.append(name)
            except PermissionError:  # a folder of another user: not a topic of this store
                continue
        return sorted(names)

    def read(self, name: str, topic_id: str | None = None) -> TopicFile:
        """Return a topic's settings as they are on disk. Raises `UnknownTopic`, `StoreVersionError`.

        With ``topic_id``, raises `UnknownTopic` if the name belongs to another topic.
        """
        file = self._read(name)
        if topic_id is not None and file.topic_id != topic_id:
            raise UnknownTopic(
                name, "it was deleted or renamed while it was in use, and another topic has the name now"
            )
        return file

    def _read(self, name: str) -> TopicFile:
        try:
            check_topic_name(name, internal=True)  # it may come from a file, such as a Spark checkpoint
        except InvalidTopicName:
            raise UnknownTopic(name) from None
        path = f"{self._path}/{name}/{TOPIC_FILE}"
        try:
            found = self._fs.stat(path)
            version = (found.st_ino, found.st_mtime_ns, found.st_size)
            cached = self._cached.get(name)
            if cached is not None and cached[0] == version and cached[1]:
                return cached[2]
            is_cacheable = time.time_ns() - found.st_mtime_ns > _RACY_NS
            parsed = self._parse(name, path)
            self._cached[name] = (version, is_cacheable, parsed)  # every change is a new file, with a new version
            self._names[parsed.topic_id] = name
            return parsed
        except (FileNotFoundError, NotADirectoryError):
            raise UnknownTopic(name) from None

    def _parse(self, name: str, path: str) -> TopicFile:
        try:
            document = json.loads(read_file(self._fs, path))
            version = document["format"]
            if version not in READABLE_FORMATS:
                raise StoreVersionError(path, f"the topic has format {version!r}, not {FORMAT_VERSION}")
            count, config = document["partitions"], self._config_of(document["config"])
            check_partition_count(count)
            largest = max(int(document.get("largest_batch_bytes", 0)), config.max_message_bytes)
            topic_id = topic_id_of_name(self.store_id, name) if version == 1 else document["id"]
            if not is_topic_id(topic_id):
                raise ValueError(f"{topic_id!r} is not a topic id")
            return TopicFile(count, config, largest, topic_id, version)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise StoreVersionError(path, f"damaged ({error}); restore it from a backup, or create it again") from None

    def _config_of(self, settings: dict[str, object]) -> TopicConfig:
        """Return the parsed settings, from a cache if they were parsed before.

        Most topics have the same settings, and checking them takes half of the time of reading a topic.
        """
        key = json.dumps(settings, sort_keys=True)  # use text as the key: as values, True, 1 and 1.0 would be equal
        config = self._configs.get(key)
        if config is None:
            config = TopicConfig.from_mapping(settings)
            if len(self._configs) >= _CONFIGS_MAX:
                self._configs.clear()
            self._configs[key] = config
        return config

    def write(self, folder: str, file: TopicFile, *, is_new: bool = False) -> None:
        """Write a topic's settings to its folder, durably, in the current format. Raises `DiskFull`.

        ``is_new``: no other process can see the folder yet.
        """
        document = {
            "format": FORMAT_VERSION,
            "id": file.topic_id,
            "partitions": file.partitions,
            "config": file.config.to_mapping(),
            "largest_batch_bytes": file.largest_batch_bytes,
        }
        path, data = f"{folder}/{TOPIC_FILE}", json.dumps(document, indent=2).encode() + b"\n"
        if is_new:
            write_new_file(self._fs, path, data)
            self._fs.sync_folder(folder)
        else:
            replace_file(self._fs, path, data)

    def name_of(self, topic_id: str) -> str | None:
        """Return the current name of the topic with this id, if it exists, otherwise None.

        Without the administration lock, None may also mean that the topic is being renamed.
        """
        name = self._names.get(topic_id)
        if name is not None and self._has_id(name, topic_id):
            return name
        for name in self.names(internal=True):
            if self._has_id(name, topic_id):
                return name
        return None

    def _has_id(self, name: str, topic_id: str) -> bool:
        try:
            return self.read(name).topic_id == topic_id
        except (UnknownTopic, StoreVersionError):
            return False

    def check_all_read(self) -> None:
        """Raise `StoreVersionError` if any topic cannot be read: it may be the topic that the caller looks up."""
        for name in self.names(internal=True):
            with contextlib.suppress(UnknownTopic):  # deleted meanwhile
                self.read(name)

    def names_of(self, topic_ids: Iterable[str]) -> dict[str, str]:
        """Return names by id, at least of the given topics that exist. A topic that is being renamed may be missing."""
        found: dict[str, str] = {}
        for topic_id in topic_ids:
            name = self._names.get(topic_id)
            if name is None or not self._has_id(name, topic_id):
                return self.by_id()
            found[topic_id] = name
        return found

    def by_id(self) -> dict[str, str]:
        """Return the names of all readable topics by id."""
        return {file.topic_id: name for name, file in self.files()}

    def files(self) -> Iterator[tuple[str, TopicFile]]:
        """Yield every readable topic, including internal ones."""
        for name in self.names(internal=True):
            try:
                yield name, self.read(name)
            except (UnknownTopic, StoreVersionError):  # deleted meanwhile; a damaged file is reported when it is opened
                continue


def check_partition_count(count: object) -> None:
    """Raise `InvalidConfig` unless this is a valid number of partitions."""
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= MAX_PARTITIONS:
        raise InvalidConfig("partitions", count, f"a whole number from 1 to {MAX_PARTITIONS}")
