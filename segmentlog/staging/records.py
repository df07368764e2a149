"""Records on their way into staged batches: what `Stager` does with them, whatever they are made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, Self

import numpy as np
import numpy.typing as npt

from segmentlog.config import TopicConfig
from segmentlog.format.columns import has_null
from segmentlog.format.encode import EncodedBatch
from segmentlog.log.append.encoding import Columns, check_items, encode_columns_as_batches
from segmentlog.policy.partitioner import Partitioner
from segmentlog.records import Headers

Partitions = npt.NDArray[np.int32]


class StagedRecords(Protocol):
    """Columns of records that have timestamps."""

    def __len__(self) -> int: ...

    def partitions(self, partitioner: Partitioner, count: int, sticky: int) -> Partitions:
        """Of each record, by its key; ``sticky`` without one."""

    def take(self, rows: npt.NDArray[np.int64]) -> Self:
        """These of them, in this order."""

    def part(self, start: int, stop: int) -> Self:
        """Those in ``[start, stop)``."""

    def followed_by(self, others: Sequence[Self]) -> Self:
        """These, and then the others."""

    def first_null_value(self) -> int | None:
        """Which record has no value; None when all have."""

    def encode(self, config: TopicConfig) -> list[EncodedBatch]:
        """Finished batches, none above the topic's limits. Raises `InvalidRecord`, `RecordTooLarge`."""


class ListRecords:
    """Records as lists."""

    def __init__(self, columns: Columns) -> None:
        self._columns = columns

    def __len__(self) -> int:
        return len(self._columns.values)

    def partitions(self, partitioner: Partitioner, count: int, sticky: int) -> Partitions:
        keys = self._columns.keys
        if keys is None or count == 1:
            return np.full(len(self), sticky, np.int32)
        return partitioner.partitions(keys, count, sticky)

    def take(self, rows: npt.NDArray[np.int64]) -> ListRecords:
        columns, numbers = self._columns, rows.tolist()
        assert columns.timestamps is not None
        return ListRecords(
            Columns(
                list(map(columns.values.__getitem__, numbers)),
                None if columns.keys is None else list(map(columns.keys.__getitem__, numbers)),
                columns.timestamps[rows],
                None if columns.headers is None else list(map(columns.headers.__getitem__, numbers)),
            )
        )

    def part(self, start: int, stop: int) -> ListRecords:
        return ListRecords(self._columns.part(start, stop))

    def followed_by(self, others: Sequence[ListRecords]) -> ListRecords:
        values: list[bytes | None] = []
        keys: list[bytes | None] = []
        headers: list[Headers] = []
        timestamps = []
        for one in (self, *others):
            columns = one._columns
            keys += [None] * len(one) if columns.keys is None else columns.keys
            headers += [()] * len(one) if columns.headers is None else columns.headers
            values += columns.values
            assert columns.timestamps is not None
            timestamps.append(columns.timestamps)
        has_keys = any(one._columns.keys is not None for one in (self, *others))
        has_headers = any(one._columns.headers is not None for one in (self, *others))
        return ListRecords(
            Columns(values, keys if has_keys else None, np.concatenate(timestamps), headers if has_headers else None)
        )

    def first_null_value(self) -> int | None:
        check_items(self._columns)
        values = self._columns.values
        return list(values).index(None) if has_null(values) else None

    def encode(self, config: TopicConfig) -> list[EncodedBatch]:
        check_items(self._columns)
        return encode_columns_as_batches(self._columns, config, 0, bytearray())
