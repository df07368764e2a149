"""What lies in an object store of a store that is shipped there: one manifest, and what it refers to.

    manifest.json                                    the one object that changes, by conditional puts only
    segments/<topic id>/<partition>/<base>-<nonce>   sealed segments as they lie in a partition's folder
    segments/<topic id>/<partition>/<base>-<nonce>.<part>       those that are large, in parts: 0, 1 and so on
    segments/<topic id>/<partition>/<base>-<nonce>.snapshot     what was known of producers where one begins
    segments/<topic id>/<partition>/<base>-<nonce>.index        its index, for who reads parts of it
    tails/<sequence>-<nonce>                         chunks of active segments, of all partitions, one behind the other
                                                     (a few KiB lie in the manifest instead)
    files/<path>-<nonce>                             small files of the store itself

Objects are put once, under a name that no other has, and never changed. What the manifest does not refer to is not
there, whatever a list of objects says. The partition's log is its segments, and behind them its chunks: each continues
the segment file ``segment`` at ``position``. Names in the JSON are those of the classes below.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import msgspec
import xxhash

from segmentlog.errors import InvalidTopicName
from segmentlog.format.checkpoint import Compacted
from segmentlog.format.file_names import MAX_PARTITIONS, check_topic_name, is_topic_id
from segmentlog.records import EpochStart, LostRange

MANIFEST_KEY: Final = "manifest.json"
MANIFEST_FORMAT: Final = 2
"""Written only where there is something in it that format 1 has not: a segment in parts, a tail in the manifest."""

_NUMBER_MAX: Final = 2**63 - 1


class MalformedManifest(ValueError):
    """The object holds no manifest that this version can read."""


class StoredPart(msgspec.Struct, frozen=True, array_like=True):
    """What one of several objects holds that make a file."""

    size_bytes: int
    xxh3_64: str
    sha256: str


class Stored(msgspec.Struct, frozen=True, omit_defaults=True):
    """An object, and what it holds: checksums in hexadecimal digits.

    Or, where there are ``parts``, the objects ``<key>.0``, ``<key>.1`` and so on, which have checksums of their own.
    """

    key: str
    size_bytes: int
    xxh3_64: str = ""
    sha256: str = ""
    parts: tuple[StoredPart, ...] = ()

    @property
    def objects(self) -> tuple[Stored, ...]:
        """What lies there, one behind the other."""
        if not self.parts:
            return (self,)
        return tuple(
            Stored(f"{self.key}.{number}", part.size_bytes, part.xxh3_64, part.sha256)
            for number, part in enumerate(self.parts)
        )


class ShippedSegment(msgspec.Struct, frozen=True):
    """A sealed segment: offsets ``[base_offset, end_offset)``, timestamps as its batches have them (-1: none).

    ``index`` as `format.index_file.pack_index` makes it. The ``log`` alone may lie in parts.
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
        """All that it refers to."""
        return [*self.log.objects, *(stored for stored in (self.snapshot, self.index) if stored is not None)]

    @property
    def is_in_parts(self) -> bool:
        """Whether its log is more than one object."""
        return bool(self.log.parts)


class Chunk(msgspec.Struct, frozen=True):
    """Whole batches of the segment that begins at the offset ``segment``, from byte ``position`` on.

    They lie in the tail of that number, from byte ``start`` on, and hold offsets ``[base_offset, end_offset)``.
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
    """What was known of producers where the segment ``segment`` begins."""

    segment: int
    object: Stored


class ShippedPartition(msgspec.Struct, frozen=True):
    """One partition as it was shipped last; ``ceiling``: no offset at or above it was ever handed out.

    ``generation`` is another one whenever segments were replaced or cut: what was read before may not be continued.
    """

    number: int
    ceiling: int
    log_start_offset: int
    end_offset: int
    generation: int
    epochs: tuple[EpochStart, ...]
    lost_ranges: tuple[LostRange, ...] = ()
    compacted: Compacted = Compacted()
    has_producers: bool = False
    active_base: int = 0
    """The segment that is appended to begins at this offset."""
    segments: tuple[ShippedSegment, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    """Of segments that were not uploaded whole yet: those that were sealed a moment ago, and the active one."""
    snapshots: tuple[Snapshot, ...] = ()
    """Of those segments."""
    stable_offset: int = -1
    """Below it every transaction is decided, by markers that are shipped; -1: nothing is known of that."""
    markers_end_offset: int = -1
    """From ``end_offset`` up to here markers of transactions were appended, and no record; -1: nothing is known.

    Who stands behind one of them has missed nothing.
    """

    @property
    def epoch(self) -> int:
        """Of the log when it was shipped."""
        return self.epochs[-1].epoch

    @property
    def pieces(self) -> list[ShippedSegment | Chunk]:
        """All of the log, in the order of offsets."""
        return [*self.segments, *self.chunks]

    @property
    def size_bytes(self) -> int:
        """Of the whole log."""
        return sum(segment.log.size_bytes for segment in self.segments) + sum(chunk.size_bytes for chunk in self.chunks)


class ShippedTopic(msgspec.Struct, frozen=True):
    """A topic: its id, its name now, what its ``topic.json`` says beside that."""

    id: str
    name: str
    config: dict[str, Any]
    largest_batch_bytes: int
    partition_count: int
    partitions: tuple[ShippedPartition, ...] = ()


class Tail(msgspec.Struct, frozen=True, omit_defaults=True):
    """Chunks, one behind the other: an object, or where they are few bytes these themselves (base64 in the JSON)."""

    number: int
    object: Stored | None = None
    data: bytes = b""

    @property
    def size_bytes(self) -> int:
        """Of all its chunks."""
        return len(self.data) if self.object is None else self.object.size_bytes


class Owner(msgspec.Struct, frozen=True):
    """Who may ship: ``id`` is made when a store becomes the owner; the epoch goes up with every takeover."""

    epoch: int
    id: str
    host: str
    since_ms: int

    def __str__(self) -> str:
        return f"{self.host or 'another machine'} (owner's epoch {self.epoch})"


class Condemned(msgspec.Struct, frozen=True):
    """An object that nothing refers to since ``since_ms`` (the owner's wall clock): it is deleted after a while."""

    key: str
    since_ms: int


class StoreFile(msgspec.Struct, frozen=True):
    """A small file of the store itself: its path below the store's folder."""

    path: str
    object: Stored


class Manifest(msgspec.Struct, frozen=True):
    """All of it. ``sequence`` goes up by one with every put, ``nonce`` is another one for each that was tried."""

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
    """Whoever owned it ships no more, and goes on without: what it appends since, nobody here knows of."""
    format: int = 1

    def topic(self, topic_id: str) -> ShippedTopic | None:
        """The topic of that id."""
        return next((topic for topic in self.topics if topic.id == topic_id), None)

    def objects(self) -> list[Stored]:
        """All that it refers to, sorted by key."""
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


_CHECKSUM: Final = b'{"xxh3_64":"%s",'
"""What it begins with; the checksum is of the same text without it."""
_CHECKSUM_BYTES: Final = len(_CHECKSUM % (b"0" * 16))


def encode_manifest(manifest: Manifest) -> bytes:
    """The bytes of ``manifest.json``."""
    segments = (segment for topic in manifest.topics for part in topic.partitions for segment in part.segments)
    is_new = any(tail.object is None for tail in manifest.tails) or any(segment.is_in_parts for segment in segments)
    written = MANIFEST_FORMAT if is_new else 1
    text = msgspec.json.encode(msgspec.structs.replace(manifest, format=written))
    return _CHECKSUM % xxhash.xxh3_64_hexdigest(text).encode() + text[1:]


def decode_manifest(data: bytes) -> Manifest:
    """What ``manifest.json`` says, checked as far as it can be by itself. Raises `MalformedManifest`."""
    try:
        found = _version_decoder.decode(data).format
        if not 1 <= found <= MANIFEST_FORMAT:
            raise MalformedManifest(
                f"the manifest has format {found}, and this version of segmentlog reads formats up to"
                f" {MANIFEST_FORMAT}; use the version that wrote it"
            )
        text = b"{" + data[_CHECKSUM_BYTES:]
        if data[:_CHECKSUM_BYTES] != _CHECKSUM % xxhash.xxh3_64_hexdigest(text).encode():
            raise MalformedManifest("the manifest is damaged: its checksum is not that of what follows")
        manifest = _decoder.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedManifest(f"the manifest is damaged: {error}") from None
    tails = {tail.number: tail.size_bytes for tail in manifest.tails}
    if both := [tail.number for tail in manifest.tails if (tail.object is None) != bool(tail.data)]:
        raise MalformedManifest(f"the manifest contradicts itself: tail {both[0]} lies in two places, or in none")
    if wrong := _contradiction_of_lists(manifest):
        raise MalformedManifest(f"the manifest contradicts itself: {wrong}")
    for topic in manifest.topics:
        if wrong := _contradiction_of_topic(topic):
            raise MalformedManifest(f"the manifest contradicts itself at topic {topic.name!r}: {wrong}")
        for partition in topic.partitions:
            if wrong := _what_is_wrong(partition, tails):
                raise MalformedManifest(f"the manifest contradicts itself at {topic.name}/{partition.number}: {wrong}")
    return manifest


def _contradiction_of_lists(manifest: Manifest) -> str:
    """Name an entry that the manifest lists twice although it can exist once; empty when there is none."""
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
    """Say why no store can hold the topic; empty when nothing is wrong. Its partitions are checked separately."""
    try:
        check_topic_name(topic.name, internal=True)
    except InvalidTopicName as error:
        return error.rule
    if not is_topic_id(topic.id):
        return f"its id {topic.id!r} is not a topic id (a UUID)"
    if not 1 <= topic.partition_count <= MAX_PARTITIONS:
        return f"it has {topic.partition_count} partitions, and a topic has 1 to {MAX_PARTITIONS}"
    numbers = [partition.number for partition in topic.partitions]
    if beyond := [number for number in numbers if not 0 <= number < topic.partition_count]:
        return f"it has {topic.partition_count} partitions, and the manifest lists partition {beyond[0]}"
    if (twice := _repeated(numbers)) is not None:
        return f"the manifest lists partition {twice} twice"
    if not 0 <= topic.largest_batch_bytes <= _NUMBER_MAX:
        return f"its largest batch has {topic.largest_batch_bytes} bytes"
    return ""


def _repeated(listed: list[Any]) -> Any:
    """Return the first element that occurs a second time; None when each occurs once."""
    seen = set()
    for element in listed:
        if element in seen:
            return element
        seen.add(element)
    return None


def _what_is_wrong(partition: ShippedPartition, tails: dict[int, int]) -> str:
    """Why a partition's entry cannot be; empty when nothing is wrong."""
    if not partition.epochs:
        return "no epoch"
    if wrong := [number for number in _history_numbers(partition) if not 0 <= number <= _NUMBER_MAX]:
        return f"an offset, an epoch or a time of {wrong[0]}"
    if not 0 <= partition.log_start_offset <= partition.end_offset <= partition.ceiling <= _NUMBER_MAX:
        return "its offsets do not ascend"
    if not -1 <= partition.stable_offset <= partition.end_offset:
        return "transactions are decided behind its end"
    markers_end_offset = partition.markers_end_offset
    if markers_end_offset != -1 and not partition.end_offset <= markers_end_offset <= partition.ceiling:
        return "markers are said to lie where there are none"
    offset = 0
    for segment in partition.segments:
        if not offset <= segment.base_offset < segment.end_offset <= partition.end_offset:
            return f"segment {segment.base_offset} overlaps the one before it"
        if segment.is_in_parts and not _adds_up(segment.log):
            return f"the parts of segment {segment.base_offset} are not as large as the whole"
        offset = segment.end_offset
    continued = (-1, 0)
    for chunk in partition.chunks:
        is_next = (chunk.segment, chunk.position) == continued or (chunk.segment >= offset and chunk.position == 0)
        if not is_next or chunk.size_bytes < 1:
            return f"a chunk of segment {chunk.segment} at byte {chunk.position} continues nothing"
        if not max(offset, chunk.segment) <= chunk.base_offset < chunk.end_offset <= partition.end_offset:
            return f"the chunk at offset {chunk.base_offset} overlaps the one before it"
        if not 0 <= chunk.start <= tails.get(chunk.tail, -1) - chunk.size_bytes:
            return f"the chunk at offset {chunk.base_offset} lies in no tail"
        offset, continued = chunk.end_offset, (chunk.segment, chunk.position + chunk.size_bytes)
    bases = {one.base_offset for one in partition.segments} | {one.segment for one in partition.chunks}
    snapshots = [snapshot.segment for snapshot in partition.snapshots]
    if alone := [segment for segment in snapshots if segment not in bases | {partition.active_base}]:
        return f"it lists a snapshot of segment {alone[0]}, and no such segment"
    if (twice := _repeated(snapshots)) is not None:
        return f"it lists the snapshot of segment {twice} twice"
    if not max(offset if not partition.chunks else continued[0], 0) <= partition.active_base <= partition.end_offset:
        return f"the active segment at {partition.active_base} begins before others end"
    return ""


def _history_numbers(partition: ShippedPartition) -> Iterator[int]:
    """Yield the numbers that a restore copies into the checkpoint, which refuses those that are out of range."""
    yield partition.generation
    for entry in partition.epochs:
        yield from (entry.epoch, entry.start_offset)
    for lost in partition.lost_ranges:
        yield from (lost.base_offset, lost.end_offset, lost.epoch)
    yield from (partition.compacted.cleaned_offset, partition.compacted.due_ms, partition.compacted.begun_offset)


def _adds_up(stored: Stored) -> bool:
    sizes = [part.size_bytes for part in stored.parts]
    return min(sizes) > 0 and sum(sizes) == stored.size_bytes
