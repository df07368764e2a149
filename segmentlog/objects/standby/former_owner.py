"""Set the folder of a former owner aside, so that the machine can follow the new owner.

    DIR/@former/3/...     the former store: what its third owner had stored, as it was
    DIR/TOPIC/N/*.log     links to sealed segments of the former store, which the replica need not download again

The former store may contain records that were never shipped. The new owner reports their offsets as a lost range, and
no consumer ever sees them. They stay in the folder, so that a person can look for them (``segmentlog --dir
DIR/@former/3 tail TOPIC``); nothing deletes them. An interrupted call is resumed by the next one.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os

from segmentlog.errors import ShippingRefused
from segmentlog.format.file_names import (
    FORMER_FOLDER,
    LOG_SUFFIX,
    MACHINE_FILES,
    REPLICA_FILE,
    SHIP_FILE,
    STORE_FILE,
    segment_name,
)
from segmentlog.format.manifest import Manifest
from segmentlog.objects.bucket.base import Bucket
from segmentlog.objects.manifest.load import require_manifest
from segmentlog.objects.ownership.binding import read_binding, remove_binding
from segmentlog.storage.file_operations import link_over, replace_file
from segmentlog.storage.fs import FileSystem

logger = logging.getLogger("segmentlog")


def set_aside_former_store(bucket: Bucket, fs: FileSystem, path: str) -> str:
    """Make the folder ``path`` of a former owner an empty replica, and return the folder with the former store.

    The store must be fenced, so that no process appends to it meanwhile. Raise `ShippingRefused` if it is not, or if
    it was not shipped to the URL; `ObjectStoreError`.
    """
    manifest, _ = require_manifest(bucket)
    binding = read_binding(fs, path)
    if binding is None or binding.url != bucket.url:
        raise ShippingRefused(bucket.url, f"{path} is not a store that was shipped to this URL")
    if not binding.fenced and fs.exists(f"{path}/{STORE_FILE}"):
        raise ShippingRefused(bucket.url, f"{path} is not fenced: its processes may still append to it")
    former = f"{path}/{FORMER_FOLDER}/{binding.owner_epoch}"
    fs.make_folders(former)
    fs.sync_folder(f"{path}/{FORMER_FOLDER}")
    fs.sync_folder(path)
    # store.json first: from then on, no process opens a part of the store here.
    for name in sorted(fs.listdir(path), key=lambda name: (name != STORE_FILE, name)):
        if name not in MACHINE_FILES and name not in (REPLICA_FILE, SHIP_FILE):
            fs.rename(f"{path}/{name}", _unused_path(fs, f"{former}/{name}"))
            fs.sync_folder(former)
            fs.sync_folder(path)
    content = {"url": bucket.url, "store_id": manifest.store_id, "topics": []}
    replace_file(fs, f"{path}/{REPLICA_FILE}", json.dumps(content).encode() + b"\n")
    # The former store keeps no binding: no process must ever ship it again.
    remove_binding(fs, path)
    logger.warning(
        "%s: %s continues this store. The data of this machine is in %s; records that were not shipped are only there",
        path, manifest.owner, former,
    )  # fmt: skip
    return former


def _unused_path(fs: FileSystem, path: str) -> str:
    """Return ``path``, or a name after it if it exists: a process may have created a file again after the move."""
    number = 1
    wanted = path
    while fs.exists(path, follow=False):
        number += 1
        path = f"{wanted}~{number}"
    return path


def link_former_segments(fs: FileSystem, path: str, manifest: Manifest) -> None:
    """Give a new replica the sealed segments of former stores in its folder, so that it need not download them.

    The replica compares them with the manifest's checksums, and downloads those that differ.
    """
    try:
        formers = [f"{path}/{FORMER_FOLDER}/{name}" for name in fs.listdir(f"{path}/{FORMER_FOLDER}")]
    except FileNotFoundError:
        return
    for topic in manifest.topics:
        for partition in topic.partitions:
            folder = f"{topic.name}/{partition.number}"
            for segment in partition.segments:
                name = f"{folder}/{segment_name(segment.base_offset)}{LOG_SUFFIX}"
                for former in formers:
                    _link(fs, f"{former}/{name}", f"{path}/{name}", segment.log.size_bytes)


def _link(fs: FileSystem, source: str, path: str, size_bytes: int) -> None:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        if fs.stat(source).st_size == size_bytes and not fs.exists(path):
            fs.make_folders(os.path.dirname(path))
            link_over(fs, source, path)
