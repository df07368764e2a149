"""The rights that a client needs to see topics, groups and other things, in the Kafka server, REST and the console.

| thing | right | additionally for internal topics |
|---|---|---|
| a topic: name, partitions, offsets, sizes | DESCRIBE on the topic | DESCRIBE on the cluster |
| the records of a topic | READ on the topic | ALTER on the cluster |
| the configuration of a topic | DESCRIBE_CONFIGS on the topic | DESCRIBE on the cluster |
| a group: name, members, committed offsets | DESCRIBE on the group | |
| the configuration of a group | DESCRIBE_CONFIGS on the group | |
| a transactional id, or the name of a producer of the library | DESCRIBE on the transactional id | |
| schemas, and values decoded with them | READ on the topic ``_schemas`` | |
| the cluster: health, where the store is, rules | DESCRIBE on the cluster | |

The records of internal topics contain the names of all groups, transactional ids and topics. So they require ALTER on
the cluster, the right to change the rules: with it a principal can allow itself everything anyway.
"""

from __future__ import annotations

from enum import IntEnum, auto
from typing import Final, NamedTuple

from segmentlog.format.file_names import INTERNAL_TOPICS, SCHEMAS_TOPIC
from segmentlog.security.acls import Authorizer
from segmentlog.security.principals import CLUSTER_NAME, Operation, Principal, ResourceType


class Thing(IntEnum):
    """Kind of thing that requires a right to be seen."""

    TOPIC = auto()
    RECORDS = auto()
    TOPIC_CONFIG = auto()
    GROUP = auto()
    GROUP_CONFIG = auto()
    TRANSACTIONAL_ID = auto()
    SCHEMAS = auto()
    CLUSTER = auto()


_RIGHTS: Final = {
    Thing.TOPIC: (Operation.DESCRIBE, ResourceType.TOPIC),
    Thing.RECORDS: (Operation.READ, ResourceType.TOPIC),
    Thing.TOPIC_CONFIG: (Operation.DESCRIBE_CONFIGS, ResourceType.TOPIC),
    Thing.GROUP: (Operation.DESCRIBE, ResourceType.GROUP),
    Thing.GROUP_CONFIG: (Operation.DESCRIBE_CONFIGS, ResourceType.GROUP),
    Thing.TRANSACTIONAL_ID: (Operation.DESCRIBE, ResourceType.TRANSACTIONAL_ID),
    Thing.SCHEMAS: (Operation.READ, ResourceType.TOPIC),
    Thing.CLUSTER: (Operation.DESCRIBE, ResourceType.CLUSTER),
}
_FIGURES: Final = (Operation.DESCRIBE, Operation.DESCRIBE_CONFIGS)
"""Operations that show names, offsets, sizes or configuration, but no records."""
_ONLY: Final = {Thing.SCHEMAS: SCHEMAS_TOPIC, Thing.CLUSTER: CLUSTER_NAME}
"""Resource name of each kind of thing of which a store has only one."""


class Viewer(NamedTuple):
    """A principal at an address, with the rules that apply to it. Thread-safe."""

    authorizer: Authorizer
    principal: Principal
    host: str

    def may_see(self, thing: Thing, name: str = "") -> bool:
        """Return whether the principal may see the named thing; schemas and the cluster need no name."""
        operation, resource = _RIGHTS[thing]
        return self.allows(operation, resource, _ONLY.get(thing, name))

    def allows(self, operation: Operation, resource: ResourceType, name: str = CLUSTER_NAME) -> bool:
        """Return whether the principal may perform the operation on the resource.

        An internal topic additionally requires a right on the cluster; see the table above.
        """
        if resource is ResourceType.TOPIC and name in INTERNAL_TOPICS:
            required = Operation.DESCRIBE if operation in _FIGURES else Operation.ALTER
            if not self.authorizer.allows(self.principal, self.host, required, ResourceType.CLUSTER, CLUSTER_NAME):
                return False
        return self.authorizer.allows(self.principal, self.host, operation, resource, name)
