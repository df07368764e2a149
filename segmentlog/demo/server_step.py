"""The step with a server: a Kafka client writes, a local reader follows, and the server is killed in between."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import segmentlog
from segmentlog.demo.flights import DemoFailed, Say, check

_TOPIC = "departures"
_COUNT = 20_000
_TOGETHER, _PAUSE_S = 200, 0.01
"""Pace of the client, so that requests are in flight when the server is killed."""
_STARTED_S = 20.0
_DELIVERED_S = 30.0


class _Server:
    """Process of ``segmentlog serve``, which listens on the same port after a restart."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.address = "127.0.0.1:0"
        self.start()

    def start(self) -> float:
        """Start the server, and wait until it listens; return the seconds that took."""
        started = time.perf_counter()
        command = [sys.executable, "-m", "segmentlog", "--dir", str(self._folder), "serve", "--workers", "1"]
        # A session of its own, so that it can be killed with its worker, as if the machine died.
        self._process = subprocess.Popen(
            [*command, "--listen", self.address], stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        assert self._process.stderr is not None
        too_late = threading.Timer(_STARTED_S, self._process.kill)
        too_late.start()
        try:
            output = []
            for line in self._process.stderr:
                output.append(line)
                if " listening on " in line:
                    self.address = line.rpartition(" listening on ")[2].split()[0].rstrip(",")
                    return time.perf_counter() - started
        finally:
            too_late.cancel()
        raise DemoFailed(f"segmentlog serve did not start: {''.join(output).strip()}")

    def kill(self) -> None:
        """Kill all processes of the server with ``kill -9``."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()

    def stop(self) -> None:
        """Stop the server as Ctrl-C does."""
        if self._process.poll() is None:
            self._process.terminate()
            self._process.communicate()


class _Client:
    """A producer of confluent-kafka in a thread, with ``acks=all``, and the offsets that the server acknowledged."""

    def __init__(self, address: str, values: Sequence[bytes]) -> None:
        from confluent_kafka import Producer

        self._values = values
        self.acknowledged: dict[int, bytes] = {}
        self.refused: list[str] = []
        self._producer = Producer(
            {
                "bootstrap.servers": address, "acks": "all", "enable.idempotence": True, "linger.ms": 5,
                "reconnect.backoff.ms": 20, "reconnect.backoff.max.ms": 100, "retry.backoff.ms": 20, "log_level": 0,
                "error_cb": lambda error: None,  # it retries by itself
            }
        )  # fmt: skip
        self._thread = threading.Thread(target=self._run, name="demo-producer")
        self._thread.start()

    def _run(self) -> None:
        for number, value in enumerate(self._values):
            self._producer.produce(_TOPIC, value, on_delivery=self._on_delivery)
            if number % _TOGETHER == _TOGETHER - 1:
                self._producer.poll(0)
                time.sleep(_PAUSE_S)
        self._producer.flush(_DELIVERED_S)
        del self._producer  # which closes it

    def _on_delivery(self, error: Any, message: Any) -> None:
        if error is not None:
            self.refused.append(str(error))
        else:
            self.acknowledged[message.offset()] = message.value()

    def join(self) -> None:
        """Wait until every record was acknowledged or failed."""
        self._thread.join()


def serve(folder: Path, values: Sequence[bytes], say: Say) -> None:
    """Run the step. Needs confluent-kafka; without it, the step is skipped. Raises `DemoFailed`."""
    say(
        "10. Serving the store to Kafka clients: a client writes, this process reads, and the server is killed in"
        " between"
    )
    if importlib.util.find_spec("confluent_kafka") is None:
        say("   skipped: it needs the package confluent-kafka: pip install '.[demo]' in a clone of segmentlog")
        return
    started = time.perf_counter()
    values = values[:_COUNT]
    with segmentlog.open(folder) as store:
        store.create_topic(_TOPIC)
    server = _Server(folder)
    found: dict[int, bytes | None] = {}
    again_s = 0.0
    written = 0
    try:
        client = _Client(server.address, values)
        try:
            with segmentlog.open(folder) as store, store.consumer(_TOPIC, follow=True) as reader:
                too_late = threading.Timer(2 * _DELIVERED_S, reader.wakeup)
                too_late.start()
                for record in reader:
                    found[record.offset] = record.value
                    if not again_s and len(found) >= len(values) // 3:
                        server.kill()
                        written = len(client.acknowledged)
                        again_s = server.start()
                    if len(found) == len(values):
                        break
                too_late.cancel()
        finally:
            client.join()
    finally:
        server.stop()
    check(bool(again_s) and not client.refused, f"no record of the client failed: {client.refused[:1]}")
    check(len(client.acknowledged) == len(values), "every record was acknowledged in the end")
    check(client.acknowledged == found, "the reader has the acknowledged records, at the same offsets")
    check([found[offset] for offset in sorted(found)] == list(values), "each record exists once, in order")
    say(f"   killed with {written:,} records acknowledged; served again {again_s:.2f} s after the restart")
    say(
        f"   all {len(values):,} acknowledged records are in the log, each once, in order:"
        f" {time.perf_counter() - started:.1f} s"
    )
