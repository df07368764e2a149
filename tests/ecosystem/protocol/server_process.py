"""`segmentlog serve` for a game: server_process.py JSON, of path, port, workers, full and sabotage.

``port`` is what it tells clients of itself, ``full`` a file: while it is there the disk has no room. It prints the
ports that it listens at, and then the processes of its workers whenever all are there and they are others.
"""

from __future__ import annotations

import faulthandler
import json
import signal
import sys
from typing import Any

from ecosystem.protocol.sabotage import SABOTAGES
from full_disk import FlaggedDisk

from segmentlog.server import worker_process
from segmentlog.server.groups.classic_types import GroupSettings
from segmentlog.server.server_settings import ServerSettings
from segmentlog.server.supervisor import ServerPlan, Supervisor


def main() -> None:
    """Serve until SIGTERM."""
    told = json.loads(sys.argv[1])
    groups = GroupSettings(
        min_session_timeout_ms=100, consumer_session_timeout_ms=told["session_ms"], consumer_heartbeat_interval_ms=100
    )
    plan = ServerPlan(
        path=told["path"], host="127.0.0.1", port=0, workers=told["workers"], advertise=f"127.0.0.1:{told['port']}",
        settings=ServerSettings(groups=groups, auto_create=False),
    )  # fmt: skip
    SABOTAGES[told["sabotage"]]()
    FlaggedDisk(told["path"], told["full"])
    last: list[int] = []

    def child(*args: Any) -> None:
        faulthandler.register(signal.SIGUSR1)
        worker_process.run(*args)

    def tell(of: Supervisor) -> None:
        pids = [one.pid for one in of._children if one.is_ready]
        if of.is_ready and pids != last:
            last[:] = pids
            print(*pids, flush=True)

    supervisor = Supervisor(plan, child, on_change=tell)
    print(*(sock.getsockname()[1] for sock in supervisor._sockets), flush=True)
    supervisor.run()


main()
