"""The design that segmentlog comes from: pages of records in Redis (kafkaesque, 2015)."""

from __future__ import annotations

import contextlib
import importlib.metadata
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.kafkaesque import Fsync, KafkaesqueTopic, RedisServer, RedisUnavailable, check_available
from bench.systems.base import Sync, System, Unavailable, count_all, packed, unpack

_POLICY: dict[Sync, Fsync] = {"never": "no", "second": "everysec", "batch": "always"}
_TOPIC = "log"
_PULL_RECORDS = 4096
"""So many a call when all of it is read: larger answers are no faster, and hold up every other client."""


class RedisPages(System):
    """A redis-server of its own with nothing but an append-only file. What is in the log is in its memory, too."""

    name = "Redis pages"
    about = (
        "kafkaesque's lists of 65,536 records and its Lua scripts, over a UNIX socket, with hiredis;"
        " appendfsync no, everysec or always"
    )

    @classmethod
    def version(cls) -> str:
        try:
            check_available()
        except RedisUnavailable as error:
            raise Unavailable(str(error)) from None
        said = subprocess.run(["redis-server", "--version"], capture_output=True, text=True, check=True).stdout
        found = re.search(r"v=(\S+)", said)
        server = found[1] if found else said.strip()
        client = f"redis-py {importlib.metadata.version('redis')}"
        # redis-py parses replies with hiredis by itself where that is installed.
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            client += f", hiredis {importlib.metadata.version('hiredis')}"
        return f"{server} ({client})"

    def open(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        # Not in the folder of the log: the path of a socket has 107 bytes at most.
        self._socket_folder = tempfile.TemporaryDirectory(prefix="segmentlog-redis-")
        socket_path = str(Path(self._socket_folder.name) / "redis.sock")
        self._writers: list[Any] = []
        self._server = RedisServer(_POLICY[self.sync], folder=self.folder, socket_path=socket_path)
        try:
            self._server.__enter__()
        except BaseException:
            self._socket_folder.cleanup()
            raise
        self._topic = KafkaesqueTopic(self._server.client(), _TOPIC)
        with contextlib.suppress(ValueError):  # it is there already
            self._topic.create()

    def close(self) -> None:
        for client in self._writers:
            client.close()
        if self._server.server_id() is not None:
            self._server.wait_written()
        self.kill()

    def append(self, values: Sequence[bytes], keys: Sequence[bytes] | None = None) -> None:
        self._topic.push(list(values) if keys is None else packed(values, keys))

    def writer(self) -> Callable[[bytes], object]:
        import redis

        client = redis.Redis.from_url(self._server.url)
        self._writers.append(client)
        push = KafkaesqueTopic(client, _TOPIC).push
        return lambda value: push([value])

    def scan_values(self) -> int:
        return count_all(self._entries())

    def scan_records(self) -> int:
        count = 0
        for offset, value in self._entries():
            record = unpack(value)
            _record = (offset, record.timestamp, record.key, record.value)
            count += 1
        return count

    def read(self, offset: int) -> bytes:
        [(found, value)] = self._topic.pull(offset, limit=1)
        assert found == offset
        return value

    def end(self) -> int:
        return len(self._topic)

    def compact(self) -> None:
        raise NotImplementedError("a record's offset is its place in a list: none can be taken out of the middle")

    def kill(self) -> None:
        self._server.kill()
        self._socket_folder.cleanup()

    def server_ids(self) -> list[int]:
        found = self._server.server_id()
        return [] if found is None else [found]

    def _entries(self) -> Iterator[tuple[int, bytes]]:
        offset = 0
        while entries := self._topic.pull(offset, _PULL_RECORDS):
            yield from entries
            offset = entries[-1][0] + 1
