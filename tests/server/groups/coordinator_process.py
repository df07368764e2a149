"""A worker of a server with one client in a group, in a process of its own, until it is killed.

    coordinator_process.py STORE GROUP SESSION_MS [MEMBER_ID GENERATION]     with both the client goes on as that member

It prints a line for the client once it is settled (member id, generation, assignment in hex), and has it send
heartbeats; one more line for each error that one of them brings.
"""

from __future__ import annotations

import sys
import time

import segmentlog
from segmentlog.server.codec.kafka_errors import ErrorCode
from segmentlog.server.groups.classic_types import GroupSettings, JoinRequest
from segmentlog.server.groups.coordinator import GroupCoordinator


def main() -> None:
    """Work for ever."""
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
