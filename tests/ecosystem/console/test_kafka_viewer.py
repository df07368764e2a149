"""kafka-viewer, a web page that shows topics and records, at `segmentlog serve`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from server.clients.fetching import Missing, fetched
from server.clients.served import Served

from segmentlog.store import LogStore

pytestmark = pytest.mark.ecosystem

_HERE = Path(__file__).parent


def python_with_viewer() -> Path:
    """Return the Python of an environment with Kafka Viewer."""
    needed = _HERE / "requirements.txt"

    def make(folder: Path) -> None:
        for command in (
            [sys.executable, "-m", "venv", str(folder / "venv")],
            [str(folder / "venv/bin/python"), "-m", "pip", "install", "--quiet", "-r", str(needed)],
        ):
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)

    try:
        return fetched("kafka-viewer", [needed], make) / "venv/bin/python"
    except Missing as error:
        if "CI" in os.environ:
            raise
        pytest.skip(str(error))


def page(served: Served, topic: str, folder: Path) -> dict[str, Any]:
    """Return the viewer's page of a topic."""
    config = folder / "kafka.properties"
    config.write_text(f"kafka.bootstrap.servers={served.address}\n")
    without = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(python_with_viewer()), str(_HERE / "page.py"), str(config), topic]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, env=without)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def test_its_page_shows_topics_and_records(store: LogStore, served: Served, tmp_path: Path) -> None:
    """The page has all topics and records with their positions, also of a topic that the library wrote."""
    store.create_topic("other")
    store.create_topic("clicks", partitions=2)
    for log in store.topic("clicks").partitions():
        log.append([b"click %d/%d" % (log.number, number) for number in range(5)], keys=[b"k"] * 5)
    shown = page(served, "clicks", tmp_path)
    assert shown["errors"] == []
    assert shown["topics"] == ["clicks", "other"]
    assert (shown["metrics"]["Total Records"], shown["metrics"]["Partitions"]) == ("10", "2")
    assert sorted(shown["values"]) == [f"click {part}/{number}" for part in (0, 1) for number in range(5)]
    places = sorted(place.split(" ", 1)[1] for place in shown["places"])
    assert places == [f"partition={part} offset={number}" for part in (0, 1) for number in range(5)]
