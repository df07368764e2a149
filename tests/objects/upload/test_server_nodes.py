"""The addresses of the server's workers in the manifest: a standby probes them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import xxhash
from logs import FakeClock, NoSyncFileSystem
from msgspec.structs import replace
from objects.buckets import Memory

from segmentlog.format.manifest import MANIFEST_KEY, MalformedManifest, Manifest, decode_manifest, encode_manifest
from segmentlog.format.server_file import ServerFile, ServerNode, encode_server_file
from segmentlog.objects.takeover import take_over
from segmentlog.objects.upload.shipper import Shipper
from segmentlog.store import LogStore

NODES = (ServerNode(1, "m1", 9093), ServerNode(2, "::1", 9094))


@pytest.fixture
def bucket() -> Memory:
    """Return the object store."""
    return Memory()


@pytest.fixture
def clock() -> FakeClock:
    """Return the clock of all machines."""
    return FakeClock()


@pytest.fixture
def store(tmp_path: Path, clock: FakeClock) -> Iterator[LogStore]:
    """Open a store with one topic."""
    with LogStore(tmp_path / "store", background=False, fs=NoSyncFileSystem(), clock=clock) as opened:
        opened.create_topic("a").partition(0).append([b"1"])
        yield opened


@pytest.fixture
def shipper(store: LogStore, bucket: Memory) -> Iterator[Shipper]:
    """Create the shipper of that store."""
    made = Shipper(store._topics, bucket, parallel=0)
    yield made
    made.close()


def serve(store: LogStore, nodes: tuple[ServerNode, ...]) -> None:
    """Write the file of a server, as the supervisor does once it listens."""
    Path(store.path, "@server").write_bytes(encode_server_file(ServerFile(1, "m1:9092", nodes)))


def manifest(bucket: Memory) -> Manifest:
    """Return the manifest that is stored."""
    return decode_manifest(bucket.get(MANIFEST_KEY)[0])


def test_the_shipper_publishes_the_nodes_and_follows_changes(store: LogStore, shipper: Shipper, bucket: Memory) -> None:
    """A change is published within one cycle, also without records; without a change, nothing is published."""
    shipper.ship()
    assert manifest(bucket).owner.nodes == ()
    serve(store, NODES)
    assert shipper.run_cycle().put
    assert manifest(bucket).owner.nodes == NODES
    assert not shipper.run_cycle().put
    serve(store, NODES[:1])
    assert shipper.run_cycle().put
    assert manifest(bucket).owner.nodes == NODES[:1]
    owner = manifest(bucket).owner
    Path(store.path, "@server").unlink()
    assert shipper.run_cycle().put
    assert manifest(bucket).owner == replace(owner, nodes=())


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b'{"pid": 1, "address": "x", "nodes": [[0, "m1", 9092]]}'])
def test_a_damaged_file_of_a_server_names_no_nodes(
    store: LogStore, shipper: Shipper, bucket: Memory, content: bytes
) -> None:
    """It does not keep the store from being shipped."""
    Path(store.path, "@server").write_bytes(content)
    shipper.ship()
    assert manifest(bucket).owner.nodes == ()


def test_the_new_owner_replaces_the_nodes(
    tmp_path: Path, store: LogStore, shipper: Shipper, bucket: Memory, clock: FakeClock
) -> None:
    """Standbys must not probe the former owner instead of the new one."""
    serve(store, NODES)
    shipper.ship()
    other = (ServerNode(1, "m2", 9092),)
    take_over(bucket, str(tmp_path / "other"), nodes=other, fs=NoSyncFileSystem(), clock=clock, parallel=0)
    assert manifest(bucket).owner.nodes == other


def of_an_older_version(found: Manifest) -> bytes:
    """Return the manifest as a version without nodes and hand-overs wrote it."""
    fields = msgspec.json.decode(b"{" + encode_manifest(found).partition(b",")[2])
    del fields["owner"]["nodes"], fields["handed_over"]
    text = msgspec.json.encode(fields)
    return b'{"xxh3_64":"%s",' % xxhash.xxh3_64_hexdigest(text).encode() + text[1:]


def test_a_manifest_of_an_older_version_is_continued(
    tmp_path: Path, store: LogStore, shipper: Shipper, bucket: Memory, clock: FakeClock
) -> None:
    """It has no nodes and was not handed over; the shipper adds the nodes, and another machine can take over."""
    shipper.ship()
    shipper.close()
    data = of_an_older_version(manifest(bucket))
    assert b"nodes" not in data
    assert b"handed_over" not in data
    bucket.put(MANIFEST_KEY, data)
    assert not manifest(bucket).is_handed_over
    serve(store, NODES)
    again = Shipper(store._topics, bucket, parallel=0)
    assert again.run_cycle().put
    assert manifest(bucket).owner.nodes == NODES
    again.close()
    bucket.put(MANIFEST_KEY, data)
    taken = take_over(bucket, str(tmp_path / "other"), fs=NoSyncFileSystem(), clock=clock, parallel=0)
    assert taken.manifest.owner.epoch == 2


def test_nodes_that_contradict_each_other_are_damage(store: LogStore, shipper: Shipper, bucket: Memory) -> None:
    """The manifest is refused as a whole."""
    shipper.ship()
    found = manifest(bucket)
    wrong = replace(found, owner=replace(found.owner, nodes=(NODES[0], NODES[0])))
    with pytest.raises(MalformedManifest, match="two nodes have the same id"):
        decode_manifest(encode_manifest(wrong))


def test_an_idle_shipper_with_heartbeats_publishes_the_manifest_again(
    store: LogStore, shipper: Shipper, bucket: Memory, clock: FakeClock
) -> None:
    """Only if the manifest names a server: no standby takes over from an owner without one."""
    shipper.ship()
    shipper.heartbeat_ms = 4000
    clock.advance(6000)
    assert not shipper.run_cycle().put
    serve(store, NODES)
    assert shipper.run_cycle().put
    before = manifest(bucket)
    clock.advance(3999)
    assert not shipper.run_cycle().put
    clock.advance(1)
    assert shipper.run_cycle().put
    after = manifest(bucket)
    assert after.nonce != before.nonce
    assert replace(after, nonce="", sequence=0, shipped_ms=0) == replace(before, nonce="", sequence=0, shipped_ms=0)
