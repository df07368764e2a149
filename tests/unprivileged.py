"""Stores that the user may read but not write, for ordinary users and for root alike.

An ordinary user removes the write permission from its own files. Root may write everything, so root changes the owner
of the files, and runs the test's program in a child without the capability CAP_DAC_OVERRIDE, to which modes apply.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

OTHER_USER: Final = 65534
_WAIT_S: Final = 60.0
_WITHOUT_CAPABILITIES: Final = """
import ctypes, os, sys
if os.geteuid() == 0:
    for capability in (1, 2, 3):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CAP_FOWNER: linux/capability.h
        if ctypes.CDLL(None).prctl(24, capability, 0, 0, 0) != 0:  # PR_CAPBSET_DROP: linux/prctl.h
            sys.exit("capabilities cannot be dropped")
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


@contextmanager
def unwritable(*paths: Path) -> Iterator[None]:
    """Make these files and folders, with all that the folders contain, read-only for the child of `run`."""
    everything = [path for start in paths for path in (start, *start.rglob("*"))]
    before = [(path, path.stat()) for path in everything]
    for path, found in reversed(before):  # the content of a folder before the folder
        if os.geteuid() == 0:
            os.chown(path, OTHER_USER, OTHER_USER)
            path.chmod(0o755 if path.is_dir() else 0o644)
        else:
            path.chmod(found.st_mode & ~0o222)
    try:
        yield
    finally:
        for path, found in before:
            if os.geteuid() == 0:
                os.chown(path, found.st_uid, found.st_gid)
            path.chmod(found.st_mode)


def run(*arguments: str, input_text: str = "") -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments as a user to whom permissions apply, and capture its output."""
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT_CAPABILITIES, *arguments],
        input=input_text,
        capture_output=True,
        text=True,
        timeout=_WAIT_S,
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done
