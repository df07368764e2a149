"""Every API that is advertised, in every version: a request is answered in the words of that version.

SEGMENTLOG_SERVER_SWEEP  requests for each version of each API
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from leftovers import opened
from logs import NoSyncFileSystem
from seeds import seeds
from server.hostile import OLD_ID, TOPICS, Asker, batch, every_api
from server.wire_client import Desk

from segmentlog.log.producer_state import ProducerStamp
from segmentlog.security.acls import Authorizer, OpenAuthorizer
from segmentlog.server.broker import Broker
from segmentlog.server.codec.apis import APIS
from segmentlog.server.codec.generated.api_versions import ApiVersionsRequest
from segmentlog.server.frames import BadFrame
from segmentlog.server.groups.classic_types import GroupSettings
from segmentlog.server.server_settings import ServerSettings
from segmentlog.server.worker_cluster import WorkerCluster, WorkerNode
from segmentlog.store import LogStore

ROUNDS = int(os.environ.get("SEGMENTLOG_SERVER_SWEEP", "20"))
SETTINGS = ServerSettings(
    groups=GroupSettings(initial_rebalance_delay_ms=0, min_session_timeout_ms=1, max_session_timeout_ms=50)
)
_NODES = [WorkerNode(1, "localhost", 9093), WorkerNode(2, "localhost", 9094)]
_RULES = (
    "allow User:ANONYMOUS read,describe topic:t",
    "allow User:ANONYMOUS write topic:library",
    "allow User:ANONYMOUS read group:g",
)

MakeBroker = Callable[..., Broker]


@pytest.fixture
def make_broker(tmp_path: Path) -> Iterator[MakeBroker]:
    """Yield a function that creates brokers over a store with topics, with batches of clients and of the library."""
    brokers: list[Broker] = []

    def make(nodes: int = 1, *rules: str, settings: ServerSettings = SETTINGS, **options: Any) -> Broker:
        store = opened(LogStore(tmp_path / "store", background=False, fs=NoSyncFileSystem(), **options))
        fill(store)
        authorizer: Authorizer | OpenAuthorizer = OpenAuthorizer()
        if rules:
            (tmp_path / "acls").write_text("\n".join(rules) + "\n")
            authorizer = Authorizer(str(tmp_path / "acls"))
        broker = Broker(store, WorkerCluster("c", _NODES[:nodes], 1), settings, authorizer)  # type: ignore[arg-type]
        brokers.append(broker)
        return broker

    yield make
    for broker in brokers:
        broker.close()


def fill(store: LogStore) -> None:
    """Create the topics that `hostile` asks about."""
    for name in TOPICS:
        if name not in store.topics():
            config = {"cleanup.policy": "compact"} if name == "compacted" else {}
            store.create_topic(name, 2, config)
            # So that not all batches under this producer id are refused.
            store.open_partition(name, 0).append([b"a"], [b"k"], producer=ProducerStamp(OLD_ID, 0, -1))
    random = Random(1)
    for _ in range(3):
        store.open_partition("library", 0).append([b"a", b"b", b"c"])
        store.open_partition("t", 0).append_wire(memoryview(batch(random, honest=True) or b""))
        store.open_partition("compacted", 0).append_wire(memoryview(batch(random, honest=True) or b""))


def ids_of(store: LogStore) -> list[str]:
    """Return the ids of the topics."""
    return [store.topic(name).id for name in store.topics()]


def error_codes(answer: Any) -> Iterator[int]:
    """Yield all error codes of an answer."""
    for name in getattr(answer, "__struct_fields__", ()):
        value = getattr(answer, name)
        if name == "error_code":
            yield value
        for one in value if isinstance(value, list) else [value]:
            yield from error_codes(one)


def sweep(broker: Broker, seed: int) -> dict[int, set[int]]:
    """Ask everything in every version; the error codes that were met, by API."""
    desk, random = Desk(broker), Random(seed)
    met: dict[int, set[int]] = defaultdict(set)
    for key, version in every_api():
        for _ in range(ROUNDS):
            asker = Asker(random, ids_of(broker.store))
            asker.members += _members(broker)
            request = asker.request(key, version)
            try:
                answer = desk.ask(key, version, request)
            except BadFrame:  # the request wanted no answer
                assert key == 0
                assert request.acks == 0
                continue
            except Exception as error:
                raise AssertionError(f"{APIS[key]} in version {version}: {request}") from error
            assert answer is not None or (key == 0 and request.acks == 0)
            if answer is not None:
                met[key].update(error_codes(answer))
        fill(broker.store)
    return met


def _members(broker: Broker) -> list[str]:
    entry = broker.groups._entries.get("g")
    return list(entry.machine.members) if entry is not None else []


@pytest.mark.long
@pytest.mark.parametrize("seed", seeds("server sweep"))
@pytest.mark.parametrize(
    ("nodes", "rules", "settings"),
    [
        pytest.param(1, (), SETTINGS, id="open"),
        pytest.param(2, (), SETTINGS, id="another leads half of it"),
        pytest.param(1, _RULES, SETTINGS, id="rules"),
        pytest.param(1, (), ServerSettings(durable_reads=True, groups=SETTINGS.groups), id="durable reads"),
    ],
)
def test_every_version_of_every_api_answers(
    make_broker: MakeBroker, nodes: int, rules: tuple[str, ...], settings: ServerSettings, seed: int
) -> None:
    """With any outcome, the response has the requested version, and the connection stays open."""
    met = sweep(make_broker(nodes, *rules, settings=settings), seed)
    assert all(-1 not in codes for codes in met.values()), "something that nobody foresaw"
    print({APIS[key].name: sorted(codes) for key, codes in met.items()})


def test_all_that_is_advertised_can_be_asked(make_broker: MakeBroker) -> None:
    """ApiVersions lists the supported versions, except Produce from 0 on (KAFKA-18659)."""
    desk = Desk(make_broker())
    for version in range(6):
        told = {
            one.api_key: (one.min_version, one.max_version)
            for one in desk.ask(18, version, ApiVersionsRequest()).api_keys
        }
        served = every_api()
        assert set(told) == {key for key, _ in served}
        for key, version_of_key in served:
            low, high = told[key]
            assert low <= version_of_key <= high
