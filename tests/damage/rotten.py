"""A small store with one of everything, whose bytes rot one at a time and are put back as they were."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from broken import Batch, batches_of, log_files
from leftovers import opened
from logs import FakeClock, Kept, NoSyncFileSystem, contents, tree_bytes
from seeds import every_seed
from wire import append_sent

from segmentlog.errors import CorruptBatch
from segmentlog.log.partition import Partition
from segmentlog.store import LogStore

STEP = int(os.environ.get("SEGMENTLOG_BITROT_STEP", "29"))
"""Distance between two bytes that rot, among those that the seeds choose. 1 takes every byte of every file."""

_THIN = 64
# In long stretches of zeros (preallocated space, padding), one byte of this many rots.

PARTITIONS = [("packed", 0), ("packed", 1), ("packed", 2), ("plain", 0)]


def _sample(first: int, size: int) -> list[int]:
    """Return every STEP-th byte: half of them are the same in every run, the others differ."""
    chosen = every_seed("bit rot") if STEP > 1 else [0]
    step = STEP * len(chosen)
    return sorted({position for seed in chosen for position in range((first + seed) % step, size, step)})


class AnotherBoot(NoSyncFileSystem):
    """Acts as after a restart of the machine: the state pages are not trusted, and the logs are recovered."""

    def boot_id(self) -> str:
        return "00000000-1111-2222-3333-444444444444"


class Skipped(NamedTuple):
    """The arguments that a reader which skips damage passes to its callback."""

    base_offset: int
    end_offset: int
    damage: CorruptBatch


class Rotten:
    """The store, what was written to it, and its bytes as they should be."""

    def __init__(self, path: Path, *, clean: bool = True) -> None:
        self.path = path
        self.records: dict[tuple[str, int], list[Kept]] = {}
        self.batches: dict[tuple[str, int], list[Batch]] = {}
        self._make(clean)
        self.image = tree_bytes(path)

    def _make(self, clean: bool) -> None:
        store = opened(LogStore(self.path, background=False, fs=NoSyncFileSystem(), clock=FakeClock()))
        common = {"segment_records": 6, "index_interval_bytes": 1, "fsync": "never"}
        store.create_topic("plain", compression_type="none", **common)
        store.create_topic("packed", partitions=3, compression_type="lz4", **common)
        for topic, number in PARTITIONS:
            partition = store.topic(topic).partition(number)
            for batch in range(5 if topic == "plain" else 4 if not number else 1):
                if not clean and batch == 3:
                    partition.flush()
                    self._move_recovery_point(partition)
                fill(partition, batch, long=topic == "packed")
            self.records[topic, number] = contents(partition)
        if clean:
            store.close()
        else:
            for topic, number in PARTITIONS:
                store.topic(topic).partition(number).abandon()
        for topic, number in PARTITIONS:
            folder = self.folder(topic, number)
            if clean:
                self.batches[topic, number] = batches_of(folder)
            else:
                self.batches[topic, number] = [
                    Batch(Path(one._path), one._position, one.size_bytes, one.base_offset, one.next_offset)
                    for one in store.topic(topic).partition(number)._reader.read(0, 1 << 60, None, None)
                ]

    @staticmethod
    def _move_recovery_point(partition: Partition) -> None:
        page = partition.handle.page
        with partition.handle.sync_locked():
            log = page.log.read()
            partition._syncer.advance_recovery_point(
                log, page.sync.read(), offset_ceiling=log.log_end_offset + 100, clean=False
            )

    def folder(self, topic: str, number: int) -> Path:
        return self.path / topic / str(number)

    # ------------------------------------------------------------ rotting

    def positions(self, wanted: Callable[[str], bool]) -> Iterator[tuple[str, int]]:
        """(file, byte) of a sample of the files whose names are wanted; of long stretches of zeros a thin one."""
        for name, data in sorted(self.image.items()):
            if not wanted(name):
                continue
            for position in _sample(sum(name.encode()), len(data)):
                around = data[max(position - 64, 0) : position + 64]
                thin = _THIN if STEP > 1 or name.endswith(".log") else 1
                if any(around) or position // STEP % thin == 0:
                    yield name, position

    @contextlib.contextmanager
    def rot(self, name: str, position: int, bits: int | None = None) -> Iterator[int]:
        """Flip a byte in the same inode, yield the new byte, and restore the whole store at the end."""
        before = self.image[name][position]
        bits = bits if bits is not None else (1 << (position * 5 + before) % 8 if position % 3 else 0xFF)
        path = self.path / name
        with path.open("r+b") as file:
            file.seek(position)
            file.write(bytes([before ^ bits]))
        try:
            yield before ^ bits
        finally:
            self.restore()

    def restore(self) -> None:
        """Put every file back in place: the folders keep their inodes, so that live state pages are live again."""
        for path in sorted(self.path.rglob("*"), reverse=True):
            name = str(path.relative_to(self.path))
            if path.is_dir():
                if name + "/" not in self.image:
                    shutil.rmtree(path)
            elif name not in self.image:
                path.unlink()
        for name, data in self.image.items():
            path = self.path / name
            if not name.endswith("/") and (not path.exists() or path.read_bytes() != data):
                fd = os.open(path, os.O_RDWR | os.O_CREAT)
                os.ftruncate(fd, os.pwrite(fd, data, 0))
                os.close(fd)

    def batch_at(self, name: str, position: int) -> Batch | None:
        """Return the batch that contains a byte of a segment file; None after the last batch."""
        for batch in self.batches[place_of(name)]:
            if batch.path == self.path / name and 0 <= position - batch.position < batch.size_bytes:
                return batch
        return None

    # ------------------------------------------------------------ reading

    def open(self, *, boot: type[NoSyncFileSystem] = NoSyncFileSystem, read_only: bool = False) -> LogStore:
        return LogStore(
            self.path, create=False, background=False, read_only=read_only, fs=boot(), clock=FakeClock()
        )  # fmt: skip

    def check_read(self, store: LogStore, hit: Batch | None = None) -> None:
        """Check that all records read as they were written, except for one damaged batch, which alone is reported."""
        for place in PARTITIONS:
            records, partition = self.records[place], store.topic(place[0]).partition(place[1])
            mine = hit is not None and hit.path.parent == self.folder(*place)
            if hit is None or not mine:
                assert contents(partition) == records
                continue
            before, damage = read_until_damage(partition, 0)
            assert damage is not None, "damage was not told"
            assert before == [one for one in records if one.offset < hit.base_offset]
            assert Path(damage.path) == hit.path
            assert 0 <= damage.position - hit.position < hit.size_bytes
            found, skipped = read_skipping(partition, 0)
            assert found == [one for one in records if not hit.base_offset <= one.offset < hit.next_offset]
            assert [(one.base_offset, one.end_offset) for one in skipped] == [(hit.base_offset, hit.next_offset)]
            assert contents(partition, hit.next_offset) == [one for one in records if one.offset >= hit.next_offset]
            consumer = store.consumer(place, skip_damaged=True)
            assert [kept(record) for record in consumer] == found
            assert [one[1:3] for one in consumer.skipped] == [(hit.base_offset, hit.next_offset)]


def place_of(name: str) -> tuple[str, int]:
    topic, number = name.split("/")[:2]
    return topic, int(number)


def kept(record: object) -> Kept:
    return Kept(record.offset, record.key, record.value, record.timestamp, record.headers)  # type: ignore[attr-defined]


def fill(partition: Partition, number: int, *, long: bool) -> int:
    """Return a batch of three records, with keys, headers and a null: every second one from a Kafka client."""
    append = partial(append_sent, partition, codec=4 * long) if number % 2 else partition.append
    return append(
        [b"value %d " % number * (30 if long else 1), None, b"" if number % 2 else b"third"],
        keys=[b"k%d" % number, None, b""],
        timestamps=[1000 + 10 * number, 5000 + number, 1001 + 10 * number],
        headers=[[("h", b"%d" % number), ("n", None)], None, None],
    )


def read_until_damage(partition: Partition, offset: int) -> tuple[list[Kept], CorruptBatch | None]:
    """Return the records up to the first damage, and that."""
    found: list[Kept] = []
    try:
        for batch in partition.read(offset):
            found += map(kept, batch)
    except CorruptBatch as damage:
        return found, damage
    return found, None


def read_skipping(partition: Partition, offset: int) -> tuple[list[Kept], list[Skipped]]:
    """Return all readable records, and the reports about the rest."""
    skipped: list[Skipped] = []
    found = contents(partition, offset, on_skip=lambda *told: skipped.append(Skipped(*told)))
    return found, skipped


def is_inside(offset: int, ranges: Sequence[tuple[int, int]]) -> bool:
    return any(base <= offset < end for base, end in ranges)


__all__ = ["AnotherBoot", "Rotten", "log_files"]
