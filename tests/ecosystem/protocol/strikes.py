"""Disturbances of a server and its users: each returns once it has had its effect."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

from confluent_kafka import KafkaException, TopicPartition
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    ResourceType,
)
from delivery_trial import contents
from ecosystem.protocol.game import PARTITIONS_MAX, TARGET, Game
from waiting import wait_until

PRODUCE, END_TXN = 0, 26
OTHER_APIS: Final = (1, 8, 9, 11, 14, 22, 24, 25, 28, 68)


class Strikes:
    """On one game."""

    def __init__(self, game: Game) -> None:
        self.game = game
        self.server = game.server
        self.rng = game.rng
        self._zombies: list[int] = []

    # ------------------------------------------------------------ the server

    def kill_worker(self) -> None:
        self.server.kill_worker(self.rng.choice(self.server.pids))

    def stop_worker(self) -> None:
        pid = self.rng.choice(self.server.pids)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(self.rng.uniform(0.1, 0.5))
        os.kill(pid, signal.SIGCONT)

    def kill_server(self) -> None:
        self.server.kill()
        self.server.start()

    def fill_disk(self) -> None:
        met = Path(f"{self.server.full}.met")
        met.unlink(missing_ok=True)
        self.server.full.touch()
        wait_until(met.exists, "nobody wanted to write")
        time.sleep(self.rng.uniform(0.05, 0.3))
        self.server.full.unlink()

    # ------------------------------------------------------------ the network

    def cut(self) -> None:
        self._until_more("cut", lambda: self.server.proxy.cut(self.rng.choice((0.3, 1.0))))

    def delay(self) -> None:
        def begin() -> None:
            self.server.proxy.delay_s = self.rng.uniform(0.02, 0.15)

        self._until_more("delayed", begin)
        time.sleep(0.3)
        self.server.proxy.delay_s = 0.0

    def lose_answers(self) -> None:
        """Lose the answers to requests that succeeded: the clients must repeat them, and get the same result."""

        def begin() -> None:
            for api in (PRODUCE, END_TXN, self.rng.choice(OTHER_APIS)):
                self.server.proxy.lose_answers(api, self.rng.choice((1, 1, 3)))

        self._until_more("lost", begin, 2)

    def _until_more(self, what: str, begin: Callable[[], None], count: int = 1) -> None:
        seen = self.server.proxy.seen
        before = seen[what]
        begin()
        wait_until(lambda: seen[what] >= before + count, f"no connection was {what}")

    # ------------------------------------------------------------ players

    def kill_client(self) -> None:
        self._kill("client")

    def kill_library(self) -> None:
        self._kill("library")

    def _kill(self, kind: str) -> None:
        pid = self.rng.choice(self.game.players(kind))
        order = self.game.running[pid]
        self.game.kill(pid)
        self.game.enter(order)

    def stop_client(self) -> None:
        self._stop("client")

    def stop_library(self) -> None:
        self._stop("library")

    def _stop(self, kind: str) -> None:
        """Stop a player and start another one with its name; some rounds later the first continues for a while."""
        pid = self.rng.choice(self.game.players(kind))
        order = self.game.running[pid]
        self.game.stop(pid)
        self.game.enter(order)

    def wake_some(self) -> None:
        """Wake stopped players, and end those that were woken before."""
        game = self.game
        game.leave([pid for pid in self._zombies if pid in game.running])
        self._zombies.clear()
        for pid in list(game.stopped):
            if self.rng.random() < 0.5:
                order = game.stopped.pop(pid)
                os.kill(pid, signal.SIGCONT)
                game.running[pid] = {**order, "kind": "zombie"}
                self._zombies.append(pid)

    def kill_java(self) -> None:
        java = self.game.java
        assert java is not None
        java.kill()
        java.start(self.rng.randrange(1 << 30))

    def stop_java(self) -> None:
        """Longer than its session takes."""
        java = self.game.java
        assert java is not None
        assert java.process is not None
        java.process.send_signal(signal.SIGSTOP)
        time.sleep(0.8)
        java.process.send_signal(signal.SIGCONT)

    def fence(self) -> None:
        """Run a zombie of a transactional id, and its successor."""
        game = self.game
        pid = game.enter({"kind": "client", "job": "fence", "name": "zombie"})
        label = game.label(pid)
        game.until_told(label, "*stopped")
        game.end(pid)
        if game.told(label, "*fenced"):
            game.seen["producer fenced"] += 1

    # ------------------------------------------------------------ groups

    def evict(self, protocol: str = "") -> None:
        """Stop a member between its work and its commit, let another member do the work, and wake the first."""
        game = self.game
        self._dismiss_zombies()
        protocol = protocol or self.rng.choice(("classic", "consumer"))
        pid = game.enter({"kind": "client", "job": "pipeline", "name": "held", "protocol": protocol}, holds=True)
        label = game.label(pid)
        held = set(game.until_told(label, "*holding")[2])
        game.stop(pid)
        before = Counter(self._done_by_others(label))
        wait_until(
            lambda: held & (Counter(self._done_by_others(label)) - before).keys(),
            f"nobody does the work of {label}; {game.where}",
        )
        game.running[pid] = game.stopped.pop(pid)
        os.kill(pid, signal.SIGUSR2)
        os.kill(pid, signal.SIGCONT)
        wait_until(lambda: self._has_tried(label), f"{label} does not go on; {game.where}")
        if self._has_tried(label)[0] != "committed":
            game.seen["member fenced"] += 1
        game.leave([pid])

    def _has_tried(self, label: str) -> list[str]:
        """Return the events after a member held its transaction."""
        kinds = [str(one[0]) for one in self.game.told(label, "*holding", "*refused", "*met", "*aborts", "committed")]
        return kinds[kinds.index("*holding") + 1 :]

    def _done_by_others(self, label: str) -> list[str]:
        """Return the values that other members have committed so far, with repetitions."""
        game = self.game
        labels = [game.label(pid) for pid in game.running if game.running[pid]["job"] == "pipeline"]
        if game.java is not None:
            labels.append(game.java.label)
        done = {(one, event[1], event[2]) for one in labels for event in game.told(one, "committed")}
        return [
            value
            for one in labels if one != label
            for event in game.told(one, "send") if (one, event[1], event[2]) in done
            for value in event[5]
        ]  # fmt: skip

    def regroup(self) -> None:
        """Members leave, and come again by either protocol."""
        for pid in self.game.players("client", "pipeline"):
            self._change(pid, self.rng.choice(("classic", "consumer")))
        if self.game.java is not None:
            self.game.java.be(self.rng.choice(("classic", "consumer")))

    def migrate(self) -> None:
        """Move a working group from the classic protocol to the new one, and back."""
        game = self.game
        self._dismiss_zombies()
        for pid in game.players("client", "pipeline"):
            if game.running[pid]["protocol"] != "classic":
                self._change(pid, "classic")
        if game.java is not None:
            game.java.be("classic")
        wait_until(partial(self._is_of, "classic"), f"it is not of the classic protocol; {game.where}")
        pid = game.players("client", "pipeline")[0]
        for protocol in ("consumer", "classic"):
            pid = self._change(pid, protocol)
            wait_until(partial(self._is_of, protocol), f"the group is not of the {protocol} protocol; {game.where}")

    def _is_of(self, protocol: str) -> bool:
        group = self.game.group()
        return bool(group.members) and group.is_consumer == (protocol == "consumer")

    def _change(self, pid: int, protocol: str) -> int:
        order = {**self.game.running[pid], "protocol": protocol}
        self.game.leave([pid])
        return self.game.enter(order)

    def _dismiss_zombies(self) -> None:
        game = self.game
        for pid in [*game.stopped, *(pid for pid in self._zombies if pid in game.running)]:
            game.kill(pid)
        self._zombies.clear()

    def hand_over(self) -> None:
        """Move the group from clients to processes of the library, and back."""
        game = self.game
        self._dismiss_zombies()
        if game.java is not None:
            game.java.be("off")
        clients = game.players("client", "pipeline")
        orders = [game.running[pid] for pid in clients]
        game.leave(clients)
        library = [game.enter({"kind": "library", "job": "pipeline", "name": f"lib-{at}"}) for at in range(2)]
        for pid in library:
            game.until_told(game.label(pid), "owns")
        time.sleep(0.1)
        game.leave(library)
        fresh = [game.enter(order) for order in orders]
        if game.java is not None:
            game.java.be(self.rng.choice(("classic", "consumer")))
        wait_until(lambda: any(game.told(game.label(pid), "owns") for pid in fresh), f"no client has it; {game.where}")

    # ------------------------------------------------------------ topics

    def _administer(self, do: Callable[[AdminClient], dict[Any, Any]], is_done: Callable[[], bool]) -> None:
        """Repeat a request until it is done: its answer may be lost although it was done."""
        client = AdminClient({
            "bootstrap.servers": self.server.address, "log_level": 0, "socket.timeout.ms": 3000,
            "retry.backoff.ms": 20, "reconnect.backoff.max.ms": 100,
        })  # fmt: skip

        def try_it() -> bool:
            if not is_done():
                with contextlib.suppress(KafkaException):
                    for future in do(client).values():
                        future.result()
            return is_done()

        wait_until(try_it)

    def add_partitions(self) -> None:
        game = self.game
        small = [topic for topic in ("in", "other") if game.counts[topic] < PARTITIONS_MAX]
        if not small:
            return
        topic = self.rng.choice(small)
        count = game.counts[topic] + 1
        self._administer(
            lambda client: client.create_partitions([NewPartitions(topic, count)], request_timeout=3),
            lambda: game.store.topic(topic).partition_count == count,
        )
        game.counts[topic] = count
        game.tell_sizes()
        game.seen["partition added"] += 1

    def alter_config(self) -> None:
        topic = self.rng.choice(("in", "other", TARGET))
        wanted = self.rng.choice((3000, 20_000, 1 << 20))
        entry = ConfigEntry("segment.bytes", str(wanted), incremental_operation=AlterConfigOpType.SET)
        resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[entry])
        self._administer(
            lambda client: client.incremental_alter_configs([resource], request_timeout=3),
            lambda: self.game.store.topic(topic).config.segment_bytes == wanted,
        )
        self.game.seen["config altered"] += 1

    def delete_records(self) -> None:
        """Delete some of the decided records, and record them before."""
        game = self.game
        partition = self.rng.randrange(game.counts["other"])
        log = game.store.topic("other").partition(partition)
        wait_until(lambda: log.last_stable_offset > log.log_start_offset + 10)
        before = self.rng.randrange(log.log_start_offset + 1, log.last_stable_offset)
        found = contents(log)
        game.say("trims", "other", partition, [
            [offset, value, offset in found.committed] for offset, value in found.everything.items() if offset < before
        ])  # fmt: skip
        self._administer(
            lambda client: client.delete_records([TopicPartition("other", partition, before)], request_timeout=3),
            lambda: log.log_start_offset >= before,
        )
        game.seen["records deleted"] += 1


STRIKES: Final = (
    "kill_worker", "stop_worker", "kill_server", "fill_disk", "cut", "delay", "lose_answers", "kill_client",
    "kill_library", "stop_client", "stop_library", "fence", "evict", "regroup", "migrate", "hand_over",
    "add_partitions", "alter_config", "delete_records",
)  # fmt: skip
RARE: Final = {"kill_server", "evict", "migrate", "hand_over", "kill_java", "stop_java", "regroup"}
"""Kinds that take a second or two: each once, and then in every tenth round."""


def play(game: Game, rounds: int) -> None:
    """Use all kinds in some order, and then repeat."""
    strikes = Strikes(game)
    kinds = [*STRIKES, *(("kill_java", "stop_java") if game.java is not None else ())]
    often = [one for one in kinds if one not in RARE]
    deck = game.rng.sample(kinds, len(kinds))
    for number in range(rounds):
        if not deck:
            deck = [*game.rng.sample(often, len(often)), game.rng.choice(sorted(RARE & set(kinds)))]
        strike = deck.pop()
        strikes.wake_some()
        began_s = time.monotonic()
        getattr(strikes, strike)()
        game.seen[strike] += 1
        game.say("*round", number, strike, round(time.monotonic() - began_s, 2))
        time.sleep(game.rng.uniform(0.0, 0.1))
