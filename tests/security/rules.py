"""Rules for tests: an authorizer by a few lines, and who asks it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from segmentlog.security.acls import Authorizer
from segmentlog.security.principals import Operation, Principal, ResourceType

TOPIC, GROUP, CLUSTER = ResourceType.TOPIC, ResourceType.GROUP, ResourceType.CLUSTER
ANN, BOB = Principal("User", "ann"), Principal("User", "bob")
HOST = "10.0.0.7"


def write_rules(folder: Path, *lines: str, **options: Any) -> Authorizer:
    """An authorizer by lines of a file, which is looked at whenever it is asked."""
    (folder / "acls").write_text("\n".join(lines) + "\n")
    return Authorizer(str(folder / "acls"), look_every_s=0, **options)


def allowed(authorizer: Authorizer, principal: Principal, kind: ResourceType, name: str, host: str = HOST) -> str:
    """The operations that somebody may do, in Kafka's words."""
    return " ".join(
        operation.name.lower()
        for operation in Operation
        if operation is not Operation.ALL and authorizer.allows(principal, host, operation, kind, name)
    )


class Call:
    """What a handler needs of one."""

    def __init__(self, authorizer: Authorizer, principal: Principal = ANN) -> None:
        self.broker = SimpleNamespace(authorizer=authorizer)
        self.principal = principal

    def allows(self, operation: Operation, resource: ResourceType, name: str) -> bool:
        return self.broker.authorizer.allows(self.principal, HOST, operation, resource, name)  # type: ignore[no-any-return]
