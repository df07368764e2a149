"""A batch that a Kafka client sent, on its way in: checked, hashed and placed as it is."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import msgspec
import numpy as np

from segmentlog.config import TopicConfig
from segmentlog.errors import InvalidRecord, InvalidWireBatch
from segmentlog.format.batch import LOG_APPEND_TIME
from segmentlog.format.wire import Buffer, WireHeader, parse_wire_batch
from segmentlog.format.wire_batch import encode_wire, recompress_wire
from segmentlog.format.wire_records import WireRecords, decode_records
from segmentlog.log.append.appender import Appender
from segmentlog.log.append.appends import Ack, Appends
from segmentlog.log.append.encoding import require_a_key
from segmentlog.log.handle import Handle
from segmentlog.log.producers import ProducerStamp
from segmentlog.quantities import EARLIEST_MS
from segmentlog.storage.state import CONFIG_WORD

_NAMED_MAX = 10_000
"""Of the records that lack a key. A client is told of each, and may have sent millions."""


class WireAppended(msgspec.Struct, frozen=True, gc=False):
    """What a server tells the client that sent a batch."""

    base_offset: int
    """Of the first record; where it is already, when the same producer sent the same batch before."""
    next_offset: int
    log_append_time_ms: int
    """The timestamp that all of its records have got; -1 where they keep their own, or were there before."""
    log_start_offset: int
    epoch: int
    """Of the partition."""
    owes_sync: bool = False
    """Whether the topic's policy wants it synced before it is acknowledged, and its caller said to see to that."""


def append_wire(
    handle: Handle, appender: Appender, appends: Appends, data: Buffer, ack: Ack | None, *, check_records: bool,
    sync: bool, transaction: Callable[[], None] | None = None, owns: Callable[[int], bool] | None = None,
) -> WireAppended:  # fmt: skip
    """`Partition.append_wire`."""
    if handle.page.words[CONFIG_WORD] != handle.config_version:
        handle.refresh_config()
    config = handle.config
    batch = encode_wire(data, config.max_message_bytes)
    wire = parse_wire_batch(data)
    if (
        check_records
        or config.compacts
        or config.recompresses(wire.codec)
        or (config.limits_decompressed and wire.codec)
    ):
        records = _check_records(memoryview(data), wire, config)
        if config.recompresses(wire.codec):
            # As Kafka: a client that says LogAppendTime is not believed.
            own = wire._replace(attributes=wire.attributes & ~LOG_APPEND_TIME)
            batch = recompress_wire(own, records.kept(None), config.compression, config.max_message_bytes)
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
        base_offset, owes_sync = appends.batches([batch], ack, stamp), False
    else:
        base_offset, owes_sync = appends.place([batch], stamp, wakes=False)[0], appends.owes_sync()
    log = handle.page.log.read()
    append_time_ms = batch.max_timestamp if batch.attributes & LOG_APPEND_TIME else -1
    next_offset = base_offset + wire.record_count
    return WireAppended(base_offset, next_offset, append_time_ms, log.log_start_offset, log.epoch, owes_sync)


def _check_records(data: memoryview, wire: WireHeader, config: TopicConfig) -> WireRecords:
    """Return the records.

    Raises `InvalidWireBatch` for records that do not decode, `InvalidRecord` for one that lacks a key it needs or is
    larger than the topic allows.
    """
    try:
        records = decode_records(data, wire.codec, wire.record_count)
        records.check()
    except ValueError as error:
        raise InvalidWireBatch("records", str(error)) from None
    _check_numbers(records, wire)
    if config.compacts:
        keyless = np.flatnonzero(records.null_keys())
        if keyless.size:
            raise require_a_key(int(keyless[0]), tuple(keyless[:_NAMED_MAX].tolist()))
    if wire.codec and config.limits_decompressed:
        _check_sizes(records, config.max_decompressed_message_bytes)
    return records


def _check_sizes(records: WireRecords, limit_bytes: int) -> None:
    """Raise `InvalidRecord` for a record of more than ``limit_bytes``, as Kafka counts them: without its length."""
    sizes = records.ends - records.starts
    larger = np.flatnonzero(sizes > limit_bytes)
    if larger.size:
        index = int(larger[0])
        wanted = f"at most max.decompressed.message.bytes = {limit_bytes} bytes; nothing of the batch was appended"
        raise InvalidRecord("records", index, f"{sizes[index]} bytes", wanted, tuple(larger[:_NAMED_MAX].tolist()))


def _check_numbers(records: WireRecords, wire: WireHeader) -> None:
    """Raise `InvalidWireBatch` for offset deltas other than 0, 1, 2 and so on, or a largest timestamp that is not."""
    if not np.array_equal(records.offset_deltas, np.arange(records.count)):
        raise InvalidWireBatch("records", "offset deltas that do not count from 0")
    stamps = records.timestamp_deltas + np.int64(wire.base_timestamp)
    if int(stamps.min()) < EARLIEST_MS:
        raise InvalidWireBatch("timestamp", f"a record of {int(stamps.min())} ms, before the year 1")
    largest = int(stamps.max())
    if largest != wire.max_timestamp and not wire.attributes & LOG_APPEND_TIME:
        raise InvalidWireBatch("timestamp", f"records up to {largest}, where the batch says {wire.max_timestamp}")
