"""Files and folders of a simulated disk: their contents in the page cache and on disk."""

from __future__ import annotations

import errno
import functools
import os
from collections.abc import Callable
from typing import NamedTuple

_CAPACITY = 32 << 10


class Effect(NamedTuple):
    """The effect of a call on a file: writes ``data`` at ``position``, or (data None) sets the size to ``position``."""

    position: int
    data: bytes | None


Names = dict[str, "SimulatedFile | None"]


class SimulatedFile:
    """A file or a folder: its contents in the page cache, and those on disk."""

    __slots__ = (
        "buffer", "durable", "durable_names", "durable_version", "is_fixed", "is_folder", "label", "locks", "mapped",
        "marked", "names", "number", "pending", "pending_names", "size", "version",
    )  # fmt: skip

    def __init__(self, number: int, *, is_folder: bool) -> None:
        self.number = number
        self.is_folder = is_folder
        self.buffer = bytearray()
        self.size = 0
        self.is_fixed = self.mapped = False
        """`is_fixed`: the buffer cannot move. `mapped`: a process may change the file through a map, without a call."""
        self.marked = False
        """The mark of `FileSystem.set_inode_mark`, which the kernel keeps while it has the file in memory."""
        self.label = b""
        """The label of `FileSystem.set_label`. It survives each power cut, even if the content does not."""
        self.version = self.durable_version = 0
        """Number of calls that changed the content, now and at the last sync: the time of the last write."""
        self.durable = b""
        self.pending: list[Effect] = []
        self.names: dict[str, SimulatedFile] = {}
        self.durable_names: dict[str, SimulatedFile] = {}
        self.pending_names: list[Names] = []
        self.locks: dict[tuple[int, int], int] = {}
        """By process and descriptor: the kind of flock that they hold."""

    def resize(self, size: int) -> None:
        if size > len(self.buffer):
            if self.mapped:
                raise OSError(errno.EFBIG, "a mapped file of the simulation cannot grow beyond its capacity")
            self.buffer = self.buffer.ljust(2 * size, b"\0")
            self.is_fixed = False
        if size < self.size:
            self.buffer[size : self.size] = bytes(self.size - size)
        self.size = size

    def fix_buffer(self) -> None:
        """Reserve all the capacity that the file may need: a mapped buffer cannot move."""
        if not self.is_fixed:
            if len(self.buffer) < _CAPACITY:
                self.buffer = self.buffer.ljust(_CAPACITY, b"\0")
            self.is_fixed = True

    def sync(self) -> None:
        self.durable = bytes(memoryview(self.buffer)[: self.size])
        self.pending.clear()
        self.durable_version = self.version
        self.durable_names = self.names.copy()
        self.pending_names.clear()

    def content(self) -> bytes:
        return bytes(memoryview(self.buffer)[: self.size])

    def change_names(self, changes: Names) -> None:
        apply_names(self.names, changes)
        self.pending_names.append(changes)


def apply_names(names: dict[str, SimulatedFile], changes: Names) -> None:
    for name, node in changes.items():
        if node is None:
            names.pop(name, None)
        else:
            names[name] = node


def do_effect(node: SimulatedFile, effect: Effect) -> None:
    node.version += 1
    if effect.data is None:
        node.resize(effect.position)
    else:
        end = effect.position + len(effect.data)
        if end > node.size:
            node.resize(end)
        node.buffer[effect.position : end] = effect.data


@functools.lru_cache(maxsize=1000)
def path_parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part not in ("", ".")]


class Disk:
    """Disk and page cache of a machine. Not thread-safe: only one process may make a call at a time."""

    def __init__(self, boot: int = 1, mount: int = 1) -> None:
        self.boot = boot
        self.mount = mount
        self.supports_mount_ids = self.supports_inode_marks = True
        """Whether the kernel supports `FileSystem.mount_id` and `FileSystem.has_inode_mark`."""
        self.pages: list[SimulatedFile] = []
        """Files with a writable map."""
        self.page_versions: dict[int, list[bytes]] = {}
        """By file number: each content that `record_pages` ever found, also before crashes."""
        self.next_number = 2
        self.root = SimulatedFile(1, is_folder=True)
        self.effects = 0
        """Number of calls that changed anything on disk or in the page cache, including syncs."""
        self.on_effect: Callable[[], None] | None = None
        """Called after each call that changed anything: a test can crash the machine at that point."""
        self.processes = 0

    def make_folders(self, path: str) -> None:
        """Create a folder and its parents, all durable."""
        node = self.root
        for name in path_parts(path):
            if name not in node.names:
                node.names[name] = self.new_node(is_folder=True)
            node.sync()
            node = node.names[name]

    def new_node(self, *, is_folder: bool) -> SimulatedFile:
        self.next_number += 1
        return SimulatedFile(self.next_number, is_folder=is_folder)

    def record_pages(self) -> None:
        """Record the contents of mapped files. After a remount, the disk may have any recorded contents."""
        for node in self.pages:
            versions = self.page_versions.setdefault(node.number, [])
            content = node.content()
            if not versions or versions[-1] != content:
                versions.append(content)

    def changed(self) -> None:
        self.effects += 1
        self.record_pages()
        if self.on_effect is not None:
            self.on_effect()

    def find(self, path: str) -> SimulatedFile:
        node = self.root
        for name in path_parts(path):
            try:
                node = node.names[name]
            except KeyError:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path) from None
        return node
