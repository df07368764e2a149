"""Two machines of one store, all who use it, and the check of what was promised to them.

    with Game(folder, seed, store="s3", acks_all="shipped", java=command) as game:
        game.start()
        ...                     # events, see `events`
        game.check()

Each machine has a host of its own, a disk that may forget what was not synced, a server, and a local program. The
clients of librdkafka and of Java are on a host of their own.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import delivery_checker as checker
from delivery_cast import Cast, Nursery
from delivery_jobs import OneBoot
from delivery_trial import contents, settled
from ecosystem.protocol.java_players import JavaPlayers
from machines.client_hangs import why_client_hangs
from machines.network import Network
from machines.object_stores import HOST, ObjectStore, folder_store, s3_store
from server.standby_machines import Machine
from waiting import PATIENCE_S, wait_until

from segmentlog.errors import SegmentlogError
from segmentlog.groups.committed_offsets import encode
from segmentlog.records import TopicPartition
from segmentlog.store import LogStore
from segmentlog.testing.crashfs import CrashFS

MACHINES = ("m1", "m2")
CLIENTS_HOST = "clients"
TOPICS = {"in": 2, "other": 1}
TARGET, TARGETS = "out", 2
GROUP = "g"
PORT = 9092
SILENCE_S = 3.0
_TIMES = ("--ship-interval", "100ms", "--standby-silence", f"{SILENCE_S:.0f}s", "--standby-refused", "1s")
_SESSION_MS = 2000
_HANG_S = 20.0
"""A client without progress for this long is examined."""
_STALL_S = 40.0
"""A reader of librdkafka without progress for this long is replaced, whatever it waits for."""
_STALL = "a reader of librdkafka stands still"
_STALLS_MAX = 20
"""As many readers of a life may stand still: two in each event after which both machines were gone. librdkafka then
removes all brokers, also one that it has just asked to validate a position, and forgets the partition. A life counts
them. A new reader that gets nothing fails the test."""
_TESTS = Path(__file__).parents[1]

PLAIN: list[dict[str, Any]] = [
    {"job": "plain"},
    {"job": "reader", "isolation": "read_committed"},
    {"job": "reader", "isolation": "read_uncommitted"},
]
TRANSACTIONAL: list[dict[str, Any]] = [
    {"job": "transactions", "name": "bank"},
    {"job": "pipeline", "name": "pipe-0", "protocol": "classic"},
]
"""Only for ``--acks-all shipped``: with other settings, a takeover may lose the end of a transaction."""


class MachineOnHost(Machine):
    """A server on a host of the network, with a local program, on a disk that may lose what was not synced."""

    def __init__(self, folder: Path, name: str, game: Game) -> None:
        self.name, self._game = name, game
        self.host = game.network.address(name)
        self.disk = CrashFS(folder / f"{name}-disk", folder / f"{name}-mount")
        super().__init__(self.disk.path, "store", game.object_store.url)
        self.port, self.address = PORT, f"{self.host}:{PORT}"
        self.settings = (*_TIMES, "--acks-all", game.acks_all, "--advertise", self.address, "--insecure")
        self.sabotage = ""
        self._boot = 1
        self._program: subprocess.Popen[str] | None = None
        self._programs = 0

    @property
    def boot(self) -> str:
        """Id of the boot."""
        return f"{self.name}-{self._boot}"

    def program(self) -> list[str]:
        """Return the beginning of the command of a server."""
        return [*self._game.network.command(self.name), sys.executable, str(_TESTS / "machines/machine_process.py")]

    def environment(self) -> dict[str, str]:
        """Return the environment of the programs."""
        return {
            **os.environ, **self._game.object_store.environment, "MACHINE_BOOT": self.boot,
            "MACHINE_SABOTAGE": self.sabotage, "PYTHONPATH": os.pathsep.join((str(_TESTS), *sys.path)),
        }  # fmt: skip

    def start(self, *arguments: str) -> Machine:
        """Start the server and the local program."""
        super().start(*arguments)
        self.start_program()
        return self

    def start_program(self) -> None:
        """Start the local program, unless it runs."""
        if self._program is not None and self._program.poll() is None:
            return
        self._programs += 1
        label = f"local-{self.name}-{self._programs}"
        game = self._game
        order = {
            "job": "append_and_read", "label": label, "log": str(game.logs / label), "store": str(self.path),
            "boot": self.boot, "topics": TOPICS, "seed": game.rng.randrange(1 << 30),
        }  # fmt: skip
        script = str(_TESTS / "machines/local_program.py")
        self._program = subprocess.Popen(
            [*game.network.command(self.name), sys.executable, script, json.dumps(order)],
            env=self.environment(), stdin=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        self.program_label = label

    @property
    def pids(self) -> list[int]:
        """The server's processes and the local program."""
        found = super().pids if self.process is not None else []
        return [*found, *([] if self._program is None else [self._program.pid])]

    def kill_program(self) -> None:
        """Kill -9 of the local program."""
        if self._program is not None:
            self._program.kill()
            self._program.wait(PATIENCE_S)
            self._program = None

    def kill(self) -> None:
        """Kill -9 of the server and the local program."""
        if self.process is not None:
            super().kill()
        self.kill_program()

    def stop(self) -> int:
        """SIGTERM for both. Return the server's exit status."""
        if self._program is not None:
            self._program.terminate()
        status = super().stop()
        if self._program is not None:
            self._program.wait(PATIENCE_S)
            self._program = None
        return status

    def cut_power(self, seed: int) -> list[str]:
        """Kill everything, and lose what was not synced. Return a line for each loss."""
        self.kill()
        self._boot += 1
        gc.collect()  # closed stores of the test, whose memory maps keep the disk busy
        # The kernel closes the files of killed processes shortly after their end.
        return wait_until(lambda: self._crash(seed)) or []

    def _crash(self, seed: int) -> list[str] | None:
        try:
            return self.disk.crash(seed) or ["nothing"]
        except OSError:
            return None

    @property
    def status(self) -> dict[str, Any]:
        """The content of the status file; empty if there is none."""
        try:
            return super().status
        except (OSError, ValueError):
            return {}

    def close(self) -> None:
        """Kill everything, and unmount the disk."""
        super().close()
        self.kill_program()
        gc.collect()
        with contextlib.suppress(OSError):  # what failed before may hold files open; then the mount ends with them
            self.disk.close()


class Game(Cast):
    """The machines, the network, the object store and the clients."""

    def __init__(
        self, folder: Path, seed: int, *, store: str, acks_all: str = "shipped", java: list[str] | None = None,
        clients: list[dict[str, Any]] | None = None,
    ) -> None:  # fmt: skip
        self._stack = contextlib.ExitStack()
        self.acks_all = acks_all
        self.outage_s = SILENCE_S
        """How long an outage of the object store takes."""
        self.story: list[str] = []
        self.seen: Counter[str] = Counter()
        self._began_s = time.monotonic()
        with contextlib.ExitStack() as stack:
            self.network = stack.enter_context(Network(*MACHINES, HOST, CLIENTS_HOST))
            folder.mkdir(parents=True, exist_ok=True)
            self.object_store: ObjectStore = stack.enter_context(
                folder_store(folder) if store == "folder" else s3_store(folder, self.network, MACHINES)
            )
            nursery = Nursery(Path(__file__).with_name("clients.py"), self.network.command(CLIENTS_HOST))
            stack.callback(nursery.close)
            super().__init__(folder, seed, nursery)
            stack.callback(Cast.close, self)
            self.machines: list[MachineOnHost] = []
            for name in MACHINES:
                self.machines.append(MachineOnHost(folder, name, self))
                stack.callback(self.machines[-1].close)
            stack.callback(self.heal)
            self._sizes = folder / "sizes"
            counts = {**TOPICS, TARGET: TARGETS}
            self._sizes.write_text(json.dumps(counts))
            self.counts = counts
            self.shared: dict[str, Any] = {
                "address": ",".join(machine.address for machine in self.machines), "sizes": str(self._sizes),
                "topics": TOPICS, "group": GROUP, "source": "in", "target": TARGET, "targets": TARGETS,
                "transaction_timeout_ms": 5_000, "session_ms": _SESSION_MS, "kind": "client",
                "strategy": self.rng.choice(("range", "roundrobin", "cooperative-sticky")),
            }  # fmt: skip
            self._clients = (
                clients if clients is not None else [*PLAIN, *(TRANSACTIONAL if acks_all == "shipped" else [])]
            )
            self.java: JavaPlayers | None = None
            if java is not None:
                self.java = JavaPlayers([*self.network.command(CLIENTS_HOST), *java], self.logs, self.shared)
                stack.callback(self.java.kill)
            self._stack = stack.pop_all()

    def __enter__(self) -> Game:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    # ------------------------------------------------------------ the beginning

    def start(self) -> None:
        """Start the machines and the clients, and wait until all of them work."""
        owner, standby = self.machines
        with self._open(owner) as store:
            for topic, partitions in self.counts.items():
                store.create_topic(topic, partitions, segment_bytes=self.rng.choice((5000, 1 << 20)), fsync="never")
            self._begin_at_the_beginning(store)
        owner.start()
        owner.wait_for("as the owner")
        standby.start()
        self.wait_until_steady()
        for order in self._clients:
            self.enter(order)
        if self.java is not None:
            self.java.start(self.seed)
        self.wait_for_progress()

    @staticmethod
    def _begin_at_the_beginning(store: LogStore) -> None:
        """Commit the first offsets for the group: librdkafka may ask for them twice, see `ecosystem.protocol.game`."""
        offsets, topic_id = store.groups.committed_offsets, store.topic("in").id
        where = {TopicPartition("in", number): 0 for number in range(TOPICS["in"])}
        offsets.sync(offsets.append(*encode(GROUP, where, lambda _: topic_id, committed_ms=int(time.time() * 1000))))

    def enter(self, order: dict[str, Any], **more: Any) -> int:
        """Start a client."""
        topics = self.counts if order["job"] == "reader" and order["isolation"] == "read_committed" else TOPICS
        return self.spawn({**self.shared, **order, "topics": topics, **more})

    def _open(self, machine: MachineOnHost, path: Path | None = None, **options: Any) -> LogStore:
        return LogStore(path or machine.path, fs=OneBoot(machine.boot), background=False, **options)

    # ------------------------------------------------------------ waiting

    def note(self, what: str) -> None:
        """Print what happens, and remember it for the message of a failure."""
        self.story.append(f"{time.monotonic() - self._began_s:.1f} s: {what}")
        print(self.story[-1], flush=True)

    def describe(self) -> str:
        """Return what happened, and the state of everything."""
        lines = [f"SEGMENTLOG_SEED={self.seed}, {self.object_store.kind}, {self.acks_all}", *self.story[-30:]]
        for machine in self.machines:
            lines += [f"{machine.name}: {machine.status}", *machine.lines[-40:]]
        for label, counts in self.progress().items():
            lines.append(
                f"{label}: {counts}; {self.told(label.split(' ')[0], '*met', '*failed', '*stuck', 'error')[-3:]}"
            )
        return "\n  ".join(lines)

    def owner(self) -> MachineOnHost:
        """Return the machine that is the owner, once one is. Both must follow each other: see `wait_until_steady`."""
        return wait_until(lambda: self._owner_and_standby(0), self.describe)[0]

    def standby(self) -> MachineOnHost:
        """Return the other machine."""
        return wait_until(lambda: self._owner_and_standby(0), self.describe)[1]

    def wait_until_steady(self) -> None:
        """Wait until one machine is the owner, and the other follows it and can take over."""
        now_ms = time.time() * 1000
        wait_until(lambda: self._owner_and_standby(now_ms), self.describe, every_s=0.05)

    def _owner_and_standby(self, since_ms: float) -> list[MachineOnHost]:
        for owner, standby in (self.machines, self.machines[::-1]):
            one, other = owner.status, standby.status
            if (
                one.get("role") == "owner" and other.get("role") == "standby"
                and one["owner_epoch"] in (0, other["owner_epoch"]) and not other["error"]
                and other["reason"] == "the owner answers" and other["written_ms"] > since_ms
            ):  # fmt: skip
                return [owner, standby]
        return []

    def wait_for_owner(self, machine: MachineOnHost) -> None:
        """Wait until this machine is the owner."""
        wait_until(lambda: machine.status.get("role") == "owner", self.describe, every_s=0.05)

    def progress(self) -> dict[str, int]:
        """Return how much each client has done: what was acknowledged, committed, or handed to it."""
        labels = {self.label(pid): self.label(pid) for pid in self.running}
        found = {label: len(self.told(label, "acked", "committed", "handed")) for label in labels}
        if self.java is not None:
            events = self.told(self.java.label, "acked", "committed", "handed")
            for player in self._java_players():
                name = f"{self.java.label}{player}"
                found[f"{self.java.label} {player}"] = sum(1 for event in events if str(event[1]).startswith(name))
        return found

    def _java_players(self) -> tuple[str, ...]:
        return ("plain", "transactions", "pipeline", "reader") if self.acks_all == "shipped" else ("plain", "reader")

    def wait_for_progress(self, count: int = 2) -> None:
        """Wait until each client, and a local program, has done so much more."""
        before = self.progress()
        locals_before = self._local_progress()

        began_s = time.monotonic()

        def is_done() -> bool:
            if time.monotonic() - began_s > _HANG_S:
                self._replace_hanging_clients(before, time.monotonic() - began_s)
            now = self.progress()
            return (
                all(now[label] >= done + count for label, done in before.items() if label in now)
                and self._local_progress() >= locals_before + count
            )

        wait_until(is_done, lambda: f"no progress since {before}, {locals_before}\n{self.describe()}", every_s=0.05)

    def _replace_hanging_clients(self, before: dict[str, int], waited_s: float) -> None:
        """Kill clients that librdkafka has stopped for ever, and start others in their places.

        Only what shows that the client alone is at fault counts: a thread that waits for a lock without a time limit,
        or a client that has no connection although both machines listen.
        """
        now = self.progress()
        for pid in list(self.running):
            label = self.label(pid)
            if label not in before or now[label] > before[label]:
                continue
            if self.told(label, "*stuck"):  # its watchdog has killed the process: `ecosystem.protocol.client_jobs`
                why = "librdkafka overlooks the coordinator"
            elif label.startswith("reader") and waited_s > _STALL_S and self.seen[_STALL] < _STALLS_MAX:
                why = why_client_hangs(pid) or _STALL
            else:
                why = why_client_hangs(pid)
            if why:
                self.note(f"{label}: {why}; another client takes its place")
                self.seen[why] += 1
                order = self.running[pid]
                self.kill(pid)
                self.enter({key: value for key, value in order.items() if key not in ("label", "log")})

    def _local_progress(self) -> int:
        return sum(len(self.told(machine.program_label, "acked")) for machine in self.machines)

    def heal(self) -> None:
        """End all cuts, and make the object store reachable."""
        self.object_store.connect()
        self.network.heal()

    # ------------------------------------------------------------ the end

    def check(self) -> checker.History:
        """Hold everything that is stored against everything that was seen."""
        history, wrong = self.contradictions()
        assert not wrong, "\n  ".join([f"{len(wrong)} contradictions", *wrong[:12], self.describe()])
        return history

    def contradictions(self) -> tuple[checker.History, list[str]]:
        """Return what was seen, and what of it contradicts the store of the owner. All processes end first."""
        self.heal()
        self.wait_until_steady()
        owner, standby = self.owner(), self.standby()
        self._end_clients(owner)
        standby.stop()
        owner.stop()
        return self.compare(owner)

    def _end_clients(self, owner: MachineOnHost) -> None:
        """Let the clients end, and the pipeline finish its work."""
        if self.java is not None:
            self.java.end()
        self.finish()
        has_pipeline = any(order["job"] == "pipeline" for order in self._clients)
        for machine in self.machines:
            machine.kill_program()
        if not has_pipeline:
            return
        pid = self.enter(TRANSACTIONAL[1], hurries=True)
        with self._open(owner) as store:
            wait_until(lambda: self._is_complete(store), self.describe, every_s=0.1)
        self.terminate(pid)
        self.end(self.ending.pop())

    @staticmethod
    def _is_complete(store: LogStore) -> bool:
        """Return whether the pipeline has read everything."""
        committed = store.group_offsets.committed(GROUP)
        for log in store.topic("in").partitions():
            position = committed.get(TopicPartition("in", log.number))
            begins = log.log_start_offset if position is None else position.offset
            if log.last_stable_offset < log.log_end_offset:
                return False
            if any(len(batch) for batch in log.read(begins, isolation="read_committed")):
                return False
        return True

    def compare(self, owner: MachineOnHost) -> tuple[checker.History, list[str]]:
        """Return what was seen, and what of it contradicts this machine's store, whose processes have ended."""
        with self._open(owner) as store:
            final = wait_until(lambda: self._settled(store), self.describe, every_s=0.2)
        events = list(self.events())
        left_behind = set(self._left_behind()) if self.acks_all != "shipped" else set()
        # With other settings than ``shipped``, a takeover may lose the end of a transaction that readers have seen.
        may_be_lost = set() if self.acks_all == "shipped" else _transactional_values(events)
        history = checker.gather(_without_lost(events, final, may_be_lost))
        kept = []
        for place, value in history.acknowledged:
            if (place, value) in left_behind and not value.startswith("local"):
                self.seen["left behind in @former"] += 1
            else:
                kept.append((place, value))
        history.acknowledged[:] = kept
        if self.acks_all != "shipped":
            history.transactions.clear()  # a takeover may lose the end of a transaction
        wrong = checker.check(history, final, power_cut=True)
        if any(order["job"] == "pipeline" for order in self._clients):
            wrong += checker.check_pipeline(final, "in", TARGET)
        wrong += _check_shipped(events, final)
        return history, wrong

    def _settled(self, store: LogStore) -> checker.Store | None:
        """Return the content, once every transaction has ended; those of dead clients end at their time-out."""
        found = settled(store, self.counts)
        is_decided = all(one.last_stable_offset == one.log_end_offset for one in found.values())
        return found if is_decided else None

    def _left_behind(self) -> Iterator[tuple[checker.Place, str]]:
        """Yield what former owners have set aside."""
        for machine in self.machines:
            formers = machine.path / "@former"
            for former in sorted(formers.iterdir()) if formers.exists() else ():
                with self._open(machine, former, read_only=True) as store:
                    for topic, partitions in TOPICS.items():
                        for number in range(partitions):
                            with contextlib.suppress(SegmentlogError):
                                for value in contents(store.topic(topic).partition(number)).everything.values():
                                    yield (topic, number), value


def _transactional_values(events: list[checker.Event]) -> set[str]:
    return {value for event in events if event[0] == "send" and event[2] for value in event[5]}


def _without_lost(events: list[checker.Event], final: checker.Store, may_be_lost: set[str]) -> Iterator[checker.Event]:
    """Yield the events. What a reader got before it was shipped may be lost, whatever its transaction came to.

    Such records, and the values ``may_be_lost``, count as those of a ``read_uncommitted`` reader: their offsets must
    still not be used again.
    """
    for event in events:
        if event[0] != "handed" or event[2] != "read_committed":
            yield event
            continue
        kind, process, isolation, topic, partition, records = event
        lost = [one for one in records if final[topic, partition].is_lost(one[0]) or one[1] in may_be_lost]
        found = [one for one in records if one not in lost]
        if lost:
            yield [kind, process, "read_uncommitted", topic, partition, lost]
        if found:
            yield [kind, process, isolation, topic, partition, found]


def _check_shipped(events: list[checker.Event], final: checker.Store) -> Iterator[str]:
    """Yield what was shipped when it was read, and is not in the store."""
    for kind, process, *rest in events:
        if kind == "*shipped":
            topic, partition, records = rest
            for offset, value in records:
                found = final[topic, partition].committed.get(offset)
                if found != value:
                    yield f"unshipped: {process} read {value} at {offset} of {topic}/{partition}, which has {found}"
