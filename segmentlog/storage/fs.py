"""Every call that reaches the operating system's files, in one place that can be replaced.

`FileSystem` is the seam for fault injection: a test hands in a subclass that fails, forgets
or records. Its methods are the system calls themselves wherever Python has them, so that
the seam costs an attribute look-up.
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
"""Of a limit or a right of this process: they say nothing about the disk, and nothing about other processes."""
_NO_DESCRIPTORS: Final = frozenset((errno.EMFILE, errno.ENFILE))
# ioctl_iflags(2)
_GET_FLAGS: Final = 0x80086601
_SET_FLAGS: Final = 0x40086602
_NO_COPY_ON_WRITE: Final = 0x00800000
_FLAGS: Final = struct.Struct("=Ixxxx")

relief: list[Callable[[], bool]] = []
"""Called when no descriptor is left; each closes some that can be opened again, and says whether it did."""


class DiskFailed(OSError):
    """An error after which nobody knows what the disk holds: of an fsync, or of a write that may have touched the file.

    The only kind that fails a partition. Whatever kept a file from being opened, mapped or locked is a plain OSError.
    """

    @classmethod
    def of(cls, error: OSError, path: str) -> OSError:
        """The same, of that file; what an interrupt raised stays what it is."""
        return cls(error.errno, error.strerror, path) if is_from_a_call(error) else error


Stamp = tuple[int, int, int]
"""Which file lies there, and since when it is as it is: inode, size, time of the last write in nanoseconds.

Of one whose bytes lie in an object store: a hash of where they lie, size, 0; the same on every machine.
"""


class Ranges(Protocol):
    """A file of which not everything is here: bytes are to be asked for before they are looked at."""

    @property
    def inode(self) -> int:
        """Of the file."""

    @property
    def is_retired(self) -> bool:
        """Whether another file has its place, with the same bytes or others."""

    @property
    def source(self) -> str:
        """Where what is not here comes from, for people."""

    def map(self) -> memoryview:
        """All of it as it is now."""

    def need(self, start: int, end: int) -> None:
        """Return once bytes ``[start, end)`` are here. Raises OSError, `SegmentlogError`."""


Reach = Callable[[str], "Ranges | None"]
"""The segment file of that name if its bytes lie in an object store alone; as `FileSystem.ranged`."""


class FileSystem:
    """The real one. Raises OSError as the system calls do; EINTR is retried by Python."""

    # Signatures are those of `os`; static, so that a call is one attribute look-up.
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
    """Whether what is open here counts towards this process's limit: not what is open in a simulated one."""
    reach_by: Reach | None = None
    """How segments are reached that lie in an object store alone; None where nobody has said so."""

    def open(self, path: str, flags: int, mode: int = 0o777) -> int:
        """`os.open`, once more if the first time there was no descriptor left and `relief` could free some.

        Raises `DiskFull` when there is no room for the file's name.
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
        """Make a folder; FileExistsError if it is there, `DiskFull` when there is no room for it."""
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
        """What is another one as soon as the file's bytes are. Raises OSError."""
        found = self.stat(path)
        return found.st_ino, found.st_size, found.st_mtime_ns

    def lstat(self, path: str) -> os.stat_result:
        return os.lstat(path)

    def exists(self, path: str, *, follow: bool = True) -> bool:
        """Whether there is such a file or folder; a link to nothing is one unless it is followed.

        Raises OSError when nobody can tell: that is not the same as no.
        """
        try:
            self.stat(path) if follow else self.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def is_folder(self, path: str) -> bool:
        """Whether there is such a folder. Raises OSError when nobody can tell."""
        try:
            return stat.S_ISDIR(self.stat(path).st_mode)
        except (FileNotFoundError, NotADirectoryError):
            return False

    def make_folders(self, path: str) -> None:
        """Make a folder and those that it lies in, as far as they are not there. FileExistsError: it is no folder."""
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
        """Remove a folder and all that is in it; links are removed, not followed, and ``path`` is none.

        By names: `shutil.rmtree` leaves descriptors of folders open when it is interrupted.
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
        """Reserve and zero ``[position, position + size_bytes)``, growing the file. No room is an OSError."""
        os.posix_fallocate(fd, position, size_bytes)

    def set_modified(self, fd: int, modified_ns: int) -> None:
        """Set the time at which a file was last written to, nanoseconds since 1970."""
        os.utime(fd, ns=(modified_ns, modified_ns))

    def advise_unneeded(self, fd: int, position: int, size_bytes: int) -> None:
        """Let the kernel forget what it has cached of these bytes; no promise, and what is mapped stays."""
        if size_bytes and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(fd, position, size_bytes, os.POSIX_FADV_DONTNEED)

    def sync_folder(self, path: str) -> None:
        """Make names in this folder durable: until then a power cut may undo a create or a rename.

        Raises `DiskFailed` for an error of the fsync, and a plain OSError when the folder cannot be opened.
        """
        with opened(self, path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC) as fd:
            try:
                self.fsync(fd)
            except OSError as error:
                raise DiskFailed.of(error, path) from error

    def map_file(self, fd: int, size_bytes: int, *, writable: bool = False) -> memoryview:
        """Map the first ``size_bytes`` of a file, shared with every process that maps it; keeps no descriptor."""
        return map_shared(fd, size_bytes, writable=writable)

    def ranged(self, path: str) -> Ranges | None:
        """The file at ``path`` if not everything of it is here. Raises FileNotFoundError when it is gone by now.

        And `ObjectStoreError` for one of which nobody can tell where it lies.
        """
        if self.reach_by is None or not self.exists(path.removesuffix(LOG_SUFFIX) + REMOTE_SUFFIX):
            return None
        return self.reach_by(path)

    def mount_id(self, fd: int) -> int:
        """See `storage.inode_mark`."""
        return inode_mark.mount_id(fd)

    def set_inode_mark(self, fd: int) -> None:
        """See `storage.inode_mark`."""
        inode_mark.set_mark(fd)

    def has_inode_mark(self, fd: int) -> bool:
        """See `storage.inode_mark`."""
        return inode_mark.has_mark(fd)

    def disable_copy_on_write(self, fd: int) -> None:
        """Have an empty file written over where it lies, on a file system that would put each change elsewhere (btrfs).

        There a store to a mapped page takes room on the disk, and kills the process when there is none.
        """
        with failures_ignored():  # other file systems write in place anyway
            flags = _FLAGS.unpack(fcntl.ioctl(fd, _GET_FLAGS, _FLAGS.pack(0)))[0]
            fcntl.ioctl(fd, _SET_FLAGS, _FLAGS.pack(flags | _NO_COPY_ON_WRITE))

    def is_read_only(self, path: str) -> bool:
        """Whether the file system is mounted so that nothing can be changed."""
        return bool(os.statvfs(path).f_flag & os.ST_RDONLY)

    def why_unwritable(self, path: str) -> str:
        """Say why this process may not write the file or folder ``path``; empty where it may, or nothing exists there.

        Asks for the effective user, as an open does.
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
        """The type of the file system that holds ``path`` (ext4, nfs4, ...); empty when nobody can tell."""
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
        # A part of a file system may have a number of its own (btrfs): then the mount that it lies under.
        best, kind = b"", ""
        real = os.fsencode(os.path.realpath(path))
        for line in mounts.splitlines():
            place = line.split()[4].decode("unicode_escape").encode("latin-1")  # spaces are written as \\040
            if (real == place or real.startswith(place.rstrip(b"/") + b"/")) and len(place) >= len(best):
                best, kind = place, _kind_in(line)
        return kind

    def boot_id(self) -> str:
        """A name for the time since the machine started: page caches live as long as it does."""
        try:
            return _read_proc("/proc/sys/kernel/random/boot_id").decode().strip()
        except (FileNotFoundError, NotADirectoryError):
            # Not Linux: the start of process 1 changes with every boot, too. For no other reason: who took a want of
            # descriptors for another boot would recover a log that others have open.
            return f"init-{os.stat('/').st_ctime_ns}"


def _open(path: str, flags: int, mode: int) -> int:
    """`os.open`, which an interrupt comes before or after: then it is closed again."""
    fds: list[int] = []
    try:
        fds.extend(starmap(os.open, ((path, flags, mode),)))
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    return fds[0]


def _relieved(error: OSError) -> bool:
    """Whether the error was a want of descriptors, and some are free now."""
    return error.errno in _NO_DESCRIPTORS and any([free() for free in relief])


@interrupt_safe_context
def opened(fs: FileSystem, path: str, flags: int, mode: int = 0o666) -> Iterator[int]:
    """A descriptor for as long as the context lasts, which nobody locks: for those there is `held_open`."""
    fds: list[int] = []
    try:
        fds.extend(starmap(fs.open, ((path, flags, mode),)))  # in one step, as in `locks.keep`
        yield fds[0]
    finally:
        for fd in fds:
            fs.close(fd)


def _read_proc(path: str) -> bytes:
    """What the kernel says there."""
    with opened(FileSystem(), path, os.O_RDONLY | os.O_CLOEXEC) as fd:
        parts = []
        while part := os.read(fd, 1 << 12):
            parts.append(part)
        return b"".join(parts)


def _kind_in(mount: bytes) -> str:
    """The type of the file system in a line of mountinfo."""
    return mount.partition(b" - ")[2].split(None, 1)[0].decode()
