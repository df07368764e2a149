"""The cost of a request is bounded by its answer, for any names in it, repeated or not.

Each API gets each shape of request that `largest` creates, once with one element and once with many. The many elements
may add to the answer and to the work only as much as the same number of errors would, and as the limits of an answer
allow.

SEGMENTLOG_COST_ELEMENTS  elements that differ, in the long test; looking up all that may be sent takes minutes
"""

from __future__ import annotations

import contextlib
import os
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from leftovers import opened
from logs import NoSyncFileSystem
from server.hostile import every_api
from server.largest import GROUP, SPARE, TOPIC, TRANSACTION, Shape, bare, shapes
from server.memory import Memory
from server.wire_client import Desk, request_bytes
from wire import CODECS, NOW_MS, Sent, foreign

from segmentlog.format import wire_records
from segmentlog.security.acl_rules import Permission, Rule
from segmentlog.security.acls import Authorizer
from segmentlog.security.principals import Operation, ResourceType
from segmentlog.server.api_table import PRODUCE, SERVED
from segmentlog.server.broker import Broker
from segmentlog.server.codec.apis import APIS
from segmentlog.server.codec.generated.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
)
from segmentlog.server.codec.primitives import ELEMENTS_MAX
from segmentlog.server.groups.classic_types import GroupSettings
from segmentlog.server.request_budget import ClientGone
from segmentlog.server.server_settings import Limits, ServerSettings
from segmentlog.server.worker_cluster import WorkerCluster, WorkerNode
from segmentlog.store import LogStore
from segmentlog.transactions.server_transactions import ProducerIdAndEpoch

PARTITIONS = 24
MANY = 40
"""Elements of a request in the quick tests. Without a limit they would cost far more than is allowed."""
ELEMENTS, TEXT_BYTES = 50, 2000
"""The limits of an answer there."""
ERROR_BYTES = 120
"""Size of the response about one element that is only an error, without the name that it repeats."""
DIFFERENT = int(os.environ.get("SEGMENTLOG_COST_ELEMENTS", "2000"))
CONTROL_BYTES = Limits().control_request_bytes
ANSWER_MAX = 100 << 20
"""Size of the largest response: repeated parts of the request, errors about half a million elements, and the limits."""
PEAK_MAX = 700 << 20
"""Memory of the same, with the request as objects."""
CALLS = 250
"""Function calls for one element of a request: a lookup of an unknown thing takes tens."""


def elements(value: Any) -> int:
    """Return the number of elements in all arrays of a message."""
    if isinstance(value, list):
        return len(value) + sum(map(elements, value))
    return sum(elements(getattr(value, name)) for name in getattr(value, "__struct_fields__", ()))


class World:
    """A store with everything that a request may name many times, and a server of it without sockets."""

    def __init__(self, path: Path, partitions: int = PARTITIONS, **limits: Any) -> None:
        self.store = opened(LogStore(path / "store", background=False, fs=NoSyncFileSystem()))
        self.store.create_topic(TOPIC, partitions)
        for number in range(20):
            self.store.create_topic(f"other-{number}")
        rules = path / "rules"
        rules.write_text("super User:ANONYMOUS\n")
        self.authorizer = Authorizer(str(rules))
        groups = GroupSettings(initial_rebalance_delay_ms=0, min_session_timeout_ms=1, max_session_timeout_ms=50)
        settings = ServerSettings(auto_create=False, groups=groups, limits=Limits(**limits))
        self.broker = Broker(
            self.store, WorkerCluster("c", [WorkerNode(1, "localhost", 9092)], 1), settings, self.authorizer
        )
        self.desk = Desk(self.broker)
        self.topic_id = uuid.UUID(self.store.topic(TOPIC).id).bytes
        log = self.store.open_partition(TOPIC, 0)
        log.append_wire(memoryview(foreign([Sent(b"k", b"v" * 500, NOW_MS + at) for at in range(20)], CODECS["zstd"])))
        for number in range(30):
            log.append_wire(memoryview(foreign([Sent(b"k", b"v")], producer=((1 << 61) + number, 0, 0))))
        some = [OffsetCommitRequestPartition(number, 7, committed_metadata="m" * 500) for number in range(partitions)]
        self.desk.ask(8, 2, OffsetCommitRequest(GROUP, topics=[OffsetCommitRequestTopic(TOPIC, partitions=some)]))
        numbers = self.store.transactions.server_transactions.register(TRANSACTION, 60_000, None)
        logs = [self.store.open_partition(TOPIC, number) for number in range(min(partitions, PARTITIONS))]
        self.store.transactions.server_transactions.add_partitions(TRANSACTION, ProducerIdAndEpoch(*numbers), logs)
        self.decompressed = 0

    def prepare(self, key: int) -> None:
        """Make what requests of this API take away."""
        if key == 20 and SPARE not in self.store.topics():
            self.store.create_topic(SPARE)
        if key in (29, 31):
            allowed = Permission.ALLOW, Operation.READ, ResourceType.TOPIC, TOPIC
            self.authorizer.add([Rule(f"User:{number}", *allowed) for number in range(20)])


@pytest.fixture
def make_world(tmp_path: Path) -> Iterator[Callable[..., World]]:
    """Yield a function that creates worlds, and close them at the end."""
    worlds: list[World] = []

    def make(**options: Any) -> World:
        worlds.append(World(tmp_path, **options))
        return worlds[-1]

    yield make
    for world in worlds:
        world.broker.close()


class Cost:
    """Measured cost of a request."""

    def __init__(self, request: Any, size_bytes: int) -> None:
        self.asked = elements(request)
        self.asked_bytes = size_bytes
        self.elements = self.answer_bytes = self.calls = self.decompressed = 0

    def __str__(self) -> str:
        return (
            f"{self.asked} elements and {self.asked_bytes} bytes are answered by {self.elements} elements and "
            f"{self.answer_bytes} bytes, with {self.calls} calls of functions, {self.decompressed} batches decompressed"
        )


def cost_of(world: World, key: int, version: int, request: Any, monkeypatch: pytest.MonkeyPatch) -> Cost:
    """Ask, and count."""
    world.prepare(key)
    data = request_bytes(key, version, request, 7)[4:]
    cost = Cost(request, len(data))
    decompress = wire_records.decompress_records

    def decompress_counted(*args: Any) -> Any:
        cost.decompressed += 1
        return decompress(*args)

    def count(frame: Any, event: str, argument: object) -> None:
        cost.calls += event == "call"

    with monkeypatch.context() as patched:
        patched.setattr(wire_records, "decompress_records", decompress_counted)
        sys.setprofile(count)
        try:
            answer = world.desk.dispatcher.handle(world.desk.connection, memoryview(data))
        finally:
            sys.setprofile(None)
    told = world.desk.bytes_of(answer)
    if told is not None:
        cost.answer_bytes = len(told)
        cost.elements = elements(world.desk.decoded(key, version, told))
    return cost


def check_versions(world: World, key: int, versions: Iterable[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask for one and for many of everything, and see what the many add."""
    for version in versions:
        for shape in shapes(key, version, world.topic_id):
            few = cost_of(world, key, version, shape.make(1), monkeypatch)
            many = cost_of(world, key, version, shape.make(MANY), monkeypatch)
            more = many.asked - few.asked
            more_bytes = many.asked_bytes - few.asked_bytes
            note = f"{shape}: {few}; {many}"
            assert many.elements <= few.elements + 3 * more + ELEMENTS, note
            most_bytes = few.answer_bytes + ERROR_BYTES * more + 2 * more_bytes + 100 * ELEMENTS + 2 * TEXT_BYTES
            assert many.answer_bytes <= most_bytes, note
            assert many.calls <= few.calls + CALLS * (more + ELEMENTS), note
            # Every batch that is produced is decompressed once: it is checked before it is stored.
            assert many.decompressed <= few.decompressed + (more if key == PRODUCE else 1), note
        cost = cost_of(world, key, version, bare(key, version, world.topic_id, long=True), monkeypatch)
        note = f"{APIS[key].name} v{version}, with the longest names: {cost}"
        assert cost.answer_bytes <= cost.asked_bytes + 10_000, note


def versions_of(key: int) -> list[int]:
    """Return all versions that are served."""
    return [version for one, version in every_api() if one == key]


@pytest.mark.parametrize("key", SERVED, ids=lambda key: APIS[key].name)
def test_more_of_a_request_adds_no_more_than_errors(
    make_world: Callable[..., World], key: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the limits of an answer are reached, each further element costs an error and a brief check.

    The test uses the first, the last and a middle version: versions hardly change the cost.
    """
    every = versions_of(key)
    some = sorted({every[0], every[len(every) // 2], every[-1]})
    check_versions(
        make_world(answer_elements=ELEMENTS, answer_bytes=TEXT_BYTES, answer_config_bytes=TEXT_BYTES),
        key,
        some,
        monkeypatch,
    )


@pytest.mark.long
@pytest.mark.parametrize("key", SERVED, ids=lambda key: APIS[key].name)
def test_so_in_every_version(make_world: Callable[..., World], key: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cost is limited in every version."""
    world = make_world(answer_elements=ELEMENTS, answer_bytes=TEXT_BYTES, answer_config_bytes=TEXT_BYTES)
    check_versions(world, key, versions_of(key), monkeypatch)


@pytest.mark.long
@pytest.mark.parametrize("key", SERVED, ids=lambda key: APIS[key].name)
def test_the_largest_request_of_each_api(make_world: Callable[..., World], key: int) -> None:
    """With the maximal number of elements and bytes, the cost of a request and of its answer is bounded."""
    world = make_world(partitions=1000)
    version = versions_of(key)[-1]
    for shape in shapes(key, version, world.topic_id):
        world.prepare(key)
        memory = Memory()
        request = shape.make(_most(shape) if shape.varied is None else min(_most(shape), DIFFERENT))
        data = request_bytes(key, version, request, 7)[4:]
        assert len(data) <= CONTROL_BYTES
        del request
        answer = world.desk.ask_bytes(data)
        size, peak = len(answer or b""), memory.peak()
        print(f"{shape}: {len(data):,} bytes are answered by {size:,}, {peak >> 20} MiB")
        assert size <= ANSWER_MAX, str(shape)
        assert peak <= PEAK_MAX, f"{shape}: {peak >> 20} MiB"


def _most(shape: Shape) -> int:
    """Elements of the array until the request has as many in all, or as many bytes, as it may have."""
    one, two = (shape.make(count) for count in (1000, 2000))
    more = (elements(two) - elements(one)) / 1000
    sizes = [len(request_bytes(shape.key, shape.version, request, 7)) for request in (one, two)]
    more_bytes = (sizes[1] - sizes[0]) / 1000 + 3  # numbers that differ grow longer
    return int(min((ELEMENTS_MAX - 10) / more, (CONTROL_BYTES - 100_000) / more_bytes))


# ---------------------------------------------------------------- who has left

DONE_ANYWAY = {
    0: "producers that want no answer may be gone when their records are appended",
    8: "members commit on their way out",
    11: "its lists are about one member",
    13: "members leave on their way out",
    14: "its lists are about one group",
    28: "members commit on their way out",
    46: "its answer is always empty",
    68: "its lists are about one member",
}
"""APIs with lists that are gone through to their end although the client has left, and why."""
FILTERED = (16, 66)
"""APIs whose lists are filters: they go through what the store has."""


@pytest.mark.parametrize("key", SERVED, ids=lambda key: APIS[key].name)
def test_work_stops_when_the_client_has_left(
    make_world: Callable[..., World], key: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each loop over a request's elements checks whether the client is connected, except those that must complete."""
    world = make_world()
    version = versions_of(key)[-1]
    monkeypatch.setattr("segmentlog.server.request_context.CHECK_INTERVAL_S", 0.0)
    world.desk.wire.is_shut = True
    for shape in shapes(key, version, world.topic_id):
        world.prepare(key)
        data = request_bytes(key, version, shape.make(MANY), 7)[4:]
        if key in DONE_ANYWAY:
            world.desk.ask_bytes(data)
        elif key in FILTERED or _is_of_one_thing(shape):
            with contextlib.suppress(ClientGone):
                world.desk.ask_bytes(data)
        else:
            with pytest.raises(ClientGone):
                world.desk.ask_bytes(data)


def _is_of_one_thing(shape: Shape) -> bool:
    """Return whether an array does not list things to do: keys of one resource, assignments of one topic."""
    names = {"configs", "assignments", "broker_ids", "configuration_keys", "forgotten_topics_data"}
    return not names.isdisjoint(shape.path)
