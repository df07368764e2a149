"""REST v3 endpoints that read and change the store's ACL file, which all servers of the store use."""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import TYPE_CHECKING, Final
from urllib.parse import urlencode

import msgspec

from segmentlog.http.rest.responses import RestResponse, json_response
from segmentlog.http.rest.v3 import v3_models
from segmentlog.http.rest.v3.v3_links import Links
from segmentlog.http.rest.v3.v3_topics import bad_request
from segmentlog.security.acl_file import check_rule, normal_host
from segmentlog.security.acl_rules import Pattern, Permission, Rule, RuleFilter
from segmentlog.security.principals import Operation, ResourceType

if TYPE_CHECKING:
    from segmentlog.http.rest.rest_request import RestRequest

logger = logging.getLogger("segmentlog.http")

_ANY, _MATCH = 1, 2
_PATTERNS: Final = {"ANY": _ANY, "MATCH": _MATCH, **{one.name: int(one) for one in Pattern}}


def _check(request: RestRequest, operation: Operation) -> None:
    if operation is not Operation.DESCRIBE:
        request.check_administration()
    request.check(operation, ResourceType.CLUSTER)
    if request.context.authorizer.is_open:
        raise bad_request("No Authorizer is configured: start the server with --acls FILE")


def _filter(query: v3_models.AclQuery) -> RuleFilter:
    return RuleFilter(
        _ANY if query.resource_type == "ANY" else ResourceType[query.resource_type],
        query.resource_name,
        _PATTERNS[query.pattern_type],
        query.principal,
        query.host,
        _ANY if query.operation == "ANY" else Operation[query.operation],
        _ANY if query.permission == "ANY" else Permission[query.permission],
    )


def _data(links: Links, rule: Rule) -> v3_models.AclData:
    fields = {
        "resource_type": rule.resource_type.name,
        "resource_name": rule.name,
        "pattern_type": rule.pattern.name,
        "principal": rule.principal,
        "host": rule.host,
        "operation": rule.operation.name,
        "permission": rule.permission.name,
    }
    metadata = v3_models.Metadata(f"{links.url('acls')}?{urlencode(fields)}")
    return msgspec.convert({"metadata": metadata, "cluster_id": links.cluster_id, **fields}, v3_models.AclData)


async def list_acls(request: RestRequest) -> RestResponse:
    """Return the rules that match the query."""
    links = Links(request)
    _check(request, Operation.DESCRIBE)
    rules = await request.work(request.context.authorizer.rules, _filter(request.query))
    metadata = links.list_metadata("acls", query=request.scope["query_string"].decode("latin-1"))
    return json_response(v3_models.AclList(metadata=metadata, data=[_data(links, rule) for rule in rules]))


async def create_acl(request: RestRequest) -> RestResponse:
    """Add one rule."""
    return await _create(request, [await request.document()])


async def create_acls(request: RestRequest) -> RestResponse:
    """Add several rules, all or none."""
    return await _create(request, (await request.document()).data)


async def _create(request: RestRequest, asked: list[v3_models.NewAcl]) -> RestResponse:
    Links(request)
    _check(request, Operation.ALTER)
    rules = [_rule(one) for one in asked]
    await request.work(request.context.authorizer.add, rules)
    for rule in rules:
        logger.info("%s added the rule %s", request.context.principal(request.connection), rule)
    return RestResponse(status=HTTPStatus.CREATED)


def _rule(asked: v3_models.NewAcl) -> Rule:
    rule = Rule(
        asked.principal, Permission[asked.permission], Operation[asked.operation], ResourceType[asked.resource_type],
        asked.resource_name, Pattern[asked.pattern_type], normal_host(asked.host) or asked.host,
    )  # fmt: skip
    try:
        check_rule(rule)
    except ValueError as error:
        raise bad_request(str(error)) from None
    return rule


async def delete_acls(request: RestRequest) -> RestResponse:
    """Delete the matching rules. The query must name resource type, pattern, operation and permission."""
    links = Links(request)
    _check(request, Operation.ALTER)
    given = request.connection.query_params
    if missing := [name for name in ("resource_type", "pattern_type", "operation", "permission") if name not in given]:
        raise bad_request(f"missing parameters: {', '.join(missing)} (ANY matches all rules); nothing was deleted")
    removed = await request.work(lambda: request.context.authorizer.remove([_filter(request.query)]))
    for rule in removed:
        logger.info("%s deleted the rule %s", request.context.principal(request.connection), rule)
    return json_response(v3_models.DeletedAcls([_data(links, rule) for rule in removed]))
