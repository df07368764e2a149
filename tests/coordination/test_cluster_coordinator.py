"""The coordinator over every engine: reads, swaps, their outcomes when answers are lost, and waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest
from coordination.engines import KINDS, Opener, engine_places
from logs import FakeClock
from msgspec.structs import replace
from objects.buckets import Memory, disconnected
from waiting import PATIENCE_S, wait_until

from segmentlog.coordination.bucket_engine import BucketEngine
from segmentlog.coordination.cluster_coordinator import Coordinator, DocumentVersion, SwapOutcome, VersionedDocument
from segmentlog.errors import ConditionIgnored, CoordinatorRefused, CoordinatorUnreachable, ObjectStoreError
from segmentlog.format.cluster_document import (
    CLUSTER_KEY,
    ClusterDocument,
    InSyncReplica,
    Machine,
    MalformedDocument,
)
from segmentlog.objects.bucket.base import Data, PreconditionFailed
from segmentlog.objects.bucket.local_bucket import LocalBucket

MACHINES = {name: Machine(f"{name}:9092", 2, "x") for name in ("m1", "m2", "m3")}
FIRST = ClusterDocument("c", "s", 1, "m1", tuple(InSyncReplica(name, "x") for name in MACHINES), 2, MACHINES)
RACERS = 8


@pytest.fixture(scope="module", params=KINDS)
def make(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Opener]]:
    """Return places of one kind."""
    with engine_places(request.param, tmp_path_factory.mktemp("places")) as maker:
        yield maker


@pytest.fixture
def connect(make: Callable[[], Opener]) -> Iterator[Callable[[], Coordinator]]:
    """Return coordinators of one document, which does not exist yet. Each has an engine of its own."""
    open_engine = make()
    opened: list[Coordinator] = []

    def connect() -> Coordinator:
        opened.append(Coordinator(open_engine(), poll_s=0.005))
        return opened[-1]

    with disconnected():
        yield connect
        for coordinator in opened:
            coordinator.close()


def created(coordinator: Coordinator) -> VersionedDocument:
    """Create the first document, and return it."""
    result = coordinator.swap(FIRST, None)
    assert result.outcome is SwapOutcome.SUCCEEDED
    assert result.current is not None
    return result.current


# ---------------------------------------------------------------- every object store


def test_a_swap_replaces_the_document_that_was_read(connect: Callable[[], Coordinator]) -> None:
    """A swap against any other version is lost, and returns the current document."""
    coordinator, other = connect(), connect()
    assert coordinator.read() is None
    first = created(coordinator)
    assert other.read() == first
    assert (first.version.number, first.document.version) == (1, 1)
    second = other.swap(replace(first.document, term=2, leader="m2"), first.version)
    assert second.outcome is SwapOutcome.SUCCEEDED
    assert coordinator.read() == second.current
    assert second.sent.version == 2
    assert second.sent.nonce != first.document.nonce
    for stale in (None, first.version):
        lost = coordinator.swap(replace(first.document, term=2, leader="m3"), stale)
        assert (lost.outcome, lost.current, lost.error) == (SwapOutcome.LOST, second.current, None)
    assert coordinator.read() == second.current


def test_one_of_simultaneous_swaps_succeeds(connect: Callable[[], Coordinator]) -> None:
    """The others are lost, and return the document of the winner."""
    coordinator = connect()
    version: DocumentVersion | None = None
    start = threading.Barrier(RACERS)

    def swap(version: DocumentVersion | None) -> SwapOutcome:
        start.wait()
        return coordinator.swap(FIRST, version).outcome

    with ThreadPoolExecutor(RACERS) as pool:
        for _ in range(5):
            outcomes = list(pool.map(swap, [version] * RACERS))
            assert outcomes.count(SwapOutcome.SUCCEEDED) == 1, outcomes
            current = coordinator.read()
            assert current is not None
            version = current.version
    assert version is not None
    assert version.number == 5


def test_a_wait_returns_the_next_document(connect: Callable[[], Coordinator], monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait returns at once if the document differs, else after its time. Engines with watches need no reads."""
    monkeypatch.setattr("segmentlog.coordination.cluster_coordinator._WATCH_S", 3600.0)
    coordinator, other = connect(), connect()
    assert coordinator.wait(None, 0) is None
    first = created(coordinator)
    assert coordinator.wait(None, 60) == first
    assert coordinator.wait(first.version, 0.02) is None
    engine = coordinator._engine
    with (
        mock.patch.object(engine, "wait_for_change", wraps=engine.wait_for_change) as wait_for_change,
        ThreadPoolExecutor(1) as pool,
    ):
        waiting = pool.submit(coordinator.wait, first.version, 3600)
        try:
            wait_until(lambda: wait_for_change.called)
            time.sleep(0.1)  # most likely the watch is set by then
            second = other.swap(FIRST, first.version).current
            assert waiting.result(PATIENCE_S) == second
        finally:
            coordinator.close()


# ---------------------------------------------------------------- answers that are lost, late or wrong

Fault = Callable[["ScriptedBucket", Callable[[], str]], str]


class ScriptedBucket(Memory):
    """A bucket whose next puts and reads meet faults, one each; late puts take effect in `arrive`."""

    def __init__(self) -> None:
        super().__init__()
        self.put_faults: list[Fault] = []
        self.get_faults: list[ObjectStoreError] = []
        self.late: list[Callable[[], str]] = []

    def compare_and_swap(self, key: str, data: Data, tag: str | None) -> str:
        def do() -> str:
            return Memory.compare_and_swap(self, key, data, tag)

        return self.put_faults.pop(0)(self, do) if self.put_faults else do()

    def get(self, key: str) -> tuple[bytes, str]:
        if self.get_faults:
            raise self.get_faults.pop(0)
        return super().get(key)

    def arrive(self) -> None:
        """Let the late puts take effect, if their conditions still hold."""
        for do in self.late:
            try:
                do()
            except PreconditionFailed:
                continue
        self.late = []


def error(why: str = "no answer in time", *, retriable: bool = True) -> ObjectStoreError:
    """Return an error as buckets raise them."""
    return ObjectStoreError("memory://bucket", CLUSTER_KEY, why, retriable)


def not_sent(_: ScriptedBucket, do: Callable[[], str]) -> str:
    """Fail before the request is sent."""
    raise error("no server listens at this address")


def denied(_: ScriptedBucket, do: Callable[[], str]) -> str:
    """Refuse the request."""
    raise error("access denied", retriable=False)


def done_unanswered(_: ScriptedBucket, do: Callable[[], str]) -> str:
    """Put the object, and lose the answer."""
    do()
    raise error()


def late(bucket: ScriptedBucket, do: Callable[[], str]) -> str:
    """Give no answer, and put the object later."""
    bucket.late.append(do)
    raise error()


def done_and_repeated(_: ScriptedBucket, do: Callable[[], str]) -> str:
    """Put the object twice, as a client library does that lost the first answer: the second put fails."""
    do()
    return do()


def ignored(_: ScriptedBucket, do: Callable[[], str]) -> str:
    """Fail as a bucket that has found out that its conditions are ignored."""
    raise ConditionIgnored("memory://bucket", CLUSTER_KEY, "ignores conditional writes")


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize(
    ("fault", "outcome"),
    [
        (not_sent, SwapOutcome.UNKNOWN), (denied, SwapOutcome.UNKNOWN), (late, SwapOutcome.UNKNOWN),
        (done_unanswered, SwapOutcome.SUCCEEDED), (done_and_repeated, SwapOutcome.SUCCEEDED),
    ],
)  # fmt: skip
def test_a_swap_without_an_answer_is_resolved_by_reading(fault: Fault, outcome: SwapOutcome, is_first: bool) -> None:
    """The nonce shows whose document it is. The outcome stays unknown while the old version is the current one."""
    bucket = ScriptedBucket()
    coordinator = Coordinator(BucketEngine(bucket))
    before = None if is_first else created(coordinator)
    version = None if before is None else before.version
    bucket.put_faults.append(fault)
    result = coordinator.swap(FIRST, version)
    assert result.outcome is outcome
    if outcome is SwapOutcome.SUCCEEDED:
        assert result.error is None
        assert result.current == coordinator.read()
        assert result.current is not None
        assert result.current.document == result.sent
        return
    assert result.current == before
    assert type(result.error) is (CoordinatorRefused if fault is denied else CoordinatorUnreachable)
    again = coordinator.resolve(result.sent, version)
    assert (again.outcome, again.error) == (SwapOutcome.UNKNOWN, None)


@pytest.mark.parametrize("arrives_first", [True, False])
def test_a_late_swap_takes_effect_or_is_lost_for_ever(arrives_first: bool) -> None:
    """`resolve` finds out which, once there is another document."""
    bucket = ScriptedBucket()
    coordinator = Coordinator(BucketEngine(bucket))
    first = created(coordinator)
    bucket.put_faults.append(late)
    swapped = coordinator.swap(FIRST, first.version)
    if arrives_first:
        bucket.arrive()
    other = coordinator.swap(FIRST, first.version)
    assert other.outcome is (SwapOutcome.LOST if arrives_first else SwapOutcome.SUCCEEDED)
    bucket.arrive()
    found = coordinator.resolve(swapped.sent, first.version)
    assert found.outcome is (SwapOutcome.SUCCEEDED if arrives_first else SwapOutcome.LOST)
    assert found.current == other.current


def test_a_server_that_lags_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read that returns an older document than the swap replaced, or none, leaves the outcome unknown."""
    bucket = ScriptedBucket()
    coordinator = Coordinator(BucketEngine(bucket))
    first = created(coordinator)
    old = bucket.get(CLUSTER_KEY)
    second = coordinator.swap(FIRST, first.version).current
    assert second is not None
    bucket.put_faults.append(done_unanswered)
    with monkeypatch.context() as lagging:
        lagging.setattr(bucket, "get", lambda key: old)
        result = coordinator.swap(FIRST, second.version)
        assert (result.outcome, result.current) == (SwapOutcome.UNKNOWN, first)
    assert coordinator.resolve(result.sent, second.version).outcome is SwapOutcome.SUCCEEDED
    bucket.delete([CLUSTER_KEY])
    assert coordinator.resolve(result.sent, second.version).outcome is SwapOutcome.UNKNOWN


def test_an_outcome_that_cannot_be_read_is_unknown() -> None:
    """The result has the error of the swap, or else the error of the read."""
    for kind, failure in ((CoordinatorUnreachable, error()), (CoordinatorRefused, error("denied", retriable=False))):
        bucket = ScriptedBucket()
        coordinator = Coordinator(BucketEngine(bucket))
        first = created(coordinator)
        bucket.put_faults.append(done_and_repeated)
        bucket.get_faults.append(failure)
        result = coordinator.swap(FIRST, first.version)
        assert (result.outcome, result.current, type(result.error)) == (SwapOutcome.UNKNOWN, None, kind)
        assert coordinator.resolve(result.sent, first.version).outcome is SwapOutcome.SUCCEEDED
        bucket.put_faults.append(denied)
        bucket.get_faults.append(error())
        assert type(coordinator.swap(FIRST, first.version).error) is CoordinatorRefused


def test_a_store_that_ignores_conditions_is_no_outcome() -> None:
    """The swap raises: nothing that it could return would be true."""
    bucket = ScriptedBucket()
    bucket.put_faults.append(ignored)
    with pytest.raises(ConditionIgnored):
        Coordinator(BucketEngine(bucket)).swap(FIRST, None)


def test_a_contradictory_document_is_not_sent() -> None:
    """The mistake is the caller's, and the object store keeps what it has."""
    coordinator = Coordinator(BucketEngine(Memory()))
    with pytest.raises(MalformedDocument):
        coordinator.swap(replace(FIRST, leader="m9"), None)
    assert coordinator.read() is None


def test_errors_of_reads_have_classes() -> None:
    """Unreachable may be better later. Refused needs a person: permissions, or a document that cannot be used."""
    bucket = ScriptedBucket()
    coordinator = Coordinator(BucketEngine(bucket))
    bucket.get_faults.append(error())
    with pytest.raises(CoordinatorUnreachable, match=r"memory://bucket: .*cannot be reached: cluster.json: no answer"):
        coordinator.read()
    bucket.get_faults.append(error("access denied", retriable=False))
    with pytest.raises(CoordinatorRefused, match=r"memory://bucket: .*cannot be used: cluster.json: access denied"):
        coordinator.read()
    bucket.put(CLUSTER_KEY, b"{}")
    with pytest.raises(CoordinatorRefused, match=r"cluster.json: the cluster document is damaged"):
        coordinator.read()


# ---------------------------------------------------------------- waits


def test_a_wait_survives_an_outage() -> None:
    """It raises only if the last read failed; a missing document and a refusal end it at once."""
    bucket, clock, paused = ScriptedBucket(), FakeClock(), list[float]()

    def pause(seconds: float) -> None:
        paused.append(seconds)
        clock.advance(round(seconds * 1000))

    coordinator = Coordinator(BucketEngine(bucket), pause=pause, clock=clock)
    first = created(coordinator)
    bucket.get_faults += [error(), error()]
    assert coordinator.wait(first.version, 2.5) is None
    assert paused == [1.0, 1.0, 0.5]
    bucket.get_faults += [error()] * 4
    with pytest.raises(CoordinatorUnreachable):
        coordinator.wait(first.version, 2.5)
    paused.clear()
    bucket.get_faults.append(error("denied", retriable=False))
    with pytest.raises(CoordinatorRefused, match="denied"):
        coordinator.wait(first.version, 60)
    bucket.delete([CLUSTER_KEY])
    with pytest.raises(CoordinatorRefused, match="document is missing"):
        coordinator.wait(first.version, 60)
    assert not paused


def test_an_event_ends_a_wait() -> None:
    """A process that closes does not wait for the time to pass."""
    stop = threading.Event()
    coordinator = Coordinator(BucketEngine(Memory()), pause=stop.wait)
    stop.set()
    assert coordinator.wait(None, 3600) is None


def test_locks_of_swaps_are_deleted_with_the_object(tmp_path: Path) -> None:
    """A folder has the document and its lock; `LocalBucket.delete` removes both."""
    bucket = LocalBucket(str(tmp_path / "bucket"))
    created(Coordinator(BucketEngine(bucket)))
    bucket.delete([CLUSTER_KEY, "missing"])
    assert list((tmp_path / "bucket").iterdir()) == []
    created(Coordinator(BucketEngine(bucket)))
