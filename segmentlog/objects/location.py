"""Which object store a URL is of."""

from __future__ import annotations

import os
from typing import Final
from urllib.parse import unquote, urlsplit

from segmentlog.errors import InvalidConfig
from segmentlog.objects.bucket import Bucket
from segmentlog.objects.folder import Folder

_WANTED: Final = (
    "s3://bucket/path, gs://bucket/path, az://container/path, an https:// URL of one of these, or file:///folder"
)


def is_url(text: object) -> bool:
    """Whether it is meant as the URL of an object store, and not as the path of a folder."""
    return isinstance(text, str) and "://" in text


def open_bucket(url: object) -> Bucket:
    """The object store at a URL. Raises `InvalidConfig`; nothing is asked of it yet."""
    if not isinstance(url, str) or "://" not in url:
        raise InvalidConfig("url", url, _WANTED)
    parts = urlsplit(url)
    if parts.scheme != "file":
        from segmentlog.objects.cloud import Cloud  # obstore takes a moment, and is an extra

        return Cloud(url)
    path = unquote(parts.path)
    if parts.netloc not in ("", "localhost") or not os.path.isabs(path) or path == "/":
        raise InvalidConfig("url", url, "three slashes and an absolute path: file:///folder")
    return Folder(path.rstrip("/"))
