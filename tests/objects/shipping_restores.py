"""Restores and takeovers of `shipping_trial`: with failing requests, killed in the middle, of damaged objects."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from logs import NoSyncFileSystem
from objects.faulty_bucket import FaultyBucket
from objects.shipping_machine import content_of, logs_of, positions_of, segment_files, visible_in

from segmentlog.errors import ObjectStoreError, SegmentlogError, ShippingRefused, StoreFenced
from segmentlog.format.manifest import MANIFEST_KEY
from segmentlog.inspection.store_inspection import inspect_store
from segmentlog.log.partition import Partition
from segmentlog.objects.restore.restore import Restored, restore
from segmentlog.objects.takeover import take_over
from segmentlog.store import LogStore
from segmentlog.testing.fault_injection import Died, FaultyFileSystem

if TYPE_CHECKING:
    from objects.shipping_trial import Trial

_TRIES = 60


class HurriedFaultyFileSystem(FaultyFileSystem):
    """One that syncs nothing: no power is taken from it."""

    def __init__(self) -> None:
        self.fdatasync = self.fsync = lambda fd: None
        super().__init__()


class DamagedBucket:
    """A bucket with an object in which a bit is another one, or bytes are missing, or that is another object."""

    def __init__(self, bucket: FaultyBucket, rng: random.Random, objects: dict[str, tuple[bytes, str]]) -> None:
        self.url = bucket.url
        self._bucket = bucket
        self.key = rng.choice([MANIFEST_KEY, *(key for key in sorted(objects) if objects[key][0])])
        data = objects[self.key][0]
        at = rng.randrange(len(data))
        flipped = data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
        other = objects[rng.choice(sorted(objects))][0]
        self._data = rng.choice((flipped, flipped, data[:at], data + b"0", other))

    def get(self, key: str) -> tuple[bytes, str]:
        data, tag = self._bucket.get(key)
        return (self._data if key == self.key else data), tag

    def get_range(self, key: str, start: int, size_bytes: int) -> bytes:
        data = self.get(key)[0][start : start + size_bytes]
        if len(data) != size_bytes:
            raise ObjectStoreError(self.url, key, "it ends too early", False)
        return data


class Restores:
    """The restores of one trial."""

    def __init__(self, trial: Trial) -> None:
        self._trial = trial

    def content(self, log: Partition) -> dict[str, Any]:
        """Return everything that a log shows."""
        return content_of(log)

    def note_found(self, label: str, how: str, store: LogStore, *, finish: bool = False) -> None:
        """Write down what is in a store; ``finish``: once its transactions are decided."""
        logs = dict(logs_of(store))
        contents = {place: content_of(log) for place, log in logs.items()}
        positions = []
        if finish:
            for _ in range(3):
                store.finish_transactions()
            positions = positions_of(store)
            for place, log in logs.items():
                contents[place]["visible"] = visible_in(log)
        self._trial.note("found", label, how, contents, positions)

    def note_restored(self, label: str, restored: Restored) -> None:
        """Record the restored files before any process opens them, and their damage."""
        trial = self._trial
        path = trial.folder / label
        ids = {topic.name: topic.id for topic in restored.manifest.topics}
        files = segment_files(path, ids)
        trial.note("restored", label, restored.manifest.nonce, files)
        for finding in inspect_store(str(path)):
            if finding.severity == "damage":
                trial.note("error", label, f"a restored store is damaged: {finding}")

    # ------------------------------------------------------------ restores

    def restore(self, *, calm: bool = False) -> None:
        """Restore the store, with retries, and continue in the result."""
        trial = self._trial
        label = f"restored-{trial.next_number()}"
        trial.note("restores", label)
        restored = self._persist(label, lambda fs, bucket, path: restore(bucket, path, fs=fs, parallel=0), calm=calm)
        if restored is None:
            return
        trial.seen["restored"] += 1
        self.note_restored(label, restored)
        self._go_on(label)
        shutil.rmtree(trial.folder / label)

    def _persist(self, label: str, bring: Any, *, calm: bool = False) -> Restored | None:
        """Retry until it is done; None if there is no manifest, or it was refused or given up."""
        trial = self._trial
        path = trial.folder / label
        for attempt in range(_TRIES):
            fs = HurriedFaultyFileSystem()
            bucket = trial.new_bucket(label)
            bucket.calm = calm or attempt > _TRIES - 5
            if not bucket.calm and trial.rng.random() < 0.2:
                fs.die_at(trial.rng.randrange(1, trial.rng.choice((20, 100, 500))))
            try:
                return bring(fs, bucket, str(path))
            except ShippingRefused as error:
                is_complete = attempt and "is a store" in str(error)  # it was killed at the very last step
                if "no store was shipped" not in str(error) and not is_complete:
                    trial.note("refused", label, str(error))
                shutil.rmtree(path, ignore_errors=True)
                return None
            except (ObjectStoreError, Died):
                trial.seen["restore begun anew"] += 1
        trial.note("error", label, "it never came to its end")
        return None

    def _go_on(self, label: str) -> None:
        """Use the restored store as an independent one, which is shipped to another place."""
        trial = self._trial
        with LogStore(trial.folder / label, background=False, fs=NoSyncFileSystem(), clock=trial.clock) as store:
            self.note_found(label, "restore", store, finish=True)
            for _, log in logs_of(store):
                try:
                    values, keys = trial.records(log, 1)
                    log.append(values, keys)
                except SegmentlogError as error:
                    trial.note("error", label, f"{log} takes no records: {error}")

    def restore_damaged(self) -> None:
        """Damage one object and restore: the object is not needed, or the restore is refused."""
        trial = self._trial
        if MANIFEST_KEY not in trial.shelf.objects:
            return
        label = f"damaged-{trial.next_number()}"
        path = trial.folder / label
        bucket = trial.new_bucket(label)
        bucket.calm = True
        damaged = DamagedBucket(bucket, trial.rng, trial.shelf.objects)
        trial.note("restores", label)
        try:
            restored = restore(damaged, str(path), fs=NoSyncFileSystem(), parallel=0)  # type: ignore[arg-type]
            self.note_restored(label, restored)
            self._go_on(label)
        except (ShippingRefused, ObjectStoreError):
            trial.seen["damage refused"] += 1
        except Exception as error:
            trial.note("error", label, f"with {damaged.key} damaged: {type(error).__name__}: {error}")
        shutil.rmtree(path, ignore_errors=True)

    # ------------------------------------------------------------ takeovers

    def take_over(self, *, calm: bool = False) -> None:
        """Take over on another machine, with retries or until it gives up; the current owner gets no message."""
        trial = self._trial
        label = f"taken-over-{trial.next_number()}"
        gives_up = not calm and trial.rng.random() < 0.15

        def bring(fs: Any, bucket: FaultyBucket, path: str) -> Restored:
            try:
                return take_over(bucket, path, fs=fs, clock=trial.clock, parallel=0)
            except Died:
                if gives_up:
                    raise ShippingRefused(bucket.url, "no store was shipped") from None
                raise

        trial.note("restores", label)
        try:
            restored = self._persist(label, bring, calm=calm)
        except StoreFenced:
            trial.seen["overtaken"] += 1
            self._forget(trial.folder / label)
            return
        if restored is None:
            trial.seen["takeover given up"] += gives_up
            self._forget(trial.folder / label)
            return
        self.note_restored(label, restored)
        machine = trial.machine(label)
        trial.machines.append(machine)
        trial.note("owns", label, machine.epoch)
        self.note_found(label, "takeover", machine.store)
        trial.seen["taken over"] += 1

    def _forget(self, path: Path) -> None:
        shutil.rmtree(path, ignore_errors=True)
