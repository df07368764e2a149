"""The role of a machine, read from its folder: what metrics, `health()` and the console show."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from msgspec.structs import replace

import segmentlog
from segmentlog.format.server_file import ServerNode
from segmentlog.objects.bucket.url import open_bucket
from segmentlog.objects.ownership.binding import read_binding, write_binding
from segmentlog.objects.replica.replica import Replica
from segmentlog.objects.standby.machine_role import MachineRole, read_machine_role
from segmentlog.objects.standby.status import StandbyStatus, write_standby_status
from segmentlog.storage.fs import FileSystem

_NOW_MS = int(time.time() * 1000)
_FS = FileSystem()


@pytest.fixture
def url(tmp_path: Path) -> str:
    """Ship a store from the folder ``owner``, and return its URL."""
    place = open_bucket(f"file://{tmp_path}/bucket").url
    with segmentlog.open(tmp_path / "owner", background=False) as store:
        store.create_topic("t").partition(0).append([b"1"])
        store.ship(place)
    return place


def _standby(tmp_path: Path, url: str, **options: object) -> Path:
    path = tmp_path / "standby"
    replica = Replica(url, path, threads=False)
    replica.refresh()
    replica.close()
    status = StandbyStatus(
        url=url, role="standby", reason="the owner answers", owner="m1 (owner's epoch 1)", owner_epoch=1,
        nodes=(ServerNode(1, "m1", 9092),), refreshed_ms=_NOW_MS - 2000, lag_records=3, written_ms=_NOW_MS,
    )  # fmt: skip
    write_standby_status(_FS, str(path), replace(status, **options))
    return path


def _read(path: Path, now_ms: int = _NOW_MS) -> MachineRole:
    role = read_machine_role(_FS, str(path), now_ms)
    assert role is not None
    return role


def test_a_folder_that_is_not_shipped_has_no_role(tmp_path: Path) -> None:
    """A folder with a replica has no role either, unless a standby refreshes it."""
    with segmentlog.open(tmp_path / "plain", background=False):
        pass
    assert read_machine_role(_FS, str(tmp_path / "plain"), _NOW_MS) is None
    assert read_machine_role(_FS, str(tmp_path / "nowhere"), _NOW_MS) is None


def test_the_owner_and_the_former_owner(tmp_path: Path, url: str) -> None:
    """The binding says who it is; the status file, when it took the store over."""
    path = tmp_path / "owner"
    assert (_read(path).role, _read(path).owner_epoch, _read(path).last_takeover_ms) == ("owner", 1, 0)
    binding = read_binding(_FS, str(path))
    assert binding is not None
    write_binding(_FS, str(path), replace(binding, owner_epoch=2))
    write_standby_status(_FS, str(path), StandbyStatus(url=url, role="owner", owner_epoch=2, owner_since_ms=5000))
    assert (_read(path).owner_epoch, _read(path).last_takeover_ms) == (2, 5000)
    write_binding(_FS, str(path), replace(binding, fenced="m2"))
    assert (_read(path).role, _read(path).owner) == ("former owner", "m2")


def test_a_standby_that_can_take_over(tmp_path: Path, url: str) -> None:
    """It has a lag, and no problem."""
    role = _read(_standby(tmp_path, url))
    assert (role.role, role.lag_records, role.lag_s, role.problem) == ("standby", 3, 2.0, "")


def test_a_standby_with_an_abandoned_takeover(tmp_path: Path, url: str) -> None:
    """It has a binding but is not the owner, like a machine whose takeover is incomplete."""
    path = _standby(tmp_path, url)
    binding = read_binding(_FS, str(tmp_path / "owner"))
    assert binding is not None
    write_binding(_FS, str(path), replace(binding, owner_id="2", owner_epoch=2))
    assert (_read(path).role, _read(path).owner_epoch, _read(path).lag_records) == ("standby", 1, 3)
    (path / "@replica").rename(path / "@restoring")
    assert read_machine_role(_FS, str(path), _NOW_MS) is None


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"error": "no route to the object store"}, "no route"),
        ({"reason": "the owner has never answered this machine", "is_blocked": True}, "never answered"),
        ({"written_ms": _NOW_MS - 60_000}, "no process has followed the owner for 60 s"),
    ],
)
def test_a_standby_that_cannot_take_over_says_why(
    tmp_path: Path, url: str, options: dict[str, object], problem: str
) -> None:
    """The reason is in its role, and in `health()` of its folder."""
    path = _standby(tmp_path, url, **options)
    assert problem in _read(path).problem
    with segmentlog.open(path, create=False, read_only=True, background=False) as store:
        assert "standby" in store.health()


def test_health_of_a_standby_that_can_take_over_has_no_entry(tmp_path: Path, url: str) -> None:
    """The clock of the store decides whether the status is old."""
    path = _standby(tmp_path, url, written_ms=int(time.time() * 1000))
    with segmentlog.open(path, create=False, read_only=True, background=False) as store:
        assert "standby" not in store.health()
