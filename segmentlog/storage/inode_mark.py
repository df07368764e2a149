"""Whether the kernel's memory of a file is the one it was: what no content of a file can prove.

A file system that went away and came back within one boot (a disk that was pulled, a shutdown, a
fail-over) shows the same device and inode numbers, and for each file some older content. What is
known of it elsewhere than on the disk tells the difference. Either of these is proof:

mount id   `statx` (Linux 6.8 on) gives each mount a number that is not used again in one boot.
           A container sees the same file system under a number of its own.
mark       The write life time hint of a file (`fcntl(2)`, F_SET_RW_HINT, Linux 4.13 on) is kept in
           the kernel's memory of the file, its inode, and nowhere else: it goes with a mount, and
           when an inode that nobody has open is dropped for want of memory. It is the same whatever
           mount the file is looked at through. The hint that is set says that there is none.
"""

from __future__ import annotations

import ctypes
import fcntl
import struct
from typing import Final

from segmentlog.storage.interrupt_check import is_interrupt

_AT_EMPTY_PATH: Final = 0x1000
_STATX_MNT_ID_UNIQUE: Final = 0x4000
_STATX_SIZE: Final = 256
_MASK: Final = struct.Struct("=I")
_MOUNT_ID: Final = struct.Struct("=Q")
_MOUNT_ID_POSITION: Final = 0x90
_F_GET_RW_HINT: Final = 1024 + 11
_F_SET_RW_HINT: Final = 1024 + 12
_HINT: Final = struct.Struct("=Q")
_WRITE_LIFE_NONE: Final = _HINT.pack(1)
# A file that nobody gave a hint has 0, RWH_WRITE_LIFE_NOT_SET.

_libc = ctypes.CDLL(None, use_errno=True)


def mount_id(fd: int) -> int:
    """The number of the mount that a file was opened through, unique in this boot; 0 where nobody can tell."""
    try:
        statx = _libc.statx
    except AttributeError:  # an old C library, or another system
        return 0
    found = ctypes.create_string_buffer(_STATX_SIZE)
    if statx(fd, b"", _AT_EMPTY_PATH, _STATX_MNT_ID_UNIQUE, found) != 0:
        return 0
    if not _MASK.unpack_from(found)[0] & _STATX_MNT_ID_UNIQUE:
        return 0
    return int(_MOUNT_ID.unpack_from(found, _MOUNT_ID_POSITION)[0])


def set_mark(fd: int) -> None:
    """Leave a mark in the kernel's memory of the file. Where that cannot be done, `is_marked` says no."""
    try:
        fcntl.fcntl(fd, _F_SET_RW_HINT, _WRITE_LIFE_NONE)
    except OSError as error:  # another user's file, or a kernel without hints
        if is_interrupt(error):
            raise
        return


def has_mark(fd: int) -> bool:
    """Whether the mark is there: the kernel had the file in memory ever since."""
    try:
        return fcntl.fcntl(fd, _F_GET_RW_HINT, bytes(_HINT.size)) == _WRITE_LIFE_NONE
    except OSError as error:
        if is_interrupt(error):
            raise
        return False
