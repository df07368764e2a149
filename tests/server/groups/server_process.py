"""A server of a store in a process of its own, until it is killed: server_process.py STORE PORT DELAY_MS."""

from __future__ import annotations

import sys
import time

import segmentlog
from segmentlog.server.embedded import Server
from segmentlog.server.groups.classic_types import GroupSettings
from segmentlog.server.server_settings import ServerSettings
from segmentlog.server.worker import Security


def main() -> None:
    """Serve until the process is killed."""
    path, port, delay_ms = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    groups = GroupSettings(
        initial_rebalance_delay_ms=delay_ms, min_session_timeout_ms=100, consumer_session_timeout_ms=6_000,
        consumer_heartbeat_interval_ms=200,
    )  # fmt: skip
    server = Server(
        segmentlog.open(path), host="127.0.0.1", port=port, advertise=None, settings=ServerSettings(groups=groups),
        security=Security(), owns_store=True,
    )  # fmt: skip
    print(server.bootstrap_servers, flush=True)
    time.sleep(3600)


main()
