"""A file or folder of a simulated disk: what the page cache shows, and what is on disk so far."""

from __future__ import annotations

import errno
import functools
import os
from collections.abc import Callable
from typing import NamedTuple

_CAPACITY = 32 << 10


class Effect(NamedTuple):
    """What one call did to a file: ``data`` written at ``position``, or the size set to it (data None)."""

    position: int
    data: bytes | None


Names = dict[str, "Node | None"]


class Node:
    """A file or a folder, as the page cache shows it, with what the disk knows of it."""

    __slots__ = (
        "buffer", "durable", "durable_names", "has_place", "is_folder", "locks", "mapped", "marked", "names", "number",
        "pending", "pending_names", "size",
    )  # fmt: skip

    def __init__(self, number: int, *, is_folder: bool) -> None:
        self.number = number
        self.is_folder = is_folder
        self.buffer = bytearray()
        self.size = 0
        self.has_place = self.mapped = False
        """Whether stores through a map may change it unseen."""
        self.marked = False
        """`FileSystem.set_inode_mark`: known for as long as the kernel has the file in memory."""
        self.durable = b""
        self.pending: list[Effect] = []
        self.names: dict[str, Node] = {}
        self.durable_names: dict[str, Node] = {}
        self.pending_names: list[Names] = []
        self.locks: dict[tuple[int, int], int] = {}
        """By process and descriptor that hold its flock: in which way."""

    def resize(self, size: int) -> None:
        if size > len(self.buffer):
            if self.mapped:
                raise OSError(errno.EFBIG, "a simulated file that is mapped cannot grow beyond its capacity")
            self.buffer = self.buffer.ljust(2 * size, b"\0")
            self.has_place = False
        if size < self.size:
            self.buffer[size : self.size] = bytes(self.size - size)
        self.size = size

    def fix_place(self) -> None:
        """Have a capacity from now on that will do: what is mapped cannot be moved."""
        if not self.has_place:
            if len(self.buffer) < _CAPACITY:
                self.buffer = self.buffer.ljust(_CAPACITY, b"\0")
            self.has_place = True

    def sync(self) -> None:
        self.durable = bytes(memoryview(self.buffer)[: self.size])
        self.pending.clear()
        self.durable_names = self.names.copy()
        self.pending_names.clear()

    def content(self) -> bytes:
        return bytes(memoryview(self.buffer)[: self.size])

    def change_names(self, changes: Names) -> None:
        apply_names(self.names, changes)
        self.pending_names.append(changes)


def apply_names(names: dict[str, Node], changes: Names) -> None:
    for name, node in changes.items():
        if node is None:
            names.pop(name, None)
        else:
            names[name] = node


def do_effect(node: Node, effect: Effect) -> None:
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
    """Disk and page cache of one machine. Not thread-safe: processes take turns."""

    def __init__(self, boot: int = 1, mount: int = 1) -> None:
        self.boot = boot
        self.mount = mount
        self.tells_mounts = self.keeps_marks = True
        """What the kernel has to say of its memory: `FileSystem.mount_id`, `FileSystem.has_inode_mark`."""
        self.pages: list[Node] = []
        """Files that are mapped to be stored to."""
        self.page_versions: dict[int, list[bytes]] = {}
        """By file number: each content that `note_pages` ever met in it, over crashes too."""
        self.next_number = 2
        self.root = Node(1, is_folder=True)
        self.effects = 0
        """Counts the calls that changed anything, syncs included."""
        self.on_effect: Callable[[], None] | None = None
        """Called after each of them: the boundary at which a crash may come."""
        self.processes = 0

    def make_folders(self, path: str) -> None:
        """Make a folder and those above it, all durable."""
        node = self.root
        for name in path_parts(path):
            if name not in node.names:
                node.names[name] = self.new_node(is_folder=True)
            node.sync()
            node = node.names[name]

    def new_node(self, *, is_folder: bool) -> Node:
        self.next_number += 1
        return Node(self.next_number, is_folder=is_folder)

    def note_pages(self) -> None:
        """Remember what mapped files hold now: any of it may be on the disk when that comes back."""
        for node in self.pages:
            versions = self.page_versions.setdefault(node.number, [])
            content = node.content()
            if not versions or versions[-1] != content:
                versions.append(content)

    def changed(self) -> None:
        self.effects += 1
        self.note_pages()
        if self.on_effect is not None:
            self.on_effect()

    def find(self, path: str) -> Node:
        node = self.root
        for name in path_parts(path):
            try:
                node = node.names[name]
            except KeyError:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path) from None
        return node
