"""Recognize clients of librdkafka that hang for ever because of its own faults, from the outside.

lock        its main thread waits for a lock without a time limit, which a broker's thread holds that waits for another
            lock: https://github.com/confluentinc/librdkafka/issues/5476 (a broker is removed while a consumer validates
            its position)
connection  after all brokers were out of reach, it never tries to connect again
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final

DEADLOCK: Final = "librdkafka waits for a lock for ever"
SILENCE: Final = "librdkafka does not connect any more"
_SAMPLES: Final = 40
_EVERY_S: Final = 0.05
"""Clients wait for 100 ms at most before they connect again."""
_FUTEX: Final = "202"


def why_client_hangs(pid: int) -> str:
    """Return why a client of librdkafka hangs; empty if nothing shows that it does. Takes two seconds."""
    locked, is_silent = _endless_waits(pid), True
    for _ in range(_SAMPLES):
        time.sleep(_EVERY_S)
        locked &= _endless_waits(pid)
        is_silent = is_silent and not _has_connection(pid)
    if locked:
        return DEADLOCK
    return SILENCE if is_silent else ""


def _endless_waits(pid: int) -> set[tuple[str, str]]:
    """Return (thread, lock) for each main thread of librdkafka that waits for a lock without a time limit."""
    found = set()
    for thread in Path(f"/proc/{pid}/task").iterdir():
        try:
            name, call = (thread / "comm").read_text().strip(), (thread / "syscall").read_text().split()
        except OSError:  # the thread has ended
            continue
        if name == "rdk:main" and call[0] == _FUTEX and int(call[4], 16) == 0:
            found.add((thread.name, call[1]))
    return found


def _has_connection(pid: int) -> bool:
    """Return whether a process has a TCP socket in any state."""
    inodes = {line.split()[9] for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]}
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            target = os.readlink(f"/proc/{pid}/fd/{fd}")
        except OSError:
            continue
        if target.startswith("socket:[") and target[8:-1] in inodes:
            return True
    return False
