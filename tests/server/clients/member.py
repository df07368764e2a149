"""A member of a group in a process of its own, until it is killed: member.py CLIENT BOOTSTRAP GROUP TOPIC."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any


def main() -> None:
    """Consume, commit and report, forever."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from server.clients.kinds import driver_class

    client, bootstrap, group, topic = sys.argv[1:]
    driver: Any = driver_class(client)(bootstrap)
    driver.run_member(group, topic)


main()
