"""`segmentlog cluster check`, as typed: its report, its exit status, and its errors."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli.processes import finish
from coordination.engines import SERVERS, engine_url
from objects.failing_s3 import FailingS3, refused
from objects.s3_servers import BUCKET

from segmentlog.testing.ports import free_ports


@pytest.fixture
def server() -> Iterator[FailingS3]:
    """Provide an S3 server."""
    failing = FailingS3()
    try:
        yield failing
    finally:
        failing.close()


def check(folder: Path, url: str, *options: str, **environment: str) -> tuple[int, str, str]:
    """Run the command, and return (exit status, stdout, stderr)."""
    done = finish(folder / "store", "cluster", "check", url, *options, env={**os.environ, **environment})
    assert not (folder / "store").exists()
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def test_a_folder_is_accepted(tmp_path: Path) -> None:
    """The report is a table on stdout, or JSON; the check leaves no object."""
    url = f"file://{tmp_path}/bucket"
    status, out, err = check(tmp_path, url)
    assert (status, out.split()[:3]) == (0, ["SWAPS", "WON", "LOST"])
    assert out.splitlines()[1].split()[:4] == ["100", "10", "90", "0"]
    assert err == f"{url} honours conditional writes: it can coordinate a cluster\n"
    status, out, _ = check(tmp_path, url, "--json")
    report = json.loads(out)
    assert status == 0
    assert (report["ok"], report["swaps"], report["won"], report["lost"], report["unknown"]) == (True, 100, 10, 90, 0)
    assert report["p50_ms"] <= report["p99_ms"]
    assert list((tmp_path / "bucket").iterdir()) == []


def test_a_server_that_ignores_conditions_is_refused(tmp_path: Path, server: FailingS3) -> None:
    """The exit status is 1, and the report says why; the objects that could not be deleted are named."""
    server.ignores = ("if-match", "if-none-match")
    status, out, err = check(tmp_path, f"s3://{BUCKET}/orders", "--json", **server.server.environment)
    report = json.loads(out)
    assert (status, report["ok"], report["swaps"]) == (1, False, 10)
    assert "ignores conditional writes" in report["problem"]
    assert f"error: s3://{BUCKET}/orders: this object store ignores conditional writes" in err
    assert f"{report['leftover'][0]}: cannot be deleted" in err


@pytest.mark.parametrize("kind", SERVERS)
def test_servers_are_accepted(tmp_path: Path, kind: str) -> None:
    """etcd and ZooKeeper pass the check. The command prints one line if no server listens."""
    with SERVERS[kind](tmp_path) as servers:
        url = engine_url(kind, servers[0].port)
        status, out, err = check(tmp_path, url)
        assert (status, out.splitlines()[1].split()[:4]) == (0, ["100", "10", "90", "0"])
        assert err == f"{url} honours conditional writes: it can coordinate a cluster\n"
    if kind == "etcd":  # kazoo tries again for ten seconds
        status, out, err = check(tmp_path, url)
        assert (status, out) == (1, "")
        assert err.startswith(
            f"error: {url}: the coordinator cannot be reached: 127.0.0.1:{servers[0].port}: no server"
        )


def test_errors_name_the_cause(tmp_path: Path, server: FailingS3) -> None:
    """The command prints one line for missing permissions, servers and schemes, and for the folder of a store."""
    server.always = refused(403, "AccessDenied")
    status, out, err = check(tmp_path, f"s3://{BUCKET}/x", **server.server.environment)
    assert (status, out) == (1, "")
    assert "the coordinator cannot be used" in err
    assert "access denied" in err
    gone = server.server.environment | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{free_ports()}"}
    status, out, err = check(tmp_path, f"s3://{BUCKET}/x", **gone)
    assert (status, out) == (1, "")
    assert "the coordinator cannot be reached" in err
    for url in ("consul://h/x", "etcd://h", str(tmp_path), "file://relative"):
        status, out, err = check(tmp_path, url)
        assert (status, out) == (1, "")
        assert err.startswith("error: url = ")
    (tmp_path / "store.json").write_text("{}")
    status, out, err = check(tmp_path, f"file://{tmp_path}")
    assert (status, out) == (1, "")
    assert "is a segmentlog store; choose a folder outside it" in err
