"""A program on a machine that uses its store as a library: local_program.py ORDER.

It appends with ``ack="shipped"`` while the machine is the owner, and reads what is shipped in every role. ORDER is the
JSON object of a `delivery_process.Process`, with the store's folder and the id of the boot.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from typing import Any

from delivery_jobs import OneBoot
from delivery_process import Process, work

from segmentlog.errors import LogTruncated, ObjectStoreError, OffsetOutOfRange, ReadOnlyStore, SegmentlogError
from segmentlog.store import LogStore

_PAUSE_S = 0.1
_READ_BYTES = 1 << 16


class LocalProgram(Process):
    """Opens the store again whenever its machine has another role."""

    def __init__(self, order: dict[str, Any]) -> None:
        super().__init__(order)
        self._positions = {(topic, number): 0 for topic, count in self.topics.items() for number in range(count)}

    def append_and_read(self) -> None:
        """Until SIGTERM."""
        while not self.stopping:
            try:
                self._use_store(read_only=False)
            except (SegmentlogError, OSError) as error:
                self.say("*met", repr(error))
            if self.stopping:
                return
            try:
                self._use_store(read_only=True)
            except (SegmentlogError, OSError) as error:
                self.say("*met", repr(error))
            time.sleep(_PAUSE_S)

    def _use_store(self, *, read_only: bool) -> None:
        fs = OneBoot(self.order["boot"])
        with LogStore(self.order["store"], fs=fs, create=False, read_only=read_only, background=False) as store:
            self._read(store)
            while not read_only and not self.stopping:
                self._append(store)
                self._read(store)
                time.sleep(self.rng.uniform(0, _PAUSE_S))

    def _append(self, store: LogStore) -> None:
        topic, partition = self.place()
        values = [self.value() for _ in range(self.rng.choice((1, 1, 4)))]
        self.say("send", "", topic, partition, values)
        try:
            base = store.topic(topic).partition(partition).append([value.encode() for value in values], ack="shipped")
        except ReadOnlyStore:
            self.say("refused")
            raise
        self.say("acked", topic, partition, [[base + at, value] for at, value in enumerate(values)])

    def _read(self, store: LogStore) -> None:
        """Read what is new in the object store's part of each partition, which no takeover may lose."""
        for (topic, number), position in self._positions.items():
            log = store.topic(topic).partition(number)
            with contextlib.suppress(ObjectStoreError):
                try:
                    batches = list(log.read(position, _READ_BYTES, isolation="read_committed", shipped_only=True))
                except OffsetOutOfRange:  # a replica that is not as far yet
                    continue
                except LogTruncated as error:
                    self.say("error", f"shipped records of {topic}/{number} were lost: {error}")
                    continue
                for batch in batches:
                    pairs = zip(batch.offsets.tolist(), batch.values, strict=True)
                    self.say("*shipped", topic, number, [[offset, (value or b"").decode()] for offset, value in pairs])
                    self._positions[topic, number] = batch.next_offset


if __name__ == "__main__":
    sys.exit(work(json.loads(sys.argv[1]), LocalProgram))
