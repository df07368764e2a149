"""Putting sealed segments; a large one in parts, each an object of its own, and a journal of those that lie there.

    @uploads    JSON, of the store: {"url": "s3://bucket/path", "begun": [
                {"topic_id": ..., "partition": 0, "base_offset": 0, "stamp": [131, 67108864, 1785456000000000000],
                 "key": "segments/...", "part_bytes": 16777216, "parts": {"0": [16777216, <xxh3_64>, <sha256>], ...}}]}

A client's multipart upload is lost with the process that began it: its number is nobody's to know then. An object is
not: whoever goes on asks for what the journal names, and puts the rest. A part has the same name at every try, and the
same bytes: what comes late, or twice, does no harm.

The journal only saves work. A part is believed in that holds what the file holds now, and lies there.
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
from segmentlog.objects.local.transaction_ends import Where
from segmentlog.objects.ownership.binding import remove_upload_journal
from segmentlog.policy.upload_policy import LocalSegment
from segmentlog.storage import fork_safety
from segmentlog.storage.file_operations import read_file, replace_file
from segmentlog.storage.fs import FileSystem

PART_BYTES: Final = 16 << 20
"""What is larger is put in parts, all of about one size."""
TRIES: Final = 4
"""Of a part, one after the other; then its segment goes on at the next turn, or the one after."""
PAUSE_S: Final = 0.5
"""Before the second try; twice as long before each further one, more or less."""

Read = Callable[[int, int], Data]
"""Bytes of the file, from a position on, so many. May raise: the file is another one by now."""


class Begun(msgspec.Struct):
    """A segment that is being put in parts; ``parts`` by number, those that lie there.

    ``stamp`` tells its file from one that took its place.
    """

    topic_id: str
    partition: int
    base_offset: int
    stamp: tuple[int, int, int]
    key: str
    part_bytes: int
    parts: dict[int, StoredPart] = {}

    @property
    def where(self) -> Where:
        """Of which partition."""
        return self.topic_id, self.partition

    @property
    def sizes(self) -> list[int]:
        """Of all parts."""
        size_bytes = self.stamp[1]
        return [min(self.part_bytes, size_bytes - start) for start in range(0, size_bytes, self.part_bytes)]

    @property
    def names(self) -> list[str]:
        """Of all parts, those that were never put as well."""
        return [f"{self.key}.{number}" for number in range(len(self.sizes))]


class _Journal(msgspec.Struct):
    """What the file holds."""

    url: str
    begun: list[Begun]


class SegmentPuts:
    """Puts sealed segments of one store at one place, several of them at a time. Thread-safe."""

    def __init__(self, fs: FileSystem, folder: str, bucket: Bucket, parallel: int = upload_pool.PARALLEL) -> None:
        self._fs = fs
        self._path = f"{folder}/{UPLOADS_FILE}"
        self._bucket = bucket
        self._parallel = parallel
        self._at_a_time = parallel
        """Parts of one segment; fewer where the way there is too narrow for as many to come through in time."""
        self._mutex = fork_safety.lock(self, "_mutex")
        self._begun: dict[str, Begun] = {}
        """By key."""
        self._known: set[str] = set()
        """Names of parts that this process has put, or has looked at."""
        self._given_up: set[str] = set()
        """Keys of what is of no use any more."""
        self.put_bytes = 0
        """Of all parts that were put."""

    # ------------------------------------------------------------ the journal

    def load(self) -> None:
        """Go on from what an earlier process has put."""
        with contextlib.suppress(FileNotFoundError, msgspec.DecodeError, UnicodeDecodeError):
            found = msgspec.json.decode(read_file(self._fs, self._path), type=_Journal)
            if found.url == self._bucket.url:
                self._begun = {one.key: one for one in found.begun}

    def _write_locked(self) -> None:
        with contextlib.suppress(SegmentlogError, OSError):  # no room, say: then it saves no work
            if self._begun:
                journal = _Journal(self._bucket.url, list(self._begun.values()))
                replace_file(self._fs, self._path, msgspec.json.encode(journal) + b"\n", sync_folder=False)
            else:
                remove_upload_journal(self._fs, self._path.rpartition("/")[0])

    def _begin(self, where: Where, segment: LocalSegment) -> Begun:
        """Go on with what was begun of this very file, or begin."""
        with self._mutex:
            for one in self._begun.values():
                if (one.where, one.base_offset, one.stamp) == (where, segment.base_offset, segment.stamp):
                    return one
            count = -(-segment.size_bytes // PART_BYTES)
            begun = Begun(*where, segment.base_offset, segment.stamp, key_of(where, segment.base_offset),
                          -(-segment.size_bytes // count))  # fmt: skip
            self._begun[begun.key] = begun
            self._write_locked()
            return begun

    def _note(self, begun: Begun, number: int, part: StoredPart) -> None:
        with self._mutex:
            begun.parts[number] = part
            self._known.add(f"{begun.key}.{number}")
            self.put_bytes += part.size_bytes
            if begun.key in self._begun:
                self._write_locked()

    def settle(self, said: Set[str]) -> None:
        """A manifest that lies there says what becomes of these objects: it refers to them, or condemns them."""
        with self._mutex:
            settled = [key for key, one in self._begun.items() if not said.isdisjoint(one.names)]
            for key in settled:
                self._known.difference_update(self._begun.pop(key).names)
                self._given_up.discard(key)
            if settled:
                self._write_locked()

    def is_whole(self, stored: Stored) -> bool:
        """Whether nobody has condemned a part of it since it was put."""
        with self._mutex:
            return not stored.parts or stored.key in self._begun

    def of_no_use(self, is_wanted: Callable[[Begun], bool]) -> Iterator[str]:
        """Names of parts of segments that are not what files here are any more; each is told once."""
        with self._mutex:
            for key, one in self._begun.items():
                if key not in self._given_up and not is_wanted(one):
                    self._given_up.add(key)
                    yield from one.names

    def missing_bytes(self, segments: Iterable[tuple[Where, LocalSegment]]) -> int:
        """What is to be put of segments still."""
        with self._mutex:
            there = {
                (one.where, one.base_offset, one.stamp): sum(part.size_bytes for part in one.parts.values())
                for one in self._begun.values()
            }
        return sum(one.size_bytes - there.get((where, one.base_offset, one.stamp), 0) for where, one in segments)

    # ------------------------------------------------------------ putting

    def put(self, where: Where, segment: LocalSegment, read: Read, stop: threading.Event) -> Stored:
        """Put a segment, or what is missing of it; what the manifest says of it.

        Raises what ``read`` does, `ObjectStoreError`, `StoreClosed` once it is to ``stop``: the next call goes on.
        """
        if segment.size_bytes <= PART_BYTES:
            return upload_pool.put(self._bucket, key_of(where, segment.base_offset), read(0, segment.size_bytes))
        begun = self._begin(where, segment)
        sizes = begun.sizes
        at_a_time = self._at_a_time

        def do(number: int) -> ObjectStoreError | None:
            if stop.is_set():
                raise StoreClosed(self._bucket.url)
            data = read(number * begun.part_bytes, sizes[number])
            try:
                self._put_part(begun, number, data)
            except ObjectStoreError as error:
                if not error.retriable:
                    raise
                return error
            return None

        numbers = range(len(sizes))
        errors = upload_pool.beside_each_other(do, numbers, at_a_time)
        failed = [number for number, error in zip(numbers, errors, strict=True) if error is not None]
        self._at_a_time = at_a_time // 2 or min(at_a_time, 1) if failed else min(at_a_time + 1, self._parallel)
        for number in failed:
            self._put_alone(do, number, stop)
        return Stored(begun.key, segment.size_bytes, parts=tuple(begun.parts[number] for number in numbers))

    def _put_alone(self, do: Callable[[int], ObjectStoreError | None], number: int, stop: threading.Event) -> None:
        """Once more what failed beside others, with pauses."""
        error: ObjectStoreError | None = None
        for tried in range(1, TRIES):
            if stop.wait(PAUSE_S * 2 ** (tried - 1) * random.uniform(0.5, 1.5)):
                raise StoreClosed(self._bucket.url)
            error = do(number)
            if error is None:
                return
        assert error is not None
        raise error

    def _put_part(self, begun: Begun, number: int, data: Data) -> None:
        name = f"{begun.key}.{number}"
        known = begun.parts.get(number)
        if known is not None and name in self._known:
            return
        described = upload_pool.describe(name, data)
        part = StoredPart(described.size_bytes, described.xxh3_64, described.sha256)
        if known == part and self._lies_there(name, len(data)):  # of an earlier process
            self._known.add(name)
            return
        self._bucket.put(name, data)
        self._note(begun, number, part)

    def _lies_there(self, name: str, size_bytes: int) -> bool:
        """Somebody may have swept the place since."""
        try:
            self._bucket.get_range(name, size_bytes - 1, 1)
        except ObjectMissing:
            return False
        return True


def key_of(where: Where, base_offset: int) -> str:
    """A name for a segment that no other object gets."""
    return f"segments/{where[0]}/{where[1]}/{base_offset:020d}-{upload_pool.nonce()}"
