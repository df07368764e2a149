"""Times: durable appends, waking a follower, point reads, starting, opening."""

from __future__ import annotations

ROWS = ()
