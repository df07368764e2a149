"""The folder of an archive: Parquet for everybody, and beside it what was archived, when, and its checksums.

    DIR/date=2026-07-31/part-000001-3f9c21aa-00000.parquet     records of that day (UTC), of one run
    DIR/_segmentlog/manifest.json                              what is in the archive, see `Manifest`
    DIR/_segmentlog/run-<id>/...                               what a run has written and not moved yet
    DIR/_segmentlog/lock                                       held by the archiver at work

A run comes into the archive in three durable steps: its intent is noted in the manifest (which files go where), the
files are renamed, the manifest is finished. Who finds an intent finishes it; files without an intent are an orphan's.
Spark and pyarrow pass over names that begin with ``_``.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import msgspec

from segmentlog.errors import SegmentlogError
from segmentlog.spark.pipelines.digests import Digest, joined
from segmentlog.spark.pipelines.folders import (
    data_files,
    file_checksum,
    locked,
    mounted_folder,
    sync_file,
    sync_folders,
)
from segmentlog.spark.pipelines.history import Mark
from segmentlog.storage.fs import FileSystem, read_file, replace_file

FORMAT: Final = 1
_OWN: Final = "_segmentlog"
_MANIFEST: Final = "manifest.json"
_RUN: Final = "run-"

OnStep = Callable[[str], None]
"""Told before each step what it is: for a person to see, and for tests to fail at."""


class ArchiveDamaged(SegmentlogError):
    """Files of an archive are not as they were when they were verified."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(path, why)
        self.path, self.why = path, why

    def __str__(self) -> str:
        return f"{self.path}: {self.why}"


class ArchivedFile(msgspec.Struct, frozen=True):
    """A Parquet file: where it is below the archive's folder, its size, and XXH3-128 of its bytes."""

    path: str
    size_bytes: int
    checksum: str


class ArchivedRange(msgspec.Struct, frozen=True):
    """Offsets ``[start, end)`` of a partition that a run has archived, and the digest of their records."""

    partition: int
    start: int
    end: int
    digest: Digest


class ArchivedRun(msgspec.Struct, frozen=True):
    """What one run has added."""

    id: str
    at_ms: int
    ranges: list[ArchivedRange]
    files: list[ArchivedFile]

    @property
    def records(self) -> int:
        return sum(one.digest.records for one in self.ranges)

    @property
    def size_bytes(self) -> int:
        return sum(one.size_bytes for one in self.files)


class ArchivedPartition(msgspec.Struct, frozen=True):
    """All that is archived of a partition: ``[start, end)`` but for the gaps, and its last record."""

    partition: int
    start: int
    end: int
    gaps: list[tuple[int, int]] = []
    mark: Mark | None = None


class Intent(msgspec.Struct, frozen=True):
    """A run that is verified and about to be moved: each file of it lies in ``run-<id>/`` under ``sources``."""

    run: ArchivedRun
    sources: list[str]
    partitions: list[ArchivedPartition]


class Manifest(msgspec.Struct, frozen=True):
    """What an archive holds: one topic of one store."""

    format: int
    topic: str
    store_id: str
    partition_count: int
    partitions: list[ArchivedPartition] = []
    runs: list[ArchivedRun] = []
    intent: Intent | None = None

    def archived(self) -> dict[int, ArchivedPartition]:
        """By partition."""
        return {one.partition: one for one in self.partitions}

    def digest(self, partition: int) -> Digest:
        """Of all records of the partition."""
        return joined(one.digest for run in self.runs for one in run.ranges if one.partition == partition)


class ArchiveFolder:
    """The folder, for one who reads it or holds its lock."""

    def __init__(self, folder: str, fs: FileSystem | None = None) -> None:
        self.path = mounted_folder(folder, "files are moved there and fsynced")
        self._own = f"{self.path}/{_OWN}"
        self._fs = fs or FileSystem()

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Make the folder, and keep other archivers out of it. Raises `SegmentlogError`."""
        if os.path.isdir(self.path) and not os.path.isdir(self._own) and os.listdir(self.path):
            raise SegmentlogError(f"{self.path}: the folder is not empty and holds no archive; choose another one")
        os.makedirs(self._own, exist_ok=True)
        sync_folders(self._fs, (self.path, os.path.dirname(self.path)))
        with locked(f"{self._own}/lock", "another archiver"):
            yield

    def read(self) -> Manifest | None:
        """The manifest; None before the first run. Raises `SegmentlogError` for one that cannot be read."""
        path = f"{self._own}/{_MANIFEST}"
        try:
            manifest = msgspec.json.decode(read_file(self._fs, path), type=Manifest)
        except FileNotFoundError:
            return None
        except NotADirectoryError:
            raise SegmentlogError(f"{self.path}: it is not a folder; an archive is one") from None
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise ArchiveDamaged(path, f"it is no manifest ({error}); bring it back from a backup") from None
        if manifest.format != FORMAT:
            raise SegmentlogError(f"{path}: format {manifest.format}, and this version of segmentlog reads {FORMAT}")
        return manifest

    def existing(self) -> Manifest:
        """The manifest. Raises `SegmentlogError` where there is no archive."""
        manifest = self.read()
        if manifest is None:
            raise SegmentlogError(f"{self.path}: there is no archive here (no {_OWN}/{_MANIFEST})")
        return manifest

    def write(self, manifest: Manifest) -> None:
        """Put a manifest in the place of the old one, durably."""
        text = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
        replace_file(self._fs, f"{self._own}/{_MANIFEST}", text)

    # ------------------------------------------------------------ a run

    def run_folder(self, run: str) -> str:
        """Where a run's files lie until they are moved."""
        return f"{self._own}/{_RUN}{run}"

    def sweep(self) -> None:
        """Remove what runs without an intent have left."""
        for name in os.listdir(self._own):
            if name.startswith(_RUN):
                self._fs.remove_tree(f"{self._own}/{name}")

    def take_stock(self, run: str) -> tuple[list[str], list[ArchivedFile]]:
        """(where they lie in the run's folder, files as they will be) of what Spark has written; all fsynced."""
        folder = self.run_folder(run)
        sources = data_files(folder)
        files = []
        for number, source in enumerate(sources):
            path = f"{folder}/{source}"
            sync_file(self._fs, path)
            target = f"{os.path.dirname(source)}/part-{run}-{number:05d}.parquet"
            files.append(ArchivedFile(target, os.path.getsize(path), file_checksum(path)))
        sync_folders(self._fs, {self._own, folder, *(os.path.dirname(f"{folder}/{one}") for one in sources)})
        return sources, files

    def finish(self, manifest: Manifest, on_step: OnStep) -> Manifest:
        """Move the files of the manifest's intent, as far as they are not yet, and make it a run like the others.

        Raises `ArchiveDamaged` when a file of it is neither here nor there.
        """
        intent = manifest.intent
        if intent is None:
            return manifest
        folder = self.run_folder(intent.run.id)
        made = {self.path}
        for source, file in zip(intent.sources, intent.run.files, strict=True):
            target = f"{self.path}/{file.path}"
            on_step("moving a file")
            if os.path.exists(f"{folder}/{source}"):
                os.makedirs(os.path.dirname(target), exist_ok=True)
                self._fs.rename(f"{folder}/{source}", target)
            elif not os.path.exists(target):
                raise ArchiveDamaged(target, f"run {intent.run.id} of the archive has lost this file")
            made.add(os.path.dirname(target))
        sync_folders(self._fs, made)
        on_step("finishing the manifest")
        manifest = msgspec.structs.replace(
            manifest, runs=[*manifest.runs, intent.run], partitions=intent.partitions, intent=None
        )
        self.write(manifest)
        with contextlib.suppress(FileNotFoundError):
            self._fs.remove_tree(folder)
        return manifest

    def paths(self, runs: Sequence[ArchivedRun]) -> list[str]:
        """Of the files of some runs."""
        return [f"{self.path}/{file.path}" for run in runs for file in run.files]

    def check_files(self, runs: Sequence[ArchivedRun]) -> None:
        """Raise `ArchiveDamaged` unless every file of these runs is there, byte for byte."""
        for run in runs:
            for file in run.files:
                path = f"{self.path}/{file.path}"
                try:
                    size_bytes = os.path.getsize(path)
                except FileNotFoundError:
                    raise ArchiveDamaged(path, f"the file is missing; run {run.id} has put it there") from None
                if size_bytes != file.size_bytes:
                    raise ArchiveDamaged(path, f"the file has {size_bytes} bytes and had {file.size_bytes}")
                if file_checksum(path) != file.checksum:
                    raise ArchiveDamaged(path, "the file was changed since it was archived: its checksum differs")
