"""DescribeAcls (29), CreateAcls (30), DeleteAcls (31): read and change the ACL file with Kafka's tools."""

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
from segmentlog.server.request_context import TOO_MUCH, TOO_MUCH_TEXT

if TYPE_CHECKING:
    from segmentlog.server.request_context import RequestContext

logger = logging.getLogger("segmentlog.server")

_Refusal = tuple[ErrorCode, str | None]
_DISABLED: Final = (ErrorCode.SECURITY_DISABLED, "No Authorizer is configured: segmentlog serve --acls FILE")
_DENIED: Final = (ErrorCode.CLUSTER_AUTHORIZATION_FAILED, None)
_UNKNOWN: Final = (
    ErrorCode.INVALID_REQUEST,
    "the resource type, pattern type, operation or permission is unknown",
)
_FAILED: Final = (
    ErrorCode.UNKNOWN_SERVER_ERROR,
    "the ACL file could not be changed; see the server's log for the reason",
)


def describe_acls(call: RequestContext, request: DescribeAclsRequest) -> DescribeAclsResponse:
    """Return the rules that match the filter, grouped by resource."""
    rule_filter = RuleFilter(
        request.resource_type_filter, request.resource_name_filter, request.pattern_type_filter,
        request.principal_filter, request.host_filter, request.operation, request.permission_type,
    )  # fmt: skip
    refusal = _refusal(call, Operation.DESCRIBE) or (None if rule_filter.is_known() else _UNKNOWN)
    if refusal is not None:
        return DescribeAclsResponse(error_code=refusal[0], error_message=refusal[1])
    rules = sorted(call.broker.authorizer.rules(rule_filter), key=_resource_of)
    if not call.reserve_room(len(rules), sum(map(_size_of, rules))):
        return DescribeAclsResponse(error_code=TOO_MUCH, error_message=TOO_MUCH_TEXT)
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


def create_acls(call: RequestContext, request: CreateAclsRequest) -> CreateAclsResponse:
    """Add all valid rules in one change of the file; invalid ones are rejected."""
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
            logger.error("ACL rules could not be added: %s", error)
            done = _FAILED
    results = [
        done if isinstance(rule, Rule) else (ErrorCode.INVALID_REQUEST, call.text_if_room(rule)) for rule in found
    ]
    return CreateAclsResponse(results=[_created(result) for result in results])


def delete_acls(call: RequestContext, request: DeleteAclsRequest) -> DeleteAclsResponse:
    """Delete the matching rules, and return the deleted rules of each filter."""
    filters = [_filter_of(one) for one in call.each(request.filters)]
    refusal = _refusal(call, Operation.ALTER)
    removed: list[Rule] = []
    if refusal is None:
        try:
            removed = call.broker.authorizer.remove(
                rule_filter for rule_filter in dict.fromkeys(filters) if rule_filter.is_known()
            )
            for rule in removed:
                logger.info("%s deleted the rule %s", call.principal, rule)
        except (SegmentlogError, OSError) as error:
            logger.error("ACL rules could not be deleted: %s", error)
            refusal = _FAILED
    results = []
    matching = {
        rule_filter: [rule for rule in removed if rule_filter.matches(rule)] for rule_filter in call.distinct(filters)
    }
    returned: set[Rule] = set()
    for rule_filter in call.each(filters):  # one result for each filter, in their order
        found = matching[rule_filter]
        if not call.reserve_room(len(found), sum(map(_size_of, found))):  # many filters may each match all rules
            found = [rule for rule in found if rule not in returned]
        returned.update(found)
        results.append(_deleted(refusal or (None if rule_filter.is_known() else _UNKNOWN), found))
    return DeleteAclsResponse(filter_results=results)


def _refusal(call: RequestContext, operation: Operation) -> _Refusal | None:
    if call.broker.authorizer.is_open:
        return _DISABLED
    return None if call.allows(operation, ResourceType.CLUSTER, CLUSTER_NAME) else _DENIED


def _created(result: _Refusal) -> AclCreationResult:
    return AclCreationResult(error_code=result[0], error_message=result[1])


def _rule_of(creation: AclCreation) -> Rule | str:
    """Return the rule, or the reason why it is invalid."""
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


def _filter_of(request: DeleteAclsFilter) -> RuleFilter:
    return RuleFilter(
        request.resource_type_filter, request.resource_name_filter, request.pattern_type_filter,
        request.principal_filter, request.host_filter, request.operation, request.permission_type,
    )  # fmt: skip


def _size_of(rule: Rule) -> int:
    """Return the number of characters that a rule takes in a response."""
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
