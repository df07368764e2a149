"""Segments that lie in an object store, of which here is what was read: sparse files, and blocks that are brought.

A segment's file has its size from the beginning and holds nothing. Whoever is about to touch bytes of it says so
(`RangedFile.need`), and waits for the blocks that are missing; who reads on has those behind brought ahead, more of
them the longer it goes on. What is here may be as much as a limit says: then the file that was not used for the longest
time is put aside for an empty one. Who has the old one mapped reads on in it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

from segmentlog.errors import DiskFull, ObjectStoreError, SegmentlogError, ShippingRefused, StoreClosed
from segmentlog.format.file_names import TEMPORARY_SUFFIX
from segmentlog.objects.bucket.base import Bucket, Data, ObjectMissing
from segmentlog.objects.manifest.object_ranges import Spans, size_of
from segmentlog.storage import fork_safety
from segmentlog.storage.file_operations import write_all
from segmentlog.storage.fork_safety import LockableFd, close_lockable, open_lockable
from segmentlog.storage.fs import LOCAL_ERRORS, NO_ROOM, FileSystem, opened
from segmentlog.weak_sets import members_of

BLOCK_BYTES: Final = 1 << 20
_RUN_BLOCKS: Final = 4
"""What is got in one request: several of them at a time are faster than one large one."""
_AHEAD_BLOCKS_MAX: Final = 16
PARALLEL: Final = 4


class CacheLost(ObjectStoreError):
    """The folder that an object store is brought into is gone, or the file of it that was just made."""


@contextlib.contextmanager
def _telling(url: str, path: str) -> Iterator[None]:
    """Around what is done with a file of the cache: what fails is not the store's, nor is a segment gone.

    Raises `CacheLost`, `DiskFull`, `ObjectStoreError`, which name the folder; and what is the process's own affair.
    """
    try:
        yield
    except OSError as error:
        folder = os.path.dirname(path)
        if error.errno in NO_ROOM:
            raise DiskFull(folder) from error
        if error.errno in LOCAL_ERRORS or isinstance(error, SegmentlogError):
            raise
        if isinstance(error, FileNotFoundError):
            why = "it is gone, which what was read is kept in; open the store anew, or give it a 'cache_dir' that stays"
            raise CacheLost(url, folder, why) from error
        why = f"what was read cannot be kept there: {error.strerror}; see 'cache_dir'"
        raise ObjectStoreError(url, folder, why) from error


class Cache:
    """How much of an object store is here, and the threads that bring it. Thread-safe."""

    def __init__(self, bucket: Bucket, limit_bytes: int, parallel: int = PARALLEL) -> None:
        self.bucket = bucket
        self.limit_bytes = limit_bytes
        self.mutex = fork_safety.reentrant_lock(self, "mutex")
        self.files: dict[str, RangedFile] = {}
        """By path, those that readers find there."""
        self.held_bytes = 0
        self.got_bytes = 0
        """Of all that was ever brought."""
        self.refresh: Callable[[], object] = lambda: None
        """Called when an object is gone: what the manifest says now may be something else."""
        self._opened: weakref.WeakSet[OpenedRanges] = weakref.WeakSet()
        self._is_closed = False
        self._uses = 0
        self._parallel = parallel
        self._pool: ThreadPoolExecutor | None = None
        self._is_of_parent = False
        fork_safety.on_fork(self, "_forget")

    def _forget(self) -> None:
        """In a forked child there are no threads, and what they were at is nobody's."""
        self._is_of_parent = True

    def use(self) -> int:
        """A number that grows with every use: of the files with the lowest the last use was the longest ago."""
        self._uses += 1
        return self._uses

    def submit(self, do: Callable[[], None]) -> Future[None]:
        """Have a thread do it; without any whoever asks."""
        if self._is_closed:
            raise StoreClosed(self.bucket.url)
        if self._is_of_parent:
            why = "it was opened before this process was forked; open it anew in the child"
            raise ObjectStoreError(self.bucket.url, "get", why, False)
        if not self._parallel:
            done: Future[None] = Future()
            try:
                do()
                done.set_result(None)
            except Exception as error:
                done.set_exception(error)
            return done
        with self.mutex:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._parallel, "segmentlog-ranges")
            return self._pool.submit(do)

    def note(self, file: RangedFile, size_bytes: int) -> None:
        """So much more of a file is here; where that is too much others are put aside."""
        with self.mutex:
            self.got_bytes += size_bytes
            if file.is_retired:
                return
            file.held_bytes += size_bytes
            self.held_bytes += size_bytes
            while self.held_bytes > self.limit_bytes:
                held = [one for one in self.files.values() if one.held_bytes and one is not file]
                if not held:
                    return
                try:
                    self.renew(min(held, key=lambda one: one.used))
                except (SegmentlogError, OSError):
                    return  # whoever needs that one next is told; what was brought just now is here

    def renew(self, file: RangedFile, spans: Spans | None = None) -> RangedFile:
        """Put an empty file in the place of one; what it held is given back once nobody has it mapped.

        Raises as `RangedFile`; then it is as it was.
        """
        with self.mutex:
            made = RangedFile(self, file.path, file.spans if spans is None else spans)
            self.retire(file.path)
            self.files[file.path] = file.renewed_by = made
            return made

    def retire(self, path: str) -> None:
        """Readers do not find this file any more."""
        with self.mutex:
            file = self.files.pop(path, None)
            if file is not None:
                file.is_retired = True
                self.held_bytes -= file.held_bytes

    def close(self) -> None:
        """Bring nothing more, though somebody may still have something mapped."""
        with self.mutex:
            self._is_closed = True
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=True, cancel_futures=True)
        for opened_ranges in members_of(self._opened):
            opened_ranges.close()

    def open(self, file: RangedFile) -> OpenedRanges:
        """Keep it open. Raises `CacheLost` when it is not there."""
        with _telling(self.bucket.url, file.path):
            fd = open_lockable(FileSystem(), file.path, os.O_RDWR)
            if FileSystem().fstat(fd).st_ino != file.inode:
                close_lockable(FileSystem(), fd)
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), file.path)
        found = OpenedRanges(file, fd)
        self._opened.add(found)
        return found


class RangedFile:
    """One such file, and which of its blocks are here. Thread-safe."""

    def __init__(self, cache: Cache, path: str, spans: Spans, *, beside: bool = False) -> None:
        """Made at once, empty: at ``path``, or ``beside`` it until `put_in_place`.

        Raises `CacheLost` without a folder for it, `DiskFull`, `ObjectStoreError`.
        """
        self._cache = cache
        self.url = cache.bucket.url
        self.path = path
        self.spans = spans
        self.is_retired = False
        self.used = cache.use()
        self.held_bytes = 0
        self._present = bytearray(_blocks(size_of(spans)))
        self._coming: dict[int, Future[None]] = {}
        self._open: weakref.ref[OpenedRanges] | None = None
        self._window = 0
        self._next = 0
        """Block behind the last one that was needed."""
        self._ahead = 0
        """Block behind the last one that is brought ahead."""
        self.renewed_by: RangedFile | None = None
        """Of the same bytes, once this one has made room."""
        self._beside = path + TEMPORARY_SUFFIX
        fs = FileSystem()
        with (
            _telling(self.url, path),
            opened(fs, self._beside, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC) as fd,
        ):
            fs.ftruncate(fd, size_of(spans))
            self.inode = fs.fstat(fd).st_ino
        if not beside:
            self.put_in_place()

    def put_in_place(self) -> None:
        """Have readers find it."""
        with _telling(self.url, self.path):
            FileSystem().replace(self._beside, self.path)

    def open(self) -> OpenedRanges:
        """As long as what is returned is kept blocks can be brought. For one that readers find.

        Where somebody has removed the file another one takes its place: folders for temporary files are cleared of
        what is old. Raises `CacheLost` where that, too, is not there, or the folder; `DiskFull`, `ObjectStoreError`.
        """
        with self._cache.mutex:
            found = None if self._open is None else self._open()
            if found is not None:
                return found
            try:
                file, found = self, self._cache.open(self)
            except CacheLost:
                file = self._cache.renew(self)
                found = self._cache.open(file)
            file._open = weakref.ref(found)
            return found

    def extend(self, spans: Spans) -> None:
        """It goes on, or lies in other objects: of what was here no byte is another one. Raises `CacheLost`."""
        with self._cache.mutex:
            before, size_bytes = size_of(self.spans), size_of(spans)
            if size_bytes > before:
                with (
                    _telling(self.url, self.path),
                    opened(FileSystem(), self.path, os.O_RDWR | os.O_CLOEXEC) as fd,
                ):
                    FileSystem().ftruncate(fd, size_bytes)
                self._present.extend(bytes(_blocks(size_bytes) - len(self._present)))
                if before % BLOCK_BYTES:
                    self._present[before // BLOCK_BYTES] = 0
            self.spans = spans

    def need(self, held: OpenedRanges, start: int, end: int) -> None:
        """Return once bytes ``[start, end)`` are here. Raises `ObjectStoreError`, `ShippingRefused`."""
        first, behind = start // BLOCK_BYTES, _blocks(end)
        if behind > self._next or first < self._next - 1:
            self._note_way(held, first, behind)
        if self._present.find(0, first, behind) >= 0:
            self.used = self._cache.use()
            if not self._wait(held, first, behind, is_last=False):
                self._wait(held, first, behind, is_last=True)

    def _wait(self, held: OpenedRanges, first: int, behind: int, *, is_last: bool) -> bool:
        """False where others, who had asked before, got no answer: that is no reason not to ask. Raises as `need`."""
        begun, joined = self._begin(held, first, behind)
        for future in begun:
            future.result()
        for future in joined:
            try:
                future.result()
            except ObjectStoreError:
                if is_last:
                    raise
                return False
        return True

    def _note_way(self, held: OpenedRanges, first: int, behind: int) -> None:
        """Who reads on has what lies behind brought ahead."""
        with self._cache.mutex:
            is_on = self._next - 1 <= first <= self._next
            self._next = behind
            if not is_on:
                self._window, self._ahead = 0, behind
                return
            if behind + self._window // 2 < self._ahead:
                return
            self._window = min(max(2 * self._window, 1), _AHEAD_BLOCKS_MAX)
            start = max(self._ahead, behind)
            self._ahead = min(behind + self._window, len(self._present))
        self.used = self._cache.use()
        if start < self._ahead and self._cache.limit_bytes > 2 * _AHEAD_BLOCKS_MAX * BLOCK_BYTES:
            self._begin(held, first, behind)  # first what is waited for
            self._begin(held, start, self._ahead)

    def _begin(self, held: OpenedRanges, first: int, behind: int) -> tuple[list[Future[None]], list[Future[None]]]:
        """Have the blocks brought that are missing. What was begun for that, and what others had begun already."""
        begun: list[Future[None]] = []
        joined: list[Future[None]] = []
        with self._cache.mutex:
            at = first
            while (at := self._present.find(0, at, behind)) >= 0:
                coming = self._is_coming(at)
                if coming is not None:
                    joined.append(coming)
                    at += 1
                    continue
                end = at + 1
                while end < min(at + _RUN_BLOCKS, behind) and not self._present[end] and self._is_coming(end) is None:
                    end += 1
                future = self._cache.submit(lambda at=at, end=end: self._bring(held, at, end))  # type: ignore[misc]
                if not future.done():
                    self._coming.update(dict.fromkeys(range(at, end), future))
                    future.add_done_callback(lambda one, at=at, end=end: self._come(one, at, end))  # type: ignore[misc]
                begun.append(future)
                at = end
        return begun, joined

    def _is_coming(self, block: int) -> Future[None] | None:
        """Who is at it; not who has failed just now: of what is done the block is here."""
        coming = self._coming.get(block)
        return None if coming is None or coming.done() else coming

    def _come(self, future: Future[None], first: int, behind: int) -> None:
        with self._cache.mutex:
            for block in range(first, behind):
                if self._coming.get(block) is future:
                    del self._coming[block]

    def _bring(self, held: OpenedRanges, first: int, behind: int) -> None:
        """Bring blocks, by whatever objects they lie in; once more where these have changed meanwhile."""
        spans = self.spans
        start, end = first * BLOCK_BYTES, min(behind * BLOCK_BYTES, size_of(spans))
        try:
            self._get(held, spans, start, end)
        except ObjectMissing as missing:
            self._cache.refresh()
            newest = self
            while newest.renewed_by is not None:  # that one has heard since where the same bytes lie now
                newest = newest.renewed_by
            if newest.spans == spans:
                if newest.is_retired:
                    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.path) from None
                why = f"{missing.key} is gone, which the manifest refers to; see 'segmentlog objects verify'"
                raise ShippingRefused(self._cache.bucket.url, why) from missing
            self._get(held, newest.spans, start, end)
        with self._cache.mutex:
            self._present[first:behind] = b"\1" * (behind - first)
            if end < min(behind * BLOCK_BYTES, size_of(self.spans)):  # it has grown since
                self._present[behind - 1] = 0
            self._cache.note(self, end - start)

    def _get(self, held: OpenedRanges, spans: Spans, start: int, end: int) -> None:
        for span in spans:
            low, high = max(span.position, start), min(span.end, end)
            if low < high:
                first, size_bytes = low - span.position, high - low
                data = (
                    span.data[first : first + size_bytes]
                    if span.data
                    else self._cache.bucket.get_range(span.key, span.start + first, size_bytes)
                )
                with _telling(self.url, self.path):
                    held.write(data, low)


class OpenedRanges:
    """A file of ranges that is open: as long as it is kept blocks can be brought, and what is mapped is its."""

    def __init__(self, file: RangedFile, fd: LockableFd) -> None:
        self.file = file
        self._fs = FileSystem()
        self._fd: LockableFd | None = fd
        self._mutex = fork_safety.lock(self, "_mutex")

    @property
    def inode(self) -> int:
        """Of the file."""
        return self.file.inode

    @property
    def is_retired(self) -> bool:
        """Whether another file has its place."""
        return self.file.is_retired

    @property
    def source(self) -> str:
        """Where its blocks come from."""
        return f"{self.file.url}/{self.file.spans[0].key}" if self.file.spans else self.file.url

    def map(self) -> memoryview:
        """All of it as it is now; bytes that nobody said that he needs are zeros, or not."""
        size_bytes = size_of(self.file.spans)
        with self._mutex:
            return self._fs.map_file(self._open_fd(), size_bytes) if size_bytes else memoryview(b"")

    def need(self, start: int, end: int) -> None:
        """See `RangedFile.need`."""
        if start < end:
            self.file.need(self, start, end)

    def close(self) -> None:
        """Nothing more can be brought."""
        with self._mutex:
            fd, self._fd = self._fd, None
            if fd is not None:
                close_lockable(self._fs, fd)

    def write(self, data: Data, position: int) -> None:
        """Put bytes there that have come. Raises `DiskFull`, `StoreClosed`."""
        with self._mutex:  # or its number may be another file's by now
            write_all(self._fs, self._open_fd(), [data], position)

    def _open_fd(self) -> int:
        if self._fd is None:
            raise StoreClosed(self.file.path)
        return self._fd


def _blocks(size_bytes: int) -> int:
    return -(-size_bytes // BLOCK_BYTES)
