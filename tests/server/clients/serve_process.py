"""`segmentlog serve`, whose groups miss a dead member sooner than its options allow.

serve_process.py STORE WORKERS [PORT]

SERVED_LOG  the level from which on its workers log; WARNING
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
from typing import Any

from segmentlog.server.groups.classic_types import GroupSettings
from segmentlog.server.server_settings import ServerSettings
from segmentlog.server.supervisor import ServerPlan, Supervisor


def _child(*args: Any) -> None:
    logging.basicConfig(level=os.environ.get("SERVED_LOG", "WARNING"))
    faulthandler.register(signal.SIGUSR1)  # for a test that fails: where every thread is
    from segmentlog.server.worker_process import run

    run(*args)


_told: list[str] = []


def _tell(supervisor: Supervisor) -> None:
    """Print the address once: later output could fill the pipe, which is not read any more, and block the server."""
    if supervisor.is_ready and not _told:
        _told.append(supervisor.bootstrap_servers)
        print(supervisor.bootstrap_servers, flush=True)


def main() -> None:
    """Serve until SIGTERM."""
    settings = ServerSettings(groups=GroupSettings(min_session_timeout_ms=100))
    path, workers, port = sys.argv[1], int(sys.argv[2]), int(sys.argv[3] if len(sys.argv) > 3 else 0)
    plan = ServerPlan(path=path, host="127.0.0.1", port=port, workers=workers, settings=settings)
    Supervisor(plan, _child, on_change=_tell).run()


main()
