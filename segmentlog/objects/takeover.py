"""Taking a store over: another machine becomes the owner of what lies in the object store, and goes on with it.

    1  the folder is bound, as an owner that nobody was before
    2  one conditional put says so: whoever owned it until now is fenced from here on
    3  the store is restored, up to all that was ever acknowledged as shipped
    4  each log asks for grants; it goes on at the ceiling that the last owner was promised

Killed anywhere and run again it goes on where it was.
"""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from segmentlog.clock import Clock
from segmentlog.errors import ShippingRefused, StoreFenced
from segmentlog.format.file_names import RESTORING_FILE, STORE_FILE
from segmentlog.format.grant import Grant
from segmentlog.format.manifest import MANIFEST_KEY, Manifest, encode_manifest
from segmentlog.objects.bucket.base import Bucket, ObjectChanged
from segmentlog.objects.bucket.upload_pool import nonce
from segmentlog.objects.manifest.load import require_manifest
from segmentlog.objects.ownership.binding import Binding, folder_id, read_binding, write_binding
from segmentlog.objects.ownership.claim import new_owner
from segmentlog.objects.replica.replica import end_replica
from segmentlog.objects.restore.restore import PARALLEL, Progress, Restored, Restoring, restore
from segmentlog.storage.file_operations import make_folders_durably
from segmentlog.storage.fs import FileSystem
from segmentlog.storage.grant_file import write_grant

_TRIES: Final = 50


def take_over(
    bucket: Bucket,
    path: str,
    *,
    force: bool = False,
    fs: FileSystem | None = None,
    clock: Clock | None = None,
    parallel: int = PARALLEL,
    progress: Progress | None = None,
) -> Restored:
    """Be the owner of the store that lies there, from the folder ``path`` on.

    ``force``: also where the owner has ended shipping. The owner may have appended records since; their offsets are
    then assigned a second time, to other records, and both stores use them. The folder is empty, or a replica that
    nobody keeps up: what it has is kept. Raises `ShippingRefused`, `StoreFenced` when somebody else was quicker,
    `ObjectStoreError`, `DiskFull`.
    """
    fs, clock = fs or FileSystem(), clock or Clock()
    manifest, tag = require_manifest(bucket)
    make_folders_durably(fs, path)
    binding = read_binding(fs, path)
    if binding is None:
        _check_goes_on(bucket, manifest, force)
        restoring = Restoring(fs, bucket, path, manifest)
        end_replica(fs, path, bucket.url, restoring.adopt)
        if restoring.begin() is not None:
            raise ShippingRefused(bucket.url, f"{path} was restored; take over into a folder that is empty")
        owner = new_owner(manifest.owner.epoch + 1, clock.now_ms())
        binding = Binding(bucket.url, owner.id, owner.epoch, folder_id(fs, path), begun=True)
        write_binding(fs, path, binding)
    elif fs.exists(f"{path}/{STORE_FILE}") and not fs.exists(f"{path}/{RESTORING_FILE}"):
        raise ShippingRefused(bucket.url, f"{path} is a store that is shipped; take over into a folder that is empty")
    elif binding.url != bucket.url:
        raise ShippingRefused(bucket.url, f"{path} holds what was begun of taking over {binding.url}")
    bound = _become_owner(bucket, path, fs, binding, manifest, tag, clock.now_ms(), force=force)
    return restore(
        bucket, path, fs=fs, parallel=parallel, progress=progress,
        before_store=lambda now: _limit(fs, path, bound, now),
    )  # fmt: skip


def _check_goes_on(bucket: Bucket, manifest: Manifest, force: bool) -> None:
    """Raise `ShippingRefused` where the owner has ended shipping, unless that is to be no reason."""
    if manifest.ended and not force:
        why = (
            f"{manifest.owner} has ended shipping, and may have appended records since: a takeover would assign their"
            " offsets a second time, to other records; restore it instead, or say --force"
        )
        raise ShippingRefused(bucket.url, why)


def _become_owner(
    bucket: Bucket, path: str, fs: FileSystem, binding: Binding, manifest: Manifest, tag: str, now_ms: int,
    *, force: bool,
) -> Binding:  # fmt: skip
    """Have the manifest name this folder's owner."""
    for _ in range(_TRIES):
        owner = manifest.owner
        if owner.id == binding.owner_id:
            return binding
        if owner.epoch >= binding.owner_epoch:
            raise StoreFenced(f"store {path}", str(owner))
        _check_goes_on(bucket, manifest, force)  # it may have ended since this was begun
        taken = replace(new_owner(binding.owner_epoch, now_ms), id=binding.owner_id)
        changed = replace(
            manifest, owner=taken, sequence=manifest.sequence + 1, nonce=nonce(), shipped_ms=now_ms, ended=False
        )
        try:
            bucket.swap(MANIFEST_KEY, encode_manifest(changed), tag)
        except ObjectChanged:
            manifest, tag = require_manifest(bucket)
            continue
        return binding
    raise ShippingRefused(bucket.url, f"the manifest changed {_TRIES} times while it was to be taken over")


def _limit(fs: FileSystem, path: str, binding: Binding, manifest: Manifest) -> None:
    """Before the folder is a store: no log of it hands out what was not promised. Raises `StoreFenced`."""
    if manifest.owner.id != binding.owner_id:
        raise StoreFenced(f"store {path}", str(manifest.owner))
    for topic in manifest.topics:
        for partition in topic.partitions:
            write_grant(fs, f"{path}/{topic.name}/{partition.number}", Grant(partition.ceiling))
