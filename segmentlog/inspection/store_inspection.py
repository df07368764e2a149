"""Inspect a store, a topic or a segment file, for `verify` and `dump`.

It reads the files directly, and only reads: it never takes a lock or runs a recovery. It trusts no file. So it works
on a store that cannot be opened, and while other processes append.

    inspect_store -> inspect_topic -> inspect_partition -> inspect_segment -> format.examine
"""

from __future__ import annotations

from collections.abc import Iterator

from segmentlog.config import TopicConfig
from segmentlog.errors import StoreVersionError, UnknownTopic
from segmentlog.format.file_names import (
    ACLS_FILE,
    ADMINISTRATION_FILE,
    ALTERING_PREFIX,
    DELETED_PREFIX,
    FILE_LOCK_SUFFIX,
    GROUPS_FOLDER,
    HAND_OVER_FILE,
    HIDDEN,
    MACHINE_FILES,
    MAKING_PREFIX,
    PRODUCER_IDS_FILE,
    PRODUCERS_FOLDER,
    REPLICA_FILE,
    REPLICA_STATUS_FILE,
    RESTORING_FILE,
    SCHEMAS_FILE,
    SERVER_FILE,
    SHIP_FILE,
    STAGING_FOLDER,
    STORE_FILE,
    TEMPORARY_SUFFIX,
    TOPIC_FILE,
    UPLOADS_FILE,
    USERS_FILE,
)
from segmentlog.inspection.finding import Finding, Tally
from segmentlog.inspection.partition_findings import PartitionFindings
from segmentlog.inspection.partition_inspection import inspect_partition, log_sizes
from segmentlog.inspection.segment_inspection import InspectSegment, inspect_segment
from segmentlog.inspection.small_files import check_ship_file, check_store_file, read_topic_file, read_topic_id
from segmentlog.storage.fs import FileSystem
from segmentlog.storage.network import NetworkMark
from segmentlog.storage.segment import list_segments


def list_topics(fs: FileSystem, path: str) -> list[str]:
    """Return the folders with a ``topic.json`` or a numbered subfolder: topics, also with missing or damaged files.

    Raises `StoreVersionError` unless the path is a folder with a topic or a ``store.json``.
    """
    try:
        names = sorted(fs.listdir(path))
    except FileNotFoundError:
        raise StoreVersionError(path, "there is no such folder; check the path") from None
    except NotADirectoryError:
        raise StoreVersionError(path, "it is not a folder, but a store is a folder; check the path") from None
    topics = [name for name in names if HIDDEN not in name and _is_topic(fs, f"{path}/{name}")]
    if not topics and STORE_FILE not in names:
        raise StoreVersionError(path, f"there is no store here (no {STORE_FILE}, no topics); check the path")
    return topics


def _is_topic(fs: FileSystem, folder: str) -> bool:
    if not fs.is_folder(folder):
        return False
    return any(name == TOPIC_FILE or name.isdecimal() for name in fs.listdir(folder))


def list_partitions(fs: FileSystem, folder: str) -> tuple[list[int], TopicConfig, list[Finding]]:
    """Return (numbers of expected or existing partitions, the topic's configuration, findings about its file)."""
    count, config, findings = read_topic_file(fs, folder)
    existing = {int(name) for name in fs.listdir(folder) if name.isdecimal() and str(int(name)) == name}
    if count is None:
        return sorted(existing), config, findings
    beyond = [number for number in sorted(existing) if number >= count and _has_log(fs, f"{folder}/{number}")]
    if beyond and read_topic_file(fs, folder)[0] == count:  # else partitions are being added just now
        what = f"{count} partitions, but the folder of partition {beyond[-1]} contains a log, which is never read"
        findings.append(Finding("damage", f"{folder}/{TOPIC_FILE}", what))
    return list(range(count)), config, findings


def _has_log(fs: FileSystem, folder: str) -> bool:
    return fs.is_folder(folder) and bool(list_segments(fs, folder))


def inspect_store(
    path: str, topic: str | None = None, *, fs: FileSystem | None = None, tally: Tally | None = None,
    inspect: InspectSegment = inspect_segment,
) -> Iterator[Finding]:  # fmt: skip
    """Check a store, or one topic of it. Raises `StoreVersionError`, `UnknownTopic`, OSError.

    ``inspect`` inspects a segment, or returns an earlier result for it. So other processes can do most of the work, and
    this process still creates every finding.
    """
    fs, tally = fs or FileSystem(), tally or Tally()
    topics = list_topics(fs, path)
    if topic is not None:
        if topic not in topics:
            raise UnknownTopic(topic)
        topics = [topic]
    yield from check_store_file(fs, path)
    for name in topics:
        yield from inspect_topic(fs, path, name, tally, inspect)
    if topic is None:
        yield from check_ship_file(fs, path)
        yield from _report_duplicate_ids(fs, path, topics)
        known = {STORE_FILE, ADMINISTRATION_FILE, GROUPS_FOLDER, PRODUCERS_FOLDER, STAGING_FOLDER, SERVER_FILE, *topics}
        known |= MACHINE_FILES | {HAND_OVER_FILE, REPLICA_FILE, REPLICA_STATUS_FILE, RESTORING_FILE, UPLOADS_FILE}
        known.add(NetworkMark.FILE)
        for name in (USERS_FILE, ACLS_FILE, SCHEMAS_FILE, PRODUCER_IDS_FILE, SHIP_FILE):
            known |= {name, name + FILE_LOCK_SUFFIX}
        yield from _report_unknown_files(fs, path, known, "not a topic, and not a file of this store")


def _report_duplicate_ids(fs: FileSystem, path: str, topics: list[str]) -> Iterator[Finding]:
    """Report topics with the same id: the folder of one was copied. Groups and transactions would confuse them."""
    names: dict[str, str] = {}
    for topic in topics:
        topic_id = read_topic_id(fs, f"{path}/{topic}")
        known = None if topic_id is None else names.setdefault(topic_id, topic)
        if known not in (None, topic):
            what = (
                f"it has the id of topic {known!r}: change the id of one topic; groups then start it from the beginning"
            )
            yield Finding("damage", f"{path}/{topic}/{TOPIC_FILE}", what, topic=topic)


def inspect_topic(
    fs: FileSystem, path: str, topic: str, tally: Tally, inspect: InspectSegment = inspect_segment
) -> Iterator[Finding]:
    """Check a topic's file and its partitions."""
    folder = f"{path}/{topic}"
    numbers, _, findings = list_partitions(fs, folder)
    for finding in findings:
        yield Finding(finding.severity, finding.path, finding.what, topic=topic)
    for found in inspect_partitions(fs, path, topic, tally, inspect):
        yield from found.findings
    known = {TOPIC_FILE, *map(str, numbers)}
    yield from _report_unknown_files(fs, folder, known, "not a file of this topic", topic)


def inspect_partitions(
    fs: FileSystem, path: str, topic: str, tally: Tally, inspect: InspectSegment = inspect_segment
) -> Iterator[PartitionFindings]:
    """Yield the findings of each partition of a topic."""
    numbers, config, _ = list_partitions(fs, f"{path}/{topic}")
    for number in numbers:
        folder = f"{path}/{topic}/{number}"
        if fs.is_folder(folder):
            yield inspect_partition(fs, folder, topic, number, config, tally, inspect)
        else:
            found = PartitionFindings(folder, topic, number)
            found.add("damage", folder, "the partition's folder is missing")
            yield found


def find_segments_size(fs: FileSystem, path: str, topics: list[str]) -> int:
    """Return the size of all segment files, for the total of a progress bar."""
    total = 0
    for topic in topics:
        for number in list_partitions(fs, f"{path}/{topic}")[0]:
            if fs.is_folder(f"{path}/{topic}/{number}"):
                total += sum(log_sizes(fs, f"{path}/{topic}/{number}"))
    return total


def _report_unknown_files(
    fs: FileSystem, folder: str, known: set[str], what: str, topic: str = ""
) -> Iterator[Finding]:
    for name in sorted(fs.listdir(folder)):
        if name in known or name == "lost+found" or name.endswith(TEMPORARY_SUFFIX):
            continue
        is_left = name.startswith((MAKING_PREFIX, DELETED_PREFIX, ALTERING_PREFIX))
        left = "left by a process that died while it created or deleted a topic; it may be deleted"
        yield Finding("note", f"{folder}/{name}", left if is_left else what, topic=topic)
