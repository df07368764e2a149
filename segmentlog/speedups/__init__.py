"""Loops over bytes, for which Python is slow: compiled where the install found a C compiler, interpreted elsewhere.

`records` contains only pure functions over bytes. ``setup.py`` compiles it.
"""

from __future__ import annotations

from typing import Final

from segmentlog.speedups import records

COMPILED: Final = not str(records.__file__).endswith(".py")
"""Whether the functions of `records` are machine code. If not, they return the same results more slowly."""

CORE_NAME: Final = "compiled core" if COMPILED else "interpreted core"
"""The name that ``segmentlog --version`` and the first log line of a server print."""
