"""Take over a store: another machine becomes the owner of a shipped store, and appends to it.

    1  bind the folder, with a new owner id
    2  name this owner in the manifest, by one conditional put: from then on the previous owner is fenced
    3  restore the store, with everything that was ever acknowledged as shipped
    4  give each log its offset grant from the manifest; the log resumes at that offset

A takeover that was interrupted anywhere resumes when it is run again.
"""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from segmentlog.clock import Clock
from segmentlog.errors import ShippingRefused, StoreFenced
from segmentlog.format.file_names import REPLICA_FILE, RESTORING_FILE, STORE_FILE
from segmentlog.format.grant import OffsetGrant
from segmentlog.format.manifest import MANIFEST_KEY, Manifest, Owner, encode_manifest
from segmentlog.format.server_file import ServerNode
from segmentlog.objects.bucket.base import Bucket, PreconditionFailed
from segmentlog.objects.bucket.upload_pool import new_nonce
from segmentlog.objects.manifest.load import require_manifest
from segmentlog.objects.ownership.binding import Binding, folder_id, read_binding, write_binding
from segmentlog.objects.ownership.claim import new_owner
from segmentlog.objects.replica.replica import end_replica
from segmentlog.objects.restore.restore import PARALLEL, Progress, Restore, Restored, restore
from segmentlog.storage.file_operations import make_folders_durably
from segmentlog.storage.fs import FileSystem
from segmentlog.storage.grant_file import write_grant

_TRIES: Final = 50


def take_over(
    bucket: Bucket,
    path: str,
    *,
    force: bool = False,
    nodes: tuple[ServerNode, ...] = (),
    decided_on: str = "",
    fs: FileSystem | None = None,
    clock: Clock | None = None,
    parallel: int = PARALLEL,
    progress: Progress | None = None,
) -> Restored:
    """Become the owner of a shipped store, and restore it in the folder ``path``.

    The folder must be empty, or a replica of the store that no process refreshes; its downloaded files are used.

    ``nodes`` are the workers of this machine's server, for other machines; empty if no server runs here yet.
    ``decided_on`` is the nonce of the manifest from which the caller has concluded that the owner is gone. If the owner
    has shipped since, the takeover stops, and `ShippingRefused` is raised.

    ``force`` takes over even if the owner has ended shipping. The owner may have appended records since. Their offsets
    are then assigned again, to other records, and the two stores have different records at the same offsets.

    Raise `ShippingRefused`, `StoreFenced` if another machine took over first, `ObjectStoreError`, `DiskFull`.
    """
    fs, clock = fs or FileSystem(), clock or Clock()
    manifest, tag = require_manifest(bucket)
    make_folders_durably(fs, path)
    binding = read_binding(fs, path)
    if binding is None or fs.exists(f"{path}/{REPLICA_FILE}"):
        # A replica has a binding if a takeover was abandoned. This takeover uses the same owner id: the put of the
        # abandoned takeover may still take effect, before the next put or after it.
        _check_not_ended(bucket, manifest, force)
        if binding is not None:
            _check_not_fenced(path, binding, manifest.owner)
        restore_job = Restore(fs, bucket, path, manifest)
        end_replica(fs, path, bucket.url, restore_job.write_mark)
        if restore_job.prepare() is not None:
            raise ShippingRefused(bucket.url, f"{path} is a restored store; take over into an empty folder")
        if binding is None:
            owner = new_owner(manifest.owner.epoch + 1, clock.now_ms())
            binding = Binding(bucket.url, owner.id, owner.epoch, folder_id(fs, path), begun=True)
            write_binding(fs, path, binding)
    elif fs.exists(f"{path}/{STORE_FILE}") and not fs.exists(f"{path}/{RESTORING_FILE}"):
        raise ShippingRefused(bucket.url, f"{path} is a store that is shipped; take over into an empty folder")
    elif binding.url != bucket.url:
        raise ShippingRefused(
            bucket.url,
            f"{path} contains an unfinished takeover of {binding.url}; resume that takeover, or choose an empty folder",
        )
    bound = _become_owner(
        bucket, path, fs, binding, manifest, tag, clock.now_ms(), nodes, force=force, decided_on=decided_on
    )
    return restore(
        bucket, path, fs=fs, parallel=parallel, progress=progress,
        before_store=lambda now: _write_grants(fs, path, bound, now),
    )  # fmt: skip


def _check_not_ended(bucket: Bucket, manifest: Manifest, force: bool) -> None:
    """Raise `ShippingRefused` if the owner has ended shipping, unless ``force`` is set."""
    if manifest.ended and not force:
        why = (
            f"{manifest.owner} has ended shipping and may have appended records since. A takeover would assign their"
            " offsets a second time, to other records. Restore the store instead, or use --force"
        )
        raise ShippingRefused(bucket.url, why)


def _check_not_fenced(path: str, binding: Binding, owner: Owner) -> None:
    """Raise `StoreFenced` if another machine has taken over after this takeover began."""
    if owner.id != binding.owner_id and owner.epoch >= binding.owner_epoch:
        raise StoreFenced(f"store {path}", str(owner))


def _become_owner(
    bucket: Bucket, path: str, fs: FileSystem, binding: Binding, manifest: Manifest, tag: str, now_ms: int,
    nodes: tuple[ServerNode, ...], *, force: bool, decided_on: str,
) -> Binding:  # fmt: skip
    """Name this folder's owner in the manifest."""
    for _ in range(_TRIES):
        owner = manifest.owner
        if owner.id == binding.owner_id:
            return binding
        _check_not_fenced(path, binding, owner)
        if decided_on not in ("", manifest.nonce):
            why = f"{owner} has shipped since the decision to take over: it works; the takeover was stopped"
            raise ShippingRefused(bucket.url, why)
        _check_not_ended(bucket, manifest, force)  # the owner may have ended shipping after the first check
        taken = replace(new_owner(binding.owner_epoch, now_ms), id=binding.owner_id, nodes=nodes)
        changed = replace(
            manifest, owner=taken, sequence=manifest.sequence + 1, nonce=new_nonce(), shipped_ms=now_ms, ended=False,
            is_handed_over=False,
        )  # fmt: skip
        try:
            bucket.compare_and_swap(MANIFEST_KEY, encode_manifest(changed), tag)
        except PreconditionFailed:
            manifest, tag = require_manifest(bucket)
            continue
        return binding
    raise ShippingRefused(bucket.url, f"the manifest changed {_TRIES} times during the takeover; try again")


def _write_grants(fs: FileSystem, path: str, binding: Binding, manifest: Manifest) -> None:
    """Write the offset grants before the folder becomes a store, so that no log assigns offsets beyond its grant.

    Raise `StoreFenced` if the manifest names another owner.
    """
    if manifest.owner.id != binding.owner_id:
        raise StoreFenced(f"store {path}", str(manifest.owner))
    for topic in manifest.topics:
        for partition in topic.partitions:
            write_grant(fs, f"{path}/{topic.name}/{partition.number}", OffsetGrant(partition.offset_grant))
