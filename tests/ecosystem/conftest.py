"""`segmentlog serve` with several workers, and foreign programs that use it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from server.clients.served import served as served
from server.clients.served import store as store
from server.clients.teller import Start, starting


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Yield a function that starts programs."""
    with starting(tmp_path / "said.log") as start:
        yield start
