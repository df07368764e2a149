"""The store file ``store.json``: a folder that has it is a store."""

from __future__ import annotations

import json
import os
from typing import Any

from segmentlog.errors import StoreFenced, StoreVersionError
from segmentlog.format.file_names import (
    FORMAT_VERSION,
    FORMER_FOLDER,
    READABLE_FORMATS,
    REPLICA_FILE,
    STORE_FILE,
    TEMPORARY_SUFFIX,
    is_machine_file,
)
from segmentlog.storage import fork_safety
from segmentlog.storage.file_operations import make_folders_durably, read_file, replace_file
from segmentlog.storage.fs import FileSystem
from segmentlog.storage.interrupt_check import is_interrupt
from segmentlog.storage.interrupt_safe import EXCLUSIVE


def open_store_file(fs: FileSystem, path: str, create: bool, now_ms: int) -> dict[str, Any]:
    """Return the contents of the store file in the folder ``path``. With ``create``, create the store if it is missing.

    Raises `StoreVersionError` if the folder is not a store, is damaged, or has another format.
    """
    store_file = f"{path}/{STORE_FILE}"
    try:
        text = read_file(fs, store_file)
    except NotADirectoryError:
        raise StoreVersionError(path, "it is not a folder; a store is a folder") from None
    except FileNotFoundError:
        if not create:
            why = f"there is no store here (no {STORE_FILE}); check the path, or create a store"
            raise StoreVersionError(path, why) from None
        text = _create(fs, path, store_file, now_ms)
    return _parse(store_file, text)


def create_beside_machine_files(fs: FileSystem, path: str, now_ms: int) -> bool:
    """Create a store in the folder ``path`` if the folder is empty except for files of the machine, such as the lock of
    its server. Return whether the folder was that empty.

    For a machine that knows that no store is shipped. Other processes must not create a store in such a folder: it may
    become a replica. A former store shows that the machine had a store, which a new one must not replace.
    """
    names = (name for name in fs.listdir(path) if not _is_allowed_entry(name))
    if not all(is_machine_file(name) and name != FORMER_FOLDER for name in names):
        return False
    _create_locked(fs, path, f"{path}/{STORE_FILE}", now_ms)
    return True


def _create(fs: FileSystem, path: str, store_file: str, now_ms: int) -> bytes:
    if fs.is_folder(path) and not all(map(_is_allowed_entry, fs.listdir(path))):
        why = f"the folder is not empty and is not a store (no {STORE_FILE}); choose an empty or new folder"
        raise StoreVersionError(path, why)
    return _create_locked(fs, path, store_file, now_ms)


def _create_locked(fs: FileSystem, path: str, store_file: str, now_ms: int) -> bytes:
    try:
        # Make the folder durable before the store file exists. A process that finds the file does not sync the folder
        # again, even if this process has died.
        make_folders_durably(fs, path)
    except OSError as error:
        if is_interrupt(error):
            raise
        raise StoreVersionError(path, f"the folder cannot be created: {error.strerror}") from error
    with fork_safety.opened_lockable(fs, path, os.O_RDONLY | os.O_DIRECTORY) as folder_fd:
        fs.flock(folder_fd, EXCLUSIVE)  # if two processes try to create the file, only one does
        if not fs.exists(store_file):
            document = {"format": FORMAT_VERSION, "store_id": os.urandom(16).hex(), "created_ms": now_ms}
            replace_file(fs, store_file, json.dumps(document, indent=2).encode() + b"\n")
    return read_file(fs, store_file)


def check_not_set_aside(fs: FileSystem, path: str) -> None:
    """Raise `StoreFenced` if the store that was in the folder ``path`` was set aside: this machine follows another one
    now. A process that opened the store before must not change anything in the folder.
    """
    if fs.exists(f"{path}/{REPLICA_FILE}") or (
        not fs.exists(f"{path}/{STORE_FILE}") and fs.exists(f"{path}/{FORMER_FOLDER}")
    ):
        raise StoreFenced(f"store {path}", f"another machine, and was moved to a folder in {path}/{FORMER_FOLDER}")


def _is_allowed_entry(name: str) -> bool:
    """Return whether a new store's folder may contain this: an entry of mkfs, or of an interrupted creation."""
    return name == "lost+found" or (name.startswith(STORE_FILE) and name.endswith(TEMPORARY_SUFFIX))


def _parse(path: str, text: bytes) -> dict[str, Any]:
    try:
        document: dict[str, Any] = json.loads(text)
        version = document["format"]
        document["store_id"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise StoreVersionError(path, "damaged: it must be JSON with 'format' and 'store_id'") from None
    if version not in READABLE_FORMATS:
        known = " and ".join(map(str, READABLE_FORMATS))
        why = f"the store has format {version!r}, and this version of segmentlog reads format {known}"
        raise StoreVersionError(path, f"{why}; use the version that wrote it")
    return document
