"""What all tests of coordination share."""

from __future__ import annotations

import pytest

from segmentlog.coordination import etcd_gateway, zookeeper_engine


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let requests wait two minutes for an answer, and not 10 s: the machine may be busy."""
    for module in (etcd_gateway, zookeeper_engine):
        monkeypatch.setattr(module, "REQUEST_S", 120.0)
