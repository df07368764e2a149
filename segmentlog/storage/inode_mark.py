"""Check whether the kernel has kept a file in memory since this package marked it. No content of the file can prove
that.

A file system can go away and come back within one boot: a disk is pulled, a virtual machine is shut down, a cluster
fails over. It then has the same device and inode numbers, and each file has some older content. Only information
outside the disk shows the difference. Either of these is proof:

- Mount id: `statx` (Linux 6.8 or later) returns a number for each mount that is not reused within a boot. A container
  sees the same file system under another number.
- Inode mark: the kernel keeps the write life time hint of a file (`fcntl(2)`, F_SET_RW_HINT, Linux 4.13 or later) in
  the inode in memory, and nowhere else. The hint is lost with the mount. It is also lost when the kernel drops an inode
  that no process has open. All mounts of the file system show the same hint. The mark is the hint "no hint".
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
# A file without a hint has the value 0, RWH_WRITE_LIFE_NOT_SET.

_libc = ctypes.CDLL(None, use_errno=True)


def mount_id(fd: int) -> int:
    """Return the id of the mount that a file was opened through, unique in this boot; 0 where the kernel has none."""
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
    """Mark the inode in the kernel's memory. Where that is not possible, `has_mark` returns False."""
    try:
        fcntl.fcntl(fd, _F_SET_RW_HINT, _WRITE_LIFE_NONE)
    except OSError as error:  # another user's file, or a kernel without hints
        if is_interrupt(error):
            raise
        return


def has_mark(fd: int) -> bool:
    """Return whether the inode is marked: the kernel has kept it in memory since `set_mark`."""
    try:
        return fcntl.fcntl(fd, _F_GET_RW_HINT, bytes(_HINT.size)) == _WRITE_LIFE_NONE
    except OSError as error:
        if is_interrupt(error):
            raise
        return False
