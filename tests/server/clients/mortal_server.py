"""A server on a machine that is started at a time of the test's choosing: mortal_server.py STORE PORT BOOT.

It prints its address, and then a line of JSON for each that it is given: the name of a question, and its words.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

from segmentlog.security.security_settings import Security
from segmentlog.server.embedded import Server
from segmentlog.server.groups.classic_types import GroupSettings
from segmentlog.server.server_settings import ServerSettings
from segmentlog.storage.fs import FileSystem
from segmentlog.store import LogStore


class OneBoot(FileSystem):
    """The real file system, of a machine with a name for the time since it was started."""

    def __init__(self, boot: str) -> None:
        self._boot = boot

    def boot_id(self) -> str:
        return self._boot


def flush(store: LogStore) -> None:
    """Sync all partitions."""
    for name in store.topics(internal=True):
        for partition in store.topic(name).partitions():
            partition.flush()


def lost(store: LogStore, topic: str) -> list[tuple[int, int]]:
    """Return the range that crashes lost in partition 0."""
    return [(one.base_offset, one.end_offset) for one in store.topic(topic).partition(0).lost_ranges()]


def committed(store: LogStore, group: str) -> dict[str, int]:
    """Return a group's positions, by topic and partition."""
    found = store.group_offsets.committed(group)
    return {f"{where.topic}/{where.partition}": one.offset for where, one in found.items()}


def end(store: LogStore, topic: str, partition: str) -> int:
    """Return the log end offset."""
    return store.topic(topic).partition(int(partition)).log_end_offset


_ANSWERS: dict[str, Callable[..., Any]] = {"flush": flush, "lost": lost, "committed": committed, "end": end}


def main() -> None:
    """Serve until it is killed."""
    path, port, boot = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    # Without a background thread, only requests make data durable, so that a test knows what is on disk.
    store = LogStore(path, fs=OneBoot(boot), background=False)
    groups = GroupSettings(initial_rebalance_delay_ms=100, min_session_timeout_ms=100)
    settings = ServerSettings(acks_all="written", groups=groups)
    server = Server(
        store, host="127.0.0.1", port=port, advertise=None, settings=settings, security=Security(), owns_store=True
    )
    print(server.bootstrap_servers, flush=True)
    for line in sys.stdin:
        what, *words = line.split()
        print(json.dumps(_ANSWERS[what](store, *words)), flush=True)


main()
