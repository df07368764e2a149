"""A server, and each client in turn."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from server.clients.driver import Driver
from server.clients.fetching import Missing
from server.clients.kinds import KINDS, driver_class
from server.clients.program import ProgramDriver

from segmentlog.store import LogStore
from segmentlog.testing.pytest_plugin import ServerOfTests, server_fixture

server = server_fixture()

_INSTALLED_BY_CI = {"confluent-kafka", "aiokafka", "kafka-python", "kcat"}


@pytest.fixture
def store(server: ServerOfTests) -> LogStore:
    """Provide the served store, opened with the library."""
    return server.store


@pytest.fixture(scope="module", params=sorted(KINDS))
def kind(request: pytest.FixtureRequest) -> Iterator[type[Driver]]:
    """Yield the driver class of a client; a client program runs while its tests do."""
    name: str = request.param
    try:
        found = driver_class(name)
        if issubclass(found, ProgramDriver):
            found.start()
    except (Missing, ImportError) as error:
        if name in _INSTALLED_BY_CI and "CI" in os.environ:
            raise
        pytest.skip(f"{name}: {error}")
    yield found
    if issubclass(found, ProgramDriver):
        found.stop()


@pytest.fixture
def client(kind: type[Driver], server: ServerOfTests) -> Driver:
    """Return the client, at the server."""
    return kind(server.bootstrap_servers)
