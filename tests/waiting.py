"""Wait for what another thread or process does."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

PATIENCE_S = 180.0
"""Longest wait, in seconds: only a fault takes that long. On a busy machine, Java takes 34 s to read a first record."""

_Value = TypeVar("_Value")


def wait_until(
    condition: Callable[[], _Value], reason: str | Callable[[], object] = "the condition did not become true",
    timeout_s: float = PATIENCE_S, every_s: float = 0.005,
) -> _Value:  # fmt: skip
    """Call ``condition`` until it returns a true value, and return that value; fail with ``reason`` after
    ``timeout_s``.
    """
    ends_s = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < ends_s, reason if isinstance(reason, str) else reason()
        time.sleep(every_s)
    return value
