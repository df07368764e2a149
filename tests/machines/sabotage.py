"""Ways to break a machine, to see whether the check finds them. They are for the server's process, before it forks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from segmentlog.objects.bucket.base import PreconditionFailed
from segmentlog.objects.bucket.local_bucket import LocalBucket
from segmentlog.objects.upload.shipper import Shipper
from segmentlog.server.ack_waiter import AckWaiter


def acknowledge_unshipped() -> None:
    """Acknowledge records with ``--acks-all shipped`` once they are on the local disk."""
    real = AckWaiter.__init__

    def init(self: AckWaiter, *args: Any, **options: Any) -> None:
        real(self, *args, **{**options, "shipped": False})

    AckWaiter.__init__ = init  # type: ignore[method-assign]


def fence_no_owner() -> None:
    """Publish manifests whatever the object store has by now, so that a former owner continues."""
    real = LocalBucket.compare_and_swap

    def swap(self: LocalBucket, key: str, data: Any, tag: str | None) -> str:
        while True:
            try:
                return real(self, key, data, None if tag is None else self.get(key)[1])
            except PreconditionFailed:  # the other machine has published in between
                continue

    LocalBucket.compare_and_swap = swap  # type: ignore[method-assign]
    Shipper._check_owner = lambda self, now_ms: None  # type: ignore[method-assign]
    Shipper._resolve_outcome = lambda self: None  # type: ignore[method-assign]


SABOTAGE: Final[dict[str, Callable[[], None]]] = {
    "acknowledges before it ships": acknowledge_unshipped,
    "does not fence a former owner": fence_no_owner,
}
