"""Uploading sealed segments whole, each with its index and its producers, over as many ticks as it takes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Set

from msgspec.structs import replace

from segmentlog.errors import StoreClosed, UnknownTopic
from segmentlog.format.batch import decode_header
from segmentlog.format.manifest import Manifest, ShippedSegment
from segmentlog.objects.bucket import upload_pool
from segmentlog.objects.bucket.base import Bucket
from segmentlog.objects.local.partition_snapshot import Replaced
from segmentlog.objects.local.transaction_ends import Where
from segmentlog.objects.local.upload_state import KnownPartitions
from segmentlog.objects.local.uploaded_objects import Uploaded
from segmentlog.objects.manifest.orphans import Orphans
from segmentlog.objects.upload.multipart import Begun, SegmentPuts, key_of
from segmentlog.objects.upload.plan import Round
from segmentlog.policy.fair_share import Turns
from segmentlog.policy.upload_policy import LocalSegment
from segmentlog.storage.fs import FileSystem


class SegmentUploads:
    """Of one shipper. For one thread at a time; what it begins is done by threads of its own."""

    def __init__(
        self, fs: FileSystem, folder: str, bucket: Bucket, parallel: int, known: KnownPartitions, orphans: Orphans
    ) -> None:
        self._bucket = bucket
        self._known = known
        self._orphans = orphans
        self._uploads: upload_pool.Uploads[tuple[Where, int], Uploaded] = upload_pool.Uploads(parallel)
        self._puts = SegmentPuts(fs, folder, bucket, parallel)
        self._turns: Turns[Where] = Turns()
        """By whose segments are being uploaded: there are places for so many at once."""
        self._left: list[ShippedSegment] = []
        """What of segments was put, and is of no use: an upload failed, or was of a topic that is gone."""
        self._whole_bytes = 0
        """Of segments that were put, but for those in parts."""
        self.left_bytes = 0
        """What is to be uploaded still."""

    @property
    def put_bytes(self) -> int:
        """What lies there by now."""
        return self._whole_bytes + self._puts.put_bytes

    def load(self) -> None:
        """Go on from what an earlier process has put."""
        self._puts.load()

    def settle(self, said: Set[str]) -> None:
        """A manifest that lies there says what becomes of these objects: it refers to them, or condemns them."""
        self._puts.settle(said)

    def close(self) -> None:
        """Begin no more. What is being uploaded is not waited for."""
        self._uploads.close()

    # ------------------------------------------------------------ beginning

    def begin(self, rounds: Mapping[Where, Round]) -> int:
        """Start the uploads that the plans want; return how many segments are being uploaded or wait for a thread."""
        self._orphans.add(self._puts.of_no_use(lambda one: self._is_wanted(one, rounds)))
        waiting = {
            where: [one for one in round_.to_do.upload if (where, one.base_offset) not in self._uploads]
            for where, round_ in rounds.items()
        }
        order = self._turns.order(where for where, segments in waiting.items() if segments)
        left = sum(map(len, waiting.values()))
        for where, segment in _one_of_each({where: waiting[where] for where in order}):
            upload = self._uploading(where, rounds[where], segment)
            if not self._uploads.begin((where, segment.base_offset), upload):
                break  # all places are taken
            self._turns.record_served(where)
            left -= 1
        self.left_bytes = self._puts.missing_bytes(_to_upload(rounds))
        return len(self._uploads) + left

    def _is_wanted(self, begun: Begun, rounds: Mapping[Where, Round]) -> bool:
        """Whether the file may still be there of which parts were put."""
        if (begun.where, begun.base_offset) in self._uploads:
            return True
        if begun.where not in rounds:
            return begun.where in self._known.parts
        found = rounds[begun.where].log.segments
        is_behind = bool(found) and begun.base_offset >= found[-1].end_offset  # of what was looked at
        return is_behind or any(one.stamp == begun.stamp for one in found)

    def _uploading(self, where: Where, round_: Round, segment: LocalSegment) -> Callable[[], Uploaded]:
        local, log, stop = round_.part.local, round_.log, self._uploads.stop
        bucket, puts, left, base = self._bucket, self._puts, self._left, segment.base_offset

        def read(position: int, size_bytes: int) -> memoryview:
            return local.read(log, base, position, size_bytes)

        def upload() -> Uploaded:
            base_timestamp = decode_header(read(0, segment.size_bytes), 0).base_timestamp if segment.size_bytes else -1
            max_timestamp, known = local.max_timestamp(base), local.snapshot(base)
            stored = puts.put(where, segment, read, stop)
            found = ShippedSegment(base, segment.end_offset, stored, base_timestamp, max_timestamp)
            try:
                key = key_of(where, base) if stored.parts else stored.key
                if known is not None:
                    found = replace(found, snapshot=upload_pool.put(bucket, f"{key}.snapshot", known))
                entries = local.index(log, segment)
                if entries is not None:
                    found = replace(found, index=upload_pool.put(bucket, f"{key}.index", entries))
            except BaseException:
                left.append(found)
                raise
            return segment.stamp, found

        return upload

    # ------------------------------------------------------------ ending

    def collect(self, manifest: Manifest | None, wait_s: float = 0.0) -> None:
        """Take note of segments that lie there now; ``manifest`` is what lies there.

        Raises the first error; what failed is begun anew.
        """
        first: BaseException | None = None
        condemned = {one.key for one in manifest.condemned} if manifest else set()
        for (where, base), future in self._uploads.ended(wait_s):
            part = self._known.parts.get(where)
            if part is not None:
                part.look_again()  # there is something to say
            error = future.exception()
            if error is None and part is not None:
                part.standing.forget_upload(base)
                stamp, segment = future.result()
                if segment.log.key not in condemned and self._puts.is_whole(segment.log):
                    part.standing.note_uploaded(base, (stamp, segment))
                    self._whole_bytes += 0 if segment.is_in_parts else segment.log.size_bytes
                    continue
                self._left.append(segment)  # it has taken so long that somebody swept it
            elif error is None:
                self._left.append(future.result()[1])
            elif not isinstance(error, Replaced | UnknownTopic | StoreClosed):
                first = first or error
        while self._left:
            # Of what was put in parts the journal knows, and whoever begins anew goes on with them.
            segment = self._left.pop()
            self._orphans.add(one.key for one in segment.objects[len(segment.log.parts) :])
        if first is not None:
            raise first


def _to_upload(rounds: Mapping[Where, Round]) -> Iterator[tuple[Where, LocalSegment]]:
    """All that the plans want uploaded."""
    return ((where, one) for where, round_ in rounds.items() for one in round_.to_do.upload)


def _one_of_each(waiting: Mapping[Where, list[LocalSegment]]) -> Iterator[tuple[Where, LocalSegment]]:
    """The first segment of each partition, then the second of each: a partition with many would take all places."""
    queue = deque((where, iter(segments)) for where, segments in waiting.items())
    while queue:
        where, rest = queue.popleft()
        segment = next(rest, None)
        if segment is not None:
            yield where, segment
            queue.append((where, rest))
