"""A file or folder of a simulated disk: what the page cache shows, and what is on disk so far."""

from __future__ import annotations

import errno
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
        "buffer", "durable", "durable_names", "is_folder", "lock", "mapped", "marked", "names", "number", "pending",
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
        self.marked = False
        """`FileSystem.mark`: known for as long as the kernel has the file in memory."""
        self.durable = b""
        self.pending: list[Effect] = []
        self.names: dict[str, Node] = {}
        self.durable_names: dict[str, Node] = {}
        self.pending_names: list[Names] = []
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
