"""The checkpoint file: at least one of its two slots is always valid, and it is always clear which one counts."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import msgspec
import pytest

from segmentlog.errors import DiskFull
from segmentlog.format.checkpoint import SLOT_SIZE, Checkpoint, MalformedCheckpoint, decode_slot
from segmentlog.records import EpochStart, LostRange
from segmentlog.storage.checkpoint_file import CheckpointFile
from segmentlog.storage.fs import FileSystem
from segmentlog.testing.fault_injection import Died, FaultyFileSystem


def numbered(number: int) -> Checkpoint:
    """Return a checkpoint that differs from others by its numbers, one of them in the last byte."""
    return Checkpoint(
        recovery_offset=number,
        offset_ceiling=1000 * number,
        boot_id="boot",
        clean=False,
        lost_ranges=(LostRange(1, 2, 0, "the machine died", number),),
    )


def with_history(length: int) -> Checkpoint:
    """Return a checkpoint with ``length`` epochs."""
    return Checkpoint(
        epochs=tuple(EpochStart(epoch, 1000 * epoch) for epoch in range(length)),
        lost_ranges=tuple(LostRange(1000 * at - 10, 1000 * at, at, "the machine died", at) for at in range(1, length)),
    )


def file_in(folder: Path, fs: FileSystem | None = None) -> CheckpointFile:
    """Return the checkpoint file of a folder."""
    return CheckpointFile(fs or FileSystem(), str(folder / "checkpoint"))


def sequences(file: CheckpointFile) -> list[int | None]:
    """Return the sequence numbers of both slots; None for an invalid slot."""
    data = Path(file.path).read_bytes()
    found: list[int | None] = []
    for slot in (data[: len(data) // 2], data[len(data) // 2 :]):
        try:
            found.append(decode_slot(slot)[0])
        except MalformedCheckpoint:
            found.append(None)
    return found


def test_a_partition_begins_without_a_checkpoint(tmp_path):
    """A missing file is neither a checkpoint nor damage."""
    assert file_in(tmp_path).read() == (None, False)


def test_the_last_checkpoint_written_is_read(tmp_path):
    """The next read returns what the last write wrote, through this object and through a new one."""
    file = file_in(tmp_path)
    for number in range(1, 8):
        file.write(numbered(number))
        assert file.read() == file_in(tmp_path).read() == (numbered(number), False)
        assert os.path.getsize(file.path) == 2 * SLOT_SIZE


def test_slots_are_written_in_turns(tmp_path):
    """A write never touches the slot that holds the newest checkpoint."""
    file = file_in(tmp_path)
    file.write(numbered(1))
    assert sequences(file) == [1, 1], "a new file holds it twice, so that no slot is ever blank"
    before = [1, 1]
    for number in range(2, 9):
        file.write(numbered(number))
        after = sequences(file)
        changed = [at for at in (0, 1) if before[at] != after[at]]
        assert len(changed) == 1
        assert after[changed[0]] == number
        assert before[changed[0]] == min(before), "the older one was replaced"
        before = after


def test_a_write_is_on_disk_before_it_returns(tmp_path):
    """The slot is fsynced after it was written; a new file before its rename, and its folder after."""
    fs = FaultyFileSystem()
    file = file_in(tmp_path, fs)
    file.write(numbered(1))
    made = [name for name, _ in fs.calls if name in ("pwritev", "fsync", "fdatasync", "replace")]
    assert made == ["pwritev", "fsync", "replace", "fsync"]
    fs.calls.clear()
    file.write(numbered(2))
    assert [name for name, _ in fs.calls if name in ("pwritev", "fsync", "fdatasync", "replace")] == [
        "pwritev",
        "fdatasync",
    ]


@pytest.mark.parametrize("kept", [0, 1, 4, 9, 16, 23, 24, 25, 40, -1])
@pytest.mark.parametrize("rest", [b"\0", b"\xff", None], ids=["zeros", "ones", "what was there"])
def test_a_torn_write_leaves_the_checkpoint_before_it(tmp_path, kept, rest):
    """A slot with only its first bytes does not count: the earlier slot does, and the damage is reported."""
    file = file_in(tmp_path)
    for number in (1, 2, 3):
        file.write(numbered(number))
    before = Path(file.path).read_bytes()
    file.write(numbered(4))
    after = Path(file.path).read_bytes()
    start = 0 if before[:SLOT_SIZE] != after[:SLOT_SIZE] else SLOT_SIZE
    used = len(after[start : start + SLOT_SIZE].rstrip(b"\0"))
    kept %= used
    behind = before[start + kept : start + SLOT_SIZE] if rest is None else rest * (SLOT_SIZE - kept)
    torn = after[:start] + after[start : start + kept] + behind + after[start + SLOT_SIZE :]
    Path(file.path).write_bytes(torn)
    intact = torn == before  # only equal bytes arrived: that is invisible and harmless
    if torn == after:  # all that differs arrived
        assert file.read() == (numbered(4), False)
        return
    assert file.read() == (numbered(3), not intact)
    file.write(numbered(5))
    assert file.read() == (numbered(5), False)
    if not intact:
        assert sequences(file) == [4, 4], "after damage nothing older is left that could ever be believed"


@pytest.mark.parametrize("data", [b"", b"\0" * 2 * SLOT_SIZE, b"\xff" * 2 * SLOT_SIZE, b"SLC\x01"])
def test_a_file_that_is_no_checkpoint_is_damage_and_can_be_written_anew(tmp_path, data):
    """A file without a valid slot is distinguished from a new partition's, and the next write repairs it."""
    file = file_in(tmp_path)
    Path(file.path).write_bytes(data)
    assert file.read() == (None, True)
    file.write(numbered(1))
    assert file.read() == (numbered(1), False)


def test_a_history_may_grow_beyond_a_slot(tmp_path):
    """Slots double when a checkpoint outgrows them, and alternate at their new size."""
    file = file_in(tmp_path)
    for length in (1, 30, 60, 61, 200, 201, 202, 3):
        file.write(with_history(length))
        assert file.read() == (with_history(length), False)
    size = os.path.getsize(file.path)
    assert size > 2 * SLOT_SIZE
    assert size % (2 * SLOT_SIZE) == 0
    assert all(sequences(file))
    assert len(set(sequences(file))) == 2


def test_a_full_disk_leaves_the_old_checkpoint(tmp_path):
    """Without room a write raises DiskFull, the old checkpoint counts, and the next write succeeds."""
    fs = FaultyFileSystem()
    file = file_in(tmp_path, fs)
    fs.fail("pwritev", errno.ENOSPC)
    with pytest.raises(DiskFull):
        file.write(numbered(1))
    assert file.read() == (None, False)
    assert os.listdir(tmp_path) == []
    file.write(numbered(1))
    for number in (errno.ENOSPC, errno.EDQUOT):
        fs.fail("pwritev", number)
        with pytest.raises(DiskFull) as caught:
            file.write(numbered(2))
        assert caught.value.path == file.path
        assert file.read() == (numbered(1), False)
    fs.room_bytes = 30
    with pytest.raises(DiskFull):
        file.write(numbered(2))
    fs.heal()
    assert file.read() == (numbered(1), True), "half a slot was written: told, since it might have been a newer one"
    file.write(numbered(2))
    assert file.read() == (numbered(2), False)


def test_a_full_disk_while_growing_leaves_the_old_checkpoint(tmp_path):
    """A checkpoint that outgrows its slot needs a new file; without room for it the old file stays as it is."""
    fs = FaultyFileSystem()
    file = file_in(tmp_path, fs)
    file.write(numbered(1))
    fs.room_bytes = SLOT_SIZE
    with pytest.raises(DiskFull):
        file.write(with_history(100))
    fs.heal()
    assert file.read() == (numbered(1), False)
    assert os.listdir(tmp_path) == ["checkpoint"]


@pytest.mark.parametrize("method", ["open", "pwritev", "fdatasync"])
def test_a_disk_that_fails_is_told(tmp_path, method):
    """An I/O error while writing is raised unchanged; a checkpoint that may not be durable is never confirmed."""
    fs = FaultyFileSystem()
    file = file_in(tmp_path, fs)
    file.write(numbered(1))
    fs.fail(method, errno.EIO, call=2 if method == "open" else 1)  # the first open reads
    with pytest.raises(OSError, match=os.strerror(errno.EIO)) as caught:
        file.write(numbered(2))
    assert not isinstance(caught.value, DiskFull)
    assert file.read()[0] in (numbered(1), numbered(2))


def test_a_process_that_dies_while_writing_leaves_the_old_checkpoint_or_the_new_one(tmp_path):
    """After a kill at any call, with a slot rewritten or a new file, a read returns the old or the new checkpoint."""
    small, large = numbered(1), with_history(150)
    for following in (numbered(2), large):
        call, finished = 0, False
        while not finished:
            call += 1
            file_in(tmp_path).write(small)
            fs = FaultyFileSystem()
            fs.die_at(call)
            try:
                file_in(tmp_path, fs).write(following)
                finished = True
            except Died:
                found, damaged = file_in(tmp_path).read()
                assert found in (small, following)
                assert not damaged
        assert call > 6


def test_sequence_numbers_never_go_back(tmp_path):
    """Each write has a higher number than all before it, whatever was repaired or grown in between."""
    file = file_in(tmp_path)
    highest = 0
    for number in range(1, 12):
        checkpoint = with_history(90) if number == 6 else numbered(number)
        file.write(checkpoint)
        newest = max(one or 0 for one in sequences(file))
        assert newest == highest + 1
        highest = newest
        if number == 9:
            data = bytearray(Path(file.path).read_bytes())
            older = sequences(file).index(min(one or 0 for one in sequences(file)))
            data[older * len(data) // 2] ^= 1
            Path(file.path).write_bytes(data)


def test_the_boot_id_and_every_field_are_kept(tmp_path):
    """A write that changes one field leaves every other field as it was."""
    file = file_in(tmp_path)
    first = msgspec.structs.replace(with_history(3), boot_id="x" * 36, log_start_offset=4, recovery_position=9)
    file.write(first)
    file.write(msgspec.structs.replace(first, clean=False))
    assert file.read()[0] == msgspec.structs.replace(first, clean=False)
