"""Segments that are uploaded in parts: failures, kills, other owners, and stores that were shipped without parts."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from logs import FakeClock, NoSyncFileSystem
from msgspec.structs import replace
from objects.buckets import SERVERS, Memory, cloud, disconnected, served
from objects.readers import check, contents, decoded, open_store

import segmentlog
from segmentlog.errors import ObjectStoreError
from segmentlog.format.file_names import UPLOADS_FILE
from segmentlog.format.manifest import (
    MANIFEST_KEY,
    MalformedManifest,
    Manifest,
    Stored,
    StoredPart,
    decode_manifest,
    encode_manifest,
)
from segmentlog.objects.bucket.base import Bucket, Data
from segmentlog.objects.bucket.local_bucket import LocalBucket
from segmentlog.objects.manifest.garbage_collection import sweep, verify
from segmentlog.objects.replica.replica import Replica
from segmentlog.objects.restore.restore import restore
from segmentlog.objects.takeover import take_over
from segmentlog.objects.upload import multipart as parts_module
from segmentlog.objects.upload.shipper import Shipper
from segmentlog.store import LogStore
from segmentlog.testing.fault_injection import Died

PART_BYTES = 1000
PARTS = 8
"""The number of parts of a segment that `fill` creates."""
GRACE_MS = 1000


class Watched(Memory):
    """Counts what is put, by name; ``before`` and ``after`` are called with the name, and may raise."""

    def __init__(self) -> None:
        super().__init__()
        self.puts: Counter[str] = Counter()
        self.sizes: dict[str, int] = {}
        self.before: Callable[[str], None] = lambda key: None
        self.after: Callable[[str], None] = lambda key: None

    def put(self, key: str, data: Data) -> None:
        if key != MANIFEST_KEY:
            self.before(key)
            self.puts[key] += 1
            self.sizes[key] = len(data)
        super().put(key, data)
        if key != MANIFEST_KEY:
            self.after(key)

    def compare_and_swap(self, key: str, data: Data, tag: str | None) -> str:
        self.before(key)
        tag = super().compare_and_swap(key, data, tag)
        self.after(key)
        return tag

    @property
    def of_parts(self) -> dict[str, int]:
        """How often each part was put."""
        return {key: count for key, count in self.puts.items() if is_part(key)}


def is_part(key: str) -> bool:
    """Return whether an object is a part of a segment."""
    return key.startswith("segments/") and key.rpartition(".")[2].isdigit()


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make parts small, and retries immediate."""
    monkeypatch.setattr(parts_module, "PART_BYTES", PART_BYTES)
    monkeypatch.setattr(parts_module, "PAUSE_S", 0)


@pytest.fixture
def bucket() -> Watched:
    """Return the bucket that the store is shipped to."""
    return Watched()


def fill(store: LogStore, segments: int = 2, records: int = 24, *, name: str = "t", **config: Any) -> None:
    """Create a topic with ``segments`` sealed segments of about 6,000 bytes, and a record in the active one."""
    log = store.create_topic(name, compression_type="none", **config).partition(0)
    for segment in range(segments):
        for number in range(records):
            log.append([b"%d/%d/" % (segment, number) + b"x" * 200])
        log.roll()
    log.append([b"the last one"])
    log.flush()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LogStore]:
    """Yield a store with two large segments."""
    with open_store(tmp_path / "store") as opened:
        fill(opened)
        yield opened


def shipper_of(store: LogStore, bucket: Bucket, **options: Any) -> Shipper:
    """Return a shipper without threads."""
    return Shipper(store._topics, bucket, **({"parallel": 0, "grace_ms": GRACE_MS} | options))


def ship(store: LogStore, bucket: Bucket, **options: Any) -> Manifest:
    """Ship everything, and return the manifest."""
    shipper = shipper_of(store, bucket, **options)
    try:
        shipper.ship()
    finally:
        shipper.close()
    assert shipper.manifest is not None
    return shipper.manifest


def segment_logs(manifest: Manifest) -> list[Stored]:
    """Return the logs of all sealed segments."""
    return [one.log for topic in manifest.topics for part in topic.partitions for one in part.segments]


# ---------------------------------------------------------------- what lies there


def test_a_large_segment_lies_in_parts(tmp_path: Path, store: LogStore, bucket: Watched) -> None:
    """Each part is small and has its own checksums; readers see no difference."""
    logs = segment_logs(ship(store, bucket))
    assert [len(log.parts) for log in logs] == [PARTS, PARTS]
    for log in logs:
        assert sum(part.size_bytes for part in log.parts) == log.size_bytes
        assert max(part.size_bytes for part in log.parts) <= PART_BYTES
        for one in log.objects:
            assert hashlib.sha256(bucket.get(one.key)[0]).hexdigest() == one.sha256
    assert set(bucket.of_parts.values()) == {1}
    check(bucket, tmp_path, contents(store))
    assert not (tmp_path / "store" / UPLOADS_FILE).exists(), "nothing is left to go on with"


def test_what_is_small_is_one_object_as_ever(store: LogStore, bucket: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """Older versions can then read the manifest."""
    monkeypatch.setattr(parts_module, "PART_BYTES", 16 << 20)
    logs = segment_logs(ship(store, bucket))
    assert not any(log.parts for log in logs)
    assert json.loads(bucket.get(MANIFEST_KEY)[0])["format"] == 1
    assert not bucket.of_parts


def test_an_older_version_refuses_what_it_cannot_read(store: LogStore, bucket: Watched) -> None:
    """The format number refuses it, before any lookup of objects."""
    ship(store, bucket)
    assert json.loads(bucket.get(MANIFEST_KEY)[0])["format"] == 2


@pytest.mark.parametrize("sizes", [(), (5999,), (6000, 0), (3000, 3001)])
def test_parts_that_do_not_add_up_are_damage(store: LogStore, bucket: Watched, sizes: tuple[int, ...]) -> None:
    """A manifest that contradicts itself is not gone by."""
    manifest = ship(store, bucket)
    text = encode_manifest(manifest)
    log = segment_logs(manifest)[0]
    wrong = tuple(StoredPart(size, "0" * 16, "0" * 64) for size in sizes)
    (topic,) = manifest.topics
    part = topic.partitions[0]
    first = replace(part.segments[0], log=replace(log, parts=wrong, size_bytes=6000))
    part = replace(part, segments=(first, *part.segments[1:]))
    made = replace(manifest, topics=(replace(topic, partitions=(part,)),))
    if sizes:
        with pytest.raises(MalformedManifest, match="do not add up to its size"):
            decode_manifest(encode_manifest(made))
    assert decode_manifest(text) == replace(manifest, format=2)


def test_damage_in_a_part_is_told_by_its_name(tmp_path: Path, store: LogStore, bucket: Watched) -> None:
    """Verify, a restore and a replica name the part."""
    one = segment_logs(ship(store, bucket))[1].objects[3]
    bucket.put(one.key, b"y" * one.size_bytes)
    assert [key for key, _ in verify(bucket).problems] == [one.key]
    with pytest.raises(segmentlog.errors.ShippingRefused, match=one.key.rpartition("/")[2]):
        restore(bucket, str(tmp_path / "restored"), parallel=0)
    with (
        Replica(bucket.url, tmp_path / "replica", bucket=bucket, threads=False, fs=NoSyncFileSystem()) as replica,
        pytest.raises(segmentlog.errors.ShippingRefused, match=one.key.rpartition("/")[2]),
    ):
        replica.refresh()


def test_a_replica_goes_on_from_chunks_to_parts(tmp_path: Path, bucket: Watched) -> None:
    """Its bytes of an active segment are compared and kept when the segment is sealed."""
    with open_store(tmp_path / "store") as store:
        log = store.create_topic("t", compression_type="none").partition(0)
        for number in range(5):
            log.append([b"%d" % number * 500])
        log.flush()
        shipper = shipper_of(store, bucket)
        shipper.ship()
        with Replica(bucket.url, tmp_path / "replica", bucket=bucket, threads=False, fs=NoSyncFileSystem()) as replica:
            replica.refresh()
            for number in range(5):
                log.append([b"%d" % number * 500])
            log.roll()
            log.flush()
            shipper.ship()
            assert segment_logs(shipper.manifest)[0].parts  # type: ignore[arg-type]
            replica.refresh()
            with open_store(tmp_path / "replica") as read:
                assert contents(read) == contents(store)
        shipper.close()


# ---------------------------------------------------------------- what fails


def test_a_part_that_fails_is_put_again_alone(tmp_path: Path, store: LogStore, bucket: Watched) -> None:
    """The other parts are not repeated, and no error is reported."""
    failing = {"2": 1, "4": parts_module.TRIES - 1}

    def fail(key: str) -> None:
        number = key.rpartition(".")[2]
        if is_part(key) and failing.get(number, 0):
            failing[number] -= 1
            raise ObjectStoreError(bucket.url, key, "503: slow down")

    bucket.before = fail
    ship(store, bucket)
    assert set(bucket.of_parts.values()) == {1}
    assert not any(failing.values())
    check(bucket, tmp_path, contents(store))


def test_one_that_goes_on_failing_is_told_and_is_all_that_is_put_later(
    tmp_path: Path, store: LogStore, bucket: Watched
) -> None:
    """The next cycle or the next process puts that part; the others are not sent again."""

    def fail(key: str) -> None:
        if is_part(key) and key.endswith(".3"):
            raise ObjectStoreError(bucket.url, key, "no answer in time")

    bucket.before = fail
    with pytest.raises(ObjectStoreError, match="no answer in time"):
        ship(store, bucket)
    assert len(bucket.of_parts) in (PARTS - 1, 2 * (PARTS - 1))
    bucket.before = lambda key: None
    ship(store, bucket)
    assert set(bucket.of_parts.values()) == {1}
    assert len(bucket.of_parts) == 2 * PARTS
    check(bucket, tmp_path, contents(store))


def test_no_other_try_where_none_helps(store: LogStore, bucket: Watched) -> None:
    """A client without permission gets the error at once."""
    asked: list[str] = []

    def fail(key: str) -> None:
        if is_part(key):
            asked.append(key)
            raise ObjectStoreError(bucket.url, key, "not allowed to", False)

    bucket.before = fail
    with pytest.raises(ObjectStoreError, match="not allowed to"):
        ship(store, bucket)
    assert len(asked) == len(set(asked))


def test_fewer_at_a_time_where_they_fail_beside_each_other(
    store: LogStore, bucket: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a narrow connection, many parts at once would all time out."""
    now, most, mutex = [0], [0], threading.Lock()

    def begin(key: str) -> None:
        if not is_part(key):
            return
        with mutex:
            now[0] += 1
            most[0] = max(most[0], now[0])
            is_narrow = now[0] > 1
        time.sleep(0.01)
        if is_narrow:
            with mutex:
                now[0] -= 1
            raise ObjectStoreError(bucket.url, key, "no answer in time")

    def end(key: str) -> None:
        if is_part(key):
            with mutex:
                now[0] -= 1

    bucket.before, bucket.after = begin, end
    puts = parts_module.MultipartUploader(store._topics.fs, store._topics.path, bucket, parallel=4)
    monkeypatch.setattr(parts_module, "PAUSE_S", 0.001)
    for number in range(3):
        segment = parts_module.LocalSegment(number, number + 1, 6000, True, (number, 6000, 0))
        stored = puts.upload(("id", 0), segment, lambda start, size: bytes(size), threading.Event())
        assert len(stored.parts) == 6
        if number == 0:
            assert most[0] > 1
    assert most[0] <= 4
    most[0] = 0
    segment = parts_module.LocalSegment(9, 10, 6000, True, (9, 6000, 0))
    puts.upload(("id", 0), segment, lambda start, size: bytes(size), threading.Event())
    assert most[0] <= 2


# ---------------------------------------------------------------- who is killed


@pytest.mark.parametrize("when", ["before", "after"])
def test_killed_between_any_two_requests_it_goes_on_where_it_was(tmp_path: Path, when: str) -> None:
    """Uploaded parts are not repeated, except one whose upload is uncertain; no rubbish remains."""
    for number in range(1, 40):
        folder, bucket, clock = tmp_path / str(number), Watched(), FakeClock()
        requests = [0]

        def die(key: str, number: int = number, requests: list[int] = requests) -> None:
            requests[0] += 1
            if requests[0] == number:
                raise Died

        with open_store(folder / "store", clock) as store:
            fill(store)
            setattr(bucket, when, die)
            shipper = shipper_of(store, bucket)
            try:
                shipper.ship()
                is_done = True
            except Died:
                is_done = False
            shipper.close()
            setattr(bucket, when, lambda key: None)
            manifest = ship(store, bucket)
            assert sum(bucket.of_parts.values()) <= 2 * PARTS + (when == "after")
            assert set(bucket.of_parts) == {one.key for log in segment_logs(manifest) for one in log.objects}
            wanted = contents(store)
            for _ in range(3):
                clock.advance(10 * 24 * 3600_000)
                sweep(bucket, clock.now_ms() + int(time.time() * 1000), grace_ms=GRACE_MS)
        left = {one.key for one in bucket.list()} - {stored.key for stored in manifest.objects()} - {MANIFEST_KEY}
        assert not left
        restore(bucket, str(folder / "restored"), parallel=0)
        with open_store(folder / "restored") as restored:
            assert contents(restored) == wanted
        if is_done:
            break
    assert number > 15


def _die_at(name: str) -> Callable[[str], None]:
    def die(key: str) -> None:
        if is_part(key) and key.endswith(name):
            raise Died

    return die


def half_shipped(store: LogStore, bucket: Watched, name: str = ".4") -> list[str]:
    """Kill a shipper at a part, and return the names of the uploaded parts."""
    bucket.before = _die_at(name)
    shipper = shipper_of(store, bucket)
    with pytest.raises(Died):
        shipper.ship()
    shipper.close()
    bucket.before = lambda key: None
    return sorted(bucket.of_parts)


def test_a_part_that_somebody_swept_meanwhile_is_put_again(tmp_path: Path, store: LogStore, bucket: Watched) -> None:
    """The journal is a hint: parts in it are checked."""
    there = half_shipped(store, bucket)
    bucket.delete(there[1:2])
    ship(store, bucket)
    assert {key: count for key, count in bucket.of_parts.items() if count > 1} == {there[1]: 2}
    check(bucket, tmp_path, contents(store))


def test_a_part_that_is_condemned_is_not_gone_by(tmp_path: Path, store: LogStore, bucket: Watched) -> None:
    """The part will be deleted: the segment is uploaded again under other names."""
    named = {one.key for one in ship(store, bucket).objects()}
    fill(store, 1, name="u")
    there = [key for key in half_shipped(store, bucket) if key not in named]
    assert there
    swept = sweep(bucket, int(time.time() * 1000) + 10_000, grace_ms=GRACE_MS)
    assert set(swept.condemned) >= set(there)
    manifest = ship(store, bucket)
    assert not set(there) & {stored.key for stored in manifest.objects()}
    check(bucket, tmp_path, contents(store))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"url": 1}', '{"url": "memory://bucket", "begun": [{}]}', "\xff"])
def test_a_journal_that_is_damaged_is_none(tmp_path: Path, store: LogStore, bucket: Watched, text: str) -> None:
    """It only saves work."""
    (tmp_path / "store" / UPLOADS_FILE).write_text(text, encoding="latin-1")
    ship(store, bucket)
    check(bucket, tmp_path, contents(store))


def test_a_journal_of_another_place_is_none(tmp_path: Path, store: LogStore, bucket: Watched) -> None:
    """Parts at one URL say nothing about another URL."""
    half_shipped(store, bucket)
    path = tmp_path / "store" / UPLOADS_FILE
    path.write_bytes(path.read_bytes().replace(b"memory://bucket", b"memory://elsewhere"))
    before = set(bucket.of_parts)
    manifest = ship(store, bucket)
    assert not before & {stored.key for stored in manifest.objects()}
    check(bucket, tmp_path, contents(store))


def test_a_file_that_is_replaced_meanwhile_is_begun_anew_and_its_parts_go(tmp_path: Path, bucket: Watched) -> None:
    """Parts of two files never become one; those of the old one are condemned, and deleted after the grace time."""
    clock = FakeClock()
    with open_store(tmp_path / "store", clock) as store:
        log = store.create_topic("keys", cleanup_policy="compact", compression_type="none").partition(0)
        for number in range(40):
            log.append([b"%d" % number * 100], [b"k%d" % (number % 20)])
        log.roll()
        log.append([b"the last one"], [b"k"])
        log.flush()
        compacted: list[str] = []

        def compact(key: str) -> None:
            if is_part(key) and key.endswith(".2") and not compacted:
                compacted.append(key)
                log.compact()

        bucket.before = compact
        shipper = shipper_of(store, bucket)
        shipper.ship()
        old = {key for key in bucket.of_parts if key.rpartition(".")[0] == compacted[0].rpartition(".")[0]}
        assert shipper.manifest is not None
        assert old
        assert not old & {stored.key for stored in shipper.manifest.objects()}
        for _ in range(3):
            clock.advance(2 * GRACE_MS)
            log.append([b"more"], [b"k"])
            log.flush()
            shipper.ship()
        assert not old & {one.key for one in bucket.list()}
        shipper.close()
        check(bucket, tmp_path, contents(store))


def test_parts_of_a_topic_that_is_deleted_go(tmp_path: Path, bucket: Watched) -> None:
    """Without the topic, no process would use them."""
    clock = FakeClock()
    with open_store(tmp_path / "store", clock) as store:
        fill(store)
        fill(store, 0, name="other")
        half_shipped(store, bucket)
        store.delete_topic("t")
        shipper = shipper_of(store, bucket)
        for _ in range(3):
            store.topic("other").partition(0).append([b"more"])
            store.topic("other").partition(0).flush()
            shipper.run_cycle()
            clock.advance(2 * GRACE_MS)
        shipper.close()
        assert not [one.key for one in bucket.list() if is_part(one.key)]
        assert not (tmp_path / "store" / UPLOADS_FILE).exists()


def test_who_takes_over_begins_anew(tmp_path: Path, store: LogStore, bucket: Watched) -> None:
    """The new owner begins with the objects of the manifest; parts of the former owner are rubbish, and swept."""
    ship(store, bucket)
    fill(store, 1, name="u")
    there = set(half_shipped(store, bucket)) - {one.key for one in decoded(bucket).objects()}
    assert there
    take_over(bucket, str(tmp_path / "new"), fs=NoSyncFileSystem(), parallel=0)
    with open_store(tmp_path / "new") as new:
        ship(new, bucket)
        for log in new.topic("t").partitions():
            log.append([b"of the new owner"])
            log.flush()
        ship(new, bucket)
        late = int(time.time() * 1000)
        for _ in range(2):
            late += 10_000
            sweep(bucket, late, grace_ms=GRACE_MS)
        assert not there & {one.key for one in bucket.list()}
        check(bucket, tmp_path, contents(new))


# ---------------------------------------------------------------- what it takes


def test_no_more_of_a_segment_is_held_than_parts(
    tmp_path: Path, bucket: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory does not grow with the segment: each part is a view of the file."""
    monkeypatch.setattr(parts_module, "PART_BYTES", 100_000)
    monkeypatch.setattr("segmentlog.policy.upload_policy.SEALED_PIECE_BYTES", 1000)
    kept = bytearray()

    class Forgets(Watched):
        def put(self, key: str, data: Data) -> None:
            self.sizes[key] = len(data)
            if is_part(key):
                assert isinstance(data, memoryview), "and no copy"
                kept[:] = hashlib.sha256(data).digest()
            else:
                super().put(key, data)

    place = Forgets()
    with open_store(tmp_path / "store") as store:
        log = store.create_topic("t", compression_type="none").partition(0)
        for number in range(80):
            log.append([b"%d" % number * 50_000])
        log.roll()
        log.append([b"the last one"])
        log.flush()
        size_bytes = log.segments()[0].size_bytes
        assert size_bytes > 7_000_000
        shipper = shipper_of(store, place)
        tracemalloc.start()
        try:
            shipper.ship()
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        shipper.close()
    assert sum(size for key, size in place.sizes.items() if is_part(key)) == size_bytes
    assert max(size for key, size in place.sizes.items() if is_part(key)) <= 100_000
    assert peak_bytes < 2_000_000


def test_progress_counts_parts(store: LogStore, bucket: Watched) -> None:
    """The progress of a segment grows part by part; a second call counts only the missing parts."""
    told: list[tuple[int, int]] = []
    there = half_shipped(store, bucket)
    assert there
    bucket.puts.clear()
    shipper = shipper_of(store, bucket)
    shipper.ship(lambda done, whole: told.append((done, whole)))
    shipper.close()
    sizes = [bucket.sizes[key] for key in bucket.puts if is_part(key) or key.startswith("tails/")]
    assert told[-1] == (sum(sizes), sum(sizes))
    assert not bucket.of_parts.keys() & set(there)


def test_a_limit_is_one_of_parts_too(tmp_path: Path, store: LogStore) -> None:
    """Each part waits for its turn."""
    waits: list[int] = []
    place = LocalBucket(str(tmp_path / "place"))
    place._limiter.wait = waits.append  # type: ignore[method-assign]
    manifest = ship(store, place)
    for log in segment_logs(manifest):
        for part in log.parts:
            assert part.size_bytes in waits


def test_who_closes_waits_for_no_more_than_parts(store: LogStore, bucket: Watched) -> None:
    """A close waits for the current part; the next process continues after it."""
    begun, goes_on = threading.Event(), threading.Event()

    def wait(key: str) -> None:
        if is_part(key):
            begun.set()
            assert goes_on.wait(10)

    bucket.before = wait
    shipper = shipper_of(store, bucket, parallel=1)
    shipper.run_cycle()
    assert begun.wait(10)
    shipper.close()
    goes_on.set()
    ends_s = time.monotonic() + 10
    while any(one.name.startswith("segmentlog-") for one in threading.enumerate()) and time.monotonic() < ends_s:
        time.sleep(0.005)
    assert len(bucket.of_parts) == 1
    ship(store, bucket)
    assert set(bucket.of_parts.values()) == {1}


# ---------------------------------------------------------------- real ones, and old ones


@pytest.mark.parametrize("kind", ["folder", *SERVERS])
def test_a_real_object_store_has_them(tmp_path: Path, store: LogStore, kind: str) -> None:
    """Threads upload them, and a kill comes half way."""
    with disconnected():
        if kind == "folder":
            _ship_and_read(tmp_path, store, LocalBucket(str(tmp_path / "place")))
        else:
            with served(kind, tmp_path) as server:
                _ship_and_read(tmp_path, store, cloud(server))


def _ship_and_read(folder: Path, store: LogStore, place: Bucket) -> None:
    real, put = type(place).put, Counter[str]()

    class Dies:
        def __getattr__(self, name: str) -> Any:
            return getattr(place, name)

        def put(self, key: str, data: Data) -> None:
            if is_part(key) and key.endswith(".3") and ".3" not in put:
                put[".3"] += 1
                raise Died
            put[key] += 1
            real(place, key, data)

    shipper = shipper_of(store, Dies())  # type: ignore[arg-type]
    with pytest.raises(Died):
        shipper.ship()
    shipper.close()
    manifest = ship(store, Dies(), parallel=3)  # type: ignore[arg-type]
    names = {one.key for log in segment_logs(manifest) for one in log.objects}
    assert {key: count for key, count in put.items() if is_part(key)} == dict.fromkeys(names, 1)
    check(place, folder, contents(store))


@pytest.fixture
def old() -> Watched:
    """Return the objects that a version with format 1 shipped."""
    made = Watched()
    for key, text in json.loads(Path(__file__).with_name("shipped_by_format_1.json").read_text()).items():
        made.put(key, base64.b64decode(text))
    made.puts.clear()
    return made


_OLD = {
    "orders/0": {number: b"order %d" % number for number in range(11)},
    "orders/1": {0: b"of another", 1: b"in a transaction"},
}


def test_what_was_shipped_before_is_read_as_before(tmp_path: Path, old: Watched) -> None:
    """An object that an older version shipped is restored, followed by a replica, and read in place."""
    check(old, tmp_path, _OLD)


def test_what_was_shipped_before_is_gone_on_with(tmp_path: Path, old: Watched) -> None:
    """A new owner ships new segments in parts, next to the old objects."""
    take_over(old, str(tmp_path / "new"), fs=NoSyncFileSystem(), parallel=0)
    with open_store(tmp_path / "new") as store:
        fill(store, 1, name="u")
        manifest = ship(store, old)
        logs = segment_logs(manifest)
        assert any(log.parts for log in logs)
        assert any(not log.parts for log in logs)
        wanted = contents(store)
    check(old, tmp_path, wanted)
    assert _OLD.items() <= wanted.items()
