"""How an open store reaches segments that lie in an object store alone: by what is made when the first one is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from segmentlog.storage import fork_safety
from segmentlog.storage.fs import FileSystem, Ranges, Reach


class Reaches(Protocol):
    """What is made: `objects.tier.remote_reader.Tiered`."""

    def reach(self, fs: FileSystem, path: str) -> Ranges | None:
        """As `FileSystem.ranged`."""

    def know(self, url: str) -> None:
        """By this URL, which may hold what is secret, its place is to be reached."""

    def close(self) -> None:
        """Bring nothing more. Idempotent."""


Made = TypeVar("Made", bound=Reaches)


class Reaching(Generic[Made]):
    """Of one store, which does not load what it does not need. Thread-safe."""

    def __init__(self, fs: FileSystem, make: Callable[[], Made]) -> None:
        self._fs = fs
        self._make = make
        self._urls: list[str] = []
        self._before: Reach | None = None
        self._mutex = fork_safety.lock(self, "_mutex")
        self.made: Made | None = None
        """None before the first such segment was read."""

    def begin(self) -> None:
        """From now on the files of the store are looked at so, until it is closed."""
        self._before, self._fs.reach_by = self._fs.reach_by, self

    def know(self, url: object) -> None:
        """The store is shipped there."""
        if isinstance(url, str):
            self._urls.append(url)
            if self.made is not None:
                self.made.know(url)

    def __call__(self, path: str) -> Ranges | None:
        """As `FileSystem.ranged`."""
        made = self.made
        if made is None:
            with self._mutex:
                made = self.made
                if made is None:
                    made = self._make()
                    for url in self._urls:
                        made.know(url)
                    self.made = made
        return made.reach(self._fs, path)

    def close(self) -> None:
        """What was brought goes. Idempotent."""
        if self._fs.reach_by is self:
            self._fs.reach_by = self._before
        if self.made is not None:
            self.made.close()
