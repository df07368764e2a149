"""A machine in memory: a disk, the page cache above it, processes, and a mains plug to pull.

    disk = SimulatedDisk()
    partition = Partition("/t/0", "t", 0, config, fs=disk.process())
    ...
    point = disk.point()                     # this very moment
    for survivor in point.crashes(rng, 10):  # what the disk may hold if the power fails now
        partition = Partition("/t/0", "t", 0, config, fs=survivor.process())

Everything that `FileSystem` does is done here, and written down as effects that are not yet
on disk: until a file is fsynced, any of its effects may survive alone, sector by sector,
the new size without the data or the data without the size; until a folder is fsynced, any
of its new, renamed and deleted names. That is more than most file systems lose, and no less
than POSIX lets them lose.

A disk may also go and come back without the machine being started anew (`CrashPoint.remounts`):
the kernel has written back a page that processes map at whatever moment it liked, so each of its
versions may be found there, beside any state of the other files.

Nothing here reaches the real file system, so that a crash state is made, recovered and
checked in about a millisecond: this is where the large numbers come from. That real files
behave no worse is checked through `CrashFS`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from segmentlog.testing.disk_node import Disk, Effect, Node, do_effect
from segmentlog.testing.process import SimulatedProcess

SECTOR = 512
PAGE = 4096


class SimulatedDisk(Disk):
    """Disk and page cache of one machine, to start processes on and to cut the power of. Not thread-safe."""

    def process(self) -> SimulatedProcess:
        """The file system as a new process of this machine sees it."""
        self.processes += 1
        return SimulatedProcess(self, self.processes)

    def point(self) -> CrashPoint:
        """This moment, to crash in later."""
        return CrashPoint(self)


class _Image(NamedTuple):
    """A node at some moment."""

    number: int
    is_folder: bool
    marked: bool
    durable: bytes
    pending: tuple[Effect, ...]
    durable_names: dict[str, int]
    pending_names: tuple[dict[str, int | None], ...]
    versions: Sequence[bytes]


Surviving = Callable[[_Image, int, random.Random], bytes]
"""What of a file is found in the n-th state of a moment."""


class CrashPoint:
    """A moment of a disk's life, kept: what is on disk, and what only the page cache has."""

    def __init__(self, disk: SimulatedDisk) -> None:
        self.effects = disk.effects
        self.boot = disk.boot
        self.mount = disk.mount
        disk.note_pages()
        self._page_versions = {number: versions[:] for number, versions in disk.page_versions.items()}
        self._kernel = (disk.tells_mounts, disk.keeps_marks)
        self._next_number = disk.next_number
        self._images: dict[int, _Image] = {}
        self._collect(disk.root)

    def _collect(self, node: Node) -> None:
        if node.number in self._images:
            return
        pending = node.pending
        if node.mapped and (content := node.content()) != node.durable:
            # What was stored through the map, whole, as one more effect: nobody saw the single stores.
            pending = [*pending, Effect(len(content), None), Effect(0, content)]
        self._images[node.number] = _Image(
            node.number,
            node.is_folder,
            node.marked,
            node.durable,
            tuple(pending),
            {name: child.number for name, child in node.durable_names.items()},
            tuple(
                {name: None if child is None else child.number for name, child in change.items()}
                for change in node.pending_names
            ),
            self._page_versions.get(node.number, ()),
        )
        children: list[Node | None] = [*node.names.copy().values(), *node.durable_names.copy().values()]
        for change in node.pending_names:
            children += change.values()
        for child in children:
            if child is not None:
                self._collect(child)

    def crashes(self, rng: random.Random, count: int, seen: set[int] | None = None) -> Iterator[SimulatedDisk]:
        """Disks as they may be found after a power cut at this moment: the extreme ones first, then random ones.

        A state that was already there is left out, so there may be fewer than ``count``; with
        ``seen`` those of other moments, too, for which it was given.
        """
        return self._found(rng, count, self.boot + 1, _surviving_data, seen)

    def remounts(self, rng: random.Random, count: int, seen: set[int] | None = None) -> Iterator[SimulatedDisk]:
        """Disks as they may be found when this one went away and came back to the same running machine.

        As after a power cut, but for the files that processes map: each of them as it was at any
        moment ever, or its sectors at several.
        """
        return self._found(rng, count, self.boot, _remounted_data, seen)

    def _found(
        self, rng: random.Random, count: int, boot: int, surviving: Surviving, seen: set[int] | None
    ) -> Iterator[SimulatedDisk]:
        seen = set() if seen is None else seen
        for number in range(count):
            survivors: dict[int, tuple[bytes, dict[str, int]]] = {}
            for image in self._images.values():
                survivors[image.number] = (surviving(image, number, rng), _surviving_names(image, number, rng))
            disk, key = self._build(survivors, self._new_disk(boot, self.mount + 1))
            if key not in seen:
                seen.add(key)
                yield disk

    def _new_disk(self, boot: int, mount: int) -> SimulatedDisk:
        disk = SimulatedDisk(boot, mount)
        disk.next_number = self._next_number
        disk.tells_mounts, disk.keeps_marks = self._kernel
        disk.page_versions = {number: versions[:] for number, versions in self._page_versions.items()}
        return disk

    def _build(
        self, survivors: dict[int, tuple[bytes, dict[str, int]]], disk: SimulatedDisk
    ) -> tuple[SimulatedDisk, int]:
        made: dict[int, Node] = {1: disk.root}
        key: list[object] = []

        def fill(node: Node) -> None:
            data, names = survivors[node.number]
            key.append((node.number, data, tuple(sorted(names.items()))))
            if data:
                node.resize(len(data))
                node.buffer[: len(data)] = data
            for name, number in names.items():
                child = made.get(number)
                if child is None:
                    child = made[number] = Node(number, is_folder=self._images[number].is_folder)
                    fill(child)
                node.names[name] = child
            node.sync()

        fill(disk.root)
        return disk, hash(tuple(key))

    def process_death(self) -> SimulatedDisk:
        """The same machine goes on without its processes: nothing is lost, nothing is more durable than before."""
        disk = self._new_disk(self.boot, self.mount)
        made = {image.number: Node(image.number, is_folder=image.is_folder) for image in self._images.values()}
        disk.root = made[1]
        for image in self._images.values():
            node = made[image.number]
            node.marked = image.marked
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
    """What of a file's unsynced effects is found on disk, in the ``number``-th state of a moment."""
    if not image.pending:
        return image.durable
    how = ("nothing", "all", "all", "nothing", "zeros")[number] if number < 5 else rng.choice(_WAYS)
    if how == "nothing":
        return image.durable
    if how == "some":  # calls, in any combination
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
    if how == "zeros":  # the size grew, the data did not arrive
        return image.durable[: len(versions[-1])].ljust(len(versions[-1]), b"\0")
    if how == "prefix":
        return rng.choice(versions)
    # Pages or sectors, each as it was at some moment since the last sync; the size likewise.
    unit = PAGE if how == "pages" else SECTOR
    size = len(rng.choice(versions))
    parts = []
    for start in range(0, size, unit):
        part = rng.choice(versions)[start : start + unit]
        parts.append(part.ljust(min(unit, size - start), b"\0"))
    return b"".join(parts)


def _remounted_data(image: _Image, number: int, rng: random.Random) -> bytes:
    """`_surviving_data`; of a file that was mapped, what it held at some moment: the first state has the newest."""
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
    """The names in a folder that are found on disk; each change whole or not at all."""
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
