"""The files of a store of which here is what was read: for readers a file system, for a mirror a way to bring them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, takewhile

import numpy as np
import xxhash

from segmentlog.format.file_names import ABORTED_SUFFIX, INDEX_SUFFIX, TIME_INDEX_SUFFIX
from segmentlog.format.index_file import encode_entries
from segmentlog.format.manifest import Chunk, ShippedSegment, Stored
from segmentlog.objects.bucket.base import ObjectMissing
from segmentlog.objects.manifest.checksums import check_object
from segmentlog.objects.manifest.object_ranges import Spans, size_of
from segmentlog.objects.replica.downloads import Place, write_index
from segmentlog.objects.tier.block_cache import Cache, CacheLost, OpenedRanges, RangedFile
from segmentlog.storage.file_operations import replace_file
from segmentlog.storage.fs import FileSystem, Stamp
from segmentlog.storage.segment import segment_stem


class RangedFiles(FileSystem):
    """The files of a store whose segments are such; whoever reads one as any other file has it brought.

    Also a `Bringing`, for the mirror that says what there is.
    """

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._fds: dict[int, OpenedRanges] = {}
        self._pending: dict[str, tuple[Callable[[], None], Sequence[str]]] = {}
        """By path, how a small file is brought when somebody opens it, and which others with it."""
        self._known: dict[str, str] = {}
        """Of these, by path, the objects."""

    # ------------------------------------------------------------ for readers

    def ranged(self, path: str) -> OpenedRanges | None:
        """As `FileSystem.ranged`."""
        with self._cache.mutex:
            file = self._cache.files.get(path)
            return None if file is None else file.open()

    def stamp(self, path: str) -> Stamp:
        """As `FileSystem.stamp`."""
        with self._cache.mutex:
            file = self._cache.files.get(path)
        if file is None:
            return super().stamp(path)
        return xxhash.xxh3_64_intdigest(repr(file.spans).encode()), size_of(file.spans), 0

    def open(self, path: str, flags: int, mode: int = 0o777) -> int:
        """As `FileSystem.open`."""
        pending = self._pending.get(path)
        if pending is not None:
            bring, paths = pending
            bring()
            with self._cache.mutex:
                for one in paths:
                    if self._pending.get(one) is pending:
                        del self._pending[one]
        found = self.ranged(path)
        try:
            fd = super().open(path, flags, mode)
        except FileNotFoundError:
            if found is None:
                raise
            # Kept open by somebody, and cleared away by whoever clears a folder for temporary files.
            with self._cache.mutex:
                if not found.is_retired:
                    self._cache.renew(found.file)
            found = self.ranged(path)
            fd = super().open(path, flags, mode)
        if found is not None:
            self._fds[fd] = found
        return fd

    def close(self, fd: int) -> None:
        """As `FileSystem.close`."""
        self._fds.pop(fd, None)
        os.close(fd)

    def pread(self, fd: int, size_bytes: int, position: int) -> bytes:
        """As `FileSystem.pread`."""
        found = self._fds.get(fd)
        if found is not None:
            found.need(position, min(position + size_bytes, size_of(found.file.spans)))
        return os.pread(fd, size_bytes, position)

    def map_file(self, fd: int, size_bytes: int, *, writable: bool = False) -> memoryview:
        """As `FileSystem.map_file`."""
        found = self._fds.get(fd)
        if found is not None:
            found.need(0, min(size_bytes, size_of(found.file.spans)))
        return super().map_file(fd, size_bytes, writable=writable)

    # ------------------------------------------------------------ for the mirror

    def begin_turn(self) -> None:
        """As `Bringing.begin_turn`."""

    def extend(self, path: str, known_bytes: int, spans: Spans) -> bool:
        """As `Bringing.extend`."""
        with self._cache.mutex:
            file = self._cache.files.get(path)
            if file is None:
                self._cache.files[path] = RangedFile(self._cache, path, spans)
            elif size_of(spans) < size_of(file.spans):
                return False
            else:
                try:
                    file.extend(spans)
                except CacheLost:
                    self._cache.renew(file, spans)
        return True

    def prepare(self, path: str, spans: Spans) -> Place | None:
        """As `Bringing.prepare`."""
        with self._cache.mutex:
            there = self._cache.files.get(path)
            if there is not None and there.spans == spans:
                return None
        made = RangedFile(self._cache, path, spans, beside=True)

        def place() -> None:
            with self._cache.mutex:
                self._cache.retire(path)
                made.put_in_place()
                self._cache.files[path] = made

        return place

    def bring_file(self, path: str, stored: Stored) -> None:
        """As `Bringing.bring_file`."""

        def bring() -> None:
            with contextlib.suppress(ObjectMissing):  # of a manifest that has changed since: there is none then
                data, _ = self._cache.bucket.get(stored.key)
                check_object(self._cache.bucket, stored, data)
                replace_file(FileSystem(), path, data, sync_folder=False)

        self._note_pending((path,), stored.key, bring)

    def bring_index(self, stem: str, segment: ShippedSegment) -> None:
        """As `Bringing.bring_index`."""
        index = segment.index
        if index is None:
            return

        def bring() -> None:
            with contextlib.suppress(ObjectMissing):
                write_index(FileSystem(), self._cache.bucket, stem, index)

        self._note_pending([stem + suffix for suffix in (INDEX_SUFFIX, TIME_INDEX_SUFFIX, ABORTED_SUFFIX)],
                           index.key, bring)  # fmt: skip

    def note_chunks(self, stem: str, chunks: Sequence[Chunk]) -> None:
        """As `Bringing.note_chunks`: where each begins is as good as an index."""

        def bring() -> None:
            before = list(takewhile(lambda chunk: chunk.max_timestamp >= 0, chunks[:-1]))
            if begun := chunks[1 : len(before) + 1]:
                made = encode_entries(
                    np.array([chunk.base_offset - chunk.segment for chunk in begun], np.uint32),
                    np.array([chunk.position for chunk in begun], np.uint32),
                    np.array(list(accumulate((chunk.max_timestamp for chunk in before), max)), np.int64),
                )
                for suffix, data in zip((INDEX_SUFFIX, TIME_INDEX_SUFFIX), made, strict=True):
                    replace_file(FileSystem(), stem + suffix, data, sync_folder=False)

        key = f"{chunks[-1].tail}/{chunks[-1].start}"
        self._note_pending((stem + INDEX_SUFFIX, stem + TIME_INDEX_SUFFIX), key, bring)

    def _note_pending(self, paths: Sequence[str], key: str, bring: Callable[[], None]) -> None:
        pending = (bring, paths)
        with self._cache.mutex:
            for path in paths:
                if self._known.get(path) != key:
                    self._known[path] = key
                    self._pending[path] = pending

    def replaced(self, folder: str, bases: Iterable[int]) -> None:
        """As `Bringing.replaced`."""
        for base in bases:
            stem = segment_stem(folder, base)
            for suffix in (INDEX_SUFFIX, TIME_INDEX_SUFFIX, ABORTED_SUFFIX):
                self._drop(stem + suffix)
                with contextlib.suppress(FileNotFoundError):
                    self.unlink(stem + suffix)

    def forget(self, folder: str, kept: Iterable[int]) -> None:
        """As `Bringing.forget`."""
        stems = {segment_stem(folder, base) for base in kept}
        with self._cache.mutex:
            for path in [*self._cache.files, *self._known]:
                if path.startswith(f"{folder}/") and path.rpartition(".")[0] not in stems:
                    self._cache.retire(path)
                    self._drop(path)

    def _drop(self, path: str) -> None:
        with self._cache.mutex:
            self._pending.pop(path, None)
            self._known.pop(path, None)
