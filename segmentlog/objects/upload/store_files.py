"""Upload the small files of the store itself, whenever they change."""

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
    """The store files that one shipper has uploaded. Not thread-safe."""

    def __init__(self, fs: FileSystem, folder: str, bucket: Bucket, orphans: Orphans) -> None:
        self._fs = fs
        self._folder = folder
        self._bucket = bucket
        self._orphans = orphans
        self._uploaded: dict[str, tuple[tuple[int, ...], StoreFile]] = {}
        """(stamp of the local file, its manifest entry), by path."""

    @property
    def entries(self) -> tuple[StoreFile, ...]:
        """Manifest entries of the files, after `upload_changed`."""
        return tuple(file for _, file in self._uploaded.values())

    def upload_changed(self, manifest: Manifest | None) -> None:
        """Upload the files that differ from the current ``manifest``."""
        shipped = {file.path: file for file in manifest.files} if manifest else {}
        before, self._uploaded = self._uploaded, {}
        for path in SHIPPED_FILES:
            local = f"{self._folder}/{path}"
            try:
                found = self._fs.stat(local)
                stamp = (found.st_ino, found.st_size, found.st_mtime_ns)
                if path in before and before[path][0] == stamp:
                    self._uploaded[path] = before[path]
                    continue
                data = read_file(self._fs, local)
            except FileNotFoundError:
                continue
            file = shipped.get(path)
            if file is None or file.object.xxh3_64 != xxhash.xxh3_64_hexdigest(data):
                key = f"files/{path}-{upload_pool.new_nonce()}"
                self._orphans.add([key])
                file = StoreFile(path, upload_pool.put_object(self._bucket, key, data))
            self._uploaded[path] = stamp, file

    def invalidate(self) -> None:
        """Compare all files with the manifest again in the next cycle, because another manifest may be published."""
        self._uploaded = {}
