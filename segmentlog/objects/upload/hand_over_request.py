"""Ask the process that ships a store to hand it over, and wait for the result.

The request is the file ``@hand-over``. The shipper finds it in its next cycle (`hand_over_steps`) and writes each stage
into it. If no process ships the store, this process does it meanwhile.
"""

from __future__ import annotations

import contextlib
import time
from typing import Final

import msgspec
from msgspec.structs import replace

from segmentlog.errors import ObjectStoreError, SegmentlogError, ShippingRefused, StoreFenced
from segmentlog.format.hand_over import HandOver
from segmentlog.objects.manifest.load import read_manifest
from segmentlog.objects.ownership.binding import Binding, read_binding
from segmentlog.objects.upload.shipper import Shipper
from segmentlog.storage.hand_over_file import change_hand_over, read_hand_over
from segmentlog.topics.topic_registry import Topics

HAND_OVER_PAUSE_S: Final = 0.05
"""Time between cycles during a hand-over: clients wait for its end."""
_LATE_MS: Final = 5_000
"""The shipper may be this late, before the wait for it ends."""


class HandedOver(msgspec.Struct, frozen=True):
    """Result of a hand-over.

    owner       the machine that owns the store now
    elapsed_ms  time from the request until this store was fenced
    """

    url: str
    owner: str
    elapsed_ms: int


class HandOverRequest:
    """One request to hand a store over. ``shipper`` ships the store to the URL that it is bound to."""

    def __init__(self, topics: Topics, shipper: Shipper) -> None:
        self._topics = topics
        self._shipper = shipper
        self._url = shipper.bucket.url
        self._owner_id = ""
        """Id of the owner that hands the store over."""
        self._failure = ""
        """Why the last cycle of this process failed."""

    def run(self, wait_ms: int, ship_ms: int) -> HandedOver:
        """Request the hand-over, and wait until the store is fenced. Raise as `ShippingService.hand_over` does."""
        began_ms = self._topics.clock.monotonic_ms()
        binding = self._require_binding()
        self._owner_id = binding.owner_id
        found = read_hand_over(self._topics.fs, self._topics.path)
        if found is None or not found.is_active or found.owner_id != binding.owner_id:
            until_ms = self._topics.clock.now_ms() + ship_ms
            request = HandOver(stage="requested", owner_id=binding.owner_id, wait_ms=wait_ms, until_ms=until_ms)
            change_hand_over(self._topics.fs, self._topics.path, found, request)
        self._topics.ship_signals.request_cycle()
        try:
            while not (owner := self._poll(began_ms, ship_ms, wait_ms)):
                time.sleep(HAND_OVER_PAUSE_S)
        except (ShippingRefused, StoreFenced):
            raise
        except BaseException:
            self._cancel()
            raise
        return HandedOver(self._url, owner, self._topics.clock.monotonic_ms() - began_ms)

    def _require_binding(self) -> Binding:
        binding = read_binding(self._topics.fs, self._topics.path)
        if binding is None or not binding.begun:
            raise ShippingRefused(self._url, f"{self._topics.path} is not shipped to this URL yet")
        if binding.fenced:
            raise StoreFenced(f"store {self._topics.path}", binding.fenced)
        return binding

    def _poll(self, began_ms: int, ship_ms: int, wait_ms: int) -> str:
        """Run a cycle, unless another process ships the store. Return the new owner; "" while there is none."""
        with contextlib.suppress(StoreFenced):  # the binding names the owner
            try:
                self._shipper.run_cycle()
                self._failure = ""
            except (ObjectStoreError, OSError) as error:
                self._failure = str(error)
        binding = read_binding(self._topics.fs, self._topics.path)
        if binding is None:
            return self._read_new_owner()
        if binding.fenced:
            return binding.fenced
        hand_over = read_hand_over(self._topics.fs, self._topics.path)
        if hand_over is None and read_binding(self._topics.fs, self._topics.path) != binding:
            return ""  # another process has fenced the store in between: the next cycle finds the owner
        if hand_over is None or not hand_over.is_active:
            why = "the request was removed" if hand_over is None else hand_over.reason
            change_hand_over(self._topics.fs, self._topics.path, hand_over, None)
            raise ShippingRefused(
                self._url, f"the store was not handed over: {why}. This machine is still its owner; appends continue"
            )  # fmt: skip
        waited_ms = self._topics.clock.monotonic_ms() - began_ms
        is_late = hand_over.stage == "requested" and waited_ms > ship_ms + _LATE_MS
        if is_late and change_hand_over(self._topics.fs, self._topics.path, hand_over, None):
            why = self._failure or "the process that ships the store does not answer; is its version older?"
            raise ShippingRefused(self._url, f"the store was not handed over, and appends continue: {why}")
        if waited_ms > ship_ms + 2 * wait_ms + _LATE_MS:
            why = self._failure or "the process that ships the store does not answer"
            raise ShippingRefused(
                self._url, f"whether a machine takes the store over is unknown: {why}. Appends stay stopped"
                " on this machine until a process that ships the store can read the manifest"
            )  # fmt: skip
        return ""

    def _read_new_owner(self) -> str:
        """Return the owner in the manifest, after a standby on this machine has set the store aside."""
        found = read_manifest(self._shipper.bucket)
        if found is None or found[0].ended or found[0].owner.id == self._owner_id:
            raise ShippingRefused(self._url, "shipping was stopped meanwhile ('segmentlog ship --stop')")
        return str(found[0].owner)

    def _cancel(self) -> None:
        """Give the hand-over up, after an interrupt of this process: the shipper takes the store back at once."""
        fs, path = self._topics.fs, self._topics.path
        while (hand_over := read_hand_over(fs, path)) is not None and hand_over.is_active:
            stopped = replace(hand_over, until_ms=0, reason="it was interrupted")
            if change_hand_over(fs, path, hand_over, stopped):
                break
        self._topics.ship_signals.request_cycle()
        with contextlib.suppress(SegmentlogError, OSError):
            self._shipper.run_cycle()
