"""Programs that a test needs and that a machine may not have."""

from __future__ import annotations

import os
import shutil

import pytest


def program(name: str) -> str:
    """Return the path of a program. Without it the test is skipped; in CI, which installs it, the test fails."""
    path = shutil.which(name)
    if path is None:
        missing = f"there is no {name}: 'apt-get install {name}' installs it"
        if os.environ.get("CI"):
            pytest.fail(missing)
        pytest.skip(missing)
    return path
