"""`segmentlog serve` with several workers, and the programs of others at it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from server.clients.served import served as served
from server.clients.served import store as store
from server.clients.teller import Start, starting


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts programs."""
    with starting(tmp_path / "said.log") as start:
        yield start
