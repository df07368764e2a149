"""The common behaviour of every `Bucket`: put, get, ranges, lists, deletes, and the conditional put."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from objects.buckets import KINDS, Maker, Memory, disconnected, places, race

from segmentlog.errors import ObjectStoreError
from segmentlog.objects.bucket.base import Bucket, Data, ObjectMissing, PreconditionFailed
from segmentlog.objects.bucket.local_bucket import LocalBucket

ROUNDS = 50
RACERS = 16
NAMES = (
    "plain", "a/b/c/d/e/f", "with space", "100%", "%20", "a%2Fb", "plus+and&and=", "question?mark", "hash#sign",
    "quote'double\"", "paren(s)[b]{c}", "semi;colon:comma,", "at@dollar$", "tilde~end", "ünïcödé", "日本/語",
    "emoji\N{GRINNING FACE}", "x" * 200, "a", "a.b", "manifest.json",
)  # fmt: skip


@pytest.fixture(scope="module", params=KINDS)
def make(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Maker]:
    """Yield a function that creates buckets of one kind."""
    with places(request.param, tmp_path_factory.mktemp("places")) as maker:
        yield maker


@pytest.fixture
def bucket(make: Maker) -> Iterator[Bucket]:
    """Yield an empty bucket."""
    with disconnected():
        yield make()


# ---------------------------------------------------------------- put, get, ranges


@pytest.mark.parametrize("size_bytes", [0, 1, 4095, (8 << 20) - 1, 8 << 20, (8 << 20) + 1, 20_000_001])
def test_what_is_put_is_got_whole(bucket: Bucket, size_bytes: int) -> None:
    """Objects of any size: large ones are put and read in parts."""
    data = os.urandom(size_bytes)
    bucket.put("segments/one", data)
    found, tag = bucket.get("segments/one")
    assert found == data
    assert isinstance(found, bytes)
    assert tag


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, lambda data: memoryview(data)[3:-2]])
@pytest.mark.parametrize("size_bytes", [10, 9 << 20])
def test_any_bytes_can_be_put(bucket: Bucket, kind: Any, size_bytes: int) -> None:
    """A view of a mapped file, say; and they are not kept: they may change once the call is over."""
    data = bytearray(os.urandom(size_bytes))
    wanted = bytes(kind(data))
    bucket.put("it", kind(data))
    tag = bucket.compare_and_swap("that", kind(data), None)
    if bucket.url != "memory:":  # obstore's memory store keeps a reference to the data
        data[:5] = b"other"
    assert bucket.get("it")[0] == wanted
    assert bucket.get("that") == (wanted, tag)


def test_what_is_put_again_takes_the_place(bucket: Bucket) -> None:
    """A put that is sent twice replaces the object."""
    bucket.put("it", b"first, and longer")
    bucket.put("it", b"second")
    assert bucket.get("it")[0] == b"second"


def test_ranges_are_all_of_the_bytes_or_an_error(bucket: Bucket) -> None:
    """A range with fewer bytes than requested is an error."""
    data = os.urandom(100_000)
    bucket.put("it", data)
    for start, size_bytes in ((0, 1), (0, 100_000), (99_999, 1), (12_345, 54_321), (5, 0)):
        assert bucket.get_range("it", start, size_bytes) == data[start : start + size_bytes]
    for start, size_bytes in ((0, 100_001), (99_999, 2), (100_000, 1), (200_000, 10)):
        with pytest.raises(ObjectStoreError) as caught:
            bucket.get_range("it", start, size_bytes)
        assert not isinstance(caught.value, ObjectMissing)
        assert not caught.value.retriable, "it does not grow"


def test_names_are_what_they_are(bucket: Bucket) -> None:
    """Different names are different objects, and each is listed as it was given."""
    names = [f"{number}/{name}" for number, name in enumerate(NAMES)]
    for name in names:
        bucket.put(name, name.encode())
    assert {found.key: found.size_bytes for found in bucket.list()} == {name: len(name.encode()) for name in names}
    for name in names:
        assert bucket.get(name)[0] == name.encode()
        assert bucket.get_range(name, 0, 2) == name.encode()[:2]
        tag = bucket.compare_and_swap(f"{name}.swapped", b"x", None)
        bucket.compare_and_swap(f"{name}.swapped", b"y", tag)
    bucket.delete(names)
    assert {found.key for found in bucket.list()} == {f"{name}.swapped" for name in names}


def test_what_is_not_there_is_missing(bucket: Bucket) -> None:
    """The error has its name, and says where."""
    bucket.put("a/b", b"x")
    for ask in (lambda: bucket.get("a/c"), lambda: bucket.get_range("a/c", 0, 1), lambda: bucket.get("nothing")):
        with pytest.raises(ObjectMissing) as caught:
            ask()
        assert caught.value.key in ("a/c", "nothing")
        assert caught.value.url == bucket.url
        assert str(caught.value) == f"{bucket.url}: {caught.value.key}: there is no such object"


# ---------------------------------------------------------------- lists, deletes


def test_lists_have_what_begins_so(bucket: Bucket) -> None:
    """A prefix may end anywhere in a name, also without a slash."""
    now_ms = time.time() * 1000
    assert list(bucket.list()) == []
    assert list(bucket.list("segments/")) == []
    for name in ("manifest.json", "segments/a/0/1", "segments/a/1/1", "segments/ab/0/1", "tails/01", "tails/02"):
        bucket.put(name, name.encode())
    for prefix, wanted in (
        ("", 6), ("segments/", 3), ("segments/a", 3), ("segments/a/", 2), ("segments/a/1/", 1), ("t", 2),
        ("tails/02", 1), ("tails/02/", 0), ("segment/", 0), ("manifest.json", 1), ("none/at/all", 0),
    ):  # fmt: skip
        found = list(bucket.list(prefix))
        assert len(found) == wanted, prefix
        assert all(one.key.startswith(prefix) and one.size_bytes == len(one.key) for one in found)
        assert all(abs(one.modified_ms - now_ms) < 3_600_000 for one in found), "milliseconds since 1970"


def test_many_are_listed_and_deleted(bucket: Bucket) -> None:
    """More than a server gives, or takes, at once."""
    names = [f"many/{number}" for number in range(1100)]
    for name in names:
        bucket.put(name, b"x")
    assert sorted(found.key for found in bucket.list("many/")) == sorted(names)
    bucket.delete(iter(names[1:]))
    assert [found.key for found in bucket.list()] == ["many/0"]


def test_deleting_what_is_gone_is_no_error(bucket: Bucket) -> None:
    """Other objects in the call are deleted."""
    for name in ("a", "b", "c/d"):
        bucket.put(name, b"x")
    bucket.delete([])
    bucket.delete(["gone", "a", "gone too", "c/d", "c/e", "last"])
    assert [found.key for found in bucket.list()] == ["b"]
    bucket.delete(["a", "a"])
    with pytest.raises(ObjectMissing):
        bucket.get("a")


# ---------------------------------------------------------------- the conditional put


def test_a_swap_takes_the_tag_of_what_lies_there(bucket: Bucket) -> None:
    """A get and a swap return the same tag; a swap with any other tag changes nothing."""
    first = bucket.compare_and_swap("m", b"1", None)
    assert bucket.get("m") == (b"1", first)
    second = bucket.compare_and_swap("m", b"2", first)
    assert bucket.get("m") == (b"2", second)
    for stale in (None, first):
        with pytest.raises(PreconditionFailed) as caught:
            bucket.compare_and_swap("m", b"3", stale)
        assert (caught.value.key, caught.value.url) == ("m", bucket.url)
        assert bucket.get("m") == (b"2", second)
    third = bucket.compare_and_swap("m", b"", bucket.get("m")[1])
    assert bucket.get("m") == (b"", third)


def test_a_swap_does_not_bring_back_what_is_gone(bucket: Bucket) -> None:
    """A swap with a tag does not create an object; only a swap without a tag does."""
    tag = bucket.compare_and_swap("m", b"1", None)
    with pytest.raises(PreconditionFailed):
        bucket.compare_and_swap("other", b"2", tag)
    bucket.delete(["m"])
    with pytest.raises(PreconditionFailed):
        bucket.compare_and_swap("m", b"2", tag)
    with pytest.raises(ObjectMissing):
        bucket.get("m")
    assert bucket.get("m2" if bucket.compare_and_swap("m2", b"2", None) else "")[0] == b"2"
    bucket.compare_and_swap("m", b"3", None)


@pytest.mark.long
def test_of_threads_that_swap_one_wins(bucket: Bucket) -> None:
    """Sixteen threads create an object, or change it; afterwards it is the winner's."""
    for number in range(ROUNDS):
        key, tag = f"race/{number}", None
        for _ in range(2):
            won = race(bucket, key, tag, RACERS)
            assert len(won) == 1
            assert bucket.get(key) == won[0]
            tag = won[0][1]


def test_a_swap_in_two_steps_is_found_out() -> None:
    """The race is one: a bucket that looks first and puts then lets several win."""

    class InTwoSteps(Memory):
        def compare_and_swap(self, key: str, data: Data, tag: str | None) -> str:
            if self.tag(key) != tag:
                raise PreconditionFailed(self.url, key)
            looked.wait()
            self.put(key, data)
            return str(self.tag(key))

    looked = threading.Barrier(RACERS)
    assert len(race(InTwoSteps(), "m", None, RACERS)) == RACERS


def _swap_in_process(path: str, number: int, begin: Any, answers: Any) -> None:
    """Race in each round, against others that do the same."""
    bucket = LocalBucket(path)
    for round_ in range(ROUNDS):
        tag = None
        for step in range(2):
            begin.wait()
            try:
                data = f"{number}, {step}".encode()  # never the same again: with it would come the same tag
                answers.put((round_, step, number, bucket.compare_and_swap(f"race/{round_}", data, tag)))
            except PreconditionFailed:
                answers.put((round_, step, number, None))
            begin.wait()
            tag = bucket.get(f"race/{round_}")[1]


def test_of_processes_that_swap_one_wins(tmp_path: Path) -> None:
    """Sixteen of them at one folder: the lock is not only among threads."""
    context = multiprocessing.get_context("fork")
    begin, answers = context.Barrier(RACERS), context.SimpleQueue()
    racers = [
        context.Process(target=_swap_in_process, args=(str(tmp_path / "b"), number, begin, answers))
        for number in range(RACERS)
    ]
    for racer in racers:
        racer.start()
    won: dict[tuple[int, int], list[int]] = {(round_, step): [] for round_ in range(ROUNDS) for step in range(2)}
    for _ in range(ROUNDS * 2 * RACERS):
        round_, step, number, tag = answers.get()
        if tag is not None:
            won[round_, step].append(number)
    for racer in racers:
        racer.join()
        racer.close()
    answers.close()
    assert all(len(numbers) == 1 for numbers in won.values()), won
    bucket = LocalBucket(str(tmp_path / "b"))
    for round_ in range(ROUNDS):
        assert bucket.get(f"race/{round_}")[0] == f"{won[round_, 1][0]}, 1".encode()


def test_who_reads_during_swaps_reads_one_or_the_other(bucket: Bucket) -> None:
    """A reader gets a complete object, and never an older one after a newer one."""
    tag = bucket.compare_and_swap("m", b"%08d" % 0 * 10_000, None)
    is_over, seen = threading.Event(), SimpleQueue[Any]()

    def read() -> None:
        last = 0
        while not is_over.is_set():
            data, _ = bucket.get("m")
            number = int(data[:8])
            if data != b"%08d" % number * 10_000 or number < last:
                seen.put((last, data[:80]))
                return
            last = number
        seen.put(last)

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for number in range(1, 100):
        tag = bucket.compare_and_swap("m", b"%08d" % number * 10_000, tag)
    is_over.set()
    for reader in readers:
        reader.join()
    assert all(isinstance(last, int) for last in [seen.get() for _ in readers])
