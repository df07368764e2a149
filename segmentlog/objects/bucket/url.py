"""Which object store a URL is of."""

from __future__ import annotations

import os
from typing import Final
from urllib.parse import unquote_to_bytes

from segmentlog.errors import InvalidConfig
from segmentlog.objects.bucket.base import Bucket
from segmentlog.objects.bucket.error_messages import without_secrets
from segmentlog.objects.bucket.local_bucket import Folder
from segmentlog.objects.bucket.rate_limit import Pace

_WANTED: Final = (
    "s3://bucket/path, gs://bucket/path, az://container/path, an https:// URL of one of these, or file:///folder"
)
_WANTED_FILE: Final = "three slashes and an absolute path: file:///folder, with %23 for # and %3F for ?"


def is_url(text: object) -> bool:
    """Whether it is meant as the URL of an object store, and not as the path of a folder."""
    return isinstance(text, str) and "://" in text


_SCHEMES: Final = ("s3", "s3a", "gs", "az", "azure", "adl", "abfs", "abfss", "https", "http", "file", "memory")
"""Those that obstore knows, and `open_bucket` itself."""


def check_scheme(name: str, url: str) -> str:
    """A URL that may be an object store's, as far as that can be told here. Raises `InvalidConfig`."""
    if url.partition("://")[0].lower() not in _SCHEMES:
        raise InvalidConfig(name, without_secrets(url), _WANTED)
    return url


def open_bucket(url: object, bytes_per_s: int | None = None) -> Bucket:
    """The object store at a URL, where so many bytes a second are put. Raises `InvalidConfig`; nothing is asked yet."""
    pace = Pace(bytes_per_s)
    if not isinstance(url, str) or "://" not in url:
        raise InvalidConfig("url", without_secrets(url) if isinstance(url, str) else url, _WANTED)
    scheme, _, rest = url.partition("://")
    if scheme.lower() != "file":
        from segmentlog.objects.bucket.cloud_bucket import Cloud  # obstore takes a moment, and is an extra

        return Cloud(url, pace=pace)
    host, slash, path = rest.partition("/")
    path = os.path.normpath("/" + os.fsdecode(unquote_to_bytes(path)).lstrip("/"))
    is_plain = not any(sign in rest for sign in "?#") and "\0" not in path
    if host not in ("", "localhost") or not slash or path == "/" or not is_plain:
        raise InvalidConfig("url", without_secrets(url), _WANTED_FILE)
    return Folder(path, pace=pace)
