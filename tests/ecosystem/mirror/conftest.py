"""Kafka and `segmentlog serve`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from ecosystem.kafka.programs import Broker, Tools
from server.clients.fetching import Missing


@pytest.fixture
def kafka(tmp_path: Path) -> Iterator[Broker]:
    """Yield a broker of Kafka."""
    try:
        broker = Broker(tmp_path / "kafka")
    except Missing as missing:
        if "CI" in os.environ:
            raise
        pytest.skip(str(missing))
    try:
        yield broker
    finally:
        broker.stop()


@pytest.fixture
def tools(kafka: Broker) -> Iterator[Tools]:
    """Kafka's command line."""
    tools = Tools()
    yield tools
    tools.close()
