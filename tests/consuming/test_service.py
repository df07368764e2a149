"""docs/service.md: SIGTERM stops the sink with everything written out and committed; forked workers can append."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import wait_until

import segmentlog

ROOT = Path(__file__).parents[2]
WITHIN_S = 60.0

PROGRAM = """
import sys
import segmentlog
{recipe}
def write(rows):
    with open(sys.argv[2], "ab") as file:
        file.write(b"".join(row.value + b"\\n" for row in rows))
run_sink(sys.argv[1], write)
"""


def snippet(text: str) -> str:
    """Return the Python block of the page that has this text in it."""
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs/service.md").read_text(), re.MULTILINE | re.DOTALL)
    (found,) = [block for block in blocks if text in block]
    return found


@contextlib.contextmanager
def started(folder: Path, found: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Yield the recipe as a program, which writes values to a file; killed at the end if it still runs."""
    recipe = snippet("def run_sink")
    program = PROGRAM.format(recipe=recipe)
    process = subprocess.Popen([sys.executable, "-c", program, str(folder), str(found)])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def wait_until_joined(store: segmentlog.LogStore) -> None:
    """Wait until the group has the sink as a member that reads all four partitions."""
    ends_s = time.monotonic() + WITHIN_S
    while True:
        partitions = store.groups.describe("sink").partitions if "sink" in store.groups.names() else ()
        if len(partitions) == 4 and all(one.member for one in partitions):
            return
        assert time.monotonic() < ends_s, "it does not join"
        time.sleep(0.01)


def wait_for_commits(store: segmentlog.LogStore, count: int) -> None:
    """Wait until the group has committed ``count`` records."""
    wait_until(
        lambda: (
            not (sum(one.committed.offset for one in store.groups.describe("sink").partitions if one.committed) < count)
        ),
        "nothing is committed",
    )


@pytest.mark.parametrize("waits", [True, False])
def test_sigterm_stops_a_sink_that_loses_and_repeats_nothing(tmp_path: Path, waits: bool) -> None:
    """Stopped while it waits for records with some gathered, or in the middle of a backlog; then started again."""
    found = tmp_path / "found"
    values = [b"%d" % number for number in range(12_000)]
    with segmentlog.open(tmp_path / "store", background=False) as store:
        topic = store.create_topic("events", partitions=4, fsync="never")
        with started(tmp_path / "store", found) as first:
            wait_until_joined(store)
            for number in range(4):
                topic.partition(number).append(values[number::4][: 25 if waits else None])
            if not waits:
                wait_for_commits(store, 1)
            first.send_signal(signal.SIGTERM)
            assert first.wait(WITHIN_S) == 0
        if waits:
            for number in range(4):
                topic.partition(number).append(values[number::4][25:])
        with started(tmp_path / "store", found) as second:
            wait_until_joined(store)  # before that a signal may find no handler
            wait_for_commits(store, len(values))
            second.send_signal(signal.SIGTERM)
            assert second.wait(WITHIN_S) == 0
        assert sorted(map(int, found.read_bytes().split())) == list(range(len(values)))


WORKERS = """
import os
import sys
import segmentlog
{app}
def get(path):
    return b"".join(app({{"PATH_INFO": path}}, lambda status, headers: None))
for number in range(3):
    if not os.fork():
        for count in range(5):
            get(f"/{{number}}/{{count}}")
        sys.exit(0)
for _ in range(3):
    assert os.wait()[1] == 0
get("/parent")
"""


def test_forked_workers_append_each_record_once(tmp_path: Path) -> None:
    """Fork after store and producer of the web service are created, as under `gunicorn --preload`."""
    program = WORKERS.format(app=snippet("def app"))
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environment, timeout=WITHIN_S)
    assert done.returncode == 0
    with segmentlog.open(tmp_path / "web") as store, store.consumer("hits") as consumer:
        paths = sorted(record.value for record in consumer)
    assert paths == sorted([b"/parent", *(b"/%d/%d" % (number, count) for number in range(3) for count in range(5))])
