"""Programs that a test needs and that may be missing on a machine."""

from __future__ import annotations

import os
import shutil

import pytest


def program(name: str) -> str:
    """Return the path of a program. If it is missing, skip the test; in CI, which installs it, fail."""
    path = shutil.which(name)
    if path is None:
        missing = f"there is no {name}: 'apt-get install {name}' installs it"
        if os.environ.get("CI"):
            pytest.fail(missing)
        pytest.skip(missing)
    return path
