"""Inspect the small files: checkpoint, state page, ``store.json`` and ``topic.json``."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from itertools import pairwise

import msgspec

from segmentlog.config import TopicConfig
from segmentlog.errors import SegmentlogError
from segmentlog.format.checkpoint import Checkpoint, MalformedCheckpoint, decode_slot, slot_size
from segmentlog.format.file_names import (
    GRANT_FILE,
    MAX_PARTITIONS,
    READABLE_FORMATS,
    SHIP_FILE,
    STATE_FILE,
    STORE_FILE,
    TOPIC_FILE,
    is_topic_id,
)
from segmentlog.format.grant import MalformedGrant, decode_grant
from segmentlog.inspection.finding import Finding, Severity
from segmentlog.storage.file_operations import read_file
from segmentlog.storage.fs import FileSystem
from segmentlog.storage.interrupt_check import is_interrupt
from segmentlog.storage.state_page import ABORTS_WORD, PAGE_SIZE, PRODUCERS_WORD, LogState, StatePage, SyncState
from segmentlog.storage.state_page_check import distrust_reason

_READ_ATTEMPTS = 4
_READ_PAUSE_S = 0.002

# ---------------------------------------------------------------- checkpoint


class CheckpointFindings(msgspec.Struct, frozen=True):
    """The newest valid slot of a checkpoint file, and (position, size, reason) of each invalid slot."""

    checkpoint: Checkpoint | None
    bad_slots: tuple[tuple[int, int, str], ...] = ()
    stray: tuple[tuple[int, int], ...] = ()
    """(position, size) of bytes after a valid slot that should be zero; they are never read."""
    missing: bool = False

    @property
    def is_damaged(self) -> bool:
        return bool(self.bad_slots)


def read_checkpoint(fs: FileSystem, path: str) -> CheckpointFindings:
    """Read both slots of a checkpoint file, which may be damaged or missing. Raises OSError."""
    try:
        data = read_file(fs, path)
    except FileNotFoundError:
        return CheckpointFindings(None, missing=True)
    half = len(data) // 2
    newest: tuple[int, Checkpoint | None] = (-1, None)
    bad, stray = [], []
    for position in (0, half):
        slot = data[position : position + half]
        try:
            sequence, checkpoint = decode_slot(slot)
        except MalformedCheckpoint as error:
            bad.append((position, half, str(error)))
            continue
        if sequence > newest[0]:
            newest = sequence, checkpoint
        used = slot_size(slot)
        if padding := slot[used:].rstrip(b"\0"):
            stray.append((position + used, len(padding)))
    return CheckpointFindings(newest[1], tuple(bad), tuple(stray))


def find_checkpoint_flaws(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield the contradictions in a checkpoint with a valid checksum."""
    epochs, ranges = checkpoint.epochs, checkpoint.lost_ranges
    for before, after in pairwise(epochs):
        if after.epoch <= before.epoch or after.start_offset < before.start_offset:
            yield f"epoch {after.epoch} from offset {after.start_offset} on follows epoch {before.epoch}"
    for lost in ranges:
        if not 0 <= lost.base_offset < lost.end_offset:
            yield f"a lost range [{lost.base_offset}, {lost.end_offset})"
    for preceding, following in pairwise(ranges):
        if following.base_offset < preceding.end_offset:
            yield f"lost ranges overlap: end {preceding.end_offset}, begin of the next {following.base_offset}"
    if checkpoint.offset_ceiling < checkpoint.recovery_offset:
        yield f"offset ceiling {checkpoint.offset_ceiling} is below the recovery point {checkpoint.recovery_offset}"


# ---------------------------------------------------------------- state page


class StateFindings(msgspec.Struct, frozen=True):
    """The content of the state page. ``log`` and ``sync`` are set only if the page can be trusted."""

    log: LogState | None = None
    sync: SyncState | None = None
    writing: int = 0
    failed: bool = False
    producers: bool = False
    """Whether the page says that the log has producers."""
    aborts: bool = False
    """Whether the page says that transactions were aborted."""
    why: str = ""
    severity: Severity = "note"


class StateReader:
    """Reads a partition's state page without changing it, any number of times."""

    def __init__(self, fs: FileSystem, folder: str) -> None:
        self._fs = fs
        self._folder = folder
        self.path = f"{folder}/{STATE_FILE}"

    def read(self) -> StateFindings:
        """Read the page as it is now. Raises OSError."""
        found = self._read()
        for _ in range(_READ_ATTEMPTS):
            if found.severity == "note":
                break
            time.sleep(_READ_PAUSE_S)  # a recovery or a truncation rewrites it step by step
            found = self._read()
        return found

    def _read(self) -> StateFindings:
        try:
            fd = self._fs.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return StateFindings()
        try:
            page = StatePage.map(self._fs, fd, writable=False)
            if page is None:
                size = self._fs.fstat(fd).st_size
                return StateFindings(why=f"{size} bytes long, not {PAGE_SIZE}; the next open creates it again")
            try:
                return self._check_page(page, fd)
            finally:
                page.close()
        finally:
            self._fs.close(fd)

    def _check_page(self, page: StatePage, fd: int) -> StateFindings:
        boot_id, folder = self._fs.boot_id(), self._fs.stat(self._folder)
        if page.is_valid_for(boot_id, folder):
            reason = distrust_reason(self._fs, self._folder, page, fd)
            if reason is not None:
                return StateFindings(why=f"not trusted: {reason}; the next open recovers the log without it")
            words = page.words
            return StateFindings(
                page.log.read(),
                page.sync.read(),
                page.writing,
                bool(page.failed),
                bool(words[PRODUCERS_WORD]),
                bool(words[ABORTS_WORD]),
            )
        if not any(page.words[:6]):
            return StateFindings(why="never used")
        if page.header_is_sound and not page.is_about(boot_id, folder):
            return StateFindings(why="not trusted: it belongs to another boot, or to a folder that was copied here")
        return StateFindings(why="damaged; the next open recovers the log without it", severity="warning")


# ---------------------------------------------------------------- shipping


def check_grant(fs: FileSystem, folder: str) -> Iterator[Finding]:
    """Check the ``grant`` file if it exists. It limits the offsets that may be assigned."""
    path = f"{folder}/{GRANT_FILE}"
    try:
        grant = decode_grant(read_file(fs, path))
    except FileNotFoundError:
        return
    except MalformedGrant as error:
        what = f"{error}; appends stop at the reserved offsets until the store is shipped again"
        yield Finding("warning", path, what)
    else:
        if grant.fenced:
            yield Finding("note", path, f"taken over by {grant.fenced}: appends are refused here")


def check_ship_file(fs: FileSystem, folder: str) -> Iterator[Finding]:
    """Check the file ``@ship`` if it exists: JSON with the URL that the store is shipped to."""
    path = f"{folder}/{SHIP_FILE}"
    try:
        document = json.loads(read_file(fs, path))
        document["url"], document["owner_id"], document["owner_epoch"]
    except FileNotFoundError:
        return
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        what = f"not JSON with 'url', 'owner_id' and 'owner_epoch' ({error}): the store cannot be shipped"
        yield Finding("damage", path, f"{what}; remove the file, and take the store over again")


# ---------------------------------------------------------------- store and topic


def check_store_file(fs: FileSystem, folder: str) -> Iterator[Finding]:
    """Check ``store.json``: JSON with a readable format version and the id of the store."""
    path = f"{folder}/{STORE_FILE}"
    try:
        document = json.loads(read_file(fs, path))
        version, store_id = document["format"], document["store_id"]
    except FileNotFoundError:
        yield Finding("damage", path, "missing; restore it: without it the folder is not a store")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        yield Finding("damage", path, f"not JSON with 'format' and 'store_id' ({error}); restore it from a backup")
    else:
        if version not in READABLE_FORMATS:
            yield Finding("damage", path, _describe_unknown_format(version))
        elif document.get("upgrading"):
            what = f"the upgrade to format {version} was interrupted; the next open for writing continues it"
            yield Finding("note", path, what)
        if not isinstance(store_id, str):
            yield Finding("damage", path, f"the store's id is {store_id!r}, not a string")


def read_topic_file(fs: FileSystem, folder: str) -> tuple[int | None, TopicConfig, list[Finding]]:
    """Return (number of partitions or None, configuration or the defaults, findings about the file)."""
    path = f"{folder}/{TOPIC_FILE}"
    advice = "restore it from a backup, or create it again: the records do not depend on it"
    try:
        document = json.loads(read_file(fs, path))
        version, count = document["format"], document["partitions"]
        config = TopicConfig.from_mapping(document["config"])
    except FileNotFoundError:
        return None, TopicConfig(), [Finding("damage", path, f"missing; {advice}")]
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, SegmentlogError) as error:
        return None, TopicConfig(), [Finding("damage", path, f"{error}; {advice}")]
    if version not in READABLE_FORMATS:
        return None, config, [Finding("damage", path, _describe_unknown_format(version))]
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= MAX_PARTITIONS:
        return None, config, [Finding("damage", path, f"{count!r} partitions; {advice}")]
    if version != 1 and not is_topic_id(document.get("id")):
        what = f"the topic's id is {document.get('id')!r}, not a UUID; {advice}. With another id, groups start again"
        return count, config, [Finding("damage", path, what)]
    return count, config, []


def read_topic_id(fs: FileSystem, folder: str) -> str | None:
    """Return the id in a topic's file, if it has a valid id."""
    try:
        topic_id = json.loads(read_file(fs, f"{folder}/{TOPIC_FILE}"))["id"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        if is_interrupt(error):
            raise
        return None
    return topic_id if is_topic_id(topic_id) else None


def _describe_unknown_format(version: object) -> str:
    return f"format {version!r}, but this version reads {' and '.join(map(str, READABLE_FORMATS))}"
