"""Create the reader for evicted segments of an open store when the first one is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from segmentlog.storage import fork_safety
from segmentlog.storage.fs import FileSystem, Ranges, Reach


class SegmentReader(Protocol):
    """A reader for evicted segments; `objects.tier.remote_reader.RemoteReader` is one."""

    def open_segment(self, fs: FileSystem, path: str) -> Ranges | None:
        """Open an evicted segment, as `FileSystem.ranged` does."""

    def add_url(self, url: str) -> None:
        """Use the secrets in this URL for evicted segments whose stub names the same URL without secrets."""

    def close(self) -> None:
        """Stop downloads and remove the cache. Idempotent."""


Reader = TypeVar("Reader", bound=SegmentReader)


class LazyRemoteReader(Generic[Reader]):
    """Reads evicted segments of one store. Creates the actual reader when the first segment is read. Thread-safe.

    So a store without evicted segments does not import the modules for object stores.
    """

    def __init__(self, fs: FileSystem, create: Callable[[], Reader]) -> None:
        self._fs = fs
        self._create = create
        self._urls: list[str] = []
        self._before: Reach | None = None
        self._mutex = fork_safety.lock(self, "_mutex")
        self.reader: Reader | None = None
        """None before the first evicted segment was read."""

    def install(self) -> None:
        """Let the store's file system read evicted segments, until `close`."""
        self._before, self._fs.reach_by = self._fs.reach_by, self

    def add_url(self, url: object) -> None:
        """Use the secrets in this URL for evicted segments whose stub names the same URL without secrets."""
        if isinstance(url, str):
            self._urls.append(url)
            if self.reader is not None:
                self.reader.add_url(url)

    def __call__(self, path: str) -> Ranges | None:
        """Open an evicted segment, as `FileSystem.ranged` does."""
        reader = self.reader
        if reader is None:
            with self._mutex:
                reader = self.reader
                if reader is None:
                    reader = self._create()
                    for url in self._urls:
                        reader.add_url(url)
                    self.reader = reader
        return reader.open_segment(self._fs, path)

    def close(self) -> None:
        """Remove the reader and its cache. Idempotent."""
        if self._fs.reach_by is self:
            self._fs.reach_by = self._before
        if self.reader is not None:
            self.reader.close()
