"""The nursery of those who play with a server: clients, and processes that have its store open as a library."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any

from delivery_jobs import LibraryProcess
from delivery_process import Process, serve
from ecosystem.protocol.client_jobs import ClientProcess
from full_disk import FlaggedDisk

from segmentlog.errors import DiskFull, GroupInUse, ProducerBusy, TransactionAborted


class LibraryPlayer(LibraryProcess):
    """On a disk that may be full, with topics that grow, and groups that may be in other hands."""

    def place(self) -> tuple[str, int]:
        topic = self.rng.choice(list(self.topics))
        return topic, self.rng.randrange(self.store.topic(topic).partition_count)

    def pause(self) -> None:
        time.sleep(self.rng.choice((0.02, 0.05, 0.1)))

    def again(self, job: Callable[[], None]) -> None:
        while not self.stopping:
            try:
                job()
            except (DiskFull, GroupInUse, ProducerBusy, TransactionAborted) as error:
                self.say("*met", type(error).__name__)
                time.sleep(0.02)

    def plain(self) -> None:
        self.again(super().plain)

    def named(self) -> None:
        self.again(super().named)

    def transactions(self) -> None:
        self.again(super().transactions)

    def pipeline(self) -> None:
        self.again(super().pipeline)


def make(order: dict[str, Any]) -> Process:
    """Create the process that was ordered."""
    FlaggedDisk(order["store"], order["full"])
    if order["kind"] == "library":
        return LibraryPlayer(order)
    client = ClientProcess(order)
    signal.signal(signal.SIGUSR2, client.go_on)
    return client


if __name__ == "__main__":
    serve(make)
