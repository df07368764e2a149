"""An object store in memory, whose requests fail in all the ways that requests fail, by a seed."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from segmentlog.errors import ObjectStoreError
from segmentlog.objects.bucket import Data, Listed, ObjectChanged, ObjectMissing
from segmentlog.testing.faults import Died

FAULTS = ("before", "after", "late", "doubled", "refused though done", "death before", "death after")


class Memory:
    """What lies there, and what is still on its way: requests whose sender has given up on them."""

    def __init__(self) -> None:
        self.objects: dict[str, tuple[bytes, str]] = {}
        self.late: list[Callable[[], object]] = []
        self.number = 0
        self.now_ms = 0

    def put(self, key: str, data: bytes) -> str:
        """Put it; its tag."""
        self.number += 1
        self.objects[key] = (data, str(self.number))
        return str(self.number)

    def swap(self, key: str, data: bytes, tag: str | None) -> str | None:
        """Put it if the tag is still that one; None when it is not."""
        there = self.objects.get(key)
        if (None if there is None else there[1]) != tag:
            return None
        return self.put(key, data)


class StormBucket:
    """A `Bucket` onto a `Memory`, for one machine. ``calm`` lets every request through."""

    def __init__(self, memory: Memory, rng: random.Random, seen: Counter[str], rate: float = 0.08) -> None:
        self.url = "memory://bucket"
        self.memory = memory
        self._rng = rng
        self._seen = seen
        self._rate = rate
        self.calm = False

    def _fault(self, *, writes: bool) -> str:
        """What becomes of a request; empty when nothing does."""
        memory = self.memory
        while memory.late and self._rng.random() < 0.3:
            memory.late.pop(self._rng.randrange(len(memory.late)))()
            self._seen["late arrivals"] += 1
        if self.calm or self._rng.random() >= self._rate:
            return ""
        fault = self._rng.choice(FAULTS if writes else ("before", "death before"))
        self._seen[fault] += 1
        return fault

    def _write(self, what: str, do: Callable[[], str | None]) -> str | None:
        """A request that changes something, with whatever becomes of it."""
        fault = self._fault(writes=True)
        if fault == "death before":
            raise Died
        if fault == "before":
            raise ObjectStoreError(self.url, what, "503")
        if fault == "late":
            self.memory.late.append(do)
            raise ObjectStoreError(self.url, what, "time-out")
        result = do()
        if fault == "doubled":
            self.memory.late.append(do)
        if fault == "death after":
            raise Died
        if fault == "after":
            raise ObjectStoreError(self.url, what, "connection reset")
        if fault == "refused though done" and result is not None:
            return None
        return result

    def get(self, key: str) -> tuple[bytes, str]:
        """As `Bucket.get`."""
        self._read(key)
        if key not in self.memory.objects:
            raise ObjectMissing(self.url, key)
        return self.memory.objects[key]

    def get_range(self, key: str, start: int, size_bytes: int) -> bytes:
        """As `Bucket.get_range`."""
        data = self.get(key)[0][start : start + size_bytes]
        assert len(data) == size_bytes
        return data

    def _read(self, key: str) -> None:
        fault = self._fault(writes=False)
        if fault == "death before":
            raise Died
        if fault:
            raise ObjectStoreError(self.url, key, "500")

    def put(self, key: str, data: Data) -> None:
        """As `Bucket.put`; nobody puts something else under a name that was used."""
        copy = bytes(data)

        def do() -> str:
            assert self.memory.objects.get(key, (copy, ""))[0] == copy
            return self.memory.put(key, copy)

        if self._write(key, do) is None:
            raise ObjectStoreError(self.url, key, "412, though it was done")

    def swap(self, key: str, data: Data, tag: str | None) -> str:
        """As `Bucket.swap`."""
        copy = bytes(data)
        result = self._write(key, lambda: self.memory.swap(key, copy, tag))
        if result is None:
            raise ObjectChanged(self.url, key)
        return result

    def delete(self, keys: Iterable[str]) -> None:
        """As `Bucket.delete`."""
        wanted = list(keys)

        def do() -> str:
            for key in wanted:
                self.memory.objects.pop(key, None)
            return "done"

        self._write("delete", do)

    def list(self, prefix: str = "") -> Iterator[Listed]:
        """As `Bucket.list`."""
        for key, (data, _) in sorted(self.memory.objects.items()):
            if key.startswith(prefix):
                yield Listed(key, len(data), 0)
