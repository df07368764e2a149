"""Map the engine's exceptions to Kafka error codes and messages."""

from __future__ import annotations

from typing import Final

from segmentlog.errors import (
    ConsumerFenced,
    CorruptBatch,
    DiskFull,
    GroupNotEmpty,
    InvalidConfig,
    InvalidRecord,
    InvalidTopicName,
    InvalidWireBatch,
    LogTruncated,
    ObjectStoreError,
    OffsetGrantExhausted,
    OffsetOutOfRange,
    OutOfOrderSequence,
    PartitionFailed,
    ProcessLimitError,
    ProducerBusy,
    ProducerFenced,
    ProducerNameInUse,
    ReadOnlyStore,
    RecordTooLarge,
    ShipUnconfirmed,
    StoreClosed,
    StoreFenced,
    TopicExists,
    TransactionAborted,
    UnknownTopic,
    UnreadableBatch,
)
from segmentlog.server.codec.kafka_errors import ErrorCode
from segmentlog.server.topic_ids import ForeignTopicId
from segmentlog.transactions.server_transactions import UnknownProducer, WrongState

_CODES: Final[tuple[tuple[type[Exception], ErrorCode], ...]] = (
    (ForeignTopicId, ErrorCode.UNKNOWN_TOPIC_ID),
    (UnknownTopic, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
    (TopicExists, ErrorCode.TOPIC_ALREADY_EXISTS),
    (InvalidTopicName, ErrorCode.INVALID_TOPIC_EXCEPTION),
    (InvalidConfig, ErrorCode.INVALID_CONFIG),
    (RecordTooLarge, ErrorCode.MESSAGE_TOO_LARGE),
    (InvalidRecord, ErrorCode.INVALID_RECORD),
    (OffsetOutOfRange, ErrorCode.OFFSET_OUT_OF_RANGE),
    (LogTruncated, ErrorCode.OFFSET_OUT_OF_RANGE),
    (OutOfOrderSequence, ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER),
    (ProducerFenced, ErrorCode.INVALID_PRODUCER_EPOCH),
    (ProducerBusy, ErrorCode.CONCURRENT_TRANSACTIONS),
    (TransactionAborted, ErrorCode.INVALID_TXN_STATE),
    (WrongState, ErrorCode.INVALID_TXN_STATE),
    (UnknownProducer, ErrorCode.INVALID_PRODUCER_ID_MAPPING),
    # Every client treats this code as fatal.
    (ProducerNameInUse, ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED),
    (ConsumerFenced, ErrorCode.UNKNOWN_MEMBER_ID),
    (GroupNotEmpty, ErrorCode.NON_EMPTY_GROUP),
    # Clients raise it to the application. They would retry KAFKA_STORAGE_ERROR, which cannot help here.
    (UnreadableBatch, ErrorCode.CORRUPT_MESSAGE),
    (CorruptBatch, ErrorCode.KAFKA_STORAGE_ERROR),
    (DiskFull, ErrorCode.KAFKA_STORAGE_ERROR),
    (PartitionFailed, ErrorCode.KAFKA_STORAGE_ERROR),
    (ProcessLimitError, ErrorCode.KAFKA_STORAGE_ERROR),
    (ObjectStoreError, ErrorCode.KAFKA_STORAGE_ERROR),
    # Kafka's codes for a cluster with too few in-sync replicas: clients retry.
    (OffsetGrantExhausted, ErrorCode.NOT_ENOUGH_REPLICAS),
    (ShipUnconfirmed, ErrorCode.NOT_ENOUGH_REPLICAS_AFTER_APPEND),
    (StoreFenced, ErrorCode.NOT_LEADER_OR_FOLLOWER),
    (ReadOnlyStore, ErrorCode.POLICY_VIOLATION),
    # Clients refresh their metadata and retry.
    (StoreClosed, ErrorCode.NOT_LEADER_OR_FOLLOWER),
    (OSError, ErrorCode.KAFKA_STORAGE_ERROR),
)


_OF_BATCHES: Final = {
    "magic": ErrorCode.UNSUPPORTED_FOR_MESSAGE_FORMAT,
    "length": ErrorCode.CORRUPT_MESSAGE,
    "crc": ErrorCode.CORRUPT_MESSAGE,
    "codec": ErrorCode.UNSUPPORTED_COMPRESSION_TYPE,
    "size": ErrorCode.MESSAGE_TOO_LARGE,
    "timestamp": ErrorCode.INVALID_TIMESTAMP,
    "transaction": ErrorCode.INVALID_TXN_STATE,
    "producer_id": ErrorCode.INVALID_PRODUCER_ID_MAPPING,
}
"""Error codes by the reason of an `InvalidWireBatch`. For every other reason the code is INVALID_RECORD."""


_MESSAGE_MAX: Final = 2000


def message_of(error: BaseException) -> str:
    """Return the text of an error. Omit the middle of a long text, because errors quote names of any length."""
    text = str(error)
    return text if len(text) <= _MESSAGE_MAX else f"{text[: _MESSAGE_MAX // 2]} ... {text[-_MESSAGE_MAX // 2 :]}"


def code_of(error: BaseException) -> ErrorCode:
    """Return the Kafka error code of an exception; `ErrorCode.UNKNOWN_SERVER_ERROR` for an unexpected one."""
    if isinstance(error, InvalidWireBatch):
        return _OF_BATCHES.get(error.reason, ErrorCode.INVALID_RECORD)
    for kind, code in _CODES:
        if isinstance(error, kind):
            return code
    return ErrorCode.UNKNOWN_SERVER_ERROR


def coordinator_code_of(error: BaseException) -> ErrorCode:
    """Return the error code of a coordinator's answer: as `code_of`, except for a log that this machine does not own.

    Kafka's coordinators translate the code in the same way. Clients then look for the coordinator again, and retry.
    They raise NOT_LEADER_OR_FOLLOWER to the application.
    """
    code = code_of(error)
    return ErrorCode.NOT_COORDINATOR if code is ErrorCode.NOT_LEADER_OR_FOLLOWER else code
