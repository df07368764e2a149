"""A seeded life of a store that is shipped: its machines work while requests fail and processes are killed.

Events are recorded for `shipping_checker`. The trial itself only checks that all machines can continue in the end.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest import mock

from logs import FakeClock
from objects.faulty_bucket import FaultyBucket, Shelf
from objects.shipping_checker import Checker, Event
from objects.shipping_follower import RecordWaiter, Visitor
from objects.shipping_machine import Machine, MakeShipper, OpenTransaction, Position
from objects.shipping_restores import Restores

from segmentlog.errors import (
    ObjectStoreError,
    OffsetGrantExhausted,
    ProducerBusy,
    ProducerFenced,
    SegmentlogError,
    ShippingRefused,
    StoreFenced,
    TransactionAborted,
    UnknownTopic,
)
from segmentlog.log.partition import Partition
from segmentlog.objects.local.partition_snapshot import LocalPartition
from segmentlog.objects.manifest.garbage_collection import sweep
from segmentlog.objects.upload.shipper import Shipper
from segmentlog.records import TopicPartition
from segmentlog.testing.fault_injection import Died
from segmentlog.topics.topic_registry import Topics

GRACE_MS = 50
_TOPIC = {"segment_bytes": 700, "index_interval_bytes": 100}
_MACHINES_MAX = 5
_OFTEN = {"append": 26, "tick": 24, "flush": 5, "roll": 4, "read": 3}
_SELDOM = {
    "begin transaction": 3, "send": 4, "commit": 4, "abort": 1, "commit positions": 2, "trim": 2, "truncate": 1,
    "compact": 3, "recreate": 1, "rename": 1, "add partition": 1, "new topic": 1, "gc": 2, "second shipper": 1,
    "copy": 1, "restore": 2, "damaged restore": 1, "takeover": 2, "hand over": 2, "give up": 1,
    "follow": 8, "kill follower": 1,
}  # fmt: skip
_ALONE = {"kill": 2, "restart": 2, "power cut": 2}
"""Steps that cannot happen to a machine during its own shipping, except by its death."""
KINDS = (*_OFTEN, *_SELDOM, *_ALONE)


class Broken(AssertionError):
    """A promise was broken."""


def make_shipper(topics: Topics, *args: Any, **options: Any) -> Shipper:
    """Return a shipper without threads. Every second machine grants offsets on request."""
    on_request = sum(os.path.basename(topics.path).encode()) % 2 == 1
    return Shipper(
        topics, *args, interval_ms=10, grace_ms=GRACE_MS, parallel=0, grants_on_request=on_request, **options
    )  # fmt: skip


class Trial:
    """``seen`` counts the steps of all trials. ``often`` replaces the weights of steps."""

    def __init__(
        self,
        folder: Path,
        seed: object,
        seen: Counter[str],
        new_shipper: MakeShipper = make_shipper,
        *,
        in_parts: bool | None = None,
        often: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self.rng = random.Random(str(seed))
        self.seen = seen
        self.folder = folder
        self.events: list[Event] = []
        self.clock = FakeClock()
        self.shelf = Shelf(self.clock, self.note)
        self.compacted: set[str] = set()
        self.machines: list[Machine] = []
        """The machines; the last one took over last."""
        self._new_shipper = new_shipper
        self._busy = {**_OFTEN, **_SELDOM, **often}
        """Steps and their weights."""
        self._number = 0
        self._depth = 0
        self._restores = Restores(self)
        self._followers = (RecordWaiter(self), Visitor(self))
        self._has_little_room = self.rng.random() < 0.2
        seen["little room"] += self._has_little_room
        draws = random.Random(f"{seed} tiered")
        self._topic = dict(_TOPIC)
        if draws.random() < 0.5:
            seen["tiered"] += 1
            self._topic |= {"remote_storage_enable": True, "local_retention_ms": draws.choice((0, 0, 300))}
        self._reading = FaultyBucket("reader", self.shelf, draws, seen)
        """The bucket that stores read from: its faults never kill the reader, and come only within `_failing_reads`."""
        self._reading.calm = True
        self._waits_for_uploads = self.rng.random() < 0.2
        seen["sealed pieces wait"] += self._waits_for_uploads
        self._inline_bytes = self.rng.choice((0, 0, 400, 8 << 10))
        seen["tails in the manifest"] += self._inline_bytes > 0
        drawn = self.rng.random() < 0.4
        self._puts_in_parts = drawn if in_parts is None else in_parts
        seen["segments in parts"] += self._puts_in_parts

    def note(self, kind: str, *rest: Any) -> None:
        """Write an event down."""
        self.events.append([kind, *rest])

    def next_number(self) -> int:
        """Return a number that is not in use."""
        self._number += 1
        return self._number

    def run(self, steps: int) -> None:
        """Run ``steps`` steps, and check the end. Raises `Broken`."""
        try:
            with self._deterministic():
                self._begin()
                for _ in range(steps):
                    self.clock.advance(self.rng.choice((1, 5, 20, 100)))
                    self.step({**self._busy, **_ALONE})
                self._end()
        finally:
            for machine in self.machines:
                machine.bucket.calm = True
                machine.close()
            for follower in self._followers:
                follower.close()
        if wrong := Checker(GRACE_MS, self.compacted).check(self.events):
            raise Broken("\n  ".join(wrong[:8]))

    @contextmanager
    def _deterministic(self) -> Iterator[None]:
        """Draw everything from the seed, replace waiting, and let other machines work during scans of a shipper."""
        draws = random.Random(self.rng.random())
        real = LocalPartition.snapshot

        def look(local: LocalPartition) -> object:
            if not self._depth and self.rng.random() < 0.04:
                self.seen["between two looks"] += 1
                self.meanwhile()
            return real(local)

        def nonce() -> str:
            return f"{draws.getrandbits(48):012x}"

        with contextlib.ExitStack() as stack:
            for what, value in (
                ("log.append.wait_shipped.GRANT_WAIT_S", 0),
                ("log.append.appender.OFFSET_CEILING_STEP", 10),
                ("log.offset_grants.OFFSET_CEILING_STEP", 20),
                ("policy.upload_policy.GRANT_MIN", 60),
                ("objects.ownership.claim.FILES_PARALLEL", 0),
                ("objects.upload.hand_over_steps._TRANSACTIONS_MS", self.rng.choice((0, 0, 50))),
                *[
                    (f"{room}.TAIL_BYTES", 800)
                    for room in ("policy.upload_policy", "objects.upload.plan")
                    if self._has_little_room
                ],
                *[("policy.upload_policy.SEALED_PIECE_BYTES", 100) for _ in range(self._waits_for_uploads)],
                *[("objects.upload.tail_uploader._ALONE_BYTES", 200) for _ in range(self._waits_for_uploads)],
                ("policy.upload_policy.INLINE_BYTES", self._inline_bytes),
                *[("objects.upload.multipart.PART_BYTES", 150) for _ in range(self._puts_in_parts)],
                ("objects.upload.multipart.PAUSE_S", 0),
                ("objects.tier.block_cache.BLOCK_BYTES", 64),
                ("objects.tier.remote_reader.open_bucket", lambda url: self._reading),
                ("objects.tier.remote_reader.PARALLEL", 0),
                ("objects.bucket.upload_pool.new_nonce", nonce),
                ("objects.manifest.garbage_collection.new_nonce", nonce),
                ("objects.takeover.new_nonce", nonce),
                ("objects.local.partition_snapshot.LocalPartition.snapshot", look),
                ("topics.topic_admin.new_topic_id", lambda: str(uuid.UUID(int=draws.getrandbits(128), version=4))),
            ):
                stack.enter_context(mock.patch(f"segmentlog.{what}", value))
            yield

    # ------------------------------------------------------------ machines

    @property
    def owner(self) -> Machine:
        """The machine that completed the last takeover."""
        return self.machines[-1]

    def new_bucket(self, label: str) -> FaultyBucket:
        """Return a bucket for one process."""
        return FaultyBucket(label, self.shelf, self.rng, self.seen, self.meanwhile)

    def machine(self, label: str) -> Machine:
        """Return a machine with the store in the folder of that name."""
        return Machine(
            label, self.folder / label, self.clock, self.note, lambda: self.new_bucket(label), self._new_shipper,
            apart=self.rng.random() < 0.3,
        )  # fmt: skip

    def _begin(self) -> None:
        """Create a store, and seldom a rival that is shipped to the same place: the first one owns the place."""
        made = [self.machine("m1"), *([self.machine("rival")] if self.rng.random() < 0.15 else [])]
        self.machines += made
        for machine in made:
            machine.store.create_topic("a", 2, **self._topic)
            self.compacted.add(machine.store.create_topic("keys", 1, cleanup_policy="compact", **self._topic).id)
        if len(made) == 1:
            return
        self.seen["rival"] += 1
        while not any(machine.shipper.manifest for machine in made):
            self._do("append", self._append, self.rng.choice(made))
            self._do("tick", self._tick, self.rng.choice(made))
        has_it = next(machine for machine in made if machine.shipper.manifest)
        for machine in made:
            if machine is not has_it:
                self.machines.remove(machine)
                machine.bucket.calm = True
                with suppress(ShippingRefused):
                    machine.shipper.run_cycle()
                    self.note("error", machine.label, "it ships to a place that another store is shipped to")
                machine.close()

    # ------------------------------------------------------------ steps

    def meanwhile(self) -> None:
        """Let others work while a process waits for an answer."""
        if self._depth:
            return
        self._depth += 1
        for _ in range(self.rng.choice((1, 1, 2, 4))):
            self.step(self._busy)
        self._depth -= 1

    def step(self, weights: dict[str, int]) -> None:
        """Do one random step."""
        (kind,) = self.rng.choices(list(weights), list(weights.values()))
        machine = self.owner
        if len(self.machines) > 1 and self.rng.random() < 0.2:
            machine = self.rng.choice(self.machines[:-1])
            self.seen["a zombie at work"] += 1
        if machine.is_busy and kind in ("tick", *_ALONE):
            return
        self.seen[kind] += 1
        self._do(kind, getattr(self, f"_{kind.replace(' ', '_')}"), machine)

    def _do(self, kind: str, what: Callable[[Machine], object], machine: Machine) -> None:
        with suppress(
            StoreFenced, OffsetGrantExhausted, ObjectStoreError, ProducerBusy, ProducerFenced, TransactionAborted,
            UnknownTopic,
        ):  # fmt: skip
            what(machine)
        for one in self.machines:
            one.observe()

    # ------------------------------------------------------------ what users do

    def _pick(self, machine: Machine) -> Partition:
        return self.rng.choice(machine.logs())

    def records(self, log: Partition, count: int) -> tuple[list[bytes], list[bytes] | None]:
        """Values, and keys where there are any."""
        keys = [b"k%d" % self.rng.randrange(5) for _ in range(count)] if log.topic_id in self.compacted else None
        values = [b"%d/%s/" % (self.next_number(), key) + b"x" * 30 for key in keys or [b""] * count]
        return values, keys

    def _appended(self, machine: Machine, log: Partition, base: int, values: list[bytes]) -> list[tuple[str, int]]:
        place = f"{log.topic_id}/{log.number}"
        names = [value.rpartition(b"/")[0].decode() for value in values]
        self.note("appended", machine.label, place, [(base + at, name) for at, name in enumerate(names)])
        return [(place, base + at) for at in range(len(names))]

    def _append(self, machine: Machine) -> None:
        log = self._pick(machine)
        values, keys = self.records(log, self.rng.randrange(1, 6))
        self._appended(
            machine, log, log.append(values, keys, ack=self.rng.choice((None, "written", "durable"))), values
        )

    @contextmanager
    def _failing_reads(self) -> Iterator[None]:
        """Let reads from the object store fail."""
        self._reading.calm = False
        try:
            yield
        except Died:  # a reader does not die here: it sees a failed request
            raise ObjectStoreError(self._reading.url, "get", "the connection was closed") from None
        finally:
            self._reading.calm, self._reading.dead = True, False

    def _read(self, machine: Machine) -> None:
        log = self._pick(machine)
        with self._failing_reads():
            list(log.read(log.log_start_offset))
        self.note("read", machine.label, f"{log.topic_id}/{log.number}", self._restores.content(log)["records"])

    def _flush(self, machine: Machine) -> None:
        for log in machine.logs():
            log.flush()

    def _roll(self, machine: Machine) -> None:
        self._pick(machine).roll()

    def _begin_transaction(self, machine: Machine) -> OpenTransaction | None:
        if len(machine.transactions) > 2:
            return None
        producer = machine.store.producer(name=self.rng.choice("pqrs"), linger_ms=0)
        producer.begin_transaction()
        machine.transactions.append(OpenTransaction(producer, []))
        return machine.transactions[-1]

    def _send(self, machine: Machine) -> None:
        for one in machine.transactions[-1:]:
            logs = [log for log in machine.logs() if log.topic_id not in self.compacted]
            if not logs:
                return
            log = self.rng.choice(logs)
            values, _ = self.records(log, 1)
            sent = one.producer.send(log.topic, values[0], partition=log.number).result()
            one.spots.extend(self._appended(machine, log, sent.offset, values))

    def _end_transaction(self, machine: Machine, verdict: str) -> None:
        if not machine.transactions:
            if self._begin_transaction(machine) is None:
                return
            for _ in range(3):
                self._send(machine)
        one = machine.transactions.pop(0)
        number, place = self.next_number(), ""
        try:
            if one.spots and verdict == "committed" and self.rng.random() < 0.5:
                log = self._pick(machine)
                place = f"{log.topic_id}/{log.number}"
                self.note("ends", machine.label, number, "unknown", one.spots, place)
                where = TopicPartition(log.topic, log.number)
                one.producer.commit_offsets(Position("txn", where, log.topic_id, log.log_end_offset, str(number)))
            self.note("ends", machine.label, number, "unknown", one.spots, place)
            if verdict == "committed":
                one.producer.commit_transaction()
            else:
                one.producer.abort_transaction()
            self.note("ends", machine.label, number, verdict, one.spots, place)
        finally:
            one.producer.close()

    def _commit(self, machine: Machine) -> None:
        self._end_transaction(machine, "committed")

    def _abort(self, machine: Machine) -> None:
        self._end_transaction(machine, "aborted")

    def _commit_positions(self, machine: Machine) -> None:
        log = self._pick(machine)
        machine.store.groups.reset("plain", {TopicPartition(log.topic, log.number): log.durable_offset})

    def _trim(self, machine: Machine) -> None:
        log = self._pick(machine)
        start = log.log_start_offset
        offset = self.rng.randrange(start, min(log.log_end_offset, start + 30) + 1)
        self.note("gives up", machine.label, f"{log.topic_id}/{log.number}", "trim", 0, offset)
        log.trim(offset)

    def _truncate(self, machine: Machine) -> None:
        log = self._pick(machine)
        if log.last_stable_offset == log.log_end_offset:
            offset = self.rng.randrange(max(log.log_start_offset, log.log_end_offset - 8), log.log_end_offset + 1)
            self.note("gives up", machine.label, f"{log.topic_id}/{log.number}", "truncate", offset, 1 << 62)
            with self._failing_reads():
                log.truncate(offset)

    def _compact(self, machine: Machine) -> None:
        for log in machine.logs():
            if log.topic_id in self.compacted:
                log.roll()
                with self._failing_reads():
                    log.compact()

    def _recreate(self, machine: Machine) -> None:
        if "a" in machine.store.topics():
            self.note("deletes", machine.label, machine.store.topic("a").id)
            machine.store.delete_topic("a")
            machine.store.create_topic("a", 2, **self._topic)

    def _rename(self, machine: Machine) -> None:
        for old, new in (("a", "b"), ("b", "a")):
            if old in machine.store.topics() and new not in machine.store.topics():
                machine.store.rename_topic(old, new)
                return

    def _add_partition(self, machine: Machine) -> None:
        name = self.rng.choice(machine.store.topics())
        count = machine.store.topic(name).partition_count
        if name != "keys" and count < 4:
            machine.store.alter_topic(name, partitions=count + 1)

    def _new_topic(self, machine: Machine) -> None:
        name = f"t{self.rng.randrange(2)}"
        if name not in machine.store.topics():
            machine.store.create_topic(name, self.rng.choice((1, 2)), **self._topic)

    # ------------------------------------------------------------ what those do who ship

    def _tick(self, machine: Machine) -> None:
        machine.is_busy = True
        try:
            machine.shipper.run_cycle()
        except Died:
            self.seen["died shipping"] += 1
            machine.kill_shipper()
        except StoreFenced:
            self.note("fenced", machine.label)
            self.seen["fenced"] += 1
        except ShippingRefused as error:
            if self._has_shipped(machine):
                self.note("error", machine.label, f"may not ship any more: {error}")
        finally:
            machine.is_busy = False
        self.note("owns", machine.label, machine.epoch)

    def _has_shipped(self, machine: Machine) -> bool:
        return not any(one.label == "rival" for one in self.machines) or machine.shipper.manifest is not None

    def _kill(self, machine: Machine) -> None:
        machine.kill_shipper()

    def _restart(self, machine: Machine) -> None:
        machine.close()
        machine.open()

    def _power_cut(self, machine: Machine) -> None:
        machine.power_cut(self.rng)
        self._restores.note_found(machine.label, "restart", machine.store)

    def _second_shipper(self, machine: Machine) -> None:
        """Start another shipping process for the same store: it waits as long as the first one runs."""
        second = self._new_shipper(machine.store._topics, self.new_bucket(machine.label))
        is_first = not machine.shipper.is_owner and not machine.is_busy
        try:
            if second.run_cycle().put and not is_first:
                self.note("error", machine.label, "two of its processes ship at once")
        except Died:
            pass
        except StoreFenced:
            self.note("fenced", machine.label)
        finally:
            second.close()
        self.note("owns", machine.label, machine.epoch)

    def _copy(self, machine: Machine) -> None:
        """Copy the folder of a shipped store, and ship the copy."""
        if not machine.epoch:
            return
        label = f"copy-{self.next_number()}"
        shutil.copytree(machine.path, self.folder / label)
        copy = self.machine(label)
        try:
            copy.shipper.run_cycle()
            self.note("error", label, "a copy of a folder ships")
        except (ShippingRefused, StoreFenced):
            self.seen["copy refused"] += 1
        except Died:
            pass
        finally:
            copy.bucket.calm = True
            copy.close()
            shutil.rmtree(copy.path)

    def _gc(self, machine: Machine) -> None:
        with suppress(Died, ShippingRefused):
            sweep(self.new_bucket("gc"), self.clock.now_ms(), grace_ms=GRACE_MS)

    def _restore(self, machine: Machine) -> None:
        self._restores.restore()

    def _damaged_restore(self, machine: Machine) -> None:
        self._restores.restore_damaged()

    def _takeover(self, machine: Machine) -> None:
        if len(self.machines) < _MACHINES_MAX:
            self._restores.take_over()

    def _hand_over(self, machine: Machine) -> None:
        """Request a hand-over; the machine ships for a while, and mostly another machine takes the store over."""
        if not machine.request_hand_over(self.rng.choice((1, 50, 50, 500, 5_000)), self.rng.choice((100, 5_000))):
            return
        for _ in range(self.rng.choice((0, 1, 3, 3, 6))):
            if machine.is_busy:
                return
            self.clock.advance(self.rng.choice((0, 1, 20)))
            self._do("tick", self._tick, machine)
            self._do("append", self._append, machine)
        if self.shelf.is_handed_over():
            self.seen["handed over"] += 1
            if self.rng.random() < 0.5:
                self._takeover(machine)

    def _give_up(self, machine: Machine) -> None:
        """Interrupt the command that has requested a hand-over."""
        machine.cancel_hand_over()

    def _follow(self, machine: Machine) -> None:
        self.rng.choice(self._followers).turn()

    def _kill_follower(self, machine: Machine) -> None:
        follower = self.rng.choice(self._followers)
        if not follower.is_busy:
            follower.kill()

    # ------------------------------------------------------------ in the end

    def _end(self) -> None:
        """End the failures: everything is shipped, every former owner is fenced, and rubbish is deleted."""
        self._depth = 1
        self.shelf.arrive(self.rng, self.seen, everything=True)
        for machine in self.machines:
            machine.bucket.calm = True
        if self.shelf.owner_epoch() > self.owner.epoch:  # a takeover began, and its machine never came back
            self._restores.take_over(calm=True)
        owner = self.owner
        owner.bucket.calm = True
        self.clock.advance(10_000)  # a hand-over that is under way is given up
        for _ in range(3):
            with suppress(ObjectStoreError):  # of uploads that failed before
                owner.shipper.run_cycle()
            with suppress(SegmentlogError):
                owner.store.finish_transactions()
            for log in owner.logs():
                with suppress(SegmentlogError):
                    log.flush()
            owner.observe()
        owner.shipper.ship()
        owner.observe()
        self.note("owns", owner.label, owner.epoch)
        for log in owner.logs():
            if log.shipped_offset != log.log_end_offset:
                self.note("error", owner.label, f"{log} is shipped up to {log.shipped_offset} only")
            values, keys = self.records(log, 1)
            try:
                offset = log.append(values, keys)
            except OffsetGrantExhausted:  # the first append since a takeover requests offsets
                owner.shipper.ship()
                offset = log.append(values, keys)
            self._appended(owner, log, offset, values)
            log.flush()
        owner.observe()
        owner.shipper.ship()
        owner.observe()
        for log in owner.logs():
            self.seen["left for the object store"] += sum(segment.remote for segment in log.segments())
            self.note("read", owner.label, f"{log.topic_id}/{log.number}", self._restores.content(log)["records"])
        self.clock.advance(30_000)
        for machine in self.machines[:-1]:
            self._must_be_fenced(machine)
        self._restores.restore(calm=True)
        for follower in self._followers:
            if not follower.turn(calm=True):
                self.note("error", follower.label, "it cannot keep up though nothing fails")
        self._sweep_all(owner)

    def _must_be_fenced(self, machine: Machine) -> None:
        for _ in range(3):
            try:
                machine.shipper.run_cycle()
            except StoreFenced:
                self.note("fenced", machine.label)
                break
            except ObjectStoreError:
                continue
        else:
            self.note("error", machine.label, "it was taken over, and does not know")
        self._do("append", self._append, machine)

    def _sweep_all(self, owner: Machine) -> None:
        for _ in range(3):
            self.clock.advance(GRACE_MS)
            sweep(owner.bucket, self.clock.now_ms(), grace_ms=GRACE_MS)
        manifest = owner.shipper.manifest
        assert manifest is not None
        left = self.shelf.objects.keys() - {stored.key for stored in manifest.objects()} - {"manifest.json"}
        if left:
            self.note("error", "gc", f"nobody refers to {sorted(left)}, and it stays for ever")


def rounds_of(name: str, default: int) -> int:
    """Return the requested number of rounds."""
    return int(os.environ.get(name, str(default)))
