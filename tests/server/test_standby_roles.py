"""The process that finds out the role of a machine: its messages, and an object store that does not answer."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
from objects.buckets import Memory

from segmentlog.cli.serve_command import _start_message
from segmentlog.errors import ShippingRefused
from segmentlog.objects.ownership.binding import Binding
from segmentlog.server import standby_process
from segmentlog.server.supervisor import StandbyPlan, Supervisor

URL = "https://account.blob.core.windows.net/c/store?sv=1&sig=SECRET"


@pytest.mark.parametrize("status", [None, {"role": "waiting"}])
def test_the_message_of_a_start_contains_no_secret(status: dict[str, str] | None) -> None:
    """A token in the URL is in no line that `serve` prints."""
    supervisor = SimpleNamespace(
        plan=SimpleNamespace(path="d", standby=StandbyPlan(url=URL)), is_standby=status is not None, is_ready=True,
        standby_status=status, bootstrap_servers="h:1", nodes=[1], statuses=list,
    )  # fmt: skip
    message = _start_message(supervisor)  # type: ignore[arg-type]
    assert "account.blob.core.windows.net" in message
    assert "SECRET" not in message


def test_the_log_of_a_new_role_contains_no_secret(caplog: pytest.LogCaptureFixture) -> None:
    """Neither is a token in the log."""
    supervisor = SimpleNamespace(
        plan=SimpleNamespace(path="d", standby=StandbyPlan(url=URL)), is_standby=True, _stops=1, _all_sockets=[],
        _finish=print, _end_at_once=print, _new_children=list,
    )  # fmt: skip
    with caplog.at_level(logging.INFO):
        Supervisor._change_role(supervisor, 0)  # type: ignore[arg-type]
    assert "owner of the store at https" in caplog.text
    assert "SECRET" not in caplog.text


@pytest.mark.parametrize("state", ["some topics", "other files"])
def test_a_refusal_contains_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str) -> None:
    """A folder that cannot be a standby is refused with the URL as other commands show it."""
    bucket = Memory()
    bucket.url = URL.partition("?")[0]
    monkeypatch.setattr(standby_process, "open_bucket", lambda url: bucket)
    if state == "some topics":
        binding = Binding(url=bucket.url, owner_id="o", owner_epoch=1, folder_id=(0, 0), topics=("a",))
        monkeypatch.setattr(standby_process, "read_binding", lambda fs, path: binding)
    else:
        (tmp_path / "notes.txt").touch()
    with pytest.raises(ShippingRefused) as caught:
        standby_process._first_status(str(tmp_path), URL, can_create=False)
    assert bucket.url in str(caught.value)
    assert "SECRET" not in str(caught.value)
