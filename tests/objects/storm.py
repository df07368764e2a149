"""One seeded life of a store that is shipped: its machines, what each of them handed out, and what a restore must hold.

    claims      who was given an offset: no two records ever get the same one, on whatever machine
    shipped     records that were said to be shipped, by the state pages that `ack="shipped"` waits for
    given up    offsets that somebody asked to have removed: they may be missing from a restore

Every call that the object store gets may fail as `storm_bucket` knows; the process that ships may die in any of them.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import uuid
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from logs import FakeClock, NoSyncFileSystem
from objects.storm_bucket import Memory, StormBucket

from segmentlog.errors import (
    GrantExhausted,
    ObjectStoreError,
    ProducerBusy,
    SegmentlogError,
    ShippingRefused,
    StoreFenced,
    TransactionAborted,
    UnknownTopic,
)
from segmentlog.inspection.store import inspect_store
from segmentlog.log.partition import Partition
from segmentlog.objects.bucket import Bucket
from segmentlog.objects.restoring import restore
from segmentlog.objects.shipper import Shipper
from segmentlog.objects.takeover import take_over
from segmentlog.objects.tidying import sweep
from segmentlog.store import LogStore
from segmentlog.testing.faults import Died

GRACE_MS = 50
_TOPIC = {"segment_bytes": 700, "index_interval_bytes": 100}
_TRIES = 60


class Where(NamedTuple):
    """A partition of whatever machine."""

    topic_id: str
    number: int


class Broken(AssertionError):
    """A promise was broken."""


class Machine:
    """A folder with a store, the process that has it open, and the one that ships it."""

    def __init__(self, path: Path, bucket: StormBucket, clock: FakeClock, make_shipper: Callable[..., Shipper]) -> None:
        self.path = path
        self.bucket = bucket
        self._clock = clock
        self._make_shipper = make_shipper
        self.waiting: dict[Where, list[int]] = {}
        """Offsets that were handed out here, and are not said to be shipped."""
        self.open()

    def open(self) -> None:
        """Open the store, with a new shipper."""
        self.store = LogStore(self.path, background=False, fs=NoSyncFileSystem(), clock=self._clock)
        self.new_shipper()

    def new_shipper(self) -> None:
        """That of another process, which knows nothing of the one before."""
        self.shipper = self._make_shipper(
            self.store._topics, self.bucket, interval_ms=10, grace_ms=GRACE_MS, parallel=0
        )

    def kill_shipper(self) -> None:
        """The kernel frees its lock, and that is all."""
        self.shipper.close()
        self.new_shipper()

    def close(self) -> None:
        """Both processes end."""
        self.shipper.close()
        self.store.close()

    def logs(self) -> list[Partition]:
        """Those of users' topics."""
        return [log for name in self.store.topics() for log in self.store.topic(name).partitions()]


class Storm:
    """A trial. ``seen`` counts what was tried, over all trials."""

    def __init__(
        self, folder: Path, seed: object, seen: Counter[str], make_shipper: Callable[..., Shipper] = Shipper,
        bring: Callable[[Bucket, str], object] | None = None,
    ) -> None:  # fmt: skip
        self.rng = random.Random(str(seed))
        self.seen = seen
        self._folder = folder
        self._make_shipper = make_shipper
        self._bring = bring or (lambda bucket, path: restore(bucket, path, fs=NoSyncFileSystem(), parallel=1))
        self.clock = FakeClock()
        self.memory = Memory()
        self.claims: dict[tuple[Where, int], bytes] = {}
        self.shipped: set[tuple[Where, int]] = set()
        self.given_up: dict[Where, set[int]] = {}
        self.compacted: set[str] = set()
        self.committed: list[list[tuple[Where, int]]] = []
        """What was committed together."""
        self.gone: set[str] = set()
        """Ids of topics that were deleted."""
        self._number = 0
        self.owner = self._machine()
        self.others: list[Machine] = []
        """Those that were taken over, and may not know of it yet."""
        with self._deterministic():
            self.owner.store.create_topic("a", 2, **_TOPIC)
            self.compacted.add(self.owner.store.create_topic("keys", 1, cleanup_policy="compact", **_TOPIC).id)

    def _machine(self) -> Machine:
        self._number += 1
        bucket = StormBucket(self.memory, self.rng, self.seen)
        return Machine(self._folder / f"machine-{self._number}", bucket, self.clock, self._make_shipper)

    # ------------------------------------------------------------ a life

    def run(self, steps: int) -> None:
        """So many steps, and a last look. Raises `Broken`."""
        try:
            with self._deterministic():
                for _ in range(steps):
                    self.clock.advance(self.rng.choice((1, 5, 20, 100)))
                    self._step()
                self._end()
        finally:
            for machine in (self.owner, *self.others):
                machine.bucket.calm = True
                machine.close()

    def _deterministic(self) -> contextlib.ExitStack:
        """Within, nothing is drawn but from the seed, and nobody waits."""
        stack = contextlib.ExitStack()
        draws = random.Random(self.rng.random())
        for what, value in (
            ("log.append.shipped.GRANT_WAIT_S", 0),
            ("log.append.appender.OFFSET_CEILING_STEP", 10),
            ("log.granting.OFFSET_CEILING_STEP", 20),
            ("policy.shipping.WINDOW_MIN", 60),
            ("objects.uploads.nonce", lambda: f"{draws.getrandbits(48):012x}"),
            ("objects.tidying.nonce", lambda: f"{draws.getrandbits(48):012x}"),
            ("objects.takeover.nonce", lambda: f"{draws.getrandbits(48):012x}"),
            ("topics.administration.new_topic_id", lambda: str(uuid.UUID(int=draws.getrandbits(128), version=4))),
        ):
            stack.enter_context(mock.patch(f"segmentlog.{what}", value))
        return stack

    def _step(self) -> None:
        kinds: dict[str, tuple[int, Callable[[Machine], None]]] = {
            "append": (30, self._append), "tick": (24, self._tick), "transaction": (6, self._transact),
            "kill": (3, self._kill), "restart": (3, self._restart), "roll": (5, self._roll), "flush": (5, self._flush),
            "trim": (3, self._trim), "truncate": (2, self._truncate), "compact": (4, self._compact),
            "recreate": (1, self._recreate), "rename": (1, self._rename), "add partition": (1, self._add),
            "restore": (2, lambda _: self.check_restore()), "takeover": (2, lambda _: self._take_over()),
            "second shipper": (2, self._second_shipper), "gc": (2, self._sweep),
        }  # fmt: skip
        (kind,) = self.rng.choices(list(kinds), [weight for weight, _ in kinds.values()])
        machine = self.owner
        if self.others and self.rng.random() < 0.25:
            machine = self.rng.choice(self.others)
            self.seen["a zombie at work"] += 1
        self.seen[kind] += 1
        with suppress(StoreFenced, GrantExhausted, ObjectStoreError, ProducerBusy, TransactionAborted, UnknownTopic):
            kinds[kind][1](machine)
        self._note_shipped()

    def _note_shipped(self) -> None:
        """What whoever waits for it takes for shipped."""
        for machine in (self.owner, *self.others):
            for log in machine.logs():
                where = Where(log.topic_id, log.number)
                if log.shipped_offset > log.durable_offset:
                    raise Broken(f"{where}: shipped up to {log.shipped_offset}, on disk up to {log.durable_offset}")
                waiting = machine.waiting.get(where, [])
                self.shipped.update((where, offset) for offset in waiting if offset < log.shipped_offset)
                machine.waiting[where] = [offset for offset in waiting if offset >= log.shipped_offset]

    # ------------------------------------------------------------ what users do

    def _pick(self, machine: Machine) -> Partition:
        return self.rng.choice(machine.logs())

    def _claim(self, machine: Machine, log: Partition, offset: int, value: bytes) -> None:
        where = Where(log.topic_id, log.number)
        if self.claims.setdefault((where, offset), value) != value:
            raise Broken(f"{log}: offset {offset} was given to {self.claims[where, offset]!r}, and to {value!r}")
        machine.waiting.setdefault(where, []).append(offset)

    def _values(self, count: int) -> list[bytes]:
        self._number += count
        return [b"%d " % number + b"x" * 30 for number in range(self._number - count, self._number)]

    def _append(self, machine: Machine) -> None:
        log = self._pick(machine)
        values = self._values(self.rng.randrange(1, 6))
        keys = [b"k%d" % self.rng.randrange(5) for _ in values] if log.topic_id in self.compacted else None
        base = log.append(values, keys, ack=self.rng.choice((None, "written", "durable")))
        for at, value in enumerate(values):
            self._claim(machine, log, base + at, value)

    def _transact(self, machine: Machine) -> None:
        logs = [log for log in machine.logs() if log.topic_id not in self.compacted]
        values = self._values(3)
        done = []
        with machine.store.producer(name=self.rng.choice("pq"), linger_ms=0) as producer:
            with producer.transaction():
                for value in values:
                    log = self.rng.choice(logs)
                    sent = producer.send(log.topic, value, partition=log.number).result()
                    self._claim(machine, log, sent.offset, value)
                    done.append((Where(log.topic_id, log.number), sent.offset))
            self.committed.append(done)

    def _flush(self, machine: Machine) -> None:
        for log in machine.logs():
            log.flush()

    def _roll(self, machine: Machine) -> None:
        self._pick(machine).roll()

    def _trim(self, machine: Machine) -> None:
        log = self._pick(machine)
        offset = self.rng.randrange(log.log_start_offset, min(log.log_end_offset, log.log_start_offset + 30) + 1)
        self._give_up(log, range(log.log_start_offset, offset))
        log.trim(offset)

    def _truncate(self, machine: Machine) -> None:
        log = self._pick(machine)
        if log.last_stable_offset < log.log_end_offset:
            return
        known = [offset for where, offset in self.claims if where == (log.topic_id, log.number)]
        tail = [offset for offset in known if log.log_start_offset <= offset < log.log_end_offset][-8:]
        if tail:
            offset = self.rng.choice(tail)
            self._give_up(log, [one for one in known if one >= offset])
            log.truncate(offset)
            # Their markers may be gone with it: whoever cuts a log off does that.
            where = Where(log.topic_id, log.number)
            self.committed = [done for done in self.committed if where not in {one for one, _ in done}]

    def _give_up(self, log: Partition, offsets: object) -> None:
        self.given_up.setdefault(Where(log.topic_id, log.number), set()).update(offsets)  # type: ignore[call-overload]

    def _compact(self, machine: Machine) -> None:
        for log in machine.logs():
            if log.topic_id in self.compacted:
                log.roll()
                log.compact()

    def _recreate(self, machine: Machine) -> None:
        store = machine.store
        if machine is not self.owner or "a" not in store.topics():
            return
        self.gone.add(store.topic("a").id)
        store.delete_topic("a")
        store.create_topic("a", 2, **_TOPIC)

    def _rename(self, machine: Machine) -> None:
        for old, new in (("a", "b"), ("b", "a")):
            if old in machine.store.topics() and new not in machine.store.topics():
                machine.store.rename_topic(old, new)
                return

    def _add(self, machine: Machine) -> None:
        for name in ("a", "b"):
            if name in machine.store.topics() and machine.store.topic(name).partition_count < 4:
                machine.store.alter_topic(name, partitions=machine.store.topic(name).partition_count + 1)

    # ------------------------------------------------------------ what those do who ship

    def _tick(self, machine: Machine) -> None:
        try:
            machine.shipper.tick()
        except Died:
            self.seen["died shipping"] += 1
            machine.kill_shipper()
        except StoreFenced:
            self._must_be_fenced(machine)
            raise
        except ShippingRefused as error:
            raise Broken(f"{machine.path.name} may not ship any more: {error}") from error

    def _must_be_fenced(self, machine: Machine) -> None:
        if machine is self.owner:
            raise Broken("the owner was fenced")
        self.seen["fenced"] += 1
        for log in machine.logs():
            if log.topic_id in self.gone:
                continue
            with suppress(StoreFenced):
                log.append([b"after the fence"], [b"k"])
                raise Broken(f"{log}: appended to after its store was fenced")

    def _kill(self, machine: Machine) -> None:
        machine.kill_shipper()

    def _restart(self, machine: Machine) -> None:
        machine.close()
        machine.open()

    def _second_shipper(self, machine: Machine) -> None:
        """Another process is told to ship the same store: it waits, as long as the first one is there."""
        second = Shipper(machine.store._topics, machine.bucket, parallel=0)
        try:
            if machine.shipper.is_owner and second.tick().put:
                raise Broken("two ship at once")
        except Died:
            pass
        finally:
            second.close()

    def _sweep(self, machine: Machine) -> None:
        with suppress(Died, ShippingRefused):
            sweep(machine.bucket, self.clock.now_ms(), grace_ms=GRACE_MS)

    def _take_over(self) -> None:
        """Another machine does, as often as it takes; whoever has it now is told nothing."""
        if len(self.others) > 3:
            return
        self._number += 1
        path = self._folder / f"machine-{self._number}"
        bucket = StormBucket(self.memory, self.rng, self.seen)
        for attempt in range(_TRIES):
            bucket.calm = attempt > _TRIES - 5
            try:
                take_over(bucket, str(path), fs=NoSyncFileSystem(), clock=self.clock)
                break
            except ShippingRefused as error:
                if "no store was shipped" in str(error):
                    shutil.rmtree(path, ignore_errors=True)
                    return
                raise Broken(f"a takeover was refused: {error}") from error
            except (ObjectStoreError, Died):
                self.seen["takeover begun anew"] += 1
        else:
            raise Broken("a takeover never came to its end")
        bucket.calm = False
        self.others.append(self.owner)
        self.owner = Machine(path, bucket, self.clock, self._make_shipper)
        self._check(self.owner.store)
        self.seen["taken over"] += 1

    # ------------------------------------------------------------ what has to hold

    def check_restore(self) -> None:
        """Restore what lies there, and compare it with all that was said."""
        path = self._folder / "restored"
        bucket = StormBucket(self.memory, self.rng, self.seen)
        bucket.calm = True
        try:
            self._bring(bucket, str(path))
        except ShippingRefused as error:
            if self.shipped:
                raise Broken(f"a restore was refused: {error}") from error
            shutil.rmtree(path, ignore_errors=True)
            return
        damage = [one for one in inspect_store(str(path)) if one.severity == "damage"]
        if damage:
            raise Broken(f"a restored store is damaged: {damage[0]}")
        with LogStore(path, background=False, fs=NoSyncFileSystem(), clock=self.clock) as store:
            self._check(store)
            self._check_transactions(store)
        shutil.rmtree(path)
        self.seen["restored"] += 1

    def _check(self, store: LogStore) -> None:
        logs = {
            Where(log.topic_id, log.number): log for name in store.topics() for log in store.topic(name).partitions()
        }
        there = {where: self._check_log(where, log) for where, log in logs.items()}
        for where, offset in self.shipped:
            if where.topic_id in self.gone | self.compacted or offset in self.given_up.get(where, ()):
                continue
            if offset not in there.get(where, {}):
                value = self.claims[where, offset]
                raise Broken(f"{where}: {value!r} at offset {offset} was shipped, and is not there")

    def _check_transactions(self, store: LogStore) -> None:
        """What was committed together is there together, or not at all."""
        store.finish_transactions()
        visible = {
            (Where(log.topic_id, log.number), record.offset)
            for name in store.topics() for log in store.topic(name).partitions()
            for batch in log.read(log.log_start_offset, isolation="read_committed") for record in batch
        }  # fmt: skip
        for done in self.committed:
            wanted = {
                (where, offset)
                for where, offset in done
                if where.topic_id not in self.gone and offset not in self.given_up.get(where, ())
            }
            if wanted & visible and not wanted <= visible:
                raise Broken(f"of a transaction {sorted(wanted & visible)} is there, {sorted(wanted - visible)} is not")

    def _check_log(self, where: Where, log: Partition) -> dict[int, bytes | None]:
        """What is in a log; all of it was appended there once, and what is missing is told."""
        there: dict[int, bytes | None] = {}
        gaps: list[tuple[int, int]] = []
        reached = log.log_start_offset
        for batch in log.read(log.log_start_offset, control=True):
            if batch.base_offset > reached:
                gaps.append((reached, batch.base_offset))
            reached = batch.next_offset
            if not batch.header.is_control:
                there.update((record.offset, record.value) for record in batch)
        for offset, value in there.items():
            claim = self.claims.get((where, offset))
            if claim != value:
                raise Broken(f"{where}: offset {offset} holds {value!r}, and was given to {claim!r}")
        if where.topic_id in self.compacted:
            return there
        for base, end in gaps:
            for lost in log.lost_ranges():
                if lost.base_offset <= base < lost.end_offset:
                    base = lost.end_offset
            if base < end:
                raise Broken(f"{where}: nothing tells why offsets {base} to {end - 1} are gone")
        return there

    def _end(self) -> None:
        """Once nothing fails any more all is shipped, and everybody who was taken over finds out."""
        for machine in (self.owner, *self.others):
            machine.bucket.calm = True
        while self.memory.late:
            self.memory.late.pop()()
        with suppress(SegmentlogError):
            self._flush(self.owner)
        for _ in range(3):
            with suppress(ObjectStoreError):  # of uploads that failed before
                self.owner.shipper.tick()
        self.owner.shipper.ship()
        self._note_shipped()
        for log in self.owner.logs():
            if log.shipped_offset != log.log_end_offset:
                raise Broken(f"{log} is shipped up to {log.shipped_offset} only")
        self.clock.advance(30_000)
        for machine in self.others:
            with suppress(StoreFenced):
                with suppress(ObjectStoreError):
                    machine.shipper.tick()
                machine.shipper.tick()
                raise Broken(f"{machine.path.name} was taken over, and does not know")
        self.check_restore()
        self._check_rubbish()

    def _check_rubbish(self) -> None:
        """What is needed is there; what is not goes, in the end."""
        manifest = self.owner.shipper.manifest
        assert manifest is not None
        missing = {stored.key for stored in manifest.objects()} - self.memory.objects.keys()
        if missing:
            raise Broken(f"the manifest refers to {sorted(missing)}, which are gone")
        for _ in range(3):
            self.clock.advance(GRACE_MS)
            sweep(self.owner.bucket, self.clock.now_ms(), grace_ms=GRACE_MS)
        left = self.memory.objects.keys() - {stored.key for stored in manifest.objects()} - {"manifest.json"}
        if left:
            raise Broken(f"nobody refers to {sorted(left)}, and it stays for ever")
