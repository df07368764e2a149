"""S3, Google Cloud Storage, Azure and what speaks like them, through obstore (Rust's ``object_store``).

Credentials, regions, endpoints, encryption are its own affair: environment variables, profiles, instance roles. It
sends what can be sent twice again by itself, ever more seldom and with jitter.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from segmentlog.errors import InvalidConfig, ObjectStoreError
from segmentlog.objects.bucket import Data, Listed, ObjectChanged, ObjectMissing

if TYPE_CHECKING:
    from obstore.store import ObjectStore

_DELETED_AT_ONCE: Final = 500
_RETRIES: Final = 4
_RETRY_S: Final = 15
"""Who ships tries again by itself, and says why meanwhile."""
_SECRET = re.compile(r"\?[^\s\"'>)]*|//[^/\s@]*@")
_WORDS_MAX: Final = 400


class Cloud:
    """A `Bucket` at a URL that obstore knows. Thread-safe. ``options`` are obstore's, for tests and odd servers."""

    def __init__(self, url: str, **options: Any) -> None:
        self.url = without_secrets(url)
        self._obstore = _load()
        retry = {"max_retries": _RETRIES, "retry_timeout": timedelta(seconds=_RETRY_S)}
        try:
            self._store: ObjectStore = self._obstore.store.from_url(url, retry_config=retry, **options)
        except Exception as error:  # of whatever kind: the builder has many
            raise InvalidConfig("url", self.url, f"one that obstore can open ({_words_of(error)})") from None

    def get(self, key: str) -> tuple[bytes, str]:
        """As `Bucket.get`."""
        with self._telling(key):
            found = self._obstore.get(self._store, key)
            return found.bytes().to_bytes(), _tag(found.meta)

    def get_range(self, key: str, start: int, size_bytes: int) -> bytes:
        """As `Bucket.get_range`."""
        if not size_bytes:
            return b""
        with self._telling(key):
            data: bytes = self._obstore.get_range(self._store, key, start=start, length=size_bytes).to_bytes()
        if len(data) != size_bytes:
            raise ObjectStoreError(self.url, key, f"it ends {size_bytes - len(data)} bytes too early", False)
        return data

    def put(self, key: str, data: Data) -> None:
        """As `Bucket.put`; in parts, at the same time, what is large."""
        with self._telling(key):
            self._obstore.put(self._store, key, data)

    def swap(self, key: str, data: Data, tag: str | None) -> str:
        """As `Bucket.swap`."""
        mode = "create" if tag is None else json.loads(tag)
        with self._telling(key):
            return _tag(self._obstore.put(self._store, key, data, mode=mode, use_multipart=False))

    def delete(self, keys: Iterable[str]) -> None:
        """As `Bucket.delete`."""
        rest = list(keys)
        while rest:
            some, rest = rest[:_DELETED_AT_ONCE], rest[_DELETED_AT_ONCE:]
            with contextlib.suppress(ObjectMissing), self._telling(some[0]):
                self._obstore.delete(self._store, some)

    def list(self, prefix: str = "") -> Iterator[Listed]:
        """As `Bucket.list`."""
        # A prefix of obstore's is of whole names between slashes.
        below = prefix.rpartition("/")[0]
        with self._telling(prefix or "/"):
            for some in self._obstore.list(self._store, below or None):
                for found in some:
                    if found["path"].startswith(prefix):
                        yield Listed(found["path"], found["size"], int(found["last_modified"].timestamp() * 1000))

    @contextlib.contextmanager
    def _telling(self, key: str) -> Iterator[None]:
        errors = self._obstore.exceptions
        try:
            yield
        except FileNotFoundError:
            raise ObjectMissing(self.url, key) from None
        except (errors.AlreadyExistsError, errors.PreconditionError):
            raise ObjectChanged(self.url, key) from None
        except errors.NotSupportedError as error:
            why = f"this object store cannot do it, shipping takes conditional puts ({_words_of(error)})"
            raise ObjectStoreError(self.url, key, why, False) from None
        except (errors.PermissionDeniedError, errors.UnauthenticatedError) as error:
            raise ObjectStoreError(self.url, key, f"not allowed to: {_words_of(error)}", False) from None
        except (errors.BaseError, OSError, ValueError) as error:
            raise ObjectStoreError(self.url, key, _words_of(error)) from None


def without_secrets(url: str) -> str:
    """The URL without what may be a password or a token in it."""
    return _SECRET.sub(lambda found: "//" if found.group().startswith("//") else "", url)


def _tag(found: Any) -> str:
    # Without what the server does not give: obstore takes no None back.
    return json.dumps({key: found[key] for key in ("e_tag", "version") if found[key] is not None})


def _words_of(error: BaseException) -> str:
    """What an error says, without what may be secret: addresses with their queries are in it."""
    return _SECRET.sub("", " ".join(str(error).split()))[:_WORDS_MAX]


def _load() -> Any:
    try:
        import obstore
        import obstore.exceptions
        import obstore.store
    except ImportError:
        raise InvalidConfig(
            "url",
            "an object store",
            "a folder (file:///...), unless obstore is installed: pip install 'segmentlog[objects]'",
        ) from None
    return obstore
