"""S3, Google Cloud Storage, Azure and what speaks like them, through obstore (Rust's ``object_store``).

Credentials, regions, endpoints, encryption are its own affair: environment variables, metadata services. It does not
read AWS's profiles; `aws_profiles` does. It sends what can be sent twice again by itself, ever more seldom and with
jitter.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from segmentlog.errors import InvalidConfig, ObjectStoreError
from segmentlog.objects.bucket.aws_profiles import ProfileCredentials, profile_options
from segmentlog.objects.bucket.base import Data, Listed, ObjectChanged, ObjectMissing
from segmentlog.objects.bucket.error_messages import Words, may_help, sources_of_credentials, without_secrets
from segmentlog.objects.bucket.rate_limit import Pace

if TYPE_CHECKING:
    from obstore.store import ObjectStore

_DELETED_AT_ONCE: Final = 500
_RETRIES: Final = 4
_RETRY_S: Final = 15
"""Who ships tries again by itself, and says why meanwhile."""
_REQUEST_S: Final = 60
"""For one request with all its bytes: a part has to get through in it, beside as many as there are at a time."""
_PART_BYTES: Final = 8 << 20
"""What is got in one request."""
_PUT_BYTES: Final = 16 << 20
"""What is put in one request: a part of a segment is."""
_PARTS: Final = 4
"""At a time, of one object."""

_CLIENT_SETTINGS: Final = (
    "allow_http", "allow_invalid_certificates", "connect_timeout", "pool_idle_timeout", "pool_max_idle_per_host",
    "proxy_url", "proxy_excludes", "proxy_ca_certificate", "timeout", "user_agent",
)  # fmt: skip
"""obstore takes them from the environment only where it is told none of them; we tell it one."""
_PREFIXES: Final = {"s3": "AWS_", "s3a": "AWS_", "gs": "GOOGLE_", "az": "AZURE_", "abfs": "AZURE_", "abfss": "AZURE_"}

_NO_TAG: Final = {"e_tag": '"00000000000000000000000000000000"', "version": "1"}
"""Of no object that anybody has put."""

_threads_of = 0
"""The process in which obstore has started threads: its forked children hang when they use it."""


class Cloud:
    """A `Bucket` at a URL that obstore knows. Thread-safe. ``options`` are obstore's, for tests and odd servers."""

    def __init__(self, url: str, *, pace: Pace | None = None, **options: Any) -> None:
        self._pace = pace or Pace()
        self.url = without_secrets(url).rstrip("/")
        self._words = Words(url, options)
        self._obstore = _load()
        given: dict[str, Any] = {}
        if not url.startswith(("memory:", "file:")):  # these know no requests
            given["retry_config"] = {"max_retries": _RETRIES, "retry_timeout": timedelta(seconds=_RETRY_S)}
            given["client_options"] = {"timeout": f"{_REQUEST_S}s"} | _client_settings(url)
            given["client_options"] |= options.pop("client_options", {})
        given |= profile_options(url, options)
        self._keys: ProfileCredentials | None = given.get("credential_provider")
        try:
            self._store: ObjectStore = self._obstore.store.from_url(url, **(given | options))
        except Exception as error:  # of whatever kind: the builder has many
            raise InvalidConfig("url", self.url, f"one that obstore can open ({self._words.of(error)})") from None

    def __repr__(self) -> str:
        return f"Cloud({self.url!r})"

    def get(self, key: str) -> tuple[bytes, str]:
        """As `Bucket.get`; what is large by parts, each of which may take as long as a request may."""
        with self._telling(key):
            found = self._obstore.get(self._store, key)
            size_bytes, tag = found.meta["size"], found.meta["e_tag"]
            if size_bytes <= _PART_BYTES or tag is None:
                return found.bytes().to_bytes(), _tag(found.meta)
            meta = found.meta
            del found  # and its connection
            parts = []
            for start in range(0, size_bytes, _PART_BYTES):
                wanted = {"range": (start, min(start + _PART_BYTES, size_bytes)), "if_match": tag}
                parts.append(self._obstore.get(self._store, key, options=wanted).bytes())
            return b"".join(parts), _tag(meta)

    def get_range(self, key: str, start: int, size_bytes: int) -> Data:
        """As `Bucket.get_range`; a view of what obstore has: a copy would take a quarter of the time."""
        if not size_bytes:
            return b""
        with self._telling(key):
            data = memoryview(self._obstore.get_range(self._store, key, start=start, length=size_bytes))
        if len(data) != size_bytes:
            raise ObjectStoreError(self.url, key, f"it ends {size_bytes - len(data)} bytes too early", False)
        return data

    def put(self, key: str, data: Data) -> None:
        """As `Bucket.put`; in parts, at the same time, what is large."""
        paced: Data | Iterator[memoryview] = data
        if self._pace.is_limited:
            if len(data) > _PUT_BYTES:
                paced = self._pace.pieces(data)
            else:
                self._pace.wait(len(data))
        with self._telling(key, writes=True):
            self._obstore.put(self._store, key, paced, chunk_size=_PUT_BYTES, max_concurrency=_PARTS)

    def swap(self, key: str, data: Data, tag: str | None) -> str:
        """As `Bucket.swap`."""
        mode = "create" if tag is None else json.loads(tag)
        found = self._put_if(key, data, mode)
        if tag is None:
            self._check_conditions(key, data, found)
        return found

    def _put_if(self, key: str, data: Data, mode: str | dict[str, str]) -> str:
        with self._telling(key, writes=True):
            return _tag(self._obstore.put(self._store, key, data, mode=mode, use_multipart=False))

    def _check_conditions(self, key: str, data: Data, tag: str) -> None:
        """Try once what has to be refused: there are servers that take no notice of conditions, and do not say so."""
        for mode in ("create", {name: _NO_TAG[name] for name in json.loads(tag)}):
            try:
                self._put_if(key, data, mode)
            except ObjectStoreError:
                continue
            why = "this object store takes no notice of conditional puts: two owners could write over each other there"
            raise ObjectStoreError(self.url, key, why, False)

    def delete(self, keys: Iterable[str]) -> None:
        """As `Bucket.delete`."""
        rest = list(keys)
        while rest:
            some, rest = rest[:_DELETED_AT_ONCE], rest[_DELETED_AT_ONCE:]
            try:
                self._delete(some)
            except ObjectMissing:  # one of them was, and nobody knows what became of the others
                for key in some:
                    with contextlib.suppress(ObjectMissing):
                        self._delete([key])

    def _delete(self, keys: list[str]) -> None:
        with self._telling(keys[0]):
            self._obstore.delete(self._store, keys)

    def list(self, prefix: str = "") -> Iterator[Listed]:
        """As `Bucket.list`."""
        # A prefix of obstore's is of whole names between slashes.
        below = prefix.rpartition("/")[0]
        with self._telling(prefix or "/", writes=True):
            for some in self._obstore.list(self._store, below or None):
                for found in some:
                    if found["path"].startswith(prefix):
                        yield Listed(found["path"], found["size"], int(found["last_modified"].timestamp() * 1000))

    @contextlib.contextmanager
    def _telling(self, key: str, *, writes: bool = False) -> Iterator[None]:
        """Have what obstore raises say what, where, and whether to try again. Who ``writes`` misses no object."""
        errors = self._obstore.exceptions
        try:
            _check_fork(self.url, key)
            yield
        except FileNotFoundError as error:
            said = self._said(error)
            if writes or not self._words.is_of_object(error):
                raise ObjectStoreError(self.url, key, said, False) from None
            raise ObjectMissing(self.url, key) from None
        except (errors.AlreadyExistsError, errors.PreconditionError) as error:
            if not self._words.is_of_object(error):
                raise ObjectStoreError(self.url, key, self._said(error), False) from None
            raise ObjectChanged(self.url, key) from None
        except errors.NotSupportedError as error:
            why = f"this object store cannot do it, shipping takes conditional puts ({self._said(error)})"
            raise ObjectStoreError(self.url, key, why, False) from None
        except (errors.PermissionDeniedError, errors.UnauthenticatedError) as error:
            raise ObjectStoreError(self.url, key, f"not allowed to: {self._said(error)}", False) from None
        except (errors.BaseError, OSError, ValueError) as error:
            raise ObjectStoreError(self.url, key, self._said(error), may_help(error)) from None

    def _said(self, error: BaseException) -> str:
        """What an error says, without secrets; of credentials that are missing, where they were looked for."""
        if self._keys is None:
            sources = sources_of_credentials(self.url, error)
            said = self._words.of(error)
            return f"no credentials were found in {sources} ({said})" if sources else said
        if self._keys.failure:
            return self._words.scrubbed(self._keys.failure)
        return self._words.of(error, self._keys.secrets)


def _tag(found: Any) -> str:
    # Without what the server does not give: obstore takes no None back.
    return json.dumps({key: found[key] for key in ("e_tag", "version") if found[key] is not None})


def _client_settings(url: str) -> dict[str, str]:
    """What the environment says of connections."""
    prefix = _PREFIXES.get(url.partition(":")[0].lower(), "AWS_")
    found = {setting: os.environ.get(prefix + setting.upper()) for setting in _CLIENT_SETTINGS}
    return {setting: value for setting, value in found.items() if value is not None}


def _check_fork(url: str, key: str) -> None:
    global _threads_of
    _threads_of = _threads_of or os.getpid()
    if _threads_of != os.getpid():
        why = "obstore was used before this process was forked, and does not work in it; start processes with 'spawn'"
        raise ObjectStoreError(url, key, why, False)


def _load() -> Any:
    try:
        import obstore
        import obstore.exceptions
        import obstore.store
    except ImportError:
        raise InvalidConfig(
            "url",
            "an object store",
            "a folder (file:///...), unless obstore is installed: pip install '.[objects]' in a clone of segmentlog",
        ) from None
    return obstore
