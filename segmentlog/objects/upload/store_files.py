"""Putting the store's own files: those that are others than what lies there."""

from __future__ import annotations

import xxhash

from segmentlog.format.file_names import SHIPPED_FILES
from segmentlog.format.manifest import Manifest, StoreFile
from segmentlog.objects.bucket import upload_pool
from segmentlog.objects.bucket.base import Bucket
from segmentlog.objects.manifest.orphans import Orphans
from segmentlog.storage.file_operations import read_file
from segmentlog.storage.fs import FileSystem


class StoreFiles:
    """Of one shipper. For one thread at a time."""

    def __init__(self, fs: FileSystem, folder: str, bucket: Bucket, orphans: Orphans) -> None:
        self._fs = fs
        self._folder = folder
        self._bucket = bucket
        self._orphans = orphans
        self._put: dict[str, tuple[tuple[int, ...], StoreFile]] = {}
        """By path, those that lie there, and what each looked like here when it was put."""

    @property
    def there(self) -> tuple[StoreFile, ...]:
        """What the manifest is to say of them."""
        return tuple(file for _, file in self._put.values())

    def put(self, manifest: Manifest | None) -> None:
        """Put those that ``manifest``, which lies there, does not have as they are here."""
        there = {file.path: file for file in manifest.files} if manifest else {}
        before, self._put = self._put, {}
        for path in SHIPPED_FILES:
            local = f"{self._folder}/{path}"
            try:
                found = self._fs.stat(local)
                looks = (found.st_ino, found.st_size, found.st_mtime_ns)
                if path in before and before[path][0] == looks:
                    self._put[path] = before[path]
                    continue
                data = read_file(self._fs, local)
            except FileNotFoundError:
                continue
            file = there.get(path)
            if file is None or file.object.xxh3_64 != xxhash.xxh3_64_hexdigest(data):
                key = f"files/{path}-{upload_pool.nonce()}"
                self._orphans.add([key])
                file = StoreFile(path, upload_pool.put(self._bucket, key, data))
            self._put[path] = looks, file

    def forget(self) -> None:
        """Another manifest may lie there: look at all of them, the next time."""
        self._put = {}
