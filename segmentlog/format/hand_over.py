"""The file ``@hand-over`` of a store: the hand-over to another machine that is requested or under way.

    {"stage": "stopped", "owner_id": "...", "topics": [], "wait_ms": 10000, "until_ms": 1785456010000, "reason": ""}

The stages:

- ``requested``: a process asks the shipper to hand the store over. Appends continue.
- ``stopped``: no process may append to the shipped topics. The shipper ships the rest.
- ``published``: the shipper has put the manifest that hands the store over, or puts it now.
- ``failed``: the hand-over was given up for ``reason``, and the store is as before.

The file stops the appends itself: no process appends while it exists in the second or third stage.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

Stage = Literal["requested", "stopped", "published", "failed"]

_TIME_MAX: Final = 2**63 - 1


class HandOver(msgspec.Struct, frozen=True, kw_only=True):
    """The content of the file.

    ``owner_id`` is this machine as an owner in the manifest. ``topics`` are names and patterns of the shipped topics;
    empty for all. Each of the stages "stopped" and "published" lasts ``wait_ms`` at most. At ``until_ms`` (wall clock)
    the hand-over is given up if the stage has not ended.
    """

    stage: Stage
    owner_id: str = ""
    topics: tuple[str, ...] = ()
    wait_ms: int = 0
    until_ms: int = 0
    reason: str = ""

    @property
    def is_stopping(self) -> bool:
        """Whether appends are stopped."""
        return self.stage in ("stopped", "published")

    @property
    def is_active(self) -> bool:
        """Whether the hand-over is requested or under way."""
        return self.stage != "failed"


DAMAGED: Final = HandOver(stage="published", reason="the file of the hand-over is damaged")
"""Stands for a damaged file: appends are stopped until the shipper has taken the store back."""

_decoder = msgspec.json.Decoder(HandOver)


def encode_hand_over(hand_over: HandOver) -> bytes:
    """Return the bytes of the file."""
    return msgspec.json.format(msgspec.json.encode(hand_over), indent=2) + b"\n"


def decode_hand_over(data: bytes) -> HandOver:
    """Decode the file; return `DAMAGED` for a damaged one."""
    try:
        found = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return DAMAGED
    return found if 0 <= found.until_ms <= _TIME_MAX and 0 <= found.wait_ms <= _TIME_MAX else DAMAGED
