"""Rules for tests: an authorizer by a few lines, and who asks it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from segmentlog.security.acls import Authorizer
from segmentlog.security.principals import Operation, Principal, ResourceType
from segmentlog.server import request_context as server_call
from segmentlog.server.server_settings import ServerSettings

TOPIC, GROUP, CLUSTER = ResourceType.TOPIC, ResourceType.GROUP, ResourceType.CLUSTER
ANN, BOB = Principal("User", "ann"), Principal("User", "bob")
HOST = "10.0.0.7"


def write_rules(folder: Path, *lines: str, **options: Any) -> Authorizer:
    """Write the lines into a file, and return an authorizer that reads it at every decision."""
    (folder / "acls").write_text("\n".join(lines) + "\n")
    return Authorizer(str(folder / "acls"), check_interval_s=0, **options)


def allowed(authorizer: Authorizer, principal: Principal, kind: ResourceType, name: str, host: str = HOST) -> str:
    """Return the operations that a principal may perform, under Kafka's names."""
    return " ".join(
        operation.name.lower()
        for operation in Operation
        if operation is not Operation.ALL and authorizer.allows(principal, host, operation, kind, name)
    )


def Call(authorizer: Authorizer, principal: Principal = ANN) -> server_call.RequestContext:
    """Return a call of this principal, to a broker with rules and limits."""
    broker: Any = SimpleNamespace(authorizer=authorizer, settings=ServerSettings())
    return server_call.RequestContext(
        broker=broker, api_key=29, version=3, client_id="", client_host=HOST, principal=principal
    )  # fmt: skip
