"""The least that a log can be: lines appended to a file."""

from __future__ import annotations

import operator
import os
import time
from collections.abc import Callable, Sequence

from bench.systems.base import System, count_all

_without_newline = operator.itemgetter(slice(None, -1))


class PlainFile(System):
    """One ``write`` of joined lines a batch. No index: a random read is not to be had without reading all before it."""

    name = "plain file"
    about = "`os.write` of the joined lines; of full records timestamp, key and value between tabs"

    @classmethod
    def version(cls) -> str:
        return ""

    def open(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._path = self.folder / "log"
        self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._synced_s = time.monotonic()
        # What a careful program does after a crash: count what is there, and cut off half a line.
        self._end = complete = 0
        with open(self._path, "rb") as file:
            for line in file:
                if line.endswith(b"\n"):
                    self._end += 1
                    complete += len(line)
        os.truncate(self._path, complete)

    def close(self) -> None:
        os.close(self._fd)

    def append(self, values: Sequence[bytes], keys: Sequence[bytes] | None = None) -> None:
        if keys is None:
            lines = b"\n".join(values)
        else:
            now = b"%d" % (time.time_ns() // 1_000_000)
            lines = b"\n".join([now + b"\t" + key + b"\t" + value for key, value in zip(keys, values, strict=True)])
        os.write(self._fd, lines + b"\n")
        self._end += len(values)
        if self.sync == "batch":
            os.fdatasync(self._fd)
        elif self.sync == "second" and time.monotonic() - self._synced_s >= 1:
            os.fdatasync(self._fd)
            self._synced_s = time.monotonic()

    def writer(self) -> Callable[[bytes], object]:
        # O_APPEND keeps lines of several threads whole; each syncs for itself, as nobody coordinates them.
        return lambda value: self.append([value])

    def scan_values(self) -> int:
        with open(self._path, "rb") as file:
            return count_all(map(_without_newline, file))

    def scan_records(self) -> int:
        count = 0
        with open(self._path, "rb") as file:
            for offset, line in enumerate(file):
                timestamp, key, value = line[:-1].split(b"\t", 2)
                (offset, int(timestamp), key, value)
                count += 1
        return count

    def read(self, offset: int) -> bytes:
        raise NotImplementedError("it has no index")

    def end(self) -> int:
        return self._end
