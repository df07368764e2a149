"""`segmentlog cluster check` refuses engines on which several swaps can succeed, and accepts the others."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from unittest import mock

import pytest
from coordination.engines import KINDS, engine_places
from objects.buckets import Memory, cloud, disconnected
from objects.failing_s3 import FailingS3

from segmentlog.coordination.bucket_engine import BucketEngine
from segmentlog.coordination.swap_race import RACERS, ROUNDS, race_swaps
from segmentlog.errors import CoordinatorRefused, CoordinatorUnreachable, ObjectStoreError
from segmentlog.objects.bucket.base import Bucket, Data, PreconditionFailed


@pytest.fixture
def server() -> Iterator[FailingS3]:
    """Provide an S3 server whose handling of conditions can be changed."""
    with disconnected():
        failing = FailingS3()
        try:
            yield failing
        finally:
            failing.close()


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_with_conditions_is_accepted(kind: str, tmp_path: Path) -> None:
    """One swap of each round wins, and the check leaves no document."""
    with engine_places(kind, tmp_path) as make, disconnected(), contextlib.closing(make()()) as engine:
        seen: list[int] = []
        with mock.patch.object(engine, "delete", wraps=engine.delete) as delete:
            report = race_swaps(engine, seen.append)
        assert (report.problem, report.leftover) == ("", ())
        assert (report.swaps, report.won, report.lost + report.unknown) == (100, ROUNDS, 90)
        assert 0 < report.p50_ms <= report.p99_ms
        assert seen == [RACERS] * ROUNDS
        keys = delete.call_args.args[0]
        assert len(keys) == 2
        assert [engine.get(key) for key in keys] == [None, None]
        engine.delete(keys)
        del engine
    if kind == "folder":
        assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


class Ignoring(Memory):
    """A bucket that ignores conditions: all of them, or those on objects that exist, or those on missing objects."""

    def __init__(self, *, create: bool, replace: bool) -> None:
        super().__init__()
        self._create, self._replace = create, replace

    def compare_and_swap(self, key: str, data: Data, tag: str | None) -> str:
        with self._mutex:
            is_ignored = self._create if tag is None else self._replace
            if not is_ignored and self.tag(key) != tag:
                raise PreconditionFailed(self.url, key)
            self.put(key, data)
            return str(self.tag(key))


class InTwoSteps(Memory):
    """A bucket that checks the condition first and writes later: all racers check before one of them writes."""

    def __init__(self) -> None:
        super().__init__()
        self._checked = threading.Barrier(RACERS)

    def compare_and_swap(self, key: str, data: Data, tag: str | None) -> str:
        matches = self.tag(key) == tag
        self._checked.wait()
        if not matches:
            raise PreconditionFailed(self.url, key)
        with self._mutex:
            self.put(key, data)
            return str(self.tag(key))


class Stale(Memory):
    """A bucket whose reads return the first content of an object."""

    def get(self, key: str) -> tuple[bytes, str]:
        self._first: dict[str, tuple[bytes, str]] = getattr(self, "_first", {})
        return self._first.setdefault(key, super().get(key))


@pytest.mark.parametrize(
    ("make", "problem", "swaps"),
    [
        (lambda: Ignoring(create=True, replace=True), r"10 of 10 .* that the document did not exist", 10),
        (lambda: Ignoring(create=True, replace=False), r"10 of 10 .* that the document did not exist", 10),
        (lambda: Ignoring(create=False, replace=True), r"10 of 10 .* the same version of the document", 20),
        (InTwoSteps, r"10 of 10 simultaneous swaps succeeded", 10),
        (Stale, r"a read after a successful swap did not return", 20),
    ],
)  # fmt: skip
def test_a_store_on_which_several_swaps_succeed_is_refused(
    make: Callable[[], Bucket], problem: str, swaps: int
) -> None:
    """The first round that shows it ends the check; the objects of the check are deleted."""
    bucket = make()
    report = race_swaps(BucketEngine(bucket))
    assert re.search(problem, report.problem), report
    assert report.swaps == swaps
    assert list(bucket.list()) == []


@pytest.mark.parametrize("ignores", [("if-none-match",), ("if-match",), ("if-none-match", "if-match")])
def test_an_s3_server_without_conditions_is_refused(server: FailingS3, ignores: tuple[str, ...]) -> None:
    """`CloudBucket` finds it with the first object. The report names this object, because the server cannot delete."""
    server.ignores = ignores
    report = race_swaps(BucketEngine(cloud(server.server)))
    assert "ignores conditional writes" in report.problem
    assert report.swaps == RACERS
    assert len(report.leftover) == 1


def test_a_store_without_permission_to_write_is_refused_after_one_round() -> None:
    """The error is that of the object store."""

    class Readable(Memory):
        def compare_and_swap(self, key: str, data: Data, tag: str | None) -> str:
            raise ObjectStoreError(self.url, key, "access denied", False)

    seen: list[int] = []
    with pytest.raises(CoordinatorRefused, match="access denied"):
        race_swaps(BucketEngine(Readable()), seen.append)
    assert seen == []


def test_a_store_that_cannot_be_reached_costs_one_request() -> None:
    """The read before the race fails, and no swap is tried."""

    class Unreachable(Memory):
        def get(self, key: str) -> tuple[bytes, str]:
            raise ObjectStoreError(self.url, key, "no answer in time")

    with pytest.raises(CoordinatorUnreachable, match="no answer in time"):
        race_swaps(BucketEngine(Unreachable()))


def test_lost_answers_are_counted_as_unknown() -> None:
    """A store that often fails is safe: no problem is reported, if any swap succeeds."""

    class Slow(Memory):
        number = 0

        def compare_and_swap(self, key: str, data: Data, tag: str | None) -> str:
            with self._mutex:
                self.number += 1
                fails = self.number % RACERS < 7
            if fails:
                raise ObjectStoreError(self.url, key, "503: slow down")
            return super().compare_and_swap(key, data, tag)

    report = race_swaps(BucketEngine(Slow()))
    assert (report.swaps, report.problem) == (100, "")
    assert report.won + report.lost + report.unknown == 100
    assert 1 <= report.won <= ROUNDS


def test_objects_that_cannot_be_deleted_are_named() -> None:
    """The store can coordinate a cluster: nothing of a cluster is ever deleted."""

    class Undeletable(Memory):
        def delete(self, keys: Iterable[str]) -> None:
            raise ObjectStoreError(self.url, "delete", "access denied", False)

    bucket = Undeletable()
    report = race_swaps(BucketEngine(bucket))
    assert report.problem == ""
    assert sorted(report.leftover) == sorted(found.key for found in bucket.list())
    assert len(report.leftover) == 2
