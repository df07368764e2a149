"""The stores that Spark's processes read from: folders, and what was shipped to an object store."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import msgspec

import segmentlog
from segmentlog.defaults import REMOTE_CACHE_BYTES
from segmentlog.errors import InvalidConfig, SegmentlogError, StoreVersionError
from segmentlog.format.file_names import STORE_FILE
from segmentlog.format.manifest import MANIFEST_KEY
from segmentlog.objects.bucket.error_messages import without_secrets
from segmentlog.objects.bucket.url import is_url
from segmentlog.storage import fork_safety

if TYPE_CHECKING:
    from segmentlog.store import LogStore

READ_ONLY: Final = "the folder of a store: what was shipped to an object store is only read there"
_KEPT_MAX: Final = 4


def place_of(path: str | os.PathLike[str]) -> str:
    """Where a store is, for any process on this machine: the URL of an object store, or an absolute path.

    ``file:`` URLs are what Spark calls folders; one is an object store if a store was shipped there.
    """
    text = os.fsdecode(path)
    if not text.startswith("file:"):
        return text if is_url(text) else os.path.abspath(text)
    folder = os.path.abspath("/" + text.removeprefix("file:").lstrip("/"))
    is_shipped = os.path.exists(f"{folder}/{MANIFEST_KEY}") and not os.path.exists(f"{folder}/{STORE_FILE}")
    return f"file://{folder}" if is_shipped else folder


def folder_of(path: str | os.PathLike[str]) -> str:
    """The same, of one that is written to. Raises `InvalidConfig` for an object store."""
    place = place_of(path)
    if is_url(place):
        raise InvalidConfig("path", without_secrets(place), READ_ONLY)
    return place


class Place(msgspec.Struct, frozen=True):
    """A store that is to be read; of what lies in an object store the rest matters, too."""

    path: str
    """Of a folder, or a URL: see `place_of`."""
    only_topics: tuple[str, ...] = ()
    cache_bytes: int = REMOTE_CACHE_BYTES
    cache_dir: str | None = None


def open_store(place: Place) -> LogStore:
    """The store, to read from. Raises `SegmentlogError` that tells where the folder is missing."""
    path = place.path
    if is_url(path):
        return segmentlog.open(
            path, background=False, only_topics=place.only_topics, cache_bytes=place.cache_bytes,
            cache_dir=place.cache_dir or _folder_of_spark(),
        )  # fmt: skip
    try:
        return segmentlog.open(path, create=False, read_only=True, background=False)
    except StoreVersionError as error:
        if os.path.isdir(path):
            raise
        why = "check the path; on a cluster it must be a file system that the driver and every executor have mounted"
        raise SegmentlogError(f"{path}: there is no such folder on host {socket.gethostname()}: {why}") from error


def open_on_driver(path: str, only_topics: tuple[str, ...] = ()) -> LogStore:
    """The store that a pipeline reads. Raises `StoreVersionError` where there is none, as `segmentlog.open` does."""
    place = place_of(path)
    if is_url(place):
        return open_store(Place(place, only_topics))
    return segmentlog.open(place, create=False, read_only=True, background=False)


def _folder_of_spark() -> str | None:
    """An executor's own, which it removes in the end, though it kills its Python processes."""
    folder = os.environ.get("SPARK_LOCAL_DIRS", "").partition(",")[0]
    return folder if os.path.isdir(folder) else None


# ---------------------------------------------------------------- in tasks

_kept: Final[dict[tuple[int, Place], LogStore]] = {}
"""Those at URLs that tasks of this process have opened, the one that was used last at the end.

A Python process of an executor runs one task at a time, many after each other, and is killed in the end: what it leaves
the next one sweeps.
"""


@contextlib.contextmanager
def opened_for_task(place: Place) -> Iterator[LogStore]:
    """The store, as new as it is now; one at a URL is kept open for the tasks that follow in this process."""
    if not is_url(place.path):
        with open_store(place) as store:
            yield store
        return
    key = (fork_safety.generation(), place)  # a forked child leaves its parent's to the parent
    kept = _kept.pop(key, None)
    if kept is not None:
        try:
            kept.refresh_tick()
        except SegmentlogError:  # another store lies there by now, perhaps
            kept.close()
            kept = None
    _kept[key] = kept or open_store(place)
    while len(_kept) > _KEPT_MAX:
        _kept.pop(next(iter(_kept))).close()
    yield _kept[key]
