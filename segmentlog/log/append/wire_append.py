"""Append a batch of a Kafka client: check its records as readers do, then hash and store it.

Readers must not refuse a batch that the server acknowledged. So `decode_records`, the function that readers use,
decodes the records, and all of them are checked before anything is stored. An error names the reason and the wrong
records. The largest timestamp in the header is corrected, as Kafka does: searches by time and retention rely on it. If
the topic sets a codec of its own, the records are recompressed; otherwise the client's bytes are stored unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Final

import msgspec
import numpy as np

from segmentlog.config import CLIENT_TIMESTAMP_AFTER_MAX_MS, TopicConfig
from segmentlog.errors import InvalidRecord, InvalidWireBatch
from segmentlog.format.batch import LOG_APPEND_TIME
from segmentlog.format.batch_codecs import CODEC_NONE, Compression
from segmentlog.format.wire import Buffer, WireHeader, check_wire_batch
from segmentlog.format.wire_batch import EncodedWireBatch, encode_wire, recompress_wire
from segmentlog.format.wire_codecs import TooManyBytes
from segmentlog.format.wire_records import WireRecords, decode_records
from segmentlog.log.append.append_pipeline import Ack, AppendPipeline
from segmentlog.log.append.appender import Appender
from segmentlog.log.append.batch_encoding import require_a_key
from segmentlog.log.handle import Handle
from segmentlog.log.producer_state import ProducerStamp
from segmentlog.policy.timestamps import NAMED_MAX, accepts_timestamps, refused_timestamps
from segmentlog.quantities import EARLIEST_MS, KIB, LATEST_MS
from segmentlog.storage.state_page import CONFIG_WORD

SMALL_STORED_BYTES: Final = 64 * KIB
SMALL_RAW_BYTES: Final = 256 * KIB
"""A compressed batch of at most this size, stored and decompressed, is checked without ``unpacking``.

Such a batch takes no more memory and time than an uncompressed batch, unless a slow codec must compress it again.
"""


class WireAppended(msgspec.Struct, frozen=True, gc=False):
    """The result of an append, for the server's answer to the client."""

    base_offset: int
    """Offset of the first record. If the producer sent the same batch before, the offset of that earlier append."""
    next_offset: int
    log_append_time_ms: int
    """The timestamp that all records got; -1 if they keep their own timestamps, or were appended before."""
    log_start_offset: int
    epoch: int
    """The partition epoch."""
    needs_sync: bool = False
    """Whether the topic's policy requires a sync before the answer. The caller of `append_wire` must then sync."""

    @property
    def owes_sync(self) -> bool:
        """The name of `needs_sync` until version 0.1."""
        return self.needs_sync


def append_wire(
    handle: Handle, appender: Appender, pipeline: AppendPipeline, data: Buffer, ack: Ack | None, *, sync: bool,
    transaction: Callable[[], None] | None = None, owns: Callable[[int], bool] | None = None,
    unpacking: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> WireAppended:  # fmt: skip
    """See `Partition.append_wire`."""
    if handle.page.words[CONFIG_WORD] != handle.config_version:
        handle.refresh_config()
    config = handle.config
    wire = check_wire_batch(data, config.max_message_bytes)
    batch = _encode(memoryview(data), wire, config, handle.clock.now_ms(), unpacking)
    stamp = None
    if wire.producer_id >= 0:
        if wire.is_transactional:
            check = transaction or partial(appender.require_transaction, wire.producer_id)
        elif owns is None or owns(wire.producer_id):
            check = partial(appender.require_no_transaction, wire.producer_id)
        else:
            check = partial(appender.require_known, wire.producer_id, wire.producer_epoch)
        stamp = ProducerStamp(wire.producer_id, wire.producer_epoch, wire.base_sequence, wire.is_transactional, check)
    if sync:
        base_offset, needs_sync = pipeline.append_batches([batch], ack, stamp), False
    else:
        base_offset, needs_sync = pipeline.place([batch], stamp, wakes=False)[0], pipeline.needs_sync()
    log = handle.page.log.read()
    append_time_ms = batch.max_timestamp if batch.attributes & LOG_APPEND_TIME else -1
    next_offset = base_offset + wire.record_count
    return WireAppended(base_offset, next_offset, append_time_ms, log.log_start_offset, log.epoch, needs_sync)


def _encode(
    data: memoryview, wire: WireHeader, config: TopicConfig, now_ms: int,
    unpacking: Callable[[], AbstractContextManager[object]],
) -> EncodedWireBatch:  # fmt: skip
    """Check the batch as its readers will, and return it as it will be stored.

    Raise `InvalidWireBatch` for records that a reader would refuse, or with timestamps that the topic does not accept.
    Raise `InvalidRecord` for records that lack a required key, or are larger than the topic allows.
    """
    try:
        recompresses = config.recompresses(wire.codec)
        if wire.codec == CODEC_NONE and not recompresses:
            return _encode_checked(data, wire, config, now_ms)
        if len(data) <= SMALL_STORED_BYTES and (not recompresses or _is_fast(config.compression)):
            try:
                return _encode_checked(data, wire, config, now_ms, SMALL_RAW_BYTES)
            except TooManyBytes:
                pass
        with unpacking():
            return _encode_checked(data, wire, config, now_ms)
    except TooManyBytes as error:
        raise InvalidWireBatch("size", f"it decompresses to {error}, which is more than readers accept") from None


def _is_fast(compression: Compression) -> bool:
    """Return whether `SMALL_RAW_BYTES` are compressed in a few milliseconds. zstd takes 600 ms at its highest level."""
    name = compression.codec.name
    return name in ("none", "lz4", "snappy") or (name == "zstd" and compression.level <= 3)


def _encode_checked(
    data: memoryview, wire: WireHeader, config: TopicConfig, now_ms: int, limit_bytes: int | None = None
) -> EncodedWireBatch:
    """Check and encode in this thread. Raise `TooManyBytes` if the batch decompresses to more than ``limit_bytes``."""
    count = wire.record_count
    try:
        records = decode_records(
            data, wire.codec, count, wire.last_offset_delta, limit_bytes=limit_bytes, wants_fields=False
        )
    except TooManyBytes:
        raise
    except ValueError as error:
        index = getattr(error, "index", count)
        raise InvalidWireBatch("records", str(error), (index,) if index < count else ()) from None
    largest_ms = _check_timestamps(records, wire.base_timestamp, config, now_ms)
    if config.compacts and records.null_key_count:
        keyless = np.flatnonzero(records.null_keys())
        raise require_a_key(int(keyless[0]), tuple(keyless[:NAMED_MAX].tolist()))
    if wire.codec and records.size_bytes > config.max_decompressed_message_bytes:
        _check_sizes(records, config.max_decompressed_message_bytes)
    if not config.recompresses(wire.codec):
        return encode_wire(data, wire, largest_ms)
    # As in `encode_wire`, ignore LogAppendTime in a client's batch.
    own = wire._replace(attributes=wire.attributes & ~LOG_APPEND_TIME, max_timestamp=largest_ms)
    return recompress_wire(own, records.kept(None), config.compression, config.max_message_bytes)


def _check_sizes(records: WireRecords, limit_bytes: int) -> None:
    """Raise `InvalidRecord` for a record of more than ``limit_bytes``, counted without its length, as in Kafka."""
    sizes = records.body_sizes()
    larger = np.flatnonzero(sizes > limit_bytes)
    if larger.size:
        index = int(larger[0])
        expected = f"at most max.decompressed.message.bytes = {limit_bytes} bytes; nothing of the batch was appended"
        raise InvalidRecord("records", index, f"{sizes[index]} bytes", expected, tuple(larger[:NAMED_MAX].tolist()))


def _check_timestamps(records: WireRecords, base_ms: int, config: TopicConfig, now_ms: int) -> int:
    """Return the largest timestamp. Raise `InvalidWireBatch` for timestamps that the topic does not accept."""
    after_ms = CLIENT_TIMESTAMP_AFTER_MAX_MS
    least, largest = records.timestamp_delta_range
    first_ms, last_ms = base_ms + least, base_ms + largest
    if not accepts_timestamps(first_ms, last_ms, config, now_ms, after_ms):
        # Sums beyond 64 bits wrap around, as in every reader. Then either the sum or the base is refused.
        refused = refused_timestamps(records.timestamp_deltas + np.int64(base_ms), config, now_ms, after_ms)
        if refused is not None:
            first = refused.indices[0]
            why = f"record {first}: its timestamp is {refused.found_ms}; the topic accepts {refused.accepted}"
            raise InvalidWireBatch("timestamp", why, refused.indices)
    if not EARLIEST_MS <= base_ms <= LATEST_MS:
        raise InvalidWireBatch("timestamp", f"its base timestamp is {base_ms}, which no record can have")
    return last_ms
