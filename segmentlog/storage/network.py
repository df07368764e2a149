"""Log a warning if a store is on a network file system, where several machines may write it.

Locks and memory maps work only within one machine. A write on one machine does not show in the map of another. An
`flock` may or may not hold on other machines. Two machines that append to one partition overwrite each other's records.
So a process that opens such a store for writing leaves the name of its machine in a file, and a process that finds
another machine's name logs a warning. This module guarantees nothing else.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import time
from typing import Final

from segmentlog.format.file_names import HIDDEN
from segmentlog.storage.file_operations import read_file, write_all
from segmentlog.storage.fs import FileSystem
from segmentlog.storage.interrupt_check import failures_ignored, is_interrupt

NETWORK_MOUNTS: Final = frozenset((
    "nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "glusterfs", "fuse.glusterfs", "fuse.sshfs",
    "fuse.s3fs", "fuse.rclone", "fuse.juicefs", "lustre", "gpfs", "beegfs", "orangefs", "ocfs2", "gfs2", "virtiofs",
))  # fmt: skip

logger = logging.getLogger("segmentlog")


class NetworkMark:
    """The file with this machine's name, in a store on a network file system."""

    FILE: Final = f"{HIDDEN}writer.json"

    def __init__(self, fs: FileSystem, path: str, host: str) -> None:
        self._fs = fs
        self._path = f"{path}/{self.FILE}"
        self._host = host

    @classmethod
    def warn_and_create(cls, fs: FileSystem, path: str, now_ms: int) -> NetworkMark | None:
        """Log warnings for a network file system and for another machine's mark, and write our mark.

        Returns None on a local disk.
        """
        kind = fs.kind_of_mount(path)
        if kind not in NETWORK_MOUNTS:
            return None
        logger.warning(
            "%s is on a network file system (%s): locks, memory maps and fsync may not work as on a local disk;"
            " use the store from one machine only",
            path,
            kind,
        )
        mark = cls(fs, path, platform.node() or fs.boot_id())
        host, at_ms = mark.read()
        if host and host != mark._host:
            when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at_ms / 1000))
            logger.warning(
                "%s was opened for writing by the machine %s at %s and was not closed there. If that machine still"
                " writes, both machines will damage the log. Close the store there, or open it here with"
                " read_only=True",
                path,
                host,
                when,
            )
        mark._write(now_ms)
        return mark

    def read(self) -> tuple[str, int]:
        """Return (name of the machine that wrote the mark last, its wall clock in ms). The name is empty without a
        mark.
        """
        try:
            document = json.loads(read_file(self._fs, self._path))
            return str(document["host"]), int(document["at_ms"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            if is_interrupt(error):
                raise
            return "", 0

    def _write(self, now_ms: int) -> None:
        data = json.dumps({"host": self._host, "at_ms": now_ms}).encode()
        with failures_ignored():  # the mark only serves a warning
            fd = self._fs.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
            try:
                write_all(self._fs, fd, [data], 0)
            finally:
                self._fs.close(fd)

    def remove(self) -> None:
        """Remove the mark at a clean close, unless another machine has replaced it."""
        if self.read()[0] == self._host:
            with failures_ignored():
                self._fs.unlink(self._path)
