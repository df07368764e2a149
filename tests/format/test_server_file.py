"""The file with the addresses of a store's server."""

import pytest

from segmentlog.format.server_file import ServerFile, ServerNode, decode_server_file, encode_server_file


def test_a_written_file_is_read() -> None:
    """It is JSON, and nodes are short lists."""
    content = ServerFile(4711, "m1:9092", (ServerNode(1, "m1", 9093), ServerNode(2, "m1", 9094)))
    assert encode_server_file(content) == b'{"pid":4711,"address":"m1:9092","nodes":[[1,"m1",9093],[2,"m1",9094]]}'
    assert decode_server_file(encode_server_file(content)) == content


def test_a_file_of_an_older_version_is_read() -> None:
    """It has no nodes."""
    assert decode_server_file(b'{"pid": 1, "address": "m1:9092"}') == ServerFile(1, "m1:9092")


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b"\xff", b'{"pid": "a", "address": "b"}', b'{"pid": 1, "address": "a", "nodes": [[0, "a", 1]]}'],
)
def test_a_damaged_file_is_ignored(data: bytes) -> None:
    """The server lock is what counts; the content only helps people and a standby."""
    assert decode_server_file(data) is None
