"""Putting what is new of all partitions: in one tail, with the producers that its chunks build upon.

together    the chunks of all partitions, one behind the other
alone       a chunk that is large is a tail of its own, put beside the others
inline      a tail of a few KiB is no object: it stands in the manifest
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Final

import xxhash

from segmentlog.format.batch import decode_header
from segmentlog.format.manifest import Chunk, Manifest, Snapshot, Tail
from segmentlog.objects.bucket import upload_pool
from segmentlog.objects.bucket.base import Bucket
from segmentlog.objects.local.transaction_ends import Where
from segmentlog.objects.local.upload_state import Part
from segmentlog.objects.manifest.orphans import Orphans
from segmentlog.objects.upload.plan import Round
from segmentlog.policy.upload_policy import Piece, stands_inline

_ALONE_BYTES: Final = 8 << 20
"""Chunks as large are tails of their own."""
_LOOKED_THROUGH_BYTES: Final = 4 << 20


class Tails:
    """Of one shipper. For one thread at a time."""

    def __init__(self, bucket: Bucket, parallel: int, orphans: Orphans) -> None:
        self._bucket = bucket
        self._parallel = parallel
        self._orphans = orphans
        self._new: dict[int, Tail] = {}
        """By number, those that no manifest refers to yet."""
        self._next = 0
        self.put_bytes = 0
        """What lies there by now."""

    def put(self, rounds: Mapping[Where, Round], manifest: Manifest | None) -> int:
        """Put what is new of all partitions, as one object, beside others of what is large; how many bytes it is.

        ``manifest`` is what lies there. Each round then has its chunks; what is held back is staged.
        """
        together = self.next_number(manifest)
        parts: dict[int, list[memoryview]] = {together: []}
        size_bytes = start = 0
        for where, round_ in rounds.items():
            round_.chunks = []
            for piece, data in zip(round_.to_do.pieces, round_.data, strict=True):
                if len(data) >= _ALONE_BYTES:
                    number = together + len(parts)
                    parts[number] = [data]
                    round_.chunks.append(_chunk(piece, data, number, 0))
                else:
                    parts[together].append(data)
                    round_.chunks.append(_chunk(piece, data, together, start))
                    start += len(data)
                size_bytes += len(data)
            if round_.log.has_producers:
                for segment in {round_.to_do.active_base, *(piece.segment for piece in round_.to_do.pieces)}:
                    self._put_snapshot(where, round_.part, segment)
        if size_bytes:
            self._next = together + len(parts)
            if len(parts) == 1 and stands_inline(size_bytes, self._inline_bytes(manifest)):
                self._new[together] = Tail(together, data=b"".join(parts[together]))
            else:
                self._put_as_objects({number: data for number, data in parts.items() if data})
            for round_ in rounds.values():
                round_.part.standing.note_put(round_.log, round_.chunks)
        for round_ in rounds.values():
            if round_.is_held:
                round_.part.standing.stage((*round_.to_do.keep, *round_.chunks))
        self.put_bytes += size_bytes
        return size_bytes

    def _inline_bytes(self, manifest: Manifest | None) -> int:
        """Of tails that stand in the manifest, or are to."""
        tails = (*(manifest.tails if manifest else ()), *self._new.copy().values())
        return sum(len(data) for data in {tail.number: tail.data for tail in tails}.values())

    def _put_as_objects(self, parts: Mapping[int, list[memoryview]]) -> None:
        """Put tails, by number."""
        keys = {number: f"tails/{number:020d}-{upload_pool.nonce()}" for number in parts}
        self._orphans.add(keys.values())

        def put(number: int) -> Tail:
            data = parts[number]
            joined = data[0] if len(data) == 1 else b"".join(data)
            return Tail(number, upload_pool.put(self._bucket, keys[number], joined))

        self._new.update((tail.number, tail) for tail in upload_pool.beside_each_other(put, keys, self._parallel))

    def _put_snapshot(self, where: Where, part: Part, segment: int) -> None:
        """See to it that what was known of producers where a segment begins lies there."""
        if segment in part.standing.snapshots or (data := part.local.snapshot(segment)) is None:
            return
        key = f"segments/{where[0]}/{where[1]}/{segment:020d}-{upload_pool.nonce()}.snapshot"
        self._orphans.add([key])
        part.standing.note_snapshot(Snapshot(segment, upload_pool.put(self._bucket, key, data)))

    # ------------------------------------------------------------ which there are

    def next_number(self, manifest: Manifest | None) -> int:
        """Of the next one: none that lies there, or was put, has it."""
        return max(self._next, manifest.next_tail if manifest else 0)

    def live(self, numbers: Set[int], manifest: Manifest | None) -> tuple[Tail, ...]:
        """Those of these numbers, which ``manifest`` refers to, or which are new."""
        tails = {tail.number: tail for tail in manifest.tails} | self._new if manifest else self._new
        return tuple(tail for number, tail in sorted(tails.items()) if number in numbers)

    def kept(self, staged: Set[int]) -> set[str]:
        """Keys of new ones that are of use, though no manifest refers to them: by these numbers."""
        return {tail.object.key for number, tail in self._new.items() if number in staged and tail.object is not None}

    def settle(self, staged: Set[int]) -> None:
        """Another manifest lies there: of what it does not refer to only tails of these numbers are of use."""
        self._new = {number: tail for number, tail in self._new.items() if number in staged}


def _chunk(piece: Piece, data: memoryview, tail: int, start: int) -> Chunk:
    return Chunk(
        piece.segment, piece.position, piece.size_bytes, piece.base_offset, piece.end_offset, tail, start,
        xxhash.xxh3_64_hexdigest(data), _max_timestamp(data),
    )  # fmt: skip


def _max_timestamp(data: memoryview) -> int:
    """Of the batches in a piece; -1 for one that is too large to be looked through."""
    found, position = -1, 0
    while position < len(data) <= _LOOKED_THROUGH_BYTES:
        header = decode_header(data, position)
        found, position = max(found, header.max_timestamp), position + header.size_bytes
    return found
