"""Rows of groups: how long after the death of a member the others have all partitions."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import segmentlog
from bench.server.brokers import OurBroker, Start
from bench.server.clients import ClientFailed, check_confluent
from bench.server.rows import Compared, Figures, Once, Row, Side

_MEMBERS = 3
_PARTITIONS = 6
_SESSION_MS = 6_000
_HEARTBEAT_MS = 1_000
_PATIENCE_S = 60.0
_START = Start(
    of="groups",
    kafka=(
        ("group.consumer.min.session.timeout.ms", str(_SESSION_MS)),
        ("group.consumer.session.timeout.ms", str(_SESSION_MS)),
        ("group.consumer.min.heartbeat.interval.ms", str(_HEARTBEAT_MS)),
        ("group.consumer.heartbeat.interval.ms", str(_HEARTBEAT_MS)),
        ("group.initial.rebalance.delay.ms", "0"),
    ),
)


def rows() -> list[Row]:
    """All of them."""
    what = f"{_MEMBERS} members, session {_SESSION_MS / 1000:g} s, one killed: until the others have all"
    return [
        Row(f"rebalance/{protocol}", "rebalance after a kill",
            (Compared("seconds", f"{protocol} protocol, {what}", "s", target, at_least=False, to=None),),
            _rebalance(protocol), start=_START)
        for protocol, target in (("classic", _SESSION_MS / 1000 + 3.0), ("consumer", None))
    ]  # fmt: skip


class _Member:
    """A process."""

    def __init__(self, side: Side, topic: str, group: str, protocol: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.ecosystem.member", side.broker.bootstrap_servers, topic, group, protocol,
             str(_SESSION_MS)],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.partitions: list[int] = []
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.endswith("\n"):
                self.partitions = [int(word) for word in line.strip().split(",") if word]

    def kill(self) -> None:
        """As ``kill -9``. Idempotent."""
        self._process.kill()
        self._process.wait()
        self._thread.join()
        assert self._process.stdout is not None
        self._process.stdout.close()


def _rebalance(protocol: str) -> Callable[[Side], AbstractContextManager[Once]]:
    @contextmanager
    def prepare(side: Side) -> Iterator[Once]:
        check_confluent()

        def once() -> Figures:
            group = f"bench-{time.time_ns()}"
            if isinstance(side.broker, OurBroker):
                config = {"consumer.session.timeout.ms": _SESSION_MS, "consumer.heartbeat.interval.ms": _HEARTBEAT_MS}
                with segmentlog.open(side.broker.store, background=False) as store:
                    store.groups.configs.alter(group, lambda _: config)
            with side.new_topic(_PARTITIONS) as topic, ExitStack() as stack:
                members = []
                for _ in range(_MEMBERS):
                    members.append(_Member(side, topic.name, group, protocol))
                    stack.callback(members[-1].kill)
                _wait(members)
                members[0].kill()
                began_s = time.perf_counter()
                _wait(members[1:])
                return {"seconds": time.perf_counter() - began_s}

        yield once

    return prepare


def _wait(members: list[_Member]) -> None:
    """Until each has some, and all of them together have all, once."""
    ends_s = time.monotonic() + _PATIENCE_S
    while True:
        shares = [list(one.partitions) for one in members]
        if all(shares) and sorted(number for share in shares for number in share) == list(range(_PARTITIONS)):
            return
        if time.monotonic() > ends_s:
            raise ClientFailed(f"{len(members)} members do not share in {_PATIENCE_S:g} s: {shares}")
        time.sleep(0.005)
