"""The interface of an object store: the operations that segmentlog uses.

    put               upload an object under a name that is used only once; repeating the call is harmless
    compare_and_swap  replace the manifest, the only object that changes, unless another process replaced it first
    get, get_range    download an object, or a part of it
    delete            delete objects; some may be deleted already
    list              list objects, for people and garbage collection only: no decision of shipping depends on it

Every method can be called from several threads at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol

from segmentlog.errors import ObjectStoreError

Data = bytes | bytearray | memoryview


class ObjectInfo(NamedTuple):
    """Name, size and age of an object, as the object store lists it."""

    key: str
    size_bytes: int
    modified_ms: int


class ObjectMissing(ObjectStoreError):
    """The object does not exist. Garbage collection may have deleted it: read the current manifest and try again."""

    def __init__(self, url: str, key: str) -> None:
        super().__init__(url, key, "there is no such object", False)
        self.args = (url, key)
        self.key = key


class PreconditionFailed(ObjectStoreError):
    """A conditional put failed: another process has replaced the object.

    It may also have been an earlier attempt of this process, which succeeded although its response was lost.
    """

    def __init__(self, url: str, key: str) -> None:
        super().__init__(url, key, "another process has changed it meanwhile", False)
        self.args = (url, key)
        self.key = key


class Bucket(Protocol):
    """The objects below one URL. Methods raise `ObjectStoreError`; its ``retriable`` is true if a retry can succeed."""

    url: str
    """The URL without secrets, for messages."""

    def get(self, key: str) -> tuple[bytes, str]:
        """Return (content of an object, its tag for `compare_and_swap`). Raise `ObjectMissing`."""

    def get_range(self, key: str, start: int, size_bytes: int) -> Data:
        """Return all bytes ``[start, start + size_bytes)`` of an object. Raise `ObjectMissing`."""

    def put(self, key: str, data: Data) -> None:
        """Upload an object. When this call returns, every reader gets the object."""

    def compare_and_swap(self, key: str, data: Data, tag: str | None) -> str:
        """Replace the object that has this tag, and return the new tag; with None create the object.

        Raise `PreconditionFailed` if the object has another tag, or exists although the tag is None. Then this call
        changed nothing, but an earlier call with the same data may have succeeded.
        """

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects. An object that does not exist is not an error."""

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield the objects whose names start with ``prefix``, in any order."""
