"""One server, all who use it, and what is done to them: a game of rounds, and the check in the end.

Each kind of event waits until it has shown its effect, and counts in `Game.seen` then: nothing is left to luck.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import delivery_checker as checker
from confluent_kafka import Producer
from delivery_cast import PATIENCE_S, Cast, Nursery
from delivery_trial import settled
from ecosystem.protocol.java_players import JavaPlayers
from ecosystem.protocol.unruly_server import UnrulyServer
from waiting import wait_until

import segmentlog
from segmentlog.format.file_names import GROUPS_FOLDER, folder_name_of
from segmentlog.groups.committed_offsets import encode
from segmentlog.groups.server_group_file import SavedGroup, read_saved_group
from segmentlog.records import TopicPartition
from segmentlog.storage.fs import FileSystem

TOPICS = {"in": 4, "other": 1}
"""As many of the first as there are ever members of the group: each has something to do."""
TARGET, TARGETS = "out", 2
PARTITIONS_MAX = 7
GROUP = "g"
SESSION_MS = 600

CLIENTS: list[dict[str, Any]] = [
    {"kind": "client", "job": "plain"},
    {"kind": "client", "job": "transactions", "name": "bank"},
    {"kind": "client", "job": "pipeline", "name": "pipe-0", "protocol": "classic"},
    {"kind": "client", "job": "pipeline", "name": "pipe-1", "protocol": "classic"},
    {"kind": "client", "job": "reader", "isolation": "read_committed", "reads": "all"},
    {"kind": "client", "job": "reader", "isolation": "read_uncommitted"},
]
LIBRARY: list[dict[str, Any]] = [
    {"kind": "library", "job": "plain"},
    {"kind": "library", "job": "named", "name": "counter"},
    {"kind": "library", "job": "transactions", "name": "teller"},
    {"kind": "library", "job": "reader", "isolation": "read_committed", "reads": "all", "reset": "earliest"},
]


class Game(Cast):
    """The players and their shared state."""

    def __init__(
        self, folder: Path, seed: int, nursery: Nursery, *, sabotage: str = "", java: list[str] | None = None,
        patience_s: float = PATIENCE_S,
    ) -> None:  # fmt: skip
        super().__init__(folder, seed, nursery)
        self.seen: Counter[str] = Counter()
        self.ids: set[str] = set() if java is None else {"java", "pipe-java"}
        """Transactional ids of clients: what one of them has left open ends when another takes its id."""
        self._patience_s = patience_s
        self.path = folder / "store"
        self.sizes = folder / "sizes"
        self.counts = {**TOPICS, TARGET: TARGETS}
        self.store = segmentlog.open(self.path)
        for topic, partitions in self.counts.items():
            self.store.create_topic(topic, partitions, segment_bytes=self.rng.choice((3000, 1 << 20)), fsync="never")
        self.tell_sizes()
        self._begin_at_the_beginning()
        self.server = UnrulyServer(self.path, folder, SESSION_MS, sabotage)
        self.shared: dict[str, Any] = {
            "store": str(self.path), "full": str(self.server.full), "sizes": str(self.sizes),
            "address": self.server.address, "topics": TOPICS, "group": GROUP, "source": "in", "target": TARGET,
            "targets": TARGETS, "transaction_timeout_ms": self.rng.choice((3_000, 30_000)), "session_ms": SESSION_MS,
            "strategy": self.rng.choice(("range", "roundrobin", "cooperative-sticky")),
        }  # fmt: skip
        self.java = None if java is None else JavaPlayers(java, self.logs, self.shared)

    def _begin_at_the_beginning(self) -> None:
        """Commit offset 0 for all partitions, also for later ones, so that no player has to ask where a partition
        begins.

        If an answer comes too late for its question, librdkafka 2.15 asks again half a second later, and returns to the
        beginning (`rd_kafka_toppar_handle_Offset`, "outdated offset response").
        """
        positions, topic_id = self.store.groups.committed_offsets, self.store.topic("in").id
        where = {TopicPartition("in", number): 0 for number in range(PARTITIONS_MAX)}
        positions.sync(
            positions.append(*encode(GROUP, where, lambda _: topic_id, committed_ms=int(time.time() * 1000)))
        )

    def __enter__(self) -> Game:
        self.server.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        try:
            self.close()
        finally:
            if self.java is not None:
                self.java.kill()
            self.server.close()
            self.store.close()

    # ------------------------------------------------------------ who plays

    def enter(self, order: dict[str, Any], **more: Any) -> int:
        """Start one more player."""
        if order["kind"] == "client" and "name" in order:
            self.ids.add(order["name"])
        topics = self.counts if order.get("reads") == "all" else {topic: self.counts[topic] for topic in TOPICS}
        return self.spawn({**self.shared, **order, "topics": topics, **more})

    def players(self, kind: str, job: str = "") -> list[int]:
        """Return the running players of a kind."""
        return [pid for pid, one in self.running.items() if one["kind"] == kind and job in ("", one["job"])]

    def until_all_play(self) -> None:
        """Wait until each player had a record acknowledged, committed or returned."""
        for pid in list(self.running):
            self.until_told(self.label(pid), "ok", "acked", "committed", "handed", "owns")
        if self.java is not None:
            for player in ("plain", "transactions", "pipeline", "reader"):
                wait_until(
                    lambda player=player: self.java_told(player, "acked", "committed", "handed"),
                    f"no {player} of Java's",
                )

    def java_told(self, player: str, *kinds: str) -> list[checker.Event]:
        assert self.java is not None
        return [one for one in self.told(self.java.label, *kinds) if str(one[1]).startswith(self.java.label + player)]

    def group(self) -> SavedGroup:
        """Return the coordinator's state of the group."""
        remote = read_saved_group(FileSystem(), f"{self.path}/{GROUPS_FOLDER}/{folder_name_of(GROUP, 'group')}")
        return remote or SavedGroup()

    def say(self, kind: str, *rest: Any) -> None:
        """Append to the game's own journal."""
        with open(self.logs / "game", "a") as file:
            file.write(json.dumps([kind, "game", *rest]) + "\n")

    def tell_sizes(self) -> None:
        """Tell all players the numbers of partitions."""
        draft = self.folder / "sizes.new"
        draft.write_text(json.dumps(self.counts))
        os.replace(draft, self.sizes)

    # ------------------------------------------------------------ the end

    def leave(self, pids: list[int]) -> None:
        """Ask these players to end, and wait for them."""
        for pid in pids:
            self.terminate(pid)
        while self.ending:
            self.end(self.ending.pop())

    def calm_down(self) -> None:
        """Stop all disturbances, and let all players end."""
        self.server.full.unlink(missing_ok=True)
        self.server.proxy.heal()
        if self.java is not None:
            self.java.end()
        self.finish()

    def check(self) -> checker.History:
        """Hold everything that is there against everything that was seen."""
        history, wrong = self.contradictions()
        assert not wrong, "\n  ".join([f"{len(wrong)} contradictions; {self.where}", *wrong[:12]])
        return history

    def contradictions(self) -> tuple[checker.History, list[str]]:
        """Return (what the players saw, contradictions in it)."""
        self.calm_down()
        began_s = time.monotonic()
        for name in sorted(self.ids):
            self._take(name)
        self._transact()
        store = self._complete()
        history = checker.gather(self.events())
        wrong = checker.check(history, store)
        wrong += checker.check_pipeline(store, "in", TARGET)
        wrong += checker.check_owners(history, evictions=True)
        if time.monotonic() - began_s > self._patience_s:
            wrong.append("blocked: it took too long until everything was decided, and the pipeline had done its work")
        return history, wrong

    def _take(self, name: str) -> None:
        """Become the instance of a transactional id, and see that it works."""
        txn = f"end/{name}"
        producer = Producer({
            "bootstrap.servers": self.server.address, "transactional.id": name, "linger.ms": 0, "log_level": 0,
            "retry.backoff.ms": 20, "reconnect.backoff.max.ms": 100,
        })  # fmt: skip
        producer.init_transactions(PATIENCE_S)
        producer.begin_transaction()
        self.say("send", txn, "other", 0, [txn])
        producer.produce("other", txn.encode(), partition=0)
        self.say("commit", txn)
        producer.commit_transaction(PATIENCE_S)
        self.say("committed", txn)

    def _transact(self) -> None:
        """See that a process of the library can, too."""
        with self.store.producer(name="judge") as producer:
            producer.begin_transaction()
            self.say("send", "end", "other", 0, ["end"])
            producer.send("other", b"end", partition=0)
            self.say("commit", "end")
            producer.commit_transaction()
            self.say("committed", "end")

    def _complete(self) -> checker.Store:
        """Return the store once the pipeline has done all of its work."""
        protocol = self.rng.choice(("classic", "consumer"))
        order = {"kind": "client", "job": "pipeline", "name": "pipe-0", "protocol": protocol}
        pid = self.enter(order, hurries=True)
        ends_s = time.monotonic() + self._patience_s / 2
        while not self._is_complete() and time.monotonic() < ends_s:
            time.sleep(0.05)
        self.leave([pid])
        return settled(self.store, self.counts)

    def _is_complete(self) -> bool:
        """Return whether the group is at the end of its input: after the last record, if not after its markers."""
        committed = self.store.group_offsets.committed(GROUP)
        for log in self.store.topic("in").partitions():
            position = committed.get(TopicPartition("in", log.number))
            begins = log.log_start_offset if position is None else position.offset
            if any(len(batch) for batch in log.read(begins, isolation="read_committed")):
                return False
        return True
