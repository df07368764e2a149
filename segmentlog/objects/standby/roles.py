"""Find out what a machine is to a shipped store: its owner, a former owner, or a standby.

The answer follows from the folder's files and the manifest alone, so that a machine that restarts after any crash
continues in the right role.

    binding (``@ship``)          manifest names     the folder is        role
    this owner                   this owner         a store              owner
    this owner                   this owner         not complete         unfinished takeover: resume it
    this owner                   an earlier owner   not complete         abandoned takeover: standby again
    this owner                   another owner      not complete         lost takeover: standby again
    this owner                   another owner      a store              former owner
    none                         any owner          empty, a replica     standby
    none                         nothing            a store              owner: the first machine
    none                         nothing            empty                waiting for the first machine

The binding of an abandoned takeover stays in the replica. The conditional put of that takeover may still arrive,
however late, and make this machine the owner. Then only the binding proves it.
"""

from __future__ import annotations

import contextlib
import enum
import json

from segmentlog.errors import ShippingRefused
from segmentlog.format.file_names import REPLICA_FILE, RESTORING_FILE, STORE_FILE
from segmentlog.format.manifest import Manifest
from segmentlog.objects.bucket.base import Bucket
from segmentlog.objects.manifest.load import read_manifest
from segmentlog.objects.ownership.binding import Binding, folder_id, read_binding, remove_binding
from segmentlog.storage.file_operations import read_file, replace_file
from segmentlog.storage.fs import FileSystem


class Role(enum.Enum):
    """What a machine is to a shipped store."""

    OWNER = "owner"
    """It serves the store, and ships it."""
    TAKING_OVER = "taking over"
    """The manifest names it as the owner, and its folder is not complete yet."""
    STANDBY = "standby"
    """It follows the owner."""
    FORMER_OWNER = "former owner"
    """Another machine has taken over its store. Its folder must be set aside before it can follow."""
    WAITING = "waiting"
    """Nothing is shipped to the URL yet."""


def find_role(bucket: Bucket, fs: FileSystem, path: str) -> Role:
    """Return the role of this machine, whose store or replica is the folder ``path``.

    An abandoned takeover is undone first: the folder is a replica again.

    Raise `ShippingRefused` if the folder contains another store, a copy of a shipped store, or a store that is shipped
    elsewhere; `ObjectStoreError` if the manifest cannot be read.
    """
    found = read_manifest(bucket)
    manifest = None if found is None else found[0]
    binding = read_binding(fs, path) if fs.is_folder(path) else None
    is_replica, is_restoring = fs.exists(f"{path}/{REPLICA_FILE}"), fs.exists(f"{path}/{RESTORING_FILE}")
    is_store = fs.exists(f"{path}/{STORE_FILE}") and not is_replica and not is_restoring
    if binding is not None:
        return _role_of_bound(bucket, fs, path, binding, manifest, is_store=is_store)
    if is_store:
        if manifest is None or (manifest.ended and manifest.store_id == _store_id(fs, path)):
            return Role.OWNER
        why = f"{manifest.owner} ships a store to this URL, and {path} is another store; use an empty folder"
        raise ShippingRefused(bucket.url, why)
    if manifest is None:
        return Role.WAITING
    if is_restoring:  # the process was killed while it prepared a takeover
        _check_mark(bucket, fs, path, manifest, is_replica=is_replica)
        _make_replica(bucket, fs, path, manifest)
    return Role.STANDBY


def _role_of_bound(
    bucket: Bucket, fs: FileSystem, path: str, binding: Binding, manifest: Manifest | None, *, is_store: bool
) -> Role:
    if binding.url != bucket.url:
        why = f"{path} is shipped to {binding.url}; stop that first ('segmentlog ship --stop')"
        raise ShippingRefused(bucket.url, why)
    if binding.folder_id != folder_id(fs, path):
        why = f"{path} is a copy of a shipped store, or was restored from a backup of it; use an empty folder"
        raise ShippingRefused(bucket.url, why)
    if manifest is None:
        if is_store:
            return Role.OWNER  # the shipper decides whether a missing manifest is right
        raise ShippingRefused(bucket.url, f"{path} contains an unfinished takeover, and the manifest is missing")
    if is_store and _store_id(fs, path) != manifest.store_id:
        why = f"{manifest.owner} ships a store to this URL, and {path} is another store; use an empty folder"
        raise ShippingRefused(bucket.url, why)
    if manifest.owner.id == binding.owner_id:
        return Role.OWNER if is_store else Role.TAKING_OVER
    if is_store and manifest.owner.epoch < binding.owner_epoch:
        return Role.OWNER  # bound to an ended manifest, and nothing was published since
    if is_store and binding.topics:
        why = (
            f"{manifest.owner} continues the shipped topics of this store, and {path} contains other topics that were"
            " not shipped; use an empty folder for the standby"
        )
        raise ShippingRefused(bucket.url, why)
    if is_store or binding.fenced:  # fenced and no store: the folder is being set aside
        return Role.FORMER_OWNER
    _make_replica(bucket, fs, path, manifest)
    if not can_take_effect(binding, manifest):
        remove_binding(fs, path)
    return Role.STANDBY


def can_take_effect(binding: Binding, manifest: Manifest) -> bool:
    """Return whether an abandoned takeover's conditional put may still reach the manifest, or has reached it."""
    return manifest.owner.id == binding.owner_id or manifest.owner.epoch < binding.owner_epoch


def _check_mark(bucket: Bucket, fs: FileSystem, path: str, manifest: Manifest, *, is_replica: bool) -> None:
    """Raise `ShippingRefused` if the folder contains an unfinished restore instead of the beginning of a takeover."""
    found = json.loads(read_file(fs, f"{path}/{RESTORING_FILE}") or b"{}")
    is_takeover = is_replica or not fs.exists(f"{path}/{STORE_FILE}")
    if not is_takeover or found != _content(bucket, manifest):
        raise ShippingRefused(bucket.url, f"{path} contains an unfinished restore: {found}; use an empty folder")


def _make_replica(bucket: Bucket, fs: FileSystem, path: str, manifest: Manifest) -> None:
    """Turn the folder of a takeover that did not reach the manifest back into a replica, with all its files."""
    replace_file(fs, f"{path}/{REPLICA_FILE}", json.dumps(_content(bucket, manifest)).encode() + b"\n")
    with contextlib.suppress(FileNotFoundError):
        fs.unlink(f"{path}/{RESTORING_FILE}")
        fs.sync_folder(path)


def _content(bucket: Bucket, manifest: Manifest) -> dict[str, object]:
    """Return the content of the file that marks a folder as a replica or an unfinished restore of the whole store."""
    return {"url": bucket.url, "store_id": manifest.store_id, "topics": []}


def _store_id(fs: FileSystem, path: str) -> str:
    from segmentlog.topics.store_file import open_store_file

    return str(open_store_file(fs, path, False, 0)["store_id"])
