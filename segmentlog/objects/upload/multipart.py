"""Upload sealed segments. A large segment is uploaded in parts: each part is an object, and a journal lists the parts.

    @uploads    JSON, of the store: {"url": "s3://bucket/path", "begun": [
                {"topic_id": ..., "partition": 0, "base_offset": 0, "stamp": [131, 67108864, 1785456000000000000],
                 "key": "segments/...", "part_bytes": 16777216, "parts": {"0": [16777216, <xxh3_64>, <sha256>], ...}}]}

S3's own multi-part uploads are not used: obstore does not expose their id, so an upload is lost when its process dies.
Separate objects are not lost: the next process checks the parts in the journal, and uploads those that are missing.
Every attempt uploads a part under the same name with the same bytes, so late or repeated puts do no harm.

Without the journal, all parts are uploaded again. A part in the journal is used only if its checksum matches the local
file and its object exists.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Set
from typing import Final

import msgspec

from segmentlog.errors import ObjectStoreError, SegmentlogError, StoreClosed
from segmentlog.format.file_names import UPLOADS_FILE
from segmentlog.format.manifest import Stored, StoredPart
from segmentlog.objects.bucket import upload_pool
from segmentlog.objects.bucket.base import Bucket, Data, ObjectMissing
from segmentlog.objects.local.transaction_ends import PartitionKey
from segmentlog.objects.ownership.binding import remove_upload_journal
from segmentlog.policy.upload_policy import LocalSegment
from segmentlog.storage import fork_safety
from segmentlog.storage.file_operations import read_file, replace_file
from segmentlog.storage.fs import FileSystem

PART_BYTES: Final = 16 << 20
"""Larger segments are uploaded in parts of about this size."""
TRIES: Final = 4
"""Attempts for one part. If all fail, a later cycle resumes the upload of the segment."""
PAUSE_S: Final = 0.5
"""Pause before the second attempt. It doubles for each further attempt, with jitter."""

Read = Callable[[int, int], Data]
"""Returns ``size_bytes`` bytes of the file from ``position`` on. Raises if the file was replaced."""


class MultipartUpload(msgspec.Struct):
    """An unfinished upload of a segment in parts. ``parts`` contains the uploaded parts, by number.

    ``stamp`` identifies the file: inode, size and time.
    """

    topic_id: str
    partition: int
    base_offset: int
    stamp: tuple[int, int, int]
    key: str
    part_bytes: int
    parts: dict[int, StoredPart] = {}

    @property
    def partition_key(self) -> PartitionKey:
        """The partition of the segment."""
        return self.topic_id, self.partition

    @property
    def part_sizes(self) -> list[int]:
        """Sizes of all parts in bytes."""
        size_bytes = self.stamp[1]
        return [min(self.part_bytes, size_bytes - start) for start in range(0, size_bytes, self.part_bytes)]

    @property
    def part_keys(self) -> list[str]:
        """Keys of all parts, including those that are not uploaded yet."""
        return [f"{self.key}.{number}" for number in range(len(self.part_sizes))]


class _JournalFile(msgspec.Struct):
    """Content of the journal file."""

    url: str
    begun: list[MultipartUpload]


_journal_decoder = msgspec.json.Decoder(_JournalFile)


class MultipartUploader:
    """Uploads sealed segments of one store to one bucket, several at a time. Thread-safe."""

    def __init__(self, fs: FileSystem, folder: str, bucket: Bucket, parallel: int = upload_pool.PARALLEL) -> None:
        self._fs = fs
        self._path = f"{folder}/{UPLOADS_FILE}"
        self._bucket = bucket
        self._parallel = parallel
        self._concurrency = parallel
        """Number of parts uploaded at the same time: halved after a failure, else raised by one up to a limit."""
        self._mutex = fork_safety.lock(self, "_mutex")
        self._begun: dict[str, MultipartUpload] = {}
        """Unfinished uploads, by key."""
        self._verified: set[str] = set()
        """Keys of parts that this process has uploaded or found in the object store."""
        self._abandoned: set[str] = set()
        """Keys of uploads whose file has changed."""
        self.put_bytes = 0
        """Bytes of all uploaded parts."""

    # ------------------------------------------------------------ the journal

    def load(self) -> None:
        """Read the journal of an earlier process, to resume its uploads."""
        with contextlib.suppress(FileNotFoundError, msgspec.DecodeError, UnicodeDecodeError):
            found = _journal_decoder.decode(read_file(self._fs, self._path))
            if found.url == self._bucket.url:
                self._begun = {upload.key: upload for upload in found.begun}

    def _write_journal_locked(self) -> None:
        with contextlib.suppress(SegmentlogError, OSError):  # without a journal, later attempts repeat work
            if self._begun:
                journal = _JournalFile(self._bucket.url, list(self._begun.values()))
                replace_file(self._fs, self._path, msgspec.json.encode(journal) + b"\n", sync_folder=False)
            else:
                remove_upload_journal(self._fs, self._path.rpartition("/")[0])

    def _start_or_resume(self, partition_key: PartitionKey, segment: LocalSegment) -> MultipartUpload:
        """Return the unfinished upload of this file, if the file has not changed; otherwise start an upload."""
        base_offset = segment.base_offset
        with self._mutex:
            for upload in self._begun.values():
                identity = (upload.partition_key, upload.base_offset, upload.stamp)
                if identity == (partition_key, base_offset, segment.stamp):
                    return upload
            count = -(-segment.size_bytes // PART_BYTES)
            key, part_bytes = new_segment_key(partition_key, base_offset), -(-segment.size_bytes // count)
            upload = MultipartUpload(*partition_key, base_offset, segment.stamp, key, part_bytes)
            self._begun[upload.key] = upload
            self._write_journal_locked()
            return upload

    def _record_part(self, upload: MultipartUpload, number: int, part: StoredPart) -> None:
        with self._mutex:
            upload.parts[number] = part
            self._verified.add(f"{upload.key}.{number}")
            self.put_bytes += part.size_bytes
            if upload.key in self._begun:
                self._write_journal_locked()

    def remove_published(self, accounted: Set[str]) -> None:
        """Forget uploads with a part in ``accounted``: a published manifest refers to it or marks it for deletion."""
        with self._mutex:
            published = [key for key, upload in self._begun.items() if not accounted.isdisjoint(upload.part_keys)]
            for key in published:
                self._verified.difference_update(self._begun.pop(key).part_keys)
                self._abandoned.discard(key)
            if published:
                self._write_journal_locked()

    def is_whole(self, stored: Stored) -> bool:
        """Return whether all parts of an uploaded segment are usable: none was marked for deletion after its upload."""
        with self._mutex:
            return not stored.parts or stored.key in self._begun

    def abandoned_parts(self, may_be_valid: Callable[[MultipartUpload], bool]) -> Iterator[str]:
        """Yield the part keys of each unfinished upload whose local file has changed. Later calls skip that upload."""
        with self._mutex:
            for key, upload in self._begun.items():
                if key not in self._abandoned and not may_be_valid(upload):
                    self._abandoned.add(key)
                    yield from upload.part_keys

    def missing_bytes(self, segments: Iterable[tuple[PartitionKey, LocalSegment]]) -> int:
        """Return how many bytes of these segments are not uploaded yet."""
        with self._mutex:
            uploaded = {
                (upload.partition_key, upload.base_offset, upload.stamp): sum(
                    part.size_bytes for part in upload.parts.values()
                )
                for upload in self._begun.values()
            }
        return sum(one.size_bytes - uploaded.get((key, one.base_offset, one.stamp), 0) for key, one in segments)

    # ------------------------------------------------------------ upload

    def upload(self, partition_key: PartitionKey, segment: LocalSegment, read: Read, stop: threading.Event) -> Stored:
        """Upload a segment, or the missing parts of it, and return its manifest entry.

        Raise what ``read`` raises, `ObjectStoreError`, or `StoreClosed` after ``stop`` is set. The next call resumes
        the upload.
        """
        if segment.size_bytes <= PART_BYTES:
            key = new_segment_key(partition_key, segment.base_offset)
            return upload_pool.put_object(self._bucket, key, read(0, segment.size_bytes))
        upload = self._start_or_resume(partition_key, segment)
        sizes = upload.part_sizes
        concurrency = self._concurrency

        def try_part(number: int) -> ObjectStoreError | None:
            if stop.is_set():
                raise StoreClosed(self._bucket.url)
            data = read(number * upload.part_bytes, sizes[number])
            try:
                self._upload_part(upload, number, data)
            except ObjectStoreError as error:
                if not error.retriable:
                    raise
                return error
            return None

        numbers = range(len(sizes))
        errors = upload_pool.run_parallel(try_part, numbers, concurrency)
        failed = [number for number, error in zip(numbers, errors, strict=True) if error is not None]
        self._concurrency = concurrency // 2 or min(concurrency, 1) if failed else min(concurrency + 1, self._parallel)
        for number in failed:
            self._retry_part(try_part, number, stop)
        return Stored(upload.key, segment.size_bytes, parts=tuple(upload.parts[number] for number in numbers))

    def _retry_part(
        self, try_part: Callable[[int], ObjectStoreError | None], number: int, stop: threading.Event
    ) -> None:  # fmt: skip
        """Upload a part that has failed in parallel with other parts: now alone, with pauses between attempts."""
        error: ObjectStoreError | None = None
        for attempt in range(1, TRIES):
            if stop.wait(PAUSE_S * 2 ** (attempt - 1) * random.uniform(0.5, 1.5)):
                raise StoreClosed(self._bucket.url)
            error = try_part(number)
            if error is None:
                return
        assert error is not None
        raise error

    def _upload_part(self, upload: MultipartUpload, number: int, data: Data) -> None:
        key = f"{upload.key}.{number}"
        known = upload.parts.get(number)
        if known is not None and key in self._verified:
            return
        describe_objects = upload_pool.describe_object(key, data)
        part = StoredPart(describe_objects.size_bytes, describe_objects.xxh3_64, describe_objects.sha256)
        if known == part and self._exists(key, len(data)):  # uploaded by an earlier process
            self._verified.add(key)
            return
        self._bucket.put(key, data)
        self._record_part(upload, number, part)

    def _exists(self, key: str, size_bytes: int) -> bool:
        """Return whether the object of a part exists. A garbage collection may have deleted it."""
        try:
            self._bucket.get_range(key, size_bytes - 1, 1)
        except ObjectMissing:
            return False
        return True


def new_segment_key(partition_key: PartitionKey, base_offset: int) -> str:
    """Return a new, unique object key for a segment."""
    return f"segments/{partition_key[0]}/{partition_key[1]}/{base_offset:020d}-{upload_pool.new_nonce()}"
