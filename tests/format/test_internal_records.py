"""Golden records of the internal topics: the layout of offsets and transactions stays the same."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import msgspec

from segmentlog.format.file_names import topic_id_of_name
from segmentlog.groups.committed_offsets import CommittedOffset, decode_key, encode
from segmentlog.records import PartitionId, TopicPartition
from segmentlog.transactions.transaction_log import (
    TransactionLog,
    TransactionState,
    UnconfirmedMarker,
    encode_key,
    encode_state,
)

GOLDEN = Path(__file__).parent / "golden"
STORE_ID = "9d1d3a1c0f2b4f5e8a7c6b5d4e3f2a10"
TOPIC_ID = "6a2bd7f4-3a4c-4f0e-9c3b-b3a9a3e54d10"
NOW_MS = 1_700_000_000_000


def golden(name: str) -> tuple[bytes, bytes]:
    """Key and value."""
    return (GOLDEN / f"{name}.key").read_bytes(), (GOLDEN / f"{name}.value").read_bytes()


def state(topic_id: str) -> TransactionState:
    """Return the state in the golden records."""
    return TransactionState(
        2**60 + 1, 3, "PrepareCommit", 60_000, NOW_MS, NOW_MS + 1, (PartitionId(topic_id, 0),),
        (UnconfirmedMarker(topic_id, 1, 99, 2),), 17, {topic_id: 3}, (42,), "a note",
    )  # fmt: skip


def test_a_position_is_written_and_read_as_ever() -> None:
    """The record has the topic's id."""
    key, value = golden("position")
    tp = TopicPartition("orders", 4)
    made = encode(
        "billing", {tp: (1000, 3)}, lambda tp: TOPIC_ID,
        metadata="half way", committed_ms=NOW_MS, generation=7, member="member-1",
    )  # fmt: skip
    assert made == ([key], [value])
    assert decode_key(key, STORE_ID) == ("billing", PartitionId(TOPIC_ID, 4))
    expected = CommittedOffset(1000, 3, "half way", NOW_MS, 7, "member-1")
    assert msgspec.msgpack.decode(value, type=CommittedOffset) == expected


def test_a_position_of_format_1_is_read_as_ever() -> None:
    """Its name stands for the id that the topic got when it had none."""
    key, _ = golden("position_by_name")
    assert decode_key(key, STORE_ID) == ("billing", PartitionId(topic_id_of_name(STORE_ID, "orders"), 4))


def test_a_transaction_is_written_and_read_as_ever() -> None:
    """The record has the ids of the topics."""
    key, value = golden("transaction")
    assert (encode_key("etl-1"), encode_state(state(TOPIC_ID))) == (key, value)
    assert read(key, value) == {"etl-1": state(TOPIC_ID)}


def test_a_transaction_of_a_client_says_more() -> None:
    """Additional fields come last, so that a process that does not know them reads the rest."""
    remote = msgspec.structs.replace(state(TOPIC_ID), is_server_name=True, last_epoch=2, epochs=(5,), log_epoch=1)
    value = encode_state(remote)
    assert read(encode_key("app"), value) == {"app": remote}
    local = msgspec.msgpack.decode(golden("transaction")[1])
    assert msgspec.msgpack.decode(value) == [*local, True, 2, [5], 1]


def test_a_transaction_of_format_1_is_read_as_ever() -> None:
    """Its names stand for the ids that the topics got when they had none."""
    assert read(*golden("transaction_by_name")) == {"etl-1": state(topic_id_of_name(STORE_ID, "orders"))}


def read(key: bytes, value: bytes) -> dict[str, TransactionState]:
    """Return the states that a record of the internal topic describes."""
    log = TransactionLog(SimpleNamespace(store_id=STORE_ID))  # type: ignore[arg-type]
    log._apply_record(key, value)
    return log._states
