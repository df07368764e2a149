"""That there is a topic or a group is nobody's affair who may not see it.

Every handler asks in this order: may he, and only then is it there. Who may not is told the same of what there is and
of what there is not; lists leave it out; and what is asked for by id is unknown to him.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from segmentlog.server.codec.errors import ErrorCode
from segmentlog.server.security.principals import CLUSTER_NAME, Operation, ResourceType


class Asking(Protocol):
    """Who wants something: a `Call`."""

    def allows(self, operation: Operation, resource: ResourceType, name: str, /) -> bool:
        """Whether he may do that to the resource of this name."""


def visible_topics(asking: Asking, names: Iterable[str]) -> list[str]:
    """Those of the topics that somebody may know of."""
    return [name for name in names if asking.allows(Operation.DESCRIBE, ResourceType.TOPIC, name)]


def visible_groups(asking: Asking, names: Iterable[str]) -> list[str]:
    """Those of the groups that somebody may know of: all, for who may describe the cluster, as in Kafka."""
    if asking.allows(Operation.DESCRIBE, ResourceType.CLUSTER, CLUSTER_NAME):
        return list(names)
    return [name for name in names if asking.allows(Operation.DESCRIBE, ResourceType.GROUP, name)]


def topic_refusal(asking: Asking, operation: Operation, name: str) -> ErrorCode:
    """What somebody is told who asks for a topic by name, whether or not there is one; NONE if he may."""
    is_allowed = asking.allows(operation, ResourceType.TOPIC, name)
    return ErrorCode.NONE if is_allowed else ErrorCode.TOPIC_AUTHORIZATION_FAILED


def topic_id_refusal(asking: Asking, operation: Operation, name: str | None) -> ErrorCode:
    """The same of a topic that was asked for by id; ``name`` is None when there is none with this id.

    Who may describe it, but not do that, is told so; an id that he may not know of is unknown.
    """
    if name is None or not asking.allows(Operation.DESCRIBE, ResourceType.TOPIC, name):
        return ErrorCode.UNKNOWN_TOPIC_ID
    return topic_refusal(asking, operation, name)


def creation_refusal(asking: Asking, name: str) -> ErrorCode:
    """What somebody is told who wants a topic made: by a rule for the topic, or for the cluster."""
    if asking.allows(Operation.CREATE, ResourceType.CLUSTER, CLUSTER_NAME):
        return ErrorCode.NONE
    return topic_refusal(asking, Operation.CREATE, name)


def group_refusal(asking: Asking, operation: Operation, name: str) -> ErrorCode:
    """What somebody is told who asks for a group, whether or not there is one; NONE if he may."""
    is_allowed = asking.allows(operation, ResourceType.GROUP, name)
    return ErrorCode.NONE if is_allowed else ErrorCode.GROUP_AUTHORIZATION_FAILED
