"""Options of a producer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict

import msgspec

from segmentlog.arguments import as_bool, as_int
from segmentlog.codecs import Serializer
from segmentlog.errors import InvalidConfig
from segmentlog.policy.partitioner import Partitioner
from segmentlog.tracing import Carrier, Tracing, carrier_of

if TYPE_CHECKING:
    from segmentlog.log.partition import Ack


class ProducerKeywords(TypedDict, total=False):
    """Keyword arguments of `LogStore.producer` except serializers, for type checkers; see `Producer`."""

    linger_ms: float
    batch_size: int
    partitioner: Partitioner | None
    ack: Ack | None
    name: str | None
    enable_idempotence: bool
    transaction_timeout_ms: int
    tracing: Tracing


class ProducerOptions(msgspec.Struct, kw_only=True):
    """Validated options; see `Producer`. The defaults are those of `LogStore.producer`. Raises `InvalidConfig`."""

    linger_ms: float = 5
    batch_size: int = 256 * 1024
    partitioner: Partitioner | None = None
    ack: Ack | None = None
    name: str | None = None
    enable_idempotence: bool = True
    transaction_timeout_ms: int = 60_000
    serializer: Serializer[Any] | None = None
    key_serializer: Serializer[Any] | None = None
    tracing: Tracing = "auto"
    carrier: Carrier | None = None
    """Created from ``tracing``."""

    def __post_init__(self) -> None:
        linger_ms = self.linger_ms
        if isinstance(linger_ms, bool) or not isinstance(linger_ms, int | float) or not 0 <= linger_ms <= 3_600_000:
            raise InvalidConfig("linger_ms", linger_ms, "milliseconds from 0 to 3,600,000")
        self.batch_size = as_int("batch_size", self.batch_size, 1, 1 << 30, expected="bytes from 1 to 1 GiB")
        if not isinstance(self.ack, str | None) or self.ack not in (None, "written", "durable", "shipped"):
            raise InvalidConfig("ack", self.ack, "'written', 'durable' or 'shipped'")
        self.transaction_timeout_ms = as_int("transaction_timeout_ms", self.transaction_timeout_ms, 1, 86_400_000)
        self.enable_idempotence = as_bool("enable_idempotence", self.enable_idempotence)
        if self.partitioner is not None and not callable(getattr(self.partitioner, "partitions", None)):
            raise InvalidConfig("partitioner", self.partitioner, "an object with a method `partitions`, or None")
        self.carrier = carrier_of(self.tracing)
        for name in ("serializer", "key_serializer"):
            serializer = getattr(self, name)
            if serializer is not None and not callable(getattr(serializer, "serialize", None)):
                raise InvalidConfig(name, serializer, "an object with a method `serialize`, or None")
        if self.name is not None and not self.enable_idempotence:
            raise InvalidConfig(
                "enable_idempotence", self.enable_idempotence, "it must be True for a producer with a name"
            )
