"""The check of `test_shipping` detects each of these ways to break shipping."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from msgspec.structs import replace
from objects.shipping_trial import Broken, Trial

from segmentlog.errors import SegmentlogError
from segmentlog.format.checkpoint import Checkpoint
from segmentlog.format.manifest import Tail
from segmentlog.format.stub import Stub
from segmentlog.log.replica_log import ReplicaLog
from segmentlog.log.segment_tiering import evict_segment
from segmentlog.objects.bucket.base import PreconditionFailed
from segmentlog.objects.local.partition_snapshot import LocalPartition
from segmentlog.objects.upload.manifest_publisher import ManifestPublisher
from segmentlog.objects.upload.multipart import MultipartUpload, MultipartUploader
from segmentlog.objects.upload.shipper import Shipper
from segmentlog.policy.upload_policy import PartitionPlan, plan_upload

_ROUNDS = 60
_OBJECTS = "segmentlog.objects"


def patched(what: str, value: object) -> Callable[[], Any]:
    """Return a patch of one attribute."""
    return lambda: mock.patch(what, value)


def _without_chunks(*args: Any, **options: Any) -> PartitionPlan:
    """Leave out the chunks of segments that wait for their upload."""
    made = plan_upload(*args, **options)
    waiting = {segment.base_offset for segment in made.segments_to_upload}
    return replace(
        made,
        pieces=tuple(piece for piece in made.pieces if piece.segment not in waiting),
        kept_chunks=tuple(chunk for chunk in made.kept_chunks if chunk.segment not in waiting),
    )


def _publish(self: Shipper, manifest: Any) -> None:
    """Treat a refused put as a successful one."""
    with contextlib.suppress(PreconditionFailed):
        real_put(self, manifest)
    if self._publisher.manifest is not manifest:
        self._publisher.manifest = manifest


real_put = Shipper._publish


def _put_late(self: Shipper, manifest: Any) -> None:
    """Report durable records as shipped before the put."""
    for state in self._states.by_key.values():
        state.local.partition.handle.ledger.record_shipped(state.local.partition.durable_offset)
    real_put(self, manifest)


def _delete(self: ManifestPublisher, now_ms: int, grace_ms: int) -> None:
    """Delete uploaded objects that the manifest does not refer to yet."""
    assert self.manifest is not None
    kept = {stored.key for stored in self.manifest.objects()}
    self._bucket.delete([one.key for one in self._bucket.list("segments/") if one.key not in kept])


def _end_of_page(self: LocalPartition) -> Any:
    """Treat appended records as durable."""
    page = self._handle.page
    log, sync = page.log.read(), page.sync.read()
    if log.active_base_offset != sync.synced_base_offset:
        return real_look(self)
    ahead = replace(sync, durable_offset=log.log_end_offset, synced_bytes=log.appended_bytes)
    with mock.patch.object(type(page.sync), "read", lambda block: ahead if block is page.sync else log):
        return real_look(self)


@contextlib.contextmanager
def _parts_believed() -> Iterator[None]:
    """Trust the journal without checking the parts, and forget condemned objects."""
    with (
        mock.patch.object(MultipartUploader, "_exists", return_value=True),
        mock.patch.object(MultipartUploader, "remove_published"),
    ):
        yield


def _upload_part(self: MultipartUploader, begun: MultipartUpload, number: int, data: Any) -> None:
    """Report the last part as uploaded although it is missing."""
    real_put_part(self, begun, number, data)
    if number == len(begun.part_sizes) - 1 and number:
        self._bucket.delete([f"{begun.key}.{number}"])


real_put_part = MultipartUploader._upload_part
real_look = LocalPartition.snapshot
real_show = ReplicaLog.publish


def _put_evicted(self: Shipper, manifest: Any) -> None:
    """Evict uploaded segments before the manifest refers to them."""
    for state in self._states.by_key.values():
        log = state.local.partition
        for base, (stamp, segment) in list(state.objects.uploaded.items()) if log.config.remote_storage_enable else ():
            stub = Stub(self.bucket.url, segment.log, 0)
            with contextlib.suppress(SegmentlogError, OSError):
                log.advance_recovery_point()
                evict_segment(log.handle, base, stamp, stub)
    real_put(self, manifest)


SABOTAGES: dict[str, Callable[[], Any]] = {
    "offsets without grants": patched("segmentlog.log.handle.Handle.read_grant", lambda *_: None),
    "a restore that resumes at the end": patched(
        "segmentlog.objects.restore.restore.Checkpoint",
        lambda **fields: Checkpoint(**{**fields, "offset_ceiling": fields["recovery_offset"]}),
    ),
    "chunks dropped before the segment is there": patched(f"{_OBJECTS}.upload.plan.plan_upload", _without_chunks),
    "a refusal taken for success": patched(f"{_OBJECTS}.upload.shipper.Shipper._publish", _publish),
    "acknowledged before the put": patched(f"{_OBJECTS}.upload.shipper.Shipper._publish", _put_late),
    "uploads deleted as rubbish": patched(
        f"{_OBJECTS}.upload.manifest_publisher.ManifestPublisher.delete_marked", _delete
    ),
    "chunks not compared with what was compacted": patched(
        f"{_OBJECTS}.local.uploaded_objects.UploadedObjects.unchanged_chunks", lambda self, log, chunks: set(chunks)
    ),
    "transactions torn": patched(f"{_OBJECTS}.upload.plan.withheld_partitions", lambda *_: frozenset()),
    "shipped before it is on disk": patched(
        "segmentlog.objects.local.partition_snapshot.LocalPartition.snapshot", _end_of_page
    ),
    "no look at who owns it": patched(f"{_OBJECTS}.upload.manifest_publisher.fence", lambda *_: None),
    "followers who do not tell that files were replaced": patched(
        "segmentlog.log.replica_log.ReplicaLog.publish", lambda log, shown, is_replaced=False: real_show(log, shown)
    ),
    "parts believed to lie there": _parts_believed,
    "segments without their last part": patched(
        "segmentlog.objects.upload.multipart.MultipartUploader._upload_part", _upload_part
    ),
    "bytes of another chunk": patched(
        f"{_OBJECTS}.upload.tail_uploader.Tail", lambda number, object=None, data=b"": Tail(number, object, data[::-1])
    ),
    "evicted before the manifest says so": patched(f"{_OBJECTS}.upload.shipper.Shipper._publish", _put_evicted),
    "appends that are not stopped": patched(
        "segmentlog.storage.ship_signals.ShipSignals.are_appends_stopped", lambda *_, **__: False
    ),
    "a store that is handed over before all of it is shipped": patched(
        f"{_OBJECTS}.upload.hand_over_steps.HandOverSteps._find_missing", lambda *_: ""
    ),
    "a store that is taken back without its grants": patched(
        f"{_OBJECTS}.upload.hand_over_steps.HandOverSteps._local_grant", lambda *_: 0
    ),
    "a store that is taken back without a put": patched(
        f"{_OBJECTS}.upload.hand_over_steps.HandOverSteps._raised", lambda self, manifest, now_ms: manifest
    ),
    "files kept for their size": patched(
        "segmentlog.objects.replica.downloads._contains_range", lambda current, part: len(current) >= part.end
    ),
}

_LED_THERE: dict[str, dict[str, Any]] = {
    "parts believed to lie there": {"in_parts": True, "often": {"gc": 20}},
    "a store that is handed over before all of it is shipped": {"often": {"hand over": 30}},
    "a store that is taken back without its grants": {"often": {"hand over": 30}},
    "a store that is taken back without a put": {"often": {"hand over": 30}},
}
"""More frequent steps where one life in thirty would meet the fault: a sweep between two tries of a part.

The cycle that takes a store back raises all grants again, a moment later. So the harm shows only if that put fails.
"""


@pytest.mark.long
@pytest.mark.parametrize("name", SABOTAGES)
def test_it_is_caught(memory_path: Path, name: str) -> None:
    """Within these rounds, a guarantee is broken, or shipping does not continue."""
    seen: Counter[str] = Counter()
    for number in range(_ROUNDS):
        folder = memory_path / str(number)
        folder.mkdir()
        try:
            with SABOTAGES[name]():
                Trial(folder, f"sabotage/{number}", seen, **_LED_THERE.get(name, {})).run(60)
        except (Broken, SegmentlogError, AssertionError) as error:
            print(f"round {number}: {error}")
            return
    pytest.fail(f"nobody noticed in {_ROUNDS} rounds")
