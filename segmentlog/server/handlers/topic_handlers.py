"""CreateTopics (19), DeleteTopics (20) and CreatePartitions (37)."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from segmentlog.config import TopicConfig
from segmentlog.errors import InvalidConfig, SegmentlogError, TopicExists, UnknownTopic
from segmentlog.format.file_names import MAX_PARTITIONS, check_topic_name
from segmentlog.policy.kafka_configs import SOURCE_DEFAULT, SOURCE_TOPIC, describe, to_engine, without_effect
from segmentlog.security.principals import Operation
from segmentlog.security.viewer import Thing
from segmentlog.server.codec.generated.create_partitions import (
    CreatePartitionsRequest,
    CreatePartitionsResponse,
    CreatePartitionsTopic,
    CreatePartitionsTopicResult,
)
from segmentlog.server.codec.generated.create_topics import (
    CreatableTopic,
    CreatableTopicConfigs,
    CreatableTopicResult,
    CreateTopicsRequest,
    CreateTopicsResponse,
)
from segmentlog.server.codec.generated.delete_topics import (
    DeletableTopicResult,
    DeleteTopicsRequest,
    DeleteTopicsResponse,
    DeleteTopicState,
)
from segmentlog.server.codec.kafka_errors import ErrorCode
from segmentlog.server.codec.primitives import ZERO_UUID
from segmentlog.server.error_codes import code_of, message_of
from segmentlog.server.request_context import TOO_MUCH, RequestContext
from segmentlog.server.topic_ids import is_visible, wire_id

logger = logging.getLogger("segmentlog.server")

_STATES_FROM: Final = 6
_DEFAULT: Final = -1
_ENTRY_ROOM: Final = 2
"""Elements that a configuration entry counts as in a response: with its texts it is as large as two partitions."""


def create_topics(call: RequestContext, request: CreateTopicsRequest) -> CreateTopicsResponse:
    """Create topics durably. If one topic fails, the others are created all the same."""
    names = Counter(topic.name for topic in request.topics)
    may_create_all = call.allows_cluster(Operation.CREATE)
    response = CreateTopicsResponse()
    too_many = _too_many(call, (max(topic.num_partitions, len(topic.assignments), 1) for topic in request.topics))
    for topic in call.distinct(request.topics, lambda topic: topic.name):
        if too_many:
            response.topics.append(_refused(topic.name, ErrorCode.POLICY_VIOLATION, call.text_if_room(too_many)))
        elif names[topic.name] > 1:
            response.topics.append(_refused(topic.name, ErrorCode.INVALID_REQUEST, "the request names it twice"))
        elif not may_create_all and not call.allows_topic(Operation.CREATE, topic.name):
            response.topics.append(_refused(topic.name, ErrorCode.TOPIC_AUTHORIZATION_FAILED, "not authorized"))
        else:
            response.topics.append(_create(call, topic, validate_only=request.validate_only))
    return response


def _too_many(call: RequestContext, counts: Iterable[int]) -> str:
    """Return an error text if a request creates too many partitions, else "". A partition takes a folder and time."""
    most = call.broker.settings.limits.partitions_made
    requested = sum(counts)
    return f"the request creates {requested} partitions; at most {most} are allowed" if requested > most else ""


def _refused(name: str, code: ErrorCode, message: str | None) -> CreatableTopicResult:
    return CreatableTopicResult(name=name, error_code=int(code), error_message=message, configs=None)


def _create(call: RequestContext, topic: CreatableTopic, *, validate_only: bool) -> CreatableTopicResult:
    store, name = call.broker.store, topic.name
    count = topic.num_partitions
    if topic.assignments:
        if count != _DEFAULT or topic.replication_factor != _DEFAULT:
            return _refused(name, ErrorCode.INVALID_REQUEST, "replica assignments and counts exclude each other")
        code, message = _check_assignments(call, [item.broker_ids for item in topic.assignments])
        if code or sorted(item.partition_index for item in topic.assignments) != list(range(len(topic.assignments))):
            return _refused(
                name,
                code or ErrorCode.INVALID_REPLICA_ASSIGNMENT,
                message or "replica assignments must name each partition from 0 on exactly once",
            )
        count = len(topic.assignments)
    elif topic.replication_factor not in (_DEFAULT, 1):
        why = f"replication factor {topic.replication_factor} is not supported: a store has one copy"
        return _refused(name, ErrorCode.INVALID_REPLICATION_FACTOR, why)
    if count == _DEFAULT:
        count = call.broker.settings.default_partitions
    if not 1 <= count <= MAX_PARTITIONS:
        return _refused(name, ErrorCode.INVALID_PARTITIONS, f"{count} partitions; allowed are 1 to {MAX_PARTITIONS}")
    try:
        check_topic_name(name)
        given = {item.name: item.value for item in topic.configs}
        settings = to_engine(given)
        config = TopicConfig.from_mapping(settings)
        if name in store.topics():
            raise TopicExists(name)
        topic_id = ZERO_UUID
        if not validate_only:
            topic_id = wire_id(store.create_topic(name, count, settings).id)
            if ineffective := without_effect(given, config, is_shipped=store.is_shipped):
                logger.warning("a client created topic %s with keys that have no effect: %s", name, ineffective)
    except (SegmentlogError, OSError) as error:
        return _refused(name, code_of(error), call.explain_error(error))
    if not call.may_see(Thing.TOPIC_CONFIG, name):  # KIP-525
        denied = int(ErrorCode.TOPIC_AUTHORIZATION_FAILED)
        return CreatableTopicResult(name, topic_id, 0, None, denied, -1, -1, None)
    entries = describe(config)
    if not call.reserve_room(_ENTRY_ROOM * len(entries), sum(len(entry.value or "") for entry in entries)):
        return CreatableTopicResult(name, topic_id, 0, None, TOO_MUCH, count, 1, None)
    configs = [
        CreatableTopicConfigs(entry.name, entry.value, False, SOURCE_DEFAULT if entry.is_default else SOURCE_TOPIC)
        for entry in entries
    ]
    return CreatableTopicResult(name, topic_id, 0, None, 0, count, 1, configs)


def _check_assignments(call: RequestContext, replicas: Sequence[Sequence[int]]) -> tuple[ErrorCode | None, str]:
    """Return (error code, message) for an invalid assignment: each partition must have one replica."""
    known = {node.node_id for node in call.broker.cluster.nodes}
    for brokers in replicas:
        if len(brokers) != 1:
            return ErrorCode.INVALID_REPLICA_ASSIGNMENT, f"{len(brokers)} replicas; a partition has exactly one"
        if brokers[0] not in known:
            return ErrorCode.INVALID_REPLICA_ASSIGNMENT, f"there is no broker {brokers[0]}"
    return None, ""


def delete_topics(call: RequestContext, request: DeleteTopicsRequest) -> DeleteTopicsResponse:
    """Delete topics by name or by id."""
    requested = request.topics
    if call.version < _STATES_FROM:
        requested = [DeleteTopicState(name=name) for name in request.topic_names]
    once = call.distinct(requested, lambda topic: (topic.name, topic.topic_id))
    return DeleteTopicsResponse(responses=[_delete(call, topic) for topic in once])


def _delete(call: RequestContext, requested: DeleteTopicState) -> DeletableTopicResult:
    result = DeletableTopicResult(name=requested.name, topic_id=requested.topic_id)
    name, topic_id = requested.name, None
    by_id = requested.topic_id != ZERO_UUID
    if by_id == (name is not None):
        result.error_code = ErrorCode.INVALID_REQUEST
        result.error_message = "specify either the topic's name or its id"
        return result
    if by_id:
        named = call.topic_by_id(requested.topic_id)
        if named is None or not call.may_see(Thing.TOPIC, named[0]):
            result.error_code = ErrorCode.UNKNOWN_TOPIC_ID
            return result
        name, topic_id = named
    assert name is not None
    if not call.allows_topic(Operation.DELETE, name):
        result.error_code = ErrorCode.TOPIC_AUTHORIZATION_FAILED
        return result
    result.name = name
    if not is_visible(name):
        result.error_code, result.error_message = ErrorCode.INVALID_TOPIC_EXCEPTION, "it is an internal topic"
        return result
    try:
        if not by_id:
            result.topic_id = wire_id(call.broker.store.topic(name).id)
        call.broker.store.delete_topic(name, topic_id)
    except UnknownTopic as error:
        code = ErrorCode.UNKNOWN_TOPIC_ID if by_id else code_of(error)
        result.error_code, result.error_message = code, call.explain_error(error)
    except (SegmentlogError, OSError) as error:
        result.error_code, result.error_message = code_of(error), call.explain_error(error)
    return result


def create_partitions(call: RequestContext, request: CreatePartitionsRequest) -> CreatePartitionsResponse:
    """Add partitions to topics."""
    names = Counter(topic.name for topic in request.topics)
    results = []
    for topic in call.distinct(request.topics, lambda topic: topic.name):
        if names[topic.name] > 1:
            code, message = ErrorCode.INVALID_REQUEST, "the request names it twice"
        elif not call.allows_topic(Operation.ALTER, topic.name):
            code, message = ErrorCode.TOPIC_AUTHORIZATION_FAILED, "not authorized"
        else:
            code, message = _add_partitions(call, topic, validate_only=request.validate_only)
        words = call.text_if_room(message) if message else None
        results.append(CreatePartitionsTopicResult(topic.name, int(code), words))
    return CreatePartitionsResponse(results=results)


def _add_partitions(
    call: RequestContext, requested: CreatePartitionsTopic, *, validate_only: bool
) -> tuple[ErrorCode, str]:
    if not is_visible(requested.name):
        return ErrorCode.INVALID_TOPIC_EXCEPTION, "it is an internal topic"
    try:
        now = call.broker.store.topic(requested.name).partition_count
        if not now < requested.count <= MAX_PARTITIONS:
            return ErrorCode.INVALID_PARTITIONS, f"it has {now} partitions; allowed are {now + 1} to {MAX_PARTITIONS}"
        if requested.assignments is not None:
            if len(requested.assignments) != requested.count - now:
                return ErrorCode.INVALID_REPLICA_ASSIGNMENT, f"{requested.count - now} replica assignments are needed"
            code, message = _check_assignments(call, [item.broker_ids for item in requested.assignments])
            if code:
                return code, message
        if too_many := _too_many(call, (requested.count - now,)):
            return ErrorCode.POLICY_VIOLATION, too_many
        if not validate_only:
            call.broker.store.alter_topic(requested.name, partitions=requested.count)
    except InvalidConfig as error:
        return ErrorCode.INVALID_PARTITIONS, message_of(error)
    except (SegmentlogError, OSError) as error:
        return code_of(error), message_of(error)
    return ErrorCode.NONE, ""
