"""The interface that `Stager` needs of records. Each source of records implements it for its own columns."""

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
        """Return the partition that ``partitioner`` chooses for each record's key; ``sticky`` if it has no key."""

    def take(self, rows: Rows) -> Self:
        """Return the records at these indexes, in the order of the indexes."""

    def part(self, start: int, stop: int) -> Self:
        """Return the records ``[start, stop)``."""

    def followed_by(self, others: Sequence[Self]) -> Self:
        """Return these records, followed by those of ``others``."""

    def first_null_value(self) -> int | None:
        """Return the index of the first record without a value; None if all have values."""

    def encode(self, config: TopicConfig) -> list[EncodedBatch]:
        """Encode the records as batches within the topic's limits. Raises `InvalidRecord`, `RecordTooLarge`."""
