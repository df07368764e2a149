"""The page that all processes share about one partition: its start, its end and its durable offset.

The file ``state``, 4096 bytes of native u64 words, mapped by every process::

    word 0    magic and version
         1-2  boot id (128 bits)
         3-4  device and inode of the partition's folder
         5    XXH3-64 of words 0-4 and 6
         6    mount id when the page was created, 0 if the kernel has none
         7    wanted      an append needs offsets below this value, so more must be granted
         8    writing     an append is in progress: bytes after the end may be torn
         9    failed      an fsync failed: no appends until the partition is reopened
         10   config      changes with every change of the topic's configuration
         11   moved       changes when the topic is deleted or renamed: open handles check their folder
         12   waiting     monotonic milliseconds until which a follower waits to be woken
         13   producers   1 after the first batch with a producer id: appenders track producers
         14   aborts      grows with every aborted transaction: readers look for aborts again
         15   shipped     everything below this offset is in the object store
         16   `LogState`  (written under the append lock)
         64   `SyncState` (written under the sync lock)

A block consists of a sequence number and two copies of its fields, each with a checksum seeded with the sequence
number. A writer fills the copy that is not current, then stores the new sequence number, an aligned word that grows by
a large odd step. So a reader never waits, and a writer killed at any instruction leaves the old copy current. A damaged
block does not pass the checksum.

The page only describes the content of the kernel's page cache. It is invalid after a restart of the machine, and for a
copy of the folder; words 1-4 show both. It is also invalid if the disk went away and came back within a boot, with any
older version of the page on it. No content of the page can show that, so `has_stayed_in_memory` asks the kernel. See
docs/durability-evidence.md, "When a state page is trusted".
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
"""Values of `StatePage.writing`: WRITING while an append runs, REWRITING while a truncation replaces segments."""
_MAGIC: Final = int.from_bytes(b"SLSTATE\x01", "little")
_WORD: Final = 8
_READ_ATTEMPTS: Final = 10_000
_MISMATCHES: Final = 100
_STEP: Final = 0x9E3779B97F4A7C15
# Odd, so that the copies alternate. Far from 1, so that no damaged byte turns the number into the other copy's.
# Counters wrap, so that a page of ones can be read. It is damaged, and is replaced like any other.
_WORD_MASK: Final = (1 << 64) - 1

_PACKED: Final = struct.Struct("=6Q")
_hash = xxhash.xxh3_64_intdigest


class LogState(msgspec.Struct, frozen=True, gc=False):
    """The fields that appends change. Offsets count records, positions count bytes."""

    log_start_offset: int
    log_end_offset: int
    last_stable_offset: int
    active_base_offset: int
    end_position: int
    epoch: int
    generation: int
    """The number of deletions and replacements of segment files. A roll shows in `active_base_offset` instead."""
    appended_bytes: int
    """The total size of all batches. The bytes by which this exceeds `SyncState.synced_bytes` are not synced yet."""
    first_append_ms: int
    """Wall clock of the first append to the active segment; 0 while the segment is empty."""
    offset_ceiling: int
    """By the checkpoint, no offset at or above this number is assigned before a higher ceiling is durable."""


class SyncState(msgspec.Struct, frozen=True, gc=False):
    """The fields that fsyncs and checkpoints change."""

    durable_offset: int
    synced_bytes: int
    synced_base_offset: int
    """Base offset of the newest segment whose name is durable."""
    checkpointed_bytes: int
    """`synced_bytes` when the recovery point last advanced."""
    synced_at_ms: int
    """Monotonic clock of the last fsync."""
    sync_count: int


Fields = TypeVar("Fields", LogState, SyncState)


class StateDamaged(Exception):
    """The checksum or the sequence number of a block is invalid: the page cannot be trusted."""


class StateBlock(Generic[Fields]):
    """A block of fields in the page. Reading needs no lock; a writer must hold the lock of the block."""

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
        # Use one attribute for both, so that no thread combines a sequence number with the fields of another sequence
        # number.
        self._cached: tuple[int, Fields] | None = None

    def read(self) -> Fields:
        """Return the fields that a writer published last. Raises `StateDamaged`."""
        size = self._packer.size
        mismatches = 0
        for _ in range(_READ_ATTEMPTS):
            sequence = self._words[self._word]
            cached = self._cached
            if cached is not None and cached[0] == sequence:
                return cached[1]
            if not sequence:  # a new page: never written
                break
            position = self._positions[sequence & 1]
            data = bytes(self._buffer[position : position + size])
            check = self._words[(position + size) // _WORD]
            if self._words[self._word] != sequence:
                continue  # a writer published meanwhile, and may have overwritten half of this copy
            if _hash(data, sequence) != check:
                # On a processor that reorders stores the number may arrive briefly before the fields.
                mismatches += 1
                if mismatches > _MISMATCHES:
                    break
                continue
            fields: Fields = self._kind(*self._packer.unpack(data))
            self._cached = (sequence, fields)
            return fields
        raise StateDamaged

    def write(self, fields: Fields) -> None:
        """Publish new fields. The caller holds the lock of the block."""
        sequence = (self._words[self._word] + _STEP) & _WORD_MASK
        position = self._positions[sequence & 1]
        data = self._packer.pack(*astuple(fields))
        self._buffer[position : position + len(data)] = data
        self._words[(position + len(data)) // _WORD] = _hash(data, sequence)
        self._words[self._word] = sequence
        self._cached = (sequence, fields)


class StatePage:
    """The mapped page of one partition. Flags are plain ``words``; the module docstring describes them."""

    __slots__ = ("_map", "file_id", "log", "sync", "words")

    def __init__(self, buffer: memoryview | bytearray, file_id: tuple[int, int] | None = None) -> None:
        self._map = buffer
        self.file_id = file_id
        """Device and inode of the mapped file, not reused while it is mapped; None for a private page."""
        self.words = memoryview(buffer).cast("Q")
        self.log: StateBlock[LogState] = StateBlock(buffer, self.words, 16, LogState)
        self.sync: StateBlock[SyncState] = StateBlock(buffer, self.words, 64, SyncState)

    @classmethod
    def private(cls) -> StatePage:
        """Create a page that only this process sees, to read a store that must not be written."""
        return cls(bytearray(PAGE_SIZE))

    @classmethod
    def map(cls, fs: FileSystem, fd: int, *, writable: bool) -> StatePage | None:
        """Map the file. Extend a file that is shorter than a page; return None instead if ``writable`` is false.

        The page is written in full before it is mapped: on a full disk a store to a hole in a mapped file raises SIGBUS
        instead of an error. Writing takes the sync lock briefly, so that zeros never overwrite a page that other
        processes use. The caller must not hold that lock.
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
        """Release the page. The caller must not use it or its blocks afterwards."""
        self.words.release()
        if isinstance(self._map, memoryview):
            self._map.release()

    def is_valid_for(self, boot_id: str, folder: os.stat_result) -> bool:
        """Return whether the page was written in this boot for this folder (not a copy), and its blocks are valid."""
        if not self.is_about(boot_id, folder):
            return False
        try:
            self.log.read()
            self.sync.read()
        except StateDamaged:
            return False
        return True

    def is_about(self, boot_id: str, folder: os.stat_result) -> bool:
        """Return whether the page's header contains the ids of this boot and of this folder."""
        return list(self.words[:_HEADER_WORDS]) == _header_words(boot_id, folder, self.mount_id)

    @property
    def mount_id(self) -> int:
        """Id of the mount under which the page was created. Unique within a boot; 0 if the kernel has no mount ids."""
        return self.words[MOUNT_WORD]

    @property
    def header_is_sound(self) -> bool:
        """Whether the checksum of the header is right, whatever boot and folder it names."""
        words = list(self.words[:_HEADER_WORDS])
        return words[0] == _MAGIC and _hash(_PACKED.pack(*words[:5], words[MOUNT_WORD])) == words[5]

    def has_stayed_in_memory(self, fs: FileSystem, fd: int) -> bool:
        """Return whether the kernel has kept the file, open as ``fd``, in memory since the page was created.

        If the kernel has not, the mapped page may have any older content.
        """
        return (self.mount_id != 0 and fs.mount_id(fd) == self.mount_id) or fs.has_inode_mark(fd)

    def initialise(
        self, boot_id: str, folder: os.stat_result, log: LogState, sync: SyncState, mount_id: int = 0
    ) -> None:
        """Make the page valid, writing the header last. The caller holds both locks."""
        self.words[0] = 0
        self.log.write(log)
        self.sync.write(sync)
        self.writing = self.failed = 0
        for index, word in reversed(list(enumerate(_header_words(boot_id, folder, mount_id)))):
            self.words[index] = word

    @property
    def writing(self) -> int:
        """Non-zero while an append is in progress, or if the appending process died during it."""
        return self.words[WRITING_WORD]

    @writing.setter
    def writing(self, value: int) -> None:
        self.words[WRITING_WORD] = value

    @property
    def failed(self) -> int:
        """Non-zero after a failed fsync, until a process opens the partition and recovers it."""
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
        """Count an aborted transaction, so that readers look for aborts again. The caller holds the append lock."""
        self.words[ABORTS_WORD] = (self.words[ABORTS_WORD] + 1) & _WORD_MASK

    def count_config_change(self) -> None:
        self.words[CONFIG_WORD] = _changed(self.words[CONFIG_WORD])

    def count_move(self) -> None:
        self.words[MOVED_WORD] = _changed(self.words[MOVED_WORD])

    @property
    def waiting_until_ms(self) -> int:
        """Monotonic clock until which appenders must wake followers."""
        return self.words[WAITING_WORD]

    @waiting_until_ms.setter
    def waiting_until_ms(self, value: int) -> None:
        self.words[WAITING_WORD] = value


def _changed(number: int) -> int:
    """Return a number that differs from ``number``, so that other processes detect a change.

    It is not the next number. Two processes that change something at the same time, without a lock, would store the
    same number. A third process that had seen the first change would then miss the second.
    """
    return (number + 1 + secrets.randbits(32)) & _WORD_MASK


def _header_words(boot_id: str, folder: os.stat_result, mount_id: int) -> list[int]:
    try:
        boot = uuid.UUID(boot_id).int
    except ValueError:
        boot = xxhash.xxh3_128_intdigest(boot_id.encode())
    words = [_MAGIC, boot & _WORD_MASK, boot >> 64, folder.st_dev, folder.st_ino]
    return [*words, _hash(_PACKED.pack(*words, mount_id)), mount_id]
