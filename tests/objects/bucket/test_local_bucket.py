"""A local folder as an object store: power cuts, full disks, permissions, and other files in the folder."""

from __future__ import annotations

import errno
import os
import random
import tracemalloc
from pathlib import Path

import pytest
from full_disk import FullDisk
from objects.test_buckets import NAMES
from seeds import seeds

from segmentlog.errors import InvalidConfig, ObjectStoreError
from segmentlog.objects.bucket.base import ObjectMissing, PreconditionFailed
from segmentlog.objects.bucket.local_bucket import LocalBucket
from segmentlog.objects.bucket.url import open_bucket
from segmentlog.objects.restore.restore import restore
from segmentlog.store import LogStore
from segmentlog.testing.fault_injection import FaultyFileSystem
from segmentlog.testing.simulated_disk import SimulatedDisk

# ---------------------------------------------------------------- power cuts


@pytest.mark.parametrize("seed", seeds("folder power cuts"))
def test_what_was_put_survives_a_power_cut(seed: int) -> None:
    """Whole, whatever the disk keeps of what was not synced; and so does the last state of the object that changes."""
    rng = random.Random(seed)
    disk = SimulatedDisk()
    bucket = LocalBucket("/mnt/disk/bucket", disk.process())
    put: dict[str, bytes] = {}
    tag = None
    for number in range(12):
        for name in (f"segments/{number % 3}/{number % 5}/{number}", f"tails/{number}"):
            data = rng.randbytes(rng.choice((0, 10, 5000)))
            bucket.put(name, data)
            put[name] = data
        manifest = b"manifest %d" % number
        tag = bucket.compare_and_swap("manifest.json", manifest, tag)
        if number % 4 == 2:
            bucket.delete([gone := f"tails/{number - 2}"])
            del put[gone]
        for survivor in disk.point().crashes(rng, 6):
            after = LocalBucket("/mnt/disk/bucket", survivor.process())
            assert after.get("manifest.json") == (manifest, tag)
            assert {name: after.get(name)[0] for name in put} == put


def test_what_a_dead_process_has_made_is_made_durable_by_the_next(tmp_path: Path) -> None:
    """A folder that exists may not be on disk: a process may have died between creating it and the fsync."""
    disk = SimulatedDisk()
    dead = disk.process()
    dead.make_folders("/mnt/bucket/segments/0")
    dead.die()
    LocalBucket("/mnt/bucket", disk.process()).put("segments/0/1", b"x")
    for survivor in disk.point().crashes(random.Random(1), 20):
        assert LocalBucket("/mnt/bucket", survivor.process()).get("segments/0/1")[0] == b"x"


def test_an_fsync_that_fails_is_told(tmp_path: Path) -> None:
    """If the fsync of the file or of its folder fails, the put raises, and the same put may be retried."""
    fs = FaultyFileSystem()
    bucket = LocalBucket(str(tmp_path / "bucket"), fs)
    bucket.put("tails/1", b"there")
    for call in (1, 2):
        fs.fail("fsync", errno.EIO, call=call)
        with pytest.raises(ObjectStoreError, match="cannot be written: Input/output error") as caught:
            bucket.put("tails/2", b"x")
        assert caught.value.retriable
        bucket.put("tails/2", b"x")
        assert bucket.get("tails/2")[0] == b"x"


# ---------------------------------------------------------------- no room, no rights, nothing there


def test_a_full_disk_takes_nothing_and_harms_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects that exist stay, no part of a new one exists, and puts succeed once there is room."""
    disk = FullDisk(monkeypatch.setattr, str(tmp_path))
    bucket = LocalBucket(str(tmp_path / "bucket"))
    bucket.put("tails/1", b"there")
    tag = bucket.compare_and_swap("manifest.json", b"1", None)
    disk.is_full = True
    for put in (
        lambda: bucket.put("tails/2", bytes(100_000)),
        lambda: bucket.put("tails/1", b"longer than it was"),
        lambda: bucket.put("elsewhere/1", b"x"),
        lambda: bucket.compare_and_swap("manifest.json", bytes(1000), tag),
    ):
        with pytest.raises(ObjectStoreError, match="the disk is full; free some space") as caught:
            put()
        assert caught.value.retriable
    assert disk.refused
    assert (bucket.get("tails/1")[0], bucket.get("manifest.json")) == (b"there", (b"1", tag))
    assert {found.key for found in bucket.list()} == {"tails/1", "manifest.json"}
    disk.is_full = False
    bucket.put("tails/2", bytes(100_000))
    bucket.compare_and_swap("manifest.json", b"2", tag)


@pytest.mark.parametrize(
    ("number", "retriable"),
    [(errno.EACCES, False), (errno.EROFS, False), (errno.EIO, True), (errno.ESTALE, True), (errno.EMFILE, True)],
)
def test_what_cannot_be_read_is_not_taken_for_nothing(tmp_path: Path, number: int, retriable: bool) -> None:
    """An object that cannot be read is not reported as missing, and a folder that cannot be listed not as empty."""
    fs = FaultyFileSystem()
    bucket = LocalBucket(str(tmp_path / "bucket"), fs)
    tag = bucket.compare_and_swap("m", b"1", None)
    for method, ask in (
        ("open", lambda: bucket.get("m")),
        ("open", lambda: bucket.get_range("m", 0, 1)),
        ("open", lambda: bucket.compare_and_swap("m", b"2", tag)),
        ("open", lambda: bucket.put("other", b"2")),
        ("unlink", lambda: bucket.delete(["m"])),
        ("listdir", lambda: list(bucket.list())),
        ("stat", lambda: list(bucket.list())),
    ):
        fs.fail(method, number, times=None)
        with pytest.raises(ObjectStoreError, match=os.strerror(number)) as caught:
            ask()
        assert not isinstance(caught.value, ObjectMissing | PreconditionFailed)
        assert caught.value.retriable == retriable
        fs.heal()
    assert bucket.get("m") == (b"1", tag)


def test_who_may_not_read_what_the_place_lies_in_can_put(tmp_path: Path) -> None:
    """The folder exists already, and only the owner of its parent could sync its name."""
    (tmp_path / "bucket").mkdir()
    fs = FaultyFileSystem()
    bucket = LocalBucket(str(tmp_path / "bucket"), fs)
    fs.fail("sync_folder", errno.EACCES)
    bucket.put("tails/1", b"x")
    fs.fail("sync_folder", errno.EACCES)
    with pytest.raises(ObjectStoreError, match="Permission denied"):
        bucket.put("segments/1", b"x")


def test_a_place_that_vanishes_is_made_anew(tmp_path: Path) -> None:
    """While the folder is deleted or unmounted, a put fails, and its error is not that of a missing object."""
    bucket = LocalBucket(str(tmp_path / "bucket"))
    bucket.put("tails/1", b"x")
    tag = bucket.compare_and_swap("m", b"1", None)
    (tmp_path / "bucket").rename(tmp_path / "away")
    with pytest.raises(ObjectStoreError) as caught:
        bucket.put("tails/2", b"x")
    assert type(caught.value) is ObjectStoreError
    assert caught.value.retriable
    bucket.put("tails/2", b"x")
    with pytest.raises(PreconditionFailed):
        bucket.compare_and_swap("m", b"2", tag)
    with pytest.raises(ObjectMissing):
        bucket.get("m")


# ---------------------------------------------------------------- what else may lie there


@pytest.mark.parametrize("below", ["", "/backup", "/backup/deep/down"])
def test_nothing_is_put_into_a_store(tmp_path: Path, below: str) -> None:
    """The objects would become topics of the store."""
    with LogStore(tmp_path / "store", background=False) as store:
        store.create_topic("t").partition(0).append([b"x"])
        with pytest.raises(ObjectStoreError, match="is a segmentlog store; choose a folder outside it") as caught:
            store.ship(f"file://{tmp_path}/store{below}")
        assert not caught.value.retriable
        assert not (tmp_path / "store" / "backup").exists()
        assert store.topics() == ["t"]


def test_what_else_lies_there_is_left_alone(tmp_path: Path) -> None:
    """Other files are listed like objects, and unfinished puts are not listed."""
    place = tmp_path / "bucket"
    (place / "photos").mkdir(parents=True)
    (place / "photos" / "cat.jpg").write_bytes(b"meow")
    (place / "tails").write_bytes(b"a file")
    bucket = LocalBucket(str(place))
    bucket.compare_and_swap("m", b"1", None)
    (place / "m.tmp").write_bytes(b"half of it")
    assert {found.key for found in bucket.list()} == {"m", "photos/cat.jpg", "tails"}
    with pytest.raises(ObjectStoreError, match="Not a directory") as caught:
        bucket.put("tails/1", b"x")
    assert not caught.value.retriable
    assert (place / "tails").read_bytes() == b"a file"


@pytest.mark.parametrize(
    "key", ["", "/a", "../a", "a/../../b", "a//b", "a/", ".hidden", "_ours", "a\nb", "m.tmp", "m.lock"]
)
def test_names_that_lead_elsewhere_are_refused(tmp_path: Path, key: str) -> None:
    """For any name in a manifest, files outside of the folder and lock files stay untouched."""
    bucket = LocalBucket(str(tmp_path / "bucket"))
    bucket.compare_and_swap("m", b"1", None)
    before = sorted(tmp_path.rglob("*"))
    for ask in (
        lambda: bucket.get(key),
        lambda: bucket.get_range(key, 0, 1),
        lambda: bucket.put(key, b"x"),
        lambda: bucket.compare_and_swap(key, b"x", None),
        lambda: bucket.delete([key]),
    ):
        with pytest.raises(ObjectStoreError, match="not a valid object name") as caught:
            ask()
        assert not caught.value.retriable
    assert sorted(tmp_path.rglob("*")) == before


# ---------------------------------------------------------------- URLs


@pytest.mark.parametrize("name", [name.replace("/", "-") for name in NAMES] + ["new\nline", "nbsp\xa0", "b\udcffytes"])
def test_a_folder_is_found_by_its_url(tmp_path: Path, name: str) -> None:
    """The URL of a folder with any name survives a file of ours and a command line."""
    bucket = LocalBucket(f"{tmp_path}/{name}")
    assert bucket.url.isascii()
    assert bucket.url.isprintable()
    bucket.put("key", b"x")
    again = open_bucket(bucket.url)
    assert (again.url, again.get("key")[0]) == (bucket.url, b"x")
    assert os.path.isfile(f"{tmp_path}/{name}/key")


def test_a_store_is_shipped_to_a_folder_with_an_odd_name(tmp_path: Path) -> None:
    """The store is also shipped there later, ends shipping, and is restored from there."""
    url = f"file://{tmp_path}/50%25%20of%20ünï%23"
    for number in range(2):
        with LogStore(tmp_path / "store", background=False) as store:
            topic = store.topic("t") if number else store.create_topic("t")
            topic.partition(0).append([b"x"])
            store.ship(url)
    assert (tmp_path / "50% of ünï#" / "manifest.json").is_file()
    restore(open_bucket(url), str(tmp_path / "restored"))
    with LogStore(tmp_path / "store", background=False) as store:
        assert store.shipping.stop_permanently() == open_bucket(url).url


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("file:///a/b", "/a/b"), ("file:///a/b/", "/a/b"), ("file://localhost/a", "/a"), ("FILE:///a", "/a"),
        ("file:////a//b/./c/../d", "/a/b/d"), ("file:///a%2Fb", "/a/b"), ("file:///a b", "/a b"),
    ],
)  # fmt: skip
def test_one_folder_has_one_url(url: str, path: str) -> None:
    """All spellings of a path give one URL, because a store is bound to its URL."""
    assert open_bucket(url).url == LocalBucket(path).url


@pytest.mark.parametrize(
    "url",
    ["file://", "file:///", "file:///.", "file:///a/..", "file://host/a", "file:a", "/a", "", "file:///a?b", "file:///a#b",
     "file:///a%00b", None, 5, b"file:///a"],
)  # fmt: skip
def test_what_is_no_folder_is_refused(url: object) -> None:
    """A URL with ignored parts is refused, too."""
    with pytest.raises(InvalidConfig):
        open_bucket(url)


# ---------------------------------------------------------------- memory


def test_a_large_put_is_not_copied(tmp_path: Path) -> None:
    """A segment is written from where it is mapped."""
    data = memoryview(bytearray(32 << 20))
    bucket = LocalBucket(str(tmp_path / "bucket"))
    bucket.put("first", b"x")
    tracemalloc.start()
    try:
        bucket.put("it", data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20
