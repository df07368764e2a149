"""kcat, with the librdkafka that Debian has: 2.0.2, of 2023."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Sequence
from typing import Any

from server.clients.driver import HEARTBEAT_MS, SESSION_TIMEOUT_MS, WAIT_S, Driver, Got, Sent
from server.clients.fetching import Missing

if shutil.which("kcat") is None:
    raise Missing("it is not installed: apt-get install kcat")


class KcatDriver(Driver):
    """kcat, a program for the shell: it cannot set timestamps, or write records that are not lines."""

    name = "kcat"
    sets_timestamps = takes_any_bytes = has_admin = tells_offsets = False

    def create(self, topic: str, partitions: int, config: dict[str, str]) -> None:
        raise NotImplementedError

    def write(
        self, topic: str, records: Sequence[Sent], *, codec: str = "none", acks: str = "all", idempotent: bool = False
    ) -> list[tuple[int, int]]:
        for one in records:  # a run for each record: kcat takes headers and the partition once per run
            settings = ["-t", topic, "-p", str(one.partition), "-z", codec, "-X", f"acks={acks}", "-Z", "-K", ":"]
            settings += ["-X", f"enable.idempotence={str(idempotent).lower()}"]
            for name, value in one.headers:
                settings += ["-H", name if value is None else f"{name}={value.decode()}"]
            self._run("-P", *settings, given=f"{(one.key or b'').decode()}:{(one.value or b'').decode()}\n")
        return [(one.partition, -1) for one in records]

    def read(self, topic: str, count: int, *, committed: bool = False) -> list[Got]:
        level = "read_committed" if committed else "read_uncommitted"
        return _parsed(self._run("-C", "-t", topic, "-o", "beginning", "-e", "-J", "-X", f"isolation.level={level}"))

    def consume(self, group: str, topic: str, count: int) -> list[Got]:
        return _parsed(self._run("-J", "-c", str(count), *self._of_group(group), topic))

    def member(self, group: str, topic: str) -> list[str]:
        commits = ["-X", "auto.commit.interval.ms=100", "-u", "-f", "%p %o %s\\n"]
        return ["kcat", "-q", "-b", self.bootstrap, *commits, *self._of_group(group), topic]

    def at_time(self, topic: str, partition: int, timestamp: int) -> int:
        line = self._run("-Q", "-t", f"{topic}:{partition}:{timestamp}")
        return int(line.split()[-1])

    def _of_group(self, group: str) -> list[str]:
        return [
            "-X", "auto.offset.reset=earliest", "-X", f"session.timeout.ms={SESSION_TIMEOUT_MS}",
            "-X", f"heartbeat.interval.ms={HEARTBEAT_MS}", "-G", group,
        ]  # fmt: skip

    def _run(self, *arguments: str, given: str | None = None) -> str:
        done = subprocess.run(
            ["kcat", "-b", self.bootstrap, *arguments],
            input=given, stdin=None if given is not None else subprocess.DEVNULL,
            capture_output=True, text=True, timeout=WAIT_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-400:]
        return done.stdout


def _parsed(lines: str) -> list[Got]:
    return [_got(json.loads(line)) for line in lines.splitlines() if line.startswith("{")]


def _got(said: dict[str, Any]) -> Got:
    given = said.get("headers", [])
    headers = zip(given[::2], given[1::2], strict=True)
    return Got(
        said["partition"], said["offset"], _bytes(said["key"]), _bytes(said["payload"]), said["ts"],
        tuple((name, _bytes(value)) for name, value in headers),
    )  # fmt: skip


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else text.encode()
