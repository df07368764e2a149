"""Two machines on loopback: the server of one ends in every way that there is, and the other takes over."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
from waiting import wait_until

import segmentlog
from segmentlog.errors import StoreFenced
from segmentlog.objects.bucket.url import open_bucket
from segmentlog.objects.replica.replica import Replica
from segmentlog.objects.takeover import take_over
from segmentlog.testing.ports import free_ports

confluent_kafka = pytest.importorskip("confluent_kafka")

from server.standby_machines import Load, Machine, machines, start_pair  # noqa: E402  needs confluent_kafka


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[list[Machine]]:
    """Yield two machines of one store, which are not started."""
    with machines(tmp_path) as found:
        yield found


def _is_refused(machine: Machine) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", machine.port)) != 0


@pytest.mark.long
def test_a_killed_owner_is_replaced_and_comes_back_as_a_standby(pair: list[Machine]) -> None:
    """Kill -9 of all processes: the standby continues the log, and the former owner follows it after its restart."""
    owner, standby = pair
    start_pair(owner, standby)
    load = Load(pair)
    load.wait_for_more()
    owner.kill()
    standby.wait_for("as the owner")
    load.wait_for_new()
    owner.start()
    owner.wait_for("as a standby of")
    load.wait_for_more()
    load.stop()
    assert owner.stop() == 0
    assert standby.stop() == 0
    load.check(standby.path)
    (former,) = (owner.path / "@former").iterdir()
    assert (former / "store.json").exists()
    assert owner.lines[-1] == "stopped"


@pytest.mark.long
def test_a_stopped_owner_is_fenced_and_becomes_the_standby(pair: list[Machine]) -> None:
    """SIGSTOP, and SIGCONT after the takeover: it says so, and local programs cannot append there."""
    owner, standby = pair
    start_pair(owner, standby)
    with segmentlog.open(owner.path, background=False) as local:
        local.create_topic("local")
        local.topic("local").partition(0).append([b"before"])
        load = Load(pair)
        load.wait_for_more()
        owner.pause()
        standby.wait_for("as the owner")
        load.wait_for_new()
        owner.signal(signal.SIGCONT)
        owner.wait_for("has taken over the store; this machine is a standby now")
        owner.wait_for("as a standby of")
        with pytest.raises(StoreFenced):
            local.topic("local").partition(0).append([b"after"])
    load.wait_for_more()
    load.stop()
    assert standby.stop() == 0
    load.check(standby.path)


def test_a_standby_that_is_first_waits_and_refuses_connections(pair: list[Machine]) -> None:
    """It logs the reason. Its port refuses connections until it has a replica, and then turns clients away."""
    owner, standby = pair
    standby.start()
    line = standby.wait_for("waiting for a store at")
    assert f"--ship {standby.url} --standby {standby.url}" in line
    assert _is_refused(standby)
    owner.start("--ship", owner.url)
    owner.wait_for("as the owner")
    standby.wait_for("as a standby of")
    admin = confluent_kafka.Consumer({"bootstrap.servers": standby.address, "group.id": "g"})
    with contextlib.closing(admin):
        found = wait_until(lambda: admin.list_topics(timeout=10).brokers)
    assert [(one.host, one.port) for one in found.values()] == [("127.0.0.1", owner.port)]
    assert not (standby.path / "@former").exists()


def _wait_alone(owner: Machine, machine: Machine) -> None:
    machine.start()
    machine.wait_for("waiting for a store at")
    machine.stop()


def _begin_a_replica(owner: Machine, machine: Machine) -> None:
    _ship_a_store(owner)
    Replica(machine.url, str(machine.path), threads=False).close()


def _die_in_a_takeover(owner: Machine, machine: Machine) -> None:
    _ship_a_store(owner)
    with Replica(machine.url, str(machine.path), threads=False) as replica:
        replica.refresh()
    with (
        mock.patch("segmentlog.objects.takeover._write_grants", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        take_over(open_bucket(machine.url), str(machine.path))


def _ship_a_store(machine: Machine) -> None:
    with segmentlog.open(machine.path, background=False) as store:
        store.create_topic("t").partition(0).append([b"x"])
        store.ship(machine.url)


@pytest.mark.parametrize(
    ("prepare", "role"),
    [(_wait_alone, "as the owner"), (_begin_a_replica, "as a standby of"), (_die_in_a_takeover, "as the owner")],
)
def test_a_machine_started_with_ship_continues_from_each_state(
    pair: list[Machine], prepare: Callable[[Machine, Machine], None], role: str
) -> None:
    """``--ship`` creates a store only if none is shipped; the machine takes its role all the same."""
    other, machine = pair
    prepare(other, machine)
    assert not (machine.path / "store.json").exists()
    machine.start("--ship", machine.url)
    machine.wait_for(role, 20)


def test_sigterm_ends_each_role(pair: list[Machine]) -> None:
    """A waiting machine, a standby and an owner end with status 0, and leave no process."""
    owner, standby = pair
    standby.start()
    standby.wait_for("waiting for")
    pids = standby.pids
    assert standby.stop() == 0
    start_pair(owner, standby)
    pids += [*owner.pids, *standby.pids]
    assert standby.stop() == 0
    assert owner.stop() == 0
    assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]


@pytest.mark.long
def test_a_dead_supervisor_takes_its_processes_with_it(pair: list[Machine]) -> None:
    """Kill -9 of the owner's supervisor alone: its workers end, and the standby takes over."""
    owner, standby = pair
    start_pair(owner, standby)
    load = Load(pair)
    load.wait_for_more()
    assert owner.process is not None
    owner.process.kill()
    owner.finish()
    standby.wait_for("as the owner")
    load.wait_for_new()
    load.stop()
    assert standby.stop() == 0
    load.check(standby.path)


@pytest.mark.long
def test_a_dead_worker_or_follower_changes_no_role(pair: list[Machine]) -> None:
    """The supervisors restart them before the standby takes over, and no machine reports another role."""
    owner, standby = pair
    owner.start("--ship", owner.url)
    owner.wait_for("as the owner")
    standby.start("--standby-refused", "5s", "--standby-silence", "8s")
    standby.wait_for("as a standby of")
    for machine in pair:
        for pid in machine.pids[1:]:
            os.kill(pid, signal.SIGKILL)
    wait_until(lambda: sum("was started" in line for line in standby.lines) == 2, lambda: standby.log)
    load = Load(pair)
    load.wait_for_more()
    load.stop()
    assert sum("listening on" in line for line in standby.lines + owner.lines) == 2, standby.log
    assert standby.status["role"] == "standby"


@pytest.mark.long
def test_of_two_standbys_one_takes_over(tmp_path: Path) -> None:
    """The other follows the new owner, and takes over from it in turn. A new client reaches each of the owners."""
    with machines(tmp_path, count=3) as found:
        owner, *standbys = found
        start_pair(owner, standbys[0])
        standbys[1].start()
        standbys[1].wait_for("as a standby of")
        wait_until(lambda: bool(standbys[1].status["answered_owner"]))
        loads = [Load(found)]
        loads[0].wait_for_more()
        loads[0].stop()
        owner.kill()
        new = wait_until(lambda: next((one for one in standbys if "as the owner" in one.log), None))
        other = standbys[1 - standbys.index(new)]
        wait_until(lambda: other.status["role"] == "standby" and "epoch 2" in other.status["owner"], lambda: other.log)
        wait_until(lambda: other.status["reason"] == "the owner answers", lambda: str(other.status))
        loads.append(Load(found, "second"))
        loads[1].wait_for_more()
        loads[1].stop()
        new.kill()
        other.wait_for("as the owner")
        loads.append(Load(found, "third"))
        loads[2].wait_for_more()
        loads[2].stop()
        assert other.stop() == 0
        for load in loads:
            load.check(other.path)


def _fill_with_a_store(path: Path) -> None:
    with segmentlog.open(path, background=False) as store:
        store.create_topic("other")


def _fill_with_files(path: Path) -> None:
    path.mkdir()
    (path / "notes.txt").write_text("mine")


@pytest.mark.parametrize(
    ("fill", "reason"), [(_fill_with_a_store, "is another store"), (_fill_with_files, "contains notes.txt")]
)
def test_a_folder_with_something_else_is_refused(
    pair: list[Machine], fill: Callable[[Path], None], reason: str
) -> None:
    """The exit status is 1, the message names the folder, and the folder keeps what it has."""
    owner, standby = pair
    owner.start("--ship", owner.url)
    owner.wait_for("as the owner")
    fill(standby.path)
    before = sorted(standby.path.rglob("*.json")) + sorted(standby.path.glob("*.txt"))
    standby.start()
    assert standby.finish() == 1
    assert reason in standby.log
    assert str(standby.path) in standby.log
    assert sorted(standby.path.rglob("*.json")) + sorted(standby.path.glob("*.txt")) == before


@pytest.mark.parametrize(
    ("arguments", "status", "reason"),
    [
        (("--standby", "nowhere://x"), 1, "nowhere"),
        (("--standby", "s3://a/b", "--ship", "s3://a/c"), 2, "same URL"),
    ],
)
def test_a_wrong_url_is_refused(tmp_path: Path, arguments: tuple[str, ...], status: int, reason: str) -> None:
    """The exit status is 1 for a URL that does not exist, and 2 for two that differ."""
    command = [sys.executable, "-m", "segmentlog", "--dir", str(tmp_path / "m"), "serve", "--listen", "127.0.0.1:0"]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == status, done.stderr
    assert reason in done.stderr
    assert "Traceback" not in done.stderr


def test_a_port_in_use_is_refused_at_the_start(pair: list[Machine]) -> None:
    """The error comes although the port of a standby does not listen at first."""
    _, standby = pair
    with socket.create_server(("127.0.0.1", standby.port)):
        standby.start()
        assert standby.finish() == 1
    assert "cannot listen" in standby.log


def _get(address: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(address, timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def _ship_status(machine: Machine, *arguments: str) -> str:
    command = [sys.executable, "-m", "segmentlog", "--dir", str(machine.path), "ship", "--status", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


@pytest.mark.long
def test_each_role_is_reported_everywhere(pair: list[Machine]) -> None:
    """ship --status, /metrics, /readyz and the console show role, owner and lag, on both machines, and the takeover."""
    owner, standby = pair
    ports = {machine: (free_ports(1), free_ports(1)) for machine in pair}
    options = {
        machine: ("--metrics", f"127.0.0.1:{metrics}", "--http", f"127.0.0.1:{http}")
        for machine, (metrics, http) in ports.items()
    }
    standby.start(*options[standby])
    standby.wait_for("waiting for a store")  # the HTTP server must not create a store meanwhile
    owner.start("--ship", owner.url, *options[owner])
    owner.wait_for("as the owner")
    standby.wait_for("as a standby of")
    wait_until(lambda: standby.status["reason"] == "the owner answers")

    def pages(machine: Machine) -> tuple[str, str]:
        metrics, http = ports[machine]
        assert _get(f"http://127.0.0.1:{metrics}/readyz") == (200, "ok\n")
        page = _get(f"http://127.0.0.1:{http}/ui/damage")
        assert page[0] == 200, page
        return _get(f"http://127.0.0.1:{metrics}/metrics")[1], page[1]

    metrics, page = pages(owner)
    assert 'segmentlog_role{role="owner"} 1' in metrics
    assert "segmentlog_owner_epoch 1" in metrics
    assert "This machine is the owner of the store" in page
    metrics, page = pages(standby)
    assert 'segmentlog_role{role="standby"} 1' in metrics
    assert "segmentlog_standby_lag_records 0" in metrics
    assert "segmentlog_standby_blocked 0" in metrics
    assert "segmentlog_last_takeover" not in metrics
    assert "This machine is a standby" in page
    text = _ship_status(owner)
    assert "as the first owner" in text
    assert "a takeover now loses 0 offsets" in text
    assert "does not take over now: the owner answers" in _ship_status(standby)
    owner.kill()
    standby.wait_for("as the owner")
    metrics, _ = pages(standby)
    assert "segmentlog_owner_epoch 2" in metrics
    assert "segmentlog_last_takeover_timestamp_seconds" in metrics
    found = json.loads(_ship_status(standby, standby.url, "--json"))
    assert (found["owner_epoch"], found["nodes"]) == (2, [standby.address])
    assert found["last_takeover"]["at_ms"] >= found["since_ms"]
    assert found["this_machine"]["role"] == "owner"
