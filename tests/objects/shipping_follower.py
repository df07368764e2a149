"""Followers of a store in `shipping_trial`: their cycles fail and are killed, and readers read within their logs."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from objects.faulty_bucket import FaultyBucket
from objects.shipping_machine import content_of, logs_of, name_of, positions_of, segment_files, visible_in
from objects.shipping_restores import HurriedFaultyFileSystem

from segmentlog.errors import (
    LogTruncated,
    ObjectStoreError,
    OffsetOutOfRange,
    ReadOnlyStore,
    ShippingRefused,
    UnknownTopic,
)
from segmentlog.format.file_names import LOG_SUFFIX, STORE_FILE
from segmentlog.format.manifest import Manifest
from segmentlog.log.partition import Partition
from segmentlog.objects.replica.remote_store import RemoteStore
from segmentlog.objects.replica.replica import Replica
from segmentlog.records import Record
from segmentlog.storage.file_operations import read_file
from segmentlog.store import LogStore
from segmentlog.testing.fault_injection import Died

if TYPE_CHECKING:
    from objects.shipping_trial import Trial

_GONE = (UnknownTopic, LogTruncated, OffsetOutOfRange)


class RecordWaiter:
    """A replica, and a process that has it open all the time."""

    label = "follower"

    def __init__(self, trial: Trial) -> None:
        self._trial = trial
        self._path = trial.folder / self.label
        self._replica: Replica | None = None
        self._bucket: FaultyBucket | None = None
        self._store: LogStore | None = None
        self._reading: Iterator[Record] | None = None
        self._place = ""
        self.is_busy = False

    def turn(self, *, calm: bool = False) -> bool:
        """Bring what is new, and look at all of it; whether that came to its end."""
        if self.is_busy:
            return False
        self.is_busy = True
        try:
            return self._turn(calm=calm)
        finally:
            self.is_busy = False

    def _turn(self, *, calm: bool) -> bool:
        trial = self._trial
        is_up_to_date = False
        if self._bucket is not None and self._bucket.dead:
            self.kill()
        try:
            self._begin(calm=calm)
            is_new = self._bring()
            trial.seen[self.label] += is_new
            is_up_to_date = True
        except Died:
            trial.seen["follower died"] += 1
            self.kill()
        except (ObjectStoreError, ShippingRefused) as error:
            if isinstance(error, ShippingRefused) and not str(error).endswith("check the URL"):
                trial.note("error", self.label, str(error))
        self._look(is_up_to_date=is_up_to_date)
        return is_up_to_date

    def _begin(self, *, calm: bool) -> None:
        trial = self._trial
        if self._replica is not None and not calm:
            return
        self.kill()
        fs = HurriedFaultyFileSystem()
        self._bucket = bucket = trial.new_bucket(self.label)
        bucket.calm = calm
        if not calm and trial.rng.random() < 0.2:
            fs.die_at(trial.rng.randrange(1, trial.rng.choice((20, 100, 500))))
        self._replica = Replica(
            bucket.url, self._path, threads=False, parallel=0, bucket=bucket, fs=fs, clock=trial.clock
        )

    def _bring(self) -> bool:
        assert self._replica is not None
        return self._replica.refresh()

    def _manifest(self) -> Manifest | None:
        return None if self._replica is None else self._replica._mirror.manifest

    def _files(self, manifest: Manifest) -> dict[str, dict[str, tuple[int, str]]]:
        return segment_files(self._path, {topic.name: topic.id for topic in manifest.topics})

    def _open_store(self) -> LogStore | None:
        if not (self._path / STORE_FILE).exists():
            return None
        store = LogStore(self._path, background=False, clock=self._trial.clock)
        with suppress(ReadOnlyStore):
            store.create_topic("mine")
            self._trial.note("error", self.label, "a replica can be written to")
        return store

    def kill(self) -> None:
        """Kill the process that refreshes the replica."""
        if self._replica is not None:
            with suppress(Died):
                self._replica.close()
            self._replica = None

    def close(self) -> None:
        """End everything, and delete the folder."""
        self.kill()
        self._reading = None
        if self._store is not None:
            self._store.close()
        self._store = None
        shutil.rmtree(self._path, ignore_errors=True)

    # ------------------------------------------------------------ what there is to see

    def _look(self, *, is_up_to_date: bool) -> None:
        self._store = self._store or self._open_store()
        if self._store is None:
            return
        self._read_on()
        bucket = self._bucket
        if bucket is None or not bucket.dead:
            self._look_at_all(is_up_to_date=is_up_to_date)

    def _look_at_all(self, *, is_up_to_date: bool) -> None:
        assert self._store is not None
        if self._bucket is not None:
            before, self._bucket.calm = self._bucket.calm, True
        manifest = self._manifest() if is_up_to_date else None
        positions = positions_of(self._store)  # before the data, because newer records may arrive meanwhile
        contents: dict[str, Any] = {}
        for name in self._store.topics(internal=True):
            with suppress(*_GONE):
                for log in self._store.topic(name).partitions():
                    contents[f"{log.topic_id}/{log.number}"] = self._content(log, name)
        files = {} if manifest is None else self._files(manifest)
        # A reader that misses an object must read the manifest again.
        nonce = manifest.nonce if manifest is not None and manifest is self._manifest() else ""
        if self._bucket is not None:
            self._bucket.calm = before
        self._trial.note("followed", self.label, nonce, files, contents, positions)

    def _content(self, log: Partition, name: str) -> dict[str, Any]:
        if name.startswith("__"):
            return {"start": log.log_start_offset, "end": log.log_end_offset, "records": [], "visible": []}
        return content_of(log) | {"visible": visible_in(log)}

    def _read_on(self) -> None:
        """Continue a reader that began before the last cycle."""
        trial, store = self._trial, self._store
        assert store is not None
        if self._reading is None:
            logs = [log for _, log in self._safely(lambda: list(logs_of(store)), [])]
            if not logs:
                return
            log = trial.rng.choice(logs)
            self._place = f"{log.topic_id}/{log.number}"
            self._reading = (record for batch in log.read(log.log_start_offset) for record in batch)
        records = []
        try:
            for _ in range(trial.rng.randrange(4)):
                records.append(next(self._reading))
        except _GONE:
            trial.seen["what was read is gone"] += 1
            self._reading = None
        except StopIteration:
            self._reading = None
        except (ObjectStoreError, Died):
            trial.seen["reading failed"] += 1
            self._reading = None
        trial.seen[f"read by {self.label}"] += len(records)
        trial.note("read", self.label, self._place, [(record.offset, name_of(record)) for record in records])

    @staticmethod
    def _safely(do: Callable[[], Any], otherwise: Any) -> Any:
        try:
            return do()
        except (*_GONE, ObjectStoreError, Died):
            return otherwise


class Visitor(RecordWaiter):
    """A reader of the object store with a small cache: blocks of some bytes, so that blocks are often evicted."""

    label = "visitor"

    def __init__(self, trial: Trial) -> None:
        super().__init__(trial)
        self._attached: RemoteStore | None = None

    def _begin(self, *, calm: bool) -> None:
        if self._bucket is not None:
            self._bucket.calm = calm
        if self._attached is None:
            self._bucket = bucket = self._trial.new_bucket(self.label)
            bucket.calm = calm
            self._attached = RemoteStore(
                bucket.url, cache_bytes=self._trial.rng.choice((300, 2000)), cache_dir=self._path, refresh_ms=1000,
                threads=False, parallel=0, bucket=bucket, clock=self._trial.clock,
            )  # fmt: skip

    def _bring(self) -> bool:
        assert self._attached is not None
        return self._attached.refresh()

    def _manifest(self) -> Manifest | None:
        return None if self._attached is None else self._attached._mirror.manifest

    def _files(self, manifest: Manifest) -> dict[str, dict[str, tuple[int, str]]]:
        assert self._attached is not None
        fs, found = self._attached.fs, {}
        for topic in manifest.topics:
            for partition in topic.partitions:
                folder = f"{self._attached.path}/{topic.name}/{partition.number}"
                files = {
                    str(int(name.removesuffix(LOG_SUFFIX))): read_file(fs, f"{folder}/{name}")
                    for name in os.listdir(folder)
                    if name.endswith(LOG_SUFFIX)
                }
                found[f"{topic.id}/{partition.number}"] = {
                    base: (len(data), hashlib.sha256(data).hexdigest()[:16]) for base, data in files.items()
                }
        return found

    def _open_store(self) -> LogStore | None:
        if self._attached is None:
            return None
        return LogStore(
            self._attached.path, read_only=True, background=False, fs=self._attached.fs, clock=self._trial.clock
        )

    def kill(self) -> None:
        """Kill the process; its cache is gone."""
        self._reading = None
        if self._store is not None:
            self._store.close()
        self._store = None
        if self._attached is not None:
            self._attached.close()
        self._attached = None
