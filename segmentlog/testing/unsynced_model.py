"""A disk in memory that distinguishes synced and unsynced data: the model that `CrashFS` mounts.

A file has its present pages and its present size. It also has all versions of each since the last sync, the synced
version first. A folder has its present names and its names on disk. The difference is a journal of changes
(create, rename, delete), each of which reaches the disk completely or not at all.

A sync of a file does not sync its name. A sync of a folder syncs only its names. Most file systems guarantee
more, but a log must not rely on it.
"""

from __future__ import annotations

import errno
import os
import random
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal, NamedTuple

PAGE: Final = 4096
SECTOR: Final = 512
ORPHAN_PREFIX: Final = ".fuse_hidden"
"""libfuse renames an open file to such a name instead of deleting it, so that it can still be read."""

Keep = Literal["none", "all", "some"]
"""How much of the unsynced data survives a crash."""

_KEEPS: Final[tuple[Keep, ...]] = ("none", "all", "some", "some", "some", "some")
_ZEROS: Final = bytes(PAGE)
_VERSIONS_MAX: Final = 64  # of one page; a log rewrites its last page with every append


class ModelFile:
    """A file or a folder. Attributes have the state that processes see, unless their names contain "durable"."""

    __slots__ = (
        "durable_names", "is_folder", "mode", "mtime_ns", "names", "number", "orphans", "pages", "size", "sizes",
        "versions",
    )  # fmt: skip

    def __init__(self, number: int, mode: int, *, is_folder: bool) -> None:
        self.number = number
        self.mode = mode
        self.is_folder = is_folder
        self.mtime_ns = time.time_ns()
        self.size = 0
        self.pages: dict[int, bytes] = {}
        """By page number: its 4096 bytes. A missing page is zeros."""
        self.versions: dict[int, list[bytes]] = {}
        """All contents of each page that changed since the last sync, from the durable to the present contents."""
        self.sizes: list[int] = [0]
        """All sizes since the last sync, from the durable to the present size."""
        self.names: dict[str, ModelFile] = {}
        self.durable_names: dict[str, ModelFile] = {}
        self.orphans: dict[str, ModelFile] = {}
        """Deleted files of this folder that a process still has open. Their names are never on disk."""

    def put_page(self, index: int, content: bytes) -> None:
        old = self.pages.get(index, _ZEROS)
        if content == old:
            return
        versions = self.versions.setdefault(index, [old])
        versions.append(content)
        if len(versions) > _VERSIONS_MAX:
            del versions[len(versions) // 2]
        if content == _ZEROS:
            self.pages.pop(index, None)
        else:
            self.pages[index] = content

    def put_size(self, size: int) -> None:
        if size != self.size:
            self.size = size
            self.sizes.append(size)

    def sync_data(self) -> None:
        self.versions.clear()
        self.sizes = [self.size]

    def content(self) -> bytes:
        pages = (self.pages.get(index, _ZEROS) for index in range(-(-self.size // PAGE)))
        return b"".join(pages)[: self.size]


class _NameChange(NamedTuple):
    """The effect of a call on names. It reaches the disk completely or not at all."""

    text: str
    slots: tuple[tuple[ModelFile, str, ModelFile | None], ...]
    """(folder, name, the new node of that name or None)"""


class ForgetfulDisk:
    """Files and folders in memory. Paths begin with a slash. Raises the errors of the system calls. Not thread-safe."""

    def __init__(self) -> None:
        self._next_number = 1
        self.root = self._new_node(0o755, is_folder=True)
        self._journal: list[_NameChange] = []
        """Changes of names that are not synced yet, in their order."""

    def _new_node(self, mode: int, *, is_folder: bool) -> ModelFile:
        node = ModelFile(self._next_number, mode, is_folder=is_folder)
        self._next_number += 1
        return node

    # ------------------------------------------------------------ names

    def find(self, path: str) -> ModelFile:
        node = self.root
        for name in path.split("/"):
            if name:
                found = node.names.get(name) or node.orphans.get(name)
                if found is None:
                    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
                node = found
        return node

    def _parent(self, path: str) -> tuple[ModelFile, str]:
        folder, _, name = path.rpartition("/")
        node = self.find(folder)
        if not node.is_folder:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        return node, name

    def _change(self, text: str, *slots: tuple[ModelFile, str, ModelFile | None]) -> None:
        change = _NameChange(text, slots)
        _apply(change, durable=False)
        self._journal.append(change)

    def create(self, path: str, mode: int = 0o644) -> ModelFile:
        return self._make(path, mode, is_folder=False)

    def mkdir(self, path: str, mode: int = 0o755) -> ModelFile:
        return self._make(path, mode, is_folder=True)

    def _make(self, path: str, mode: int, *, is_folder: bool) -> ModelFile:
        folder, name = self._parent(path)
        if name in folder.names:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        node = self._new_node(stat.S_IMODE(mode), is_folder=is_folder)
        self._change(f"make {path}", (folder, name, node))
        return node

    def link(self, old: str, new: str) -> ModelFile:
        """Add a name to a file (a hard link)."""
        node = self.find(old)
        folder, name = self._parent(new)
        if name in folder.names:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), new)
        self._change(f"link {old} -> {new}", (folder, name, node))
        return node

    def unlink(self, path: str) -> None:
        folder, name = self._parent(path)
        if folder.orphans.pop(name, None) is None:
            self.find(path)
            self._change(f"delete {path}", (folder, name, None))

    def rmdir(self, path: str) -> None:
        folder, name = self._parent(path)
        if self.find(path).names:
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)
        self._change(f"delete {path}", (folder, name, None))

    def rename(self, old: str, new: str) -> None:
        """Rename atomically, also between folders, and replace an existing ``new``."""
        node = self.find(old)
        old_folder, old_name = self._parent(old)
        new_folder, new_name = self._parent(new)
        if new_name.startswith(ORPHAN_PREFIX):
            self._change(f"delete {old}", (old_folder, old_name, None))
            new_folder.orphans[new_name] = node
            return
        target = new_folder.names.get(new_name)
        if target is node:
            return
        if target is not None and target.is_folder and target.names:
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), new)
        # libfuse first moves a replaced file away if it is open. Undo this: the caller did not do it, and after a crash
        # neither the old nor the new file might exist.
        if self._journal and self._journal[-1].slots == ((new_folder, new_name, None),):
            self._journal.pop()
        self._change(f"rename {old} -> {new}", (old_folder, old_name, None), (new_folder, new_name, node))

    def sync_folder(self, folder: ModelFile) -> None:
        """Make the names in a folder durable.

        A rename from one folder to another changes both. A sync of either folder makes the rename durable, and also
        all earlier changes of the other folder.
        """
        folders = {folder.number}
        synced, rest = [], []
        for change in reversed(self._journal):
            touched = {node.number for node, _, _ in change.slots}
            if folders & touched:
                folders |= touched
                synced.append(change)
            else:
                rest.append(change)
        for change in reversed(synced):
            _apply(change, durable=True)
        self._journal = rest[::-1]

    # ------------------------------------------------------------ data

    def read(self, node: ModelFile, position: int, size_bytes: int) -> bytes:
        end = min(position + size_bytes, node.size)
        if end <= position:
            return b""
        first = position // PAGE
        joined = b"".join(node.pages.get(index, _ZEROS) for index in range(first, -(-end // PAGE)))
        return joined[position - first * PAGE : end - first * PAGE]

    def write(self, node: ModelFile, position: int, data: bytes) -> int:
        self._put(node, position, data)
        node.put_size(max(node.size, position + len(data)))
        node.mtime_ns = time.time_ns()
        return len(data)

    def _put(self, node: ModelFile, position: int, data: bytes) -> None:
        done = 0
        while done < len(data):
            index, start = divmod(position + done, PAGE)
            part = data[done : done + PAGE - start]
            page = node.pages.get(index, _ZEROS)
            node.put_page(index, page[:start] + part + page[start + len(part) :])
            done += len(part)

    def truncate(self, node: ModelFile, size_bytes: int) -> None:
        """Set the size. If the file grows again later, the bytes after this size are zeros."""
        if size_bytes < node.size:
            last, start = divmod(size_bytes, PAGE)
            for index in [index for index in node.pages if index >= last]:
                node.put_page(index, node.pages[index][:start] + bytes(PAGE - start) if index == last else _ZEROS)
        node.put_size(size_bytes)
        node.mtime_ns = time.time_ns()

    def reserve(self, node: ModelFile, position: int, size_bytes: int) -> None:
        """Set the size to at least ``position + size_bytes``, like fallocate."""
        node.put_size(max(node.size, position + size_bytes))

    # ------------------------------------------------------------ the crash

    def crash(self, rng: random.Random, keep: Keep | None = None) -> list[str]:
        """Lose some of the unsynced data, and make the rest durable. Return a description of each loss."""
        chosen = rng.choice(_KEEPS) if keep is None else keep
        lost = [f"not on disk: {change.text}" for change in self._lose_names(rng, chosen)]
        self._journal.clear()
        seen: set[int] = set()
        for path, node in _walk(self.root, "", durable=True):
            node.names = dict(node.durable_names)
            node.orphans.clear()
            if not node.is_folder and node.number not in seen:
                seen.add(node.number)
                if (what := _lose_data(node, rng, chosen)) is not None:
                    lost.append(f"{path}: {what}")
        return lost

    def _lose_names(self, rng: random.Random, kept: Keep) -> list[_NameChange]:
        """Apply the changes of names that survive, and return the others.

        Either each change survives independently, or all changes up to some time survive, as with a
        journal. A change survives only together with the earlier changes of the same name: otherwise a new
        file could replace a file whose rename was lost. That file would then disappear, although it was not deleted.
        """
        in_order = rng.random() < 0.3
        end = rng.randrange(len(self._journal) + 1)
        lost = []
        lost_slots: set[tuple[int, str]] = set()
        for index, change in enumerate(self._journal):
            slots = {(folder.number, name) for folder, name, _ in change.slots}
            survives = kept == "all" or (kept == "some" and (index < end if in_order else rng.random() < 0.5))
            if survives and not slots & lost_slots:
                _apply(change, durable=True)
            else:
                lost.append(change)
                lost_slots |= slots
        return lost

    # ------------------------------------------------------------ a folder of the real file system

    def load(self, folder: Path) -> None:
        """Copy the files of a real folder into this disk, all durable."""
        for path in sorted(folder.rglob("*")):
            name = f"/{path.relative_to(folder)}"
            if path.is_dir():
                self.mkdir(name, path.stat().st_mode)
            else:
                node = self.create(name, path.stat().st_mode)
                self.write(node, 0, path.read_bytes())
                node.sync_data()
        for change in self._journal:
            _apply(change, durable=True)
        self._journal.clear()

    def dump(self, folder: Path) -> None:
        """Write the files as processes see them to an empty real folder."""
        for path, node in _walk(self.root, "", durable=False):
            real = Path(f"{folder}{path}")
            if node.is_folder:
                real.mkdir(exist_ok=True)
            else:
                with real.open("wb") as file:
                    file.truncate(node.size)
                    for index, page in sorted(node.pages.items()):
                        file.seek(index * PAGE)
                        file.write(page[: max(0, node.size - index * PAGE)])
            real.chmod(node.mode)


def _apply(change: _NameChange, *, durable: bool) -> None:
    for folder, name, node in change.slots:
        names = folder.durable_names if durable else folder.names
        if node is None:
            names.pop(name, None)
        else:
            names[name] = node


def _walk(node: ModelFile, path: str, *, durable: bool) -> Iterator[tuple[str, ModelFile]]:
    """Yield ``node`` and every node below it with its path, folders first."""
    yield path, node
    for name, child in sorted((node.durable_names if durable else node.names).items()):
        yield from _walk(child, f"{path}/{name}", durable=durable)


# The ways in which a file's unsynced pages and size survive; see `_lose_data`.
_WAYS: Final = ("none", "all", "zeros", "pages", "older", "sectors", "torn", "first", "last")


def _lose_data(node: ModelFile, rng: random.Random, kept: Keep) -> str | None:
    """Choose the data of a file that survive. Return a description of the lost data, or None if all data survive.

    none     only synced data
    all      everything
    zeros    the size without the data: a file that grew ends in zeros
    pages    any choice of pages
    older    any version of each page since the sync, and of the size
    sectors  any version of each sector since the sync, and of the size
    torn     all pages, but of one sector only the bytes before some point, or only those after it
    first    the pages before some point
    last     the pages after some point: those that were written first are missing
    """
    if not node.versions and len(set(node.sizes)) == 1:
        node.sync_data()
        return None
    way = kept if kept != "some" else rng.choice(_WAYS)
    size = {"none": node.sizes[0], "older": rng.choice(node.sizes), "sectors": rng.choice(node.sizes)}.get(
        way, node.size
    )
    pages = sorted(node.versions)
    cut = rng.randrange(len(pages) + 1)
    torn = rng.choice(pages) if pages else -1
    lost = 0
    for rank, index in enumerate(pages):
        versions = node.versions[index]
        old, new = versions[0], versions[-1]
        if way == "older":
            page = rng.choice(versions)
        elif way == "sectors":
            starts = range(0, PAGE, SECTOR)
            page = b"".join(rng.choice(versions)[start : start + SECTOR] for start in starts)
        elif way == "torn" and index == torn:
            page = _torn(old, new, rng)
        else:
            survives = {
                "none": False, "zeros": False, "pages": rng.random() < 0.5, "first": rank < cut, "last": rank >= cut,
            }.get(way, True)  # fmt: skip
            page = new if survives else old
        lost += page != new
        node.pages[index] = page
    was = node.size
    _cut(node, size)
    node.sync_data()
    if not lost and size == was:
        return None
    return f"way {way!r}: {lost} of {len(pages)} unsynced pages lost, size {size} (it was {was})"


def _torn(old: bytes, new: bytes, rng: random.Random) -> bytes:
    """Return a page with one half-written sector: its first bytes are new and its other bytes old, or vice versa."""
    changed = [start for start in range(0, PAGE, SECTOR) if old[start : start + SECTOR] != new[start : start + SECTOR]]
    if not changed:
        return new
    start = rng.choice(changed)
    middle = start + rng.randrange(1, SECTOR)
    end = start + SECTOR
    if rng.random() < 0.5:
        return new[:middle] + old[middle:end] + new[end:]
    return new[:start] + old[start:middle] + new[middle:]


def _cut(node: ModelFile, size: int) -> None:
    last, start = divmod(size, PAGE)
    for index in [index for index in node.pages if index >= last]:
        if index == last and start:
            node.pages[index] = node.pages[index][:start] + bytes(PAGE - start)
        else:
            del node.pages[index]
    node.size = size
