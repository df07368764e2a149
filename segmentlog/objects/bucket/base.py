"""What shipping needs of an object store, whichever it is.

    put      an object under a name that no other has: it may be sent twice
    swap     the one object that changes: only if nobody else changed it meanwhile
    get      all of an object, or a range
    delete   objects that may be gone already
    list     what lies there, for people and for tidying up only: nothing relies on it

All of them may be called by several threads at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol

from segmentlog.errors import ObjectStoreError

Data = bytes | bytearray | memoryview


class Listed(NamedTuple):
    """An object that lies there."""

    key: str
    size_bytes: int
    modified_ms: int


class ObjectMissing(ObjectStoreError):
    """There is no such object. It may have been there a moment ago: who read an old manifest looks for the new one."""

    def __init__(self, url: str, key: str) -> None:
        super().__init__(url, key, "there is no such object", False)
        self.args = (url, key)
        self.key = key


class ObjectChanged(ObjectStoreError):
    """Somebody else has put the object since, or one's own try took effect and its answer was lost."""

    def __init__(self, url: str, key: str) -> None:
        super().__init__(url, key, "somebody has changed it meanwhile", False)
        self.args = (url, key)
        self.key = key


class Bucket(Protocol):
    """A place in an object store. Raises `ObjectStoreError`, which says whether another try may help."""

    url: str
    """Without secrets: for people."""

    def get(self, key: str) -> tuple[bytes, str]:
        """(an object, its tag, for `swap`). Raises `ObjectMissing`."""

    def get_range(self, key: str, start: int, size_bytes: int) -> Data:
        """Bytes ``[start, start + size_bytes)``, all of them. Raises `ObjectMissing`."""

    def put(self, key: str, data: Data) -> None:
        """Put an object; once it returns whoever asks for it gets it."""

    def swap(self, key: str, data: Data, tag: str | None) -> str:
        """Put an object in the place of the one with that tag, or with None where there is none; its tag.

        Raises `ObjectChanged`: nothing was changed by this call, or by an earlier try of it.
        """

    def delete(self, keys: Iterable[str]) -> None:
        """Those that are gone already are no error."""

    def list(self, prefix: str = "") -> Iterator[Listed]:
        """Objects whose names begin so, in no order."""
