"""A machine of `shipping_trial`: its store, the process that ships it, and what can be seen of them."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from logs import FakeClock, NoSyncFileSystem, tree_bytes
from msgspec.structs import replace
from objects.faulty_bucket import FaultyBucket

from segmentlog.errors import CorruptBatch, SegmentlogError
from segmentlog.format.batch import decode_header
from segmentlog.format.hand_over import HandOver
from segmentlog.format.stub import decode_stub
from segmentlog.groups.committed_offsets import Encoded, encode
from segmentlog.log.partition import Partition
from segmentlog.objects.ownership.binding import read_binding
from segmentlog.objects.upload.shipper import Shipper
from segmentlog.producing.producer import Producer
from segmentlog.records import Record, SegmentInfo, TopicPartition
from segmentlog.storage.hand_over_file import change_hand_over, read_hand_over
from segmentlog.store import LogStore

Note = Callable[..., None]
MakeShipper = Callable[..., Shipper]


class Position(NamedTuple):
    """An offset that a transaction commits with its records, as a consumer would: for `Producer.commit_offsets`."""

    group: str
    where: TopicPartition
    topic_id: str
    offset: int
    metadata: str

    @contextmanager
    def committing(self, positions: object = None, *, metadata: str = "") -> Iterator[Encoded]:
        """Keys and values."""
        named = {self.where: self.offset}
        yield encode(self.group, named, lambda _: self.topic_id, metadata=self.metadata, committed_ms=1)


class OpenTransaction(NamedTuple):
    """A transaction that is not decided yet."""

    producer: Producer
    spots: list[tuple[str, int]]


class Machine:
    """A folder with a store, the process that has it open, and one that ships it: the same one, or another."""

    def __init__(
        self, label: str, path: Path, clock: FakeClock, note: Note, bucket: Callable[[], FaultyBucket],
        make_shipper: MakeShipper, *, apart: bool,
    ) -> None:  # fmt: skip
        self.label = label
        self.path = path
        self._clock = clock
        self._note = note
        self._new_bucket = bucket
        self._make_shipper = make_shipper
        self._apart = apart
        self._seen: dict[str, Any] = {}
        self._told: dict[str, int] = {}
        self.transactions: list[OpenTransaction] = []
        self.is_dead = False
        """All its processes have ended, until it returns."""
        self.is_busy = False
        """It is in the middle of shipping."""
        self.bucket = bucket()
        self.open()

    def _open_store(self) -> LogStore:
        return LogStore(
            self.path, background=False, fs=NoSyncFileSystem(), clock=self._clock, cache_dir=f"{self.path}-cache"
        )

    def open(self) -> None:
        """Start both processes."""
        self.store = self._open_store()
        self._shipping = self._open_store() if self._apart else self.store
        self._new_shipper()

    def _new_shipper(self) -> None:
        self.bucket = self._new_bucket()
        self.shipper = self._make_shipper(self._shipping._topics, self.bucket)

    def kill_shipper(self) -> None:
        """End the shipping process, which frees its lock, and start another one."""
        self.shipper.close()
        self._new_shipper()

    def close(self) -> None:
        """End both processes; open transactions are abandoned."""
        for one in self.transactions:
            with suppress(SegmentlogError):  # it is fenced, or may not append now
                one.producer.close()
        self.transactions = []
        self.shipper.close()
        for store in {id(self._shipping): self._shipping, id(self.store): self.store}.values():
            store.close()

    def power_cut(self, rng: random.Random) -> None:
        """Restart the machine: unsynced bytes may be gone, and the state that processes share is gone."""
        cuts: dict[str, int] = {}
        for _, log in self._logs(internal=True):
            page = log.handle.page
            state, sync = page.log.read(), page.sync.read()
            position = state.end_position - (state.appended_bytes - sync.synced_bytes)
            if position >= 0 and rng.random() < 0.7:
                name = os.path.relpath(log.segments()[-1].path, self.path)
                cuts[name] = position
        files = {name: data for name, data in tree_bytes(self.path).items() if not name.endswith(("/", "/state"))}
        self.close()
        for name in tree_bytes(self.path):
            if not name.endswith("/"):
                (self.path / name).unlink()
        for name, data in files.items():
            (self.path / name).parent.mkdir(parents=True, exist_ok=True)
            (self.path / name).write_bytes(data[: cuts.get(name)])
        self._seen = {}
        self.open()

    # ------------------------------------------------------------ a hand-over

    def request_hand_over(self, wait_ms: int, ship_ms: int) -> bool:
        """Request a hand-over as the command does. Return whether the machine takes itself for the owner."""
        fs, path = NoSyncFileSystem(), str(self.path)
        binding = read_binding(fs, path)
        if binding is None or not binding.begun or binding.fenced:
            return False
        found = read_hand_over(fs, path)
        if found is None or not found.is_active:
            until_ms = self._clock.now_ms() + ship_ms
            wanted = HandOver(stage="requested", owner_id=binding.owner_id, wait_ms=wait_ms, until_ms=until_ms)
            change_hand_over(fs, path, found, wanted)
        return True

    def cancel_hand_over(self) -> None:
        """Give a hand-over up as the interrupted command does."""
        fs, path = NoSyncFileSystem(), str(self.path)
        found = read_hand_over(fs, path)
        if found is not None and found.is_active:
            change_hand_over(fs, path, found, replace(found, until_ms=0, reason="it was interrupted"))

    # ------------------------------------------------------------ what can be seen

    @property
    def epoch(self) -> int:
        """Epoch of the owner that the machine is bound as; 0 if it is not bound."""
        binding = read_binding(NoSyncFileSystem(), str(self.path))
        return 0 if binding is None else binding.owner_epoch

    def _logs(self, *, internal: bool = False) -> Iterator[tuple[str, Partition]]:
        return logs_of(self.store, internal=internal)

    def logs(self) -> list[Partition]:
        """Return the partitions of users' topics."""
        return [log for _, log in self._logs()]

    def observe(self) -> None:
        """Note what files there are by now, and how far they are said to be shipped."""
        if self.is_dead:
            return
        for place, log in self._logs(internal=True):
            state = log.handle.page.log.read()
            if self._seen.get(place) != state:
                self._seen[place] = state
                for segment in log.segments():
                    data = self._bytes_of(segment)
                    if data is None:
                        continue
                    held = prefixes(data)
                    self._note("held", self.label, place, segment.base_offset, held)
        for place, log in self._logs():
            shipped = log.shipped_offset
            if shipped != self._told.get(place, 0):
                self._told[place] = shipped
                self._note("shipped", self.label, place, shipped, log.durable_offset)

    def _bytes_of(self, segment: SegmentInfo) -> bytes | None:
        """Return the bytes of a segment file, local or remote; None if they are gone and may be."""
        if not segment.remote:
            return Path(segment.path).read_bytes()[: segment.size_bytes]
        shelf = self.bucket.shelf
        stub = decode_stub(Path(segment.path.replace(".log", ".remote")).read_bytes())
        keys = [one.key for one in stub.stored.objects]
        if shelf.owner_epoch() == self.epoch and not shelf.needed().issuperset(keys):
            self._note("error", self.label, f"no manifest speaks of {stub.key}, and {segment.path} lies there alone")
        parts = [shelf.objects[key][0] for key in keys if key in shelf.objects]
        return b"".join(parts) if len(parts) == len(keys) else None


def logs_of(store: LogStore, *, internal: bool = False) -> Iterator[tuple[str, Partition]]:
    """Partitions, by topic id and number."""
    for name in store.topics(internal=internal):
        for log in store.topic(name).partitions():
            yield f"{log.topic_id}/{log.number}", log


def prefixes(data: bytes) -> list[str]:
    """Digests of a segment file up to the end of each batch."""
    found: list[str] = []
    running = hashlib.sha256()
    position = 0
    while position < len(data):
        try:
            size_bytes = decode_header(data, position).size_bytes
        except CorruptBatch:  # nothing was written there yet
            break
        running.update(data[position : position + size_bytes])
        position += size_bytes
        found.append(running.hexdigest()[:16])
    return found


def segment_files(path: Path, topic_ids: dict[str, str]) -> dict[str, dict[str, tuple[int, str]]]:
    """Return size and digest of the segment files of a store that was not opened yet; ``topic_ids`` by name."""
    found: dict[str, dict[str, tuple[int, str]]] = {}
    for name, topic_id in topic_ids.items():
        for folder in (path / name).iterdir():
            if folder.name.isdigit():
                files = {str(int(file.stem)): file.read_bytes() for file in folder.glob("*.log")}
                found[f"{topic_id}/{folder.name}"] = {
                    base: (len(data), hashlib.sha256(data).hexdigest()[:16]) for base, data in files.items()
                }
    return found


def name_of(record: Record) -> str:
    """Return the record as the history names it."""
    number, key, _ = (record.value or b"").split(b"/", 2)
    return f"{number.decode()}/{key.decode()}@{record.timestamp}"


def content_of(log: Partition) -> dict[str, Any]:
    """Return everything that a log shows."""
    records, batches = [], []
    for batch in log.read(log.log_start_offset, control=True):
        batches.append((batch.base_offset, batch.next_offset))
        if not batch.header.is_control:
            records += [(record.offset, name_of(record)) for record in batch]
    return {
        "start": log.log_start_offset, "end": log.log_end_offset, "batches": batches, "records": records,
        "visible": [], "lost": [(lost.base_offset, lost.end_offset) for lost in log.lost_ranges()],
    }  # fmt: skip


def visible_in(log: Partition) -> list[int]:
    """Offsets of what was committed, or is of no transaction."""
    return [record.offset for batch in log.read(log.log_start_offset, isolation="read_committed") for record in batch]


def positions_of(store: LogStore) -> list[tuple[str, int, int]]:
    """Return the committed offsets of groups: place, offset, number of the transaction."""
    return [
        (f"{where.topic_id}/{where.partition}", one.offset, int(one.metadata or 0))
        for group in store.group_offsets.groups_with_any_offset()
        for where, one in sorted(store.group_offsets.by_topic_id(group).items())
    ]
