"""The interface through which a mirror downloads its files, and the implementation that downloads everything at once.

New bytes are appended to a segment's file. If the old bytes do not match, the whole segment is downloaded beside its
old file. Downloaded bytes, and those of an earlier process, are compared with the checksums in the manifest.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Protocol

import xxhash

from segmentlog.errors import ShippingRefused
from segmentlog.format.file_names import (
    ABORTED_SUFFIX,
    CACHE_SUFFIXES,
    INDEX_SUFFIX,
    SNAPSHOT_SUFFIX,
    TEMPORARY_SUFFIX,
    TIME_INDEX_SUFFIX,
)
from segmentlog.format.index_file import unpack_index
from segmentlog.format.manifest import Chunk, ShippedSegment, Stored
from segmentlog.objects.bucket.base import Bucket, Data
from segmentlog.objects.manifest.checksums import verify_object
from segmentlog.objects.manifest.object_ranges import ObjectRange, ObjectRanges, file_size
from segmentlog.objects.manifest.segment_labels import checksums_of, has_label, label_file, sync_and_label
from segmentlog.storage import fork_safety
from segmentlog.storage.file_operations import read_file, replace_file, write_all, write_new_file
from segmentlog.storage.fs import FileSystem, opened
from segmentlog.storage.segment import segment_stem

_INDEX_SUFFIXES: Final = (INDEX_SUFFIX, TIME_INDEX_SUFFIX, ABORTED_SUFFIX)
"""In packed order. The files are written in reverse order: if the first file exists, all exist."""

MoveIntoPlace = Callable[[], None]
"""Renames a downloaded file to the path where readers find it."""


class Downloader(Protocol):
    """Downloads the files of a mirror, at once or when they are read. Thread-safe."""

    def start_refresh(self) -> None:
        """Prepare for the downloads of another manifest."""

    def extend(self, path: str, known_bytes: int, ranges: ObjectRanges) -> bool:
        """Download the bytes after the first ``known_bytes`` of a file.

        Return False if those first bytes do not match the ranges.
        """

    def prepare(self, path: str, ranges: ObjectRanges) -> MoveIntoPlace | None:
        """Download a file beside its path; return None if the file at the path matches already."""

    def fetch_file(self, path: str, stored: Stored) -> None:
        """Download a small file, now or when it is opened."""

    def fetch_index(self, stem: str, segment: ShippedSegment) -> None:
        """Download the index of a segment, now or when it is opened."""

    def index_chunks(self, stem: str, chunks: Sequence[Chunk]) -> None:
        """Write an index for a segment that was uploaded only as chunks, without an index."""

    def discard_derived_files(self, folder: str, bases: Iterable[int]) -> None:
        """Delete indexes of segments whose files were replaced."""

    def retain_segments(self, folder: str, kept: Iterable[int]) -> None:
        """Drop everything recorded about the segments in a folder, except these segments."""


class FullDownloader:
    """Downloads everything at once."""

    def __init__(self, bucket: Bucket, fs: FileSystem) -> None:
        self._bucket = bucket
        self._fs = fs
        self._mutex = fork_safety.lock(self, "_mutex")
        self._requested: set[str] = set()
        self._tails: dict[str, bytes] = {}
        """Tails of which several chunks are needed, by key."""
        self._current: dict[str, str] = {}
        """Keys of the objects that small files were downloaded from, by path."""

    def start_refresh(self) -> None:
        """Implement `Downloader.start_refresh`."""
        self._requested.clear()
        self._tails.clear()

    def extend(self, path: str, known_bytes: int, ranges: ObjectRanges) -> bool:
        """Implement `Downloader.extend`."""
        with opened(self._fs, path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC) as fd:
            for part in ranges:
                if part.end <= known_bytes and not part.is_sealed:
                    continue
                before = self._fs.pread(fd, min(max(known_bytes - part.position, 0), part.size_bytes), part.position)
                if part.is_sealed and before:
                    data: Data = b"".join((before, self._range(part, len(before))))
                    if xxhash.xxh3_64_hexdigest(data) != part.xxh3_64:
                        return False
                else:
                    data = self._get(part)
                    if data[: len(before)] != before:
                        return False
                if len(data) > len(before):
                    write_all(self._fs, fd, [memoryview(data)[len(before) :]], part.position + len(before))
            is_whole = self._fs.fstat(fd).st_size == file_size(ranges)
            if ranges and ranges[-1].is_sealed:
                self._fs.fsync(fd)
                if is_whole:
                    label_file(self._fs, fd, checksums_of(ranges))
            return is_whole

    def prepare(self, path: str, ranges: ObjectRanges) -> MoveIntoPlace | None:
        """Implement `Downloader.prepare`."""
        checksums = checksums_of(ranges)
        if has_label(self._fs, path, checksums):
            return None
        try:
            current = memoryview(read_file(self._fs, path))
        except FileNotFoundError:
            current = None
        data = [
            current[part.position : part.end] if current is not None and _contains_range(current, part) else None
            for part in ranges
        ]
        is_sealed = bool(ranges) and ranges[-1].is_sealed
        if current is not None and len(current) == file_size(ranges) and None not in data:
            if is_sealed:
                sync_and_label(self._fs, path, checksums)
            return None
        staged = path + TEMPORARY_SUFFIX
        with contextlib.suppress(FileNotFoundError):  # left by a process that was killed
            self._fs.unlink(staged)
        whole = b"".join(self._get(part) if known is None else known for part, known in zip(ranges, data, strict=True))
        write_new_file(self._fs, staged, whole)
        if is_sealed:
            sync_and_label(self._fs, staged, checksums)
        return lambda: self._fs.replace(staged, path)

    def _range(self, part: ObjectRange, skipped_bytes: int) -> Data:
        size_bytes = part.size_bytes - skipped_bytes
        return self._bucket.get_range(part.key, part.start + skipped_bytes, size_bytes) if size_bytes > 0 else b""

    def _get(self, part: ObjectRange) -> Data:
        """Return the verified bytes of a range."""
        data = part.data or self._get_range(part)
        if xxhash.xxh3_64_hexdigest(data) != part.xxh3_64:
            where = f"{part.key}: damaged: bytes {part.start} to {part.start + part.size_bytes}"
            raise ShippingRefused(self._bucket.url, f"{where} differ from their checksum in the manifest")
        return data

    def _get_range(self, part: ObjectRange) -> Data:
        """Download a range. At the second request for a tail, download the whole tail and keep it."""
        with self._mutex:
            is_again = part.key in self._requested and not part.is_sealed
            self._requested.add(part.key)
            if is_again and part.key not in self._tails:
                self._tails[part.key] = self._bucket.get(part.key)[0]
            tail = self._tails.get(part.key)
        return self._range(part, 0) if tail is None else tail[part.start : part.start + part.size_bytes]

    def fetch_file(self, path: str, stored: Stored) -> None:
        """Implement `Downloader.fetch_file`."""
        if self._current.get(path) == stored.key:
            return
        try:
            is_current = xxhash.xxh3_64_hexdigest(read_file(self._fs, path)) == stored.xxh3_64
        except FileNotFoundError:
            is_current = False
        if not is_current:
            data, _ = self._bucket.get(stored.key)
            verify_object(self._bucket, stored, data)
            replace_file(self._fs, path, data)
        self._current[path] = stored.key

    def fetch_index(self, stem: str, segment: ShippedSegment) -> None:
        """Implement `Downloader.fetch_index`."""
        if segment.index is None or self._current.get(stem) == segment.index.key:
            return
        if not self._fs.exists(stem + INDEX_SUFFIX):
            write_index(self._fs, self._bucket, stem, segment.index)
        self._current[stem] = segment.index.key

    def index_chunks(self, stem: str, chunks: Sequence[Chunk]) -> None:
        """Implement `Downloader.index_chunks`. Do nothing: readers build a missing index themselves."""

    def discard_derived_files(self, folder: str, bases: Iterable[int]) -> None:
        """Implement `Downloader.discard_derived_files`."""
        for base in bases:
            stem = segment_stem(folder, base)
            self._current.pop(stem, None)
            for suffix in CACHE_SUFFIXES:
                with contextlib.suppress(FileNotFoundError):
                    self._fs.unlink(stem + suffix)

    def retain_segments(self, folder: str, kept: Iterable[int]) -> None:
        """Implement `Downloader.retain_segments`."""
        stems = {segment_stem(folder, base) for base in kept}
        for path in [path for path in self._current.copy() if path.startswith(f"{folder}/")]:
            if path.removesuffix(SNAPSHOT_SUFFIX) not in stems:
                del self._current[path]


def write_index(fs: FileSystem, bucket: Bucket, stem: str, index: Stored) -> None:
    """Download the index files of a segment. Raise `ShippingRefused` if the object is damaged."""
    data, _ = bucket.get(index.key)
    verify_object(bucket, index, data)
    try:
        parts = unpack_index(data)
    except ValueError as error:
        raise ShippingRefused(bucket.url, f"{index.key}: {error}") from None
    for suffix, part in reversed(list(zip(_INDEX_SUFFIXES, parts, strict=True))):
        if part:
            replace_file(fs, stem + suffix, part, sync_folder=False)


def _contains_range(current: memoryview, part: ObjectRange) -> bool:
    return len(current) >= part.end and xxhash.xxh3_64_hexdigest(current[part.position : part.end]) == part.xxh3_64
