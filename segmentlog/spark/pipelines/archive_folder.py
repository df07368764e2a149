"""Read and write the folder of an archive: Parquet files, and a manifest with their ranges and checksums.

    DIR/date=2026-07-31/part-000001-3f9c21aa-00000.parquet     records of that day (UTC), of one run
    DIR/_segmentlog/manifest.json                              contents of the archive, see `ArchiveManifest`
    DIR/_segmentlog/run-<id>/...                               files of a run that are not moved yet
    DIR/_segmentlog/lock                                       held by the running archiver

A run enters the archive in three durable steps: its intent (the target of each file) is written to the manifest, the
files are renamed, and the manifest is finished. The next archiver finishes an intent that it finds, and deletes files
without an intent. Spark and pyarrow ignore names that begin with ``_``.

An archive may come from an untrusted source. Its manifest is checked before use: no name in it may lead out of the
folder or into ``_segmentlog``. No link is followed, and only regular files are opened.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import msgspec

from segmentlog.errors import SegmentlogError
from segmentlog.format.batch import MAX_RAW_SIZE
from segmentlog.format.file_names import MAX_PARTITIONS, TEMPORARY_SUFFIX, check_relative_path, check_topic_name
from segmentlog.spark.pipelines.digests import Digest, combine_digests
from segmentlog.spark.pipelines.output_folders import (
    compute_checksum,
    hold_lock,
    list_data_files,
    resolve_mounted_folder,
    sync_file,
    sync_folders,
)
from segmentlog.spark.pipelines.run_history import Mark
from segmentlog.storage.file_operations import replace_file
from segmentlog.storage.fs import FileSystem
from segmentlog.storage.untrusted_folder import UntrustedPath, check_folder, is_plain_file, path_below, read_plain

FORMAT: Final = 1
_OWN: Final = "_segmentlog"
_MANIFEST: Final = "manifest.json"
_RUN: Final = "run-"
_RUN_ID: Final = re.compile(r"[A-Za-z0-9-]{1,64}")
_CHECKSUM: Final = re.compile(r"[0-9a-f]{32}")
_MANIFEST_MAX_BYTES: Final = 1 << 30
_OFFSET_MAX: Final = 1 << 53
# No log reaches this offset, even after a million crashes with the largest possible gap each.

OnStep = Callable[[str], None]
"""Called with the name of each step before it: for display, and for tests that fail at a step."""


class ArchiveDamaged(SegmentlogError):
    """Files of an archive have changed since they were verified, or are missing."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(path, why)
        self.path, self.why = path, why

    def __str__(self) -> str:
        return f"{self.path}: {self.why}"


class ArchivedFile(msgspec.Struct, frozen=True):
    """A Parquet file: its path relative to the archive's folder, its size, and XXH3-128 of its bytes."""

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
    """The ranges and files that one run added."""

    id: str
    at_ms: int
    ranges: list[ArchivedRange]
    files: list[ArchivedFile]
    largest_batch_bytes: int | None = None
    """Smallest ``max.message.bytes`` of a topic that accepts the records; None in archives of older versions."""

    @property
    def records(self) -> int:
        return sum(span.digest.records for span in self.ranges)

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


class ArchivedPartition(msgspec.Struct, frozen=True):
    """All archived offsets of a partition: ``[start, end)`` except the gaps. ``mark`` is the last record."""

    partition: int
    start: int
    end: int
    gaps: list[tuple[int, int]] = []
    mark: Mark | None = None


class Intent(msgspec.Struct, frozen=True):
    """A verified run whose files are being moved. ``sources`` are their paths in ``run-<id>/``."""

    run: ArchivedRun
    sources: list[str]
    partitions: list[ArchivedPartition]


class ArchiveManifest(msgspec.Struct, frozen=True):
    """Contents of an archive: records of one topic of one store."""

    format: int
    topic: str
    store_id: str
    partition_count: int
    partitions: list[ArchivedPartition] = []
    runs: list[ArchivedRun] = []
    intent: Intent | None = None

    def archived(self) -> dict[int, ArchivedPartition]:
        """Return the archived offsets by partition."""
        return {entry.partition: entry for entry in self.partitions}

    def digest(self, partition: int) -> Digest:
        """Return the digest of all records of a partition."""
        return combine_digests(span.digest for run in self.runs for span in run.ranges if span.partition == partition)


_manifest_decoder = msgspec.json.Decoder(ArchiveManifest)


class ArchiveFolder:
    """The folder of one archive. Methods that change it must run inside `writing`, which holds a lock."""

    def __init__(self, folder: str, fs: FileSystem | None = None) -> None:
        self.path = resolve_mounted_folder(folder, "segmentlog moves and fsyncs files in it")
        self._own_folder = f"{self.path}/{_OWN}"
        self._fs = fs or FileSystem()

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Create the folder and hold its lock. Raises `SegmentlogError` if another archiver holds the lock."""
        if os.path.isdir(self.path) and not os.path.isdir(self._own_folder) and os.listdir(self.path):
            raise SegmentlogError(f"{self.path}: it is not empty and contains no archive; choose an empty folder")
        check_folder(self._own_folder)
        os.makedirs(self._own_folder, exist_ok=True)
        sync_folders(self._fs, (self.path, os.path.dirname(self.path)))
        with hold_lock(f"{self._own_folder}/lock", "another archiver"):
            for name in os.listdir(self._own_folder):
                # Left by a killed writer, or planted in an untrusted archive.
                if name.endswith(TEMPORARY_SUFFIX):
                    os.unlink(f"{self._own_folder}/{name}")
            yield

    def read(self) -> ArchiveManifest | None:
        """Return the manifest; None before the first run. Raises `SegmentlogError` if it cannot be read."""
        path = f"{self._own_folder}/{_MANIFEST}"
        try:
            check_folder(self._own_folder)
            manifest = _manifest_decoder.decode(read_plain(self._fs, path, _MANIFEST_MAX_BYTES))
        except FileNotFoundError:
            return None
        except UntrustedPath as error:
            raise ArchiveDamaged(error.path, error.why) from None
        except NotADirectoryError:
            raise SegmentlogError(f"{self.path}: it is not a folder, and an archive must be a folder") from None
        except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:
            raise ArchiveDamaged(path, f"it is not a manifest ({error}); restore it from a backup") from None
        if manifest.format != FORMAT:
            raise SegmentlogError(
                f"{path}: it has format {manifest.format}, and this version of segmentlog reads only format {FORMAT}"
            )
        if flaw := find_flaw(manifest):
            why = "the manifest was changed, or segmentlog did not write it; the archive was not used"
            raise ArchiveDamaged(path, f"{flaw}; {why}; restore it from a backup")
        return manifest

    def existing(self) -> ArchiveManifest:
        """Return the manifest. Raises `SegmentlogError` if the folder has none."""
        manifest = self.read()
        if manifest is None:
            raise SegmentlogError(f"{self.path}: the folder contains no archive (no {_OWN}/{_MANIFEST})")
        return manifest

    def write(self, manifest: ArchiveManifest) -> None:
        """Replace the manifest durably."""
        text = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
        replace_file(self._fs, f"{self._own_folder}/{_MANIFEST}", text)

    # ------------------------------------------------------------ a run

    def run_folder(self, run: str) -> str:
        """Return the folder of a run's files before they are moved."""
        return f"{self._own_folder}/{_RUN}{run}"

    def sweep(self) -> None:
        """Delete the files of runs without an intent."""
        for name in os.listdir(self._own_folder):
            if name.startswith(_RUN):
                path = f"{self._own_folder}/{name}"
                if os.path.isdir(path) and not os.path.islink(path):
                    self._fs.remove_tree(path)
                else:
                    os.unlink(path)

    def sync_run_files(self, run: str) -> tuple[list[str], list[ArchivedFile]]:
        """Fsync the files that Spark wrote in a run.

        Return (their paths in the run's folder, their names, sizes and checksums in the archive).
        """
        folder = self.run_folder(run)
        sources = list_data_files(folder)
        files = []
        for number, source in enumerate(sources):
            path = f"{folder}/{source}"
            sync_file(self._fs, path)
            target = f"{os.path.dirname(source)}/part-{run}-{number:05d}.parquet"
            files.append(ArchivedFile(target, os.path.getsize(path), compute_checksum(path)))
        sync_folders(self._fs, {self._own_folder, folder, *(os.path.dirname(f"{folder}/{name}") for name in sources)})
        return sources, files

    def finish(self, manifest: ArchiveManifest, on_step: OnStep) -> ArchiveManifest:
        """Move the remaining files of the manifest's intent, and add its run to the manifest.

        Raises `ArchiveDamaged` if a file is missing at both its source and its target, or is not a regular file.
        """
        try:
            return self._finish(manifest, on_step)
        except UntrustedPath as error:
            raise ArchiveDamaged(error.path, error.why) from None

    def _finish(self, manifest: ArchiveManifest, on_step: OnStep) -> ArchiveManifest:
        intent = manifest.intent
        if intent is None:
            return manifest
        folder = self.run_folder(intent.run.id)
        check_folder(folder)
        made = {self.path}
        for name, file in zip(intent.sources, intent.run.files, strict=True):
            source, target = path_below(folder, name), path_below(self.path, file.path)
            on_step("moving a file")
            if is_plain_file(source):
                if is_plain_file(target):
                    raise ArchiveDamaged(
                        target,
                        f"the file exists already, and run {intent.run.id} would replace it; nothing was replaced",
                    )
                os.makedirs(os.path.dirname(target), exist_ok=True)
                self._fs.rename(source, target)
            elif not is_plain_file(target):
                raise ArchiveDamaged(target, f"the file of run {intent.run.id} is missing")
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
        """Return the paths of the runs' files."""
        return [f"{self.path}/{file.path}" for run in runs for file in run.files]

    def check_files(self, runs: Sequence[ArchivedRun]) -> None:
        """Raise `ArchiveDamaged` unless every file of these runs exists and has its checksum."""
        for run in runs:
            for file in run.files:
                try:
                    path = path_below(self.path, file.path)
                    is_there = is_plain_file(path)
                except UntrustedPath as error:
                    raise ArchiveDamaged(
                        error.path, f"{error.why}; run {run.id} archived the file {file.path} at this path"
                    ) from None
                if not is_there:
                    raise ArchiveDamaged(path, f"the file is missing; run {run.id} wrote it")
                size_bytes = os.path.getsize(path)
                if size_bytes != file.size_bytes:
                    raise ArchiveDamaged(
                        path, f"the file has {size_bytes} bytes, and had {file.size_bytes} when it was archived"
                    )
                if compute_checksum(path) != file.checksum:
                    raise ArchiveDamaged(path, "the file was changed since it was archived: its checksum differs")


# ---------------------------------------------------------------- checks of a manifest


def find_flaw(manifest: ArchiveManifest) -> str:
    """Return the reason why a manifest is not valid; empty if it is valid.

    Each file name must lead to a file inside the archive. Offsets and partitions must be possible in a log.
    """
    try:
        check_topic_name(manifest.topic, internal=True)
    except SegmentlogError as error:
        return str(error)
    count = manifest.partition_count
    if not 1 <= count <= MAX_PARTITIONS:
        return f"it has {count} partitions"
    partitions = manifest.partitions + ([] if manifest.intent is None else manifest.intent.partitions)
    for entry in partitions:
        flaw = _find_partition_flaw(entry, count)
        if flaw:
            return f"partition {entry.partition}: {flaw}"
    intent = manifest.intent
    if len({entry.partition for entry in manifest.partitions}) < len(manifest.partitions):
        return "it names a partition twice"
    if intent is not None and len({entry.partition for entry in intent.partitions}) < len(intent.partitions):
        return "its intent names a partition twice"
    known = {entry.partition for entry in partitions}
    names: set[str] = set()
    for run in [*manifest.runs, *([] if intent is None else [intent.run])]:
        flaw = _find_run_flaw(run, known)
        if flaw:
            return f"run {run.id!r}: {flaw}"
        if twice := [file.path for file in run.files if file.path in names] or _find_repeated(
            [file.path for file in run.files]
        ):
            return f"run {run.id!r}: it names the file {twice[0]!r}, which is already in the manifest"
        names.update(file.path for file in run.files)
    if intent is not None:
        if len(intent.sources) != len(intent.run.files):
            return f"its intent names {len(intent.sources)} sources for {len(intent.run.files)} files"
        for name in intent.sources:
            if why := check_relative_path(name):
                return f"its intent names the source {name!r}: {why}"
        if twice := _find_repeated(intent.sources):
            return f"its intent names the source {twice[0]!r} twice"
    return ""


def _find_repeated(names: Sequence[str]) -> list[str]:
    return [] if len(set(names)) == len(names) else sorted(name for name in set(names) if names.count(name) > 1)


def _find_partition_flaw(entry: ArchivedPartition, count: int) -> str:
    if not 0 <= entry.partition < count:
        return f"the topic has {count} partitions"
    for start, end in ((entry.start, entry.end), *entry.gaps):
        if not entry.start <= start <= end <= entry.end or not 0 <= start <= end <= _OFFSET_MAX:
            return f"no log has offsets {start} to {end}"
    return ""


def _find_run_flaw(run: ArchivedRun, known: set[int]) -> str:
    if not _RUN_ID.fullmatch(run.id):
        return "it is not the name of a run"
    if not 0 <= (run.largest_batch_bytes or 0) <= MAX_RAW_SIZE:
        return f"no batch has {run.largest_batch_bytes} bytes"
    for file in run.files:
        if why := check_relative_path(file.path):
            return f"it names the file {file.path!r}: {why}"
        if file.size_bytes < 0 or not _CHECKSUM.fullmatch(file.checksum):
            return f"it names the file {file.path!r}, with an impossible size or checksum"
    for span in run.ranges:
        if span.partition not in known:
            return f"it has records of partition {span.partition}, and the archive has no such partition"
        if not 0 <= span.start <= span.end <= _OFFSET_MAX:
            return f"no log has offsets {span.start} to {span.end}"
        if span.digest.records < 0 or not _CHECKSUM.fullmatch(span.digest.checksum):
            return f"the digest of partition {span.partition} is not valid"
    return ""
