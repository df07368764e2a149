"""segmentlog itself: one topic with one partition."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np

import segmentlog
from bench.systems.base import System, count_all
from segmentlog.format.wire_codecs import CODEC_LZ4
from segmentlog.format.wire_encode import encode_wire_batch
from segmentlog.log.partition import Partition
from segmentlog.store import LogStore

_POLICY = {"never": "never", "second": "1000ms", "batch": "always"}


class Segmentlog(System):
    """As README's first example does it, with LZ4, which is the default."""

    name = "segmentlog"
    about = "one partition, lists of bytes to `Partition.append`, LZ4"
    compresses = True
    compression: ClassVar[str] = "lz4"

    @classmethod
    def version(cls) -> str:
        return segmentlog.__version__

    def open(self) -> None:
        self._store: LogStore = segmentlog.open(self.folder)
        try:
            topic = self._store.topic("log")
        except segmentlog.UnknownTopic:
            topic = self._store.create_topic("log", fsync=_POLICY[self.sync], compression_type=self.compression)
        self._log: Partition = topic.partition(0)

    def close(self) -> None:
        self._store.close()

    def append(self, values: Sequence[bytes], keys: Sequence[bytes] | None = None) -> None:
        self._log.append(values, keys)

    def writer(self) -> Callable[[bytes], object]:
        append = self._log.append
        return lambda value: append([value])

    def scan_values(self) -> int:
        return sum(len(batch.values) for batch in self._log.read(0))

    def scan_records(self) -> int:
        return sum(count_all(batch) for batch in self._log.read(0))

    def read(self, offset: int) -> bytes:
        value = next(self._log.read(offset, max_bytes=1)).values[0]
        assert value is not None
        return value

    def end(self) -> int:
        return self._log.log_end_offset

    def compact(self) -> None:
        self._store.alter_topic("log", cleanup_policy="compact")
        end = self._log.log_end_offset
        self._log.roll()
        # A thread of the store may have begun as soon as a segment was sealed: then it is waited for.
        self._log.compact(wait_s=600)
        if self._log.cleaned_offset < end:
            raise RuntimeError(f"compacted up to {self._log.cleaned_offset:,}, not to the end at {end:,}")


class SegmentlogUncompressed(Segmentlog):
    """The same without LZ4: against those that do not compress."""

    name = "segmentlog, uncompressed"
    about = "the same, `compression.type = none`"
    compresses = False
    compression = "none"


class SegmentlogKafkaBatches(Segmentlog):
    """The same with batches as Kafka's producers send them, which the server stores unchanged."""

    name = "segmentlog with Kafka's batches"
    about = "the same, each list encoded in Kafka's format with LZ4, as a producer does it, to `Partition.append_wire`"

    def append(self, values: Sequence[bytes], keys: Sequence[bytes] | None = None) -> None:
        timestamps = np.full(len(values), time.time_ns() // 1_000_000)
        batch = encode_wire_batch(keys, values, None, timestamps, base_offset=0, epoch=0, codec=CODEC_LZ4)
        self._log.append_wire(batch)

    def writer(self) -> Callable[[bytes], object]:
        return self.append_one
