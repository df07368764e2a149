"""A worker of a server with one client in a group, in its own process, until it is killed.

    coordinator_process.py STORE GROUP SESSION_MS [MEMBER_ID GENERATION]     with both, the client is still that member

It prints a line for the client once it is settled (member id, generation, assignment in hex). Then the client sends
heartbeats, and the process prints one line for each error that a heartbeat returns.
"""

from __future__ import annotations

import sys
import time

import segmentlog
from segmentlog.server.codec.kafka_errors import ErrorCode
from segmentlog.server.groups.classic_types import GroupSettings, JoinRequest
from segmentlog.server.groups.coordinator import GroupCoordinator


def main() -> None:
    """Work until the process is killed."""
    path, group, session_ms = sys.argv[1], sys.argv[2], int(sys.argv[3])
    store = segmentlog.open(path, background=False)
    coordinator = GroupCoordinator(
        store, settings=GroupSettings(initial_rebalance_delay_ms=0, min_session_timeout_ms=10)
    )
    if sys.argv[4:]:
        member, generation = sys.argv[4], int(sys.argv[5])
    else:
        request = JoinRequest(
            new_member_id=coordinator.new_member_id("c"), session_timeout_ms=session_ms, protocols=(("range", b""),)
        )
        joined = coordinator.join(group, request)
        if joined.error is not ErrorCode.NONE:
            print(joined.error.name, flush=True)
            sys.exit(1)
        member, generation = joined.member_id, joined.generation
    synced = coordinator.sync(group, member, generation, [(member, b"work")])
    print(member, generation, synced.assignment.hex() or synced.error.name, flush=True)
    while True:
        error = coordinator.heartbeat(group, member, generation)
        if error is not ErrorCode.NONE:
            print(error.name, flush=True)
        time.sleep(session_ms / 5000)


main()
