"""Tell the files and folders of a store from other ones that are in its folder: keys, mount points, notes of people."""

from __future__ import annotations

from typing import Final

from segmentlog.format.file_names import (
    ADMINISTRATION_FILE,
    ALTERING_PREFIX,
    CHECKPOINT_FILE,
    CLEANER_FILE,
    DELETED_PREFIX,
    GRANT_FILE,
    GROUPS_FOLDER,
    HAND_OVER_FILE,
    HIDDEN,
    LOCK_FILE,
    MAKING_PREFIX,
    PRODUCER_IDS_FILE,
    PRODUCERS_FILE,
    PRODUCERS_FOLDER,
    QUARANTINE_FOLDER,
    REPLICA_FILE,
    REPLICA_STATUS_FILE,
    RESTORING_FILE,
    SCHEMAS_FILE,
    SHIP_FILE,
    STAGING_FOLDER,
    STATE_FILE,
    STORE_FILE,
    TOPIC_FILE,
    UPLOADS_FILE,
    segment_name,
)
from segmentlog.storage.fs import FileSystem
from segmentlog.storage.network import NetworkMark

_STORE_ENTRIES: Final = frozenset(
    {STORE_FILE, ADMINISTRATION_FILE, GROUPS_FOLDER, PRODUCERS_FOLDER, STAGING_FOLDER, SCHEMAS_FILE, PRODUCER_IDS_FILE}
    | {SHIP_FILE, HAND_OVER_FILE, UPLOADS_FILE, RESTORING_FILE, REPLICA_FILE, REPLICA_STATUS_FILE}
    | {NetworkMark.FILE}
)
_INTERRUPTED_CHANGES: Final = (MAKING_PREFIX, DELETED_PREFIX, ALTERING_PREFIX)
_PARTITION_ENTRIES: Final = frozenset(
    {CHECKPOINT_FILE, STATE_FILE, LOCK_FILE, CLEANER_FILE, PRODUCERS_FILE, GRANT_FILE, QUARANTINE_FOLDER}
)
_OFFSET_DIGITS: Final = len(segment_name(0))


def is_store_entry(fs: FileSystem, path: str, name: str) -> bool:
    """Return whether ``name`` in the folder ``path`` of a store, a replica or a restore belongs to the store.

    Lock files and temporary files of store files count, too: they have the file's name and a suffix. Files of the
    machine (`MACHINE_FILES`) do not belong to the store.
    """
    if name.startswith(_INTERRUPTED_CHANGES):
        return True
    if name.startswith(HIDDEN) or name.startswith(STORE_FILE):
        return any(name == entry or name.startswith(f"{entry}.") for entry in _STORE_ENTRIES)
    return HIDDEN not in name and _is_topic_folder(fs, f"{path}/{name}")


def _is_topic_folder(fs: FileSystem, folder: str) -> bool:
    """Return whether a folder is a topic; also one without ``topic.json``, which a restore writes late."""
    names = _names_in(fs, folder) or []
    if any(name == TOPIC_FILE or name.startswith(f"{TOPIC_FILE}.") for name in names):
        return True
    return bool(names) and all(name.isdecimal() and _is_partition_folder(fs, f"{folder}/{name}") for name in names)


def _is_partition_folder(fs: FileSystem, folder: str) -> bool:
    names = _names_in(fs, folder)
    return names is not None and all(map(_is_partition_entry, names))


def _is_partition_entry(name: str) -> bool:
    if len(name) > _OFFSET_DIGITS:  # a file of a segment
        return name[:_OFFSET_DIGITS].isdecimal()
    return name.partition(".")[0] in _PARTITION_ENTRIES


def _names_in(fs: FileSystem, folder: str) -> list[str] | None:
    """Return the names in a folder; None for a file, and for a folder of another user."""
    try:
        return fs.listdir(folder)
    except (NotADirectoryError, FileNotFoundError, PermissionError):
        return None
