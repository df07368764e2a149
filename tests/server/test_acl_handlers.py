"""DescribeAcls, CreateAcls and DeleteAcls: the file of rules by Kafka's tools."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from security.rules import BOB, TOPIC, Call, allowed, write_rules

from segmentlog.security.acls import Authorizer, OpenAuthorizer
from segmentlog.security.principals import CLUSTER_NAME
from segmentlog.server.codec.generated.create_acls import AclCreation, CreateAclsRequest
from segmentlog.server.codec.generated.delete_acls import DeleteAclsFilter, DeleteAclsRequest
from segmentlog.server.codec.generated.describe_acls import DescribeAclsRequest
from segmentlog.server.codec.kafka_errors import ErrorCode
from segmentlog.server.handlers.acl_handlers import create_acls, delete_acls, describe_acls

Make = Callable[..., Authorizer]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Return a function that writes rules and returns their authorizer, which reads the file at every decision."""
    return partial(write_rules, tmp_path)


def wanted(**more: Any) -> dict[str, Any]:
    """Return a filter that matches everything, except for the given fields."""
    everything = {
        "resource_type_filter": 1, "resource_name_filter": None, "pattern_type_filter": 1, "principal_filter": None,
        "host_filter": None, "operation": 1, "permission_type": 1,
    }  # fmt: skip
    return {**everything, **more}


def described(call: Any, **more: Any) -> list[tuple[Any, ...]]:
    """Return the rules that DescribeAcls returns for a filter."""
    answer = describe_acls(call, DescribeAclsRequest(**wanted(**more)))
    assert (answer.error_code, answer.error_message) == (0, None)
    return [
        (resource.resource_type, resource.resource_name, resource.pattern_type, one.principal, one.operation)
        for resource in answer.resources
        for one in resource.acls
    ]  # fmt: skip


def creation(**more: Any) -> AclCreation:
    """Return a rule that lets bob read t, except for the given fields."""
    rule = {
        "resource_type": 2, "resource_name": "t", "resource_pattern_type": 3, "principal": "User:bob", "host": "*",
        "operation": 3, "permission_type": 3,
    }  # fmt: skip
    return AclCreation(**{**rule, **more})


def test_without_rules_there_is_no_security() -> None:
    """SECURITY_DISABLED, as MirrorMaker expects it of a Kafka without an authorizer."""
    call: Any = Call(OpenAuthorizer())
    assert describe_acls(call, DescribeAclsRequest(**wanted())).error_code == ErrorCode.SECURITY_DISABLED
    created = create_acls(call, CreateAclsRequest(creations=[creation()]))
    deleted = delete_acls(call, DeleteAclsRequest(filters=[DeleteAclsFilter(**wanted())]))
    assert created.results[0].error_code == ErrorCode.SECURITY_DISABLED
    assert deleted.filter_results[0].error_code == ErrorCode.SECURITY_DISABLED


def test_rules_are_shown_only_to_who_may_describe_the_cluster(make: Make) -> None:
    """Changing them requires ALTER on the cluster."""
    authorizer = make("allow User:ann describe cluster", "allow User:bob describe topic:*")
    ann: Any = Call(authorizer)
    bob: Any = Call(authorizer, BOB)
    assert len(described(ann)) == 2
    denied = ErrorCode.CLUSTER_AUTHORIZATION_FAILED
    assert describe_acls(bob, DescribeAclsRequest(**wanted())).error_code == denied
    before = Path(authorizer.path).read_bytes()
    assert create_acls(ann, CreateAclsRequest(creations=[creation()])).results[0].error_code == denied
    answer = delete_acls(ann, DeleteAclsRequest(filters=[DeleteAclsFilter(**wanted())]))
    assert answer.filter_results[0].error_code == denied
    assert answer.filter_results[0].matching_acls == []
    assert Path(authorizer.path).read_bytes() == before


@pytest.mark.parametrize(
    ("more", "names"),
    [
        ({}, ["*", "a", "ab", "abc", "g", CLUSTER_NAME]),
        ({"resource_type_filter": 2}, ["*", "a", "ab", "abc"]),
        ({"resource_type_filter": 3}, ["g"]),
        ({"resource_name_filter": "ab"}, ["ab"]),
        ({"resource_name_filter": "ab", "pattern_type_filter": 3}, []),
        ({"resource_name_filter": "ab", "pattern_type_filter": 4}, ["ab"]),
        ({"resource_name_filter": "abc", "pattern_type_filter": 2, "resource_type_filter": 2}, ["*", "ab", "abc"]),
        ({"resource_name_filter": "*", "pattern_type_filter": 3}, ["*"]),
        ({"pattern_type_filter": 4}, ["ab"]),
        ({"principal_filter": "User:bob"}, ["g"]),
        ({"host_filter": "10.0.0.7"}, ["abc"]),
        ({"host_filter": "*", "resource_type_filter": 2}, ["*", "a", "ab"]),
        ({"operation": 4}, ["ab"]),
        ({"permission_type": 2}, ["a"]),
    ],
)
def test_filters_mean_what_they_mean_in_kafka(make: Make, more: dict[str, Any], names: list[str]) -> None:
    """Filters have any, exact and matching patterns, and principals, hosts, operations and permissions."""
    call: Any = Call(
        make(
            "allow User:ann describe cluster", "allow User:* read topic:*", "deny User:carl read topic:a",
            "allow User:carl write topic:ab*", "allow User:carl read topic:abc from 10.0.0.7",
            "allow User:bob read group:g",
        )
    )  # fmt: skip
    assert sorted(found[1] for found in described(call, **more)) == sorted(names)


@pytest.mark.parametrize(
    "more",
    [
        {"resource_type_filter": 0}, {"resource_type_filter": 99}, {"pattern_type_filter": 0}, {"operation": 0},
        {"operation": 13}, {"permission_type": 0}, {"permission_type": 9},
    ],
)  # fmt: skip
def test_unknown_filters_are_refused(make: Make, more: dict[str, Any]) -> None:
    """An unknown filter is refused, because it could delete more than was meant."""
    authorizer = make("super User:ann", "allow User:bob read topic:t")
    call: Any = Call(authorizer)
    assert describe_acls(call, DescribeAclsRequest(**wanted(**more))).error_code == ErrorCode.INVALID_REQUEST
    answer = delete_acls(call, DeleteAclsRequest(filters=[DeleteAclsFilter(**wanted(**more))]))
    assert answer.filter_results[0].error_code == ErrorCode.INVALID_REQUEST
    assert len(described(call)) == 1


def test_rules_that_can_never_apply_can_be_deleted(make: Make) -> None:
    """Older servers took them from CreateAcls, which refuses them now."""
    authorizer = make("super User:ann", "allow User:bob read topic:a/b", "allow User:bob read topic:t")
    call: Any = Call(authorizer)
    created = create_acls(call, CreateAclsRequest(creations=[creation(resource_name="c/d")]))
    assert created.results[0].error_code == ErrorCode.INVALID_REQUEST
    answer = delete_acls(call, DeleteAclsRequest(filters=[DeleteAclsFilter(**wanted(resource_name_filter="a/b"))]))
    assert [one.resource_name for one in answer.filter_results[0].matching_acls] == ["a/b"]
    assert Path(authorizer.path).read_text() == "super User:ann\nallow User:bob read topic:t\n"


def test_rules_come_and_go_by_the_protocol(make: Make) -> None:
    """Created rules count at once and stay; the file keeps its comments and its mode."""
    authorizer = make("# ours", "super User:ann", "allow User:carl read topic:c")
    os.chmod(authorizer.path, 0o644)
    call: Any = Call(authorizer)
    answer = create_acls(call, CreateAclsRequest(creations=[creation(), creation(operation=4), creation()]))
    assert [one.error_code for one in answer.results] == [0, 0, 0]
    assert allowed(authorizer, BOB, TOPIC, "t") == "read write describe"
    text = Path(authorizer.path).read_text()
    assert text == "# ours\nsuper User:ann\nallow User:carl read topic:c\nallow User:bob read,write topic:t\n"
    assert stat.S_IMODE(os.stat(authorizer.path).st_mode) == 0o644
    filters = [
        DeleteAclsFilter(**wanted(principal_filter="User:bob", operation=3)),
        DeleteAclsFilter(**wanted(principal_filter="User:bob")),
        DeleteAclsFilter(**wanted(principal_filter="User:nobody")),
    ]
    found = delete_acls(call, DeleteAclsRequest(filters=filters)).filter_results
    assert [[acl.operation for acl in one.matching_acls] for one in found] == [[3], [3, 4], []]
    assert allowed(authorizer, BOB, TOPIC, "t") == ""
    assert Path(authorizer.path).read_text() == "# ours\nsuper User:ann\nallow User:carl read topic:c\n"


@pytest.mark.parametrize(
    "more",
    [
        {"resource_type": 1}, {"resource_type": 0}, {"resource_type": 6}, {"resource_name": ""},
        {"resource_pattern_type": 1}, {"resource_pattern_type": 2}, {"principal": "bob"}, {"principal": ""},
        {"principal": "User:"}, {"host": ""}, {"host": "somewhere"}, {"operation": 1}, {"operation": 12},
        {"operation": 99}, {"permission_type": 1}, {"resource_type": 4, "operation": 8},
        {"resource_type": 4, "resource_name": "other", "operation": 8},
    ],
)  # fmt: skip
def test_invalid_rules_are_refused_alone(make: Make, more: dict[str, Any]) -> None:
    """The answer says what is wrong; valid rules of the request are created."""
    authorizer = make("super User:ann")
    call: Any = Call(authorizer)
    bad, good = create_acls(call, CreateAclsRequest(creations=[creation(**more), creation()])).results
    assert bad.error_code == ErrorCode.INVALID_REQUEST
    assert bad.error_message
    assert good.error_code == 0
    assert len(described(call)) == 1


def test_a_file_that_is_gone_or_broken_is_not_made_anew(make: Make) -> None:
    """A request to add a rule does not recreate a deleted file.

    The previous rules stay, and the response is an error.
    """
    authorizer = make("super User:ann")
    call: Any = Call(authorizer)
    Path(authorizer.path).write_text("nonsense\n")
    answer = create_acls(call, CreateAclsRequest(creations=[creation()]))
    assert answer.results[0].error_code == ErrorCode.UNKNOWN_SERVER_ERROR
    os.unlink(authorizer.path)
    answer = create_acls(call, CreateAclsRequest(creations=[creation()]))
    assert answer.results[0].error_code == ErrorCode.UNKNOWN_SERVER_ERROR
    deleted = delete_acls(call, DeleteAclsRequest(filters=[DeleteAclsFilter(**wanted())]))
    assert deleted.filter_results[0].error_code == ErrorCode.UNKNOWN_SERVER_ERROR
    assert not os.path.exists(authorizer.path)
