"""Store a table of Parquet files with atomic updates: PATH is a link to the folder of its newest version.

    NAME -> .NAME.versions/v000012
    .NAME.versions/v000012/bucket-00007-v000012.parquet    the rows of a bucket: keys whose hashes select it
    .NAME.versions/v000012/_segmentlog.json                source and position: see `TableState`
    .NAME.versions/v000011/                                the previous version, for running readers
    .NAME.versions/lock                                    held by the running update

Rows and position change in one step: a rename replaces the old link by the new link. Every file has a new name in each
version (files of untouched buckets are hard links). So a reader that lists one version, and opens its files through the
link after an update, does not find them. It then fails, and cannot mix two versions.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from typing import Final

import msgspec

from segmentlog.errors import SegmentlogError
from segmentlog.spark.pipelines.output_folders import (
    hold_lock,
    list_data_files,
    resolve_mounted_folder,
    sync_file,
    sync_folders,
)
from segmentlog.spark.pipelines.run_history import Mark
from segmentlog.storage.file_operations import replace_file
from segmentlog.storage.fs import FileSystem
from segmentlog.storage.untrusted_folder import UntrustedPath, check_folder, is_plain_file, read_plain

FORMAT: Final = 1
_STATE: Final = "_segmentlog.json"
_VERSION: Final = re.compile(r"v(\d{6,})")
_FILE: Final = re.compile(r"(bucket-\d{5,}-\d{5,}|empty)-v\d{6,}\.parquet", re.ASCII)
_STATE_MAX_BYTES: Final = 1 << 28
_BUCKET: Final = re.compile(r"segmentlog_bucket=(\d+)/")


class TableFile(msgspec.Struct, frozen=True):
    """A file of a version. ``bucket`` is -1 for a file without rows, which only defines the columns."""

    name: str
    bucket: int
    rows: int


class TableState(msgspec.Struct, frozen=True):
    """Source, position and files of one version of a table."""

    format: int
    version: int
    topic: str
    store_id: str
    buckets: int
    json_schema: str | None
    """Columns of JSON values as Spark's JSON schema; None if ``value`` is a column."""
    positions: dict[int, int]
    """Next offset by partition: the table includes every record before it."""
    marks: dict[int, Mark]
    """Last record before the position, by partition."""
    files: list[TableFile] = []

    @property
    def rows(self) -> int:
        return sum(file.rows for file in self.files)


state_decoder = msgspec.json.Decoder(TableState)


class TableFolder:
    """The link of one table and its versions."""

    def __init__(self, path: str, fs: FileSystem | None = None) -> None:
        self.path = resolve_mounted_folder(path, "the table is a link that is renamed, and remote stores have no links")
        parent, name = os.path.split(self.path)
        self._parent = parent
        self._target = f".{name}.versions"
        self._versions = f"{parent}/{self._target}"
        self._fs = fs or FileSystem()

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Hold the lock inside the block. Raises `SegmentlogError` if the path is not a table, or is locked."""
        if os.path.lexists(self.path) and not os.path.islink(self.path):
            raise SegmentlogError(f"{self.path}: the path exists, and it is not a table; choose another path")
        check_folder(self._versions)
        os.makedirs(self._versions, exist_ok=True)
        with hold_lock(f"{self._versions}/lock", "another update of the table"):
            yield

    def read(self) -> TableState | None:
        """Return the state of the version that the link points to; None without a link. Raises `SegmentlogError`."""
        version = self._current()
        if version is None:
            return None
        path = f"{self.folder(version)}/{_STATE}"
        try:
            check_folder(self._versions)
            check_folder(self.folder(version))
            state = state_decoder.decode(read_plain(self._fs, path, _STATE_MAX_BYTES))
        except (FileNotFoundError, msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:
            raise SegmentlogError(f"{path}: it cannot be read ({error}); to rebuild the table: --rebuild") from None
        if state.format != FORMAT:
            raise SegmentlogError(
                f"{path}: it has format {state.format}, and this version of segmentlog reads only format {FORMAT}"
            )
        if state.version != version or state.buckets < 1:
            why = f"it names version {state.version} and {state.buckets} buckets in the folder of version {version}"
            raise SegmentlogError(f"{path}: {why}; to rebuild the table: --rebuild")
        for file in state.files:
            if not _FILE.fullmatch(file.name):
                why = f"it names the file {file.name!r}, and no file of a table has such a name"
                raise SegmentlogError(f"{path}: {why}; it was changed; to rebuild the table: --rebuild")
        return state

    def _current(self) -> int | None:
        try:
            target = os.readlink(self.path)
        except FileNotFoundError:
            return None
        folder, _, name = target.rpartition("/")
        match = _VERSION.fullmatch(name)
        if folder != self._target or match is None:
            raise SegmentlogError(f"{self.path}: it is a link to {target}, which is not a table; choose another path")
        return int(match[1])

    def folder(self, version: int) -> str:
        """Return the folder of a version."""
        return f"{self._versions}/v{version:06d}"

    def next_version(self) -> int:
        """Return the number of the newest version, plus 1."""
        return max((self._current() or 0, *self._list_versions())) + 1

    def work_folder(self) -> str:
        """Return the folder to which Spark writes changed buckets."""
        return f"{self._versions}/work"

    def paths(self, state: TableState, buckets: set[int]) -> list[str]:
        """Return the paths of the buckets' files. Raises `UntrustedPath` if one is not a regular file."""
        return [self._check_file(state, file) for file in state.files if file.bucket in buckets]

    def _check_file(self, state: TableState, file: TableFile) -> str:
        path = f"{self.folder(state.version)}/{file.name}"
        if not is_plain_file(path):
            raise UntrustedPath(path, "the file is missing; to rebuild the table: --rebuild")
        return path

    def sweep(self) -> None:
        """Delete the files of interrupted updates, and all versions except the current and the previous."""
        current = self._current() or 0
        previous = max((number for number in self._list_versions() if number < current), default=0)
        for name in os.listdir(self._versions):
            match = _VERSION.fullmatch(name)
            path = f"{self._versions}/{name}"
            if name == "lock" or (match and int(match[1]) in (current, previous)):
                continue
            if os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path)
            else:
                os.unlink(path)

    def _list_versions(self) -> list[int]:
        return [int(match[1]) for name in os.listdir(self._versions) if (match := _VERSION.fullmatch(name))]

    def build(self, state: TableState, before: TableState | None, touched: set[int]) -> TableState:
        """Create the folder of a version from the work folder and the untouched buckets of the previous version.

        Readers cannot see it before `publish`. Everything except the link is fsynced.
        """
        folder = self.folder(state.version)
        self._fs.mkdir(folder)
        suffix = f"v{state.version:06d}"
        files = []
        for number, source in enumerate(list_data_files(self.work_folder())):
            match = _BUCKET.match(source)
            path = f"{self.work_folder()}/{source}"
            bucket, rows = (int(match[1]) if match else -1), _count_rows(path)
            name = f"bucket-{bucket:05d}-{number:05d}-{suffix}.parquet" if match else f"empty-{suffix}.parquet"
            sync_file(self._fs, path)
            self._fs.rename(path, f"{folder}/{name}")
            files.append(TableFile(name, bucket, rows))
        for file in [] if before is None else before.files:
            if file.bucket >= 0 and file.bucket not in touched:
                assert before is not None
                name = re.sub(r"v\d+\.parquet$", f"{suffix}.parquet", file.name)
                _link(self._check_file(before, file), f"{folder}/{name}")
                files.append(TableFile(name, file.bucket, file.rows))
        shutil.rmtree(self.work_folder(), ignore_errors=True)
        state = msgspec.structs.replace(state, files=files)
        replace_file(self._fs, f"{folder}/{_STATE}", msgspec.json.format(msgspec.json.encode(state), indent=1))
        sync_folders(self._fs, (folder, self._versions))
        return state

    def publish(self, state: TableState) -> None:
        """Point the link to this version, durably."""
        fresh = f"{self._versions}/link"
        os.symlink(f"{self._target}/v{state.version:06d}", fresh)
        self._fs.replace(fresh, self.path)
        self._fs.sync_folder(self._parent)


def _count_rows(path: str) -> int:
    import pyarrow.parquet

    return int(pyarrow.parquet.read_metadata(path).num_rows)


def _link(source: str, path: str) -> None:
    try:
        os.link(source, path)
    except OSError:  # the file system does not support hard links
        shutil.copyfile(source, path)
        sync_file(FileSystem(), path)
