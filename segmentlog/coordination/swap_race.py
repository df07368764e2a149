"""Check a coordination engine by racing swaps: of simultaneous swaps with the same condition at most one may succeed.

Some object stores ignore the conditions of puts, or check them in one step and write in another. Both let two machines
lead one cluster. The race uses documents of its own, and the code that a cluster uses.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, NamedTuple

from segmentlog.coordination.cluster_coordinator import (
    Coordinator,
    DocumentVersion,
    SwapOutcome,
    SwapResult,
    VersionedDocument,
)
from segmentlog.coordination.coordination_engine import CoordinationEngine
from segmentlog.errors import ConditionIgnored, CoordinatorRefused, CoordinatorUnreachable
from segmentlog.format.cluster_document import ClusterDocument, InSyncReplica, Machine
from segmentlog.objects.bucket.upload_pool import new_nonce

ROUNDS: Final = 10
RACERS: Final = 10
_ROUNDS_PER_DOCUMENT: Final = 5
"""The first round on a document races to create it, the others to replace it."""
_BARRIER_S: Final = 60.0
_MACHINE: Final = Machine("check.invalid:9092", 1, "check")
_DOCUMENT: Final = ClusterDocument(
    "cluster-check", "cluster-check", 0, None, (InSyncReplica("check", "check"),), 1, {"check": _MACHINE}
)


class RaceReport(NamedTuple):
    """Result of a race: how many swaps were tried, and how many had each outcome."""

    url: str
    swaps: int
    won: int
    lost: int
    unknown: int
    p50_ms: float
    """Time of a swap until its outcome was resolved, or a read could not resolve it."""
    p99_ms: float
    problem: str
    """Why a cluster must not use this engine; "" if it can."""
    leftover: tuple[str, ...]
    """Names of documents that could not be deleted."""


class _Attempt(NamedTuple):
    """One swap of the race. ``result`` is None if the engine was found to ignore conditions."""

    result: SwapResult | None
    elapsed_ms: float
    problem: str = ""


def race_swaps(engine: CoordinationEngine, progress: Callable[[int], None] | None = None) -> RaceReport:
    """Race `ROUNDS` rounds of `RACERS` simultaneous swaps, up to the first problem, and delete their documents.

    ``progress`` is called with the number of swaps after each round. Raise `CoordinatorUnreachable` or
    `CoordinatorRefused` if a read fails, or every swap of a round.
    """
    prefix = f"cluster-check-{new_nonce()}"
    attempts: list[_Attempt] = []
    used: list[str] = []
    problem = ""
    leftover: tuple[str, ...] = ()
    try:
        with ThreadPoolExecutor(RACERS, "segmentlog-check") as pool:
            for number in range(ROUNDS):
                if number % _ROUNDS_PER_DOCUMENT == 0:
                    coordinator, version = Coordinator(engine, key=f"{prefix}-{number}.json"), None
                    coordinator.read()  # an error here costs one request instead of ten
                    used.append(coordinator.key)
                made = _race(pool, coordinator, version)
                attempts += made
                problem = next((attempt.problem for attempt in made if attempt.problem), "")
                results = [attempt.result for attempt in made if attempt.result is not None]
                if not problem:
                    _require_answers(results)
                    current = coordinator.read()
                    problem = _problem(results, version, current)
                    version = None if current is None else current.version
                if progress is not None:
                    progress(len(made))
                if problem:
                    break
    finally:
        leftover = _delete(engine, used)
    return _report(engine.url, attempts, problem, leftover)


def _race(pool: ThreadPoolExecutor, coordinator: Coordinator, version: DocumentVersion | None) -> list[_Attempt]:
    """Let all racers swap the same version at the same time."""
    start = threading.Barrier(RACERS)

    def attempt_swap(_: int) -> _Attempt:
        start.wait(_BARRIER_S)
        started = time.perf_counter()
        result, problem = None, ""
        try:
            result = coordinator.swap(_DOCUMENT, version)
        except ConditionIgnored as error:
            problem = error.why
        return _Attempt(result, (time.perf_counter() - started) * 1000, problem)

    return list(pool.map(attempt_swap, range(RACERS)))


def _require_answers(results: Sequence[SwapResult]) -> None:
    """Raise the error of the first swap if every swap failed with an error."""
    errors = [result.error for result in results]
    for error in errors:
        if error is not None and all(errors):
            raise error


def _problem(results: Sequence[SwapResult], version: DocumentVersion | None, current: VersionedDocument | None) -> str:
    """Return what is wrong with the outcomes of a round, and with the document that was read afterwards."""
    winners = [result.sent.nonce for result in results if result.outcome is SwapOutcome.SUCCEEDED]
    if len(winners) > 1:
        condition = "that the document did not exist" if version is None else "the same version of the document"
        return f"{len(winners)} of {len(results)} simultaneous swaps succeeded, and each had as condition {condition}"
    if current is None:
        return "" if version is None and not winners else "the document has disappeared"
    nonce = current.document.nonce
    if winners and nonce != winners[0]:
        return "a read after a successful swap did not return the document of that swap"
    if current.version != version and nonce not in [result.sent.nonce for result in results]:
        return "the document has changed, but not by a swap of this check"
    return ""


def _delete(engine: CoordinationEngine, keys: Sequence[str]) -> tuple[str, ...]:
    """Delete documents, and return the names of those that could not be deleted."""
    try:
        engine.delete(keys)
    except (CoordinatorUnreachable, CoordinatorRefused):
        return tuple(keys)
    return ()


def _report(url: str, attempts: Sequence[_Attempt], problem: str, leftover: tuple[str, ...]) -> RaceReport:
    outcomes = [attempt.result.outcome for attempt in attempts if attempt.result is not None]
    won, lost = outcomes.count(SwapOutcome.SUCCEEDED), outcomes.count(SwapOutcome.LOST)
    if not problem and not won:
        problem = "no swap succeeded"
    times_ms = sorted(attempt.elapsed_ms for attempt in attempts)
    p50_ms, p99_ms = (round(times_ms[int(share * (len(times_ms) - 1))], 2) for share in (0.5, 0.99))
    return RaceReport(url, len(attempts), won, lost, len(attempts) - won - lost, p50_ms, p99_ms, problem, leftover)
