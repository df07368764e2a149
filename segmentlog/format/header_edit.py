"""Change the headers of stored batches that are copied, extended or emptied.

The records that stay keep their offsets.
"""

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
    """Return a batch without records that covers the offsets ``[base_offset, next_offset)``."""
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
    """Return the header of a batch that covers offsets up to ``last_offset_delta``, for the same payload."""
    return pack_header(replace(header, last_offset_delta=last_offset_delta))


def emptied_batch(header: BatchHeader) -> tuple[BatchHeader, bytes]:
    """Return (header, payload) of the batch without its records; offsets and producer fields stay.

    A Kafka batch becomes a batch of columns.
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
