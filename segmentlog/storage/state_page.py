"""The page that all processes share about one partition: where its log starts, ends and is durable.

The file ``state``, 4096 bytes of native u64 words, mapped by every process::

    word 0    magic and version
         1-2  boot id (128 bits)
         3-4  device and inode of the partition's folder
         5    XXH3-64 of words 0-4 and 6
         6    the mount that the page was made under, 0 where the kernel does not tell them apart
         7    wanted      an append needs offsets below this one, and more have to be granted for it
         8    writing     an append is in progress: bytes beyond the end may be torn
         9    failed      an fsync failed: no appends until the partition is reopened
         10   config      another number with every change of the topic's configuration
         11   moved       another number when the topic is deleted or renamed: open handles look where it is
         12   waiting     monotonic milliseconds until which somebody waits to be woken
         13   producers   1 once a batch with a producer id was appended: appenders keep track of producers
         14   aborts      grows with every transaction that is aborted: readers look for them again
         15   shipped     everything below this offset lies in the object store that the store is shipped to
         16   `LogState`  (written under the append lock)
         64   `SyncState` (written under the sync lock)

A block is a sequence number and two copies of its fields, each with a checksum seeded with
the sequence number. A writer fills the copy that is not current, then stores the sequence
number, one aligned word that goes up by a large odd step: a reader never waits, a writer
killed at any instruction leaves the old copy current, and a block that was damaged does not pass for one.

The page is no more than a cache of the page cache's state: it says nothing once the machine
has restarted, and nothing about a folder that was copied. Both show in words 1-4. Nor does it once
the disk went away and came back, with any older version of the page on it: no content of the page
can show that, and so `is_of_this_memory` asks the kernel. See docs/durability.md, "Who is believed".
"""

from __future__ import annotations

import fcntl
import os
import secrets
import struct
import uuid
from typing import Any, Final, Generic, TypeVar

import msgspec
import xxhash
from msgspec.structs import astuple

from segmentlog.storage.file_operations import write_all
from segmentlog.storage.fs import FileSystem

PAGE_SIZE: Final = 4096
MOUNT_WORD: Final = 6
_HEADER_WORDS: Final = 7
WANTED_WORD: Final = 7
WRITING_WORD: Final = 8
FAILED_WORD: Final = 9
CONFIG_WORD: Final = 10
MOVED_WORD: Final = 11
WAITING_WORD: Final = 12
PRODUCERS_WORD: Final = 13
ABORTS_WORD: Final = 14
SHIPPED_WORD: Final = 15
WRITING: Final = 1
REWRITING: Final = 2
"""Values of `StatePage.writing`: an append is in progress; segments are being replaced (a truncation)."""
_MAGIC: Final = int.from_bytes(b"SLSTATE\x01", "little")
_WORD: Final = 8
_READ_ATTEMPTS: Final = 10_000
_MISMATCHES: Final = 100
_STEP: Final = 0x9E3779B97F4A7C15
# Odd, so that the copies alternate; far from one, so that no damaged byte makes the number of the other copy of it.
_WORD_MASK: Final = (1 << 64) - 1  # counters wrap: a page full of ones is damaged, and made anew like any other

_PACKED: Final = struct.Struct("=6Q")
_hash = xxhash.xxh3_64_intdigest


class LogState(msgspec.Struct, frozen=True, gc=False):
    """What appends change. Offsets, and positions in bytes."""

    log_start_offset: int
    log_end_offset: int
    last_stable_offset: int
    active_base_offset: int
    end_position: int
    epoch: int
    generation: int
    """Counts deletions and replacements of segment files; a roll shows in `active_base_offset`."""
    appended_bytes: int
    """Grows by the size of every batch; the distance to `SyncState.synced_bytes` is un-fsynced."""
    first_append_ms: int
    """Wall clock at the first append to the active segment; 0 while it is empty."""
    offset_ceiling: int
    """The checkpoint promises that no offset at or above it is handed out before a higher one is durable."""


class SyncState(msgspec.Struct, frozen=True, gc=False):
    """What fsyncs and checkpoints change."""

    durable_offset: int
    synced_bytes: int
    synced_base_offset: int
    """Base offset of the newest segment whose name is durable."""
    checkpointed_bytes: int
    """`synced_bytes` when the recovery point last moved."""
    synced_at_ms: int
    """Monotonic clock at the last fsync."""
    sync_count: int


Fields = TypeVar("Fields", LogState, SyncState)


class StateDamaged(Exception):
    """Neither this block's checksum nor its sequence number make sense: the page cannot be trusted."""


class StateBlock(Generic[Fields]):
    """One block of the page: lock-free for readers; one writer at a time, who holds the block's lock."""

    __slots__ = ("_buffer", "_cached", "_kind", "_packer", "_positions", "_word", "_words")

    _kind: type[Fields]

    def __init__(self, buffer: Any, words: memoryview, word: int, kind: type[Fields]) -> None:
        count = len(kind.__struct_fields__)
        self._buffer = buffer
        self._words = words
        self._word = word
        self._kind = kind
        self._packer = struct.Struct(f"={count}Q")
        self._positions = ((word + 1) * _WORD, (word + 2 + count) * _WORD)
        # One attribute, so that threads never pair a sequence number with another one's fields.
        self._cached: tuple[int, Fields] | None = None

    def read(self) -> Fields:
        """The fields as one of the writers left them. Raises `StateDamaged`."""
        size = self._packer.size
        mismatches = 0
        for _ in range(_READ_ATTEMPTS):
            sequence = self._words[self._word]
            cached = self._cached
            if cached is not None and cached[0] == sequence:
                return cached[1]
            if not sequence:  # never written to: a new page
                break
            position = self._positions[sequence & 1]
            data = bytes(self._buffer[position : position + size])
            check = self._words[(position + size) // _WORD]
            if self._words[self._word] != sequence:
                continue  # a writer went on meanwhile: what was read may be half of its next copy
            if _hash(data, sequence) != check:
                # On a processor that reorders stores the number may arrive before the fields, for a moment.
                mismatches += 1
                if mismatches > _MISMATCHES:
                    break
                continue
            fields: Fields = self._kind(*self._packer.unpack(data))
            self._cached = (sequence, fields)
            return fields
        raise StateDamaged

    def write(self, fields: Fields) -> None:
        """Publish new fields. The caller holds the block's lock."""
        sequence = (self._words[self._word] + _STEP) & _WORD_MASK
        position = self._positions[sequence & 1]
        data = self._packer.pack(*astuple(fields))
        self._buffer[position : position + len(data)] = data
        self._words[(position + len(data)) // _WORD] = _hash(data, sequence)
        self._words[self._word] = sequence
        self._cached = (sequence, fields)


class StatePage:
    """The mapped page of one partition. Flags are plain ``words``; see the module for who writes what."""

    __slots__ = ("_map", "file_id", "log", "sync", "words")

    def __init__(self, buffer: memoryview | bytearray, file_id: tuple[int, int] | None = None) -> None:
        self._map = buffer
        self.file_id = file_id
        """Device and inode of the file that is mapped, which no other file gets meanwhile; None for a private page."""
        self.words = memoryview(buffer).cast("Q")
        self.log: StateBlock[LogState] = StateBlock(buffer, self.words, 16, LogState)
        self.sync: StateBlock[SyncState] = StateBlock(buffer, self.words, 64, SyncState)

    @classmethod
    def private(cls) -> StatePage:
        """A page of this process alone, for reading a store that must not be written to."""
        return cls(bytearray(PAGE_SIZE))

    @classmethod
    def map(cls, fs: FileSystem, fd: int, *, writable: bool) -> StatePage | None:
        """Map the file; None when it is not a page long and may not be made so.

        The page is written in full before it is mapped: a store into an mmap'd hole of a full
        disk would be a SIGBUS, and not an error. That takes the sync lock for a moment, which
        the caller must not hold: zeros must not go over a page that others have begun to use.
        """
        found = fs.fstat(fd)
        if found.st_size < PAGE_SIZE:
            if not writable:
                return None
            try:
                fs.flock(fd, fcntl.LOCK_EX)
                size = fs.fstat(fd).st_size
                if size == 0:
                    fs.disable_copy_on_write(fd)
                if size < PAGE_SIZE:
                    write_all(fs, fd, [bytes(PAGE_SIZE - size)], size)
            finally:
                fs.flock(fd, fcntl.LOCK_UN)
        return cls(fs.map_file(fd, PAGE_SIZE, writable=writable), (found.st_dev, found.st_ino))

    def close(self) -> None:
        """Let go of the page; nothing of it may be used any more."""
        self.words.release()
        if isinstance(self._map, memoryview):
            self._map.release()

    def describes(self, boot_id: str, folder: os.stat_result) -> bool:
        """Whether the page is about this folder (not a copy of it) in this boot, and its blocks are sound."""
        if not self.is_about(boot_id, folder):
            return False
        try:
            self.log.read()
            self.sync.read()
        except StateDamaged:
            return False
        return True

    def is_about(self, boot_id: str, folder: os.stat_result) -> bool:
        """Whether the header names this boot and this folder."""
        return list(self.words[:_HEADER_WORDS]) == _header_words(boot_id, folder, self.mount_id)

    @property
    def mount_id(self) -> int:
        """The mount under which the page was made, unique in its boot; 0 for one that the kernel did not tell."""
        return self.words[MOUNT_WORD]

    @property
    def header_is_sound(self) -> bool:
        """Whether the header was written so, whatever boot and folder it names."""
        words = list(self.words[:_HEADER_WORDS])
        return words[0] == _MAGIC and _hash(_PACKED.pack(*words[:5], words[MOUNT_WORD])) == words[5]

    def has_stayed_in_memory(self, fs: FileSystem, fd: int) -> bool:
        """Whether the kernel has had the file, open as ``fd``, in memory ever since the page was made.

        If not, what is mapped may be any version of the page that was ever written.
        """
        return (self.mount_id != 0 and fs.mount_id(fd) == self.mount_id) or fs.has_inode_mark(fd)

    def initialise(
        self, boot_id: str, folder: os.stat_result, log: LogState, sync: SyncState, mount_id: int = 0
    ) -> None:
        """Make the page valid; the header last. The caller holds both locks."""
        self.words[0] = 0
        self.log.write(log)
        self.sync.write(sync)
        self.writing = self.failed = 0
        for index, word in reversed(list(enumerate(_header_words(boot_id, folder, mount_id)))):
            self.words[index] = word

    @property
    def writing(self) -> int:
        """Non-zero while an append is in progress, or after its process died in it."""
        return self.words[WRITING_WORD]

    @writing.setter
    def writing(self, value: int) -> None:
        self.words[WRITING_WORD] = value

    @property
    def failed(self) -> int:
        """Non-zero after a failed fsync, until somebody opens the partition anew."""
        return self.words[FAILED_WORD]

    @failed.setter
    def failed(self, value: int) -> None:
        self.words[FAILED_WORD] = value

    @property
    def config_version(self) -> int:
        return self.words[CONFIG_WORD]

    @property
    def moved(self) -> int:
        return self.words[MOVED_WORD]

    def count_abort(self) -> None:
        """The caller holds the append lock."""
        self.words[ABORTS_WORD] = (self.words[ABORTS_WORD] + 1) & _WORD_MASK

    def count_config_change(self) -> None:
        self.words[CONFIG_WORD] = _another(self.words[CONFIG_WORD])

    def count_move(self) -> None:
        self.words[MOVED_WORD] = _another(self.words[MOVED_WORD])

    @property
    def waiting_until_ms(self) -> int:
        """Monotonic clock; appenders wake followers while it lies ahead."""
        return self.words[WAITING_WORD]

    @waiting_until_ms.setter
    def waiting_until_ms(self, value: int) -> None:
        self.words[WAITING_WORD] = value


def _another(number: int) -> int:
    """A number to tell a change by. Not the next one: two who change something at the same time, in two processes and
    without a lock, would both store that, and who had taken over the first change would miss the second."""
    return (number + 1 + secrets.randbits(32)) & _WORD_MASK


def _header_words(boot_id: str, folder: os.stat_result, mount_id: int) -> list[int]:
    try:
        boot = uuid.UUID(boot_id).int
    except ValueError:
        boot = xxhash.xxh3_128_intdigest(boot_id.encode())
    words = [_MAGIC, boot & _WORD_MASK, boot >> 64, folder.st_dev, folder.st_ino]
    return [*words, _hash(_PACKED.pack(*words, mount_id)), mount_id]
