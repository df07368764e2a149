"""kafka-consumer-groups.sh and kafka-groups.sh."""

from __future__ import annotations

from pathlib import Path

import pytest
from ecosystem.kafka.patient import PatientDriver
from ecosystem.tools.conftest import Command
from server.clients.driver import Sent
from server.clients.served import Served
from server.clients.teller import Start
from waiting import wait_until

from segmentlog.store import LogStore

pytestmark = pytest.mark.xdist_group("tools")
GROUPS = "org.apache.kafka.tools.consumer.group.ConsumerGroupCommand"
LONG_AGO_MS = 1_700_000_000_000


@pytest.fixture
def client(served: Served, store: LogStore) -> PatientDriver:
    """Topic t has ten records in each of two partitions; group g has read all, and is gone."""
    client = PatientDriver(served.address)
    client.create("t", 2, {"retention.ms": "-1"})  # they are of 2023
    client.write("t", [Sent(number % 2, None, b"%d" % number, LONG_AGO_MS + number) for number in range(20)])
    client.consume("g", "t", 20)
    return client


def rows(out: str) -> list[list[str]]:
    """Return the sorted rows of a table without its head."""
    return sorted(line.split() for line in out.splitlines() if line.startswith(("g ", "new ", "local ")))


def test_listed_and_described(client: PatientDriver, do: Command, store: LogStore) -> None:
    """Positions, states, members, of clients' groups and the library's."""
    with store.consumer("t", group="local") as consumer:
        list(consumer)
        consumer.commit()
    assert sorted(do(GROUPS, "--list").split()) == ["g", "local"]
    assert rows(do(GROUPS, "--list", "--state"))[0] == ["g", "Empty"]
    assert rows(do(GROUPS, "--list", "--type"))[0] == ["g", "Classic"]
    assert "g                    Classic              consumer" in do("GroupsCommand", "--list")
    assert rows(do(GROUPS, "--describe", "--group", "g")) == [
        ["g", "t", "0", "10", "10", "0", "-", "-", "-"], ["g", "t", "1", "10", "10", "0", "-", "-", "-"],
    ]  # fmt: skip
    # librdkafka commits no leader epoch with its offsets.
    assert rows(do(GROUPS, "--describe", "--group", "g", "--offsets", "--verbose"))[0][3] == "-"
    (state,) = rows(do(GROUPS, "--describe", "--group", "g", "--state"))
    assert state[-2:] == ["Empty", "0"]
    assert rows(do(GROUPS, "--describe", "--group", "g", "--members", "--verbose")) == []
    assert {row[0] for row in rows(do(GROUPS, "--describe", "--all-groups"))} == {"g", "local"}
    assert "GroupIdNotFoundException: Group none is not a consumer group" in do(GROUPS, "--describe", "--group", "none")


def test_reset(client: PatientDriver, do: Command, store: LogStore, tmp_path: Path) -> None:
    """Each way of a reset has the reported effect, and the library continues there; partition 0 begins at 2."""
    client.trim("t", 0, 2)
    (tmp_path / "plan.csv").write_text("t,0,3\nt,1,4\n")
    before = (10, 10)
    for way, offsets in (
        (["--to-earliest"], (2, 0)),
        (["--to-latest"], (10, 10)),
        (["--shift-by", "-3"], (7, 7)),
        (["--to-current"], (7, 7)),
        (["--shift-by", "-100"], (2, 0)),
        (["--to-offset", "5"], (5, 5)),
        (["--to-offset", "1"], (2, 1)),
        (["--by-duration", "PT0S"], (10, 10)),
        (["--to-datetime", "2023-11-14T22:13:20.010+00:00"], (5, 5)),
        (["--from-file", str(tmp_path / "plan.csv")], (3, 4)),
    ):
        wanted = [["g", "t", str(number), str(offset)] for number, offset in enumerate(offsets)]
        which = ("--reset-offsets", "--group", "g", "--topic", "t", *way)
        assert rows(do(GROUPS, *which, "--dry-run")) == wanted, way
        exported = do(GROUPS, *which, "--dry-run", "--export").splitlines()
        plan = [f"t,{number},{offset}" for number, offset in enumerate(offsets)]
        assert sorted(line for line in exported if line.startswith("t,")) == plan
        assert positions(store) == before
        assert rows(do(GROUPS, *which, "--execute")) == wanted
        assert positions(store) == offsets
        before = offsets


def positions(store: LogStore) -> tuple[int, ...]:
    """Return the offsets of g by partition, as the library has them."""
    found = {where.partition: position.offset for where, position in store.group_offsets.by_topic_id("g").items()}
    return tuple(found[number] for number in sorted(found))


def test_a_new_group_can_be_given_positions(client: PatientDriver, do: Command) -> None:
    """This works before the group has members."""
    said = do(GROUPS, "--reset-offsets", "--group", "new", "--topic", "t:1", "--to-latest", "--execute")
    assert rows(said) == [["new", "t", "1", "10"]]


def test_a_group_at_work(client: PatientDriver, do: Command, start: Start) -> None:
    """The tools show its members and partitions; its offsets are not reset, and the group is not deleted."""
    member = start(client.member("g", "t"))
    wait_until(lambda: "Stable" in do(GROUPS, "--list", "--state"), "it did not join")
    wait_until(lambda: len(rows(do(GROUPS, "--describe", "--group", "g"))) == 2, "no positions")
    assert all(row[-1] == "rdkafka" for row in rows(do(GROUPS, "--describe", "--group", "g")))
    (told,) = rows(do(GROUPS, "--describe", "--group", "g", "--members", "--verbose"))
    assert "t:0,1" in told
    said = do(GROUPS, "--reset-offsets", "--group", "g", "--topic", "t", "--to-earliest", "--execute")
    assert "Assignments can only be reset if the group 'g' is inactive, but the current state is Stable." in said
    said = do(GROUPS, "--delete", "--group", "g")
    assert "Group 'g' could not be deleted due to: " in said
    assert "GroupNotEmptyException: The group is not empty." in said
    said = do(GROUPS, "--delete-offsets", "--group", "g", "--topic", "t")
    assert "GroupSubscribedToTopicException" in said
    member.kill()


def test_deleted(client: PatientDriver, do: Command) -> None:
    """The tool deletes a topic's offsets, a group, and all groups."""
    said = do(GROUPS, "--delete-offsets", "--group", "g", "--topic", "t:0")
    assert "Request succeeded for deleting offsets from group g." in said
    assert [row[2] for row in rows(do(GROUPS, "--describe", "--group", "g"))] == ["1"]
    assert do(GROUPS, "--delete", "--group", "g") == "Deletion of requested consumer groups ('g') was successful.\n"
    assert "GroupIdNotFoundException: The group id does not exist." in do(GROUPS, "--delete", "--group", "g")
    client.consume("new", "t", 20)
    said = do(GROUPS, "--delete", "--all-groups")
    assert said == "Deletion of requested consumer groups ('new') was successful.\n"
    assert do(GROUPS, "--list").strip() == ""


def test_expressions(do: Command) -> None:
    """The tool itself applies them."""
    assert do(GROUPS, "--validate-regex", "a.*") == "The regular expression `a.*` is valid.\n"
