"""A network between clients and a server that cuts, delays and loses: a TCP proxy, a port for each of its."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable
from typing import Final

from segmentlog.testing.ports import free_ports

_HEAD: Final = struct.Struct(">ihhi")
"""Size, API, version and correlation id of a request."""
_ANSWER_HEAD: Final = struct.Struct(">ii")
_CHUNK: Final = 1 << 16


class _Frames:
    """Where frames begin in a stream that comes in pieces, and the first bytes of each."""

    def __init__(self, head_size: int) -> None:
        self._head_size = head_size
        self._rest = b""
        self._skip = 0

    def heads(self, data: bytes) -> list[tuple[int, bytes]]:
        """(Position in ``data`` where the frame begins, at least 0; its head) of each head that is whole now."""
        found = []
        at = 0
        if self._skip:
            at = min(self._skip, len(data))
            self._skip -= at
        while at < len(data):
            missing = self._head_size - len(self._rest)
            begins = at - len(self._rest)
            self._rest += data[at : at + missing]
            if len(self._rest) < self._head_size:
                break
            head, self._rest = self._rest, b""
            found.append((max(begins, 0), head))
            end = begins + 4 + struct.unpack_from(">i", head)[0]
            self._skip = max(end - len(data), 0)
            at = min(end, len(data))
        return found


class _Wire:
    """One connection of a client, and what belongs to it at the server."""

    def __init__(self, client: asyncio.StreamWriter, server: asyncio.StreamWriter) -> None:
        self.client, self.server = client, server
        self.requests, self.answers = _Frames(_HEAD.size), _Frames(_ANSWER_HEAD.size)
        self.doomed: set[int] = set()
        """Requests whose answers do not come through."""

    def cut(self) -> None:
        for writer in (self.client, self.server):
            writer.transport.abort()


class UnrulyProxy:
    """Runs in a thread of its own until it is closed; every method is for other threads."""

    def __init__(self, ports: int) -> None:
        self.port = free_ports(ports)
        """The first; the others follow."""
        self._sockets = [socket.create_server(("127.0.0.1", self.port + number)) for number in range(ports)]
        self.targets: list[int] = []
        """Where they lead."""
        self.delay_s = 0.0
        """The longest delay of a piece, in either direction."""
        self.seen: Counter[str] = Counter()
        """Connections that were "cut", pieces that were "delayed", answers that were "lost"."""
        self._lost: Counter[int] = Counter()
        self._wires: set[_Wire] = set()
        self._rng = random.Random(1)
        self._loop = asyncio.new_event_loop()
        self._is_over = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._run(),), name="proxy")
        self._thread.start()

    def close(self) -> None:
        """Cut all connections."""
        self._loop.call_soon_threadsafe(self._is_over.set)
        self._thread.join()
        self._loop.close()

    # ------------------------------------------------------------ what is done to connections

    def cut(self, share: float = 1.0) -> None:
        """Cut a share of all connections at once, whatever they are doing."""
        self._do(lambda: self._cut(share))

    def lose_answers(self, api: int, count: int) -> None:
        """Let the server answer the next requests of this kind, but lose the answers and the connections."""
        self._do(lambda: self._lost.update({api: count}))

    def heal(self) -> None:
        """Become a good network."""
        self.delay_s = 0.0
        self._do(self._lost.clear)

    def _do(self, what: Callable[[], object]) -> None:
        self._loop.call_soon_threadsafe(what)

    def _cut(self, share: float) -> None:
        for wire in list(self._wires):
            if self._rng.random() < share:
                self.seen["cut"] += 1
                wire.cut()

    # ------------------------------------------------------------ connections

    async def _run(self) -> None:
        servers = [await asyncio.start_server(self._met(index), sock=sock) for index, sock in enumerate(self._sockets)]
        await self._is_over.wait()
        for server in servers:
            server.close()
        for wire in list(self._wires):
            wire.cut()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def _met(self, index: int) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], object]:
        async def meet(reader: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
            try:
                answers, server = await asyncio.open_connection("127.0.0.1", self.targets[index])
            except OSError:
                client.transport.abort()
                return
            wire = _Wire(client, server)
            self._wires.add(wire)
            try:
                await asyncio.gather(self._ask(wire, reader), self._answer(wire, answers))
            except OSError:
                pass
            finally:
                wire.cut()
                self._wires.discard(wire)

        return meet

    async def _linger(self) -> None:
        if self.delay_s:
            self.seen["delayed"] += 1
            await asyncio.sleep(self._rng.uniform(0, self.delay_s))

    async def _ask(self, wire: _Wire, reader: asyncio.StreamReader) -> None:
        while data := await reader.read(_CHUNK):
            for _, head in wire.requests.heads(data):
                _, api, _, number = _HEAD.unpack(head)
                if self._lost[api] > 0 and not wire.doomed:
                    self._lost[api] -= 1
                    wire.doomed.add(number)
            await self._linger()
            wire.server.write(data)
            await wire.server.drain()
        wire.cut()

    async def _answer(self, wire: _Wire, reader: asyncio.StreamReader) -> None:
        while data := await reader.read(_CHUNK):
            for begins, head in wire.answers.heads(data):
                if _ANSWER_HEAD.unpack(head)[1] in wire.doomed:
                    self.seen["lost"] += 1
                    wire.client.write(data[:begins])
                    await wire.client.drain()
                    wire.cut()
                    return
            await self._linger()
            wire.client.write(data)
            await wire.client.drain()
        wire.cut()
