"""A store of a shop, filled once for each module, and its pages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from console_shop import Page, fill
from doors import Client

from segmentlog.http.context import HttpContext
from segmentlog.http.settings import HttpSettings
from segmentlog.store import LogStore


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fill a store once. Tests that change a store fill another store."""
    path = tmp_path_factory.mktemp("shop") / "store"
    with LogStore(path, background=False) as store:
        fill(store)
    return path


@pytest.fixture
def opened(shop: Path) -> Iterator[LogStore]:
    """Open the store. Tests must not change it."""
    with LogStore(shop, background=False) as store:
        yield store


@pytest.fixture
def ui(opened: LogStore) -> Iterator[Callable[[str], Page]]:
    """Provide a function that returns a page of the console, which must exist."""
    with Client(HttpContext(opened, HttpSettings(allow_writes=True))) as client:

        def get(path: str) -> Page:
            answer = client.get(f"/ui{path}")
            assert answer.status_code == 200, answer.text
            assert answer.headers["content-type"] == "text/html; charset=utf-8"
            return Page(answer.text)

        yield get
