"""The file that says how far a partition may hand out offsets; see `format.grant`."""

from __future__ import annotations

import contextlib
import logging

from segmentlog.format.file_names import GRANT_FILE
from segmentlog.format.grant import Grant, MalformedGrant, decode_grant, encode_grant
from segmentlog.storage.file_operations import read_file, replace_file
from segmentlog.storage.fs import FileSystem

logger = logging.getLogger("segmentlog")


def read_grant(fs: FileSystem, folder: str) -> Grant | None:
    """What is granted to the partition in ``folder``; None for one that is not shipped: it needs no grant.

    Raises OSError for a file that cannot be read: nobody knows then what is granted.
    """
    path = f"{folder}/{GRANT_FILE}"
    try:
        return decode_grant(read_file(fs, path))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except MalformedGrant as error:
        logger.warning("%s: damaged (%s): nothing is granted until the store is shipped again", path, error)
        return Grant(0)


def write_grant(fs: FileSystem, folder: str, grant: Grant) -> None:
    """Durable when it returns. Raises `DiskFull`, OSError; the old one counts then."""
    replace_file(fs, f"{folder}/{GRANT_FILE}", encode_grant(grant))


def remove_grant(fs: FileSystem, folder: str) -> None:
    """The partition needs no grant any more. Durable when it returns. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        fs.unlink(f"{folder}/{GRANT_FILE}")
        fs.sync_folder(folder)
