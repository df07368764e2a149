"""A fixture that mounts a CrashFS."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from segmentlog.testing.crashfs import CrashFS, CrashFSUnavailable


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[CrashFS]:
    """Yield a mounted disk. Without FUSE, skip the test; in CI, fail."""
    try:
        mounted = CrashFS(tmp_path / "disk", tmp_path / "mount")
    except CrashFSUnavailable as why:
        if os.environ.get("CI"):
            pytest.fail(f"CrashFS: {why}")
        pytest.skip(f"CrashFS: {why}")
    with mounted:
        yield mounted
