"""Run many small jobs of a restore on a few threads."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor

Job = Callable[[], int]
"""Returns the number of bytes that it has restored."""


def run_jobs(jobs: Sequence[Job], parallel: int) -> Generator[int, None, None]:
    """Yield the results of the jobs in their order.

    ``parallel`` threads run the jobs; with 0 the calling thread runs them.
    """
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
