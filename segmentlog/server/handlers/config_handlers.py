"""DescribeConfigs (32), AlterConfigs (33) and IncrementalAlterConfigs (44)."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from typing import Final, NamedTuple, Protocol

from segmentlog.config import TopicConfig
from segmentlog.errors import InvalidConfig, SegmentlogError
from segmentlog.policy.kafka_configs import (
    SOURCE_DEFAULT,
    SOURCE_GROUP,
    SOURCE_TOPIC,
    TYPE_BOOLEAN,
    TYPE_INT,
    TYPE_LONG,
    ConfigEntry,
    describe,
    is_list,
    known_keys,
    to_engine,
    without_effect,
)
from segmentlog.security.principals import Operation, ResourceType
from segmentlog.security.viewer import Thing
from segmentlog.server.codec.generated import alter_configs as whole
from segmentlog.server.codec.generated import incremental_alter_configs as incremental
from segmentlog.server.codec.generated.describe_configs import (
    DescribeConfigsRequest,
    DescribeConfigsResource,
    DescribeConfigsResourceResult,
    DescribeConfigsResponse,
    DescribeConfigsResult,
    DescribeConfigsSynonym,
)
from segmentlog.server.codec.kafka_errors import ErrorCode
from segmentlog.server.error_codes import code_of, message_of
from segmentlog.server.groups import group_config
from segmentlog.server.request_budget import AnswerBudget
from segmentlog.server.request_context import TOO_MUCH, TOO_MUCH_TEXT, RequestContext
from segmentlog.server.topic_ids import is_visible

logger = logging.getLogger("segmentlog.server")

_TOPIC: Final = 2
_BROKER: Final = 4
_GROUP: Final = 32
_ENTRY_BYTES: Final = 16
"""Maximum size of an entry or a synonym in a response, without its name and value."""
_SET, _DELETE, _APPEND, _SUBTRACT = range(4)


def describe_configs(call: RequestContext, request: DescribeConfigsRequest) -> DescribeConfigsResponse:
    """Return the configs of topics, groups and this worker."""
    # A larger budget than usual: Kafka's tools request all topics of a cluster at once.
    limits = call.broker.settings.limits
    call.budget = AnswerBudget(limits.answer_elements, limits.answer_config_bytes)
    once = call.distinct(request.resources, lambda one: (*_identity(one), frozenset(one.configuration_keys or ())))
    # Most entries are defaults, and equal for all topics: create one object for all of them.
    default = cache(partial(_entry_response, request))
    return DescribeConfigsResponse(results=[_describe(call, request, resource, default) for resource in once])


def _describe(
    call: RequestContext, request: DescribeConfigsRequest, resource: DescribeConfigsResource,
    default: Callable[[ConfigEntry, int], DescribeConfigsResourceResult],
) -> DescribeConfigsResult:  # fmt: skip
    kind, name = resource.resource_type, resource.resource_name
    result = DescribeConfigsResult(error_message=None, resource_type=kind, resource_name=name)
    if kind == _TOPIC:
        if not call.may_see(Thing.TOPIC_CONFIG, name):
            result.error_code = ErrorCode.TOPIC_AUTHORIZATION_FAILED
            return result
        try:
            if not is_visible(name):
                raise InvalidConfig("topic", name, "use a topic that is not internal")
            entries = describe(call.broker.store.topic(name).config)
        except (SegmentlogError, OSError) as error:
            result.error_code, result.error_message = code_of(error), call.explain_error(error)
            return result
    elif kind == _BROKER:
        if not call.allows_cluster(Operation.DESCRIBE_CONFIGS):
            result.error_code = ErrorCode.CLUSTER_AUTHORIZATION_FAILED
            return result
        if name not in ("", str(call.broker.broker_id)):  # check and text are Kafka's
            words = f"Unexpected broker id, expected {call.broker.broker_id} or empty string, but received {name:.20}"
            result.error_code, result.error_message = ErrorCode.INVALID_REQUEST, call.text_if_room(words)
            return result
        entries = _of_broker(call) if name else []  # without a name: defaults of all brokers
    elif kind == _GROUP:
        if not call.may_see(Thing.GROUP_CONFIG, name):
            result.error_code = ErrorCode.GROUP_AUTHORIZATION_FAILED
            return result
        try:
            group_config.check_name(name)
            entries = group_config.describe(call.broker.settings.groups, call.broker.store.groups.configs.find(name))
        except (SegmentlogError, OSError) as error:
            result.error_code, result.error_message = code_of(error), call.explain_error(error)
            return result
    else:
        words = f"only topics ({_TOPIC}), brokers ({_BROKER}) and groups ({_GROUP}) have configs"
        result.error_code, result.error_message = ErrorCode.INVALID_REQUEST, call.text_if_room(words)
        return result
    keys = frozenset(resource.configuration_keys or ())  # null, and from some clients an empty list, mean all keys
    shown = [entry for entry in entries if not keys or entry.name in keys]
    size_bytes = sum(len(entry.name) + len(entry.value or "") + _ENTRY_BYTES for entry in shown)
    if request.include_synonyms:
        size_bytes *= 2
    if request.include_documentation:
        size_bytes += sum(len(entry.documentation or "") for entry in shown)
    if not call.reserve_room(1, size_bytes):
        result.error_code, result.error_message = TOO_MUCH, call.text_if_room(TOO_MUCH_TEXT)
        return result
    result.configs = [
        default(entry, kind) if entry.is_default else _entry_response(request, entry, kind) for entry in shown
    ]
    return result


def _entry_response(request: DescribeConfigsRequest, entry: ConfigEntry, kind: int) -> DescribeConfigsResourceResult:
    source = SOURCE_DEFAULT if entry.is_default else SOURCE_GROUP if kind == _GROUP else SOURCE_TOPIC
    synonyms = [DescribeConfigsSynonym(entry.name, entry.value, source)] if request.include_synonyms else []
    documentation = entry.documentation if request.include_documentation else None
    return DescribeConfigsResourceResult(
        entry.name, entry.value, entry.read_only, source, False, synonyms, entry.type, documentation
    )


def _of_broker(call: RequestContext) -> list[ConfigEntry]:
    settings, limits = call.broker.settings, call.broker.settings.limits
    values = [
        ("auto.create.topics.enable", str(settings.auto_create).lower(), TYPE_BOOLEAN),
        ("broker.id", str(call.broker.broker_id), TYPE_INT),
        ("connections.max.idle.ms", str(int(limits.idle_s * 1000)), TYPE_LONG),
        ("default.replication.factor", "1", TYPE_INT),
        ("fetch.max.bytes", str(limits.fetch_bytes), TYPE_INT),
        ("max.connections", str(limits.connections), TYPE_INT),
        ("message.max.bytes", str(TopicConfig().max_message_bytes), TYPE_INT),
        ("min.insync.replicas", "1", TYPE_INT),
        ("num.partitions", str(settings.default_partitions), TYPE_INT),
        ("offsets.topic.replication.factor", "1", TYPE_INT),
        ("socket.request.max.bytes", str(limits.request_bytes), TYPE_INT),
    ]
    return [ConfigEntry(name, value, True, kind, read_only=True) for name, value, kind in values]


class _Resource(Protocol):
    resource_type: int
    resource_name: str


class _ConfigChange(Protocol):
    name: str
    value: str | None


def _identity(resource: _Resource) -> tuple[int, str]:
    return resource.resource_type, resource.resource_name


def _request_error(count: int, changes: Iterable[_ConfigChange], no_value: Sequence[str]) -> str | None:
    """Return the reason why the request is invalid, or None.

    It is invalid if it names the resource more than once (``count``), repeats a key, or has keys in ``no_value``.

    These errors do not depend on the client's permissions, or on whether the resource exists.
    """
    if count > 1:
        return f"the request names the resource {count} times; it may name it once"
    twice = [name for name, times in Counter(change.name for change in changes).items() if times > 1]
    if twice:
        return f"the request names these keys more than once: {', '.join(twice):.200}"
    return f"these keys have no value: {', '.join(no_value):.200}" if no_value else None


def incremental_alter_configs(
    call: RequestContext, request: incremental.IncrementalAlterConfigsRequest
) -> incremental.IncrementalAlterConfigsResponse:
    """Set, reset, append to and subtract from config keys. The changes of one resource apply together or not at all."""
    responses = []
    counts = Counter(map(_identity, request.resources))
    for resource in call.distinct(request.resources, _identity):
        no_value = [one.name for one in resource.configs if one.value is None and one.config_operation != _DELETE]
        message = _request_error(counts[_identity(resource)], resource.configs, no_value)
        if message:
            code = ErrorCode.INVALID_REQUEST
        elif resource.resource_type == _BROKER and all(one.config_operation == _DELETE for one in resource.configs):
            # No-op: no broker configs are set. kafka-reassign-partitions.sh deletes its throttles in any case.
            is_allowed = call.allows_cluster(Operation.ALTER_CONFIGS)
            code = ErrorCode.NONE if is_allowed else ErrorCode.CLUSTER_AUTHORIZATION_FAILED
        elif resource.resource_type == _GROUP:
            changes = partial(_group_changes, resource.configs)
            code, message = _alter_group(call, resource.resource_name, changes, request.validate_only)
        else:
            code, message = _alter(call, resource, partial(_changes, resource.configs), request.validate_only)
        words = call.text_if_room(message) if message else None
        responses.append(
            incremental.AlterConfigsResourceResponse(code, words, resource.resource_type, resource.resource_name)
        )
    return incremental.IncrementalAlterConfigsResponse(responses=responses)


def alter_configs(call: RequestContext, request: whole.AlterConfigsRequest) -> whole.AlterConfigsResponse:
    """Set the given config keys, and reset all other keys of the resource (the older API)."""
    responses = []
    counts = Counter(map(_identity, request.resources))
    for resource in call.distinct(request.resources, _identity):
        no_value = [one.name for one in resource.configs if one.value is None]
        message = _request_error(counts[_identity(resource)], resource.configs, no_value)
        if message:
            code = ErrorCode.INVALID_REQUEST
        elif resource.resource_type == _GROUP:
            replaced = partial(_group_replacement, resource.configs)
            code, message = _alter_group(call, resource.resource_name, replaced, request.validate_only)
        else:
            code, message = _alter(call, resource, partial(_replacement, resource.configs), request.validate_only)
        words = call.text_if_room(message) if message else None
        responses.append(
            whole.AlterConfigsResourceResponse(code, words, resource.resource_type, resource.resource_name)
        )
    return whole.AlterConfigsResponse(responses=responses)


class _TopicChanges(NamedTuple):
    """Requested changes of a topic's configs, under Kafka's names."""

    settings: dict[str, str | None]
    resets: list[str]


def _alter(
    call: RequestContext, resource: _Resource, changes_of: Callable[[TopicConfig], _TopicChanges], validate_only: bool
) -> tuple[ErrorCode, str | None]:
    """Alter a topic. Return (error code, message)."""
    name = resource.resource_name
    if resource.resource_type != _TOPIC:
        return (
            ErrorCode.INVALID_REQUEST,
            "only topics and groups can be altered; set the server's settings on its command line",
        )
    if not call.allows_topic(Operation.ALTER_CONFIGS, name):
        return ErrorCode.TOPIC_AUTHORIZATION_FAILED, None
    if not is_visible(name):
        return ErrorCode.INVALID_TOPIC_EXCEPTION, "it is an internal topic"
    store = call.broker.store
    try:
        config = store.topic(name).config
        requested = changes_of(config)
        changes = to_engine(requested.settings, config, requested.resets)
        altered = config.replace(changes)
        if not validate_only:
            if changes:
                store.alter_topic(name, changes)
            if ineffective := without_effect(requested.settings, altered, is_shipped=store.is_shipped):
                logger.warning("a client set keys of topic %s that have no effect: %s", name, ineffective)
    except (SegmentlogError, OSError) as error:
        return code_of(error), message_of(error)
    return ErrorCode.NONE, None


def _changes(changes: Iterable[incremental.AlterableConfig], config: TopicConfig) -> _TopicChanges:
    requested = _TopicChanges({}, [])
    for change in changes:
        if change.config_operation == _DELETE:
            requested.resets.append(change.name)
        elif change.config_operation == _SET:
            requested.settings[change.name] = change.value
        elif change.config_operation in (_APPEND, _SUBTRACT):
            requested.settings[change.name] = _edited(config, change)
        else:
            raise InvalidConfig(change.name, change.config_operation, "use an operation from 0 to 3")
    return requested


def _edited(config: TopicConfig, change: incremental.AlterableConfig) -> str:
    """Return a list value after APPEND or SUBTRACT. Only cleanup.policy has an effect; other lists stay empty."""
    if change.name in known_keys() and not is_list(change.name):
        raise InvalidConfig(change.name, change.value, "use SET or DELETE, because the key is not a list")
    given = change.value or ""
    if change.name != "cleanup.policy":
        return given
    words = set(config.cleanup_policy.split(",")) - {""}
    some = {word.strip().lower() for word in given.split(",")}
    return ",".join(sorted(words | some if change.config_operation == _APPEND else words - some))


def _replacement(requested: Iterable[whole.AlterableConfig], config: TopicConfig) -> _TopicChanges:
    return _TopicChanges({change.name: change.value for change in requested}, list(config.to_mapping()))


# ---------------------------------------------------------------- groups


def _alter_group(
    call: RequestContext,
    name: str,
    change: Callable[[Mapping[str, int]], Mapping[str, str | int | None]],
    validate_only: bool,
) -> tuple[ErrorCode, str | None]:
    """Alter a group's configs. Return (error code, message); an error leaves them unchanged."""
    if not call.allows(Operation.ALTER_CONFIGS, ResourceType.GROUP, name):
        return ErrorCode.GROUP_AUTHORIZATION_FAILED, None
    configs, settings = call.broker.store.groups.configs, call.broker.settings.groups

    def altered(before: Mapping[str, int]) -> Mapping[str, int]:
        return group_config.checked(settings, change(before))

    try:
        group_config.check_name(name)
        if validate_only:
            altered(configs.find(name))
        else:
            configs.alter(name, altered)
    except (SegmentlogError, OSError) as error:
        return code_of(error), message_of(error)
    return ErrorCode.NONE, None


def _group_changes(
    requested: Iterable[incremental.AlterableConfig], before: Mapping[str, int]
) -> Mapping[str, str | int | None]:
    found: dict[str, str | int | None] = dict(before)
    for change in requested:
        if change.config_operation == _SET:
            found[change.name] = change.value
        elif change.config_operation == _DELETE:
            group_config.check_key(change.name)
            found.pop(change.name, None)
        else:
            raise InvalidConfig(change.name, change.value, "use SET or DELETE, because the key is not a list")
    return found


def _group_replacement(
    requested: Iterable[whole.AlterableConfig], before: Mapping[str, int]
) -> Mapping[str, str | int | None]:
    return {change.name: change.value for change in requested}
