"""A simulated machine in memory: a disk, its page cache, processes, and power cuts.

    disk = SimulatedDisk()
    partition = Partition("/t/0", "t", 0, config, fs=disk.process())
    ...
    point = disk.point()                     # the present state
    for survivor in point.crashes(rng, 10):  # possible disks after a power cut at that state
        partition = Partition("/t/0", "t", 0, config, fs=survivor.process())

The simulation implements all of `FileSystem`, and records each call as an effect that is not yet on disk.
Until a file is fsynced, any of its effects may survive alone, sector by sector, or the new size without the
data, or the data without the size. Until a folder is fsynced, any of its new, renamed and deleted names may
survive alone. Most file systems lose less; POSIX allows them to lose no more.

A disk may also be detached and attached again while the machine runs (`CrashPoint.remounts`). The kernel
writes back mapped pages at any time, so the disk may have any version of such a page, with any state of the
other files.

The simulation does not use the real file system. So a test creates, recovers and checks a crash state in about a
millisecond, and can check many of them. Tests with `CrashFS` check that real files behave no worse.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from segmentlog.testing.disk_node import Disk, Effect, SimulatedFile, do_effect
from segmentlog.testing.process import SimulatedProcess

SECTOR = 512
PAGE = 4096


class SimulatedDisk(Disk):
    """Disk and page cache of a machine, on which tests start processes and cut the power. Not thread-safe."""

    def process(self) -> SimulatedProcess:
        """Return the file system of a new process of this machine."""
        self.processes += 1
        return SimulatedProcess(self, self.processes)

    def point(self) -> CrashPoint:
        """Return a snapshot of the present state, from which a test derives crash states later."""
        return CrashPoint(self)


class _Image(NamedTuple):
    """Snapshot of a file or folder."""

    number: int
    is_folder: bool
    marked: bool
    label: bytes
    version: int
    durable_version: int
    durable: bytes
    pending: tuple[Effect, ...]
    durable_names: dict[str, int]
    pending_names: tuple[dict[str, int | None], ...]
    versions: Sequence[bytes]


class _Survivor(NamedTuple):
    """Content, names and time of the last write that a file or folder has after a power cut."""

    data: bytes
    names: dict[str, int]
    version: int


Surviving = Callable[[_Image, int, random.Random], bytes]
"""Returns the contents of a file in the n-th crash state of a snapshot."""


class CrashPoint:
    """A snapshot of a disk: the contents on disk, and those that only the page cache has."""

    def __init__(self, disk: SimulatedDisk) -> None:
        self.effects = disk.effects
        self.boot = disk.boot
        self.mount = disk.mount
        disk.record_pages()
        self._page_versions = {number: versions[:] for number, versions in disk.page_versions.items()}
        self._kernel = (disk.supports_mount_ids, disk.supports_inode_marks)
        self._next_number = disk.next_number
        self._images: dict[int, _Image] = {}
        self._collect(disk.root)

    def _collect(self, node: SimulatedFile) -> None:
        if node.number in self._images:
            return
        pending = node.pending
        if node.mapped and (content := node.content()) != node.durable:
            # All stores through the map count as one more effect, because single stores are not observable.
            pending = [*pending, Effect(len(content), None), Effect(0, content)]
        self._images[node.number] = _Image(
            node.number,
            node.is_folder,
            node.marked,
            node.label,
            node.version,
            node.durable_version,
            node.durable,
            tuple(pending),
            {name: child.number for name, child in node.durable_names.items()},
            tuple(
                {name: None if child is None else child.number for name, child in change.items()}
                for change in node.pending_names
            ),
            self._page_versions.get(node.number, ()),
        )
        children: list[SimulatedFile | None] = [*node.names.copy().values(), *node.durable_names.copy().values()]
        for change in node.pending_names:
            children += change.values()
        for child in children:
            if child is not None:
                self._collect(child)

    def crashes(self, rng: random.Random, count: int, seen: set[int] | None = None) -> Iterator[SimulatedDisk]:
        """Yield possible disks after a power cut at this snapshot: first extreme states, then random states.

        Repeated states are skipped, so there may be fewer than ``count``. Snapshots that share ``seen`` also skip
        each other's states.
        """
        return self._found(rng, count, self.boot + 1, _surviving_data, seen)

    def remounts(self, rng: random.Random, count: int, seen: set[int] | None = None) -> Iterator[SimulatedDisk]:
        """Yield possible disks after this disk was detached from the running machine and attached again.

        Like `crashes`, except for files that processes map: such a file, or each of its sectors, has the contents of
        any time in the past.
        """
        return self._found(rng, count, self.boot, _remounted_data, seen)

    def _found(
        self, rng: random.Random, count: int, boot: int, surviving: Surviving, seen: set[int] | None
    ) -> Iterator[SimulatedDisk]:
        seen = set() if seen is None else seen
        for number in range(count):
            survivors: dict[int, _Survivor] = {}
            for image in self._images.values():
                version = rng.choice((image.version, image.durable_version)) if image.label else image.version
                data, names = surviving(image, number, rng), _surviving_names(image, number, rng)
                survivors[image.number] = _Survivor(data, names, version)
            disk, key = self._build(survivors, self._new_disk(boot, self.mount + 1))
            if key not in seen:
                seen.add(key)
                yield disk

    def _new_disk(self, boot: int, mount: int) -> SimulatedDisk:
        disk = SimulatedDisk(boot, mount)
        disk.next_number = self._next_number
        disk.supports_mount_ids, disk.supports_inode_marks = self._kernel
        disk.page_versions = {number: versions[:] for number, versions in self._page_versions.items()}
        return disk

    def _build(self, survivors: dict[int, _Survivor], disk: SimulatedDisk) -> tuple[SimulatedDisk, int]:
        made: dict[int, SimulatedFile] = {1: disk.root}
        key: list[object] = []

        def fill(node: SimulatedFile) -> None:
            data, names, node.version = survivors[node.number]
            node.label = self._images[node.number].label
            key.append((node.number, data, tuple(sorted(names.items()))))
            if data:
                node.resize(len(data))
                node.buffer[: len(data)] = data
            for name, number in names.items():
                child = made.get(number)
                if child is None:
                    child = made[number] = SimulatedFile(number, is_folder=self._images[number].is_folder)
                    fill(child)
                node.names[name] = child
            node.sync()

        fill(disk.root)
        return disk, hash(tuple(key))

    def process_death(self) -> SimulatedDisk:
        """Return the machine as it is after all processes died. Unsynced data remain in its page cache."""
        disk = self._new_disk(self.boot, self.mount)
        made = {image.number: SimulatedFile(image.number, is_folder=image.is_folder) for image in self._images.values()}
        disk.root = made[1]
        for image in self._images.values():
            node = made[image.number]
            node.marked, node.label = image.marked, image.label
            node.version = node.durable_version = image.durable_version
            if image.durable:
                node.resize(len(image.durable))
                node.buffer[: len(image.durable)] = image.durable
            node.durable = image.durable
            for effect in image.pending:
                do_effect(node, effect)
            node.pending = list(image.pending)
            node.durable_names = {name: made[number] for name, number in image.durable_names.items()}
            node.names = dict(node.durable_names)
            for change in image.pending_names:
                node.change_names({name: None if number is None else made[number] for name, number in change.items()})
        return disk


def _applied(content: bytes, effect: Effect) -> bytes:
    if effect.data is None:
        return content[: effect.position].ljust(effect.position, b"\0")
    end = effect.position + len(effect.data)
    return content[: effect.position].ljust(effect.position, b"\0") + effect.data + content[end:]


def _surviving_data(image: _Image, number: int, rng: random.Random) -> bytes:
    """Return the contents of a file on disk in the ``number``-th crash state."""
    if not image.pending:
        return image.durable
    how = ("nothing", "all", "all", "nothing", "zeros")[number] if number < 5 else rng.choice(_WAYS)
    if how == "nothing":
        return image.durable
    if how == "some":  # any combination of calls
        content = image.durable
        for effect in image.pending:
            if rng.random() < 0.5:
                content = _applied(content, effect)
        return content
    versions = [image.durable]
    for effect in image.pending:
        versions.append(_applied(versions[-1], effect))
    if how == "all":
        return versions[-1]
    if how == "zeros":  # only the size arrived, not the data
        return image.durable[: len(versions[-1])].ljust(len(versions[-1]), b"\0")
    if how == "prefix":
        return rng.choice(versions)
    # Each page or sector has a version since the last sync, independent of the others; so has the size.
    unit = PAGE if how == "pages" else SECTOR
    size = len(rng.choice(versions))
    parts = []
    for start in range(0, size, unit):
        part = rng.choice(versions)[start : start + unit]
        parts.append(part.ljust(min(unit, size - start), b"\0"))
    return b"".join(parts)


def _remounted_data(image: _Image, number: int, rng: random.Random) -> bytes:
    """Return the contents of a file after a remount.

    A mapped file, or each of its sectors, has any past version; in state 0 the whole file has the newest.
    """
    if not image.versions:
        return _surviving_data(image, number, rng)
    if number == 0:
        return image.versions[-1]
    if rng.random() < 0.8:
        return rng.choice(image.versions)
    size = len(rng.choice(image.versions))
    return b"".join(rng.choice(image.versions)[at : at + SECTOR].ljust(SECTOR, b"\0") for at in range(0, size, SECTOR))


_WAYS = ("nothing", "all", "some", "zeros", "prefix", "pages", "sectors", "sectors")


def _surviving_names(image: _Image, number: int, rng: random.Random) -> dict[str, int]:
    """Return the names in a folder on disk; each change of names is applied completely or not at all."""
    names = dict(image.durable_names)
    how = ("none", "all", "none", "all", "all")[number] if number < 5 else rng.choice(("none", "all", "some", "prefix"))
    stop = rng.randrange(len(image.pending_names) + 1) if how == "prefix" else 0
    for index, change in enumerate(image.pending_names):
        if how == "all" or (how == "some" and rng.random() < 0.5) or (how == "prefix" and index < stop):
            for name, child in change.items():
                if child is None:
                    names.pop(name, None)
                else:
                    names[name] = child
    return names
