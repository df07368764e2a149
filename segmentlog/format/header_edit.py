"""Headers of batches that stand in a log already, changed: what is copied, cut or emptied keeps its offsets."""

from __future__ import annotations

from msgspec.structs import replace

from segmentlog.format.batch import (
    CODEC_MASK,
    DELETE_HORIZON,
    KAFKA_LAYOUT,
    LOG_APPEND_TIME,
    MAGIC,
    NO_VALUES,
    BatchHeader,
    hash_of,
    pack_header,
)


def gap_batch(base_offset: int, next_offset: int, epoch: int) -> bytes:
    """A batch without records: nothing is left of the offsets ``[base_offset, next_offset)``."""
    header = BatchHeader(
        magic=MAGIC,
        attributes=0,
        producer_epoch=-1,
        base_offset=base_offset,
        partition_epoch=epoch,
        last_offset_delta=next_offset - base_offset - 1,
        base_timestamp=0,
        max_timestamp=0,
        producer_id=-1,
        base_sequence=-1,
        record_count=0,
        payload_size=1,
        raw_size=1,
        timestamps_size=0,
        keys_size=0,
        values_size=1,
        headers_size=0,
        payload_checksum=hash_of(NO_VALUES),
        header_checksum=0,
    )
    return pack_header(header) + NO_VALUES


def extended_header(header: BatchHeader, last_offset_delta: int) -> bytes:
    """The header of a batch that is copied as it is, but ends behind its last record."""
    return pack_header(replace(header, last_offset_delta=last_offset_delta))


def emptied(header: BatchHeader) -> tuple[BatchHeader, bytes]:
    """(header, payload) of the batch without its records: its offsets and its producer's numbers are left.

    One of Kafka's has no records as one of columns does.
    """
    empty = replace(
        header,
        attributes=header.attributes & ~(CODEC_MASK | DELETE_HORIZON | LOG_APPEND_TIME | KAFKA_LAYOUT),
        record_count=0,
        payload_size=1,
        raw_size=1,
        timestamps_size=0,
        keys_size=0,
        values_size=1,
        headers_size=0,
        payload_checksum=hash_of(NO_VALUES),
    )
    return empty, NO_VALUES
