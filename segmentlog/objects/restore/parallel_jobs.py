"""Many small jobs, done by some threads: what a restore brings, and looks at."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor

Job = Callable[[], int]
"""Returns how many bytes it has seen to."""


def carried_out(jobs: Sequence[Job], parallel: int) -> Generator[int, None, None]:
    """What each of the jobs returns, in their order; ``parallel`` threads do them, with 0 whoever asks."""
    if not parallel:
        yield from (job() for job in jobs)
        return
    with ThreadPoolExecutor(parallel, "segmentlog-restore") as pool:
        futures = [pool.submit(job) for job in jobs]
        try:
            for future in futures:
                yield future.result()
        finally:
            for future in futures:
                future.cancel()
