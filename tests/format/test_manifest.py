"""The manifest: what is written is read, and what cannot be is refused with what is wrong."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from segmentlog.format.checkpoint import Compacted
from segmentlog.format.manifest import (
    Chunk,
    Condemned,
    MalformedManifest,
    Manifest,
    Owner,
    ShippedPartition,
    ShippedSegment,
    ShippedTopic,
    Snapshot,
    Stored,
    StoreFile,
    Tail,
    decode_manifest,
    encode_manifest,
)
from segmentlog.format.server_file import ServerNode
from segmentlog.records import EpochStart, LostRange


def stored(key: str, size_bytes: int = 100) -> Stored:
    """Return an object of that name."""
    return Stored(key, size_bytes, "0" * 16, "0" * 64)


PARTITION = ShippedPartition(
    number=0,
    offset_grant=2000,
    log_start_offset=3,
    end_offset=60,
    generation=2,
    epochs=(EpochStart(0, 0), EpochStart(1, 40)),
    lost_ranges=(LostRange(30, 40, 1, "a power cut", 5),),
    compacted=Compacted(10, 2, 3, 12),
    has_producers=True,
    active_base=40,
    segments=(
        ShippedSegment(0, 10, stored("segments/a"), 1, 9, stored("segments/a.snapshot")),
        ShippedSegment(10, 20, stored("segments/b")),
    ),
    chunks=(
        Chunk(20, 0, 50, 20, 25, 7, 0, "1" * 16, 4),
        Chunk(20, 50, 20, 25, 30, 7, 50, "2" * 16, 5),
        Chunk(40, 0, 30, 40, 60, 8, 0, "3" * 16, 6),
    ),
    snapshots=(Snapshot(20, stored("segments/c.snapshot")),),
)
MANIFEST = Manifest(
    store_id="5" * 32,
    owner=Owner(3, "me", "host", 17, (ServerNode(1, "m1", 9093), ServerNode(2, "m1", 9094))),
    sequence=12,
    nonce="n",
    shipped_ms=1000,
    interval_ms=500,
    topics=(ShippedTopic("0f2ea2a5-6b1c-4a4c-8d29-3f1d7c5f0b11", "t", {"retention.ms": 5}, 1000, 2, (PARTITION,)),),
    tails=(Tail(7, stored("tails/7")), Tail(8, stored("tails/8", 30))),
    files=(StoreFile("@groups/@configs", stored("files/f")),),
    condemned=(Condemned("tails/6", 900),),
    next_tail=9,
)


def with_partition(**changes: Any) -> Manifest:
    """Return the manifest, with something else in its partition."""
    topic = replace(MANIFEST.topics[0], partitions=(replace(PARTITION, **changes),))
    return replace(MANIFEST, topics=(topic,))


def test_what_is_written_is_read() -> None:
    """Everything survives, and it is JSON with the names in docs/format.md."""
    assert decode_manifest(encode_manifest(MANIFEST)) == MANIFEST
    document = msgspec.json.decode(encode_manifest(MANIFEST))
    assert document["format"] == 1
    assert document["topics"][0]["partitions"][0]["segments"][0]["log"]["key"] == "segments/a"


def test_objects_are_all_that_it_refers_to() -> None:
    """The list has every object except condemned ones: it must be safe to delete all others."""
    assert [one.key for one in MANIFEST.objects()] == [
        "files/f", "segments/a", "segments/a.snapshot", "segments/b", "segments/c.snapshot", "tails/7", "tails/8",
    ]  # fmt: skip
    assert PARTITION.size_bytes == 100 + 100 + 50 + 20 + 30
    assert PARTITION.epoch == 1


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"epochs": ()}, "no epoch"),
        ({"offset_grant": 59}, "not in order"),
        ({"log_start_offset": 61}, "not in order"),
        ({"log_start_offset": -1}, "not in order"),
        ({"segments": PARTITION.segments[::-1]}, "segment 0 overlaps"),
        ({"segments": (ShippedSegment(5, 5, stored("x")),)}, "segment 5 overlaps"),
        ({"chunks": (PARTITION.chunks[0], PARTITION.chunks[2], PARTITION.chunks[1])}, "does not continue the data"),
        ({"chunks": PARTITION.chunks[1:]}, "segment 20 at byte 50 does not continue"),
        ({"chunks": (replace(PARTITION.chunks[0], size_bytes=0),)}, "does not continue the data"),
        ({"chunks": (replace(PARTITION.chunks[0], base_offset=19),)}, "offset 19 overlaps"),
        ({"chunks": (*PARTITION.chunks[:2], replace(PARTITION.chunks[2], end_offset=61))}, "offset 40 overlaps"),
        ({"chunks": (replace(PARTITION.chunks[0], tail=6),)}, "is not inside a tail"),
        ({"chunks": (replace(PARTITION.chunks[0], start=51),)}, "is not inside a tail"),
        ({"chunks": (replace(PARTITION.chunks[0], start=-1),)}, "is not inside a tail"),
        ({"active_base": 39}, "active segment at 39"),
        ({"active_base": 61}, "active segment at 61"),
        ({"markers_end_offset": 59}, "markers"),
        ({"markers_end_offset": PARTITION.offset_grant + 1}, "markers"),
        ({"number": -7}, "has 2 partitions, but the manifest lists partition -7"),
        ({"number": 2}, "has 2 partitions, but the manifest lists partition 2"),
        ({"generation": -1}, "an epoch or a time is -1"),
        ({"epochs": (EpochStart(-1, 0),)}, "an epoch or a time is -1"),
        ({"epochs": (EpochStart(0, 2**63),)}, "an epoch or a time is 9223372036854775808"),
        ({"lost_ranges": (LostRange(-5, 40, 1, "a power cut", 5),)}, "an epoch or a time is -5"),
        ({"compacted": Compacted(-2, 1, 0, 0)}, "an epoch or a time is -2"),
        ({"snapshots": (Snapshot(21, stored("x")),)}, "a snapshot of segment 21, but no such segment"),
        ({"snapshots": PARTITION.snapshots * 2}, "the snapshot of segment 20 twice"),
    ],
)
def test_what_contradicts_itself_is_refused(changes: dict[str, Any], why: str) -> None:
    """A restore from such a manifest would create a log that never existed."""
    with pytest.raises(MalformedManifest, match=why):
        decode_manifest(encode_manifest(with_partition(**changes)))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"id": "no-uuid"}, "its id 'no-uuid' is not a topic id"),
        ({"id": "../../../etc"}, "is not a topic id"),
        ({"name": "../../x"}, "letters, digits"),
        ({"partition_count": 0}, "it has 0 partitions, but a topic has 1 to 100000"),
        ({"partition_count": -5}, "it has -5 partitions"),
        ({"partition_count": 150_000}, "it has 150000 partitions"),
        ({"partitions": (PARTITION, PARTITION)}, "lists partition 0 twice"),
        ({"largest_batch_bytes": -1}, "its largest batch has -1 bytes"),
    ],
)
def test_a_topic_that_no_store_can_hold_is_refused(changes: dict[str, Any], why: str) -> None:
    """A restore would report success but leave a store that does not open, or a partition that lacks its records."""
    with pytest.raises(MalformedManifest, match=why):
        decode_manifest(encode_manifest(replace(MANIFEST, topics=(replace(MANIFEST.topics[0], **changes),))))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"topics": (MANIFEST.topics[0], replace(MANIFEST.topics[0], name="u"))}, "the topic id '0f2ea2a5-.*' twice"),
        (
            {"topics": (MANIFEST.topics[0], replace(MANIFEST.topics[0], id="0f2ea2a5-6b1c-4a4c-8d29-3f1d7c5f0b12"))},
            "the topic name 't' twice",
        ),
        ({"tails": (*MANIFEST.tails, MANIFEST.tails[0])}, "the tail number 7 twice"),
        ({"files": MANIFEST.files * 2}, "the file path '@groups/@configs' twice"),
    ],
)
def test_an_entry_that_is_listed_twice_is_refused(changes: dict[str, Any], why: str) -> None:
    """A restore would write both to one place, and the order of the list would decide which of them remains."""
    with pytest.raises(MalformedManifest, match=why):
        decode_manifest(encode_manifest(replace(MANIFEST, **changes)))


@pytest.mark.parametrize(
    ("nodes", "why"),
    [
        ((ServerNode(1, "a", 1), ServerNode(1, "b", 2)), "two nodes have the same id"),
        ((ServerNode(0, "a", 1),), "is not the address of node 0"),
        ((ServerNode(1, "", 1),), "is not the address of node 1"),
        ((ServerNode(1, "a" * 256, 1),), "is not the address of node 1"),
        ((ServerNode(1, "a", 65536),), "'a':65536 is not the address"),
    ],
)
def test_an_impossible_address_is_refused(nodes: tuple[ServerNode, ...], why: str) -> None:
    """A standby would wait for an answer from an address that no server can have, and take over."""
    with pytest.raises(MalformedManifest, match=why):
        decode_manifest(encode_manifest(replace(MANIFEST, owner=replace(MANIFEST.owner, nodes=nodes))))


def test_any_byte_that_is_another_one_is_noticed() -> None:
    """A changed byte in a number or a name would otherwise give a valid manifest."""
    data = encode_manifest(MANIFEST)
    for position in range(len(data)):
        wrong = bytearray(data)
        wrong[position] ^= 1
        with pytest.raises(MalformedManifest, match=r"damaged|format"):
            decode_manifest(bytes(wrong))


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b"\xff", b'{"format": 1}', b'{"format": 1, "store_id": 5}'])
def test_what_is_no_manifest_is_refused(data: bytes) -> None:
    """Cut short, of another kind, or with keys missing."""
    with pytest.raises(MalformedManifest, match="damaged"):
        decode_manifest(data)


def test_a_newer_format_says_what_to_do() -> None:
    """The error comes first, whatever else the document holds."""
    with pytest.raises(MalformedManifest, match=r"format 3.*use the version of segmentlog that wrote it"):
        decode_manifest(b'{"format": 3, "tables": []}')


def test_any_byte_cut_off_is_noticed() -> None:
    """An object store gives all of an object or nothing; a proxy in between may not."""
    data = encode_manifest(MANIFEST)
    for length in range(0, len(data), 7):
        with pytest.raises(MalformedManifest):
            decode_manifest(data[:length])
