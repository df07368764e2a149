"""Shipping from real processes to real object stores: produce, kill -9, restore, compare, verify, take over, continue.

SEGMENTLOG_S3_ROUNDS lives of a process that ships, on each object store
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from objects.buckets import SERVERS, disconnected, served
from objects.s3_servers import BUCKET
from objects.ship_process import PARTITIONS
from seeds import seeds, share

from segmentlog.inspection.store_inspection import inspect_store
from segmentlog.objects.bucket.base import Bucket
from segmentlog.objects.bucket.url import open_bucket
from segmentlog.objects.manifest.garbage_collection import verify
from segmentlog.objects.restore.restore import restore
from segmentlog.objects.takeover import take_over
from segmentlog.store import LogStore

ROUNDS = int(os.environ.get("SEGMENTLOG_S3_ROUNDS", "20"))
WAIT_S = 120.0
_PROCESS = Path(__file__).with_name("ship_process.py")

Records = dict[tuple[int, int], str]
"""Values by partition and offset."""


class Place(NamedTuple):
    """Where it is shipped to, and what the processes have to know."""

    kind: str
    url: str
    environment: dict[str, str]


@pytest.fixture(scope="module", params=["folder", *SERVERS])
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """Provide an object store of one kind."""
    folder = tmp_path_factory.mktemp("objects")
    if request.param == "folder":
        yield Place("folder", f"file://{folder}/place", {})
        return
    with served(request.param, folder) as server, pytest.MonkeyPatch.context() as monkeypatch:
        environment = server.environment | {"AWS_POOL_MAX_IDLE_PER_HOST": "0"}
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        yield Place(request.param, f"s3://{BUCKET}/place", environment)


class Life:
    """A process that ships, until `kill`."""

    def __init__(self, folder: Path, url: str, seed: int, name: str) -> None:
        command = [sys.executable, str(_PROCESS), str(folder), url, str(seed), name]
        # Without a buffer: `communicate` would not see lines in it.
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0)
        self._heard: list[Any] = []

    def said_first(self) -> Any:
        """Return the first thing that it says."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, self._process.communicate(timeout=WAIT_S)[1]
        return json.loads(line)

    def wait_shipped(self) -> None:
        """Wait until the process has reported a shipped append."""
        while not self._heard or self._heard[-1][0] != "shipped":
            self._heard.append(self.said_first())

    def kill(self) -> list[Any]:
        """Kill the process like `kill -9`, and return its lines. It must not have ended by itself."""
        assert self._process.poll() is None, self._process.communicate()
        self._process.kill()
        return self._heard + _said(self._process.communicate(timeout=WAIT_S)[0])

    def end(self) -> list[Any]:
        """Wait until the process ends by itself, and return its lines."""
        try:
            out, err = self._process.communicate(timeout=WAIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise AssertionError(f"it goes on: {self._process.communicate()}") from None
        return [*self._heard, *_said(out), self._process.returncode, err.decode()]


def _said(text: bytes) -> list[Any]:
    """Return the complete lines; the last one may be cut by a kill."""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith(b"\n")]


class History:
    """All records that any process read or appended, under any owner."""

    def __init__(self) -> None:
        self.seen: Records = {}
        self.shipped: Records = {}

    def note(self, said: list[Any]) -> None:
        """Note the appends that a process reported."""
        for ack, partition, offset, values in said:
            records = {(partition, offset + at): value for at, value in enumerate(values)}
            self.note_records(records)
            if ack == "shipped":
                self.shipped |= records

    def note_records(self, records: Records) -> None:
        """Note records that a process read or appended: an offset names one record in all lives."""
        twice = {where: (self.seen[where][:60], value[:60]) for where, value in records.items()
                 if self.seen.setdefault(where, value) != value}  # fmt: skip
        assert not twice


def records_of(folder: Path) -> Records:
    """Return the records of a store."""
    with LogStore(folder, background=False) as store:
        if "t" not in store.topics():
            return {}
        return {
            (log.number, record.offset): (record.value or b"").decode()
            for log in store.topic("t").partitions() for batch in log.read(log.log_start_offset) for record in batch
        }  # fmt: skip


def check_restore(bucket: Bucket, folder: Path, history: History, owner: Path) -> None:
    """Check that a restore is intact, has all shipped records, and only records of the owner."""
    restore(bucket, str(folder))
    assert not [found for found in inspect_store(str(folder)) if found.severity == "damage"]
    assert not verify(bucket).problems
    restored, theirs = records_of(folder), records_of(owner)
    history.note_records(restored)
    missing = {where: value[:60] for where, value in history.shipped.items() if restored.get(where) != value}
    assert not missing
    others = {where: value[:60] for where, value in restored.items() if theirs.get(where) != value}
    assert not others
    for partition in range(PARTITIONS):  # up to its end, the restore has all records of the owner
        ends = max((offset for number, offset in restored if number == partition), default=-1)
        wanted = {where for where in theirs if where[0] == partition and where[1] <= ends}
        assert wanted == {where for where in restored if where[0] == partition}


@pytest.mark.long
@pytest.mark.parametrize("seed", seeds("real stores"))
def test_a_shipper_that_is_killed_loses_nothing_that_was_shipped(tmp_path: Path, place: Place, seed: int) -> None:
    """Killed at any moment; then a successor on the same machine or another machine continues."""
    rng, history = random.Random(f"{seed}/{place.kind}"), History()
    url = f"{place.url}/{seed}"
    owner, shipped_lives = tmp_path / "owner-0", 0
    with disconnected():
        bucket = open_bucket(url)
        rounds = share(ROUNDS, "real stores")
        for number in range(rounds):
            life = Life(owner, url, seed, f"{number}")
            assert life.said_first() == "open"
            if number == rounds - 1 and not shipped_lives:  # all were killed before that
                life.wait_shipped()
            time.sleep(rng.choice((0, 0.01, 0.1, 0.5)) * rng.random() + 0.05)
            new = tmp_path / f"owner-{number + 1}"
            what = rng.choice(("goes on", "another goes on", "another goes on while it lives"))
            if what == "another goes on while it lives" and list(bucket.list("manifest.json")):
                shipped_lives += _take_over(bucket, life, owner, new, history)
                owner = new
                continue
            said = life.kill()
            history.note(said)
            shipped_lives += any(one[0] == "shipped" for one in said)
            if not list(bucket.list("manifest.json")):
                continue  # killed before it had put anything
            check_restore(bucket, tmp_path / f"restored-{number}", history, owner)
            shutil.rmtree(tmp_path / f"restored-{number}")
            if what == "another goes on":
                _take_over(bucket, None, owner, new, history, partial(Life, owner, url, seed, f"zombie {number}"))
                owner = new
        del bucket
    assert shipped_lives, "too slow to have shipped anything"


def _take_over(
    bucket: Bucket, life: Life | None, old: Path, new: Path, history: History, zombie: Callable[[], Life] | None = None
) -> bool:
    """Take over on another machine: the old one is fenced, running or restarted, and keeps its unshipped records.

    Return whether the old one had shipped anything.
    """
    take_over(bucket, str(new))
    life = zombie() if life is None and zombie is not None else life
    assert life is not None
    *said, status, errors = life.end()
    said = [one for one in said if one != "open"]
    assert said, errors
    assert (said.pop(), status) == ("fenced", 3), errors
    has_shipped = any(one[0] == "shipped" for one in said)
    assert not (zombie and has_shipped)
    history.note(said)
    taken = records_of(new)
    history.note_records(taken)
    assert taken.items() <= records_of(old).items()
    missing = {where: value[:60] for where, value in history.shipped.items() if taken.get(where) != value}
    assert not missing
    shutil.rmtree(old)
    return has_shipped


def test_a_demonstration_of_the_checks() -> None:
    """Each check fails if its condition is broken."""
    history = History()
    history.note([["shipped", 0, 5, ["a", "b"]]])
    with pytest.raises(AssertionError):
        history.note([["written", 0, 6, ["c"]]])
    with pytest.raises(AssertionError):
        history.note_records({(0, 5): "b"})
