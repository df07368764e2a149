"""Set the folder of a former owner aside, so that the machine can follow the new owner.

    DIR/@former/3/...     the former store: what its third owner had stored, as it was
    DIR/TOPIC/N/*.log     links to sealed segments of the former store, which the replica need not download again

The former store may contain records that were never shipped. The new owner reports their offsets as a lost range, and
no consumer ever sees them. They stay in the folder, so that a person can look for them (``segmentlog --dir
DIR/@former/3 tail TOPIC``); nothing deletes them. Files that are not part of the store stay in the folder. An
interrupted call is resumed by the next one.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import stat
from collections.abc import Iterable
from itertools import islice
from typing import Final

from segmentlog.clock import Clock
from segmentlog.errors import ShippingRefused
from segmentlog.format.file_names import (
    ADMINISTRATION_FILE,
    FORMER_FOLDER,
    LOG_SUFFIX,
    MACHINE_FILES,
    REPLICA_FILE,
    SHIP_FILE,
    STORE_FILE,
    is_machine_file,
    segment_name,
)
from segmentlog.format.manifest import Manifest
from segmentlog.objects.bucket.base import Bucket
from segmentlog.objects.manifest.load import require_manifest
from segmentlog.objects.ownership.binding import read_binding, remove_binding
from segmentlog.objects.standby.unshipped import find_unshipped
from segmentlog.storage.file_operations import link_over, replace_file
from segmentlog.storage.fs import FileSystem
from segmentlog.topics.store_entries import is_store_entry
from segmentlog.topics.topic_admin import TopicAdmin
from segmentlog.topics.topic_folders import TopicFolders

_KEPT: Final = MACHINE_FILES | {REPLICA_FILE, SHIP_FILE, ADMINISTRATION_FILE}
"""Names that stay in the folder: those of the machine, and the locks."""

_LOGGED_MAX: Final = 100
"""Maximum number of ranges of unshipped offsets that log messages list."""

logger = logging.getLogger("segmentlog")


def set_aside_former_store(bucket: Bucket, fs: FileSystem, path: str, clock: Clock | None = None) -> str:
    """Make the folder ``path`` of a former owner an empty replica, and return the folder with the former store.

    The store must be fenced, so that no process appends to it meanwhile. Raise `ShippingRefused` if it is not, or if
    it was not shipped to the URL. Raise `PartitionBusy` if a process uses its files for long, and `ObjectStoreError`.
    """
    manifest, _ = require_manifest(bucket)
    binding = read_binding(fs, path)
    if binding is None or binding.url != bucket.url:
        raise ShippingRefused(bucket.url, f"{path} is not a store that was shipped to this URL")
    if manifest.owner.id == binding.owner_id:
        raise ShippingRefused(bucket.url, f"{path} is the store of the owner")
    if not binding.fenced:
        raise ShippingRefused(bucket.url, f"{path} is not fenced: its processes may still append to it")
    former = _former_folder(fs, path, binding.owner_epoch)
    fs.make_folders(former)
    fs.sync_folder(f"{path}/{FORMER_FOLDER}")
    fs.sync_folder(path)
    topics = TopicAdmin(fs, path, TopicFolders(fs, path))
    with topics.locked():
        # Move store.json first. From then on, no process opens the store, and open ones cannot change topics.
        names = sorted(fs.listdir(path), key=lambda name: (name != STORE_FILE, name))
        foreign = _foreign_names(fs, path, names, manifest)
        for name in names:
            if name in _KEPT or name in foreign or is_machine_file(name):
                continue
            if fs.is_folder(f"{path}/{name}"):
                topics.set_aside(name, _unused_path(fs, f"{former}/{name}"))
            elif _is_same_file(fs, f"{path}/{name}", f"{former}/{name}"):
                fs.unlink(f"{path}/{name}")  # a power cut left both names of a file that was moved
            else:
                fs.rename(f"{path}/{name}", _unused_path(fs, f"{former}/{name}"))
            fs.sync_folder(former)
            fs.sync_folder(path)
        for name in fs.listdir(former):  # an interrupted call may have moved folders without that
            if fs.is_folder(f"{former}/{name}"):
                topics.notify_moved(f"{former}/{name}")
        content = {"url": bucket.url, "store_id": manifest.store_id, "topics": []}
        replace_file(fs, f"{path}/{REPLICA_FILE}", json.dumps(content).encode() + b"\n")
    # The former store keeps no binding: no process must ever ship it again.
    remove_binding(fs, path)
    logger.warning("%s: %s continues this store. The data of this machine is in %s", path, manifest.owner, former)
    if foreign:
        logger.warning("%s: these files are not part of the store, and stay: %s", path, ", ".join(foreign))
    for found in islice(find_unshipped(fs, former, manifest, clock or Clock()), _LOGGED_MAX):
        logger.warning("%s: not shipped, and only in this folder: %s", former, found)
    return former


def _foreign_names(fs: FileSystem, path: str, names: Iterable[str], manifest: Manifest) -> list[str]:
    """Return the names of foreign files in the folder that may stay: the replica needs none of these names."""
    topics = {topic.name for topic in manifest.topics}
    return [
        name
        for name in names
        if name not in topics and not is_machine_file(name) and not is_store_entry(fs, path, name)
    ]


def _former_folder(fs: FileSystem, path: str, epoch: int) -> str:
    """Return the folder for the store in ``path``: a new one, or the one that an interrupted call has begun to fill."""
    folder = f"{path}/{FORMER_FOLDER}/{epoch}"
    number, newer = 1, folder
    while fs.exists(f"{newer}/{STORE_FILE}"):
        if _is_same_file(fs, f"{path}/{STORE_FILE}", f"{newer}/{STORE_FILE}"):
            return newer
        number += 1
        folder, newer = newer, f"{path}/{FORMER_FOLDER}/{epoch}~{number}"
    return newer if fs.exists(f"{path}/{STORE_FILE}") else folder


def _is_same_file(fs: FileSystem, path: str, other: str) -> bool:
    try:
        return os.path.samestat(fs.lstat(path), fs.lstat(other))
    except FileNotFoundError:
        return False


def _unused_path(fs: FileSystem, path: str) -> str:
    """Return ``path``, or a name after it if it exists: a process may have created a file again after the move."""
    number = 1
    wanted = path
    while fs.exists(path, follow=False):
        number += 1
        path = f"{wanted}@{number}"  # "@": not a topic
    return path


def link_former_segments(fs: FileSystem, path: str, manifest: Manifest) -> None:
    """Give a new replica the sealed segments of former stores in its folder, so that it need not download them.

    The replica compares them with the manifest's checksums, and downloads those that differ. Do nothing for a replica
    that has been complete: it downloads only what is new.
    """
    if fs.exists(f"{path}/{STORE_FILE}"):
        return
    try:
        formers = [f"{path}/{FORMER_FOLDER}/{name}" for name in fs.listdir(f"{path}/{FORMER_FOLDER}")]
    except (FileNotFoundError, NotADirectoryError):
        return
    for former in filter(fs.is_folder, formers):
        folders = TopicFolders(fs, former)
        folders.store_id = manifest.store_id
        names = folders.by_id()
        for topic in manifest.topics:
            if topic.id not in names:
                continue
            for partition in topic.partitions:
                for segment in partition.segments:
                    name = f"{partition.number}/{segment_name(segment.base_offset)}{LOG_SUFFIX}"
                    source, target = f"{former}/{names[topic.id]}/{name}", f"{path}/{topic.name}/{name}"
                    _link(fs, source, target, segment.log.size_bytes)


def _link(fs: FileSystem, source: str, path: str, size_bytes: int) -> None:
    # Any failure only costs a download. Many systems refuse links to files of another user, or to a mounted folder.
    with contextlib.suppress(OSError):
        found = fs.stat(source)
        is_writable = found.st_mode & stat.S_IWUSR  # a replica opens its files for writing
        if found.st_size == size_bytes and is_writable and not fs.exists(path):
            fs.make_folders(os.path.dirname(path))
            link_over(fs, source, path)
