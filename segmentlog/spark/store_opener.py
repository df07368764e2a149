"""Open the stores that Spark's processes read: folders, and stores shipped to an object store."""

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

WRITABLE_PATH: Final = "give the folder of a store; a store in an object store can only be read"
_OPEN_STORES_MAX: Final = 4


def resolve_location(path: str | os.PathLike[str]) -> str:
    """Return the URL of an object store, or the absolute path of a folder, for any process on this machine.

    Spark uses ``file:`` URLs for folders. Such a URL is an object store only if a store was shipped to the folder.
    """
    text = os.fsdecode(path)
    if not text.startswith("file:"):
        return text if is_url(text) else os.path.abspath(text)
    folder = os.path.abspath("/" + text.removeprefix("file:").lstrip("/"))
    is_shipped = os.path.exists(f"{folder}/{MANIFEST_KEY}") and not os.path.exists(f"{folder}/{STORE_FILE}")
    return f"file://{folder}" if is_shipped else folder


def resolve_writable_folder(path: str | os.PathLike[str]) -> str:
    """Return the absolute path of a local store, for writing. Raises `InvalidConfig` for an object store."""
    place = resolve_location(path)
    if is_url(place):
        raise InvalidConfig("path", without_secrets(place), WRITABLE_PATH)
    return place


class StoreLocation(msgspec.Struct, frozen=True):
    """A store to read from. The fields after ``path`` are used only for a store in an object store."""

    path: str
    """Absolute path of a folder, or URL: see `resolve_location`."""
    only_topics: tuple[str, ...] = ()
    cache_bytes: int = REMOTE_CACHE_BYTES
    cache_dir: str | None = None


def open_store(place: StoreLocation) -> LogStore:
    """Open a store for reading. Raises `SegmentlogError` that names this host if the folder does not exist."""
    path = place.path
    if is_url(path):
        return segmentlog.open(
            path, background=False, only_topics=place.only_topics, cache_bytes=place.cache_bytes,
            cache_dir=place.cache_dir or _find_executor_folder(),
        )  # fmt: skip
    try:
        return segmentlog.open(path, create=False, read_only=True, background=False)
    except StoreVersionError as error:
        if os.path.isdir(path):
            raise
        why = "check the path; on a cluster it must be a file system that the driver and every executor have mounted"
        raise SegmentlogError(f"{path}: there is no such folder on host {socket.gethostname()}: {why}") from error


def open_on_driver(path: str, only_topics: tuple[str, ...] = ()) -> LogStore:
    """Open the store that a pipeline reads. Raises `StoreVersionError` if there is none, like `segmentlog.open`."""
    place = resolve_location(path)
    if is_url(place):
        return open_store(StoreLocation(place, only_topics))
    return segmentlog.open(place, create=False, read_only=True, background=False)


def _find_executor_folder() -> str | None:
    """Return the executor's local folder, which Spark removes even if it has killed the Python processes."""
    folder = os.environ.get("SPARK_LOCAL_DIRS", "").partition(",")[0]
    return folder if os.path.isdir(folder) else None


# ---------------------------------------------------------------- in tasks

_open_stores: Final[dict[tuple[int, StoreLocation], LogStore]] = {}
"""Open stores in object stores, in the order of their last use, the newest last.

A Python process of an executor runs one task after another, until the executor kills it. The next process sweeps the
files that it leaves.
"""


@contextlib.contextmanager
def open_for_task(place: StoreLocation) -> Iterator[LogStore]:
    """Open and refresh the store. A store in an object store stays open for later tasks of this process."""
    if not is_url(place.path):
        with open_store(place) as store:
            yield store
        return
    key = (fork_safety.generation(), place)  # a forked child must not use its parent's stores
    kept = _open_stores.pop(key, None)
    if kept is not None:
        try:
            kept.refresh_tick()
        except SegmentlogError:  # perhaps another store was shipped there since
            kept.close()
            kept = None
    _open_stores[key] = kept or open_store(place)
    while len(_open_stores) > _OPEN_STORES_MAX:
        _open_stores.pop(next(iter(_open_stores))).close()
    yield _open_stores[key]
