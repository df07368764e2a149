"""A server whose machine loses its power, on a disk that forgets what was not synced."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from segmentlog.testing.crashfs import CrashFS
from segmentlog.testing.ports import free_ports

_SERVER = Path(__file__).with_name("mortal_server.py")


class MortalServer:
    """On one port, before and after its machine has died. ``acks=all`` waits for no disk; `flush` does."""

    def __init__(self, disk: CrashFS) -> None:
        self._disk = disk
        self._port = free_ports()
        self._boots = 0
        self._process: Any = None
        self.address = f"127.0.0.1:{self._port}"
        self.start()

    def start(self) -> None:
        """Start the server on the disk."""
        self._boots += 1
        command = [sys.executable, str(_SERVER), str(self._disk.path / "store"), str(self._port), f"boot-{self._boots}"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout.readline().strip() == self.address

    def flush(self) -> None:
        """Sync everything that was appended."""
        self._ask("flush")

    def lost(self, topic: str) -> list[list[int]]:
        """Return the start and the end of the range that crashes lost in its first partition."""
        return self._ask("lost", topic)  # type: ignore[no-any-return]

    def committed(self, group: str) -> dict[str, int]:
        """Return the positions of a group, by topic and partition."""
        return self._ask("committed", group)  # type: ignore[no-any-return]

    def end(self, place: str) -> int:
        """Return the log end offset of TOPIC/PARTITION."""
        return self._ask("end", *place.split("/"))  # type: ignore[no-any-return]

    def _ask(self, *words: str) -> Any:
        """Ask the server's process: no other process has the store open when the power fails."""
        self._process.stdin.write(" ".join(words) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def kill(self) -> None:
        """Kill the server like `kill -9`."""
        self._process.kill()
        self._process.communicate()

    def lose_power(self) -> None:
        """Kill the server, and lose all unsynced data."""
        self.kill()
        self._disk.crash(0, "none")
