"""The rules of access, by the file that all doors go by."""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import TYPE_CHECKING, Final
from urllib.parse import urlencode

import msgspec

from segmentlog.http.rest.responses import Reply, json_reply
from segmentlog.http.rest.v3 import v3_models
from segmentlog.http.rest.v3.v3_links import Links
from segmentlog.http.rest.v3.v3_topics import bad
from segmentlog.security.acl_file import check_rule, normal_host
from segmentlog.security.acl_rules import Pattern, Permission, Rule, RuleFilter
from segmentlog.security.principals import Operation, ResourceType

if TYPE_CHECKING:
    from segmentlog.http.rest.rest_request import Call

logger = logging.getLogger("segmentlog.http")

_ANY, _MATCH = 1, 2
_PATTERNS: Final = {"ANY": _ANY, "MATCH": _MATCH, **{one.name: int(one) for one in Pattern}}


def _check(call: Call, operation: Operation) -> None:
    if operation is not Operation.DESCRIBE:
        call.check_administration()
    call.check(operation, ResourceType.CLUSTER)
    if call.site.authorizer.is_open:
        raise bad("No Authorizer is configured: --acls FILE")


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


def _data(links: Links, rule: Rule) -> v3_models.Acl:
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
    return msgspec.convert({"metadata": metadata, "cluster_id": links.cluster_id, **fields}, v3_models.Acl)


async def list_acls(call: Call) -> Reply:
    """Those that are asked for."""
    links = Links(call)
    _check(call, Operation.DESCRIBE)
    rules = await call.work(call.site.authorizer.rules, _filter(call.query))
    metadata = links.list_metadata("acls", query=call.scope["query_string"].decode("latin-1"))
    return json_reply(v3_models.AclList(metadata=metadata, data=[_data(links, rule) for rule in rules]))


async def create_acl(call: Call) -> Reply:
    """One more."""
    return await _create(call, [await call.document()])


async def create_acls(call: Call) -> Reply:
    """Several: all of them, or none."""
    return await _create(call, (await call.document()).data)


async def _create(call: Call, asked: list[v3_models.NewAcl]) -> Reply:
    Links(call)
    _check(call, Operation.ALTER)
    rules = [_rule(one) for one in asked]
    await call.work(call.site.authorizer.add, rules)
    for rule in rules:
        logger.info("%s added the rule %s", call.site.principal(call.connection), rule)
    return Reply(status=HTTPStatus.CREATED)


def _rule(asked: v3_models.NewAcl) -> Rule:
    rule = Rule(
        asked.principal, Permission[asked.permission], Operation[asked.operation], ResourceType[asked.resource_type],
        asked.resource_name, Pattern[asked.pattern_type], normal_host(asked.host) or asked.host,
    )  # fmt: skip
    try:
        check_rule(rule)
    except ValueError as error:
        raise bad(str(error)) from None
    return rule


async def delete_acls(call: Call) -> Reply:
    """Those that are meant. What kind of resource, pattern, operation and permission has to be said."""
    links = Links(call)
    _check(call, Operation.ALTER)
    given = call.connection.query_params
    if missing := [name for name in ("resource_type", "pattern_type", "operation", "permission") if name not in given]:
        raise bad(f"say {', '.join(missing)}: ANY deletes rules of all kinds")
    removed = await call.work(lambda: call.site.authorizer.remove([_filter(call.query)]))
    for rule in removed:
        logger.info("%s deleted the rule %s", call.site.principal(call.connection), rule)
    return json_reply(v3_models.DeletedAcls([_data(links, rule) for rule in removed]))
