"""What the library wrote, as Kafka's clients read it: made when it is asked for, and kept for others who ask."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

from segmentlog.format.as_wire import as_wire
from segmentlog.server.transport import Buffer

if TYPE_CHECKING:
    from segmentlog.format.record_batch import RecordBatch

_KEPT_BYTES: Final = 16 << 20

_Key = tuple[str, int, int, int]


class Renderings:
    """The last batches that were rendered. Thread-safe."""

    def __init__(self, kept_bytes: int = _KEPT_BYTES) -> None:
        self._mutex = threading.Lock()
        self._kept_bytes = kept_bytes
        self._bytes = 0
        self.hit_count = self.miss_count = 0
        """Batches that were there already, and those that had to be made."""
        self._rendered: OrderedDict[_Key, list[Buffer]] = OrderedDict()

    def wire(self, topic_id: str, batch: RecordBatch) -> list[Buffer]:
        """A batch in Kafka's format, in one or, of one that reaches far, several: as it lies if a client wrote it."""
        header = batch.header
        if header.is_kafka:
            return [batch.payload]
        if len(batch) < header.record_count:  # seldom: somebody began to read in the middle
            return as_wire(batch)
        # The checksum covers everything that a batch says: one that was compacted since has another.
        key = (topic_id, batch.partition, header.base_offset, header.header_checksum)
        with self._mutex:
            found = self._rendered.get(key)
            if found is not None:
                self._rendered.move_to_end(key)
                self.hit_count += 1
                return found
            self.miss_count += 1
        made = as_wire(batch)
        with self._mutex:
            if key not in self._rendered:
                self._rendered[key] = made
                self._bytes += sum(map(len, made))
                while self._bytes > self._kept_bytes:
                    self._bytes -= sum(map(len, self._rendered.popitem(last=False)[1]))
        return made
