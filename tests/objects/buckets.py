"""The object stores that tests are run on, each by its name."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from objects import s3_servers
from objects.s3_servers import S3Server
from server.clients.fetching import Missing

from segmentlog.errors import ObjectStoreError
from segmentlog.objects.bucket.base import Bucket, Data, ObjectInfo, ObjectMissing, PreconditionFailed
from segmentlog.objects.bucket.cloud_bucket import CloudBucket
from segmentlog.objects.bucket.local_bucket import LocalBucket

SERVERS = {"moto": s3_servers.moto, "versitygw": s3_servers.versitygw}
KINDS = ("folder", "memory", "obstore's memory", *SERVERS)

RUBBISH = f"tails/{10**6:020d}-0123456789ab"
"""The name of a tail that no manifest refers to."""

Maker = Callable[[], Bucket]
"""Makes a bucket at a place of its own, with nothing in it."""


class Memory:
    """A `Bucket` in memory, as simple as one can be."""

    def __init__(self) -> None:
        self.url = "memory://bucket"
        self._objects: dict[str, tuple[bytes, str]] = {}
        self._numbers = itertools.count()
        self._mutex = threading.Lock()

    def get(self, key: str) -> tuple[bytes, str]:
        try:
            return self._objects[key]
        except KeyError:
            raise ObjectMissing(self.url, key) from None

    def get_range(self, key: str, start: int, size_bytes: int) -> bytes:
        data = self.get(key)[0][start : start + size_bytes]
        if len(data) != size_bytes:
            raise ObjectStoreError(self.url, key, f"it ends {size_bytes - len(data)} bytes too early", False)
        return data

    def put(self, key: str, data: Data) -> None:
        self._objects[key] = bytes(data), str(next(self._numbers))

    def compare_and_swap(self, key: str, data: Data, tag: str | None) -> str:
        with self._mutex:
            if self.tag(key) != tag:
                raise PreconditionFailed(self.url, key)
            self.put(key, data)
            return self._objects[key][1]

    def tag(self, key: str) -> str | None:
        """Return the tag of an object."""
        return self._objects.get(key, (b"", None))[1]

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._objects.pop(key, None)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        for key, (data, _) in list(self._objects.items()):
            if key.startswith(prefix):
                yield ObjectInfo(key, len(data), int(time.time() * 1000))


@contextlib.contextmanager
def places(kind: str, folder: Path) -> Iterator[Maker]:
    """Yield a function that creates buckets of this kind. Without the server, skip the test, or fail it in CI."""
    numbers = itertools.count()
    if kind == "folder":
        yield lambda: LocalBucket(str(folder / f"place {next(numbers)}"))
    elif kind == "memory":
        yield Memory
    elif kind == "obstore's memory":
        yield lambda: CloudBucket("memory:///")
    else:
        with served(kind, folder) as server:
            yield lambda: cloud(server, f"place%20{next(numbers)}/a")


@contextlib.contextmanager
def served(kind: str, folder: Path) -> Iterator[S3Server]:
    """Yield an S3 server of that kind. If it is not available, skip the test; in CI, fail."""
    with contextlib.ExitStack() as stack:
        try:
            server = stack.enter_context(SERVERS[kind](folder))
        except Missing as error:
            if "CI" in os.environ:
                pytest.fail(f"{error}, and in CI it must be")
            pytest.skip(str(error))
        yield server


def cloud(server: S3Server, path: str = "place", **options: Any) -> CloudBucket:
    """Return a bucket on a server. It closes idle connections, because a test would leave them open."""
    client = server.options["client_options"] | {"pool_max_idle_per_host": "0"} | options.pop("client_options", {})
    return CloudBucket(f"s3://{s3_servers.BUCKET}/{path}", **(server.options | {"client_options": client} | options))


@contextlib.contextmanager
def disconnected() -> Iterator[None]:
    """Wait, at the end, until the threads of obstore have closed the connections that the body opened."""
    before = _sockets()
    yield
    ends_s = time.monotonic() + 10
    while _sockets() - before and time.monotonic() < ends_s:
        time.sleep(0.002)


def _sockets() -> set[str]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.add(os.readlink(f"/proc/self/fd/{name}"))
    return {target for target in found if target.startswith("socket:")}


def _start_obstore() -> None:
    """Have obstore start its threads, and open what they need: they stay for the life of the process.

    This module calls it when it is imported. A test that called it, or a fixture of it, would leave them behind.
    """
    gone = S3Server("http://127.0.0.1:1")
    with contextlib.suppress(ObjectStoreError):
        cloud(gone, retry_config={"max_retries": 0}).get("nothing")


_start_obstore()


def race(bucket: Bucket, key: str, tag: str | None, racers: int = 16) -> list[tuple[bytes, str]]:
    """Swap one object on several threads at once. Return the data and the tag of each swap that succeeded."""
    begin = threading.Barrier(racers)
    won: list[tuple[bytes, str]] = []
    failed: list[BaseException] = []

    def compare_and_swap(number: int) -> None:
        data = f"racer {number}, {tag}".encode()
        begin.wait()
        try:
            won.append((data, bucket.compare_and_swap(key, data, tag)))
        except PreconditionFailed:
            pass
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=compare_and_swap, args=(number,)) for number in range(racers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed
    return won
