"""Options of a consumer: what it reads, from where, and how."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from datetime import date, datetime, timedelta
from typing import Any, Literal, TypedDict

import msgspec

from segmentlog.arguments import as_bool, as_int, as_partition, as_text
from segmentlog.codecs import Deserializer
from segmentlog.consuming.decoding import Decoding, OnBad, OnError, decoding_of, on_error_of
from segmentlog.errors import InvalidConfig
from segmentlog.groups.group_session import Rebalanced
from segmentlog.log.partition import Isolation
from segmentlog.policy.assignment import Strategy
from segmentlog.records import TopicPartition

Start = Literal["earliest", "latest"] | int | datetime | date | timedelta
"""Where reading starts: the beginning or end of the log, an offset, -N for the last N records, or a time."""

OffsetReset = Literal["earliest", "latest", "error"]

Source = str | tuple[str, int]
"""A topic, a pattern of topics, or a single partition."""

_TOPICS = "names of topics, (topic, partition) or patterns, at least one"


class _Keywords(TypedDict, total=False):
    start: Start
    follow: bool
    isolation: Isolation
    durable_only: bool
    shipped_only: bool
    fetch_bytes: int
    skip_damaged: bool
    auto_offset_reset: OffsetReset | None
    group: str | None
    auto_commit: bool
    auto_commit_interval_ms: int
    assignment_strategy: Strategy
    max_poll_interval_ms: int
    max_poll_records: int
    client_id: str
    on_error: OnError | None
    on_bad: OnBad | None


class ConsumerKeywords(_Keywords, total=False):
    """Keyword arguments of `LogStore.consumer` except deserializers, for type checkers; see `Consumer`."""

    on_assigned: Rebalanced | None
    on_revoked: Rebalanced | None
    on_lost: Rebalanced | None


AsyncRebalanced = Callable[[list[TopicPartition]], Awaitable[object] | None]
"""A function or coroutine function that is called with the partitions that were assigned, revoked or lost."""


class AsyncConsumerKeywords(_Keywords, total=False):
    """Keyword arguments of `LogStore.aconsumer`, for type checkers."""

    on_assigned: AsyncRebalanced | None
    on_revoked: AsyncRebalanced | None
    on_lost: AsyncRebalanced | None


class ConsumerOptions(msgspec.Struct, kw_only=True):
    """Validated options; see `Consumer`. The defaults are those of `LogStore.consumer`. Raises `InvalidConfig`."""

    start: Start = "earliest"
    follow: bool = False
    isolation: Isolation = "read_uncommitted"
    durable_only: bool = False
    shipped_only: bool = False
    fetch_bytes: int = 1 << 20
    skip_damaged: bool = False
    auto_offset_reset: OffsetReset | None = None
    group: str | None = None
    auto_commit: bool = False
    auto_commit_interval_ms: int = 5000
    assignment_strategy: Strategy = "sticky"
    max_poll_interval_ms: int = 300_000
    max_poll_records: int = 500
    client_id: str = ""
    on_assigned: Rebalanced | None = None
    on_revoked: Rebalanced | None = None
    on_lost: Rebalanced | None = None
    deserializer: Deserializer[Any] | None = None
    key_deserializer: Deserializer[Any] | None = None
    on_error: OnError | None = None
    """None means "raise"."""
    on_bad: OnBad | None = None
    """Former name of ``on_error``."""
    decoding: Decoding | None = None
    """Created from the deserializers and ``on_error``."""

    def __post_init__(self) -> None:
        check_start(self.start)
        on_error = on_error_of(self.on_error, self.on_bad)
        self.decoding = decoding_of(self.key_deserializer, self.deserializer, on_error)
        for name in ("follow", "durable_only", "shipped_only", "skip_damaged", "auto_commit"):
            setattr(self, name, as_bool(name, getattr(self, name)))
        for name in ("max_poll_interval_ms", "max_poll_records", "auto_commit_interval_ms", "fetch_bytes"):
            setattr(self, name, as_int(name, getattr(self, name), 1))
        self.client_id = as_text("client_id", self.client_id)
        for name in ("on_assigned", "on_revoked", "on_lost"):
            call = getattr(self, name)
            if call is not None and not callable(call):
                raise InvalidConfig(name, call, "a function that takes a list of partitions")
        if not isinstance(self.isolation, str) or self.isolation not in ("read_uncommitted", "read_committed"):
            raise InvalidConfig("isolation", self.isolation, "'read_uncommitted' or 'read_committed'")
        reset = self.auto_offset_reset
        if not isinstance(reset, str | None) or reset not in (None, "earliest", "latest", "error"):
            raise InvalidConfig("auto_offset_reset", reset, "'earliest', 'latest' or 'error'")
        if self.group is None and self.auto_commit:
            raise InvalidConfig("auto_commit", True, "give a group, too: the offsets are committed for the group")


def check_start(start: object, name: str = "start") -> None:
    """Raise `InvalidConfig` if ``start`` is not a `Start`."""
    if isinstance(start, str) and start in ("earliest", "latest"):
        return
    if isinstance(start, int | date | timedelta) and not isinstance(start, bool) and start == start:
        return  # start == start is false for pandas' NaT, which is a datetime
    expected = "'earliest', 'latest', an offset, -N for the last N, a datetime or date, or a timedelta before now"
    raise InvalidConfig(name, start, expected)


def flatten_sources(topics: Sequence[Any]) -> list[Source]:
    """Return the topics, partitions and patterns to read as one flat list, without nested lists.

    Raises `InvalidConfig`.
    """
    found: list[Source] = []
    for source in topics:
        if isinstance(source, list | set | frozenset):
            found += flatten_sources(list(source))
        elif isinstance(source, str):
            found.append(source)
        elif isinstance(source, tuple) and len(source) == 2 and isinstance(source[0], str):
            found.append((source[0], as_partition(source[1])))
        else:
            raise InvalidConfig("topics", source, _TOPICS)
    if not found:
        raise InvalidConfig("topics", topics, _TOPICS)
    return found
