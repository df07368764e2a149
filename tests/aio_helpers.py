"""Running coroutines in tests: in a loop of their own, within a time."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

WITHIN_S = 30.0
"""What waits for something that does not come fails, and does not hang."""


def run(coroutine: Coroutine[Any, Any, T], within_s: float = WITHIN_S) -> T:
    """Return the result of a coroutine."""

    async def bounded() -> T:
        async with asyncio.timeout(within_s):
            return await coroutine

    return asyncio.run(bounded())
