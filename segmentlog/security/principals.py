"""Principals, resource types and operations of access control, with Kafka's numbers."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple


class Principal(NamedTuple):
    """An authenticated identity: a type (``User``) and a name."""

    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind}:{self.name}"


class ResourceType(IntEnum):
    """Type of the resource that an access rule names."""

    TOPIC = 2
    GROUP = 3
    CLUSTER = 4
    TRANSACTIONAL_ID = 5


class Operation(IntEnum):
    """Operation that an access rule allows or denies."""

    ALL = 2
    READ = 3
    WRITE = 4
    CREATE = 5
    DELETE = 6
    ALTER = 7
    DESCRIBE = 8
    CLUSTER_ACTION = 9
    DESCRIBE_CONFIGS = 10
    ALTER_CONFIGS = 11
    IDEMPOTENT_WRITE = 12


CLUSTER_NAME = "kafka-cluster"
"""Name of the only resource of type `ResourceType.CLUSTER`."""
ANONYMOUS = Principal("User", "ANONYMOUS")
"""Principal of a client on a server that requires no authentication."""
