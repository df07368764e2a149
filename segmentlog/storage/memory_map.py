"""Memory maps that hold no descriptor.

Python's `mmap` keeps a duplicate of the file's descriptor for the life time of the map. (Python 3.13 can avoid that.)
Ten thousand partitions with a mapped state page each would take ten thousand descriptors. So this module makes the
system call through ctypes, and unmaps the memory with the last view of it.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from typing import Any, Final

import numpy as np

_PROT_READ: Final = 1
_PROT_WRITE: Final = 2
_MAP_SHARED: Final = 1
_PYBUF_READ: Final = 0x100
_PYBUF_WRITE: Final = 0x200
_FAILED: Final = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_longlong,
)  # fmt: skip
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)

_from_memory: Any = ctypes.pythonapi.PyMemoryView_FromMemory
_from_memory.restype = ctypes.py_object
_from_memory.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)


def map_shared(fd: int, size_bytes: int, *, writable: bool = False) -> memoryview:
    """Map the first ``size_bytes`` of a file, shared with every process that maps it.

    The memory is unmapped when neither the view nor an object made from it exists. Raises OSError.
    """
    protection = _PROT_READ | (_PROT_WRITE if writable else 0)
    address = _libc.mmap(None, size_bytes, protection, _MAP_SHARED, fd, 0)
    if address == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    raw = _from_memory(address, size_bytes, _PYBUF_WRITE if writable else _PYBUF_READ)
    # Put an array between the memory and its views: the views keep it alive, and a finalizer can watch it.
    owner = np.frombuffer(raw, np.uint8)
    weakref.finalize(owner, _libc.munmap, address, size_bytes).atexit = False
    return memoryview(owner)  # type: ignore[arg-type]  # numpy says that it is a buffer from Python 3.12 on
