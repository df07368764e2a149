"""What there is, is told to nobody who may not know of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from server.security.rules import Call, write_rules

from segmentlog.server.codec.errors import ErrorCode
from segmentlog.server.security.acls import Authorizer, OpenAuthorizer
from segmentlog.server.security.principals import Operation
from segmentlog.server.security.visibility import (
    creation_refusal,
    group_refusal,
    topic_id_refusal,
    topic_refusal,
    visible_groups,
    visible_topics,
)

Make = Callable[..., Authorizer]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """An authorizer by lines of a file, which is looked at whenever it is asked."""
    return partial(write_rules, tmp_path)


THERE = ["mine", "secret"]
ASKED = [*THERE, "nowhere"]


def test_lists_leave_out_what_may_not_be_seen(make: Make) -> None:
    """Metadata of all topics, ListGroups."""
    call = Call(make("allow User:ann read topic:mine", "allow User:ann read group:mine"))
    assert visible_topics(call, THERE) == ["mine"]
    assert visible_groups(call, THERE) == ["mine"]
    assert visible_groups(Call(make("allow User:ann describe cluster")), THERE) == THERE
    assert visible_topics(Call(OpenAuthorizer()), THERE) == THERE


@pytest.mark.parametrize("operation", [one for one in Operation if one is not Operation.ALL])
def test_what_is_there_is_refused_as_what_is_not(make: Make, operation: Operation) -> None:
    """By name: the same error for a topic or a group that there is and one that there is not."""
    call = Call(make("allow User:ann all topic:mine", "allow User:ann all group:mine"))
    assert [topic_refusal(call, operation, name) for name in ASKED] == [
        ErrorCode.NONE, ErrorCode.TOPIC_AUTHORIZATION_FAILED, ErrorCode.TOPIC_AUTHORIZATION_FAILED
    ]  # fmt: skip
    assert [group_refusal(call, operation, name) for name in ASKED] == [
        ErrorCode.NONE, ErrorCode.GROUP_AUTHORIZATION_FAILED, ErrorCode.GROUP_AUTHORIZATION_FAILED
    ]  # fmt: skip


def test_an_id_that_may_not_be_known_is_unknown(make: Make) -> None:
    """By id, where the name of the id is found out first: as an id that there is not."""
    call = Call(make("allow User:ann describe topic:shown", "allow User:ann read topic:mine"))
    assert topic_id_refusal(call, Operation.READ, None) == ErrorCode.UNKNOWN_TOPIC_ID
    assert topic_id_refusal(call, Operation.READ, "secret") == ErrorCode.UNKNOWN_TOPIC_ID
    assert topic_id_refusal(call, Operation.READ, "shown") == ErrorCode.TOPIC_AUTHORIZATION_FAILED
    assert topic_id_refusal(call, Operation.READ, "mine") == ErrorCode.NONE


def test_topics_are_made_by_a_rule_for_them_or_for_the_cluster(make: Make) -> None:
    """And a name that is taken is told to nobody else."""
    call = Call(make("allow User:ann create topic:my-*"))
    assert creation_refusal(call, "my-1") == ErrorCode.NONE
    assert creation_refusal(call, "secret") == ErrorCode.TOPIC_AUTHORIZATION_FAILED
    assert creation_refusal(Call(make("allow User:ann create cluster")), "secret") == ErrorCode.NONE
