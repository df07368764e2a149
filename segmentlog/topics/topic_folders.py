"""The topics of a store as they lie there: folders with a ``topic.json``, which says what they are.

    {"format": 2, "id": "<UUID>", "partitions": 3, "config": {...}, "largest_batch_bytes": 1048588}

The name is the folder's, and may change; the id is made with the topic and never changes. A topic
that was made when they had none (format 1) has the one that `topic_id_of_name` gives it.
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
"""Configurations that are kept, by what they were read from."""
_SETTLED_NS: Final = 100_000_000
"""A file that was replaced so long ago is known by inode, time and size. One that is younger may have been replaced
again since it was read, within a tick of the file system's clock, by a file of the same inode."""

_Version = tuple[int, int, int]


class TopicFile(NamedTuple):
    """What topic.json says: how many partitions, the settings, the most that a batch ever may have held, the id."""

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
        self._known: dict[str, tuple[_Version, bool, TopicFile]] = {}
        self._configs: dict[str, TopicConfig] = {}
        self._names: dict[str, str] = {}

    def names(self, *, internal: bool = False) -> list[str]:
        """Names of the topics, sorted; those of the store itself only with ``internal``.

        Without the administration lock it may miss one that is being renamed.
        """
        names = []
        for name in self._fs.listdir(self._path):
            if HIDDEN in name or (name in INTERNAL_TOPICS and not internal):
                continue
            try:
                if self._fs.exists(f"{self._path}/{name}/{TOPIC_FILE}"):
                    names.append(name)
            except PermissionError:  # somebody else's folder: no topic of ours
                continue
        return sorted(names)

    def read(self, name: str, topic_id: str | None = None) -> TopicFile:
        """A topic's settings as they are on disk. Raises `UnknownTopic`, `StoreVersionError`.

        With ``topic_id``, raises `UnknownTopic` when the name belongs to another topic.
        """
        file = self._read(name)
        if topic_id is not None and file.topic_id != topic_id:
            raise UnknownTopic(name, "it was deleted or renamed while it was in use, and another one has the name")
        return file

    def _read(self, name: str) -> TopicFile:
        try:
            check_topic_name(name, internal=True)  # it may come from a file, a checkpoint of Spark's, say
        except InvalidTopicName:
            raise UnknownTopic(name) from None
        path = f"{self._path}/{name}/{TOPIC_FILE}"
        try:
            found = self._fs.stat(path)
            version = (found.st_ino, found.st_mtime_ns, found.st_size)
            known = self._known.get(name)
            if known is not None and known[0] == version and known[1]:
                return known[2]
            is_settled = time.time_ns() - found.st_mtime_ns > _SETTLED_NS
            parsed = self._parse(name, path)
            self._known[name] = (version, is_settled, parsed)  # every change is a new file
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
                raise ValueError(f"{topic_id!r} is no id of a topic")
            return TopicFile(count, config, largest, topic_id, version)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise StoreVersionError(path, f"damaged ({error}); restore it from a backup or write it anew") from None

    def _config_of(self, settings: dict[str, object]) -> TopicConfig:
        """Most topics of a store are configured alike, and to check it takes half of what reading it does."""
        key = json.dumps(settings, sort_keys=True)  # True, 1 and 1.0 are other words, and equal as keys
        config = self._configs.get(key)
        if config is None:
            config = TopicConfig.from_mapping(settings)
            if len(self._configs) >= _CONFIGS_MAX:
                self._configs.clear()
            self._configs[key] = config
        return config

    def write(self, folder: str, file: TopicFile, *, is_new: bool = False) -> None:
        """Put a topic's settings in its folder, durably, in the format of today. Raises `DiskFull`.

        ``is_new``: nobody sees the folder yet.
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
        """The name that a topic has now; None when there is none with this id.

        Without the administration lock that may also be because it is being renamed.
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
        """Raise `StoreVersionError` where a topic cannot be read: any id may be its, and none is known to be gone."""
        for name in self.names(internal=True):
            with contextlib.suppress(UnknownTopic):  # deleted meanwhile
                self.read(name)

    def names_of(self, topic_ids: Iterable[str]) -> dict[str, str]:
        """The names of those of these topics that there are. One that is being renamed may be missing."""
        found: dict[str, str] = {}
        for topic_id in topic_ids:
            name = self._names.get(topic_id)
            if name is None or not self._has_id(name, topic_id):
                return self.by_id()
            found[topic_id] = name
        return found

    def by_id(self) -> dict[str, str]:
        """Names of all topics by their ids; those whose file cannot be read are left out."""
        return {file.topic_id: name for name, file in self.files()}

    def files(self) -> Iterator[tuple[str, TopicFile]]:
        """Every topic that can be read, the store's own included."""
        for name in self.names(internal=True):
            try:
                yield name, self.read(name)
            except (UnknownTopic, StoreVersionError):  # deleted meanwhile, or told by whoever opens it
                continue


def check_partition_count(count: object) -> None:
    """Raise `InvalidConfig` for what is no number of partitions."""
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= MAX_PARTITIONS:
        raise InvalidConfig("partitions", count, f"a whole number from 1 to {MAX_PARTITIONS}")
