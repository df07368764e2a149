"""The addresses of the store's server, which the shipper publishes in the manifest for a standby."""

from __future__ import annotations

from segmentlog.format.file_names import SERVER_FILE
from segmentlog.format.server_file import ServerNode, decode_server_file
from segmentlog.storage.file_operations import read_file
from segmentlog.storage.fs import FileSystem


def read_server_nodes(fs: FileSystem, path: str) -> tuple[ServerNode, ...]:
    """Return the workers of the server that serves the store at ``path``, or served it last; empty if none did."""
    try:
        content = decode_server_file(read_file(fs, f"{path}/{SERVER_FILE}"))
    except OSError:
        return ()
    return () if content is None else content.nodes
