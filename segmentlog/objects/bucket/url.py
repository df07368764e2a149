"""Open the object store that a URL names."""

from __future__ import annotations

import os
from typing import Final
from urllib.parse import unquote_to_bytes

from segmentlog.errors import InvalidConfig
from segmentlog.objects.bucket.base import Bucket
from segmentlog.objects.bucket.error_messages import without_secrets
from segmentlog.objects.bucket.local_bucket import LocalBucket
from segmentlog.objects.bucket.rate_limit import RateLimiter

_EXPECTED_URL: Final = (
    "s3://bucket/path, gs://bucket/path, az://container/path, an https:// URL of one of these, or file:///folder"
)
_EXPECTED_FILE_URL: Final = "three slashes and an absolute path: file:///folder, with %23 for # and %3F for ?"


def is_url(text: object) -> bool:
    """Return whether a text is meant as the URL of an object store, not as the path of a folder."""
    return isinstance(text, str) and "://" in text


_SCHEMES: Final = ("s3", "s3a", "gs", "az", "azure", "adl", "abfs", "abfss", "https", "http", "file", "memory")
"""Schemes that obstore supports, and ``file``, which `open_bucket` handles itself."""


def check_scheme(name: str, url: str) -> str:
    """Return the URL if its scheme is one of an object store. Otherwise raise `InvalidConfig` with the key ``name``."""
    if url.partition("://")[0].lower() not in _SCHEMES:
        raise InvalidConfig(name, without_secrets(url), _EXPECTED_URL)
    return url


def open_bucket(url: object, bytes_per_s: int | None = None) -> Bucket:
    """Open the object store at a URL, with an optional upload limit in bytes/s. Send no request yet.

    Raise `InvalidConfig` for a text that is not such a URL, or for a URL that needs the extra ``objects`` if that is
    not installed. The result is thread-safe.
    """
    limiter = RateLimiter(bytes_per_s)
    if not isinstance(url, str) or "://" not in url:
        raise InvalidConfig("url", without_secrets(url) if isinstance(url, str) else url, _EXPECTED_URL)
    scheme, _, rest = url.partition("://")
    if scheme.lower() != "file":
        from segmentlog.objects.bucket.cloud_bucket import CloudBucket  # imports obstore: slow, and an extra

        return CloudBucket(url, limiter=limiter)
    host, slash, path = rest.partition("/")
    path = os.path.normpath("/" + os.fsdecode(unquote_to_bytes(path)).lstrip("/"))
    is_plain = not any(sign in rest for sign in "?#") and "\0" not in path
    if host not in ("", "localhost") or not slash or path == "/" or not is_plain:
        raise InvalidConfig("url", without_secrets(url), _EXPECTED_FILE_URL)
    return LocalBucket(path, limiter=limiter)
