"""Interface of a Kafka client to the tests, in whatever language the client is written."""

from __future__ import annotations

import base64
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

Header = tuple[str, bytes | None]

WAIT_S = 30.0
"""For whatever has to come; nothing comes as late as that on a machine that works."""
SESSION_TIMEOUT_MS = 1000
"""After which a member that died is missed."""
HEARTBEAT_MS = 200


class Sent(NamedTuple):
    """A record that a client is to write."""

    partition: int
    key: bytes | None
    value: bytes | None
    timestamp: int
    headers: tuple[Header, ...] = ()


class Got(NamedTuple):
    """A record as a client, or the library, has read it."""

    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    timestamp: int
    headers: tuple[Header, ...]


class Driver(ABC):
    """A client of one server.

    A rebalance may come at any time, also between a read and its commit: a member that was silent for a while is
    considered dead. Records that were read and not committed then come again, to this member or another one, so the
    driver forgets them. It retries a commit only for this reason, and nothing for longer than `WAIT_S`.

    After a rebalance of the classic protocol, clients resume all partitions at their committed offsets. A member of the
    consumer protocol keeps partitions and their positions, so after a refused commit it must seek to the committed
    offsets itself.
    """

    name: ClassVar[str]
    codecs: ClassVar[tuple[str, ...]] = ("none", "gzip", "snappy", "lz4", "zstd")
    """Codecs that the client can write and read."""
    sets_timestamps: ClassVar[bool] = True
    takes_any_bytes: ClassVar[bool] = True
    """Whether keys, values and headers may be any bytes, and null."""
    writes_null_headers: ClassVar[bool] = True
    has_admin: ClassVar[bool] = True
    deletes_groups: ClassVar[bool] = True
    tells_offsets: ClassVar[bool] = True
    """Whether a producer learns the offsets of its records."""

    def __init__(self, bootstrap: str) -> None:
        self.bootstrap = bootstrap

    @abstractmethod
    def create(self, topic: str, partitions: int, config: dict[str, str]) -> None:
        """Make a topic."""

    @abstractmethod
    def write(
        self, topic: str, records: Sequence[Sent], *, codec: str = "none", acks: str = "all", idempotent: bool = False
    ) -> list[tuple[int, int]]:
        """Produce, in this order, and wait for the answers: partition and offset of each."""

    @abstractmethod
    def read(self, topic: str, count: int, *, committed: bool = False) -> list[Got]:
        """Read all records from the start of each partition; ``count`` is for clients that cannot detect the end."""

    @abstractmethod
    def consume(self, group: str, topic: str, count: int) -> list[Got]:
        """Consume ``count`` records as the only member of a group, commit them, and leave."""

    @abstractmethod
    def member(self, group: str, topic: str) -> list[str]:
        """Return the command of a process that is a member until killed, and prints `told` of committed records."""

    def at_time(self, topic: str, partition: int, timestamp: int) -> int:
        """Return the offset of the first record from that time on, or -1."""
        raise NotImplementedError

    def lag(self, group: str, topic: str) -> dict[int, int]:
        """Return how many records of each partition the group has not committed."""
        raise NotImplementedError

    def trim(self, topic: str, partition: int, before_offset: int) -> None:
        """Delete records from the front."""
        raise NotImplementedError

    def delete(self, topic: str) -> None:
        """Delete a topic."""
        raise NotImplementedError

    def delete_group(self, group: str) -> None:
        """Delete a group that has no members."""
        raise NotImplementedError


def told(partition: int, offset: int, value: bytes | None) -> str:
    """Return the line of a member."""
    return f"{partition} {offset} {text_of(value)}"


def text_of(data: bytes | None) -> str:
    """Bytes or None as a word."""
    return "-" if data is None else "=" + base64.b64encode(data).decode()


def bytes_of(text: str) -> bytes | None:
    """Return the reverse."""
    return None if text == "-" else base64.b64decode(text[1:])


def sorted_records(records: Sequence[Any]) -> list[Any]:
    """Sort records by partition and offset."""
    return sorted(records, key=lambda record: (record.partition, record.offset))
