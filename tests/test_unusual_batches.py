"""Batches that few clients send and that are right all the same: what is stored of them, every reader reads."""

from __future__ import annotations

import gzip
import struct
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import cramjam
import lz4.frame
import pytest
import zstandard
from broken import findings
from leftovers import opened
from logs import NoSyncFileSystem, contents, open_log
from server.test_limits import producing
from server.wire_client import WireClient
from wire import CODECS, NOW_MS, Sent, foreign, forged

from segmentlog.format.batch import WIRE_HEADER_SIZE
from segmentlog.format.wire_codecs import PADDING, decompress_records
from segmentlog.security.security_settings import Security
from segmentlog.server.codec.generated.fetch import FetchPartition, FetchRequest, FetchTopic
from segmentlog.server.embedded import Server
from segmentlog.server.server_settings import ServerSettings
from segmentlog.store import LogStore

RECORDS = [Sent(b"key %d" % n, b"value %d " % n * (n % 60), NOW_MS + n) for n in range(900)]
"""Some 250 KB: several blocks of 64 KiB."""
RAW = foreign(RECORDS)[WIRE_HEADER_SIZE:]
SKIPPABLE = struct.pack("<II", 0x184D2A53, 5) + b"aside"
_NAMED = 1 << 3 | 1 << 2 | 1 << 4 | 1 << 1


def with_every_field(raw: bytes) -> bytes:
    """Return a gzip member whose header has extra data, a name, a comment and a checksum."""
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    head = b"\x1f\x8b\x08" + bytes((_NAMED,)) + bytes(5) + b"\xff" + b"\x04\0abcd" + b"name\0" + b"comment\0"
    head += (zlib.crc32(head) & 0xFFFF).to_bytes(2, "little")
    return head + packer.compress(raw) + packer.flush() + struct.pack("<II", zlib.crc32(raw), len(raw) & 0xFFFFFFFF)


def in_parts(compress: Callable[[bytes], bytes], *cuts: int) -> Callable[[bytes], bytes]:
    """Return a function that compresses each part by itself; a cut may be in the middle of a record."""
    return lambda raw: b"".join(
        compress(raw[start:end]) for start, end in zip((0, *cuts), (*cuts, len(raw)), strict=True)
    )


def zstd_window(log: int) -> Callable[[bytes], bytes]:
    """Return a compressor to Zstandard frames that announce a window of 2^log bytes and no content size."""

    def compress(raw: bytes) -> bytes:
        parameters = zstandard.ZstdCompressionParameters.from_level(3, window_log=log)
        packer = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
        return packer.compress(raw) + packer.flush()

    return compress


def with_checksum(raw: bytes) -> bytes:
    """Return an LZ4 frame that ends in a checksum."""
    return lz4.frame.compress(raw, content_checksum=True)


def xerial(raw: bytes) -> bytes:
    """Snappy as Java frames it, in blocks of 1,000 bytes."""
    blocks = [bytes(cramjam.snappy.compress_raw(raw[at : at + 1000])) for at in range(0, len(raw), 1000)]
    return b"\x82SNAPPY\0" + struct.pack(">ii", 1, 1) + b"".join(struct.pack(">i", len(one)) + one for one in blocks)


UNUSUAL: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "gzip, two members": ("gzip", in_parts(gzip.compress, 5000)),
    "gzip, a member a byte": ("gzip", in_parts(gzip.compress, *range(1, 40))),
    "gzip, members of which some are empty": ("gzip", in_parts(gzip.compress, 0, 70, 70, 70, 200_000)),
    "gzip, many empty members, then all": ("gzip", lambda raw: gzip.compress(b"") * 3000 + gzip.compress(raw)),
    "gzip, zeros behind": ("gzip", lambda raw: gzip.compress(raw) + bytes(9)),
    "gzip, many zeros behind": ("gzip", lambda raw: gzip.compress(raw) + bytes(200_000)),
    "gzip, zeros between members": ("gzip", in_parts(lambda raw: gzip.compress(raw) + bytes(3), 11_111)),
    "gzip, stored": ("gzip", lambda raw: gzip.compress(raw, 0)),
    "gzip, every field of a header": ("gzip", in_parts(with_every_field, 9)),
    "snappy, one block": ("snappy", lambda raw: bytes(cramjam.snappy.compress_raw(raw))),
    "snappy, of Java": ("snappy", xerial),
    "lz4, linked blocks": ("lz4", lambda raw: lz4.frame.compress(raw, block_linked=True, store_size=False)),
    "lz4, blocks for themselves": ("lz4", lambda raw: lz4.frame.compress(raw, block_linked=False)),
    "lz4, checksums": ("lz4", lambda raw: lz4.frame.compress(raw, block_checksum=True, content_checksum=True)),
    "lz4, two frames": ("lz4", in_parts(lz4.frame.compress, 200_000)),
    "lz4, a small frame, then a large one": ("lz4", in_parts(lz4.frame.compress, 10)),
    "lz4, many frames": ("lz4", in_parts(with_checksum, *range(10, 300, 9))),
    "lz4, an empty frame first": ("lz4", in_parts(lz4.frame.compress, 0)),
    "lz4, a skippable frame first": ("lz4", lambda raw: SKIPPABLE + lz4.frame.compress(raw)),
    "lz4, skippable frames around": ("lz4", in_parts(lambda raw: lz4.frame.compress(raw) + SKIPPABLE, 10)),
    "zstd, two frames": ("zstd", in_parts(lambda raw: bytes(cramjam.zstd.compress(raw)), 10)),
    "zstd, skippable frames around": ("zstd", lambda raw: SKIPPABLE + bytes(cramjam.zstd.compress(raw)) + SKIPPABLE),
    "zstd, a window of 128 MiB": ("zstd", zstd_window(27)),
    "zstd, no size": ("zstd", zstd_window(17)),
}  # fmt: skip
table = pytest.mark.parametrize(("codec", "make"), UNUSUAL.values(), ids=UNUSUAL)


def unusual(codec: str, make: Callable[[bytes], bytes]) -> bytes:
    """Return the records as a batch that is compressed this way."""
    made = foreign(RECORDS)[:WIRE_HEADER_SIZE] + make(RAW)
    return forged(made, attributes=CODECS[codec], batch_length=len(made) - 12)


@table
def test_all_of_it_comes_back_and_no_more_than_the_bound(codec: str, make: Callable[[bytes], bytes]) -> None:
    """All bytes decompress if the bound is their size; if it is a byte less, the error says so."""
    made = memoryview(make(RAW))
    assert decompress_records(CODECS[codec], made, len(RAW)) == RAW + bytes(PADDING)
    with pytest.raises(ValueError, match="more than"):
        decompress_records(CODECS[codec], made, len(RAW) - 1)


@table
def test_the_library_reads_it(tmp_path: Path, codec: str, make: Callable[[bytes], bytes]) -> None:
    """A batch that passes the log's check is stored as it came, and read record by record, also after a restart."""
    data = unusual(codec, make)
    log = open_log(tmp_path)
    log.append_wire(data)
    log.close()
    log = open_log(tmp_path)
    (batch,) = log.read(0)
    assert bytes(batch.payload)[16:] == data[16:]
    found = [Sent(one.key, one.value, one.timestamp) for one in contents(log)]
    assert found == RECORDS
    assert log.offset_for_timestamp(NOW_MS + 500) == 500


@pytest.fixture
def store(tmp_path: Path) -> LogStore:
    """Return a store with an empty topic t."""
    made = opened(LogStore(tmp_path / "store", background=False, fs=NoSyncFileSystem()))
    made.create_topic("t")
    return made


@pytest.fixture
def server(store: LogStore) -> Iterator[Server]:
    """Yield a server of the store."""
    with Server(
        store, host="127.0.0.1", port=0, advertise=None, settings=ServerSettings(), security=Security(),
        owns_store=False,
    ) as made:  # fmt: skip
        yield made


def test_the_server_takes_it_and_hands_it_on(store: LogStore, server: Server) -> None:
    """Each batch is acknowledged, fetched byte for byte, and read by the library; `verify` finds nothing."""
    batches = [unusual(*one) for one in UNUSUAL.values()]
    with WireClient(server.bootstrap_servers, timeout_s=60) as client:
        for name, batch in zip(UNUSUAL, batches, strict=True):
            assert client.ask(0, 7, producing(-1, batch)).responses[0].partition_responses[0].error_code == 0, name
        wanted = FetchTopic("t", partitions=[FetchPartition(0, partition_max_bytes=64 << 20)])
        fetched = client.ask(1, 11, FetchRequest(max_wait_ms=0, max_bytes=64 << 20, topics=[wanted]))
        records = bytes(fetched.responses[0].partitions[0].records)
    assert all(batch[16:] in records for batch in batches)
    log = store.open_partition("t", 0)
    values = [record.value for batch in log.read(0) for record in batch.records()]
    assert values == [one.value for one in RECORDS] * len(batches)
    assert findings(Path(store.path), "damage", "warning") == []


@pytest.mark.parametrize(
    "stored",
    [
        b"",
        gzip.compress(RAW)[:-1],
        gzip.compress(RAW)[:-9],
        gzip.compress(RAW) + b"\0\0x",
        gzip.compress(RAW) + b"garbage",
        gzip.compress(RAW) + gzip.compress(RAW)[:-1],
        gzip.compress(RAW) + b"\x1f",
        gzip.compress(RAW[:-1]) + gzip.compress(RAW[-1:])[:12],
        zlib.compress(RAW),
        bytes(20),
    ],
    ids=len,
)
def test_gzip_that_is_cut_short_or_followed_by_garbage(stored: bytes) -> None:
    """Only members and zeros may follow a gzip member: other bytes may be the rest of records."""
    with pytest.raises(ValueError, match="gzip"):
        decompress_records(CODECS["gzip"], memoryview(stored), 1 << 20)


def test_a_window_beyond_128_mib() -> None:
    """It is refused because it would take that much memory, whatever it contains."""
    with pytest.raises(ValueError, match="zstd"):
        decompress_records(CODECS["zstd"], memoryview(zstd_window(28)(RAW)), 1 << 20)


def test_members_without_end_take_time_and_memory_of_their_size() -> None:
    """Many empty members, and members that exceed the bound together, take time and memory of their size."""
    tracemalloc.start()
    try:
        empty = gzip.compress(b"") * 50_000
        assert decompress_records(CODECS["gzip"], memoryview(empty), 1 << 20) == bytes(PADDING)
        many = memoryview(gzip.compress(bytes(1 << 20), 9) * 900)
        with pytest.raises(ValueError, match="more than 33554432 bytes"):
            decompress_records(CODECS["gzip"], many, 32 << 20)
        assert tracemalloc.get_traced_memory()[1] < 100 << 20
    finally:
        tracemalloc.stop()


def test_frames_without_end() -> None:
    """LZ4 frames that claim large blocks and hold little: the memory is that of what they hold, or of the bound."""
    frame = lz4.frame.compress(b"x", block_size=lz4.frame.BLOCKSIZE_MAX4MB)
    tracemalloc.start()
    try:
        made = decompress_records(CODECS["lz4"], memoryview(frame * 20_000), 64 << 20)
        assert made == b"x" * 20_000 + bytes(PADDING)
        assert tracemalloc.get_traced_memory()[1] < 100 << 20
    finally:
        tracemalloc.stop()
