"""Ports for servers that need a port number before they start."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest

from segmentlog.testing import ports
from segmentlog.testing.ports import free_ports

ROOT = Path(__file__).parents[2]


def test_nobody_is_given_one_by_chance() -> None:
    """The ports are not in the range for connections, and they are consecutive."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    base = free_ports(5)
    assert base >= 10_000
    assert base + 5 <= max(lowest, 20_000)
    for port in range(base, base + 5):
        socket.create_server(("127.0.0.1", port)).close()


def test_one_that_somebody_listens_on_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ports around a used one are skipped, too; if no others are left, an error is raised."""
    base = free_ports(3)
    monkeypatch.setattr(ports, "_LOWEST", base)
    monkeypatch.setattr(ports, "_ephemeral_from", lambda: base + 4)
    assert free_ports(3) == base
    with socket.create_server(("127.0.0.1", base + 1)), pytest.raises(OSError, match="no 3 consecutive ports are free"):
        free_ports(3)


def test_no_test_and_no_bench_draws_one_from_those_of_connections() -> None:
    """Such a port may belong to a connection of another process a moment later, once in some thousand runs."""
    probe = re.compile(
        r"\.bind\(\(.*, 0\)\)(.*\n){1,6}.*getsockname|"
        r"create_server\(\(.*, 0\)\).*\n.*getsockname.*\n.*close"
    )
    found = [path for folder in ("tests", "bench") for path in (ROOT / folder).rglob("*.py")]
    assert len(found) > 300
    assert not [str(path) for path in found if path != Path(__file__) and probe.search(path.read_text())]
