"""A server of one worker in processes of its own, to be stopped in the middle of something: stopped_server.py JSON.

Options: path, finish_s, fsync_s, users, cert, key. It prints its address once it serves, ``waiting`` when a long
poll begins to wait, ``syncing`` when an fsync begins, and ``left`` when its worker has ended by itself.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

from segmentlog.security.security_settings import Security
from segmentlog.server import long_poll, supervisor, worker_process
from segmentlog.server.groups.classic_types import GroupSettings
from segmentlog.server.server_settings import ServerSettings
from segmentlog.storage.fs import FileSystem


def main() -> None:
    """Serve until it is told to stop."""
    told = json.loads(sys.argv[1])
    fsync_s = told.get("fsync_s", 0.0)

    def fdatasync(fd: int) -> None:
        print("syncing", flush=True)
        time.sleep(fsync_s)
        os.fdatasync(fd)

    def run(*args: Any) -> None:
        worker_process.run(*args)
        print("left", flush=True)

    def on_change(of: supervisor.Supervisor) -> None:
        if of.is_ready and not is_told:
            is_told.append(True)
            print(of.bootstrap_servers, flush=True)

    enter = long_poll.FetchPurgatory.park

    def enter_aloud(self: long_poll.FetchPurgatory, waiter: long_poll.ParkedRequest) -> None:
        enter(self, waiter)
        print("waiting", flush=True)

    long_poll.FetchPurgatory.park = enter_aloud  # type: ignore[method-assign]
    if fsync_s:
        FileSystem.fdatasync = staticmethod(fdatasync)
    for module in (supervisor, worker_process):
        module.FINISH_S = told["finish_s"]  # type: ignore[misc]
    supervisor._PATIENCE_S = told["finish_s"] + 5.0  # type: ignore[misc]
    is_told: list[bool] = []
    security = Security(users=told.get("users"), tls_cert=told.get("cert"), tls_key=told.get("key"))
    settings = ServerSettings(groups=GroupSettings(initial_rebalance_delay_ms=300_000))
    plan = supervisor.ServerPlan(path=told["path"], host="127.0.0.1", port=0, settings=settings, security=security)
    supervisor.Supervisor(plan, run, on_change=on_change).run()


main()
