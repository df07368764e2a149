"""Records that a Kafka client may send, and their copies in a topic after an export and an import."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product
from typing import Any, Final, NamedTuple

import wire
from hypothesis import strategies as st
from wire import append_unchecked, foreign

from segmentlog.store import LogStore

PARTITIONS: Final = 2
LATEST_MS: Final = (2**63 - 1) // 1000
"""The largest timestamp of a record that Spark's type can hold."""

Headers = tuple[tuple[str, bytes | None], ...]


class Sent(NamedTuple):
    """A record as it is appended, and as it must be after the round trip."""

    partition: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: Headers


KEYS: Final = (None, b"", b"key", b"\xff\x00")
VALUES: Final = (None, b"", b"value", b"\x00\xff", b'{"a": "\xc3\xbc"}')
TIMESTAMPS: Final = (-1, 0, 1_700_000_000_123, LATEST_MS)
HEADERS: Final[tuple[Headers, ...]] = ((), (("h", None),), (("h", b"1"), ("h", b""), ("h", b"1")), (("", b"\xff"),))

LARGE: Final = Sent(1, -1, b"", bytes(range(256)) * (10 << 12), (("h", None), ("h", b"")))
"""A record with a value of 10 MiB."""


OLD: Final = Sent(0, 2**63 - 1, b"key", b"old", ())
"""A record that earlier versions stored. Its timestamp is larger than an append accepts."""


def all_kinds(*, is_text: bool = False, with_headers: bool = True) -> list[Sent]:
    """Return each key with each value, timestamp and list of headers. With ``is_text``, leave out binary keys and
    values.
    """
    headers = HEADERS if with_headers else ((),)
    found = product(KEYS, VALUES, TIMESTAMPS, headers)
    return [
        Sent(number % PARTITIONS, stamp, key, value, some)
        for number, (key, value, stamp, some) in enumerate(found)
        if not is_text or not any(part and b"\xff" in part for part in (key, value))
    ]


_blob = st.sampled_from(KEYS + VALUES) | st.binary(max_size=6)
_headers = st.sampled_from(HEADERS) | st.lists(st.tuples(st.sampled_from(["", "h", 'ü,"\n']), _blob), max_size=3).map(
    tuple
)
records: Final[st.SearchStrategy[list[Sent]]] = st.lists(
    st.builds(
        Sent,
        st.integers(0, PARTITIONS - 1),
        st.sampled_from(TIMESTAMPS) | st.integers(-1, LATEST_MS),
        _blob,
        _blob,
        _headers,
    ),
    max_size=12,
)
"""Lists of any such records."""


def fill(store: LogStore, topic: str, sent: Iterable[Sent], **config: Any) -> None:
    """Create a topic with these records, in a batch each: every other batch as Kafka's clients send it, the rest as
    lists.

    Records without a timestamp always come from a client; the batch of `OLD` is not checked.
    """
    settings = {
        "retention_ms": -1, "max_message_bytes": "32MiB", "message_timestamp_after_max_ms": "unlimited", **config
    }  # fmt: skip
    made = store.create_topic(topic, partitions=PARTITIONS, **settings)
    for number, one in enumerate(sent):
        log = made.partition(one.partition)
        if one.timestamp > LATEST_MS:
            append_unchecked(log, foreign([wire.Sent(one.key, one.value, one.timestamp, one.headers)]))
        elif one.timestamp < 0 or number % 4 < 2:
            log.append_wire(foreign([wire.Sent(one.key, one.value, one.timestamp, one.headers)]))
        else:
            log.append([one.value], keys=[one.key], timestamps=[one.timestamp], headers=[one.headers])


def content(store: LogStore, topic: str) -> list[Sent]:
    """Return the records of a topic, partition by partition."""
    return list(_content(store, topic))


def _content(store: LogStore, topic: str) -> Iterator[Sent]:
    for log in store.topic(topic).partitions():
        for batch in log.read(log.log_start_offset):
            for one in batch:
                yield Sent(one.partition, one.timestamp, one.key, one.value, tuple(one.headers))


def by_partition(sent: Iterable[Sent]) -> list[Sent]:
    """Sort records as `content` returns them."""
    return sorted(sent, key=lambda one: one.partition)
