"""A mounted folder that loses unsynced data when a test cuts the power: with real files, memory maps and locks.

    with CrashFS(tmp_path / "disk", tmp_path / "mount") as disk:
        ...                       # processes use disk.path; the test kills them
        lost = disk.crash(seed)   # the power fails
        ...                       # disk.path shows what was on the disk

Every operation on the mount goes to `ForgetfulDisk`, which tracks what was synced. The kernel's page cache is above it,
because memory maps need one. Stores through a map reach `ForgetfulDisk` when the kernel writes them back: on msync, on
fsync and when the file is closed. Before that, a crash loses them. Ordinary writes reach it at once.

A separate process serves the mount. A process that serves its own mount deadlocks when it touches a
mapped page, because it then holds the interpreter's lock.

Needs Linux with FUSE: the extra ``[testing]``, libfuse 3 and fusermount3 (Debian's package ``fuse3``), and
access to /dev/fuse. Without these, `CrashFS` raises `CrashFSUnavailable`.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import json
import os
import queue
import random
import shutil
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from segmentlog.testing.unsynced_model import ORPHAN_PREFIX, ForgetfulDisk, Keep, ModelFile

_PATIENCE_S: Final = 30.0  # limit for any response of the serving process
_UNMOUNT_S: Final = 2.0  # the kernel closes files of killed processes shortly after wait() returns


class CrashFSUnavailable(RuntimeError):
    """This machine cannot mount the folder. The message contains what is missing and how to install it."""


class CrashFS:
    """The files of ``backing``, mounted at ``mount_point`` until `close`. Missing folders are created.

    The contents of ``backing`` at the start are durable. ``backing`` is written only at each `crash` (with
    exactly what survived) and at `close` (with everything). The files are in memory: keep them small.
    """

    def __init__(self, backing: str | os.PathLike[str], mount_point: str | os.PathLike[str]) -> None:
        _check_available()
        self.backing = Path(backing)
        self.path = Path(mount_point)
        """The folder that processes use."""
        self.backing.mkdir(parents=True, exist_ok=True)
        self.path.mkdir(parents=True, exist_ok=True)
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(self.backing), str(self.path), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C must reach only the test, which unmounts
            )
        ours.settimeout(_PATIENCE_S)
        self._socket = ours
        self._answers = ours.makefile("rb")
        self._closed = False
        try:
            self._answer()
        except BaseException:
            self._end()
            raise

    @property
    def pid(self) -> int:
        """Process that serves the mount. While it is stopped (SIGSTOP), all calls on the mount wait."""
        return self._process.pid

    def crash(self, seed: int, keep: Keep | None = None) -> list[str]:
        """Cut the power: lose some of the unsynced data, and return a line for each loss.

        Other processes that use the mount must have ended, and this process must have closed its files and
        memory maps. Otherwise raise OSError (EBUSY), and lose nothing. After the call, the mount and
        ``backing`` both contain exactly the data that survived.

        keep  the unsynced data that survive: "none", "all", or "some" (a choice by the seed, see `unsynced_model`);
              None: the seed chooses one of these three
        """
        lost: list[str] = self._ask("crash", seed, keep)["lost"]
        return lost

    def close(self) -> None:
        """Unmount, and write everything to ``backing``, synced or not. Idempotent.

        Raise OSError (EBUSY) if files are still in use; ``backing`` is then written when they are closed.
        """
        if not self._closed:
            try:
                self._ask("stop")
            finally:
                self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            with contextlib.suppress(Exception):  # do not hide the test's own error
                self.close()

    def _ask(self, *command: object) -> dict[str, Any]:
        if self._closed:
            raise ValueError("this CrashFS is closed")
        self._socket.sendall(json.dumps(command).encode() + b"\n")
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        line = self._answers.readline()
        if not line:
            self._process.wait(_PATIENCE_S)
            assert self._process.stderr is not None
            why = self._process.stderr.read().decode(errors="replace").strip()
            raise CrashFSUnavailable(f"the process that serves {self.path} ended: {why or self._process.returncode}")
        answer: dict[str, Any] = json.loads(line)
        if "busy" in answer:
            raise OSError(errno.EBUSY, f"a process still uses the mount ({answer['busy']})", str(self.path))
        return answer

    def _end(self) -> None:
        """Close the connection. The process that serves the mount then unmounts it and ends."""
        self._closed = True
        self._answers.close()
        self._socket.close()
        with contextlib.suppress(subprocess.TimeoutExpired):  # a process still has a file mapped
            self._process.wait(_UNMOUNT_S)
        assert self._process.stderr is not None
        self._process.stderr.close()


def _check_available() -> None:
    if not os.path.exists("/dev/fuse"):
        raise CrashFSUnavailable("there is no /dev/fuse: load the module fuse, or give the container that device")
    if importlib.util.find_spec("mfusepy") is None:
        raise CrashFSUnavailable("mfusepy is not installed: pip install '.[testing]' in a clone of segmentlog")
    if shutil.which("fusermount3") is None:
        raise CrashFSUnavailable("fusermount3 is not installed: apt install fuse3")


def _unmount(path: Path, *, lazily: bool = False) -> str | None:
    """Unmount and return None, or return why that failed."""
    command = ["fusermount3", "-u", *(["-z"] if lazily else []), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if done.returncode == 0 or not _is_mounted(path):
        return None
    return done.stderr.strip() or f"fusermount3 ended with {done.returncode}"


def _is_mounted(path: Path) -> bool:
    """Return whether ``path`` is a mount point. Reads the kernel's table: this process may serve the path itself."""
    wanted = str(path).replace("\\", "\\134").replace(" ", "\\040").replace("\t", "\\011").replace("\n", "\\012")
    with open("/proc/self/mountinfo") as mounts:
        return any(line.split(" ")[4] == wanted for line in mounts)


# ---------------------------------------------------------------- the serving process


class _Operations:
    """The callbacks of libfuse, by the names that it expects. Handles of open files are node numbers."""

    use_ns = True
    # Rejected: flag_nullpath_ok, with which libfuse omits the path if there is a handle. mfusepy 3.1 then passes
    # neither to ftruncate. The cost: an open file cannot be used after its folder was deleted.

    def __init__(self, disk: ForgetfulDisk, mounted: Callable[[], None]) -> None:
        self._disk = disk
        self._mounted = mounted
        self._open: dict[int, tuple[ModelFile, int]] = {}
        """By node number: the node, and how many times it is open."""

    def init(self, path: str) -> None:
        self._mounted()

    def _node(self, path: str, handle: int | None) -> ModelFile:
        if handle in self._open:
            return self._open[handle][0]
        return self._disk.find(path)

    def _opened(self, node: ModelFile) -> int:
        count = self._open.get(node.number, (node, 0))[1]
        self._open[node.number] = (node, count + 1)
        return node.number

    def getattr(self, path: str, fh: int | None = None) -> dict[str, int]:
        node = self._node(path, fh)
        return {
            "st_ino": node.number,
            "st_mode": node.mode | (stat.S_IFDIR if node.is_folder else stat.S_IFREG),
            "st_nlink": 2 if node.is_folder else 1,
            "st_size": node.size,
            "st_blocks": 8 * len(node.pages),
            "st_uid": os.getuid(),
            "st_gid": os.getgid(),
            **dict.fromkeys(("st_atime", "st_mtime", "st_ctime"), node.mtime_ns),
        }

    def readdir(self, path: str, fh: int) -> list[tuple[str, dict[str, int], int]]:
        names = self._node(path, fh).names
        entries = [(".", {"st_mode": stat.S_IFDIR}, 0), ("..", {"st_mode": stat.S_IFDIR}, 0)]
        for name, node in names.items():
            kind = stat.S_IFDIR if node.is_folder else stat.S_IFREG
            entries.append((name, {"st_mode": kind, "st_ino": node.number}, 0))
        return entries

    def opendir(self, path: str) -> int:
        return self._opened(self._disk.find(path))

    def create(self, path: str, mode: int, flags: int) -> int:
        return self._opened(self._disk.create(path, mode))

    def open(self, path: str, flags: int) -> int:
        node = self._disk.find(path)
        if flags & os.O_TRUNC:
            self._disk.truncate(node, 0)
        return self._opened(node)

    def release(self, path: str, fh: int) -> int:
        node, count = self._open[fh]
        if count > 1:
            self._open[fh] = (node, count - 1)
        else:
            del self._open[fh]
        return 0

    releasedir = release

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        return self._disk.read(self._node(path, fh), offset, size)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        return self._disk.write(self._node(path, fh), offset, data)

    def truncate(self, path: str, length: int, fh: int | None = None) -> int:
        self._disk.truncate(self._node(path, fh), length)
        return 0

    def fallocate(self, path: str, mode: int, offset: int, length: int, fh: int) -> int:
        if mode:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        self._disk.reserve(self._node(path, fh), offset, length)
        return 0

    def fsync(self, path: str, datasync: int, fh: int) -> int:
        self._node(path, fh).sync_data()  # fdatasync must sync the size, too
        return 0

    def fsyncdir(self, path: str, datasync: int, fh: int) -> int:
        self._disk.sync_folder(self._node(path, fh))
        return 0

    def mkdir(self, path: str, mode: int) -> int:
        self._disk.mkdir(path, mode)
        return 0

    def unlink(self, path: str) -> int:
        self._disk.unlink(path)
        return 0

    def rmdir(self, path: str) -> int:
        self._disk.rmdir(path)
        return 0

    def rename(self, old: str, new: str) -> int:
        self._disk.rename(old, new)
        return 0

    def link(self, target: str, source: str) -> int:
        self._disk.link(source, target)
        return 0

    def chmod(self, path: str, mode: int) -> int:
        self._node(path, None).mode = stat.S_IMODE(mode)
        return 0

    def chown(self, path: str, uid: int, gid: int) -> int:
        return 0

    def utimens(self, path: str, times: tuple[int, int] | None = None) -> int:
        self._node(path, None).mtime_ns = times[1] if times else time.time_ns()
        return 0

    def statfs(self, path: str) -> dict[str, int]:
        blocks = 1 << 20
        return {
            **{"f_bsize": 4096, "f_frsize": 4096, "f_namemax": 255 - len(ORPHAN_PREFIX)},
            **{"f_blocks": blocks, "f_bfree": blocks, "f_bavail": blocks},
            **{"f_files": blocks, "f_ffree": blocks, "f_favail": blocks},
        }


class _MountServer:
    """Serves one mount point until a stop command or the end of the connection."""

    def __init__(self, backing: Path, mount_point: Path, link: socket.socket) -> None:
        self._backing = backing
        self._mount_point = mount_point
        self._link = link
        self._commands: queue.Queue[list[Any]] = queue.Queue()
        self._answer: dict[str, object] = {}
        """The response to send after mounting."""

    def run(self) -> None:
        import mfusepy

        disk = ForgetfulDisk()
        disk.load(self._backing)
        threading.Thread(target=self._listen, daemon=True).start()
        while True:
            mfusepy.FUSE(
                _Operations(disk, self._mounted),
                str(self._mount_point),
                foreground=True,
                nothreads=True,  # one operation at a time, so that their order is known
                use_ino=True,
                kernel_cache=True,  # files change only through the mount
                fsname="segmentlog-crashfs",
            )
            command = self._commands.get()
            if command[0] == "stop":
                self._dump(disk)
                self._say({})
                return
            _, seed, keep = command
            self._answer = {"lost": disk.crash(random.Random(seed), keep)}
            self._dump(disk)

    def _mounted(self) -> None:
        self._say(self._answer)

    def _say(self, answer: dict[str, object]) -> None:
        with contextlib.suppress(OSError):  # the listening thread detects the end of the connection
            self._link.sendall(json.dumps(answer).encode() + b"\n")

    def _listen(self) -> None:
        """Unmount before each command, because the main thread is inside FUSE until the mount ends."""
        with contextlib.suppress(OSError), self._link.makefile("rb") as lines:
            for line in lines:
                command = json.loads(line)
                if (why := self._unmount()) is None:
                    self._commands.put(command)
                    if command[0] == "stop":
                        return
                else:
                    self._say({"busy": why})
        # The test has ended. Processes that still use the mount can continue; the mount ends with the last of them.
        _unmount(self._mount_point, lazily=True)
        self._commands.put(["stop"])

    def _unmount(self) -> str | None:
        deadline = time.monotonic() + _UNMOUNT_S
        while (why := _unmount(self._mount_point)) is not None and time.monotonic() < deadline:
            time.sleep(0.005)
        return why

    def _dump(self, disk: ForgetfulDisk) -> None:
        for path in self._backing.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        disk.dump(self._backing)


if __name__ == "__main__":
    try:
        _MountServer(Path(sys.argv[1]), Path(sys.argv[2]), socket.socket(fileno=int(sys.argv[3]))).run()
    except (OSError, RuntimeError) as error:  # libfuse is missing, or the mount was refused
        sys.exit(f"cannot mount: {error}; needs libfuse 3 (apt install fuse3) and the right to mount")
