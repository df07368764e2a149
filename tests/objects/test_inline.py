"""A few new bytes are stored in the manifest itself: a cycle takes one request, and readers see no difference."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from logs import NoSyncFileSystem
from msgspec.structs import replace
from objects.buckets import RUBBISH, Memory
from objects.readers import check, contents, decoded, open_store

from segmentlog.errors import ObjectStoreError
from segmentlog.format.manifest import (
    MANIFEST_KEY,
    MalformedManifest,
    Manifest,
    Stored,
    Tail,
    decode_manifest,
    encode_manifest,
)
from segmentlog.objects.bucket.base import Data
from segmentlog.objects.manifest.garbage_collection import sweep
from segmentlog.objects.takeover import take_over
from segmentlog.objects.upload.shipper import Shipper
from segmentlog.policy.upload_policy import INLINE_BYTES, fits_inline, tails_to_move
from segmentlog.store import LogStore


class Counting(Memory):
    """Writes down what is put; ``lose``: the answer to the next put of the manifest is lost."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []
        self.lose = False

    def put(self, key: str, data: Data) -> None:
        self.asked.append(key)
        super().put(key, data)

    def compare_and_swap(self, key: str, data: Data, tag: str | None) -> str:
        made = super().compare_and_swap(key, data, tag)
        if self.lose:
            self.lose = False
            raise ObjectStoreError(self.url, key, "the connection was closed, once it was done")
        return made


@pytest.fixture
def bucket() -> Counting:
    """Return the bucket that the store is shipped to."""
    return Counting()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LogStore]:
    """Provide a store of two topics."""
    with open_store(tmp_path / "store") as opened:
        for name in "ab":
            opened.create_topic(name, 2, compression_type="none", fsync="always")
        yield opened


@pytest.fixture
def shipper(store: LogStore, bucket: Counting) -> Iterator[Shipper]:
    """Yield a shipper of the store, without threads."""
    made = Shipper(store._topics, bucket, parallel=0)
    yield made
    made.close()


def inline(manifest: Manifest) -> int:
    """Return the number of tail bytes in the manifest."""
    return sum(len(tail.data) for tail in manifest.tails)


def test_a_turn_with_little_that_is_new_is_one_request(
    tmp_path: Path, store: LogStore, shipper: Shipper, bucket: Counting
) -> None:
    """The new bytes of all partitions are in one request, and readers find them."""
    shipper.run_cycle()
    for name in "ab":
        for log in store.topic(name).partitions():
            log.append([b"new in %d" % log.number])
    bucket.asked.clear()
    assert shipper.run_cycle().put
    assert bucket.asked == [MANIFEST_KEY]
    assert store.topic("b").partition(1).shipped_offset == 1
    assert inline(decoded(bucket)) > 0
    assert [one.key for one in bucket.list()] == [MANIFEST_KEY]
    check(bucket, tmp_path, contents(store))


def test_what_is_more_is_an_object(tmp_path: Path, store: LogStore, shipper: Shipper, bucket: Counting) -> None:
    """More bytes become an object, like segments and files of the store; older versions can read that manifest."""
    store.topic("a").partition(0).append([b"x" * (INLINE_BYTES + 1)])
    shipper.run_cycle()
    assert inline(decoded(bucket)) == 0
    assert json.loads(bucket.get(MANIFEST_KEY)[0])["format"] == 1
    check(bucket, tmp_path, contents(store))


def test_what_stands_in_the_manifest_is_moved_before_it_is_much(
    tmp_path: Path, store: LogStore, shipper: Shipper, bucket: Counting
) -> None:
    """So a manifest stays small, and few cycles take two requests; emptied objects are deleted."""
    logs = [log for name in "ab" for log in store.topic(name).partitions()]
    shipper.run_cycle()
    bucket.asked.clear()
    for number in range(200):
        logs[number % 3].append([b"%d " % number + b"x" * (number % 5) * 100])
        shipper.run_cycle()
        assert inline(decoded(bucket)) <= 2 * INLINE_BYTES
        assert len(decoded(bucket).tails) < 40
    moved = len(bucket.asked) - 200
    assert 3 <= moved <= 200 * 500 // INLINE_BYTES + 3
    check(bucket, tmp_path, contents(store))


def test_the_bounds() -> None:
    """The policy is a function of values alone."""
    assert fits_inline(INLINE_BYTES, INLINE_BYTES)
    assert not fits_inline(INLINE_BYTES + 1, 0)
    assert not fits_inline(1, INLINE_BYTES + 1)
    assert tails_to_move({1: INLINE_BYTES - 1, 2: 1}) == set()
    assert tails_to_move({1: INLINE_BYTES, 2: 1}) == {1, 2}


def test_an_answer_that_was_lost_is_learnt(tmp_path: Path, store: LogStore, shipper: Shipper, bucket: Counting) -> None:
    """The bytes and their entry exist together, or not at all."""
    shipper.run_cycle()
    store.topic("a").partition(0).append([b"1"])
    bucket.lose = True
    with pytest.raises(ObjectStoreError):
        shipper.run_cycle()
    assert store.topic("a").partition(0).shipped_offset == 0
    store.topic("b").partition(0).append([b"2"])
    shipper.run_cycle()
    assert (store.topic("a").partition(0).shipped_offset, store.topic("b").partition(0).shipped_offset) == (1, 1)
    check(bucket, tmp_path, contents(store))


def test_what_is_held_back_stands_there_once_the_rest_does(
    tmp_path: Path, store: LogStore, shipper: Shipper, bucket: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A transaction of which one part is large: no manifest says anything of the other one before."""
    shipper.run_cycle()
    monkeypatch.setattr("segmentlog.policy.upload_policy.TAIL_BYTES", 3000)
    monkeypatch.setattr("segmentlog.objects.upload.plan.TAIL_BYTES", 3000)
    with store.producer(name="p", linger_ms=0) as producer, producer.transaction():
        for number in range(40):
            producer.send("ab"[number % 2], b"%d" % number * 60, partition=0).result()
    assert shipper.run_cycle().waiting
    assert not any(part.end_offset for topic in decoded(bucket).topics for part in topic.partitions)
    shipper.ship()
    check(bucket, tmp_path, contents(store))


def test_others_who_put_the_manifest_keep_what_stands_in_it(
    tmp_path: Path, store: LogStore, shipper: Shipper, bucket: Counting
) -> None:
    """A sweep and a takeover keep them; the new owner continues from there."""
    store.topic("a").partition(1).append([b"inline"])
    shipper.ship()
    before = inline(decoded(bucket))
    assert before
    bucket.put(RUBBISH, b"x")
    sweep(bucket, 1 << 60, grace_ms=1)
    assert inline(decoded(bucket)) == before
    take_over(bucket, str(tmp_path / "new"), fs=NoSyncFileSystem(), parallel=0)
    assert inline(decoded(bucket)) == before
    with open_store(tmp_path / "new") as new:
        successor = Shipper(new._topics, bucket, parallel=0)
        successor.ship()
        new.topic("a").partition(1).append([b"of the new owner"])
        new.topic("a").partition(1).flush()
        successor.ship()
        successor.close()
        check(bucket, tmp_path, contents(new))
        assert list(contents(new)["a/1"].values()) == [b"inline", b"of the new owner"]


@pytest.mark.parametrize("places", ["both", "none"])
def test_a_tail_lies_in_one_place(store: LogStore, shipper: Shipper, bucket: Counting, places: str) -> None:
    """A manifest that says otherwise is damaged."""
    store.topic("a").partition(0).append([b"1"])
    shipper.ship()
    manifest = decoded(bucket)
    (tail,) = manifest.tails
    wrong = Tail(tail.number, Stored("tails/1", len(tail.data)), tail.data) if places == "both" else Tail(tail.number)
    with pytest.raises(MalformedManifest, match="not either inline or an object"):
        decode_manifest(encode_manifest(replace(manifest, tails=(wrong,))))
