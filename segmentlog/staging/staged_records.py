"""Records on their way into staged batches: what `Stager` does with them, whatever they are made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, Self

from segmentlog.config import TopicConfig
from segmentlog.format.encode import EncodedBatch
from segmentlog.policy.partitioner import Partitioner, Partitions, Rows


class StagedRecords(Protocol):
    """Columns of records that have timestamps."""

    def __len__(self) -> int: ...

    def partitions(self, partitioner: Partitioner, count: int, sticky: int) -> Partitions:
        """Of each record, by its key; ``sticky`` without one."""

    def take(self, rows: Rows) -> Self:
        """These of them, in this order."""

    def part(self, start: int, stop: int) -> Self:
        """Those in ``[start, stop)``."""

    def followed_by(self, others: Sequence[Self]) -> Self:
        """These, and then the others."""

    def first_null_value(self) -> int | None:
        """Which record has no value; None when all have."""

    def encode(self, config: TopicConfig) -> list[EncodedBatch]:
        """Finished batches, none above the topic's limits. Raises `InvalidRecord`, `RecordTooLarge`."""
