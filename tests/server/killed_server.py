"""A server in processes of its own, to be killed: killed_server.py STORE PORT WORKERS [SILENT_S [USERS]].

It prints its address once every worker serves, and then the processes of its workers whenever they change.

KILLED_PATIENCE_S  how long it waits for workers that do not end
"""

from __future__ import annotations

import os
import sys

from segmentlog.security.security_settings import Security
from segmentlog.server import supervisor, worker_lifecycle, worker_process
from segmentlog.server.server_settings import ServerSettings


def main() -> None:
    """Serve until it is told to stop."""
    path, port, workers = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    if len(sys.argv) > 4:
        supervisor.SILENT_S = float(sys.argv[4])  # type: ignore[misc]
        worker_lifecycle.HEARTBEAT_S = supervisor.HEARTBEAT_S = supervisor.SILENT_S / 5  # type: ignore[misc]
    if patience_s := os.environ.get("KILLED_PATIENCE_S"):
        supervisor._PATIENCE_S = float(patience_s)  # type: ignore[misc]
    users = sys.argv[5] if len(sys.argv) > 5 else None
    plan = supervisor.ServerPlan(
        path=path, host="127.0.0.1", port=port, workers=workers,
        settings=ServerSettings(default_partitions=4), security=Security(users=users),
    )  # fmt: skip
    told: list[int] = []

    def tell(of: supervisor.Supervisor) -> None:
        pids = [child.pid for child in of._children if child.is_ready]
        if of.is_ready and pids != told:
            told[:] = pids
            print(of.bootstrap_servers, *pids, flush=True)

    try:
        supervisor.Supervisor(plan, worker_process.run, on_change=tell).run()
    except supervisor.WorkerFailed as error:
        print(error, file=sys.stderr)
        sys.exit(3)


main()
