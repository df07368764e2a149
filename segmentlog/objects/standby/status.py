"""The file ``@standby-status``: what a standby knows, for the workers of its server and for people.

The content is not durable, and only an aid: roles follow from the folder and the manifest (`roles`).
"""

from __future__ import annotations

import contextlib
from typing import Final

import msgspec

from segmentlog.format.file_names import STANDBY_STATUS_FILE
from segmentlog.format.server_file import ServerNode
from segmentlog.storage.file_operations import read_file, replace_file
from segmentlog.storage.fs import FileSystem

STALE_S: Final = 15.0
"""A status file that is older than this was left by a process that has ended, or hangs."""

FORMER_NODES_MS: Final = 5 * 60_000
"""For this time after a takeover, clients get the addresses of the former owner as brokers without partitions: as long
as clients use metadata by default (``metadata.max.age.ms``).

librdkafka removes a broker that is missing in the metadata at once, while it moves partitions to their new leader. In
that moment a consumer may hang for ever (https://github.com/confluentinc/librdkafka/issues/5476).
"""


class StandbyStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Role of a machine in the shipped store, and its knowledge of the owner. Times are wall clock, in milliseconds.

    role            "waiting", "standby", "taking over" or "owner"; see `roles.Role`
    reason          why it does not take over now, or why it did
    is_blocked      whether this reason makes a takeover impossible
    owner           host and epoch of the owner; empty if no store is shipped
    answered_owner  id of the owner whose server answered this machine last, or that this machine was
    nodes           addresses of the owner's workers; empty if no server serves the store
    former_nodes    on the owner: addresses of the workers of the owner before, if this machine followed it
    owner_since_ms  when the owner became the owner
    shipped_ms      the owner's clock when it put the manifest that the replica has
    refreshed_ms    when the replica was last up to date with the manifest
    lag_records     offsets in the object store that the replica does not have yet
    error           why the last cycle failed; empty if it did not
    written_ms      when this status was written
    """

    url: str
    role: str
    reason: str = ""
    is_blocked: bool = False
    store_id: str = ""
    owner: str = ""
    owner_epoch: int = 0
    answered_owner: str = ""
    nodes: tuple[ServerNode, ...] = ()
    former_nodes: tuple[ServerNode, ...] = ()
    owner_since_ms: int = 0
    shipped_ms: int = 0
    refreshed_ms: int = 0
    lag_records: int = 0
    error: str = ""
    written_ms: int = 0

    def is_takeover_recent(self, now_ms: int) -> bool:
        """Return whether clients may still look for the former owner (`FORMER_NODES_MS`)."""
        return self.owner_epoch > 1 and 0 <= now_ms - self.owner_since_ms < FORMER_NODES_MS


_decoder = msgspec.json.Decoder(StandbyStatus)


def write_standby_status(fs: FileSystem, path: str, status: StandbyStatus) -> None:
    """Write the status of the standby in the folder ``path``. A full disk is ignored: a later cycle writes it."""
    with contextlib.suppress(OSError):
        data = msgspec.json.format(msgspec.json.encode(status), indent=2) + b"\n"
        replace_file(fs, f"{path}/{STANDBY_STATUS_FILE}", data, sync_folder=False)


def read_standby_status(fs: FileSystem, path: str) -> StandbyStatus | None:
    """Return the status that the standby in the folder ``path`` wrote last; None if there is none, or it is damaged."""
    try:
        return _decoder.decode(read_file(fs, f"{path}/{STANDBY_STATUS_FILE}"))
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
