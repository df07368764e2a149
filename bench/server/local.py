"""A local process that appends by the library, while there is no server, one that idles, and one that serves."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import segmentlog
from bench.server import load
from bench.server.batches import CLIENT_RECORDS, batch
from bench.server.brokers import OURS, OurBroker
from bench.server.producing import producer_lanes
from bench.server.rows import Compared, Figures, Once, Row, Side
from bench.server.wire import LEADER, new_topic

_TOPIC = "local"
_PIECES = 4
"""Of the time for one figure, each once without a server and once beside it: the disk is not the same for long."""


def rows() -> list[Row]:
    """Return the only one."""
    compared = (
        Compared("idle", "while the server idles, against none", "records/s", 0.98, to="none"),
        Compared("serving", "while it takes records of a client, against none", "records/s", to="none"),
    )
    return [Row("local", "appends of a local process", compared, _appends, start=None, systems=(OURS,))]


@contextmanager
def _appends(side: Side) -> Iterator[Once]:
    broker = side.new_broker()
    assert isinstance(broker, OurBroker)

    def once() -> Figures:
        found: dict[str, list[float]] = {"none": [], "idle": []}
        seconds = side.sizes.seconds / _PIECES
        for number in range(_PIECES):
            for what in ("none", "idle") if number % 2 else ("idle", "none"):
                if what == "idle":
                    broker.start()
                try:
                    found[what].append(_rate(broker.store, seconds))
                finally:
                    broker.stop()
        return {name: median(rates) for name, rates in found.items()} | {"serving": _while_it_serves(side, broker)}

    try:
        yield once
    finally:
        broker.kill()


def _while_it_serves(side: Side, broker: OurBroker) -> float:
    """Return the records a second that are appended while a client produces."""
    broker.start()
    try:
        with new_topic(broker.address, "served") as topic:
            lanes = producer_lanes(topic, batch(CLIENT_RECORDS), 4, 4, LEADER)
            serving = threading.Thread(target=load.run, args=(lanes, side.sizes.seconds + 0.5, 1 << 30))
            serving.start()
            rate = _rate(broker.store, side.sizes.seconds)
            serving.join()
            for lane in lanes:
                lane.close()
    finally:
        broker.stop()
    return rate


def _rate(store: Path, seconds: float) -> float:
    """Return the records a second of a process that only appends. Earlier writes are synced before."""
    os.sync()
    command = [sys.executable, "-m", "bench.server.local", str(store), str(seconds)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def _append(folder: str, seconds: float) -> float:
    import time

    from bench.server.batches import values

    many = list(values(1000))
    with segmentlog.open(folder, background=False) as store:
        if _TOPIC not in store.topics():
            store.create_topic(_TOPIC, fsync="never")
        log = store.topic(_TOPIC).partition(0)
        log.append(many)
        count, began_s = 0, time.perf_counter()
        while (now_s := time.perf_counter()) < began_s + seconds:
            log.append(many)
            count += len(many)
        log.trim(log.log_end_offset)
    return count / (now_s - began_s)


if __name__ == "__main__":
    print(_append(sys.argv[1], float(sys.argv[2])))
