"""Ways to break a server, to see whether that is found out. They are for its process, before it forks its workers."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from msgspec.structs import replace

from segmentlog.log.producer_state import ProducerStamp, ProducerStates
from segmentlog.policy.reconciliation import Holding
from segmentlog.records import TopicPartition
from segmentlog.server.codec.generated.produce import PartitionProduceData, PartitionProduceResponse
from segmentlog.server.codec.kafka_errors import ErrorCode
from segmentlog.server.groups import consumer_members
from segmentlog.server.groups.classic_group import ClassicGroup
from segmentlog.server.groups.consumer_group import ConsumerGroup
from segmentlog.server.handlers import produce
from segmentlog.server.partition_fetch import Bounds
from segmentlog.transactions.server_transactions import ProducerIdAndEpoch, ServerTransactions, UnknownProducer
from segmentlog.transactions.transaction_log import TransactionState

_LATE_S: Final = 0.3


def forget_a_fence() -> None:
    """Let every former instance of a name write, and end its transactions."""
    real = ProducerStates.admit

    def known(self: ServerTransactions, name: str, numbers: ProducerIdAndEpoch) -> TransactionState:
        state = self._log.find(name)
        if state is None or state.producer_id != numbers.producer_id:
            raise UnknownProducer(name)
        return state

    def admit(self: ProducerStates, stamp: ProducerStamp, count: int, now_ms: int) -> int | None:
        entry = self._entries.get(stamp.producer_id)
        if entry is None or stamp.epoch >= entry.epoch:
            return real(self, stamp, count, now_ms)
        if stamp.check is not None:
            stamp.check()
        return None

    ServerTransactions._checked_state = known  # type: ignore[method-assign]
    ProducerStates.admit = admit  # type: ignore[method-assign]


def acknowledge_before_the_write() -> None:
    """Produce is answered first, and done some time later."""
    real = produce._append
    due: queue.SimpleQueue[tuple[float, Callable[[], object]]] = queue.SimpleQueue()
    begun: list[threading.Thread] = []

    def work() -> None:
        while True:
            at_s, do = due.get()
            time.sleep(max(at_s - time.monotonic(), 0))
            do()

    def append(
        call: Any, name: str, topic_id: str | None, data: PartitionProduceData, request: Any, response: Any,
        unsynced: Any,
    ) -> PartitionProduceResponse:  # fmt: skip
        partition = call.broker.partition(name, data.index)
        if not call.broker.cluster.leads(partition.topic_id, data.index):
            return real(call, name, topic_id, data, request, response, unsynced)
        if not begun:  # in the worker, and not in the process that forked it
            begun.append(threading.Thread(target=work, daemon=True))
            begun[0].start()
        assert data.records is not None
        late = replace(data, records=memoryview(bytes(data.records)))
        due.put((time.monotonic() + _LATE_S, lambda: real(call, name, topic_id, late, request, response, [])))
        return PartitionProduceResponse(data.index, 0, -1)

    produce._append = append


def serve_past_the_last_stable_offset() -> None:
    """Let committed reads go past the last stable offset."""
    Bounds.end = property(lambda self: self.high_watermark)  # type: ignore[assignment, method-assign]


def commit_from_an_old_generation() -> None:
    """Let every former member commit offsets."""
    for kind in (ClassicGroup, ConsumerGroup):
        kind.may_commit = lambda self, *_, **__: ErrorCode.NONE  # type: ignore[method-assign]


def assign_twice() -> None:
    """Assign every partition to each member, in the consumer protocol."""

    def assign(
        strategy: str, members: Mapping[str, Iterable[str]], counts: Mapping[str, int], previous: Any
    ) -> dict[str, list[TopicPartition]]:
        return {
            member: [TopicPartition(topic, number) for topic in topics for number in range(counts[topic])]
            for member, topics in members.items()
        }

    def hold(self: Any, member: Any, holding: Holding) -> None:
        member.holding = holding
        self.is_changed = True

    consumer_members.assign = assign  # type: ignore[assignment]
    consumer_members.ConsumerMembers._set_holding = hold  # type: ignore[method-assign]
    consumer_members.ConsumerMembers._is_free_for = lambda *_: True  # type: ignore[method-assign]


def assign_twice_classic() -> None:
    """Give each member the partitions of one of them, in the classic protocol."""
    real = ClassicGroup.sync

    def sync(
        self: ClassicGroup, token: object, member_id: str, generation: int, assignments: Any, *rest: Any, **more: Any
    ) -> None:
        given = dict(assignments)
        if given:
            given = dict.fromkeys(given, max(given.values(), key=len))
        real(self, token, member_id, generation, list(given.items()), *rest, **more)

    ClassicGroup.sync = sync  # type: ignore[method-assign]


def skip_a_dedupe() -> None:
    """Append a repeated batch again."""
    real = ProducerStates.admit

    def admit(self: ProducerStates, stamp: ProducerStamp, count: int, now_ms: int) -> None:
        real(self, stamp, count, now_ms)

    ProducerStates.admit = admit  # type: ignore[method-assign]


SABOTAGES: Final[dict[str, Callable[[], None]]] = {
    "": lambda: None,
    "fence": forget_a_fence,
    "early": acknowledge_before_the_write,
    "unstable": serve_past_the_last_stable_offset,
    "generation": commit_from_an_old_generation,
    "twice": assign_twice,
    "twice-classic": assign_twice_classic,
    "dedupe": skip_a_dedupe,
}
