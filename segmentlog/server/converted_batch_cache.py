"""What the library wrote, as Kafka's clients read it: made when it is asked for, and kept for others who ask.

    in memory    the last 16 MiB: most consumers are at the end of a log, and ask for the same
    on disk      what is asked for again when it is not in memory any more: consumers that begin at the front. In files
                 without a name in the store's folder, so it is the kernel that decides what of it stays in memory

    in an answer  until its client has taken it, however slow it is

Those in memory and in answers have a share of memory. When it is used up, what is made goes to disk at once, and
answers become smaller: each has the one batch that it must have, and those that are on disk.

What is read once costs the disk nothing. The bytes on disk are bounded, also by what is free there; when they are used
up, the file that nobody has asked for the longest time makes room, if that is a while ago: else a log that is larger
than all of it and read round and round would be written again and again, and never found.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import numpy as np

from segmentlog.format.wire_conversion import as_wire
from segmentlog.server.transport import Buffer
from segmentlog.storage.anonymous_file import AnonymousFile, free_bytes
from segmentlog.storage.fs import FileSystem

if TYPE_CHECKING:
    from segmentlog.format.record_batch import RecordBatch

logger = logging.getLogger("segmentlog.server")

_KEPT_BYTES: Final = 16 << 20
_FILE_BYTES: Final = 32 << 20
_REMEMBERED: Final = 32 << 10
"""Batches of which is known that they were asked for before, and those of which is known what they are."""
_SPARED_S: Final = 300.0
"""A file that was asked for since is not given up for another."""
_SHARE_KEPT: Final = 8
"""What is kept here takes this part of the share of memory, at the most: the rest is for answers."""
_FREE_PART: Final = 4
"""The files together take this part of what would be free without them, at the most."""
_MADE_S: Final = 10.0
"""How long one waits for another to make the same batch."""

_Key = tuple[str, int, int, int]
LogVersion = tuple[str, int, int, int]
"""A topic's id, a partition's number, its generation and epoch: as long as these are so, what was appended stays."""


class _File:
    """One of the files on disk, and what it holds."""

    def __init__(self, scratch: AnonymousFile, now_s: float) -> None:
        self.scratch = scratch
        self.used_s = now_s
        self.views: dict[_Key, list[memoryview]] = {}


class DiskRenderings:
    """Those on disk. Thread-safe; views of a file that is given up stay what they are."""

    def __init__(
        self,
        folder: str,
        bound_bytes: int,
        file_bytes: int = _FILE_BYTES,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._mutex = threading.Lock()
        self._writing = threading.Lock()
        """Taken before the other one, by who adds: whoever looks something up does not wait for the disk."""
        self._folder = folder
        self._bound_bytes = bound_bytes
        self._file_bytes = file_bytes
        self._clock_s = clock_s
        self._files: list[_File] = []
        self._by_key: dict[_Key, _File] = {}
        self._asked: OrderedDict[int, None] = OrderedDict()

    @property
    def size_bytes(self) -> int:
        """Of all files, filled or not."""
        return len(self._files) * self._file_bytes

    def find(self, key: _Key) -> list[memoryview] | None:
        """A batch that is there."""
        with self._mutex:
            file = self._by_key.get(key)
            if file is None:
                return None
            file.used_s = self._clock_s()
            return file.views[key]

    def offer(self, key: _Key, made: list[Buffer], *, at_once: bool = False) -> None:
        """Keep a batch that had to be made, if there is room, and if it is not for the first time or ``at_once``."""
        number = hash(key)
        with self._mutex:
            if number not in self._asked:
                self._asked[number] = None
                if len(self._asked) > _REMEMBERED:
                    self._asked.popitem(last=False)
                if not at_once:
                    return
            if key in self._by_key or not self._bound_bytes or sum(map(len, made)) > self._file_bytes:
                return
        if not self._writing.acquire(blocking=False):
            return  # it will be asked for again
        try:
            self._add(key, made)
        except OSError as error:
            logger.info("what local programs wrote is kept for Kafka's clients in memory only: %s", error)
            self._bound_bytes = 0
        finally:
            self._writing.release()

    def _add(self, key: _Key, made: list[Buffer]) -> None:
        file = self._files[-1] if self._files else None
        views = file.scratch.add(made) if file is not None else None
        if views is None:
            file = self._begin()
            views = file.scratch.add(made) if file is not None else None
        with self._mutex:
            if file is not None and views is not None and file in self._files:
                file.views[key] = views
                self._by_key[key] = file

    def _begin(self) -> _File | None:
        """The next file, another one given up for it if need be; None where there is no room for one."""
        now_s = self._clock_s()
        room = (free_bytes(self._folder) + self.size_bytes) // _FREE_PART
        with self._mutex:
            while self.size_bytes + self._file_bytes > min(room, self._bound_bytes):
                oldest = min(self._files, key=lambda file: file.used_s, default=None)
                if oldest is None or oldest.used_s > now_s - _SPARED_S:
                    return None
                self._give_up(oldest)
            if self._files:
                self._files[-1].scratch.close()  # it is full
        file = _File(AnonymousFile(FileSystem(), self._folder, self._file_bytes), now_s)
        with self._mutex:
            self._files.append(file)
        return file

    def _give_up(self, file: _File) -> None:
        self._files.remove(file)
        file.scratch.close()
        for key in file.views:
            del self._by_key[key]

    def close(self) -> None:
        """Give all of it up."""
        with self._writing, self._mutex:
            self._bound_bytes = 0
            for file in list(self._files):
                self._give_up(file)


class Renderings:
    """The last batches that were rendered. Thread-safe. ``disk`` is its own from then on.

    ``held_max_bytes`` is the share of memory for batches that are not on disk, whether they are kept here or by an
    answer that its client has not taken yet.
    """

    def __init__(
        self, kept_bytes: int = _KEPT_BYTES, disk: DiskRenderings | None = None, held_max_bytes: int = 1 << 62
    ) -> None:
        self._mutex = threading.Lock()
        self._held_max_bytes = held_max_bytes
        self._summing = threading.Lock()
        self._held_bytes = 0
        self._changes: deque[int] = deque()
        """Yet to be added to the bytes that are held. Batches are let go of in any thread, whatever locks it has: so
        that appends here, and takes no lock."""
        self._kept_bytes = min(kept_bytes, held_max_bytes // _SHARE_KEPT)
        self._bytes = 0
        self._disk = disk
        self.hit_count = self.miss_count = 0
        """Batches that were there already, and those that had to be made."""
        self._rendered: OrderedDict[_Key, list[Buffer]] = OrderedDict()
        self._being_made: dict[_Key, threading.Event] = {}
        self._known: OrderedDict[tuple[LogVersion, int], tuple[_Key, int]] = OrderedDict()

    def known(self, version: LogVersion, offset: int) -> tuple[list[Buffer], int] | None:
        """(the batch that begins at ``offset``, the offset behind it), if it is there and `note` was told of it.

        Nothing of the log is looked at: it was checked when the batch was made.
        """
        with self._mutex:
            known = self._known.get((version, offset))
            if known is None:
                return None
            key, next_offset = known
            found = self._find(key)
        return None if found is None else (found, next_offset)

    def note(self, version: LogVersion, batch: RecordBatch) -> None:
        """Which batch lies there, while the log is of that version: one that `wire` was asked for since."""
        header = batch.header
        if header.is_kafka or len(batch) < header.record_count:
            return
        key = (version[0], batch.partition, header.base_offset, header.header_checksum)
        with self._mutex:
            self._known[version, header.base_offset] = key, header.next_offset
            if len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)

    def wire(self, topic_id: str, batch: RecordBatch) -> list[Buffer]:
        """A batch in Kafka's format, in one or, of one that reaches far, several: as it lies if a client wrote it."""
        header = batch.header
        if header.is_kafka:
            return [batch.payload]
        if len(batch) < header.record_count:  # seldom: somebody began to read in the middle
            return as_wire(batch)
        # The checksum covers everything that a batch says: one that was compacted since has another.
        key = (topic_id, batch.partition, header.base_offset, header.header_checksum)
        with self._mutex:
            found = self._find(key)
            other = self._being_made.get(key)
        if found is None and other is not None:  # consumers that read side by side
            other.wait(_MADE_S)
            with self._mutex:
                found = self._find(key)
        if found is not None:
            return found
        return self._make(key, batch)

    @property
    def held_bytes(self) -> int:
        """What takes memory now of all that was made, here and in answers on their way."""
        with self._summing:
            while self._changes:
                self._held_bytes += self._changes.popleft()
            return self._held_bytes

    @property
    def is_used_up(self) -> bool:
        """Whether the share of memory is used up: then an answer takes no more than it has to."""
        return self.held_bytes >= self._held_max_bytes

    def _counted(self, made: Buffer) -> memoryview:
        """The same bytes, counted as held until nobody has them, nor a part of them, any more."""
        owner = np.frombuffer(made, np.uint8)
        size = len(owner)
        self._changes.append(size)
        weakref.finalize(owner, self._changes.append, -size).atexit = False
        return owner.data

    @property
    def disk_bytes(self) -> int:
        """What they take on disk."""
        return 0 if self._disk is None else self._disk.size_bytes

    def close(self) -> None:
        """Give up what is on disk."""
        if self._disk is not None:
            self._disk.close()

    def _find(self, key: _Key) -> list[Buffer] | None:
        found = self._rendered.get(key)
        if found is not None:
            self._rendered.move_to_end(key)
        elif self._disk is not None:
            views = self._disk.find(key)
            found = None if views is None else list(views)
        self.hit_count += found is not None
        return found

    def _make(self, key: _Key, batch: RecordBatch) -> list[Buffer]:
        event = threading.Event()
        with self._mutex:
            self.miss_count += 1
            self._being_made.setdefault(key, event)
        try:
            made = as_wire(batch)
            if self._disk is not None:
                self._disk.offer(key, made, at_once=self.is_used_up)
                views = self._disk.find(key)
                if views is not None:
                    return list(views)
            made = [self._counted(one) for one in made]
            with self._mutex:
                self._keep(key, made)
        finally:
            with self._mutex:
                if self._being_made.get(key) is event:
                    del self._being_made[key]
            event.set()
        return made

    def _keep(self, key: _Key, made: list[Buffer]) -> None:
        if key not in self._rendered:
            self._rendered[key] = made
            self._bytes += sum(map(len, made))
            while self._bytes > self._kept_bytes:
                self._bytes -= sum(map(len, self._rendered.popitem(last=False)[1]))
