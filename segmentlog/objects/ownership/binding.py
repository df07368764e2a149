"""The file ``@ship`` of a store: where it is shipped to, and as whom.

    {"url": "s3://bucket/path", "owner_id": "...", "owner_epoch": 3, "topics": [], "folder_id": [2049, 131], ...}

It holds no secret. It is believed in the folder that it was written in alone: a copy of a store is not the owner.
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
    """Where a store is shipped to.

    ``owner_id`` and ``owner_epoch`` as in the manifest; ``topics`` names and patterns, none for all; ``folder_id``
    device and inode of the store's folder when it was written; ``begun`` whether a manifest was put; ``fenced`` who has
    taken it over since.
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
    """Where the store at ``path`` is shipped to; None when it is not. Raises `ShippingRefused` for a damaged file."""
    try:
        return _decoder.decode(read_file(fs, f"{path}/{SHIP_FILE}"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        why = f"{SHIP_FILE} is damaged ({error}); remove it, and take the store over anew ('segmentlog takeover')"
        raise ShippingRefused(path, why) from None


def new_owner_of(fs: FileSystem, path: str) -> str:
    """Return the machine that took over all topics of the store at ``path``; empty where no machine is known to have.

    The shipper of the old machine writes it when it finds the new owner in the manifest. Also empty where only some
    topics are shipped, or the file is damaged or cannot be read.
    """
    try:
        binding = read_binding(fs, path)
    except (ShippingRefused, OSError):
        return ""
    return "" if binding is None or binding.topics else binding.fenced


def is_bound(fs: FileSystem, path: str) -> bool:
    """Whether the store at ``path`` is shipped anywhere."""
    return fs.exists(f"{path}/{SHIP_FILE}")


def write_binding(fs: FileSystem, path: str, binding: Binding) -> None:
    """Durable when it returns. Raises `DiskFull`, OSError."""
    replace_file(fs, f"{path}/{SHIP_FILE}", msgspec.json.format(msgspec.json.encode(binding), indent=2) + b"\n")


def remove_binding(fs: FileSystem, path: str) -> None:
    """The store is shipped nowhere any more."""
    with contextlib.suppress(FileNotFoundError):
        fs.unlink(f"{path}/{SHIP_FILE}")
        fs.sync_folder(path)


def folder_id(fs: FileSystem, path: str) -> tuple[int, int]:
    """What tells a store's folder from its copies."""
    found = fs.stat(path)
    return found.st_dev, found.st_ino


def remove_upload_journal(fs: FileSystem, folder: str) -> None:
    """Delete the journal of unfinished multi-part uploads, so that no process resumes them."""
    with contextlib.suppress(FileNotFoundError):
        fs.unlink(f"{folder}/{UPLOADS_FILE}")
