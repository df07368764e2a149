"""Configurations of groups: told, altered, kept, and what they mean for members."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from leftovers import opened
from logs import FakeClock, NoSyncFileSystem
from server.wire_client import Desk

from segmentlog.format.file_names import CONFIGS_FILE
from segmentlog.groups import group_config_file
from segmentlog.inspection.store_inspection import inspect_store
from segmentlog.security.acls import OpenAuthorizer
from segmentlog.security.principals import Operation, ResourceType
from segmentlog.server.broker import Broker
from segmentlog.server.codec.generated import alter_configs as whole
from segmentlog.server.codec.generated import incremental_alter_configs as incremental
from segmentlog.server.codec.generated.consumer_group_heartbeat import ConsumerGroupHeartbeatRequest
from segmentlog.server.codec.generated.describe_configs import DescribeConfigsRequest, DescribeConfigsResource
from segmentlog.server.codec.kafka_errors import ErrorCode
from segmentlog.server.server_settings import ServerSettings
from segmentlog.server.worker_cluster import WorkerCluster, WorkerNode
from segmentlog.store import LogStore

GROUP = 32
SET, DELETE, APPEND = range(3)
SESSION, HEARTBEAT = "consumer.session.timeout.ms", "consumer.heartbeat.interval.ms"
MakeDesk = Callable[[], Desk]


class _Denying(OpenAuthorizer):
    """An authorizer that denies only the given operation."""

    denied: Operation | None = None

    def allows(self, principal: Any, host: str, operation: Operation, resource_type: ResourceType, name: str) -> bool:
        return (operation, resource_type) != (self.denied, ResourceType.GROUP)


@pytest.fixture
def clock() -> FakeClock:
    """Return a clock for all workers."""
    return FakeClock()


@pytest.fixture
def make_desk(tmp_path: Path, clock: FakeClock) -> Iterator[MakeDesk]:
    """Yield a function that creates workers, each with the store open for itself."""
    brokers: list[Broker] = []

    def make() -> Desk:
        store = opened(LogStore(tmp_path / "store", background=False, fs=NoSyncFileSystem(), clock=clock))
        if not brokers:
            store.create_topic("t", 2)
        number = len(brokers) + 1
        cluster = WorkerCluster("c", [WorkerNode(number, "localhost", 9093)], number)
        brokers.append(Broker(store, cluster, ServerSettings(), _Denying(), clock))
        return Desk(brokers[-1])

    yield make
    for broker in brokers:
        broker.close()


@pytest.fixture
def desk(make_desk: MakeDesk) -> Desk:
    """Return one worker."""
    return make_desk()


def told(desk: Desk, group: str = "g", keys: list[str] | None = None) -> dict[str, tuple[str, int]]:
    """(value, source) by key."""
    request = DescribeConfigsRequest([DescribeConfigsResource(GROUP, group, keys)], include_synonyms=True)
    (result,) = desk.ask(32, 4, request).results
    assert result.error_code == 0, result.error_message
    return {one.name: (one.value, one.config_source) for one in result.configs}


def alter(desk: Desk, *changes: tuple[str, int, str | None], group: str = "g", validate_only: bool = False) -> int:
    """IncrementalAlterConfigs."""
    some = [incremental.AlterableConfig(name, operation, value) for name, operation, value in changes]
    request = incremental.IncrementalAlterConfigsRequest(
        [incremental.AlterConfigsResource(GROUP, group, some)], validate_only
    )
    return desk.ask(44, 1, request).responses[0].error_code  # type: ignore[no-any-return]


def join(desk: Desk, member: str = "m", epoch: int = 0) -> Any:
    """Return a heartbeat of the consumer protocol, the first one or a later one."""
    request = ConsumerGroupHeartbeatRequest("g", member, epoch)
    if epoch == 0:
        request.rebalance_timeout_ms, request.subscribed_topic_names, request.topic_partitions = 5_000, ["t"], []
    return desk.ask(68, 1, request)


def test_what_is_set_is_told(desk: Desk) -> None:
    """The description has them with the defaults of all groups, which are marked as such."""
    assert told(desk)[SESSION] == ("45000", 5)
    assert alter(desk, (SESSION, SET, "50000")) == ErrorCode.NONE
    assert told(desk)[SESSION] == ("50000", 8)
    assert told(desk, keys=[HEARTBEAT]) == {HEARTBEAT: ("5000", 5)}
    assert told(desk, "other")[SESSION] == ("45000", 5)
    assert alter(desk, (HEARTBEAT, SET, "3000"), (SESSION, DELETE, None)) == ErrorCode.NONE
    assert (told(desk)[SESSION], told(desk)[HEARTBEAT]) == (("45000", 5), ("3000", 8))


def test_the_old_way_sets_the_others_back(desk: Desk) -> None:
    """AlterConfigs says all that there is to be."""
    assert alter(desk, (SESSION, SET, "50000")) == ErrorCode.NONE
    resource = whole.AlterConfigsResource(GROUP, "g", [whole.AlterableConfig(HEARTBEAT, "4000")])
    assert desk.ask(33, 2, whole.AlterConfigsRequest([resource], False)).responses[0].error_code == 0
    assert (told(desk)[SESSION], told(desk)[HEARTBEAT]) == (("45000", 5), ("4000", 8))


def test_it_outlives_the_worker_and_the_group(make_desk: MakeDesk) -> None:
    """Other workers see it at once, also later ones; the configuration alone does not create a group."""
    first, second = make_desk(), make_desk()
    assert told(second)[SESSION] == ("45000", 5)
    for value in ("50000", "51000"):
        assert alter(first, (SESSION, SET, value)) == ErrorCode.NONE
        assert told(second)[SESSION] == told(make_desk())[SESSION] == (value, 8)
    store = first.broker.store
    assert list(store.groups.names()) == []
    assert [str(one) for one in inspect_store(store.path) if one.severity != "note"] == []


def test_members_live_by_it(desk: Desk, clock: FakeClock) -> None:
    """The values apply from a member's next heartbeat on."""
    first = join(desk)
    assert (first.error_code, first.heartbeat_interval_ms) == (0, 5_000)
    assert alter(desk, (SESSION, SET, "10000"), (HEARTBEAT, SET, "2000")) == ErrorCode.NONE
    clock.advance(11_000)
    desk.broker.groups.run_due()
    answer = join(desk, epoch=first.member_epoch)
    assert (answer.error_code, answer.heartbeat_interval_ms) == (0, 2_000)
    clock.advance(10_000)
    desk.broker.groups.run_due()
    assert join(desk, epoch=first.member_epoch).error_code == ErrorCode.UNKNOWN_MEMBER_ID


@pytest.mark.parametrize(
    "changes",
    [
        [(SESSION, SET, "5999")], [(SESSION, SET, "1800001")], [(SESSION, SET, "x")],
        [(SESSION, SET, "-1")], [(SESSION, SET, "9" * 500)], [(SESSION, APPEND, "50000")], [(HEARTBEAT, SET, "999")],
        [(HEARTBEAT, SET, "45000")], [(SESSION, SET, "50000"), ("retention.ms", SET, "1")],
        [("consumer.assignment.interval.ms", SET, "1000")], [("nothing", DELETE, None)],
    ],
)  # fmt: skip
def test_what_is_refused(desk: Desk, changes: list[tuple[str, int, str | None]]) -> None:
    """The rest of the request is refused, too."""
    assert alter(desk, *changes) == ErrorCode.INVALID_CONFIG
    assert not desk.broker.store.groups.configs.find("g")


def test_names_that_are_none(desk: Desk) -> None:
    """A default for all groups does not exist, as in Kafka."""
    for name in ("",):
        assert alter(desk, (SESSION, SET, "50000"), group=name) == ErrorCode.INVALID_CONFIG
        request = DescribeConfigsRequest([DescribeConfigsResource(GROUP, name)])
        assert desk.ask(32, 4, request).results[0].error_code == ErrorCode.INVALID_CONFIG


def test_to_see_whether_it_could_be_done(desk: Desk) -> None:
    """A request with validate_only changes nothing, and refuses invalid settings."""
    assert alter(desk, (SESSION, SET, "50000"), validate_only=True) == ErrorCode.NONE
    assert alter(desk, (SESSION, SET, "x"), validate_only=True) == ErrorCode.INVALID_CONFIG
    assert told(desk)[SESSION] == ("45000", 5)


def test_who_may_not(desk: Desk) -> None:
    """Each request requires ALTER_CONFIGS or DESCRIBE_CONFIGS on the group."""
    desk.broker.authorizer.denied = Operation.ALTER_CONFIGS
    assert alter(desk, (SESSION, SET, "50000")) == ErrorCode.GROUP_AUTHORIZATION_FAILED
    assert told(desk)[SESSION] == ("45000", 5)
    desk.broker.authorizer.denied = Operation.DESCRIBE_CONFIGS
    request = DescribeConfigsRequest([DescribeConfigsResource(GROUP, "g")])
    assert desk.ask(32, 4, request).results[0].error_code == ErrorCode.GROUP_AUTHORIZATION_FAILED


def test_there_are_not_too_many(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each worker keeps them in memory, so their number is limited.

    A configured group may change, and a removed one makes room.
    """
    monkeypatch.setattr(group_config_file, "CONFIGURED_MAX", 2)
    assert alter(desk, (SESSION, SET, "50000"), group="a") == alter(desk, (SESSION, SET, "50000"), group="b") == 0
    assert alter(desk, (SESSION, SET, "50000"), group="c") == ErrorCode.INVALID_CONFIG
    assert alter(desk, (SESSION, SET, "51000"), group="a") == 0
    assert alter(desk, (SESSION, DELETE, None), group="a") == 0
    assert alter(desk, (SESSION, SET, "50000"), group="c") == 0


def test_a_damaged_file_is_none(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    """A warning reports it, and the next change writes a new file."""
    assert alter(desk, (SESSION, SET, "50000")) == ErrorCode.NONE
    path = Path(desk.broker.store.path, "@groups", CONFIGS_FILE)
    path.write_bytes(path.read_bytes().replace(b"50000", b"51000x"))
    assert told(desk)[SESSION] == ("45000", 5)
    assert "is damaged" in caplog.text
    assert alter(desk, (SESSION, SET, "52000")) == ErrorCode.NONE
    assert told(desk)[SESSION] == ("52000", 8)
