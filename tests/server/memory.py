"""How much memory this process takes, or another one."""

from __future__ import annotations

import gc
import os
from pathlib import Path


class Memory:
    """Resident memory allocated since this object was created, so that memory that was only reserved does not count."""

    def __init__(self, pid: int | None = None) -> None:
        self._folder = Path("/proc") / str(pid or os.getpid())
        self._is_own = pid is None
        if self._is_own:
            gc.collect()
        (self._folder / "clear_refs").write_text("5")  # reset the peak
        self._before = self._bytes("VmRSS")

    def grown(self) -> int:
        """Bytes that the process has more now."""
        if self._is_own:
            gc.collect()
        return self._bytes("VmRSS") - self._before

    def peak(self) -> int:
        """Bytes more that it ever had."""
        return self._bytes("VmHWM") - self._before

    def _bytes(self, name: str) -> int:
        for line in (self._folder / "status").read_text().splitlines():
            if line.startswith(name + ":"):
                return int(line.split()[1]) << 10
        raise LookupError(name)
