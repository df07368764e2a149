"""Upload objects, one at a time, several in parallel, or in the background on a bounded pool of threads."""

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


def describe_object(key: str, data: Data) -> Stored:
    """Return the manifest's entry of an object: key, size and checksums."""
    return Stored(key, len(data), xxhash.xxh3_64_hexdigest(data), hashlib.sha256(data).hexdigest())


def put_object(bucket: Bucket, key: str, data: Data) -> Stored:
    """Upload an object under a name that is used only once, and return the manifest's entry for it."""
    bucket.put(key, data)
    return describe_object(key, data)


def new_nonce() -> str:
    """Return a random part of an object name, so that no two objects get the same name."""
    return secrets.token_hex(6)


def run_parallel(function: Callable[[Key], Result], keys: Iterable[Key], parallel: int) -> list[Result]:
    """Call ``function`` for each key on up to ``parallel`` threads, and return the results in the order of the keys.

    With 0 threads, or for a single key, the calling thread makes the calls. Raise the error of the first key that
    failed, after all calls have ended.
    """
    keys = list(keys)
    if not parallel or len(keys) <= 1:
        return [function(key) for key in keys]
    with ThreadPoolExecutor(min(parallel, len(keys)), "segmentlog-tail") as pool:
        return list(pool.map(function, keys))


class UploadPool(Generic[Key, Result]):
    """A bounded pool of background uploads, by key. Not thread-safe; its own threads run the uploads."""

    def __init__(self, parallel: int = PARALLEL) -> None:
        self._parallel = parallel
        self._pool: ThreadPoolExecutor | None = None
        self._under_way: dict[Key, Future[Result]] = {}
        self.stop: threading.Event = fork_safety.event(self, "stop")
        """Set when running and later uploads of this pool are to stop early."""

    def __contains__(self, key: Key) -> bool:
        return key in self._under_way

    def __len__(self) -> int:
        return len(self._under_way)

    def start(self, key: Key, function: Callable[[], Result]) -> bool:
        """Run ``function`` on a thread of the pool. Return False if the pool is full."""
        if not self._parallel:  # the caller runs it
            done: Future[Result] = Future()
            self._under_way[key] = done
            try:
                done.set_result(function())
            except Exception as error:
                done.set_exception(error)
            return True
        if len(self._under_way) >= 2 * self._parallel:
            return False
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._parallel, "segmentlog-upload")
        self._under_way[key] = self._pool.submit(function)
        return True

    def collect_finished(self, wait_s: float | None = 0.0) -> list[tuple[Key, Future[Result]]]:
        """Return the uploads that have ended since the last call. Wait up to ``wait_s`` for the first of them."""
        from concurrent.futures import FIRST_COMPLETED, wait

        if wait_s != 0 and self._under_way:
            wait(list(self._under_way.copy().values()), wait_s, FIRST_COMPLETED)
        done = [(key, future) for key, future in self._under_way.items() if future.done()]
        for key, _ in done:
            del self._under_way[key]
        return done

    def close(self) -> None:
        """Start no more uploads, and return at once. Running uploads continue to their end or to the end of a part."""
        self.stop.set()
        self.stop = fork_safety.event(self, "stop")
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        self._pool, self._under_way = None, {}
