"""confluent-kafka on a machine where Java uses the cores: a member that is silent for a second stays a member."""

from __future__ import annotations

from typing import Any

from confluent_kafka import Consumer
from server.clients.confluent_driver import ConfluentDriver


class PatientDriver(ConfluentDriver):
    """Gives its members a long session, because they leave by a request and need not be missed."""

    def _consumer(self, group: str, **settings: Any) -> Consumer:
        return super()._consumer(group, **{"session.timeout.ms": 30_000, **settings})
