"""A store that the user may read but not write can be read; a write raises an error with path and permission."""

from __future__ import annotations

from pathlib import Path

import pytest
from unprivileged import run, unwritable

import segmentlog

_READ = """
import logging, sys
import segmentlog
with segmentlog.open(sys.argv[1]) as store:
    print("read-only:", store.read_only)
    with store.consumer(*sys.argv[2:]) as consumer:
        print("values:", b" ".join(record.value for record in consumer).decode())
    for name in sys.argv[2:]:
        log = store.topic(name).partition(0)
        print(name, "durable:", log.durable_offset, "ends:", log.log_end_offset)
        try:
            print(name, "appended at", log.append([b"new"]))
        except segmentlog.SegmentlogError as error:
            print(name, type(error).__name__, error)
    try:
        store.create_topic("new")
        print("created")
    except (segmentlog.SegmentlogError, OSError) as error:
        print(type(error).__name__, error)
"""


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Return a store of two topics, and a group, closed cleanly."""
    path = tmp_path / "store"
    with segmentlog.open(path, background=False) as opened:
        for name in ("t", "u"):
            opened.create_topic(name).partition(0).append([b"%s%d" % (name.encode(), number) for number in range(3)])
        with opened.consumer("t", group="readers") as consumer:
            assert len(list(consumer)) == 3
            consumer.commit()
    return path


def command(store: Path, *arguments: str, input_text: str = "") -> tuple[int, str, str]:
    """Run a command on the store; its status, its results and what else it says."""
    done = run("-m", "segmentlog", "--dir", str(store), *arguments, input_text=input_text)
    return done.returncode, done.stdout, done.stderr


def test_the_library_opens_it_read_only_with_one_warning(store: Path) -> None:
    """Reading works; an append and a new topic raise `ReadOnlyStore`, which says who may not write what."""
    with unwritable(store):
        done = run("-c", _READ, str(store), "t", "u")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "read-only: True"
    assert lines[1] == "values: t0 t1 t2 u0 u1 u2"
    assert "t durable: 3 ends: 3" in lines
    refused = [line for line in lines if "ReadOnlyStore" in line]
    assert len(refused) == 3
    assert all(f"may not write {store} (owner " in line for line in refused)
    assert done.stderr.count("opened read-only, as user") == 1


def test_one_topic_of_another_user_does_not_keep_the_rest_from_being_written(store: Path) -> None:
    """The partition alone is opened read-only, with a warning; appends to the other topic are done."""
    with unwritable(store / "t"):
        done = run("-c", _READ, str(store), "t", "u")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:2] == ["read-only: False", "values: t0 t1 t2 u0 u1 u2"]
    assert any(line.startswith(f"t ReadOnlyStore {store}/t/0: cannot append") for line in lines)
    assert any(f"may not write {store}/t/0" in line for line in lines)
    assert "u appended at 3" in lines
    assert "created" in lines
    assert done.stderr.count("opened read-only, as user") == 1


_TICK = """
import logging, sys
import segmentlog
with segmentlog.open(sys.argv[1], background=False) as store:
    print("read-only:", store.read_only)
    for name in ("t", "c", "u"):
        print(name, "read-only:", store.topic(name).partition(0).handle.read_only)
    for _ in range(2):
        store.retention_tick(1 << 60)
        store.cleaner_tick(1 << 60)
        store.finish_transactions()
    print("health:", store.health())
    print("u starts at", store.topic("u").partition(0).log_start_offset)
"""


def test_background_work_leaves_partitions_of_another_user_alone(store: Path) -> None:
    """Background work skips such partitions silently, and retention continues in the others."""
    with segmentlog.open(store, background=False) as opened:
        for name in ("t", "u"):
            opened.alter_topic(name, retention_ms=1, segment_ms=1)
        compacted = opened.create_topic("c", cleanup_policy="compact", min_cleanable_dirty_ratio=0.01).partition(0)
        for number in range(3):
            compacted.append([b"%d" % number], keys=[b"k"])
            compacted.roll()
        with opened.producer(name="of another user") as producer, producer.transaction():
            producer.send("t", b"open")
            producer.flush()
            with unwritable(store / "t", store / "c", *store.glob("@producers/*")):
                done = run("-c", _TICK, str(store))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:4] == ["read-only: False", "t read-only: True", "c read-only: True", "u read-only: False"]
    assert "health: {}" in lines, done.stdout + done.stderr
    assert "u starts at 3" in lines
    assert len(done.stderr.splitlines()) == 2, done.stderr  # "t/0: opened read-only", and so for c/0


def test_files_of_another_user_in_a_folder_of_ones_own(store: Path) -> None:
    """After a command ran as root, an error names the file that cannot be written, and reading works."""
    with unwritable(store / "t" / "0" / "state"):
        done = run("-c", _READ, str(store), "t")
    lines = done.stdout.splitlines()
    assert lines[:2] == ["read-only: False", "values: t0 t1 t2"]
    assert any("ReadOnlyStore" in line and f"may not write {store}/t/0/state (owner " in line for line in lines)


@pytest.mark.parametrize(
    "arguments", [("consume", "t"), ("tail", "t"), ("describe", "t"), ("topics",), ("export", "t"), ("verify",)]
)
def test_commands_that_read_work(store: Path, arguments: tuple[str, ...]) -> None:
    """The results are there, and at most one line says that the store was opened read-only."""
    before = command(store, *arguments)
    with unwritable(store):
        status, out, err = command(store, *arguments)
    assert status == before[0] == 0, err
    assert _without_times(out) == _without_times(before[1])
    assert out or "no damage" in err
    assert err.count("read-only") <= 1


def _without_times(text: str) -> list[str]:
    return [line for line in text.splitlines() if " in 0." not in line]


@pytest.mark.parametrize(
    "arguments",
    [
        ("produce", "t"),
        ("create", "v"),
        ("consume", "-g", "readers", "t"),
        ("alter", "t", "-c", "retention.ms=5"),
        ("trim", "t", "--before", "2"),
        ("serve", "--listen", "127.0.0.1:0"),
    ],
)
def test_commands_that_write_name_the_path_and_the_permission(store: Path, arguments: tuple[str, ...]) -> None:
    """They fail with status 1 and change nothing."""
    with unwritable(store):
        status, out, err = command(store, *arguments, input_text="line\n")
    assert (status, out) == (1, "")
    assert f"may not write {store} (owner " in err.splitlines()[-1]
    assert "the store is open read-only" in err.splitlines()[-1]
    with segmentlog.open(store, background=False) as opened:
        assert opened.topics() == ["t", "u"]
        assert (opened.topic("t").partition(0).log_start_offset, opened.topic("t").partition(0).log_end_offset) == (
            0,
            3,
        )


_CONSOLE = """
import sys, urllib.request
import segmentlog
from segmentlog.http.serving import HttpServer
with segmentlog.open(sys.argv[1]) as store, HttpServer(store, "127.0.0.1", 0) as server:
    print(urllib.request.urlopen(f"{server.url}/topics/t", timeout=30).status)
    print(urllib.request.urlopen(f"{server.url}/topics/t/partitions/0/records?offset=0", timeout=30).read().decode())
"""


def test_the_http_interface_serves_it(store: Path) -> None:
    """It works as usual, after one warning."""
    with unwritable(store):
        done = run("-c", _CONSOLE, str(store))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("200\n")
    assert "t2" in done.stdout or "dDI=" in done.stdout
    assert done.stderr.count("opened read-only, as user") == 1


@pytest.mark.parametrize("what", ["t", "t/0", "t/0/state"])
@pytest.mark.parametrize(
    "arguments", [("delete", "t", "--yes"), ("rename", "t", "v"), ("alter", "t", "-c", "retention.ms=1d")], ids=str
)
def test_a_change_of_a_topic_of_another_user_is_refused_whole(
    store: Path, what: str, arguments: tuple[str, ...]
) -> None:
    """The user owns the store's folder, and so may rename the topic. The error names the file, and nothing changed."""
    before = sorted(store.rglob("*"))
    with unwritable(store / what):
        status, _, err = command(store, *arguments)
    assert status == 1
    words = " ".join(err.split())
    assert f"{store}/t: cannot {arguments[0]} the topic, as user " in words
    assert f"may not write {store}/{what} (owner " in words
    assert "nothing was changed; correct the permissions" in words
    assert sorted(store.rglob("*")) == before
    with segmentlog.open(store, background=False) as opened:
        assert opened.topic("t").config.retention_ms == 7 * 86_400_000
        assert opened.topic("t").partition(0).append([b"next"]) == 3
