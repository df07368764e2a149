"""Hidden objects look like missing ones in every API and version, by name and by id.

SEGMENTLOG_LEAK_ROUNDS requests for each version of each API
"""

from __future__ import annotations

import os
import secrets
import uuid
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any, Final

import pytest
from leftovers import opened
from logs import NoSyncFileSystem
from seeds import seeds
from server.hostile import Asker, every_api
from server.wire_client import Desk, request_bytes

from segmentlog.security.acls import Authorizer
from segmentlog.security.principals import ANONYMOUS, Principal
from segmentlog.server.api_table import HANDLERS
from segmentlog.server.broker import Broker
from segmentlog.server.codec.apis import APIS
from segmentlog.server.codec.generated.join_group import JoinGroupRequest, JoinGroupRequestProtocol
from segmentlog.server.codec.generated.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
)
from segmentlog.server.codec.generated.sync_group import SyncGroupRequest
from segmentlog.server.codec.layouts import FieldLayout
from segmentlog.server.frames import BadFrame
from segmentlog.server.groups.classic_types import GroupSettings
from segmentlog.server.server_settings import ServerSettings
from segmentlog.server.topic_ids import wire_id
from segmentlog.server.worker_cluster import WorkerCluster, WorkerNode
from segmentlog.store import LogStore

ROUNDS = int(os.environ.get("SEGMENTLOG_LEAK_ROUNDS", "12"))
HIDDEN, MISSING, MINE = "hidden-and-there", "hidden-nor-there", "mine"
"""Topics, groups and transactional ids are called so; the first two as long as each other, and next in order."""
MISSING_ID: Final = uuid.UUID("0f0e0d0c-0b0a-4908-8706-050403020100").bytes
ADMIN: Final = Principal("User", "admin")
_RULES: Final = (
    "super User:admin",
    f"allow User:ANONYMOUS all topic:{MINE}",
    f"allow User:ANONYMOUS all group:{MINE}",
    f"allow User:ANONYMOUS all transactional-id:{MINE}",
    f"allow User:somebody read topic:{HIDDEN}",
    f"allow User:somebody read group:{HIDDEN}",
)

TELLS: Final = "tells"
"""The responses about existing and missing things differ for a client with all permissions."""
ROWS: Final = {
    0: TELLS,
    1: TELLS,
    2: TELLS,
    3: TELLS,
    8: TELLS,
    9: TELLS,
    10: "every name has a coordinator",
    11: "whoever may join a group makes it",
    12: TELLS,
    13: TELLS,
    14: TELLS,
    15: TELLS,
    16: TELLS,
    17: "asks for no name",
    18: "asks for no name",
    19: TELLS,
    20: TELLS,
    21: TELLS,
    22: TELLS,
    23: TELLS,
    24: TELLS,
    25: "who has no numbers of a transactional id is told the same of each",
    26: "who has no numbers of a transactional id is told the same of each",
    27: TELLS,
    28: TELLS,
    29: TELLS,
    30: "a rule may be about what is not there",
    31: TELLS,
    32: TELLS,
    33: TELLS,
    35: TELLS,
    36: "asks for no name",
    37: TELLS,
    42: TELLS,
    44: TELLS,
    46: "there is nothing to tell of any topic",
    47: TELLS,
    60: "asks for no name",
    61: TELLS,
    65: TELLS,
    66: TELLS,
    68: "whoever may join a group makes it",
    69: "the hidden group is of the other protocol, and answered for as if there were none",
    75: TELLS,
}
"""Every API: whether it tells at all what there is, or why not."""
_IN_A_GROUP: Final = (8, 9, 47)
"""These ask about topics in a group, which may be one that may be seen."""
_IN_A_TRANSACTION: Final = (24, 25, 28)
"""These ask about topics and groups under a transactional id, which may be one that may be used."""
_FILTERS: Final = (29, 31)
"""These ask about rules, by filters that are as wide as can be, but for the name."""


class Curious(Asker):
    """Asks about the hidden topic, group or transactional id, and nothing else."""

    key = 0

    def request(self, key: int, version: int, most: int = 2) -> Any:
        """Return a request of this API and version."""
        self.key = key
        return super().request(key, version, most)

    def _text(self, name: str) -> str:
        if name in ("group_id", "groups") and self.key in _IN_A_GROUP:
            return self.random.choice((HIDDEN, MINE))
        if name == "transactional_id" and self.key in _IN_A_TRANSACTION:
            return self.random.choice((HIDDEN, MINE))
        if name == "state_filters":
            return self.random.choice(("Empty", "Ongoing"))
        if "member_id" in name or "protocol" in name or name == "value":
            return super()._text(name)
        return HIDDEN

    def _field(self, key: int, field: FieldLayout, version: int, most: int) -> Any:
        if key in _FILTERS and field.name in ("principal_filter", "host_filter"):
            return None
        return super()._field(key, field, version, most)

    def _number(self, name: str, bits: int) -> int:
        if name == "session_epoch":
            return self.random.choice((0, -1))
        if name.startswith("generation_id"):
            return self.random.choice((1, -1))
        if self.key in _FILTERS and ("type" in name or name == "operation"):
            return 1
        return super()._number(name, bits)


class World:
    """A store with a topic and a group that are hidden, and those that are not."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (folder / "acls").write_text("\n".join(_RULES) + "\n")
        self.folder = folder
        self.store = opened(LogStore(folder / "store", background=False, fs=NoSyncFileSystem()))
        groups = GroupSettings(initial_rebalance_delay_ms=0, min_session_timeout_ms=1)
        settings = ServerSettings(groups=groups, auto_create=False)
        self.broker = Broker(
            self.store,
            WorkerCluster("c", [WorkerNode(1, "localhost", 9092)], 1),
            settings,
            Authorizer(str(folder / "acls")),
        )
        self.member = ""
        self.draws = Random(0)
        monkeypatch.setattr(secrets, "randbelow", self.draws.randrange)
        self.restore()

    def restore(self) -> None:
        """Undo the changes of an administrator's requests."""
        (self.folder / "acls").write_text("\n".join(_RULES) + "\n")
        self.broker.authorizer.reload()
        if MISSING in self.store.topics():
            self.store.delete_topic(MISSING)
        for name in (HIDDEN, MINE):
            if name not in self.store.topics():
                self.store.create_topic(name, 2)
                self.store.open_partition(name, 0).append([b"a", b"b"])
        self.restore_names()
        desk = Desk(self.broker, ADMIN)
        position = OffsetCommitRequestTopic(HIDDEN, partitions=[OffsetCommitRequestPartition(0, 1)])
        desk.ask(8, 2, OffsetCommitRequest(MINE, topics=[position]))
        machine = self.broker.groups._entries.get(HIDDEN)
        if machine is not None and self.member in machine.machine.members:
            return
        protocol = JoinGroupRequestProtocol("range", b"\0\0\0\0\0\0\xff\xff\xff\xff")
        request = JoinGroupRequest(HIDDEN, 300_000, 300_000, protocol_type="consumer", protocols=[protocol])
        joined = desk.ask(11, 3, request)
        assert joined.error_code == 0
        self.member = joined.member_id
        assert desk.ask(14, 2, SyncGroupRequest(HIDDEN, joined.generation_id, self.member)).error_code == 0
        position = OffsetCommitRequestTopic(HIDDEN, partitions=[OffsetCommitRequestPartition(0, 1)])
        committed = desk.ask(8, 2, OffsetCommitRequest(HIDDEN, joined.generation_id, self.member, topics=[position]))
        assert committed.topics[0].partitions[0].error_code == 0

    def restore_names(self) -> None:
        """Register the hidden transactional id, and delete the missing one."""
        transactions = self.store.transactions
        for name in (HIDDEN, MISSING):
            transactions._abandoned.delete_name(name)
        transactions.server_transactions.register(HIDDEN, 60_000)

    @property
    def hidden_id(self) -> bytes:
        """Return the id of the hidden topic."""
        return wire_id(self.store.topic(HIDDEN).id)

    def asker(self, random: Random) -> Curious:
        """Return a client that requests hidden things."""
        asker = Curious(random, [self.store.topic(HIDDEN).id], extreme=0)
        asker.members = [self.member]
        return asker

    def ask(self, who: Principal, frame: bytes) -> bytes | None:
        """Return the answer, or None if the connection is closed or the request needs no answer."""
        self.draws.seed(1)
        self.store.transactions.assigned_ids._discard_parent_state()  # both count producer ids from the same start
        self.broker.fetch_sessions._sessions.clear()
        try:
            return Desk(self.broker, who).ask_bytes(frame)
        except BadFrame:
            return None

    def state(self) -> Any:
        """Return everything that a request could have changed."""
        return (
            {name: (self.store.topic(name).id, self.store.topic(name).config) for name in self.store.topics()},
            [partition.log_end_offset for partition in self.store.opened_partitions() if partition.topic == HIDDEN],
            {group: self.store.group_offsets.by_topic_id(group) for group in self.store.groups.names()},
            (self.folder / "acls").read_text(),
        )


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """Yield a world."""
    made = World(tmp_path, monkeypatch)
    yield made
    made.broker.close()


def about_nothing(data: bytes, hidden_id: bytes) -> bytes:
    """Return the same request about things that do not exist."""
    return data.replace(HIDDEN.encode(), MISSING.encode()).replace(hidden_id, MISSING_ID)


def asked(world: World, random: Random, key: int, version: int, number: int) -> tuple[Any, bytes]:
    """Return a request about hidden objects, and its bytes."""
    request = world.asker(random).request(key, version, most=1 + number % 2)
    return request, request_bytes(key, version, request, 7)[4:]


def test_every_api_has_a_row() -> None:
    """A new API must state here whether its response reveals what exists."""
    assert set(ROWS) == set(HANDLERS)


@pytest.mark.parametrize("seed", seeds("leaks"))
def test_what_is_hidden_is_as_if_it_were_not_there(world: World, seed: int) -> None:
    """Byte for byte, but for the name that was asked for; and it is in no list, and untouched."""
    random, before, hidden_id = Random(seed), world.state(), world.hidden_id
    for key, version in every_api():
        for number in range(ROUNDS):
            request, frame = asked(world, random, key, version, number)
            hidden = world.ask(ANONYMOUS, frame)
            missing = world.ask(ANONYMOUS, about_nothing(frame, hidden_id))
            where = f"{APIS[key]} in version {version}: {request}"
            assert (hidden and about_nothing(hidden, hidden_id)) == missing, where
            assert missing is None or (HIDDEN.encode() not in missing and hidden_id not in missing), where
        assert world.state() == before, f"{APIS[key]} in version {version}"


@pytest.mark.long
def test_who_may_see_it_is_told_otherwise(world: World) -> None:
    """Such requests reveal existing objects in each version, so the test above can fail."""
    random = Random(1)
    for key, version in every_api():
        tells = ROWS[key] is TELLS
        is_told = key not in (11, 68) and any(
            is_told_otherwise(world, random, key, version, n) for n in range(200 if tells else 9)
        )
        assert is_told == tells, f"{APIS[key]} in version {version}"


def is_told_otherwise(world: World, random: Random, key: int, version: int, number: int) -> bool:
    """Return whether an administrator gets another answer about an existing object than about a missing one."""
    hidden_id, member = world.hidden_id, world.member.encode()
    frame = asked(world, random, key, version, number)[1]
    hidden = world.ask(ADMIN, frame)
    world.restore()
    frame = frame.replace(hidden_id, world.hidden_id).replace(member, world.member.encode())
    missing = world.ask(ADMIN, about_nothing(frame, world.hidden_id))
    world.restore()
    return (hidden and about_nothing(hidden, hidden_id)) != missing
