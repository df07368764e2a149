"""Processes that use a store, are killed or stopped at any moment, and record their actions.

`serve` turns a program into a nursery, which forks these processes in a millisecond instead of 300. It reads lines of
JSON. ``{"job": ..., "label": ..., "log": ..., ...}`` forks a process and answers with its pid. ``{"wait": pid,
"timeout_s": ...}`` answers with its status once it has ended.

A process appends events to the file ``log``; `delivery_checker` describes them. Events that begin with a star are for
people and for the test.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

from segmentlog.errors import SegmentlogError


class Process:
    """One process with its journal, its random choices, and the topics that it may use."""

    def __init__(self, order: dict[str, Any]) -> None:
        self.order = order
        self.label: str = order["label"]
        self.rng = random.Random(order["seed"])
        self.topics: dict[str, int] = order["topics"]
        self.fd = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.number = 0
        self.stopping = False

    def say(self, kind: str, *rest: Any) -> None:
        line = json.dumps([kind, self.label, *rest]) + "\n"
        os.write(self.fd, line.encode())

    def stop(self, *_: Any) -> None:
        self.stopping = True

    def is_told_to_stop(self) -> bool:
        return self.stopping

    def value(self) -> str:
        self.number += 1
        return f"{self.label}-{self.number}" + "." * self.rng.choice((0, 0, 100))

    def pause(self) -> None:
        time.sleep(self.rng.choice((0.0, 0.0005, 0.003)))

    def place(self) -> tuple[str, int]:
        topic = self.rng.choice(list(self.topics))
        return topic, self.rng.randrange(self.topics[topic])

    def close(self) -> None:
        """Run at the end, if the job succeeded."""

    def run(self) -> None:
        self.say("*begun", self.order["job"])
        try:
            getattr(self, self.order["job"])()
            self.close()
        except BaseException:
            self.say("error", traceback.format_exc())
            raise
        self.say("*stopped")


def work(order: dict[str, Any], make: Callable[[dict[str, Any]], Process]) -> int:
    """Run an order in the forked child, and return the exit status."""
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    try:
        process = make(order)
        signal.signal(signal.SIGTERM, process.stop)
        if told:  # before the handler was installed; a check before that could miss a signal
            process.stopping = True
        process.run()
    except (SegmentlogError, OSError):
        traceback.print_exc()
        return 1
    return 0


def wait_for(pid: int, timeout_s: float) -> int:
    """Return the status of a process that ended; -1 while it runs."""
    ends_s = time.monotonic() + timeout_s
    while time.monotonic() < ends_s:
        try:
            found, status = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            return 0  # an earlier order waited for it
        if found:
            return os.waitstatus_to_exitcode(status) & 0xFF
        time.sleep(0.001)
    os.kill(pid, signal.SIGUSR1)  # print the stacks of its threads
    time.sleep(0.5)
    return -1


def serve(make: Callable[[dict[str, Any]], Process]) -> None:
    """Run the nursery: read orders, and fork."""
    faulthandler.register(signal.SIGUSR1)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # until a child has a handler
    for line in sys.stdin:
        order = json.loads(line)
        if "wait" in order:
            print(wait_for(order["wait"], order["timeout_s"]), flush=True)
            continue
        pid = os.fork()
        if not pid:
            status = 1
            try:
                os.close(0)
                status = work(order, make)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        print(pid, flush=True)
