"""Upload the new data of all partitions as chunks of tails, each tail an object, and the producer snapshots before it.

A cycle chooses among three kinds of tail:

shared   one tail that contains the chunks of all partitions, one after another
alone    a tail for one large chunk; several of them are uploaded in parallel
inline   a tail of a few KiB, which is stored in the manifest instead of an object
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Final

import xxhash

from segmentlog.format.batch import decode_header
from segmentlog.format.manifest import Chunk, Manifest, Snapshot, Tail
from segmentlog.objects.bucket import upload_pool
from segmentlog.objects.bucket.base import Bucket
from segmentlog.objects.local.transaction_ends import PartitionKey
from segmentlog.objects.local.upload_state import PartitionUploadState
from segmentlog.objects.manifest.orphans import Orphans
from segmentlog.objects.upload.plan import PartitionUpload
from segmentlog.policy.upload_policy import Piece, fits_inline

_ALONE_BYTES: Final = 8 << 20
"""A chunk of at least this size becomes a tail of its own."""
_TIMESTAMP_SCAN_BYTES: Final = 4 << 20


class TailUploader:
    """Uploads the tails of one shipper. Not thread-safe."""

    def __init__(self, bucket: Bucket, parallel: int, orphans: Orphans) -> None:
        self._bucket = bucket
        self._parallel = parallel
        self._orphans = orphans
        self._new: dict[int, Tail] = {}
        """Uploaded tails that no manifest refers to yet, by number."""
        self._next = 0
        self.put_bytes = 0
        """Bytes of chunks uploaded so far."""

    def upload(self, planned: Mapping[PartitionKey, PartitionUpload], manifest: Manifest | None) -> int:
        """Upload the planned pieces of all partitions and set their ``chunks``; return their size in bytes.

        ``manifest`` is the current one. Chunks of withheld partitions are staged.
        """
        shared = self.next_number(manifest)
        tails: dict[int, list[memoryview]] = {shared: []}
        size_bytes = start = 0
        for partition_key, upload in planned.items():
            upload.chunks = []
            for piece, data in zip(upload.plan.pieces, upload.data, strict=True):
                if len(data) >= _ALONE_BYTES:
                    number = shared + len(tails)
                    tails[number] = [data]
                    upload.chunks.append(_chunk(piece, data, number, 0))
                else:
                    tails[shared].append(data)
                    upload.chunks.append(_chunk(piece, data, shared, start))
                    start += len(data)
                size_bytes += len(data)
            if upload.log.has_producers:
                for segment in {upload.plan.active_base, *(piece.segment for piece in upload.plan.pieces)}:
                    self._upload_snapshot(partition_key, upload.state, segment)
        if size_bytes:
            self._next = shared + len(tails)
            if len(tails) == 1 and fits_inline(size_bytes, self._inline_bytes(manifest)):
                self._new[shared] = Tail(shared, data=b"".join(tails[shared]))
            else:
                self._upload_tails({number: data for number, data in tails.items() if data})
            for upload in planned.values():
                upload.state.objects.record_chunks(upload.log, upload.chunks)
        for upload in planned.values():
            if upload.is_withheld:
                upload.state.objects.stage((*upload.plan.kept_chunks, *upload.chunks))
        self.put_bytes += size_bytes
        return size_bytes

    def _inline_bytes(self, manifest: Manifest | None) -> int:
        """Return the size of the inline tails, in the current manifest and in the next one."""
        tails = (*(manifest.tails if manifest else ()), *self._new.copy().values())
        return sum(len(data) for data in {tail.number: tail.data for tail in tails}.values())

    def _upload_tails(self, tails: Mapping[int, list[memoryview]]) -> None:
        """Upload tails as objects, by number."""
        keys = {number: f"tails/{number:020d}-{upload_pool.new_nonce()}" for number in tails}
        self._orphans.add(keys.values())

        def put(number: int) -> Tail:
            data = tails[number]
            joined = data[0] if len(data) == 1 else b"".join(data)
            return Tail(number, upload_pool.put_object(self._bucket, keys[number], joined))

        self._new.update((tail.number, tail) for tail in upload_pool.run_parallel(put, keys, self._parallel))

    def _upload_snapshot(self, partition_key: PartitionKey, state: PartitionUploadState, segment: int) -> None:
        """Upload the producer snapshot at the base offset of a segment, unless it is uploaded already."""
        if segment in state.objects.snapshots or (data := state.local.producer_snapshot(segment)) is None:
            return
        topic_id, number = partition_key
        key = f"segments/{topic_id}/{number}/{segment:020d}-{upload_pool.new_nonce()}.snapshot"
        self._orphans.add([key])
        state.objects.record_snapshot(Snapshot(segment, upload_pool.put_object(self._bucket, key, data)))

    # ------------------------------------------------------------ numbers and keys

    def next_number(self, manifest: Manifest | None) -> int:
        """Return a number for the next tail: higher than those of all tails in the manifest or uploaded after it."""
        return max(self._next, manifest.next_tail if manifest else 0)

    def referenced_tails(self, numbers: Set[int], manifest: Manifest | None) -> tuple[Tail, ...]:
        """Return the tails with these numbers, from the current ``manifest`` and the new ones."""
        tails = {tail.number: tail for tail in manifest.tails} | self._new if manifest else self._new
        return tuple(tail for number, tail in sorted(tails.items()) if number in numbers)

    def keys_in_use(self, staged: Set[int]) -> set[str]:
        """Return the keys of the uploaded tails with the numbers ``staged``. No manifest refers to these tails yet."""
        return {tail.object.key for number, tail in self._new.items() if number in staged and tail.object is not None}

    def retain_staged(self, staged: Set[int]) -> None:
        """Drop all new tails except the ``staged`` ones, after a manifest was published."""
        self._new = {number: tail for number, tail in self._new.items() if number in staged}


def _chunk(piece: Piece, data: memoryview, tail: int, start: int) -> Chunk:
    return Chunk(
        piece.segment, piece.position, piece.size_bytes, piece.base_offset, piece.end_offset, tail, start,
        xxhash.xxh3_64_hexdigest(data), _max_timestamp(data),
    )  # fmt: skip


def _max_timestamp(data: memoryview) -> int:
    """Return the largest timestamp of the batches in a piece; -1 if the piece is too large to scan."""
    found, position = -1, 0
    while position < len(data) <= _TIMESTAMP_SCAN_BYTES:
        header = decode_header(data, position)
        found, position = max(found, header.max_timestamp), position + header.size_bytes
    return found
