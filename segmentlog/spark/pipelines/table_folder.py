"""A table whose Parquet files are replaced all at once: PATH is a link to the folder of its newest version.

    NAME -> .NAME.versions/v000012
    .NAME.versions/v000012/bucket-00007-v000012.parquet    the rows of a bucket: of keys with the same hash
    .NAME.versions/v000012/_segmentlog.json                of what, and how far: see `TableState`
    .NAME.versions/v000011/                                the version before, for readers under way
    .NAME.versions/lock                                    held by who updates it

Rows and position change in one step: a rename puts the new link over the old one. Every file has another name in
each version (those of untouched buckets are hard links): a reader that has listed one version, and opens its files
through the link when the next one is there, finds none of them, and fails instead of mixing two versions.
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
from segmentlog.spark.pipelines.output_folders import data_files, locked, mounted_folder, sync_file, sync_folders
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
    """A file of a version. ``bucket`` is -1 for one that has no rows, and only tells which columns there are."""

    name: str
    bucket: int
    rows: int


class TableState(msgspec.Struct, frozen=True):
    """What a version is of, and how far it has come."""

    format: int
    version: int
    topic: str
    store_id: str
    buckets: int
    json_schema: str | None
    """Spark's JSON of the columns that values have; None where ``value`` is a column."""
    positions: dict[int, int]
    """By partition: every record below is in the table."""
    marks: dict[int, Mark]
    """The last record below the position."""
    files: list[TableFile] = []

    @property
    def rows(self) -> int:
        return sum(file.rows for file in self.files)


class TableFolder:
    """The link and the versions that it may point to."""

    def __init__(self, path: str, fs: FileSystem | None = None) -> None:
        self.path = mounted_folder(path, "the table is a link that is renamed, and remote stores have none")
        parent, name = os.path.split(self.path)
        self._parent = parent
        self._target = f".{name}.versions"
        self._versions = f"{parent}/{self._target}"
        self._fs = fs or FileSystem()

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Keep others out. Raises `SegmentlogError` where there is something else, or somebody is at it."""
        if os.path.lexists(self.path) and not os.path.islink(self.path):
            raise SegmentlogError(f"{self.path}: there is something else already; choose another path")
        check_folder(self._versions)
        os.makedirs(self._versions, exist_ok=True)
        with locked(f"{self._versions}/lock", "another update of the table"):
            yield

    def read(self) -> TableState | None:
        """The state of the version that the link shows; None without one. Raises `SegmentlogError`."""
        version = self._current()
        if version is None:
            return None
        path = f"{self.folder(version)}/{_STATE}"
        try:
            check_folder(self._versions)
            check_folder(self.folder(version))
            state = msgspec.json.decode(read_plain(self._fs, path, _STATE_MAX_BYTES), type=TableState)
        except (FileNotFoundError, msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:
            raise SegmentlogError(f"{path}: cannot be read ({error}); --rebuild makes the table anew") from None
        if state.format != FORMAT:
            raise SegmentlogError(f"{path}: format {state.format}, and this version of segmentlog reads {FORMAT}")
        if state.version != version or state.buckets < 1:
            why = f"it is of version {state.version}, with {state.buckets} buckets"
            raise SegmentlogError(f"{path}: {why}; --rebuild makes the table anew")
        for file in state.files:
            if not _FILE.fullmatch(file.name):
                why = f"it names the file {file.name!r}, which is none of a table: it was not written by segmentlog"
                raise SegmentlogError(f"{path}: {why}, or was changed since; --rebuild makes the table anew")
        return state

    def _current(self) -> int | None:
        try:
            target = os.readlink(self.path)
        except FileNotFoundError:
            return None
        folder, _, name = target.rpartition("/")
        match = _VERSION.fullmatch(name)
        if folder != self._target or match is None:
            raise SegmentlogError(f"{self.path}: it is a link to {target}, which is no table; choose another path")
        return int(match[1])

    def folder(self, version: int) -> str:
        """Of a version."""
        return f"{self._versions}/v{version:06d}"

    def next_version(self) -> int:
        """The number of the version after all that there are."""
        return max((self._current() or 0, *self._numbers())) + 1

    def work_folder(self) -> str:
        """Where Spark writes the buckets that change."""
        return f"{self._versions}/work"

    def paths(self, state: TableState, buckets: set[int]) -> list[str]:
        """Of the files with the rows of some buckets. Raises `UntrustedPath` where one is no regular file."""
        return [self._file(state, file) for file in state.files if file.bucket in buckets]

    def _file(self, state: TableState, file: TableFile) -> str:
        path = f"{self.folder(state.version)}/{file.name}"
        if not is_plain_file(path):
            raise UntrustedPath(path, "the file is missing; --rebuild makes the table anew")
        return path

    def sweep(self) -> None:
        """Remove what updates have left that did not come to an end, and versions before the last but one."""
        current = self._current() or 0
        previous = max((number for number in self._numbers() if number < current), default=0)
        for name in os.listdir(self._versions):
            match = _VERSION.fullmatch(name)
            path = f"{self._versions}/{name}"
            if name == "lock" or (match and int(match[1]) in (current, previous)):
                continue
            if os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path)
            else:
                os.unlink(path)

    def _numbers(self) -> list[int]:
        return [int(match[1]) for name in os.listdir(self._versions) if (match := _VERSION.fullmatch(name))]

    def build(self, state: TableState, before: TableState | None, touched: set[int]) -> TableState:
        """Make the folder of a version: what is in the work folder, and the other buckets of the version before.

        Nobody sees it yet. Everything is fsynced but the link.
        """
        folder = self.folder(state.version)
        self._fs.mkdir(folder)
        suffix = f"v{state.version:06d}"
        files = []
        for number, source in enumerate(data_files(self.work_folder())):
            match = _BUCKET.match(source)
            path = f"{self.work_folder()}/{source}"
            bucket, rows = (int(match[1]) if match else -1), _rows_in(path)
            name = f"bucket-{bucket:05d}-{number:05d}-{suffix}.parquet" if match else f"empty-{suffix}.parquet"
            sync_file(self._fs, path)
            self._fs.rename(path, f"{folder}/{name}")
            files.append(TableFile(name, bucket, rows))
        for file in [] if before is None else before.files:
            if file.bucket >= 0 and file.bucket not in touched:
                assert before is not None
                name = re.sub(r"v\d+\.parquet$", f"{suffix}.parquet", file.name)
                _link(self._file(before, file), f"{folder}/{name}")
                files.append(TableFile(name, file.bucket, file.rows))
        shutil.rmtree(self.work_folder(), ignore_errors=True)
        state = msgspec.structs.replace(state, files=files)
        replace_file(self._fs, f"{folder}/{_STATE}", msgspec.json.format(msgspec.json.encode(state), indent=1))
        sync_folders(self._fs, (folder, self._versions))
        return state

    def publish(self, state: TableState) -> None:
        """Let the link show this version, durably."""
        fresh = f"{self._versions}/link"
        os.symlink(f"{self._target}/v{state.version:06d}", fresh)
        self._fs.replace(fresh, self.path)
        self._fs.sync_folder(self._parent)


def _rows_in(path: str) -> int:
    import pyarrow.parquet

    return int(pyarrow.parquet.read_metadata(path).num_rows)


def _link(source: str, path: str) -> None:
    try:
        os.link(source, path)
    except OSError:  # a file system without hard links
        shutil.copyfile(source, path)
        sync_file(FileSystem(), path)
