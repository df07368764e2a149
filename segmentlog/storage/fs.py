"""Every call that reaches the operating system's files, in a class that tests can replace.

Tests pass a subclass of `FileSystem` that injects faults, forgets unsynced data or records calls. Wherever Python
exposes a system call, the method is that call itself, so the indirection costs one attribute look-up.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import struct
from collections.abc import Callable, Iterator, Sequence
from itertools import starmap
from typing import Final, Protocol

from segmentlog.errors import DiskFull
from segmentlog.format.file_names import LOG_SUFFIX, REMOTE_SUFFIX
from segmentlog.storage import inode_mark
from segmentlog.storage.interrupt_check import failures_ignored, is_from_a_call, is_interrupt
from segmentlog.storage.interrupt_safe import interrupt_safe_context
from segmentlog.storage.memory_map import map_shared

Buffer = bytes | bytearray | memoryview

NO_ROOM: Final = frozenset((errno.ENOSPC, errno.EDQUOT))
LOCAL_ERRORS: Final = frozenset((
    errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EAGAIN, errno.EINTR, errno.EACCES, errno.EPERM,
    errno.EFBIG, errno.ENOLCK,
))  # fmt: skip
"""Errors of a limit or a missing right of this process. The disk and other processes may still work."""
_NO_DESCRIPTORS: Final = frozenset((errno.EMFILE, errno.ENFILE))
# ioctl_iflags(2)
_GET_FLAGS: Final = 0x80086601
_SET_FLAGS: Final = 0x40086602
_NO_COPY_ON_WRITE: Final = 0x00800000
_FLAGS: Final = struct.Struct("=Ixxxx")
_LABEL: Final = "user.segmentlog"
"""Name of the extended attribute with the label of a file."""

relief: list[Callable[[], bool]] = []
"""Callbacks for when no descriptor is free. Each closes some files that can be reopened, and returns whether it did."""


class DiskFailed(OSError):
    """An error that leaves the disk's content unknown: of an fsync, or of a write that may have changed the file.

    Only this kind of error fails a partition. A file that could not be opened, mapped or locked raises a plain OSError.
    """

    @classmethod
    def of(cls, error: OSError, path: str) -> OSError:
        """Return ``error`` as a `DiskFailed` of the file ``path``. Return an interrupt's error unchanged."""
        return cls(error.errno, error.strerror, path) if is_from_a_call(error) else error


Stamp = tuple[int, int, int]
"""Identity and version of a file: inode, size, time of the last write in nanoseconds.

For a file whose bytes are in an object store: a hash of its objects, its size, 0. It is the same on every machine.
"""


class Ranges(Protocol):
    """A segment file of which only a part may be on the local disk. Call `need` before reading bytes."""

    @property
    def inode(self) -> int:
        """The inode of the local file."""

    @property
    def is_retired(self) -> bool:
        """Whether another file has replaced this one, with the same bytes or different ones."""

    @property
    def source(self) -> str:
        """Where missing bytes are downloaded from, as text for users."""

    def map(self) -> memoryview:
        """Map the whole file. Bytes that were not requested with `need` are undefined."""

    def need(self, start: int, end: int) -> None:
        """Return once bytes ``[start, end)`` are on the local disk. Raises OSError, `SegmentlogError`."""


Reach = Callable[[str], "Ranges | None"]
"""Open a segment file whose bytes are only in the object store; None for a local file. See `FileSystem.ranged`."""


class FileSystem:
    """The operating system's file system. Methods raise OSError as the system calls do; Python retries EINTR."""

    # Signatures are those of `os`. Static, so that a call is one attribute look-up.
    close: Callable[[int], None] = staticmethod(os.close)
    pread: Callable[[int, int, int], bytes] = staticmethod(os.pread)
    pwritev: Callable[[int, Sequence[Buffer], int], int] = staticmethod(os.pwritev)
    fdatasync: Callable[[int], None] = staticmethod(getattr(os, "fdatasync", os.fsync))
    fsync: Callable[[int], None] = staticmethod(os.fsync)
    ftruncate: Callable[[int, int], None] = staticmethod(os.ftruncate)
    rename: Callable[[str, str], None] = staticmethod(os.rename)
    replace: Callable[[str, str], None] = staticmethod(os.replace)
    link: Callable[[str, str], None] = staticmethod(os.link)
    unlink: Callable[[str], None] = staticmethod(os.unlink)
    rmdir: Callable[[str], None] = staticmethod(os.rmdir)
    flock: Callable[[int, int], None] = staticmethod(fcntl.flock)

    takes_descriptors = True
    """Whether files opened here count towards this process's descriptor limit; false for a simulated file system."""
    reach_by: Reach | None = None
    """How to open segments that are only in the object store; None if that is not set up."""

    def open(self, path: str, flags: int, mode: int = 0o777) -> int:
        """Call `os.open`. If no descriptor is free and a `relief` callback frees one, try once more.

        Raises `DiskFull` if the disk lacks room for the file's name.
        """
        try:
            return _open(path, flags, mode)
        except OSError as error:
            if error.errno in NO_ROOM:
                raise DiskFull(path) from error
            if not _relieved(error):
                raise
        return _open(path, flags, mode)

    def mkdir(self, path: str) -> None:
        """Create a folder. Raises FileExistsError if it exists, `DiskFull` if the disk lacks room for it."""
        try:
            os.mkdir(path, 0o777)
        except OSError as error:
            if error.errno in NO_ROOM:
                raise DiskFull(path) from error
            raise

    def listdir(self, path: str) -> list[str]:
        try:
            return os.listdir(path)
        except OSError as error:
            if not _relieved(error):
                raise
        return os.listdir(path)

    def fstat(self, fd: int) -> os.stat_result:
        return os.fstat(fd)

    def stat(self, path: str) -> os.stat_result:
        return os.stat(path)

    def stamp(self, path: str) -> Stamp:
        """Return a value that changes whenever the bytes of the file change. Raises OSError."""
        found = self.stat(path)
        return found.st_ino, found.st_size, found.st_mtime_ns

    def lstat(self, path: str) -> os.stat_result:
        return os.lstat(path)

    def exists(self, path: str, *, follow: bool = True) -> bool:
        """Return whether a file or folder exists. A dangling link exists only with ``follow=False``.

        Raises OSError if the system does not answer: the caller must not conclude that the file does not exist.
        """
        try:
            self.stat(path) if follow else self.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def is_folder(self, path: str) -> bool:
        """Return whether a folder exists at ``path``. Raises OSError if the system does not answer."""
        try:
            return stat.S_ISDIR(self.stat(path).st_mode)
        except (FileNotFoundError, NotADirectoryError):
            return False

    def make_folders(self, path: str) -> None:
        """Create a folder and its missing parents. Raises FileExistsError if ``path`` exists but is not a folder."""
        missing, folder = [], path
        while folder and not self.exists(folder):
            missing.append(folder)
            folder = os.path.dirname(folder)
        for folder in reversed(missing):
            with contextlib.suppress(FileExistsError):  # another process was quicker
                self.mkdir(folder)
        if not self.is_folder(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)

    def remove_tree(self, path: str) -> None:
        """Remove a folder with its content. Links inside are removed, not followed; ``path`` itself must not be a link.

        This method uses names, not folder descriptors: `shutil.rmtree` leaves descriptors open when it is interrupted.
        """
        if os.path.islink(path):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        for name in os.listdir(path):
            inner = f"{path}/{name}"
            if stat.S_ISDIR(os.lstat(inner).st_mode):
                self.remove_tree(inner)
            else:
                os.unlink(inner)
        os.rmdir(path)

    def fallocate(self, fd: int, position: int, size_bytes: int) -> None:
        """Reserve and zero ``[position, position + size_bytes)``, growing the file. Raises OSError without room."""
        os.posix_fallocate(fd, position, size_bytes)

    def set_modified(self, fd: int, modified_ns: int) -> None:
        """Set the time of the last write to a file, in nanoseconds since 1970."""
        os.utime(fd, ns=(modified_ns, modified_ns))

    def advise_unneeded(self, fd: int, position: int, size_bytes: int) -> None:
        """Allow the kernel to drop these bytes from its cache. This is a hint; the kernel keeps mapped pages."""
        if size_bytes and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(fd, position, size_bytes, os.POSIX_FADV_DONTNEED)

    def sync_folder(self, path: str) -> None:
        """Make the names in a folder durable: until then a power cut may undo a create or a rename.

        Raises `DiskFailed` for an error of the fsync, and a plain OSError if the folder cannot be opened.
        """
        with opened(self, path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC) as fd:
            try:
                self.fsync(fd)
            except OSError as error:
                raise DiskFailed.of(error, path) from error

    def map_file(self, fd: int, size_bytes: int, *, writable: bool = False) -> memoryview:
        """Map the first ``size_bytes`` of a file, shared with every process that maps it.

        The map keeps no descriptor.
        """
        return map_shared(fd, size_bytes, writable=writable)

    def ranged(self, path: str) -> Ranges | None:
        """Return the segment file at ``path`` if it is only partly on the local disk, else None.

        Raises FileNotFoundError if the file was deleted, and `ObjectStoreError` if its stub does not name the objects
        with its bytes.
        """
        if self.reach_by is None or not self.exists(path.removesuffix(LOG_SUFFIX) + REMOTE_SUFFIX):
            return None
        return self.reach_by(path)

    def mount_id(self, fd: int) -> int:
        """Return the id of the mount that the file was opened through; 0 if the kernel has none."""
        return inode_mark.mount_id(fd)

    def set_inode_mark(self, fd: int) -> None:
        """Mark the inode in the kernel's memory: see `inode_mark.set_mark`."""
        inode_mark.set_mark(fd)

    def has_inode_mark(self, fd: int) -> bool:
        """Return whether the inode still has the mark that `set_inode_mark` set."""
        return inode_mark.has_mark(fd)

    def set_label(self, fd: int, label: bytes) -> None:
        """Label an open file in its inode: see `objects.manifest.segment_labels`. Do nothing where that fails."""
        if hasattr(os, "setxattr"):
            with failures_ignored():
                os.setxattr(fd, _LABEL, label)

    def label(self, fd: int) -> bytes:
        """Return the label that `set_label` gave to an open file; empty if it has none."""
        if hasattr(os, "getxattr"):
            with failures_ignored():
                return os.getxattr(fd, _LABEL)
        return b""

    def disable_copy_on_write(self, fd: int) -> None:
        """Make the file system overwrite an empty file in place, if it would write each change elsewhere (btrfs).

        With copy-on-write a store to a mapped page takes room on the disk, and kills the process if there is none.
        """
        with failures_ignored():  # other file systems write in place by default
            flags = _FLAGS.unpack(fcntl.ioctl(fd, _GET_FLAGS, _FLAGS.pack(0)))[0]
            fcntl.ioctl(fd, _SET_FLAGS, _FLAGS.pack(flags | _NO_COPY_ON_WRITE))

    def is_read_only(self, path: str) -> bool:
        """Return whether the file system of ``path`` is mounted read-only."""
        return bool(os.statvfs(path).f_flag & os.ST_RDONLY)

    def why_unwritable(self, path: str) -> str:
        """Return why this process may not write the file or folder ``path``; "" if it may, or if it does not exist.

        It checks the effective user, as an open does.
        """
        wanted = os.W_OK | os.X_OK if self.is_folder(path) else os.W_OK
        if os.access(path, wanted, effective_ids=os.access in os.supports_effective_ids):
            return ""
        try:
            found = self.stat(path)
        except OSError as error:
            if is_interrupt(error):
                raise
            return ""
        return (
            f"user {os.geteuid()} may not write {path} (owner {found.st_uid}, group {found.st_gid},"
            f" mode {stat.S_IMODE(found.st_mode):04o})"
        )

    def kind_of_mount(self, path: str) -> str:
        """Return the type of the file system that holds ``path`` (ext4, nfs4, ...); "" if the system does not report
        it.
        """
        try:
            mounts = _read_proc("/proc/self/mountinfo")
        except OSError as error:  # not Linux
            if is_interrupt(error):
                raise
            return ""
        device = self.stat(path).st_dev
        at = mounts.find(f" {os.major(device)}:{os.minor(device)} ".encode())
        if at >= 0:
            return _kind_in(mounts[at : mounts.find(b"\n", at)])
        # A part of a file system may have a device number of its own (btrfs). Then use the mount that contains it.
        best, kind = b"", ""
        real = os.fsencode(os.path.realpath(path))
        for line in mounts.splitlines():
            place = line.split()[4].decode("unicode_escape").encode("latin-1")  # spaces are written as \\040
            if (real == place or real.startswith(place.rstrip(b"/") + b"/")) and len(place) >= len(best):
                best, kind = place, _kind_in(line)
        return kind

    def boot_id(self) -> str:
        """Return an id that changes whenever the machine starts. A page cache lasts for one boot."""
        try:
            return _read_proc("/proc/sys/kernel/random/boot_id").decode().strip()
        except (FileNotFoundError, NotADirectoryError):
            # Not Linux: the start time of process 1 changes with every boot, too. Fall back for a missing file only. If
            # a lack of descriptors were taken for a new boot, this process would recover a log that others have open.
            return f"init-{os.stat('/').st_ctime_ns}"


def _open(path: str, flags: int, mode: int) -> int:
    """Call `os.open`, and close the descriptor if an interrupt comes before it is returned."""
    fds: list[int] = []
    try:
        fds.extend(starmap(os.open, ((path, flags, mode),)))
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    return fds[0]


def _relieved(error: OSError) -> bool:
    """Return whether the process had no free descriptor and a `relief` callback has freed some."""
    return error.errno in _NO_DESCRIPTORS and any([free() for free in relief])


@interrupt_safe_context
def opened(fs: FileSystem, path: str, flags: int, mode: int = 0o666) -> Iterator[int]:
    """Open a file for the duration of the context. The file must not be locked: use `opened_lockable` for that."""
    fds: list[int] = []
    try:
        fds.extend(starmap(fs.open, ((path, flags, mode),)))  # in one step, as in `store_result`
        yield fds[0]
    finally:
        for fd in fds:
            fs.close(fd)


def _read_proc(path: str) -> bytes:
    """Read a whole file of the kernel's."""
    with opened(FileSystem(), path, os.O_RDONLY | os.O_CLOEXEC) as fd:
        parts = []
        while part := os.read(fd, 1 << 12):
            parts.append(part)
        return b"".join(parts)


def _kind_in(mount: bytes) -> str:
    """Return the type of the file system in a line of mountinfo."""
    return mount.partition(b" - ")[2].split(None, 1)[0].decode()
