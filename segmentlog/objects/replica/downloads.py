"""How the files of a mirrored store come to lie in its folder: what a mirror asks for, and the way that brings all.

Segments are written whole beside their places, or continued behind the bytes that are there. What is brought is
compared with the manifest's checksums, and so is what an earlier process has brought.
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
from segmentlog.objects.manifest.checksums import check_object
from segmentlog.objects.manifest.object_ranges import Span, Spans, size_of
from segmentlog.storage import fork_safety
from segmentlog.storage.file_operations import read_file, replace_file, write_all, write_new_file
from segmentlog.storage.fs import FileSystem, opened
from segmentlog.storage.segment import segment_stem

_INDEX_SUFFIXES: Final = (INDEX_SUFFIX, TIME_INDEX_SUFFIX, ABORTED_SUFFIX)
"""In the order in which they are packed. They are written in the other one: where the first is, all are."""

Place = Callable[[], None]
"""Puts a file that was brought where readers look for it."""


class Bringing(Protocol):
    """How bytes come. Thread-safe."""

    def begin_turn(self) -> None:
        """What is asked for next is of another manifest."""

    def extend(self, path: str, known_bytes: int, spans: Spans) -> bool:
        """Bring what lies behind ``known_bytes`` of a file; False where what lies before is not what it should be."""

    def prepare(self, path: str, spans: Spans) -> Place | None:
        """Bring a file, whatever lies there. None when it lies there already."""

    def bring_file(self, path: str, stored: Stored) -> None:
        """Bring a small file."""

    def bring_index(self, stem: str, segment: ShippedSegment) -> None:
        """Bring the index of a segment, or have it brought when somebody opens it."""

    def note_chunks(self, stem: str, chunks: Sequence[Chunk]) -> None:
        """A segment without an index lies there in these."""

    def replaced(self, folder: str, bases: Iterable[int]) -> None:
        """The segments are others now: what was made of the old ones goes."""

    def forget(self, folder: str, kept: Iterable[int]) -> None:
        """Of the segments in a folder there are only these any more."""


class WholeFiles:
    """Brings all of it."""

    def __init__(self, bucket: Bucket, fs: FileSystem) -> None:
        self._bucket = bucket
        self._fs = fs
        self._mutex = fork_safety.lock(self, "_mutex")
        self._asked: set[str] = set()
        self._tails: dict[str, bytes] = {}
        """Tails of which more than one chunk is wanted."""
        self._there: dict[str, str] = {}
        """Small files by path, and which object each was got from."""

    def begin_turn(self) -> None:
        """As `Bringing.begin_turn`."""
        self._asked.clear()
        self._tails.clear()

    def extend(self, path: str, known_bytes: int, spans: Spans) -> bool:
        """As `Bringing.extend`."""
        with opened(self._fs, path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC) as fd:
            for span in spans:
                if span.end <= known_bytes and not span.is_sealed:
                    continue
                before = self._fs.pread(fd, min(max(known_bytes - span.position, 0), span.size_bytes), span.position)
                if span.is_sealed and before:
                    data: Data = b"".join((before, self._range(span, len(before))))
                    if xxhash.xxh3_64_hexdigest(data) != span.xxh3_64:
                        return False
                else:
                    data = self._get(span)
                    if data[: len(before)] != before:
                        return False
                if len(data) > len(before):
                    write_all(self._fs, fd, [memoryview(data)[len(before) :]], span.position + len(before))
            if spans and spans[-1].is_sealed:
                self._fs.fsync(fd)
            return self._fs.fstat(fd).st_size == size_of(spans)

    def prepare(self, path: str, spans: Spans) -> Place | None:
        """As `Bringing.prepare`."""
        try:
            there = memoryview(read_file(self._fs, path))
        except FileNotFoundError:
            there = None
        data = [
            there[span.position : span.end] if there is not None and _is_there(there, span) else None for span in spans
        ]
        if there is not None and len(there) == size_of(spans) and None not in data:
            return None
        beside = path + TEMPORARY_SUFFIX
        with contextlib.suppress(FileNotFoundError):  # of a process that was killed
            self._fs.unlink(beside)
        whole = b"".join(self._get(span) if known is None else known for span, known in zip(spans, data, strict=True))
        write_new_file(self._fs, beside, whole)
        return lambda: self._fs.replace(beside, path)

    def _range(self, span: Span, skipped_bytes: int) -> Data:
        size_bytes = span.size_bytes - skipped_bytes
        return self._bucket.get_range(span.key, span.start + skipped_bytes, size_bytes) if size_bytes > 0 else b""

    def _get(self, span: Span) -> Data:
        """The bytes of a span, checked; a tail of which more is asked for is got whole."""
        data = span.data or self._get_range(span)
        if xxhash.xxh3_64_hexdigest(data) != span.xxh3_64:
            where = f"{span.key}: damaged: bytes {span.start} to {span.start + span.size_bytes}"
            raise ShippingRefused(self._bucket.url, f"{where} are not what was shipped")
        return data

    def _get_range(self, span: Span) -> Data:
        with self._mutex:
            is_again = span.key in self._asked and not span.is_sealed
            self._asked.add(span.key)
            if is_again and span.key not in self._tails:
                self._tails[span.key] = self._bucket.get(span.key)[0]
            tail = self._tails.get(span.key)
        return self._range(span, 0) if tail is None else tail[span.start : span.start + span.size_bytes]

    def bring_file(self, path: str, stored: Stored) -> None:
        """As `Bringing.bring_file`."""
        if self._there.get(path) == stored.key:
            return
        try:
            is_there = xxhash.xxh3_64_hexdigest(read_file(self._fs, path)) == stored.xxh3_64
        except FileNotFoundError:
            is_there = False
        if not is_there:
            data, _ = self._bucket.get(stored.key)
            check_object(self._bucket, stored, data)
            replace_file(self._fs, path, data)
        self._there[path] = stored.key

    def bring_index(self, stem: str, segment: ShippedSegment) -> None:
        """As `Bringing.bring_index`."""
        if segment.index is None or self._there.get(stem) == segment.index.key:
            return
        if not self._fs.exists(stem + INDEX_SUFFIX):
            write_index(self._fs, self._bucket, stem, segment.index)
        self._there[stem] = segment.index.key

    def note_chunks(self, stem: str, chunks: Sequence[Chunk]) -> None:
        """As `Bringing.note_chunks`."""

    def replaced(self, folder: str, bases: Iterable[int]) -> None:
        """As `Bringing.replaced`."""
        for base in bases:
            stem = segment_stem(folder, base)
            self._there.pop(stem, None)
            for suffix in CACHE_SUFFIXES:
                with contextlib.suppress(FileNotFoundError):
                    self._fs.unlink(stem + suffix)

    def forget(self, folder: str, kept: Iterable[int]) -> None:
        """As `Bringing.forget`."""
        stems = {segment_stem(folder, base) for base in kept}
        for path in [path for path in self._there.copy() if path.startswith(f"{folder}/")]:
            if path.removesuffix(SNAPSHOT_SUFFIX) not in stems:
                del self._there[path]


def write_index(fs: FileSystem, bucket: Bucket, stem: str, index: Stored) -> None:
    """Bring the index files of a segment. Raises `ShippingRefused` for damage."""
    data, _ = bucket.get(index.key)
    check_object(bucket, index, data)
    try:
        parts = unpack_index(data)
    except ValueError as error:
        raise ShippingRefused(bucket.url, f"{index.key}: {error}") from None
    for suffix, part in reversed(list(zip(_INDEX_SUFFIXES, parts, strict=True))):
        if part:
            replace_file(fs, stem + suffix, part, sync_folder=False)


def _is_there(there: memoryview, span: Span) -> bool:
    return len(there) >= span.end and xxhash.xxh3_64_hexdigest(there[span.position : span.end]) == span.xxh3_64
