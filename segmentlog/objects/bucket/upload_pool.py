"""Uploading beside each other: whole segments, by a few threads that end with their shipper."""

from __future__ import annotations

import hashlib
import secrets
import threading
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, Generic, TypeVar

import xxhash

from segmentlog.format.manifest import Stored
from segmentlog.objects.bucket.base import Bucket, Data
from segmentlog.storage import fork_safety

PARALLEL: Final = 4

Key = TypeVar("Key", bound=Hashable)
Result = TypeVar("Result")


def describe(key: str, data: Data) -> Stored:
    """What the manifest says of an object."""
    return Stored(key, len(data), xxhash.xxh3_64_hexdigest(data), hashlib.sha256(data).hexdigest())


def put(bucket: Bucket, key: str, data: Data) -> Stored:
    """Put an object under a name that no other has; what the manifest says of it."""
    bucket.put(key, data)
    return describe(key, data)


def nonce() -> str:
    """Part of a name that no other object gets."""
    return secrets.token_hex(6)


def beside_each_other(do: Callable[[Key], Result], keys: Iterable[Key], parallel: int) -> list[Result]:
    """What ``do`` returns for each, in order; ``parallel`` threads do it, with 0, or for one alone, the one that calls.

    Raises what the first of them raises, once all have ended.
    """
    wanted = list(keys)
    if not parallel or len(wanted) <= 1:
        return [do(key) for key in wanted]
    with ThreadPoolExecutor(min(parallel, len(wanted)), "segmentlog-tail") as pool:
        return list(pool.map(do, wanted))


class Uploads(Generic[Key, Result]):
    """What is under way, by key. Not thread-safe; what it runs is run by threads of its own."""

    def __init__(self, parallel: int = PARALLEL) -> None:
        self._parallel = parallel
        self._pool: ThreadPoolExecutor | None = None
        self._under_way: dict[Key, Future[Result]] = {}
        self.stop: threading.Event = fork_safety.event(self, "stop")
        """Set once what is begun from now on is to end early."""

    def __contains__(self, key: Key) -> bool:
        return key in self._under_way

    def __len__(self) -> int:
        return len(self._under_way)

    def begin(self, key: Key, do: Callable[[], Result]) -> bool:
        """Have a thread do it; False when there are enough of them at work."""
        if not self._parallel:  # by whoever asks
            done: Future[Result] = Future()
            self._under_way[key] = done
            try:
                done.set_result(do())
            except Exception as error:
                done.set_exception(error)
            return True
        if len(self._under_way) >= 2 * self._parallel:
            return False
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._parallel, "segmentlog-upload")
        self._under_way[key] = self._pool.submit(do)
        return True

    def ended(self, wait_s: float | None = 0.0) -> list[tuple[Key, Future[Result]]]:
        """What has ended since; waits so long for the first of them if there is anything to wait for."""
        from concurrent.futures import FIRST_COMPLETED, wait

        if wait_s != 0 and self._under_way:
            wait(list(self._under_way.copy().values()), wait_s, FIRST_COMPLETED)
        done = [(key, future) for key, future in self._under_way.items() if future.done()]
        for key, _ in done:
            del self._under_way[key]
        return done

    def close(self) -> None:
        """Begin nothing more; what is under way comes to its end by itself, in parts at the end of one."""
        self.stop.set()
        self.stop = fork_safety.event(self, "stop")
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        self._pool, self._under_way = None, {}
