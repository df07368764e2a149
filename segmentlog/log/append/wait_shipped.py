"""Wait until the shipper has uploaded records to the object store, or has granted more offsets."""

from __future__ import annotations

import time
from typing import Final

from segmentlog.errors import ShipUnconfirmed, StoreFenced
from segmentlog.log.handle import Handle
from segmentlog.storage.grant_file import read_grant
from segmentlog.storage.state_page import CONFIG_WORD, SHIPPED_WORD

WAIT_S: Final = 120.0
"""The default delivery time-out of Kafka's clients (delivery.timeout.ms)."""
GRANT_WAIT_S: Final = 10.0
_POLL_S: Final = 0.5
"""How often to check that a process ships the store at all."""


def wait_shipped(handle: Handle, base_offset: int, next_offset: int) -> None:
    """Return once everything below ``next_offset`` is in the object store. It must already be on the local disk.

    Raises `ShipUnconfirmed` if no process ships the store, or if the upload takes longer than `WAIT_S`. Raises
    `StoreFenced`.
    """
    signals = handle.ship_signals
    words = handle.page.words
    if signals is None:
        raise ShipUnconfirmed(handle.log_name, base_offset, next_offset, "the partition does not belong to a store")
    ends_s = time.monotonic() + WAIT_S
    check_s = 0.0
    while handle.page.words[SHIPPED_WORD] < next_offset:
        now_s = time.monotonic()
        if words[CONFIG_WORD] != handle.config_version:
            handle.refresh_config()
            if handle.fenced:
                raise StoreFenced(handle.log_name, handle.fenced)
        if now_s >= check_s:
            check_s = now_s + _POLL_S
            signals.request_cycle()
            if not signals.is_shipping:
                raise ShipUnconfirmed(handle.log_name, base_offset, next_offset, "no process ships this store")
        if now_s >= ends_s:
            why = signals.error or f"the shipper did not upload them within {WAIT_S:.0f} s"
            raise ShipUnconfirmed(handle.log_name, base_offset, next_offset, why)
        signals.wait(min(_POLL_S, ends_s - now_s))


def wait_granted(handle: Handle, ceiling: int, *, at_once: bool) -> bool:
    """Request offsets from ``ceiling`` on, and wait for the grant. Return whether they are granted.

    Also return True if the next attempt will raise the reason why no offset is granted.
    Return False if no process ships the store, or if the grant takes too long. With ``at_once`` do not wait: request
    the offsets and return False.
    """
    signals = handle.ship_signals
    if signals is None or not signals.is_shipping:
        return _is_fenced(handle)
    ends_s = time.monotonic() + (0.0 if at_once else GRANT_WAIT_S)
    signals.request_cycle()
    while not signals.error and time.monotonic() < ends_s:
        granted = read_grant(handle.fs, handle.folder)
        if granted is None or granted.end_offset > ceiling or granted.fenced:
            return True
        if signals.are_appends_stopped(handle.topic, has_grant=True):
            return True  # the next attempt raises
        if signals.read_new_owner(handle.topic, has_grant=True):
            return True
        signals.wait(_POLL_S)
    return _is_fenced(handle)


def _is_fenced(handle: Handle) -> bool:
    """Return whether another machine owns the store: the shipper fails when it finds that out. The next attempt raises
    `StoreFenced`.
    """
    granted = read_grant(handle.fs, handle.folder)
    return granted is not None and bool(granted.fenced)
