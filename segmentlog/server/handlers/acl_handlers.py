"""DescribeAcls (29), CreateAcls (30), DeleteAcls (31): the rules of the file that people edit, by Kafka's tools."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from itertools import groupby
from typing import TYPE_CHECKING, Final

from segmentlog.errors import SegmentlogError
from segmentlog.security.acl_file import check_rule, normal_host
from segmentlog.security.acl_rules import Pattern, Permission, Rule, RuleFilter
from segmentlog.security.principals import CLUSTER_NAME, Operation, ResourceType
from segmentlog.server.codec.generated.create_acls import (
    AclCreation,
    AclCreationResult,
    CreateAclsRequest,
    CreateAclsResponse,
)
from segmentlog.server.codec.generated.delete_acls import (
    DeleteAclsFilter,
    DeleteAclsFilterResult,
    DeleteAclsMatchingAcl,
    DeleteAclsRequest,
    DeleteAclsResponse,
)
from segmentlog.server.codec.generated.describe_acls import (
    AclDescription,
    DescribeAclsRequest,
    DescribeAclsResource,
    DescribeAclsResponse,
)
from segmentlog.server.codec.kafka_errors import ErrorCode
from segmentlog.server.error_codes import message_of
from segmentlog.server.request_context import TOO_MUCH, TOO_MUCH_WORDS

if TYPE_CHECKING:
    from segmentlog.server.request_context import Call

logger = logging.getLogger("segmentlog.server")

_Refusal = tuple[ErrorCode, str | None]
_DISABLED: Final = (ErrorCode.SECURITY_DISABLED, "No Authorizer is configured: segmentlog serve --acls FILE")
_DENIED: Final = (ErrorCode.CLUSTER_AUTHORIZATION_FAILED, None)
_UNKNOWN: Final = (
    ErrorCode.INVALID_REQUEST,
    "a type, pattern, operation or permission in it is unknown",
)
_FAILED: Final = (ErrorCode.UNKNOWN_SERVER_ERROR, "the file of rules could not be changed: the server's log says why")


def describe_acls(call: Call, request: DescribeAclsRequest) -> DescribeAclsResponse:
    """The rules that match the filter, by what they are about."""
    wanted = RuleFilter(
        request.resource_type_filter, request.resource_name_filter, request.pattern_type_filter,
        request.principal_filter, request.host_filter, request.operation, request.permission_type,
    )  # fmt: skip
    refusal = _refusal(call, Operation.DESCRIBE) or (None if wanted.is_known() else _UNKNOWN)
    if refusal is not None:
        return DescribeAclsResponse(error_code=refusal[0], error_message=refusal[1])
    rules = sorted(call.broker.authorizer.rules(wanted), key=_resource_of)
    if not call.takes_room(len(rules), sum(map(_size_of, rules))):
        return DescribeAclsResponse(error_code=TOO_MUCH, error_message=TOO_MUCH_WORDS)
    return DescribeAclsResponse(
        error_message=None,
        resources=[
            DescribeAclsResource(
                resource_type=resource_type,
                resource_name=name,
                pattern_type=pattern,
                acls=[
                    AclDescription(
                        principal=rule.principal, host=rule.host, operation=rule.operation,
                        permission_type=rule.permission,
                    )
                    for rule in about
                ],
            )
            for (resource_type, name, pattern), about in groupby(rules, key=_resource_of)
        ],
    )  # fmt: skip


def create_acls(call: Call, request: CreateAclsRequest) -> CreateAclsResponse:
    """Add rules: each that is valid, and all of those at once."""
    refusal = _refusal(call, Operation.ALTER)
    if refusal is not None:
        return CreateAclsResponse(results=[_created(refusal) for _ in request.creations])
    found = [_rule_of(creation) for creation in call.each(request.creations)]
    rules = [rule for rule in found if isinstance(rule, Rule)]
    done: _Refusal = (ErrorCode.NONE, None)
    if rules:
        try:
            call.broker.authorizer.add(rules)
            for rule in rules:
                logger.info("%s added the rule %s", call.principal, rule)
        except (SegmentlogError, OSError) as error:
            logger.error("rules could not be added: %s", error)
            done = _FAILED
    results = [done if isinstance(rule, Rule) else (ErrorCode.INVALID_REQUEST, call.words(rule)) for rule in found]
    return CreateAclsResponse(results=[_created(result) for result in results])


def delete_acls(call: Call, request: DeleteAclsRequest) -> DeleteAclsResponse:
    """Remove the rules that match; which those were is answered for each filter."""
    filters = [_filter_of(one) for one in call.each(request.filters)]
    refusal = _refusal(call, Operation.ALTER)
    removed: list[Rule] = []
    if refusal is None:
        try:
            removed = call.broker.authorizer.remove(wanted for wanted in dict.fromkeys(filters) if wanted.is_known())
            for rule in removed:
                logger.info("%s deleted the rule %s", call.principal, rule)
        except (SegmentlogError, OSError) as error:
            logger.error("rules could not be deleted: %s", error)
            refusal = _FAILED
    results = []
    matching = {wanted: [rule for rule in removed if wanted.matches(rule)] for wanted in call.once(filters)}
    told: set[Rule] = set()
    for wanted in call.each(filters):  # each has its answer, in their order
        found = matching[wanted]
        if not call.takes_room(len(found), sum(map(_size_of, found))):  # any number of filters may mean all rules
            found = [rule for rule in found if rule not in told]
        told.update(found)
        results.append(_deleted(refusal or (None if wanted.is_known() else _UNKNOWN), found))
    return DeleteAclsResponse(filter_results=results)


def _refusal(call: Call, operation: Operation) -> _Refusal | None:
    if call.broker.authorizer.is_open:
        return _DISABLED
    return None if call.allows(operation, ResourceType.CLUSTER, CLUSTER_NAME) else _DENIED


def _created(result: _Refusal) -> AclCreationResult:
    return AclCreationResult(error_code=result[0], error_message=result[1])


def _rule_of(creation: AclCreation) -> Rule | str:
    """The rule, or what is wrong with it."""
    try:
        rule = Rule(
            creation.principal, Permission(creation.permission_type), Operation(creation.operation),
            ResourceType(creation.resource_type), creation.resource_name, Pattern(creation.resource_pattern_type),
            normal_host(creation.host) or creation.host,
        )  # fmt: skip
        check_rule(rule)
    except ValueError as error:
        return message_of(error)
    return rule


def _filter_of(one: DeleteAclsFilter) -> RuleFilter:
    return RuleFilter(
        one.resource_type_filter, one.resource_name_filter, one.pattern_type_filter, one.principal_filter,
        one.host_filter, one.operation, one.permission_type,
    )  # fmt: skip


def _size_of(rule: Rule) -> int:
    """Bytes of text that a rule takes in an answer."""
    return len(rule.name) + len(rule.principal) + len(rule.host)


def _deleted(refusal: _Refusal | None, removed: Iterable[Rule]) -> DeleteAclsFilterResult:
    if refusal is not None:
        return DeleteAclsFilterResult(error_code=refusal[0], error_message=refusal[1])
    return DeleteAclsFilterResult(
        error_message=None,
        matching_acls=[
            DeleteAclsMatchingAcl(
                error_message=None, resource_type=rule.resource_type, resource_name=rule.name,
                pattern_type=rule.pattern, principal=rule.principal, host=rule.host, operation=rule.operation,
                permission_type=rule.permission,
            )
            for rule in removed
        ],
    )  # fmt: skip


def _resource_of(rule: Rule) -> tuple[ResourceType, str, Pattern]:
    return rule.resource_type, rule.name, rule.pattern
