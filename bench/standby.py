"""How fast a standby takes over, and what it costs: ``python -m bench.standby``.

failover, defaults   from kill -9 of all processes of the owner to the first record, produced after it, that a client
                     with both bootstrap addresses has acknowledged
failover, short      the same with --standby-silence 2s, --standby-refused 500ms and --ship-interval 200ms
catch-up             a new standby downloads the store, in MB/s of log
appends              of a shipped store whose standby runs on the same machine, against one without a standby

and the requests to the object store in an hour, with what they cost at AWS: of an owner to which one batch is appended
in each cycle, of an owner that is idle, and of the standby of each. They are counted over some cycles of a folder.

The owner and the standby run on this machine, and share its disk and its cores: two machines are faster.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import segmentlog
from bench import machine
from bench.arguments import existing_folder, one_or_more
from bench.measure import Row, RowResult, Side, open_store, print_table
from bench.results import save
from bench.workload import json_records
from segmentlog.clock import Clock
from segmentlog.format.server_file import ServerFile, ServerNode, encode_server_file
from segmentlog.objects.bucket.url import open_bucket
from segmentlog.objects.replica.replica import Replica
from segmentlog.objects.standby.standby import Standby
from segmentlog.objects.standby.status import read_standby_status
from segmentlog.objects.upload.shipper import Shipper
from segmentlog.policy.takeover_decision import ProbeResult, TakeoverSettings
from segmentlog.storage.fs import FileSystem
from segmentlog.store import LogStore
from segmentlog.testing.ports import free_ports

_BATCH = 1000
_SLICE_S = 2.0
_SHORT = ("--standby-silence", "2s", "--standby-refused", "500ms", "--ship-interval", "200ms")
_WAIT_S = 120.0
_CYCLES = 40
_PRICES = {"put": 0.005e-3, "get": 0.0004e-3, "list": 0.005e-3}
"""Dollars for a request to S3 Standard in us-east-1, November 2026: PUT and LIST 0.005 for 1,000, GET 0.0004."""


class Serving:
    """A ``segmentlog serve --standby`` on this machine."""

    def __init__(self, path: Path, url: str, *arguments: str) -> None:
        self._path = str(path)
        self.port = free_ports(2)
        self.address = f"127.0.0.1:{self.port}"
        command = [
            sys.executable, "-m", "segmentlog", "--dir", str(path), "serve", "--listen", self.address,
            "--workers", "1", "--standby", url, *arguments,
        ]  # fmt: skip
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self._lines: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stderr is not None
        self._lines.extend(self._process.stderr)

    def wait_for(self, text: str) -> None:
        """Wait until the server has printed a line with this text."""
        ends_s = time.monotonic() + _WAIT_S
        while not any(text in line for line in list(self._lines)):
            if time.monotonic() > ends_s:
                raise TimeoutError(f"{text!r} was not printed: {''.join(self._lines)}")
            time.sleep(0.01)

    def wait_for_answer(self) -> None:
        """Wait until the owner has answered this standby: before, it does not take over."""
        ends_s = time.monotonic() + _WAIT_S
        while True:
            status = read_standby_status(FileSystem(), self._path)
            if status is not None and status.reason == "the owner answers":
                return
            if time.monotonic() > ends_s:
                raise TimeoutError(f"the owner has not answered: {status}")
            time.sleep(0.01)

    def kill(self) -> None:
        """Kill -9 of all processes."""
        pid = self._process.pid
        self._process.send_signal(signal.SIGSTOP)
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        for process in (pid, *map(int, children)):
            os.kill(process, signal.SIGKILL)
        self._process.wait()

    def stop(self) -> None:
        """SIGTERM."""
        self._process.terminate()
        self._process.wait()


def _failover(url: str, folder: Path, scale: float, *, arguments: tuple[str, ...]) -> tuple[Side, None]:
    import confluent_kafka

    owner = Serving(folder / "m0", url, "--ship", url, *arguments)
    owner.wait_for("as the owner")
    machines = [owner]

    def ours() -> float:
        standby = Serving(folder / f"m{len(machines)}", url, *arguments)
        machines.append(standby)
        standby.wait_for("as a standby of")
        standby.wait_for_answer()
        settings: dict[str, Any] = {
            "bootstrap.servers": ",".join(one.address for one in machines[-2:]), "linger.ms": 0,
            "reconnect.backoff.max.ms": 200, "retry.backoff.ms": 50, "topic.metadata.refresh.fast.interval.ms": 50,
            "log_level": 0,
        }  # fmt: skip
        producer = confluent_kafka.Producer(settings)
        producer.produce("t", b"before")
        if producer.flush(_WAIT_S):
            raise TimeoutError("the owner has acknowledged nothing")
        machines[-2].kill()
        began_s = time.perf_counter()
        producer.produce("t", b"after")
        if producer.flush(_WAIT_S):
            raise TimeoutError("the standby has acknowledged nothing")
        return time.perf_counter() - began_s

    _to_stop.append(lambda: machines[-1].stop())
    return ours, None


_to_stop: list[Callable[[], None]] = []


def _catch_up(size_bytes: int, url: str, folder: Path, scale: float) -> tuple[Side, None]:
    rng = random.Random(1)
    values = [rng.randbytes(1000) for _ in range(_BATCH)]
    with segmentlog.open(folder / "source", background=False) as store:
        logs = store.create_topic("t", 4, fsync="never", compression_type="none")
        for number in range(max(int(size_bytes * scale) // (1000 * _BATCH), 1)):
            logs.partition(number % 4).append(values)
        store.ship(url)
    megabytes = sum(path.stat().st_size for path in (folder / "source").rglob("*.log")) / 1e6

    def ours() -> float:
        path = folder / "replica"
        started = time.perf_counter()
        replica = Replica(url, path, threads=False)
        try:
            replica.refresh()
            return megabytes / (time.perf_counter() - started)
        finally:
            replica.close()
            shutil.rmtree(path)

    return ours, None


def _appends(url: str, folder: Path, scale: float) -> tuple[Side, Side]:
    watched = open_store(folder / "watched", ship=f"{url}/watched")
    alone = open_store(folder / "alone", ship=f"{url}/alone")
    batches = json_records(8, _BATCH).values
    for store in (watched, alone):
        store.create_topic("t").partition(0).append(batches[0], ack="shipped")
    standby = Serving(folder / "standby", f"{url}/watched")
    _to_stop.append(standby.stop)
    standby.wait_for("as a standby of")

    def rate(store: segmentlog.LogStore) -> float:
        log = store.topic("t").partition(0)
        started, records = time.perf_counter(), 0
        while (elapsed_s := time.perf_counter() - started) < _SLICE_S * scale:
            log.append(batches[records // _BATCH % len(batches)])
            records += _BATCH
        return records / elapsed_s

    return partial(rate, watched), partial(rate, alone)


# ---------------------------------------------------------------- requests


class _Counting:
    """A bucket that counts its requests, by their price."""

    _KINDS: ClassVar = {"get": "get", "get_range": "get", "put": "put", "compare_and_swap": "put", "list": "list"}

    def __init__(self, bucket: Any) -> None:
        self._bucket = bucket
        self.counts: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._bucket, name)
        if name not in self._KINDS:
            return value

        def counted(*args: Any, **options: Any) -> Any:
            self.counts[self._KINDS[name]] += 1
            return value(*args, **options)

        return counted


def requests_of(folder: Path, interval_ms: int = 1000) -> list[dict[str, Any]]:
    """Return the requests in an hour and their price: of owner and standby, under load and idle."""
    plain = open_bucket(f"file://{folder}/objects")
    owner_bucket, standby_bucket = _Counting(plain), _Counting(plain)
    node = ServerNode(1, "127.0.0.1", 1)
    found = []
    with LogStore(folder / "owner", background=False) as store:
        (folder / "owner" / "@server").write_bytes(encode_server_file(ServerFile(1, "x", (node,))))
        log = store.create_topic("t").partition(0)
        shipper = Shipper(store._topics, owner_bucket, parallel=0)
        shipper.heartbeat_ms = TakeoverSettings().heartbeat_ms
        shipper.ship()
        standby = Standby(
            plain.url, str(folder / "standby"), probe=lambda manifest: [ProbeResult.ALIVE], fence_store=lambda: None,
            bucket=standby_bucket, parallel=0,
        )  # fmt: skip
        standby.run_cycle()
        values = json_records(1, _BATCH).values[0]
        now_ms = Clock().now_ms()  # the cycles do not wait
        for is_loaded in (True, False):
            owner_bucket.counts.clear()
            standby_bucket.counts.clear()
            for _ in range(_CYCLES):
                if is_loaded:
                    log.append(values, ack="durable")
                now_ms += interval_ms
                shipper.run_cycle(now_ms)
                standby.run_cycle()
            per_hour = 3_600_000 / interval_ms / _CYCLES
            for who, bucket in (("owner", owner_bucket), ("standby", standby_bucket)):
                counts = {kind: round(count * per_hour) for kind, count in sorted(bucket.counts.items())}
                dollars = sum(_PRICES[kind] * count for kind, count in counts.items())
                found.append({"who": who, "load": is_loaded, "per_hour": counts, "dollars_per_month": dollars * 730})
        standby.close()
        shipper.close()
    return found


def rows(url: str, size_bytes: int) -> list[Row]:
    """All of them, in the order of the table."""
    return [
        Row("failover, defaults", "s", 12.0, False, partial(_failover, f"{url}/defaults", arguments=())),
        Row("failover, short", "s", 3.0, False, partial(_failover, f"{url}/short", arguments=_SHORT)),
        Row("catch-up", "MB/s", 100.0, True, partial(_catch_up, size_bytes, f"{url}/catch-up")),
        Row("appends with a standby", "records/s", 0.95, True, partial(_appends, url)),
    ]


def main() -> int:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=one_or_more, default=1000, help="size of the store that a standby downloads")
    parser.add_argument("--rounds", type=one_or_more, default=3, help="rounds of each row (default 3)")
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--scale", type=float, default=1.0, help="more or less work a round (default 1.0)")
    parser.add_argument("--dir", type=existing_folder, help="folder on the disk to measure (default: a temporary one)")
    parser.add_argument("--out", type=Path, help="folder to write standby.json to (default: none is written)")
    options = parser.parse_args()
    started = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="segmentlog-standby-", dir=options.dir))
    results: list[RowResult] = []
    try:
        about = machine.describe(folder) if options.out else None
        for row in rows(f"file://{folder}/objects", options.mb * 1_000_000):
            if options.only in row.name:
                print(f"{row.name} ...", file=sys.stderr, end="\r", flush=True)
                try:
                    results.append(row.measure(folder / "row", options.rounds, options.scale))
                finally:
                    while _to_stop:
                        _to_stop.pop()()
                shutil.rmtree(folder / "row", ignore_errors=True)
        requests = requests_of(folder / "requests") if options.only in "requests" else []
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if about is not None:
        settings = {"rounds": options.rounds, "mb": options.mb, "scale": options.scale, "requests": requests}
        save(options.out, "standby", about, time.monotonic() - started, settings, results)
    print_table(results, "a standby")
    for one in requests:
        counts = ", ".join(f"{count:,} {kind}" for kind, count in one["per_hour"].items()) or "none"
        load = "one batch each second" if one["load"] else "idle"
        print(f"{one['who']}, {load}: {counts} requests in an hour; {one['dollars_per_month']:.2f} dollars a month")
    return 0


if __name__ == "__main__":
    sys.exit(main())
