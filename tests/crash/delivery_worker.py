"""The users of a store that `test_delivery` kills and stops, and the precautions that some are to go without."""

from __future__ import annotations

from typing import Any

from delivery_jobs import LibraryProcess
from delivery_process import serve

from segmentlog.log.producer_state import ProducerStates
from segmentlog.log.transaction_index import AbortedTransactions
from segmentlog.transactions.name_locks import NameLocks
from segmentlog.transactions.producer_lease import ProducerLease


def _show_aborted() -> None:
    AbortedTransactions.read_ranges = lambda self: {}  # type: ignore[method-assign]


def _fence_nobody() -> None:
    ProducerLease.check = lambda self: None  # type: ignore[method-assign]
    ProducerStates.admit = lambda self, stamp, count, now_ms: None  # type: ignore[method-assign]


def _call_everybody_dead() -> None:
    NameLocks.is_alive = lambda self, name, state: False  # type: ignore[method-assign]


_BROKEN = {"aborts": _show_aborted, "fences": _fence_nobody, "leases": _call_everybody_dead}
"""Precautions that a process is to go without, to see whether that is found out."""


def make(order: dict[str, Any]) -> LibraryProcess:
    """Create the process that was ordered."""
    for broken in order.get("broken", ()):
        _BROKEN[broken]()
    return LibraryProcess(order)


if __name__ == "__main__":
    serve(make)
