"""A standby of `standby_trial`: a machine that follows the owner, is killed or stopped anywhere, and takes over."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from logs import NoSyncFileSystem
from objects.faulty_bucket import FaultyBucket
from objects.shipping_machine import Machine, content_of, logs_of, name_of, positions_of, segment_files, visible_in
from objects.shipping_restores import HurriedFaultyFileSystem

from segmentlog.errors import SegmentlogError, StoreFenced
from segmentlog.format.manifest import MANIFEST_KEY, Manifest
from segmentlog.format.server_file import ServerFile, ServerNode, encode_server_file
from segmentlog.inspection.store_inspection import inspect_store
from segmentlog.log.partition import Partition
from segmentlog.objects.ownership.binding import read_binding
from segmentlog.objects.restore.restore import Restored
from segmentlog.objects.standby.standby import Standby
from segmentlog.objects.takeover import take_over
from segmentlog.policy.takeover_decision import ProbeResult, TakeoverSettings
from segmentlog.records import TopicPartition
from segmentlog.store import LogStore
from segmentlog.testing.fault_injection import Died

if TYPE_CHECKING:
    from objects.standby_trial import StandbyTrial

_PORT = 9092
_HASTY = TakeoverSettings(silence_s=0, refused_s=0, unreached_s=0)
_STOPS = ("open", "pwritev", "rename", "replace", "unlink", "flock", "listdir", "sync_folder", "link")
"""Calls at which a standby may be stopped for a while."""


def name_server(path: Path, label: str) -> None:
    """Write the address of the server of a machine, which its shipper puts into the manifest."""
    (path / "@server").write_bytes(encode_server_file(ServerFile(1, label, (ServerNode(1, label, _PORT),))))


class StandbyMachine:
    """A folder, and the process that follows the owner in it. ``former``: local programs that still use the folder as
    the store of a former owner.
    """

    def __init__(self, trial: StandbyTrial, label: str, path: Path, former: Machine | None = None) -> None:
        self.label = label
        self.path = path
        self.is_busy = False
        self._trial = trial
        self._former = former
        self._former_epoch = 0 if former is None else former.epoch
        self._former_logs = [] if former is None else former.logs()
        self.is_set_aside = former is None
        self._settings = trial.rng.choice((TakeoverSettings(), _HASTY))
        self._answered_ms = 0
        self._standby: Standby | None = None
        self._bucket: FaultyBucket | None = None
        self._fs = HurriedFaultyFileSystem()
        self._done: Restored | None = None

    # ------------------------------------------------------------ the process

    def cycle(self, *, calm: bool = False) -> str:
        """Run one cycle. Return the role; empty if the process was killed in it, or is stopped."""
        if self.is_busy:
            return ""
        self.is_busy = True
        try:
            return self._cycle(calm=calm)
        except Died:
            self._trial.seen["standby died"] += 1
            self.kill()
            return ""
        finally:
            self.is_busy = False

    def _cycle(self, *, calm: bool) -> str:
        trial = self._trial
        if calm and self._standby is not None and not (self._bucket and self._bucket.calm):
            self.kill()
        standby = self._started(calm=calm)
        if not calm and trial.rng.random() < 0.2:
            self._fs.before(trial.rng.choice(_STOPS), self._stop)
        with mock.patch("segmentlog.objects.standby.standby.take_over", self._take_over):
            status = standby.run_cycle()
        if not self.is_set_aside and status.role in ("standby", "taking over"):
            self._look_at_former()
        if status.role == "owner":
            self._become_owner()
        elif status.role == "standby" and not status.error and trial.rng.random() < 0.3:
            self._look(standby)
        if calm and status.error:
            trial.note("error", self.label, f"its cycle fails though nothing else does: {status.error}")
        return status.role

    def _started(self, *, calm: bool) -> Standby:
        if self._standby is not None:
            return self._standby
        trial = self._trial
        self._fs, self._bucket = HurriedFaultyFileSystem(), trial.new_bucket(self.label)
        self._bucket.calm = calm
        if not calm and trial.rng.random() < 0.3:
            self._fs.die_at(trial.rng.randrange(1, trial.rng.choice((20, 100, 500, 2000))))
        self.path.mkdir(exist_ok=True)
        self._standby = Standby(
            self._bucket.url, str(self.path), probe=self._probe, fence_store=self._fence,
            nodes=(ServerNode(1, self.label, _PORT),), settings=self._settings, parallel=0,
            bucket=self._bucket, fs=self._fs, clock=trial.clock,
        )  # fmt: skip
        return self._standby

    def _stop(self) -> None:
        """Be stopped for a while, as by SIGSTOP."""
        self._trial.seen["standby stopped"] += 1
        self._trial.clock.advance(self._trial.rng.choice((100, 5_000, 70_000)))
        self._trial.meanwhile()

    def kill(self) -> None:
        """End the process at once, without any more of its calls."""
        self._fs.die_at(1)
        with suppress(Died):
            self._fs.stat("/")
        with suppress(Died):
            if self._standby is not None:
                self._standby.close()
        self._standby = None

    def close(self) -> None:
        """End the process, and the programs that use the store of the former owner."""
        self.kill()
        self.drop_former()

    @property
    def has_never_been_answered(self) -> bool:
        """Whether no owner has ever answered it: then it never takes over by itself."""
        return self._standby is not None and not self._standby._watch.answered_owner

    def drop_former_processes(self) -> None:
        """End the former owner's programs before this machine follows the new owner."""
        if self._former is not None:
            self._former.close()
            self._former_logs = []

    def drop_former(self) -> None:
        """End the programs that still have the store of the former owner open."""
        former, self._former = self._former, None
        if former is not None:
            former.bucket.calm = True
            with suppress(SegmentlogError):
                former.close()

    def _probe(self, manifest: Manifest) -> list[ProbeResult]:
        calm = self._bucket is not None and self._bucket.calm
        found = [self._trial.probe(node.host, manifest.owner.epoch, calm=calm) for node in manifest.owner.nodes]
        if ProbeResult.ALIVE in found:
            self._answered_ms = self._trial.clock.now_ms()
        return found

    def _fence(self) -> None:
        """Do as the server: open the store, so that its shipper notices the new owner."""
        trial = self._trial
        store = LogStore(self.path, background=False, fs=NoSyncFileSystem(), clock=trial.clock)
        try:
            bucket = trial.new_bucket(self.label)
            assert self._bucket is not None
            bucket.calm = self._bucket.calm
            shipper = trial.new_shipper(store._topics, bucket)
            try:
                shipper.run_cycle()
            except StoreFenced:
                assert self._former is not None
                trial.note("fenced", self._former.label)
            finally:
                shipper.close()
        finally:
            store.close()

    # ------------------------------------------------------------ takeovers

    def _take_over(self, *args: Any, **options: Any) -> Restored:
        trial = self._trial
        self.drop_former()  # they may append again as soon as this machine is the owner
        trial.note("restores", self.label)
        trial.seen["standby begins a takeover"] += 1
        since_ms = max(self._answered_ms, trial.shelf.modified_ms[MANIFEST_KEY])
        is_early = trial.clock.now_ms() - since_ms < 1000 * self._settings.refused_s
        is_hasty = is_early and not trial.shelf.is_handed_over()
        self._done = take_over(*args, **options)
        if is_hasty and options["decided_on"]:
            trial.note("error", self.label, "it has taken over, and the owner answered or shipped just before")
        return self._done

    def _become_owner(self) -> None:
        trial = self._trial
        self.kill()
        self.drop_former()
        name_server(self.path, self.label)
        done = self._done
        if done is None:
            trial.note("error", self.label, "it is the owner, and has never taken over")
            return
        ids = {topic.name: topic.id for topic in done.manifest.topics}
        trial.note("restored", self.label, done.manifest.nonce, segment_files(self.path, ids))
        for finding in inspect_store(str(self.path)):
            if finding.severity == "damage":
                trial.note("error", self.label, f"a store that was taken over is damaged: {finding}")
        trial.add_owner(self)

    # ------------------------------------------------------------ the former store

    @property
    def _is_fenced(self) -> bool:
        binding = read_binding(NoSyncFileSystem(), str(self.path))
        return binding is None or bool(binding.fenced)

    def use_former_store(self) -> None:
        """Append or change topics, as a local program that has opened the store before."""
        trial, former = self._trial, self._former
        if former is None or not self._is_fenced:
            return
        trial.seen["local program of a former owner"] += 1
        how = trial.rng.choice(("append", "send", "open"))
        if (self.path / "@replica").exists() and trial.rng.random() < 0.5:
            how = trial.rng.choice(("create", "delete", "reset"))
        log = trial.rng.choice(self._former_logs) if self._former_logs else None
        if log is None:
            return
        try:
            self._use(how, log, former.store)
        except (SegmentlogError, Died):
            return
        trial.note("error", former.label, f"{how} of a local program of a former owner is accepted")

    def _use(self, how: str, log: Partition, store: LogStore) -> None:
        if how == "append":
            log.append([b"0//never"])
        elif how == "send":
            producer = store.producer(linger_ms=0)
            try:
                producer.send(log.topic, b"0//never").result()
            finally:
                with suppress(SegmentlogError):
                    producer.close()
        elif how == "create":
            store.create_topic(f"mine{self._trial.next_number()}")
        elif how == "delete":
            store.delete_topic(log.topic)
        elif how == "reset":
            store.groups.reset("mine", {TopicPartition(log.topic, log.number): log.log_start_offset})
        else:
            store.topic(log.topic).partition(log.number).append([b"0//never"])

    def _look_at_former(self) -> None:
        """Write down what the folder of the former store contains."""
        assert self._former is not None
        self.is_set_aside = True
        self._trial.seen["set aside"] += 1
        folder = self.path / "@former" / str(self._former_epoch)
        contents: dict[str, tuple[int, list[tuple[int, str]]]] = {}
        with LogStore(folder, background=False, read_only=True, clock=self._trial.clock) as store:
            for place, log in logs_of(store):
                evicted = [segment.end_offset for segment in log.segments() if segment.remote]
                start = max(log.log_start_offset, log.shipped_offset, *evicted)  # all of these were shipped
                for lost in log.lost_ranges():
                    if lost.base_offset <= start < lost.end_offset:
                        start = lost.end_offset
                contents[place] = (
                    start,
                    [
                        (record.offset, name_of(record).partition("@")[0])
                        for batch in log.read(start)
                        for record in batch
                    ],
                )
        self._trial.note("set aside", self._former.label, contents)

    # ------------------------------------------------------------ what readers see

    def _look(self, standby: Standby) -> None:
        replica = standby._replica
        assert replica is not None
        manifest = replica.manifest
        assert manifest is not None
        with self._calm(), LogStore(self.path, background=False, clock=self._trial.clock) as store:
            if not store.read_only:
                self._trial.note("error", self.label, "the folder of a standby can be written to")
            positions = positions_of(store)
            contents: dict[str, Any] = {}
            for place, log in logs_of(store, internal=True):
                contents[place] = (
                    {"start": log.log_start_offset, "end": log.log_end_offset, "records": [], "visible": []}
                    if log.topic.startswith("__")
                    else content_of(log) | {"visible": visible_in(log)}
                )
        files = segment_files(self.path, {topic.name: topic.id for topic in manifest.topics})
        self._trial.note("followed", self.label, manifest.nonce, files, contents, positions)
        self._trial.seen["read at a standby"] += 1

    @contextmanager
    def _calm(self) -> Iterator[None]:
        assert self._bucket is not None
        before, self._bucket.calm = self._bucket.calm, True
        try:
            yield
        finally:
            self._bucket.calm = before

    def __repr__(self) -> str:
        return f"<{self.label} in {os.path.basename(self.path)}>"
