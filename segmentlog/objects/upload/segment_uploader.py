"""Upload sealed segments whole, each with its index and producer snapshot. An upload may take several cycles."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Set

from msgspec.structs import replace

from segmentlog.errors import StoreClosed, UnknownTopic
from segmentlog.format.batch import decode_header
from segmentlog.format.manifest import Manifest, ShippedSegment
from segmentlog.objects.bucket import upload_pool
from segmentlog.objects.bucket.base import Bucket
from segmentlog.objects.local.partition_snapshot import SegmentReplaced
from segmentlog.objects.local.transaction_ends import PartitionKey
from segmentlog.objects.local.upload_state import UploadStates
from segmentlog.objects.local.uploaded_objects import UploadedSegment
from segmentlog.objects.manifest.orphans import Orphans
from segmentlog.objects.upload.multipart import MultipartUpload, MultipartUploader, new_segment_key
from segmentlog.objects.upload.plan import PartitionUpload
from segmentlog.policy.fair_share import Turns
from segmentlog.policy.upload_policy import LocalSegment
from segmentlog.storage.fs import FileSystem


class SegmentUploader:
    """Background uploads of sealed segments of one shipper. Not thread-safe; its own threads run the uploads."""

    def __init__(
        self, fs: FileSystem, folder: str, bucket: Bucket, parallel: int, states: UploadStates, orphans: Orphans
    ) -> None:
        self._bucket = bucket
        self._states = states
        self._orphans = orphans
        self._pool: upload_pool.UploadPool[tuple[PartitionKey, int], UploadedSegment] = (
            upload_pool.UploadPool(parallel)
        )  # fmt: skip
        self._multipart = MultipartUploader(fs, folder, bucket, parallel)
        self._turns: Turns[PartitionKey] = Turns()
        """Shares the limited number of parallel uploads among the partitions."""
        self._unused: list[ShippedSegment] = []
        """Uploaded segments that no manifest will refer to: the upload failed later, or the topic was deleted."""
        self._single_bytes = 0
        """Bytes uploaded as single objects."""
        self.left_bytes = 0
        """Bytes of planned segments that are not uploaded yet."""

    @property
    def put_bytes(self) -> int:
        """Bytes of segments uploaded so far."""
        return self._single_bytes + self._multipart.put_bytes

    def load(self) -> None:
        """Resume multi-part uploads of an earlier process."""
        self._multipart.load()

    def remove_published(self, accounted: Set[str]) -> None:
        """Drop multi-part uploads whose keys a published manifest refers to or marks for deletion."""
        self._multipart.remove_published(accounted)

    def close(self) -> None:
        """Start no more uploads, and do not wait for running ones."""
        self._pool.close()

    # ------------------------------------------------------------ start

    def start(self, planned: Mapping[PartitionKey, PartitionUpload]) -> int:
        """Start planned uploads while threads are free; return the number of segments that are not uploaded yet."""
        self._orphans.add(self._multipart.abandoned_parts(lambda upload: self._may_be_valid(upload, planned)))
        waiting = {
            partition_key: [
                segment for segment in upload.plan.segments_to_upload
                if (partition_key, segment.base_offset) not in self._pool
            ]
            for partition_key, upload in planned.items()
        }  # fmt: skip
        order = self._turns.order(key for key, segments in waiting.items() if segments)
        left = sum(map(len, waiting.values()))
        for partition_key, segment in _round_robin({key: waiting[key] for key in order}):
            upload = self._prepare_upload(partition_key, planned[partition_key], segment)
            if not self._pool.start((partition_key, segment.base_offset), upload):
                break  # the pool is full
            self._turns.record_served(partition_key)
            left -= 1
        self.left_bytes = self._multipart.missing_bytes(_planned_segments(planned))
        return len(self._pool) + left

    def _may_be_valid(self, upload: MultipartUpload, planned: Mapping[PartitionKey, PartitionUpload]) -> bool:
        """Return whether the segment file of a multi-part upload may still be on the local disk, unchanged."""
        partition_key = upload.partition_key
        if (partition_key, upload.base_offset) in self._pool:
            return True
        if partition_key not in planned:
            return partition_key in self._states.by_key
        scanned = planned[partition_key].log.segments
        is_after_scan = bool(scanned) and upload.base_offset >= scanned[-1].end_offset
        return is_after_scan or any(segment.stamp == upload.stamp for segment in scanned)

    def _prepare_upload(
        self, partition_key: PartitionKey, planned: PartitionUpload, segment: LocalSegment
    ) -> Callable[[], UploadedSegment]:  # fmt: skip
        """Return the function that uploads a segment on a thread of the pool."""
        local, log, stop = planned.state.local, planned.log, self._pool.stop
        bucket, multipart, unused, base = self._bucket, self._multipart, self._unused, segment.base_offset

        def read(position: int, size_bytes: int) -> memoryview:
            return local.read(log, base, position, size_bytes)

        def upload() -> UploadedSegment:
            base_timestamp = decode_header(read(0, segment.size_bytes), 0).base_timestamp if segment.size_bytes else -1
            max_timestamp, snapshot = local.max_timestamp(base), local.producer_snapshot(base)
            stored = multipart.upload(partition_key, segment, read, stop)
            uploaded = ShippedSegment(base, segment.end_offset, stored, base_timestamp, max_timestamp)
            try:
                key = new_segment_key(partition_key, base) if stored.parts else stored.key
                if snapshot is not None:
                    stored = upload_pool.put_object(bucket, f"{key}.snapshot", snapshot)
                    uploaded = replace(uploaded, snapshot=stored)
                index = local.index(log, segment)
                if index is not None:
                    uploaded = replace(uploaded, index=upload_pool.put_object(bucket, f"{key}.index", index))
            except BaseException:
                unused.append(uploaded)
                raise
            return segment.stamp, uploaded

        return upload

    # ------------------------------------------------------------ collect

    def collect_finished(self, manifest: Manifest | None, wait_s: float = 0.0) -> None:
        """Record the uploads that have ended. Wait up to ``wait_s`` for the first. ``manifest`` is the current one.

        Raise the first error. The next cycle starts a failed upload again.
        """
        first: BaseException | None = None
        marked = {mark.key for mark in manifest.condemned} if manifest else set()
        for (partition_key, base), future in self._pool.collect_finished(wait_s):
            state = self._states.by_key.get(partition_key)
            if state is not None:
                state.mark_dirty()  # the next manifest has to include the segment
            error = future.exception()
            if error is None and state is not None:
                state.objects.discard_segment(base)
                stamp, segment = future.result()
                if segment.log.key not in marked and self._multipart.is_whole(segment.log):
                    state.objects.record_segment(base, (stamp, segment))
                    self._single_bytes += 0 if segment.is_in_parts else segment.log.size_bytes
                    continue
                self._unused.append(segment)  # the upload took so long that garbage collection marked it
            elif error is None:
                self._unused.append(future.result()[1])
            elif not isinstance(error, SegmentReplaced | UnknownTopic | StoreClosed):
                first = first or error
        while self._unused:
            # Do not make the uploaded parts orphans: the journal lists them, and the next attempt resumes with them.
            segment = self._unused.pop()
            self._orphans.add(stored.key for stored in segment.objects[len(segment.log.parts) :])
        if first is not None:
            raise first


def _planned_segments(planned: Mapping[PartitionKey, PartitionUpload]) -> Iterator[tuple[PartitionKey, LocalSegment]]:
    """Yield all segments that the plans upload whole."""
    return ((key, segment) for key, upload in planned.items() for segment in upload.plan.segments_to_upload)


def _round_robin(waiting: Mapping[PartitionKey, list[LocalSegment]]) -> Iterator[tuple[PartitionKey, LocalSegment]]:
    """Yield the first segment of each partition, then the second of each, so that no partition takes all threads."""
    queue = deque((partition_key, iter(segments)) for partition_key, segments in waiting.items())
    while queue:
        partition_key, rest = queue.popleft()
        segment = next(rest, None)
        if segment is not None:
            yield partition_key, segment
            queue.append((partition_key, rest))
