"""Offset grants: the end of the offsets that a shipped partition may assign.

    start_limiting   require grants from now on; the first one covers what the checkpoint has reserved, and some more
    extend           raise the grant, after the object store contains the higher number
    fence            stop appends: the log belongs to another machine
    remove           shipping has ended: no grant is needed any more

The limit starts before the first manifest, and every extension follows its manifest. So every assigned offset is below
the number in the object store, and a takeover, which resumes the log at that number, assigns none of them again.
"""

from __future__ import annotations

from msgspec.structs import replace

from segmentlog.config import OFFSET_CEILING_STEP
from segmentlog.format.grant import OffsetGrant
from segmentlog.log.handle import Handle
from segmentlog.storage.grant_file import remove_grant, write_grant


def start_limiting(handle: Handle) -> int:
    """Limit the partition to granted offsets from now on. Return the offset at which its grant ends. Idempotent.

    Raise `StoreFenced`, `DiskFull`, and any error that prevents an append.
    """
    with handle.translating_errors("nothing was changed"), handle.append_locked():
        handle.check_appendable(even_stopped=True)
        granted = handle.read_grant()
        log = handle.page.log.read()
        if granted is None:
            granted = OffsetGrant(max(log.offset_ceiling, log.log_end_offset + OFFSET_CEILING_STEP))
            write_grant(handle.fs, handle.folder, granted)
        elif granted.end_offset < log.offset_ceiling:  # the grant file was damaged, or a recovery reserved more
            granted = OffsetGrant(log.offset_ceiling)
            write_grant(handle.fs, handle.folder, granted)
        return granted.end_offset


def extend(handle: Handle, end_offset: int) -> None:
    """Allow offsets below ``end_offset``, which the manifest already contains. A lower number changes nothing."""
    with handle.translating_errors("nothing was changed"), handle.append_locked():
        granted = handle.read_grant()
        if granted is not None and granted.end_offset < end_offset and not granted.fenced:
            write_grant(handle.fs, handle.folder, replace(granted, end_offset=end_offset))


def fence(handle: Handle, owner: str) -> None:
    """Stop appends in every process, because ``owner`` continues the log on another machine."""
    with handle.translating_errors("nothing was changed"), handle.append_locked():
        granted = handle.read_grant() or OffsetGrant(0)
        if granted.fenced != owner:
            write_grant(handle.fs, handle.folder, replace(granted, fenced=owner))
        handle.ledger.count_config_change()


def remove(handle: Handle) -> None:
    """Remove the grant and the fence, so that the partition may assign offsets without limit."""
    with handle.translating_errors("nothing was changed"), handle.append_locked():
        remove_grant(handle.fs, handle.folder)
        handle.ledger.count_config_change()
