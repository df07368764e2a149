"""The coordination engines that tests are run on, each by its name."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

from coordination import engine_servers
from objects.buckets import KINDS as BUCKET_KINDS
from objects.buckets import places

from segmentlog.coordination.bucket_engine import BucketEngine
from segmentlog.coordination.coordination_engine import CoordinationEngine
from segmentlog.coordination.open_engine import open_engine

SERVERS = {"etcd": engine_servers.etcd, "zookeeper": engine_servers.zookeeper}
SCHEMES = {"etcd": "etcd", "zookeeper": "zk"}
KINDS = (*BUCKET_KINDS, *SERVERS)

Opener = Callable[[], CoordinationEngine]
"""Opens an engine at one place. It returns a client of its own with each call, as far as the engine has clients."""


@contextlib.contextmanager
def engine_places(kind: str, folder: Path) -> Iterator[Callable[[], Opener]]:
    """Yield a function that returns an `Opener` for a place with no documents. Skip the test without the server."""
    numbers = itertools.count()
    if kind in BUCKET_KINDS:
        with places(kind, folder) as make:

            def bucket_place() -> Opener:
                bucket = make()
                return lambda: BucketEngine(bucket)

            yield bucket_place
        return
    with SERVERS[kind](folder) as servers:

        def server_place() -> Opener:
            place = f"place-{next(numbers)}/a"
            return lambda: open_engine(engine_url(kind, *(server.port for server in servers), place=place))

        yield server_place


def engine_url(kind: str, *ports: int, place: str = "orders") -> str:
    """Return the URL of an engine at ports of this machine."""
    return f"{SCHEMES[kind]}://{','.join(f'127.0.0.1:{port}' for port in ports)}/{place}"
