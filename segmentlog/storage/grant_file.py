"""The file with the offset grant of a partition; see `format.grant`."""

from __future__ import annotations

import contextlib
import logging

from segmentlog.format.file_names import GRANT_FILE
from segmentlog.format.grant import MalformedGrant, OffsetGrant, decode_grant, encode_grant
from segmentlog.storage.file_operations import read_file, replace_file
from segmentlog.storage.fs import FileSystem

logger = logging.getLogger("segmentlog")


def read_grant(fs: FileSystem, folder: str) -> OffsetGrant | None:
    """Return the offset grant of the partition in ``folder``; None if the partition is not shipped and needs no grant.

    If the file is damaged, log a warning and return a grant of no offsets. Raise OSError for a file that cannot be
    read.
    """
    path = f"{folder}/{GRANT_FILE}"
    try:
        return decode_grant(read_file(fs, path))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except MalformedGrant as error:
        logger.warning("%s: damaged (%s): no new offsets can be assigned until the store is shipped again", path, error)
        return OffsetGrant(0)


def write_grant(fs: FileSystem, folder: str, grant: OffsetGrant) -> None:
    """Write the grant durably. Raise `DiskFull`, OSError; the previous grant is then still valid."""
    replace_file(fs, f"{folder}/{GRANT_FILE}", encode_grant(grant))


def remove_grant(fs: FileSystem, folder: str) -> None:
    """Remove the grant durably, because the partition is no longer shipped. Raise OSError."""
    with contextlib.suppress(FileNotFoundError):
        fs.unlink(f"{folder}/{GRANT_FILE}")
        fs.sync_folder(folder)
