"""How long a game waits for what has to come: nothing comes as late as that, even on a machine that is busy."""

from __future__ import annotations

import time
from collections.abc import Callable

from delivery_cast import PATIENCE_S


def until(what: Callable[[], object], why: str = "it did not come to it in time") -> None:
    """Ask again and again until the answer is true."""
    ends_s = time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < ends_s, why
        time.sleep(0.01)
