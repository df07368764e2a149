"""S3, Google Cloud Storage, Azure and compatible stores, through obstore (Rust's ``object_store``).

obstore finds credentials, region, endpoint and encryption by itself, in environment variables and metadata services. It
does not read AWS profiles; `aws_profiles` does. It retries requests that are safe to repeat, with exponential back-off
and jitter.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from segmentlog.errors import ConditionIgnored, InvalidConfig, ObjectStoreError
from segmentlog.objects.bucket.aws_profiles import ProfileCredentials, profile_options
from segmentlog.objects.bucket.base import Data, ObjectInfo, ObjectMissing, PreconditionFailed
from segmentlog.objects.bucket.error_messages import ErrorFormatter, credential_sources, is_retriable, without_secrets
from segmentlog.objects.bucket.rate_limit import RateLimiter

if TYPE_CHECKING:
    from obstore.store import ObjectStore

_DELETE_BATCH_KEYS: Final = 500
_RETRIES: Final = 4
_RETRY_S: Final = 15
"""A limit for retries inside obstore. The caller retries, too, and reports the reason between attempts."""
_REQUEST_S: Final = 60
"""Time limit of one request with all its bytes. Parts upload in parallel, so each must finish within it."""
_PART_BYTES: Final = 8 << 20
"""Size of one download request."""
_PUT_BYTES: Final = 16 << 20
"""Size of one upload request. Parts of segments have about this size."""
_PARTS: Final = 4
"""Parallel requests for one object."""

_CLIENT_SETTINGS: Final = (
    "allow_http", "allow_invalid_certificates", "connect_timeout", "pool_idle_timeout", "pool_max_idle_per_host",
    "proxy_url", "proxy_excludes", "proxy_ca_certificate", "timeout", "user_agent",
)  # fmt: skip
"""Client settings. obstore reads them from the environment only without client options, and this module passes one."""
_PREFIXES: Final = {"s3": "AWS_", "s3a": "AWS_", "gs": "GOOGLE_", "az": "AZURE_", "abfs": "AZURE_", "abfss": "AZURE_"}

_NO_TAG: Final = {"e_tag": '"00000000000000000000000000000000"', "version": "1"}
"""A tag that no uploaded object has."""

_threads_of = 0
"""Process id of the process in which obstore started its threads. obstore hangs in forked children of that process."""


class CloudBucket:
    """A `Bucket` at a URL that obstore supports. Thread-safe.

    ``options`` are passed to obstore, for tests and for servers that need special settings.
    """

    def __init__(self, url: str, *, limiter: RateLimiter | None = None, **options: Any) -> None:
        self._limiter = limiter or RateLimiter()
        self.url = without_secrets(url).rstrip("/")
        self._formatter = ErrorFormatter(url, options)
        self._obstore = _load(self.url)
        given: dict[str, Any] = {}
        if not url.startswith(("memory:", "file:")):  # obstore sends no requests to these
            given["retry_config"] = {"max_retries": _RETRIES, "retry_timeout": timedelta(seconds=_RETRY_S)}
            given["client_options"] = {"timeout": f"{_REQUEST_S}s"} | _client_settings(url)
            given["client_options"] |= options.pop("client_options", {})
        given |= profile_options(url, options)
        self._keys: ProfileCredentials | None = given.get("credential_provider")
        try:
            self._store: ObjectStore = self._obstore.store.from_url(url, **(given | options))
        except Exception as error:  # the builder raises many types
            raise InvalidConfig(
                "url", self.url, f"a URL that obstore can open (obstore: {self._formatter.describe(error)})"
            ) from None

    def __repr__(self) -> str:
        return f"CloudBucket({self.url!r})"

    def get(self, key: str) -> tuple[bytes, str]:
        """Implement `Bucket.get`. Download a large object in parts, so that each request meets its time limit."""
        with self._translating_errors(key):
            found = self._obstore.get(self._store, key)
            size_bytes, tag = found.meta["size"], found.meta["e_tag"]
            if size_bytes <= _PART_BYTES or tag is None:
                return found.bytes().to_bytes(), _tag(found.meta)
            meta = found.meta
            del found  # also closes its connection
            parts = []
            for start in range(0, size_bytes, _PART_BYTES):
                options = {"range": (start, min(start + _PART_BYTES, size_bytes)), "if_match": tag}
                parts.append(self._obstore.get(self._store, key, options=options).bytes())
            return b"".join(parts), _tag(meta)

    def get_range(self, key: str, start: int, size_bytes: int) -> Data:
        """Implement `Bucket.get_range`. Return a view of obstore's memory: a copy would take a quarter of the time."""
        if not size_bytes:
            return b""
        with self._translating_errors(key):
            data = memoryview(self._obstore.get_range(self._store, key, start=start, length=size_bytes))
        if len(data) != size_bytes:
            raise ObjectStoreError(
                self.url, key, f"the object is {size_bytes - len(data)} bytes shorter than expected", False
            )
        return data

    def put(self, key: str, data: Data) -> None:
        """Implement `Bucket.put`. Upload a large object in parallel parts."""
        paced: Data | Iterator[memoryview] = data
        if self._limiter.is_limited:
            if len(data) > _PUT_BYTES:
                paced = self._limiter.paced_pieces(data)
            else:
                self._limiter.wait(len(data))
        with self._translating_errors(key, writes=True):
            self._obstore.put(self._store, key, paced, chunk_size=_PUT_BYTES, max_concurrency=_PARTS)

    def compare_and_swap(self, key: str, data: Data, tag: str | None) -> str:
        """Implement `Bucket.compare_and_swap`. Check at the first put that the object store honours conditions."""
        mode = "create" if tag is None else json.loads(tag)
        found = self._put_if(key, data, mode)
        if tag is None:
            self._check_conditions(key, data, found)
        return found

    def _put_if(self, key: str, data: Data, mode: str | dict[str, str]) -> str:
        with self._translating_errors(key, writes=True):
            return _tag(self._obstore.put(self._store, key, data, mode=mode, use_multipart=False))

    def _check_conditions(self, key: str, data: Data, tag: str) -> None:
        """Send conditional puts that must be refused. Some servers ignore the condition and report success."""
        for mode in ("create", {name: _NO_TAG[name] for name in json.loads(tag)}):
            try:
                self._put_if(key, data, mode)
            except ObjectStoreError:
                continue
            why = (
                "this object store ignores conditional writes, so owners could overwrite each other; use another store"
            )
            raise ConditionIgnored(self.url, key, why)

    def delete(self, keys: Iterable[str]) -> None:
        """Implement `Bucket.delete`."""
        rest = list(keys)
        while rest:
            some, rest = rest[:_DELETE_BATCH_KEYS], rest[_DELETE_BATCH_KEYS:]
            try:
                self._delete(some)
            except ObjectMissing:  # one object was missing; the others may or may not be deleted
                for key in some:
                    with contextlib.suppress(ObjectMissing):
                        self._delete([key])

    def _delete(self, keys: list[str]) -> None:
        with self._translating_errors(keys[0]):
            self._obstore.delete(self._store, keys)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Implement `Bucket.list`."""
        # obstore accepts only whole path segments as a prefix.
        below = prefix.rpartition("/")[0]
        with self._translating_errors(prefix or "/", writes=True):
            for some in self._obstore.list(self._store, below or None):
                for found in some:
                    if found["path"].startswith(prefix):
                        yield ObjectInfo(found["path"], found["size"], int(found["last_modified"].timestamp() * 1000))

    @contextlib.contextmanager
    def _translating_errors(self, key: str, *, writes: bool = False) -> Iterator[None]:
        """Translate obstore's errors; add the URL, the key and whether a retry can succeed.

        A response 404 means a missing object, except in ``writes``, where it is an error of the bucket.
        """
        errors = self._obstore.exceptions
        try:
            _check_fork(self.url, key)
            yield
        except FileNotFoundError as error:
            text = self._describe(error)
            if writes or not self._formatter.concerns_object(error):
                raise ObjectStoreError(self.url, key, text, False) from None
            raise ObjectMissing(self.url, key) from None
        except (errors.AlreadyExistsError, errors.PreconditionError) as error:
            if not self._formatter.concerns_object(error):
                raise ObjectStoreError(self.url, key, self._describe(error), False) from None
            raise PreconditionFailed(self.url, key) from None
        except errors.NotSupportedError as error:
            why = (
                f"this object store lacks an operation that shipping needs, a conditional put ({self._describe(error)})"
            )
            raise ObjectStoreError(self.url, key, why, False) from None
        except (errors.PermissionDeniedError, errors.UnauthenticatedError) as error:
            raise ObjectStoreError(self.url, key, f"access denied: {self._describe(error)}", False) from None
        except (errors.BaseError, OSError, ValueError) as error:
            raise ObjectStoreError(self.url, key, self._describe(error), is_retriable(error)) from None

    def _describe(self, error: BaseException) -> str:
        """Return the text of an error without secrets. If credentials are missing, name the places searched."""
        if self._keys is None:
            sources = credential_sources(self.url, error)
            text = self._formatter.describe(error)
            return f"no credentials were found in {sources} ({text})" if sources else text
        if self._keys.failure:
            return self._formatter.redact(self._keys.failure)
        return self._formatter.describe(error, self._keys.secrets)


def _tag(found: Any) -> str:
    # Leave out fields that the server does not set: obstore does not accept None.
    return json.dumps({key: found[key] for key in ("e_tag", "version") if found[key] is not None})


def _client_settings(url: str) -> dict[str, str]:
    """Return the connection settings in the environment."""
    prefix = _PREFIXES.get(url.partition(":")[0].lower(), "AWS_")
    found = {setting: os.environ.get(prefix + setting.upper()) for setting in _CLIENT_SETTINGS}
    return {setting: value for setting, value in found.items() if value is not None}


def _check_fork(url: str, key: str) -> None:
    global _threads_of
    _threads_of = _threads_of or os.getpid()
    if _threads_of != os.getpid():
        why = "obstore cannot be used in a process that was forked after its first use; start processes with 'spawn'"
        raise ObjectStoreError(url, key, why, False)


def _load(url: str) -> Any:
    try:
        import obstore
        import obstore.exceptions
        import obstore.store
    except ImportError:
        raise InvalidConfig(
            "url",
            url,
            "a folder (file:///...). To use an object store, install obstore: pip install '.[objects]' in a clone of"
            " segmentlog",
        ) from None
    return obstore
