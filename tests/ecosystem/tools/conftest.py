"""Kafka's command line, in one process for all tests."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ecosystem.kafka.programs import Ran, Tools
from server.clients.fetching import Missing
from server.clients.served import Served

from segmentlog.store import LogStore


@pytest.fixture(scope="session")
def tools() -> Iterator[Tools]:
    """Yield all of Kafka's tools."""
    try:
        tools = Tools()
    except Missing as missing:
        if "CI" in os.environ:
            raise
        pytest.skip(str(missing))
    yield tools
    tools.close()


Command = Callable[..., str]


@pytest.fixture
def served(store: LogStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """Yield a server whose log must stay clean: without unreadable requests, cut connections or errors of its own."""
    monkeypatch.setenv("SERVED_LOG", "INFO")
    log = tmp_path / "served.log"
    served = Served(Path(store.path), log)
    yield served
    said = log.read_text()
    served.stop()
    assert ": closed" not in said
    assert "WARNING" not in said
    assert "ERROR" not in said


@pytest.fixture
def ask(tools: Tools, served: Served) -> Callable[..., Ran]:
    """Return a command, at the server."""

    def ask(main: str, *words: Any, stdin: str = "") -> Ran:
        at = 1 if main == "ClusterTool" else 0  # ClusterTool takes the option after its subcommand
        return tools.run(main, *words[:at], "--bootstrap-server", served.address, *words[at:], stdin=stdin)

    return ask


@pytest.fixture
def do(ask: Callable[..., Ran]) -> Command:
    """Return a function that runs a command, checks that it succeeds, and returns its output."""

    def do(main: str, *words: Any, stdin: str = "") -> str:
        ran = ask(main, *words, stdin=stdin)
        assert ran.status == 0, ran.said
        return ran.out

    return do


@pytest.fixture
def refuse(ask: Callable[..., Ran]) -> Command:
    """Return a function that runs a command, checks that it fails, and returns all of its output."""

    def refuse(main: str, *words: Any, stdin: str = "") -> str:
        ran = ask(main, *words, stdin=stdin)
        assert ran.status == 1, ran.said
        return ran.said

    return refuse
