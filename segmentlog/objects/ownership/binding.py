"""The file ``@ship`` of a store: the URL that it is shipped to, and the owner id that the manifest has for it.

    {"url": "s3://bucket/path", "owner_id": "...", "owner_epoch": 3, "topics": [], "folder_id": [2049, 131], ...}

The file contains no secrets. It is valid only in the folder where it was written: a copy of a store is not the owner.
"""

from __future__ import annotations

import contextlib
from typing import Final

import msgspec

from segmentlog.errors import ShippingRefused
from segmentlog.format.file_names import SHIP_FILE, UPLOADS_FILE
from segmentlog.storage.file_operations import read_file, replace_file
from segmentlog.storage.fs import FileSystem

FORMAT: Final = 1


class Binding(msgspec.Struct, frozen=True):
    """The URL that a store is shipped to, and the identity of its owner.

    owner_id, owner_epoch   as in the manifest
    folder_id               device and inode of the store's folder when the file was written
    topics                  names and patterns of the shipped topics; empty for all
    begun                   whether a manifest was published
    fenced                  the machine that has taken the store over; empty if there is none
    """

    url: str
    owner_id: str
    owner_epoch: int
    folder_id: tuple[int, int]
    topics: tuple[str, ...] = ()
    begun: bool = False
    fenced: str = ""
    format: int = FORMAT


_decoder = msgspec.json.Decoder(Binding)


def read_binding(fs: FileSystem, path: str) -> Binding | None:
    """Return the binding of the store at ``path``; None if there is none. Raise `ShippingRefused` if it is damaged."""
    try:
        return _decoder.decode(read_file(fs, f"{path}/{SHIP_FILE}"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        why = f"{SHIP_FILE} is damaged ({error}); remove it, then take the store over again ('segmentlog takeover')"
        raise ShippingRefused(path, why) from None


def new_owner_of(fs: FileSystem, path: str) -> str:
    """Return the machine that took over the store at ``path``; an empty text if no takeover is recorded in its binding.

    The shipper of the old machine records the new owner when it finds it in the manifest. Return an empty text if only
    some topics are shipped, because the others were not taken over. Do the same if the binding cannot be read.
    """
    try:
        binding = read_binding(fs, path)
    except (ShippingRefused, OSError):
        return ""
    return "" if binding is None or binding.topics else binding.fenced


def is_bound(fs: FileSystem, path: str) -> bool:
    """Return whether the store at ``path`` is shipped to any URL."""
    return fs.exists(f"{path}/{SHIP_FILE}")


def write_binding(fs: FileSystem, path: str, binding: Binding) -> None:
    """Write the binding durably. Raise `DiskFull`, OSError."""
    replace_file(fs, f"{path}/{SHIP_FILE}", msgspec.json.format(msgspec.json.encode(binding), indent=2) + b"\n")


def remove_binding(fs: FileSystem, path: str) -> None:
    """Remove the binding durably, if there is one."""
    with contextlib.suppress(FileNotFoundError):
        fs.unlink(f"{path}/{SHIP_FILE}")
        fs.sync_folder(path)


def folder_id(fs: FileSystem, path: str) -> tuple[int, int]:
    """Return (device, inode) of a store's folder. Every copy of the folder has another pair."""
    found = fs.stat(path)
    return found.st_dev, found.st_ino


def remove_upload_journal(fs: FileSystem, folder: str) -> None:
    """Delete the journal of unfinished multi-part uploads, so that no process resumes them."""
    with contextlib.suppress(FileNotFoundError):
        fs.unlink(f"{folder}/{UPLOADS_FILE}")
