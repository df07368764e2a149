"""`segmentlog demo durability`, through the command line."""

from __future__ import annotations

import re
import shutil

import pytest
from click.testing import CliRunner

from segmentlog.cli import cli
from segmentlog.cli import demo_command as command
from segmentlog.demo.flights import DemoFailed
from segmentlog.testing import offset_reuse


def row(output: str, setting: str) -> str:
    """Return the line of the table that begins with this setting."""
    return next(line for line in output.splitlines() if line.startswith(f"{setting} "))


def test_every_policy_is_shown_and_agrees() -> None:
    """Each policy and ack level has a row with both histories; losses are reported, and stderr stays empty."""
    done = CliRunner().invoke(cli, ["demo", "durability"])
    assert done.exit_code == 0, done.output
    assert done.stderr == ""
    for policy in offset_reuse.POLICIES:
        written, durable, durable_only = (
            row(done.stdout, f"fsync={policy}, ack={level}")
            for level in ("written", "durable", "written, durable_only")
        )
        assert written.endswith("agree" if policy == "always" else "agree, A got an error for the lost records")
        assert durable.endswith("  agree")
        assert durable_only.endswith("  agree")
        assert durable.count("gamma") == 2
    told = row(done.stdout, "fsync=everysec, ack=written")
    assert re.search(r"0:alpha, 1:beta, 2:gamma, \(reported: \[1, \d+\) is lost\), \d+:delta", told)
    segmentlog_part = done.stdout.partition("Redis")[0]
    assert "DISAGREE" not in segmentlog_part
    if shutil.which("redis-server"):
        assert row(done.stdout, "appendfsync=always").endswith("  agree")
        assert row(done.stdout, "appendfsync=everysec").endswith("DISAGREE: two records each at 1, 2")


def test_without_redis_a_line_says_how_to_see_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without redis-server or the bench folder (an installed package), the command prints a line and succeeds."""
    monkeypatch.setattr(shutil, "which", lambda name: None)
    done = CliRunner().invoke(cli, ["demo", "durability"])
    assert done.exit_code == 0
    assert "python -m bench.kafkaesque (redis-server is not installed: apt-get install redis-server)" in done.stdout
    monkeypatch.setattr(command, "_load_kafkaesque", lambda: None)
    done = CliRunner().invoke(cli, ["demo", "durability"])
    assert done.stdout.splitlines()[-1] == "The same in Redis: python -m bench.kafkaesque, in a checkout of segmentlog."


def test_the_demonstration_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """A log that keeps its losses to itself does not pass."""
    monkeypatch.setattr(offset_reuse.SegmentlogLog, "lost_ranges", lambda self: [])
    done = CliRunner().invoke(cli, ["demo", "durability"])
    assert isinstance(done.exception, DemoFailed)
    assert "fsync=everysec, ack=written failed: agree, but a record is gone outside every lost range" in str(
        done.exception
    )


@pytest.mark.parametrize("option", [("--limit", "5"), ("--keep", "x")])
def test_options_of_the_flights_are_refused(option: tuple[str, str]) -> None:
    """An option that would have no effect is an error."""
    done = CliRunner().invoke(cli, ["demo", "durability", *option])
    assert done.exit_code == 2
    assert "are options of flights" in done.output
