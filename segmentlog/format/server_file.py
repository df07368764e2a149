"""The file ``@server``: the process that serves a store to Kafka clients, and the addresses of its workers.

    {"pid": 4711, "address": "m1:9092", "nodes": [[1, "m1", 9093], [2, "m1", 9094]]}

The supervisor writes it once it listens. The content stays after the server has ended; the lock on the file shows
whether the server still runs.
"""

from __future__ import annotations

import msgspec


class ServerNode(msgspec.Struct, frozen=True, array_like=True):
    """Node id and address under which Kafka clients know one worker."""

    node_id: int
    host: str
    port: int


class ServerFile(msgspec.Struct, frozen=True):
    """The content of the file. ``address`` is the bootstrap address."""

    pid: int
    address: str
    nodes: tuple[ServerNode, ...] = ()


_decoder = msgspec.json.Decoder(ServerFile)


def encode_server_file(content: ServerFile) -> bytes:
    """Return the bytes of the file."""
    return msgspec.json.encode(content)


def decode_server_file(data: bytes) -> ServerFile | None:
    """Decode the file; return None if it is empty or damaged, as after a crash while it was written."""
    try:
        content = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return None if fault_of_nodes(content.nodes) else content


def fault_of_nodes(nodes: tuple[ServerNode, ...]) -> str:
    """Return why these are not the workers of a server; "" if they are."""
    if len({node.node_id for node in nodes}) < len(nodes):
        return "two nodes have the same id"
    for node in nodes:
        if not (0 < node.node_id < 2**31 and 0 < len(node.host) <= 255 and 0 < node.port < 2**16):
            return f"{node.host!r}:{node.port} is not the address of node {node.node_id}"
    return ""
