"""The objects of a shipped store: one manifest, and the objects that it refers to.

    manifest.json                                    the only object that changes, by conditional puts
    segments/<topic id>/<partition>/<base>-<nonce>   sealed segments, byte for byte as in the partition's folder
    segments/<topic id>/<partition>/<base>-<nonce>.<part>       large ones in parts: 0, 1 and so on
    segments/<topic id>/<partition>/<base>-<nonce>.snapshot     the producer snapshot at the segment's base offset
    segments/<topic id>/<partition>/<base>-<nonce>.index        the segment's index, for readers of single ranges
    tails/<sequence>-<nonce>                         chunks of active segments, of all partitions, one after another
                                                     (a few KiB are stored in the manifest instead)
    files/<path>-<nonce>                             small files of the store itself

Every other object is written once, under a unique name, and never changed. An object that the manifest does not refer
to does not belong to the store, even if a listing shows it. A partition's log consists of its segments and, after them,
its chunks: each chunk continues the segment file ``segment`` at ``position``. The JSON keys are the field names of the
classes below, except that `ShippedPartition.offset_grant` is stored as ``ceiling``, and `Manifest.is_handed_over` as
``handed_over``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import msgspec

from segmentlog.errors import InvalidTopicName
from segmentlog.format.checkpoint import Compacted
from segmentlog.format.checksummed_json import ChecksumMismatch, add_checksum, remove_checksum
from segmentlog.format.file_names import MAX_PARTITIONS, check_topic_name, is_topic_id
from segmentlog.format.server_file import ServerNode, fault_of_nodes
from segmentlog.records import EpochStart, LostRange

MANIFEST_KEY: Final = "manifest.json"
MANIFEST_FORMAT: Final = 2
"""Written only if the manifest uses a feature that format 1 lacks: a segment in parts, or an inline tail."""

_NUMBER_MAX: Final = 2**63 - 1


class MalformedManifest(ValueError):
    """The object is not a manifest that this version can read."""


class StoredPart(msgspec.Struct, frozen=True, array_like=True):
    """Size and checksums of one of several objects that together contain a file."""

    size_bytes: int
    xxh3_64: str
    sha256: str


class Stored(msgspec.Struct, frozen=True, omit_defaults=True):
    """Key, size and checksums (hexadecimal) of an object.

    With ``parts`` it stands for the objects ``<key>.0``, ``<key>.1`` and so on, which have checksums of their own.
    """

    key: str
    size_bytes: int
    xxh3_64: str = ""
    sha256: str = ""
    parts: tuple[StoredPart, ...] = ()

    @property
    def objects(self) -> tuple[Stored, ...]:
        """The objects that contain the bytes, in order."""
        if not self.parts:
            return (self,)
        return tuple(
            Stored(f"{self.key}.{number}", part.size_bytes, part.xxh3_64, part.sha256)
            for number, part in enumerate(self.parts)
        )


class ShippedSegment(msgspec.Struct, frozen=True):
    """A sealed segment: offsets ``[base_offset, end_offset)``, and timestamps as in its batches (-1: none).

    ``index`` has the format of `format.index_file.pack_index`. Only ``log`` may have parts.
    """

    base_offset: int
    end_offset: int
    log: Stored
    base_timestamp: int = -1
    max_timestamp: int = -1
    snapshot: Stored | None = None
    index: Stored | None = None

    @property
    def objects(self) -> list[Stored]:
        """All objects that the segment refers to."""
        return [*self.log.objects, *(stored for stored in (self.snapshot, self.index) if stored is not None)]

    @property
    def is_in_parts(self) -> bool:
        """Whether the log has several objects."""
        return bool(self.log.parts)


class Chunk(msgspec.Struct, frozen=True):
    """Whole batches of the segment with base offset ``segment``, from byte ``position`` on.

    They are stored in the tail with number ``tail``, from byte ``start`` on, and contain offsets ``[base_offset,
    end_offset)``.
    """

    segment: int
    position: int
    size_bytes: int
    base_offset: int
    end_offset: int
    tail: int
    start: int
    xxh3_64: str
    max_timestamp: int = -1


class Snapshot(msgspec.Struct, frozen=True):
    """The producer snapshot at the base offset ``segment``."""

    segment: int
    object: Stored


class ShippedPartition(msgspec.Struct, frozen=True):
    """State of a partition at its last upload.

    ``offset_grant``: no offset at or above it has been assigned. ``generation`` changes whenever segments were replaced
    or truncated: then a reader cannot continue from what it has downloaded.
    """

    number: int
    offset_grant: int = msgspec.field(name="ceiling")
    log_start_offset: int
    end_offset: int
    generation: int
    epochs: tuple[EpochStart, ...]
    lost_ranges: tuple[LostRange, ...] = ()
    compacted: Compacted = Compacted()
    has_producers: bool = False
    active_base: int = 0
    """Base offset of the active segment."""
    segments: tuple[ShippedSegment, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    """Chunks of segments that are not uploaded whole yet: recently sealed segments, and the active segment."""
    snapshots: tuple[Snapshot, ...] = ()
    """Producer snapshots of these segments."""
    stable_offset: int = -1
    """Shipped markers decide every transaction below this offset; -1 if that is unknown."""
    markers_end_offset: int = -1
    """Between ``end_offset`` and this offset only transaction markers were appended; -1 if that is unknown.

    A consumer whose position is after such a marker has missed no record.
    """

    @property
    def epoch(self) -> int:
        """Epoch of the log at its last upload."""
        return self.epochs[-1].epoch

    @property
    def pieces(self) -> list[ShippedSegment | Chunk]:
        """Segments and chunks, in the order of offsets."""
        return [*self.segments, *self.chunks]

    @property
    def size_bytes(self) -> int:
        """Size of the log."""
        return sum(segment.log.size_bytes for segment in self.segments) + sum(chunk.size_bytes for chunk in self.chunks)


class ShippedTopic(msgspec.Struct, frozen=True):
    """A topic: its id, its present name, and the content of its ``topic.json``."""

    id: str
    name: str
    config: dict[str, Any]
    largest_batch_bytes: int
    partition_count: int
    partitions: tuple[ShippedPartition, ...] = ()


class Tail(msgspec.Struct, frozen=True, omit_defaults=True):
    """A sequence of chunks: the object that contains them, or, if they are small, their bytes (base64 in the JSON)."""

    number: int
    object: Stored | None = None
    data: bytes = b""

    @property
    def size_bytes(self) -> int:
        """Size of all chunks."""
        return len(self.data) if self.object is None else self.object.size_bytes


class Owner(msgspec.Struct, frozen=True):
    """The machine that may ship the store. ``id`` is new for each owner; a takeover increases ``epoch``.

    ``nodes`` are the workers of the server that serves the store there; empty if no server has served it.
    """

    epoch: int
    id: str
    host: str
    since_ms: int
    nodes: tuple[ServerNode, ...] = ()

    def __str__(self) -> str:
        return f"{self.host or 'another machine'} (owner's epoch {self.epoch})"


class Condemned(msgspec.Struct, frozen=True):
    """An object marked for deletion: nothing refers to it since ``since_ms`` (wall clock of the owner)."""

    key: str
    since_ms: int


class StoreFile(msgspec.Struct, frozen=True):
    """A small file of the store itself, by its path in the store's folder."""

    path: str
    object: Stored


class Manifest(msgspec.Struct, frozen=True):
    """The content of ``manifest.json``. Each put increases ``sequence``; each attempt to put it has a new ``nonce``."""

    store_id: str
    owner: Owner
    sequence: int
    nonce: str
    shipped_ms: int
    interval_ms: int
    topics: tuple[ShippedTopic, ...] = ()
    tails: tuple[Tail, ...] = ()
    files: tuple[StoreFile, ...] = ()
    condemned: tuple[Condemned, ...] = ()
    next_tail: int = 0
    ended: bool = False
    """Whether the owner has ended shipping. It may have appended records since, which the manifest does not contain."""
    is_handed_over: bool = msgspec.field(default=False, name="handed_over")
    """Whether the owner has stopped all appends and waits for another machine to take over.

    Every record is shipped, and each offset grant ends at the log end offset: a takeover leaves no gap.
    """
    format: int = 1

    def topic(self, topic_id: str) -> ShippedTopic | None:
        """Return the topic with this id; None if there is none."""
        return next((topic for topic in self.topics if topic.id == topic_id), None)

    def objects(self) -> list[Stored]:
        """Return all objects that the manifest refers to, sorted by key."""
        found = [tail.object for tail in self.tails if tail.object is not None] + [file.object for file in self.files]
        for topic in self.topics:
            for partition in topic.partitions:
                found += [stored for segment in partition.segments for stored in segment.objects]
                found += [snapshot.object for snapshot in partition.snapshots]
        return sorted(found, key=lambda stored: stored.key)


class _Version(msgspec.Struct):
    format: int


_decoder = msgspec.json.Decoder(Manifest)
_version_decoder = msgspec.json.Decoder(_Version)


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the bytes of ``manifest.json``."""
    segments = (segment for topic in manifest.topics for part in topic.partitions for segment in part.segments)
    is_new = any(tail.object is None for tail in manifest.tails) or any(segment.is_in_parts for segment in segments)
    written = MANIFEST_FORMAT if is_new else 1
    return add_checksum(msgspec.json.encode(msgspec.structs.replace(manifest, format=written)))


def decode_manifest(data: bytes) -> Manifest:
    """Decode ``manifest.json`` and check that it is consistent. Raise `MalformedManifest`."""
    try:
        found = _version_decoder.decode(data).format
        if not 1 <= found <= MANIFEST_FORMAT:
            raise MalformedManifest(
                f"the manifest has format {found}, but this version of segmentlog reads formats up to"
                f" {MANIFEST_FORMAT}; use the version of segmentlog that wrote it"
            )
        manifest = _decoder.decode(remove_checksum(data))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ChecksumMismatch) as error:
        raise MalformedManifest(f"the manifest is damaged: {error}") from None
    if wrong := fault_of_nodes(manifest.owner.nodes):
        raise MalformedManifest(f"the manifest contradicts itself: {wrong}")
    tails = {tail.number: tail.size_bytes for tail in manifest.tails}
    if both := [tail.number for tail in manifest.tails if (tail.object is None) != bool(tail.data)]:
        raise MalformedManifest(f"the manifest contradicts itself: tail {both[0]} is not either inline or an object")
    if wrong := _contradiction_of_lists(manifest):
        raise MalformedManifest(f"the manifest contradicts itself: {wrong}")
    for topic in manifest.topics:
        if wrong := _contradiction_of_topic(topic):
            raise MalformedManifest(f"the manifest contradicts itself at topic {topic.name!r}: {wrong}")
        for partition in topic.partitions:
            if wrong := _contradiction_of_partition(partition, tails):
                raise MalformedManifest(f"the manifest contradicts itself at {topic.name}/{partition.number}: {wrong}")
    return manifest


def _contradiction_of_lists(manifest: Manifest) -> str:
    """Return a description of the first entry that the manifest lists twice but must list once; "" if there is none."""
    lists: list[tuple[str, list[Any]]] = [
        ("topic name", [topic.name for topic in manifest.topics]),
        ("topic id", [topic.id for topic in manifest.topics]),
        ("tail number", [tail.number for tail in manifest.tails]),
        ("file path", [file.path for file in manifest.files]),
    ]
    for what, listed in lists:
        if (twice := _repeated(listed)) is not None:
            return f"it lists the {what} {twice!r} twice"
    return ""


def _contradiction_of_topic(topic: ShippedTopic) -> str:
    """Return why the entry of a topic, except its partitions, is wrong; "" if it is valid."""
    try:
        check_topic_name(topic.name, internal=True)
    except InvalidTopicName as error:
        return error.rule
    if not is_topic_id(topic.id):
        return f"its id {topic.id!r} is not a topic id (a UUID)"
    if not 1 <= topic.partition_count <= MAX_PARTITIONS:
        return f"it has {topic.partition_count} partitions, but a topic has 1 to {MAX_PARTITIONS}"
    numbers = [partition.number for partition in topic.partitions]
    if beyond := [number for number in numbers if not 0 <= number < topic.partition_count]:
        return f"it has {topic.partition_count} partitions, but the manifest lists partition {beyond[0]}"
    if (twice := _repeated(numbers)) is not None:
        return f"the manifest lists partition {twice} twice"
    if not 0 <= topic.largest_batch_bytes <= _NUMBER_MAX:
        return f"its largest batch has {topic.largest_batch_bytes} bytes"
    return ""


def _repeated(listed: list[Any]) -> Any:
    """Return the first element that occurs a second time; None if each occurs once."""
    seen = set()
    for element in listed:
        if element in seen:
            return element
        seen.add(element)
    return None


def _contradiction_of_partition(partition: ShippedPartition, tails: dict[int, int]) -> str:
    """Return why the entry of a partition is not valid; "" if it is valid."""
    if not partition.epochs:
        return "it has no epoch"
    if wrong := [number for number in _history_numbers(partition) if not 0 <= number <= _NUMBER_MAX]:
        return f"an offset, an epoch or a time is {wrong[0]}"
    if not 0 <= partition.log_start_offset <= partition.end_offset <= partition.offset_grant <= _NUMBER_MAX:
        return "its offsets are not in order"
    if not -1 <= partition.stable_offset <= partition.end_offset:
        return "its stable offset is after its end"
    markers_end_offset = partition.markers_end_offset
    if markers_end_offset != -1 and not partition.end_offset <= markers_end_offset <= partition.offset_grant:
        return "its transaction markers are outside the range they can be in"
    offset = 0
    for segment in partition.segments:
        if not offset <= segment.base_offset < segment.end_offset <= partition.end_offset:
            return f"segment {segment.base_offset} overlaps the one before it"
        if segment.is_in_parts and not _adds_up(segment.log):
            return f"the sizes of the parts of segment {segment.base_offset} do not add up to its size"
        offset = segment.end_offset
    continued = (-1, 0)
    for chunk in partition.chunks:
        is_next = (chunk.segment, chunk.position) == continued or (chunk.segment >= offset and chunk.position == 0)
        if not is_next or chunk.size_bytes < 1:
            return f"a chunk of segment {chunk.segment} at byte {chunk.position} does not continue the data before it"
        if not max(offset, chunk.segment) <= chunk.base_offset < chunk.end_offset <= partition.end_offset:
            return f"the chunk at offset {chunk.base_offset} overlaps the one before it"
        if not 0 <= chunk.start <= tails.get(chunk.tail, -1) - chunk.size_bytes:
            return f"the chunk at offset {chunk.base_offset} is not inside a tail"
        offset, continued = chunk.end_offset, (chunk.segment, chunk.position + chunk.size_bytes)
    bases = {one.base_offset for one in partition.segments} | {one.segment for one in partition.chunks}
    snapshots = [snapshot.segment for snapshot in partition.snapshots]
    if alone := [segment for segment in snapshots if segment not in bases | {partition.active_base}]:
        return f"it lists a snapshot of segment {alone[0]}, but no such segment"
    if (twice := _repeated(snapshots)) is not None:
        return f"it lists the snapshot of segment {twice} twice"
    if not max(offset if not partition.chunks else continued[0], 0) <= partition.active_base <= partition.end_offset:
        return f"the active segment at {partition.active_base} begins before the end of the others"
    return ""


def _history_numbers(partition: ShippedPartition) -> Iterator[int]:
    """Yield the numbers that a restore copies into the checkpoint. They must be valid in a checkpoint."""
    yield partition.generation
    for entry in partition.epochs:
        yield from (entry.epoch, entry.start_offset)
    for lost in partition.lost_ranges:
        yield from (lost.base_offset, lost.end_offset, lost.epoch)
    yield from (partition.compacted.cleaned_offset, partition.compacted.due_ms, partition.compacted.begun_offset)


def _adds_up(stored: Stored) -> bool:
    sizes = [part.size_bytes for part in stored.parts]
    return min(sizes) > 0 and sum(sizes) == stored.size_bytes
