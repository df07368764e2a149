"""Prepare Kafka batches for an append: add our header, and leave the records as the client sent them.

An append writes our header (96 bytes) and Kafka's (61 bytes), which are built here, and then the client's records,
which are neither copied nor changed. Setting offset and epoch changes both headers but neither checksum of the payload:
Kafka's CRC and our hash skip these fields. Any other change recomputes both.
"""

from __future__ import annotations

import struct
from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash

from segmentlog.errors import RecordTooLarge
from segmentlog.format.batch import (
    CHECKED_SIZE,
    CHECKSUM,
    CODEC_MASK,
    DELETE_HORIZON,
    HEADER,
    HEADER_SIZE,
    KAFKA_LAYOUT,
    LEADER_EPOCH_MASK,
    LOG_APPEND_TIME,
    MAGIC,
    MIRRORED,
    PLACE_SIZE,
    TRANSACTIONAL,
    WIRE_HEADER_SIZE,
    BatchHeader,
    hash_of,
    wire_raw_max,
)
from segmentlog.format.batch_codecs import CODEC_NONE, Compression
from segmentlog.format.encode import EncodedBatch
from segmentlog.format.wire import (
    CRC,
    CRC_FROM,
    CRC_POSITION,
    LENGTH_BEHIND,
    WIRE_HEADER,
    Buffer,
    WireHeader,
    crc32c_of,
    pack_wire_batch,
    parse_wire_batch,
)
from segmentlog.format.wire_codecs import compress_records
from segmentlog.format.wire_records import WireRecords

_PLACE = struct.Struct("<qI")
_PLACE_POSITION: Final = 8
_WIRE_OFFSET = struct.Struct(">q")
_WIRE_EPOCH = struct.Struct(">I")
_WIRE_EPOCH_POSITION: Final = HEADER_SIZE + 12
_LAST_DELTA_POSITION: Final = 20
_WIRE_LAST_DELTA = struct.Struct(">i")
_WIRE_LAST_DELTA_POSITION: Final = HEADER_SIZE + 23
_LAST_DELTA = struct.Struct("<I")
_LAST_DELTA_MAX: Final = 2**31 - 1
_ATTRIBUTES_POSITION: Final = 4
_MAX_TIMESTAMP = struct.Struct("<q")
_MAX_TIMESTAMP_POSITION: Final = 32
_WIRE_ATTRIBUTES = struct.Struct(">h")
_WIRE_ATTRIBUTES_POSITION: Final = HEADER_SIZE + 21
_WIRE_MAX_TIMESTAMP = struct.Struct(">q")
_WIRE_MAX_TIMESTAMP_POSITION: Final = HEADER_SIZE + 35
_PAYLOAD_CHECKSUM_POSITION: Final = 80


class EncodedWireBatch(EncodedBatch):
    """A Kafka batch that is checked and hashed, and has no offset yet.

    ``payload`` contains only the records. `placed_at` returns the two headers before them: our own, and Kafka's.
    """

    __slots__ = ("_base_sequence", "_producer_epoch")

    def __init__(self, data: Buffer, wire: WireHeader, checksum: int) -> None:
        """Keep a view of ``data`` until it is written. ``checksum`` is its XXH3-64 from byte `PLACE_SIZE` on."""
        size = len(data)
        attributes = wire.attributes & MIRRORED | KAFKA_LAYOUT
        head = bytearray(HEADER_SIZE + WIRE_HEADER_SIZE)
        HEADER.pack_into(
            head, 0, MAGIC, attributes, wire.producer_epoch, 0, 0, wire.last_offset_delta, wire.base_timestamp,
            wire.max_timestamp, wire.producer_id, wire.base_sequence, wire.record_count, size, size, 0, 0, size, 0,
            checksum, 0,
        )  # fmt: skip
        head[HEADER_SIZE:] = data[:WIRE_HEADER_SIZE]
        super().__init__(
            head, memoryview(data)[WIRE_HEADER_SIZE:], wire.record_count, wire.last_offset_delta, wire.max_timestamp,
            attributes & ~CODEC_MASK, wire.producer_id,
        )  # fmt: skip
        self.size_bytes = HEADER_SIZE + size
        self._producer_epoch, self._base_sequence = wire.producer_epoch, wire.base_sequence

    def placed_at(self, base_offset: int, epoch: int, append_time_ms: int | None = None) -> bytearray:
        """Return our header and Kafka's header for this offset and epoch.

        ``append_time_ms`` becomes the timestamp of every record.
        """
        header = self._header
        _PLACE.pack_into(header, _PLACE_POSITION, base_offset, epoch)
        _WIRE_OFFSET.pack_into(header, HEADER_SIZE, base_offset)
        _WIRE_EPOCH.pack_into(header, _WIRE_EPOCH_POSITION, epoch & LEADER_EPOCH_MASK)
        if append_time_ms is not None:
            self._set_append_time(append_time_ms)
        CHECKSUM.pack_into(header, CHECKED_SIZE, hash_of(header[:CHECKED_SIZE]))
        return header

    def set_producer(self, producer_id: int, producer_epoch: int, base_sequence: int, *, transactional: bool) -> None:
        """Check the producer's fields: the client has set them. Raise ValueError if they differ."""
        expected = producer_id, producer_epoch, base_sequence, transactional
        found = self.producer_id, self._producer_epoch, self._base_sequence, bool(self.attributes & TRANSACTIONAL)
        if expected != found:
            raise ValueError(
                f"(producer id, epoch, sequence, transactional) of the batch are {found}, not {expected}, as appended"
            )

    def extend_to(self, last_offset_delta: int) -> None:
        """Extend the batch to offsets after its last record, whose records compaction removed; at most 2^31 - 1."""
        last_offset_delta = min(last_offset_delta, _LAST_DELTA_MAX)
        if last_offset_delta == self.last_offset_delta:
            return
        self.last_offset_delta = last_offset_delta
        _LAST_DELTA.pack_into(self._header, _LAST_DELTA_POSITION, last_offset_delta)
        _WIRE_LAST_DELTA.pack_into(self._header, _WIRE_LAST_DELTA_POSITION, last_offset_delta)
        self._seal()

    def _set_append_time(self, append_time_ms: int) -> None:
        """Set the time as Kafka does: the base timestamp, to which deltas are relative, stays."""
        header = self._header
        self.max_timestamp = append_time_ms
        self.attributes |= LOG_APPEND_TIME
        header[_ATTRIBUTES_POSITION] |= LOG_APPEND_TIME
        header[_WIRE_ATTRIBUTES_POSITION + 1] |= LOG_APPEND_TIME
        _MAX_TIMESTAMP.pack_into(header, _MAX_TIMESTAMP_POSITION, append_time_ms)
        _WIRE_MAX_TIMESTAMP.pack_into(header, _WIRE_MAX_TIMESTAMP_POSITION, append_time_ms)
        self._seal()

    def _seal(self) -> None:
        """Recompute Kafka's CRC and our hash over the changed header and the records."""
        header, records = self._header, self.payload
        crc = crc32c_of(records, crc32c_of(header[HEADER_SIZE + CRC_FROM :]))
        CRC.pack_into(header, HEADER_SIZE + CRC_POSITION, crc)
        digest = xxhash.xxh3_64(header[HEADER_SIZE + PLACE_SIZE :])
        digest.update(records)
        CHECKSUM.pack_into(header, _PAYLOAD_CHECKSUM_POSITION, digest.intdigest())


def encode_wire(data: Buffer, wire: WireHeader, max_timestamp: int) -> EncodedWireBatch:
    """Return the batch of a client for an append. ``wire`` is its checked header.

    ``data`` must stay valid until it is written. As in Kafka, a client cannot set LogAppendTime or the largest
    timestamp: ``max_timestamp``, the largest timestamp of the records, replaces the client's.
    """
    corrected = wire._replace(attributes=wire.attributes & ~LOG_APPEND_TIME, max_timestamp=max_timestamp)
    if corrected != wire:
        data, wire = _with_header(data, corrected)
    return EncodedWireBatch(data, wire, hash_of(memoryview(data)[PLACE_SIZE:]))


def recompress_wire(
    wire: WireHeader, records: Buffer, compression: Compression, limit_bytes: int | None = None
) -> EncodedWireBatch:
    """Return the batch of a client with its decompressed ``records`` compressed by another codec.

    ``wire`` is the header to store, except for codec, length and CRC. Raise `RecordTooLarge` if the new batch takes
    more than ``limit_bytes``. Records stay uncompressed if readers would refuse the compression ratio.
    """
    codec, payload = _compressed_for_readers(compression.codec.number, records, compression.level)
    attributes = wire.attributes & ~CODEC_MASK | codec
    size = WIRE_HEADER_SIZE + len(payload)
    if limit_bytes is not None and size > limit_bytes:
        raise RecordTooLarge(size, limit_bytes)
    data, wire = _joined(wire._replace(attributes=attributes, batch_length=size - LENGTH_BEHIND), payload)
    return EncodedWireBatch(data, wire, hash_of(memoryview(data)[PLACE_SIZE:]))


def _compressed_for_readers(codec: int, records: Buffer, level: int | None = None) -> tuple[int, Buffer]:
    """Return (codec, compressed records), or (no codec, ``records``) if readers would refuse the compressed batch.

    A reader refuses a batch that decompresses to more bytes than `wire_raw_max` allows for its stored size.
    """
    payload = compress_records(codec, records, level)
    if WIRE_HEADER_SIZE + len(records) > wire_raw_max(WIRE_HEADER_SIZE + len(payload)):
        return CODEC_NONE, records
    return codec, payload


def _with_header(data: Buffer, wire: WireHeader) -> tuple[bytes, WireHeader]:
    """Return (the batch with ``wire`` as its header, the header with its new CRC)."""
    return _joined(wire, memoryview(data)[WIRE_HEADER_SIZE:])


def _joined(wire: WireHeader, records: Buffer) -> tuple[bytes, WireHeader]:
    """Return (the batch with this header and these stored records, the header with its new CRC)."""
    head = bytearray(WIRE_HEADER.pack(*wire))
    crc = crc32c_of(records, crc32c_of(head[CRC_FROM:]))
    CRC.pack_into(head, CRC_POSITION, crc)
    return b"".join((head, records)), wire._replace(crc=crc)


def stored_wire_batch(header: BatchHeader, payload: memoryview) -> EncodedWireBatch:
    """Return a stored batch, already checked, for another append. Its producer fields are those of ``header``."""
    wire = WireHeader._make(WIRE_HEADER.unpack_from(payload))
    transactional = header.attributes & TRANSACTIONAL
    expected = header.producer_id, header.producer_epoch, header.base_sequence, transactional
    if expected == (wire.producer_id, wire.producer_epoch, wire.base_sequence, wire.attributes & TRANSACTIONAL):
        return EncodedWireBatch(payload, wire, header.payload_checksum)
    data, wire = _with_header(
        payload,
        wire._replace(
            producer_id=header.producer_id,
            producer_epoch=header.producer_epoch,
            base_sequence=header.base_sequence,
            attributes=wire.attributes & ~TRANSACTIONAL | transactional,
        ),
    )
    return EncodedWireBatch(data, wire, hash_of(memoryview(data)[PLACE_SIZE:]))


def filter_wire_batch(
    header: BatchHeader,
    records: WireRecords,
    kept: npt.NDArray[np.bool_] | None,
    last_offset_delta: int,
    delete_horizon_ms: int | None,
) -> EncodedWireBatch:
    """Return the batch with only the records for which ``kept`` is true (None: all; at least one), in the same codec.

    The records keep the client's bytes, except timestamp deltas, which become relative to the delete horizon if there
    is one. Offsets stay the same. The producer and transaction fields are those of ``header``.
    """
    timestamps = records.timestamp_deltas + np.int64(header.base_timestamp)
    left = timestamps if kept is None else timestamps[kept]
    attributes = header.attributes & MIRRORED & ~DELETE_HORIZON
    base_timestamp = header.base_timestamp
    if delete_horizon_ms is not None:
        base_timestamp = delete_horizon_ms
        attributes |= DELETE_HORIZON
    elif header.attributes & DELETE_HORIZON:
        base_timestamp = int(left[0])
    codec, payload = _compressed_for_readers(header.codec, records.kept(kept, header.base_timestamp - base_timestamp))
    attributes = attributes & ~CODEC_MASK | codec
    data = pack_wire_batch(
        payload,
        base_offset=header.base_offset,
        leader_epoch=header.partition_epoch & LEADER_EPOCH_MASK,
        attributes=attributes,
        last_offset_delta=last_offset_delta,
        base_timestamp=base_timestamp,
        max_timestamp=header.max_timestamp if attributes & LOG_APPEND_TIME else int(left.max()),
        producer_id=header.producer_id,
        producer_epoch=header.producer_epoch,
        base_sequence=header.base_sequence,
        record_count=len(left),
    )
    return EncodedWireBatch(data, parse_wire_batch(data), hash_of(memoryview(data)[PLACE_SIZE:]))
