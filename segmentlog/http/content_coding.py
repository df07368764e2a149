"""Decompresses request bodies piece by piece, within the size limit of a body.

gzip, deflate   zlib stops after each piece, so a decompression bomb is refused once the pieces exceed the limit.
zstd            The compressed body is read completely. Its block headers then bound the decompressed size in advance.
"""

from __future__ import annotations

import asyncio
import struct
import zlib
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from starlette.concurrency import run_in_threadpool

from segmentlog.format.batch_codecs import CODEC_ZSTD
from segmentlog.format.wire_codecs import PADDING, TooManyBytes, decompress_records, zstd_bound
from segmentlog.http.error_responses import HttpProblem
from segmentlog.http.large_bodies import RequestMemory, too_large

if TYPE_CHECKING:
    from starlette.types import Message, Receive

_PIECE_BYTES: Final = 256 << 10
_WINDOW_BITS: Final = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}


def decompress(receive: Receive, coding: str, memory: RequestMemory, limit_bytes: int) -> Receive:
    """Return an ASGI receive function that yields the decompressed body.

    The function raises `HttpProblem`: 400 for a malformed or incomplete body, 413 for more than ``limit_bytes`` once
    decompressed.
    """
    if coding == "zstd":
        return _ZstdReceive(receive, memory, limit_bytes)
    return _ZlibReceive(receive, coding, limit_bytes)


def _malformed(coding: str, why: object) -> HttpProblem:
    return HttpProblem(
        HTTPStatus.BAD_REQUEST, f"the request body is not valid {coding} (its Content-Encoding): {why}",
        headers={"connection": "close"},
    )  # fmt: skip


def _message(body: bytes, more_body: bool) -> Message:
    return {"type": "http.request", "body": body, "more_body": more_body}


class _ZlibReceive:
    """Receive function for gzip (also several members) and deflate, which is the zlib format (RFC 9110, 8.4.1.2)."""

    def __init__(self, receive: Receive, coding: str, limit_bytes: int) -> None:
        self._receive = receive
        self._coding = coding
        self._remaining_bytes = limit_bytes
        self._limit_bytes = limit_bytes
        self._stream = zlib.decompressobj(_WINDOW_BITS[coding])
        self._input = b""
        self._has_begun = self._may_have_more = self._is_done = False
        self._more_body = True

    async def __call__(self) -> Message:
        while not self._is_done:
            if self._input or self._may_have_more:
                if piece := self._next_piece():
                    await asyncio.sleep(0)  # 64 KiB can become 64 MiB: let other requests run between pieces
                    return _message(piece, True)
            elif self._more_body:
                message = await self._receive()
                if message["type"] != "http.request":
                    return message
                self._input, self._more_body = message.get("body", b""), message.get("more_body", False)
            else:
                if self._has_begun and not self._stream.eof:
                    raise _malformed(self._coding, "the data ends too early")
                self._is_done = True
                return _message(b"", False)
        return await self._receive()

    def _next_piece(self) -> bytes:
        if self._stream.eof:
            if self._coding != "gzip":
                raise _malformed(self._coding, "data follows the end of the compressed stream")
            self._stream = zlib.decompressobj(_WINDOW_BITS[self._coding])
        self._has_begun = True
        stream = self._stream
        try:
            piece = stream.decompress(self._input, _PIECE_BYTES)
        except zlib.error as error:
            raise _malformed(self._coding, error) from None
        self._input = stream.unused_data if stream.eof else stream.unconsumed_tail
        # zlib may still have output that did not fit, although it has consumed all input.
        self._may_have_more = len(piece) == _PIECE_BYTES and not stream.eof
        self._remaining_bytes -= len(piece)
        if self._remaining_bytes < 0:
            raise too_large(self._limit_bytes)
        return piece


class _ZstdReceive:
    """Receive function for Zstandard. The library can only decompress a complete body."""

    def __init__(self, receive: Receive, memory: RequestMemory, limit_bytes: int) -> None:
        self._receive = receive
        self._memory = memory
        self._limit_bytes = limit_bytes
        self._raw: memoryview | None = None
        self._at = 0
        self._is_done = False

    async def __call__(self) -> Message:
        if self._is_done:
            return await self._receive()
        if self._raw is None:
            compressed = bytearray()
            more_body = True
            while more_body:
                message = await self._memory.receive(self._receive)
                if message["type"] != "http.request":
                    return message
                compressed += message.get("body", b"")
                more_body = message.get("more_body", False)
                await self._memory.reserve("compressed", len(compressed))
            self._raw = await self._decompress(compressed)
        piece = bytes(self._raw[self._at : self._at + _PIECE_BYTES])
        self._at += len(piece)
        self._is_done = self._at == len(self._raw)
        if self._is_done:
            self._raw = memoryview(b"")
            await self._memory.reserve("decompressed", 0)
        return _message(piece, not self._is_done)

    async def _decompress(self, compressed: bytearray) -> memoryview:
        if not compressed:
            return memoryview(b"")
        limit_bytes = self._limit_bytes
        try:
            bound_bytes = min(zstd_bound(memoryview(compressed), limit_bytes), limit_bytes)
            # The decoder holds the decompressed data twice: in its window and as its result.
            await self._memory.reserve("decompressed", 2 * bound_bytes)
            raw = await run_in_threadpool(decompress_records, CODEC_ZSTD, memoryview(compressed), limit_bytes)
        except TooManyBytes:
            raise too_large(limit_bytes) from None
        except (ValueError, struct.error) as error:
            raise _malformed("zstd", error) from None
        await self._memory.reserve("compressed", 0)
        await self._memory.reserve("decompressed", len(raw))
        return memoryview(raw)[: len(raw) - PADDING]
