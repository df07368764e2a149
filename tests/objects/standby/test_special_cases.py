"""Rare situations of a standby: a late put, programs that use a former store, folders of all kinds."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from objects.buckets import Memory
from objects.standby.test_standby import ALIVE, REFUSED, Machine, bucket, machine, values
from stores.make_format_1 import STORES, unpack

from segmentlog.errors import ObjectStoreError, SegmentlogError, ShippingRefused, StoreFenced, UnknownTopic
from segmentlog.format.manifest import MANIFEST_KEY
from segmentlog.inspection.store_inspection import inspect_store
from segmentlog.objects.manifest.load import require_manifest
from segmentlog.objects.ownership.binding import Binding, folder_id, read_binding, write_binding
from segmentlog.objects.ownership.claim import stop_shipping
from segmentlog.objects.standby import standby as standby_module
from segmentlog.objects.standby.former_owner import set_aside_former_store
from segmentlog.objects.standby.roles import Role, find_role
from segmentlog.objects.takeover import take_over
from segmentlog.objects.upload.shipper import Shipper
from segmentlog.records import TopicPartition
from segmentlog.storage.fs import FileSystem
from segmentlog.store import LogStore
from segmentlog.testing.fault_injection import FaultyFileSystem

__all__ = ["bucket", "machine"]

Create = Callable[[str], Machine]
FS = FileSystem()


def owner_with(create: Create, count: int = 3, **config: Any) -> tuple[Machine, Machine]:
    """Start an owner that has shipped some records, and a standby that has them."""
    first, second = create("m1"), create("m2")
    log = first.serve().create_topic("t", fsync="always", **config).partition(0)
    for number in range(count):
        log.append([b"%d" % number])
    first.ship()
    assert second.cycle().role == "standby"
    return first, second


def replaced_owner(create: Create, count: int = 3, **config: Any) -> tuple[Machine, Machine]:
    """Replace an owner whose programs still run, and which has a record that was not shipped."""
    first, second = owner_with(create, count, **config)
    assert first.store is not None
    first.store.topic("t").partition(0).append([b"never shipped"])
    second.probe_result = REFUSED
    second.cycles_until("owner")
    second.stop()
    second.serve().topic("t").partition(0).append([b"new"])
    second.ship()
    return first, second


class LatePut:
    """The next conditional put of a bucket is not answered. It takes effect when `arrive` is called."""

    def __init__(self, bucket: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
        self._swap = bucket.compare_and_swap
        self._late: Callable[[], object] | None = None
        self._bucket = bucket
        monkeypatch.setattr(bucket, "compare_and_swap", self._lose)

    def _lose(self, *args: Any) -> str:
        if self._late is not None:
            return self._swap(*args)
        self._late = lambda: self._swap(*args)
        raise ObjectStoreError(self._bucket.url, MANIFEST_KEY, "no answer in time")

    def arrive(self) -> None:
        """Let the put take effect, if the manifest still is the one that it replaces."""
        assert self._late is not None
        self._late()


# ------------------------------------------------------------ a put that arrives late


def test_a_late_put_makes_the_standby_the_owner(
    machine: Create, bucket: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The standby has given up its takeover, because the owner answers again. It remembers the takeover: otherwise
    no machine would be the owner that the manifest names."""
    first, second = owner_with(machine)
    put = LatePut(bucket, monkeypatch)
    second.probe_result = REFUSED
    while not (status := second.cycle()).error:
        pass
    assert "no answer in time" in status.error
    second.probe_result = ALIVE
    assert (second.cycle().role, second.cycle().reason) == ("standby", "the owner answers")
    put.arrive()
    assert second.cycle().role == "owner"
    second.stop()
    assert values(second.serve()) == [b"0", b"1", b"2"]
    with pytest.raises(StoreFenced):
        first.ship()


def test_the_takeover_is_tried_again_as_the_same_owner(
    machine: Create, bucket: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever of the two puts takes effect, it names the same owner."""
    _, second = owner_with(machine)
    put = LatePut(bucket, monkeypatch)
    second.probe_result = REFUSED
    second.cycles_until("owner")
    with pytest.raises(ObjectStoreError):
        put.arrive()
    binding = read_binding(FS, str(second.folder))
    assert binding is not None
    owner = require_manifest(bucket)[0].owner
    assert (owner.id, owner.epoch) == (binding.owner_id, 2)


def test_a_takeover_that_can_have_no_effect_is_forgotten(
    machine: Create, bucket: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another machine has taken over since: the put fails, whenever it arrives."""
    _, second = owner_with(machine)
    third = machine("m3")
    put = LatePut(bucket, monkeypatch)
    second.probe_result = REFUSED
    while not second.cycle().error:
        pass
    second.probe_result = ALIVE
    second.cycle()
    assert read_binding(FS, str(second.folder)) is not None
    third.cycle()
    third.probe_result = REFUSED
    third.cycles_until("owner")
    second.cycle()
    assert read_binding(FS, str(second.folder)) is None
    with pytest.raises(ObjectStoreError):
        put.arrive()
    assert second.cycle().role == "standby"


def test_a_new_owner_that_dies_in_its_takeover(machine: Create, monkeypatch: pytest.MonkeyPatch) -> None:
    """The manifest names a machine that has never answered any other: after five minutes another standby takes over."""
    _, second = owner_with(machine)
    third = machine("m3")
    third.cycle()
    second.probe_result = third.probe_result = REFUSED
    with monkeypatch.context() as patched:
        patched.setattr("segmentlog.objects.takeover.restore", lambda *_, **__: (_ for _ in ()).throw(OSError("dead")))
        while not second.cycle().error:
            pass
    second.stop()
    assert "has never answered this machine" in third.cycle().reason
    assert 290 < third.cycles_until("owner", 400) < 310
    second.probe_result = ALIVE
    assert second.cycle().role == "standby"
    assert not (second.folder / "@former").exists()


def test_an_owner_that_ships_after_the_decision(
    machine: Create, bucket: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the decision and the conditional put, the owner ships: it works, and keeps the store."""
    first, second = owner_with(machine)
    second.probe_result = REFUSED
    swap = bucket.compare_and_swap

    def ship_first(*args: Any) -> str:
        monkeypatch.undo()
        assert first.store is not None
        first.store.topic("t").partition(0).append([b"late"])
        first.ship()
        return swap(*args)

    monkeypatch.setattr(bucket, "compare_and_swap", ship_first)
    while not (status := second.cycle()).error:
        pass
    assert "has shipped since the decision" in status.error
    second.probe_result = ALIVE
    assert second.cycle().role == "standby"
    assert first.store is not None
    assert first.store.topic("t").partition(0).append([b"more"]) == 4


# ------------------------------------------------------------ programs that use a former store


def test_programs_of_a_former_owner_cannot_change_the_replica(machine: Create) -> None:
    """They have the store open while it is set aside: every change raises, in new partitions and in open ones."""
    first, second = replaced_owner(machine)
    store = first.store
    assert store is not None
    log = store.topic("t").partition(0)
    with LogStore(first.folder, background=False) as other:
        unopened, producer = other.topic("t"), other.producer(linger_ms=0)
        assert first.cycle().role == "standby"
        second.ship()
        changes: list[Callable[[], object]] = [
            lambda: log.append([b"x"]), lambda: log.roll(), lambda: log.trim(1), lambda: log.truncate(1),
            lambda: unopened.partition(0).append([b"x"]), lambda: producer.send("t", b"x").result(),
            lambda: other.create_topic("x"), lambda: other.delete_topic("t"), lambda: other.rename_topic("t", "x"),
            lambda: other.alter_topic("t", partitions=2), lambda: other.producer(name="x"),
            lambda: other.groups.reset("g", {TopicPartition("t", 0): 1}),
        ]  # fmt: skip
        for change in changes:
            with pytest.raises((StoreFenced, UnknownTopic)):
                change()
        with pytest.raises(StoreFenced):
            producer.close()
    first.stop()
    first.cycle()
    with LogStore(first.folder, background=False, read_only=True) as replica:
        assert (replica.topics(), values(replica)) == (["t"], [b"0", b"1", b"2", b"new"])
    with LogStore(first.folder / "@former" / "1", background=False, read_only=True) as former:
        assert values(former) == [b"0", b"1", b"2", b"never shipped"]


def test_readers_of_a_former_store(machine: Create) -> None:
    """A program that reads gets an error that names the topic, and continues when it looks the topic up again."""
    first, _ = replaced_owner(machine)
    with LogStore(first.folder, background=False, read_only=True) as reader:
        log = reader.topic("t").partition(0)
        assert log.log_end_offset == 4
        first.cycle()
        with pytest.raises(UnknownTopic):
            list(log.read(0))
        assert values(reader) == [b"0", b"1", b"2", b"new"]


def test_readers_of_a_replica_see_the_takeover(machine: Create) -> None:
    """A program on the standby's machine reads on: an error at most, then the records of the new owner."""
    first, second = owner_with(machine)
    with LogStore(second.folder, background=False) as reader:
        assert reader.read_only
        log = reader.topic("t").partition(0)
        assert log.log_end_offset == 3
        first.stop()
        second.probe_result = REFUSED
        second.cycles_until("owner")
        second.stop()
        owner = second.serve()
        owner.topic("t").partition(0).append([b"new"])
        second.ship()
        with suppress(UnknownTopic):
            assert [value for batch in log.read(0) for value in batch.values] == [b"0", b"1", b"2", b"new"]
        assert values(reader) == [b"0", b"1", b"2", b"new"]
        with pytest.raises(SegmentlogError):
            reader.topic("t").partition(0).append([b"x"])


def test_unshipped_records_are_logged(machine: Create, caplog: pytest.LogCaptureFixture) -> None:
    """The line has topic, partition and offsets, and the folder that contains the records."""
    first, _ = replaced_owner(machine)
    first.stop()
    first.cycle()
    assert f"{first.folder}/@former/1: not shipped, and only in this folder: t/0: offsets 3 to 3" in caplog.text


# ------------------------------------------------------------ stores and folders


def test_an_owner_that_has_ended_shipping(machine: Create, caplog: pytest.LogCaptureFixture) -> None:
    """Its store is independent now: a standby does not take it over, and does not retry in each cycle."""
    first, second = owner_with(machine)
    assert first.store is not None
    stop_shipping(first.store._topics, first.bucket)
    second.probe_result = REFUSED
    for _ in range(20):
        status = second.cycle()
    assert (status.role, status.error, "has ended shipping" in status.reason) == ("standby", "", True)
    assert "taking over" not in caplog.text
    assert find_role(first.bucket, FS, str(first.folder)) is Role.OWNER


def test_a_store_of_which_some_topics_are_shipped_is_not_set_aside(machine: Create, bucket: Memory) -> None:
    """The other topics exist only there, and programs append to them: the standby needs another folder."""
    first, second = machine("m1"), machine("m2")
    store = first.store = LogStore(_made(first.folder), background=False, clock=first.clock)
    for name in ("t", "mine"):
        store.create_topic(name, fsync="always").partition(0).append([b"1"])
    (first.folder / "@server").write_bytes(_server_file(second))
    for _ in range(2):
        shipper = Shipper(store._topics, bucket, topic_patterns=("t",), parallel=0)
        shipper.ship()
        shipper.close()
    second.cycle()
    second.probe_result = REFUSED
    second.cycles_until("owner")
    status = first.cycle()
    assert "contains other topics that were not shipped" in status.error
    assert store.topic("mine").partition(0).append([b"2"]) == 1


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _server_file(one: Machine) -> bytes:
    one.folder.mkdir(exist_ok=True)
    from segmentlog.format.server_file import ServerFile, encode_server_file

    return encode_server_file(ServerFile(1, "x", (one.node,)))


def test_a_store_that_lost_the_race_for_the_url(machine: Create, bucket: Memory) -> None:
    """Two machines began to ship two stores to one URL. The other machine's store is not a former one."""
    first, second = machine("m1"), machine("m2")
    with LogStore(_made(second.folder), background=False) as other:
        other.create_topic("mine", fsync="always").partition(0).append([b"1"])
    write_binding(FS, str(second.folder), Binding(bucket.url, "x", 1, folder_id(FS, str(second.folder))))
    first.serve()
    status = second.cycle()
    assert "is another store" in status.error
    with LogStore(second.folder, background=False) as other:
        assert values(other, "mine") == [b"1"]


def test_the_first_machine_is_the_owner(machine: Create, bucket: Memory) -> None:
    """Its store is not shipped yet: the server of this machine will do it."""
    first = machine("m1")
    LogStore(_made(first.folder), background=False).close()
    status = first.cycle()
    assert (status.role, status.error) == ("owner", "")


def test_an_owner_is_not_set_aside(machine: Create, bucket: Memory) -> None:
    """A store that is not fenced or was never shipped is not set aside, either."""
    first, second = owner_with(machine)
    with pytest.raises(ShippingRefused, match="store of the owner"):
        set_aside_former_store(bucket, FS, str(first.folder))
    second.probe_result = REFUSED
    second.cycles_until("owner")
    with pytest.raises(ShippingRefused, match="is not fenced"):
        set_aside_former_store(bucket, FS, str(first.folder))
    with pytest.raises(ShippingRefused, match="is not a store that was shipped"):
        set_aside_former_store(bucket, FS, str(_made(machine("m3").folder)))
    assert values(first.store or first.serve()) == [b"0", b"1", b"2"]


def test_an_unfinished_takeover_without_a_manifest(machine: Create, bucket: Memory) -> None:
    """The folder is not a store yet: a server must not create a new one in it."""
    _, second = owner_with(machine)
    second.stop()
    (second.folder / "@replica").unlink()
    (second.folder / "store.json").unlink()
    write_binding(FS, str(second.folder), Binding(bucket.url, "x", 2, folder_id(FS, str(second.folder)), begun=True))
    bucket.delete([MANIFEST_KEY])
    with pytest.raises(ShippingRefused, match="the manifest is missing"):
        find_role(bucket, FS, str(second.folder))


def test_an_unfinished_restore_is_not_a_takeover(machine: Create, bucket: Memory) -> None:
    """A person restores something else into the folder."""
    _, second = owner_with(machine)
    (second.folder / "@replica").unlink()
    (second.folder / "@restoring").write_text('{"url": "memory://bucket", "topics": ["t"]}')
    (second.folder / "store.json").unlink()
    with pytest.raises(ShippingRefused, match="unfinished restore"):
        find_role(bucket, FS, str(second.folder))


def test_a_former_folder_of_that_epoch_exists(machine: Create) -> None:
    """Another store was set aside there: both stay as they are."""
    first, _ = replaced_owner(machine)
    first.stop()
    with LogStore(first.folder / "@former" / "1", background=False) as older:
        older.create_topic("t", fsync="always").partition(0).append([b"older"])
    assert first.cycle().error == ""
    for name, wanted in (("1", [b"older"]), ("1~2", [b"0", b"1", b"2", b"never shipped"])):
        with LogStore(first.folder / "@former" / name, background=False, read_only=True) as former:
            assert values(former) == wanted


def test_files_that_are_not_part_of_the_store(machine: Create, caplog: pytest.LogCaptureFixture) -> None:
    """A mounted disk has lost+found, and people leave keys and notes: all stay, also in a restart and a takeover.

    A file with the name of a topic of the new owner is moved: the replica needs the name.
    """
    first, second = replaced_owner(machine)
    assert second.store is not None
    second.store.create_topic("new")
    second.ship()
    first.stop()
    (first.folder / "lost+found").mkdir()
    for folder in ("notes", "reports/2024"):
        (first.folder / folder).mkdir(parents=True)
        (first.folder / folder / "text").write_text("mine")
    (first.folder / "link").symlink_to("/nowhere")
    (first.folder / "new").write_text("in the way")
    assert first.cycle().error == ""
    assert "not part of the store, and stay: link, notes, reports" in caplog.text
    assert (first.folder / "@former" / "1" / "new").read_text() == "in the way"
    first.stop()
    second.stop()
    assert first.cycle().error == ""
    first.probe_result = REFUSED
    first.cycles_until("owner")
    first.stop()
    assert values(first.serve()) == [b"0", b"1", b"2", b"new"]
    assert {"lost+found", "link"} <= set(os.listdir(first.folder))
    assert [(first.folder / folder / "text").read_text() for folder in ("notes", "reports/2024")] == ["mine", "mine"]
    unknown = [found.path for found in inspect_store(str(first.folder)) if "not a topic" in found.what]
    assert sorted(map(os.path.basename, unknown)) == ["link", "notes"]


def test_read_only_segments_are_not_linked(machine: Create) -> None:
    """A replica writes to its files; those of the former store stay as they are."""
    first, _ = replaced_owner(machine, 30, segment_bytes=500)
    first.stop()
    sealed = sorted((first.folder / "t" / "0").glob("*.log"))[0]
    sealed.chmod(0o444)
    inode = sealed.stat().st_ino
    assert first.cycle().error == ""
    assert sealed.stat().st_ino != inode
    with LogStore(first.folder, background=False) as replica:
        assert values(replica)[-1] == b"new"


@pytest.mark.parametrize("error", [errno.EPERM, errno.EXDEV, errno.EMLINK, errno.EACCES, errno.EIO])
def test_links_are_refused(machine: Create, error: int) -> None:
    """The replica downloads the segments instead."""
    first, _ = replaced_owner(machine, 30, segment_bytes=500)
    first.stop()
    fs = FaultyFileSystem()
    fs.fail("link", error, times=None)
    first.cycle()
    first.stop()
    _use(first, fs)
    status = first.standby.run_cycle() if first.standby is not None else None
    assert status is not None
    assert (status.role, status.error) == ("standby", "")


def _use(one: Machine, fs: FileSystem) -> None:
    """Let the standby of a machine use another file system."""
    one.folder.mkdir(exist_ok=True)
    one.standby = standby_module.Standby(
        "memory://", str(one.folder), probe=one._probe, fence_store=one.fence, nodes=(one.node,), bucket=one.bucket,
        clock=one.clock, parallel=0, fs=fs,
    )  # fmt: skip


def test_a_full_disk_while_the_store_is_set_aside(machine: Create) -> None:
    """The cycle fails with that error; when there is room again, the next one finishes."""
    first, _ = replaced_owner(machine)
    first.stop()
    first.fence()
    for room_bytes in (0, 10, 100, 200, 400, 800):
        fs = FaultyFileSystem()
        fs.room_bytes = room_bytes
        _use(first, fs)
        assert first.cycle().error
        first.stop()
    assert first.cycle().error == ""
    with LogStore(first.folder / "@former" / "1", background=False, read_only=True) as former:
        assert values(former) == [b"0", b"1", b"2", b"never shipped"]


def test_a_wall_clock_that_goes_back(machine: Create) -> None:
    """Decisions use the monotonic clock, and the manifest's order is its sequence."""
    first, second = owner_with(machine)
    first.clock.wall_ms -= 86_400_000
    second.probe_result = REFUSED
    assert second.cycles_until("owner") == 4
    second.stop()
    second.serve().topic("t").partition(0).append([b"new"])
    second.ship()
    first.stop()
    assert first.cycle().error == ""
    with LogStore(first.folder, background=False) as replica:
        assert values(replica) == [b"0", b"1", b"2", b"new"]


def test_a_former_store_with_evicted_segments(machine: Create, bucket: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sealed segments are in the object store only: the replica downloads them, and the former store reads them."""
    monkeypatch.setattr("segmentlog.objects.tier.remote_reader.open_bucket", lambda url: bucket)
    first, second = owner_with(machine, 30, segment_bytes=500, remote_storage_enable=True, local_retention_ms=0)
    log = first.store.topic("t").partition(0) if first.store is not None else None
    assert log is not None
    for _ in range(5):
        first.clock.advance(60_000)
        first.ship()
        shipper = Shipper(first.store._topics, bucket, parallel=0)  # type: ignore[union-attr]
        shipper.run_cycle()
        shipper.close()
    assert any(segment.remote for segment in log.segments())
    log.append([b"never shipped"])
    second.cycle()
    second.probe_result = REFUSED
    second.cycles_until("owner")
    second.stop()
    second.serve().topic("t").partition(0).append([b"new"])
    second.ship()
    first.stop()
    assert first.cycle().error == ""
    with LogStore(first.folder, background=False) as replica:
        assert values(replica) == [*(b"%d" % number for number in range(30)), b"new"]
    with LogStore(first.folder / "@former" / "1", background=False, read_only=True) as former:
        assert values(former) == [*(b"%d" % number for number in range(30)), b"never shipped"]


def test_a_takeover_by_hand_on_the_standby_s_machine(machine: Create, bucket: Memory) -> None:
    """`segmentlog takeover` completes what the standby has begun, and the standby finds that it is the owner."""
    _, second = owner_with(machine)
    second.stop()
    take_over(bucket, str(second.folder), parallel=0, clock=second.clock)
    assert second.cycle().role == "owner"
    assert sorted(os.listdir(second.folder / "t")) == ["0", "topic.json"]


def test_a_store_of_format_1(machine: Create, bucket: Memory) -> None:
    """An old release made it, with all kinds of records: it is taken over, and set aside, as any other."""
    first, second = machine("m1"), machine("m2")
    unpack(STORES / "closed.tar.gz", _made(first.folder))
    folder = next(path.parent for path in first.folder.rglob("store.json"))
    first.folder = folder
    assert find_role(bucket, FS, str(folder)) is Role.OWNER
    store = first.serve()
    topics = store.topics()
    assert len(topics) > 3
    second.cycle()
    second.probe_result = REFUSED
    second.cycles_until("owner")
    second.stop()
    assert second.serve().topics() == topics
    first.stop()
    assert first.cycle().error == ""
    for path in (folder, folder / "@former" / "1"):
        with LogStore(path, background=False, read_only=True, clock=first.clock) as found:
            assert found.topics() == topics
