"""The interface of records that `Stager` stages, for example Arrow columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, Self

from segmentlog.config import TopicConfig
from segmentlog.format.encode import EncodedBatch
from segmentlog.policy.partitioner import Partitioner, Partitions, Rows


class StagedRecords(Protocol):
    """Columns of records with timestamps."""

    def __len__(self) -> int: ...

    def partitions(self, partitioner: Partitioner, count: int, sticky: int) -> Partitions:
        """Return the partition of each record by its key; ``sticky`` for a record without a key."""

    def take(self, rows: Rows) -> Self:
        """Return the records of these rows, in the order of ``rows``."""

    def part(self, start: int, stop: int) -> Self:
        """Return the records ``[start, stop)``."""

    def followed_by(self, others: Sequence[Self]) -> Self:
        """Return these records followed by the others."""

    def first_null_value(self) -> int | None:
        """Return the index of the first record with a null value, or None."""

    def encode(self, config: TopicConfig) -> list[EncodedBatch]:
        """Return batches within the topic's limits. Raise `InvalidRecord` or `RecordTooLarge`."""
