"""Run coroutines in tests, each in an event loop of its own and with a time limit."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

WITHIN_S = 30.0
"""A coroutine that waits for an event that never comes fails after this time."""


def run(coroutine: Coroutine[Any, Any, T], within_s: float = WITHIN_S) -> T:
    """Return the result of a coroutine."""

    async def bounded() -> T:
        async with asyncio.timeout(within_s):
            return await coroutine

    return asyncio.run(bounded())
