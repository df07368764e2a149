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

Nothing here reaches the real file system, so that a crash state is made, recovered and
checked in about a millisecond: this is where the large numbers come from. That real files
behave no worse is checked through `CrashFS`.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import os
import random
import stat
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from segmentlog.storage.fs import Buffer, FileSystem
from segmentlog.testing.faults import Died

SECTOR = 512
PAGE = 4096
_CAPACITY = 32 << 10
_DEVICE = 77


class _Effect(NamedTuple):
    """What one call did to a file: ``data`` written at ``position``, or the size set to it (data None)."""

    position: int
    data: bytes | None


_Names = dict[str, "Node | None"]


class Node:
    """A file or a folder, as the page cache shows it, with what the disk knows of it."""

    __slots__ = (
        "buffer", "durable", "durable_names", "is_folder", "lock", "mapped", "names", "number", "pending",
        "pending_names", "size",
    )  # fmt: skip

    def __init__(self, number: int, *, is_folder: bool) -> None:
        self.number = number
        self.is_folder = is_folder
        # A fixed capacity: what is mapped cannot be moved.
        self.buffer = bytearray(0 if is_folder else _CAPACITY)
        self.size = 0
        self.mapped = False
        """Whether stores through a map may change it unseen."""
        self.durable = b""
        self.pending: list[_Effect] = []
        self.names: dict[str, Node] = {}
        self.durable_names: dict[str, Node] = {}
        self.pending_names: list[_Names] = []
        self.lock: tuple[int, int] | None = None
        """Process and descriptor that hold its flock."""

    def resize(self, size: int) -> None:
        if size > len(self.buffer):
            if self.mapped:
                raise OSError(errno.EFBIG, "a simulated file that is mapped cannot grow beyond its capacity")
            self.buffer = self.buffer.ljust(2 * size, b"\0")
        if size < self.size:
            self.buffer[size : self.size] = bytes(self.size - size)
        self.size = size

    def sync(self) -> None:
        self.durable = bytes(memoryview(self.buffer)[: self.size])
        self.pending.clear()
        self.durable_names = dict(self.names)
        self.pending_names.clear()

    def content(self) -> bytes:
        return bytes(memoryview(self.buffer)[: self.size])

    def change_names(self, changes: _Names) -> None:
        _apply_names(self.names, changes)
        self.pending_names.append(changes)


def _apply_names(names: dict[str, Node], changes: _Names) -> None:
    for name, node in changes.items():
        if node is None:
            names.pop(name, None)
        else:
            names[name] = node


class SimulatedDisk:
    """Disk and page cache of one machine. Not thread-safe: processes take turns."""

    def __init__(self, boot: int = 1) -> None:
        self.boot = boot
        self.next_number = 2
        self.root = Node(1, is_folder=True)
        self.effects = 0
        """Counts the calls that changed anything, syncs included."""
        self.on_effect: Callable[[], None] | None = None
        """Called after each of them: the boundary at which a crash may come."""
        self._processes = 0

    def process(self) -> SimulatedProcess:
        """The file system as a new process of this machine sees it."""
        self._processes += 1
        return SimulatedProcess(self, self._processes)

    def make_folders(self, path: str) -> None:
        """Make a folder and those above it, all durable."""
        node = self.root
        for name in _parts(path):
            if name not in node.names:
                node.names[name] = self.new_node(is_folder=True)
            node.sync()
            node = node.names[name]

    def new_node(self, *, is_folder: bool) -> Node:
        self.next_number += 1
        return Node(self.next_number, is_folder=is_folder)

    def changed(self) -> None:
        self.effects += 1
        if self.on_effect is not None:
            self.on_effect()

    def find(self, path: str) -> Node:
        node = self.root
        for name in _parts(path):
            try:
                node = node.names[name]
            except KeyError:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path) from None
        return node

    def point(self) -> CrashPoint:
        """This moment, to crash in later."""
        return CrashPoint(self)


@functools.lru_cache(maxsize=1000)
def _parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part]


class _Image(NamedTuple):
    """A node at some moment."""

    number: int
    is_folder: bool
    durable: bytes
    pending: tuple[_Effect, ...]
    durable_names: dict[str, int]
    pending_names: tuple[dict[str, int | None], ...]


class CrashPoint:
    """A moment of a disk's life, kept: what is on disk, and what only the page cache has."""

    def __init__(self, disk: SimulatedDisk) -> None:
        self.effects = disk.effects
        self.boot = disk.boot
        self._next_number = disk.next_number
        self._images: dict[int, _Image] = {}
        self._collect(disk.root)

    def _collect(self, node: Node) -> None:
        if node.number in self._images:
            return
        pending = node.pending
        if node.mapped and (content := node.content()) != node.durable:
            # What was stored through the map, whole, as one more effect: nobody saw the single stores.
            pending = [*pending, _Effect(len(content), None), _Effect(0, content)]
        self._images[node.number] = _Image(
            node.number,
            node.is_folder,
            node.durable,
            tuple(pending),
            {name: child.number for name, child in node.durable_names.items()},
            tuple(
                {name: None if child is None else child.number for name, child in change.items()}
                for change in node.pending_names
            ),
        )
        children: list[Node | None] = [*node.names.values(), *node.durable_names.values()]
        for change in node.pending_names:
            children += change.values()
        for child in children:
            if child is not None:
                self._collect(child)

    @property
    def nothing_is_unsynced(self) -> bool:
        return not any(image.pending or image.pending_names for image in self._images.values())

    def crashes(self, rng: random.Random, count: int) -> Iterator[SimulatedDisk]:
        """Disks as they may be found after a power cut at this moment: the extreme ones first, then random ones.

        A state that was already there is left out, so there may be fewer than ``count``.
        """
        seen = set()
        for number in range(count):
            survivors: dict[int, tuple[bytes, dict[str, int]]] = {}
            for image in self._images.values():
                survivors[image.number] = (
                    _surviving_data(image, number, rng),
                    _surviving_names(image, number, rng),
                )
            disk, key = self._build(survivors)
            if key not in seen:
                seen.add(key)
                yield disk

    def _build(self, survivors: dict[int, tuple[bytes, dict[str, int]]]) -> tuple[SimulatedDisk, int]:
        disk = SimulatedDisk(self.boot + 1)
        disk.next_number = self._next_number
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
        disk = SimulatedDisk(self.boot)
        disk.next_number = self._next_number
        made = {image.number: Node(image.number, is_folder=image.is_folder) for image in self._images.values()}
        disk.root = made[1]
        for image in self._images.values():
            node = made[image.number]
            if image.durable:
                node.resize(len(image.durable))
                node.buffer[: len(image.durable)] = image.durable
            node.durable = image.durable
            for effect in image.pending:
                _do(node, effect)
            node.pending = list(image.pending)
            node.durable_names = {name: made[number] for name, number in image.durable_names.items()}
            node.names = dict(node.durable_names)
            for change in image.pending_names:
                node.change_names({name: None if number is None else made[number] for name, number in change.items()})
        return disk


def _do(node: Node, effect: _Effect) -> None:
    if effect.data is None:
        node.resize(effect.position)
    else:
        end = effect.position + len(effect.data)
        if end > node.size:
            node.resize(end)
        node.buffer[effect.position : end] = effect.data


def _applied(content: bytes, effect: _Effect) -> bytes:
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


class SimulatedProcess(FileSystem):
    """The seam as one process of a simulated machine calls it. Errors are those of the system calls.

    ``fail_at`` makes one call fail, counted over all methods from 1: with an errno, by writing
    half (``"short"``), by writing half and finding the disk full at the next write (``"full"``),
    or by the process's death before it (``"die"``).
    """

    def __init__(self, disk: SimulatedDisk, number: int) -> None:
        self.disk = disk
        self.number = number
        self.calls = 0
        self.fail_at: tuple[int, int | str] | None = None
        self.failed: str = ""
        """The method that `fail_at` made fail."""
        self._fds: dict[int, Node] = {}
        self._next_fd = 1000 * number
        self._dead = self._full = False
        for name in _CALLS:
            setattr(self, name, self._counted(name, getattr(self, f"_{name}")))

    def _counted(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **options: Any) -> Any:
            self.calls += 1
            if self._dead:
                raise Died
            if name == "pwritev" and self._full:
                self._full = False
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if self.fail_at is not None and self.calls == self.fail_at[0]:
                how = self.fail_at[1]
                self.failed = name
                if how == "die":
                    self.die()
                    raise Died
                if isinstance(how, int):
                    raise OSError(how, os.strerror(how))
                if name == "pwritev":
                    self._full = how == "full"
                    data = b"".join(args[1])
                    return call(args[0], [data[: len(data) // 2]], args[2])
            return call(*args, **options)

        return counted

    def die(self) -> None:
        """The kernel closes its descriptors, and so frees its locks."""
        for fd in list(self._fds):
            self._close(fd)
        self._dead = True

    def boot_id(self) -> str:
        return f"boot-{self.disk.boot}"

    # ------------------------------------------------------------ files

    def _node(self, fd: int) -> Node:
        try:
            return self._fds[fd]
        except KeyError:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF)) from None

    def _open(self, path: str, flags: int, mode: int = 0o777) -> int:
        try:
            node = self.disk.find(path)
            if flags & os.O_CREAT and flags & os.O_EXCL:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        except FileNotFoundError:
            if not flags & os.O_CREAT:
                raise
            folder, name = self._parent(path)
            node = self.disk.new_node(is_folder=False)
            folder.change_names({name: node})
            self.disk.changed()
        if flags & os.O_TRUNC:
            self._set_size(node, 0)
        self._next_fd += 1
        self._fds[self._next_fd] = node
        return self._next_fd

    def _parent(self, path: str) -> tuple[Node, str]:
        parts = _parts(path)
        folder = self.disk.find("/".join(parts[:-1]))
        return folder, parts[-1]

    def _close(self, fd: int) -> None:
        node = self._node(fd)
        del self._fds[fd]
        if node.lock == (self.number, fd):
            node.lock = None

    def _pread(self, fd: int, size: int, position: int) -> bytes:
        node = self._node(fd)
        return bytes(memoryview(node.buffer)[position : min(position + size, node.size)])

    def _pwritev(self, fd: int, buffers: Sequence[Buffer], position: int) -> int:
        node = self._node(fd)
        effect = _Effect(position, b"".join(buffers))
        assert effect.data is not None
        _do(node, effect)
        node.pending.append(effect)
        self.disk.changed()
        return len(effect.data)

    def _sync(self, fd: int) -> None:
        self._node(fd).sync()
        self.disk.changed()

    _fsync = _fdatasync = _sync

    def _ftruncate(self, fd: int, size: int) -> None:
        self._set_size(self._node(fd), size)

    def _set_size(self, node: Node, size: int) -> None:
        if size != node.size:
            effect = _Effect(size, None)
            _do(node, effect)
            node.pending.append(effect)
            self.disk.changed()

    def _fallocate(self, fd: int, position: int, size_bytes: int) -> None:
        node = self._node(fd)
        if position + size_bytes > node.size:
            self._set_size(node, position + size_bytes)

    def _map_file(self, fd: int, size_bytes: int, *, writable: bool = False) -> memoryview:
        node = self._node(fd)
        node.mapped |= writable
        view = memoryview(node.buffer)[:size_bytes]
        return view if writable else view.toreadonly()

    # ------------------------------------------------------------ names

    def _move(self, source: str, target: str) -> None:
        node = self.disk.find(source)
        folder, name = self._parent(source)
        target_folder, target_name = self._parent(target)
        if folder is target_folder:
            folder.change_names({name: None, target_name: node})
        else:
            target_folder.change_names({target_name: node})
            folder.change_names({name: None})
        self.disk.changed()

    _rename = _replace = _move

    def _unlink(self, path: str) -> None:
        self.disk.find(path)
        folder, name = self._parent(path)
        folder.change_names({name: None})
        self.disk.changed()

    def _rmdir(self, path: str) -> None:
        if self.disk.find(path).names:
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)
        self._unlink(path)

    def _mkdir(self, path: str) -> None:
        folder, name = self._parent(path)
        if name in folder.names:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        folder.change_names({name: self.disk.new_node(is_folder=True)})
        self.disk.changed()

    def _listdir(self, path: str) -> list[str]:
        return list(self.disk.find(path).names)

    def _remove_tree(self, path: str) -> None:
        self._unlink(path)

    def _fstat(self, fd: int) -> os.stat_result:
        return _stat(self._node(fd))

    def _stat(self, path: str) -> os.stat_result:
        return _stat(self.disk.find(path))

    def _flock(self, fd: int, operation: int) -> None:
        node = self._node(fd)
        holder = (self.number, fd)
        if operation & fcntl.LOCK_UN:
            if node.lock == holder:
                node.lock = None
        elif node.lock in (None, holder):
            node.lock = holder
        elif operation & fcntl.LOCK_NB:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        else:
            raise OSError(errno.EDEADLK, f"process {self.number} would wait for ever: {node.lock} holds the lock")


_CALLS = (
    "open", "close", "pread", "pwritev", "fdatasync", "fsync", "ftruncate", "rename", "replace", "unlink", "rmdir",
    "flock", "mkdir", "listdir", "fstat", "stat", "remove_tree", "fallocate", "map_file",
)  # fmt: skip


def _stat(node: Node) -> os.stat_result:
    kind = stat.S_IFDIR if node.is_folder else stat.S_IFREG
    return os.stat_result((kind | 0o755, node.number, _DEVICE, 1, 0, 0, node.size, 0, 0, 0))
