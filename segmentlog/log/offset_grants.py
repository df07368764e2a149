"""What a partition may hand out of its offsets while the store is shipped: no more than the object store knows of.

    limit     from now on no offset beyond a first window, or beyond what the checkpoint has reserved already
    grant     the object store promises a higher ceiling: so much may be handed out
    fence     the log belongs to another machine: nothing is appended here any more
    release   shipping ended for good

The limit comes before the first promise, and each grant after its promise: at no time has anybody an offset that the
object store does not count as used. Who takes the log over goes on behind those.
"""

from __future__ import annotations

from msgspec.structs import replace

from segmentlog.config import OFFSET_CEILING_STEP
from segmentlog.format.grant import Grant
from segmentlog.log.handle import Handle
from segmentlog.storage.grant_file import read_grant, remove_grant, write_grant


def limit(handle: Handle) -> int:
    """Have the partition ask for grants from now on; the ceiling that it has. Idempotent.

    Raises `StoreFenced`, `DiskFull`, and what keeps an append out.
    """
    with handle.translating_errors("nothing was changed"), handle.append_locked():
        handle.check_appendable()
        granted = read_grant(handle.fs, handle.folder)
        log = handle.page.log.read()
        if granted is None:
            granted = Grant(max(log.offset_ceiling, log.log_end_offset + OFFSET_CEILING_STEP))
            write_grant(handle.fs, handle.folder, granted)
        elif granted.ceiling < log.offset_ceiling:  # a damaged file, or a recovery
            granted = Grant(log.offset_ceiling)
            write_grant(handle.fs, handle.folder, granted)
        return granted.ceiling


def grant(handle: Handle, ceiling: int) -> None:
    """Offsets below ``ceiling`` may be handed out: it was promised. One that is lower than before changes nothing."""
    with handle.translating_errors("nothing was changed"), handle.append_locked():
        granted = read_grant(handle.fs, handle.folder)
        if granted is not None and granted.ceiling < ceiling and not granted.fenced:
            write_grant(handle.fs, handle.folder, replace(granted, ceiling=ceiling))


def fence(handle: Handle, owner: str) -> None:
    """Let nobody append here any more, in whatever process, because ``owner`` does elsewhere."""
    with handle.translating_errors("nothing was changed"), handle.append_locked():
        granted = read_grant(handle.fs, handle.folder) or Grant(0)
        if granted.fenced != owner:
            write_grant(handle.fs, handle.folder, replace(granted, fenced=owner))
        handle.ledger.count_config_change()


def release(handle: Handle) -> None:
    """The partition needs no grants, and is not fenced, any more."""
    with handle.translating_errors("nothing was changed"), handle.append_locked():
        remove_grant(handle.fs, handle.folder)
        handle.ledger.count_config_change()
