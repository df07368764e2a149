"""NATS JetStream: one server with a stream in files, and nats-py."""

from __future__ import annotations

import asyncio
import importlib.metadata
import re
import shutil
import subprocess
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from bench.systems.base import Sync, System, Unavailable
from bench.systems.servers import Server, ServerFailed, cache_folder, is_listening
from segmentlog.testing.ports import free_ports

if TYPE_CHECKING:
    from nats.aio.client import Client
    from nats.aio.msg import Msg
    from nats.js import JetStreamContext

_STREAM = "log"
_LEAST_VERSION = (2, 10)
_HOW_TO_GET = (
    "go install github.com/nats-io/nats-server/v2@v2.14.9 (or another release from 2.10 on), and put nats-server on"
    " PATH or into {folder}"
)
_START_S = 60.0
_ANSWER_S = 120.0
_IN_FLIGHT = 4096
"""Publishes that wait for their acknowledgement at a time; `publish_async` waits for one when there are more."""

# How often the server fsyncs what it wrote; "always": each message before its acknowledgement.
_SYNC_INTERVAL: dict[Sync, str] = {"never": "10000h", "second": "1s", "batch": "always"}

_T = TypeVar("_T")


class NatsJetStream(System):
    """A nats-server that is started here. Full records have their key as subject, and the server's own time."""

    name = "NATS JetStream"
    about = (
        "one stream in files; publish_async with 4,096 in flight, an ordered push consumer with a callback;"
        " sync_interval always (each message), 1 s, or hardly ever"
    )
    asynchronous = True

    def __init__(self, folder: Path, sync: Sync, *, keyed: bool) -> None:
        super().__init__(folder, sync, keyed=keyed)
        self._server: Server | None = None

    @classmethod
    def version(cls) -> str:
        try:
            client = importlib.metadata.version("nats-py")
        except importlib.metadata.PackageNotFoundError:
            raise Unavailable("the package nats-py is not installed: pip install nats-py") from None
        program = _program()
        how = _HOW_TO_GET.format(folder=_own_folder())
        if program is None:
            raise Unavailable(f"nats-server is not installed: {how}")
        said = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
        found = re.search(r"v((\d+)\.(\d+)\S*)", said)
        if found is None or (int(found[2]), int(found[3])) < _LEAST_VERSION:
            # Before, it fsynced every two minutes and could not be told otherwise; Debian 12 has such a one.
            raise Unavailable(f"{said.strip()} has no sync_interval: {how}")
        return f"{found[1]} (nats-py {client})"

    def open(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._unanswered: deque[asyncio.Future[Any]] = deque()
        self._connections: list[tuple[asyncio.AbstractEventLoop, Client]] = []
        for attempt in range(3):  # between choosing the port and taking it, somebody else may
            try:
                self._start()
                break
            except ServerFailed:
                if attempt == 2:
                    raise
        self._loop, self._stream = self._connect()
        self._run(self._create_stream())

    def close(self) -> None:
        if self._server is None:
            return
        for loop, client in self._connections:
            if self._server.is_running:
                loop.run_until_complete(client.close())
            loop.close()
        self._server.stop()
        self._server = None

    def append(self, values: Sequence[bytes], keys: Sequence[bytes] | None = None) -> None:
        self._run(self._publish(values, keys))

    def writer(self) -> Callable[[bytes], object]:
        loop, stream = self._connect()

        # A loop of its own: one of all threads would be the one thread that does all the work.
        def write(value: bytes) -> None:
            loop.run_until_complete(stream.publish(_STREAM, value, timeout=_ANSWER_S))

        return write

    def flush(self) -> None:
        self._run(self._wait_for_answers())

    def scan_values(self) -> int:
        def take(message: Msg) -> None:
            message.data  # noqa: B018

        return self._run(self._scan(take))

    def scan_records(self) -> int:
        prefix = len(_STREAM) + 1

        def take(message: Msg) -> None:
            about = message.metadata
            _record = (about.sequence.stream - 1, about.timestamp, message.subject[prefix:].encode(), message.data)

        return self._run(self._scan(take))

    def read(self, offset: int) -> bytes:
        # Directly: the other way around it is answered in JSON.
        message = self._run(self._stream.get_msg(_STREAM, offset + 1, direct=True))
        assert message.data is not None
        return message.data

    def end(self) -> int:
        return int(self._run(self._stream.stream_info(_STREAM)).state.last_seq)

    def compact(self) -> None:
        """Allow one message a subject from now on: the server deletes the others before it answers.

        It deletes files that are empty then; those that are half empty it writes anew when it finds the time.
        """
        self._run(self._limit_to_last())

    def kill(self) -> None:
        if self._server is not None:
            self._server.kill()

    def server_ids(self) -> list[int]:
        return [] if self._server is None else [self._server.pid]

    # ------------------------------------------------------------ the server

    def _start(self) -> None:
        program = _program()
        assert program is not None, "version() says whether it is there"
        port = free_ports()
        self._url = f"nats://127.0.0.1:{port}"
        config = self.folder / "nats-server.conf"
        config.write_text(
            f'listen: "127.0.0.1:{port}"\n'
            "jetstream {\n"
            f'  store_dir: "{self.folder.absolute()}/data"\n'
            f'  sync_interval: "{_SYNC_INTERVAL[self.sync]}"\n'
            "}\n"
        )
        self._server = Server([program, "-c", str(config)], self.folder / "server.log")
        # It listens when its streams are recovered.
        self._server.wait_until(lambda: is_listening(port), _START_S)

    def _connect(self) -> tuple[asyncio.AbstractEventLoop, JetStreamContext]:
        """One more connection, with a loop of its own."""
        import nats

        loop = asyncio.new_event_loop()

        async def connect() -> tuple[Client, JetStreamContext]:
            client = await nats.connect(self._url, connect_timeout=20, allow_reconnect=False, error_cb=_ignore)
            return client, client.jetstream(timeout=_ANSWER_S, publish_async_max_pending=_IN_FLIGHT)

        client, stream = loop.run_until_complete(connect())
        self._connections.append((loop, client))
        return loop, stream

    async def _create_stream(self) -> None:
        from nats.js.api import StorageType
        from nats.js.errors import NotFoundError

        try:
            await self._stream.stream_info(_STREAM)
        except NotFoundError:
            subject = f"{_STREAM}.*" if self.keyed else _STREAM
            await self._stream.add_stream(
                name=_STREAM, subjects=[subject], storage=StorageType.FILE, num_replicas=1, allow_direct=True
            )

    async def _limit_to_last(self) -> None:
        info = await self._stream.stream_info(_STREAM)
        info.config.max_msgs_per_subject = 1
        await self._stream.update_stream(info.config)

    # ------------------------------------------------------------ its client

    def _run(self, work: Coroutine[Any, Any, _T]) -> _T:
        return self._loop.run_until_complete(work)

    async def _publish(self, values: Sequence[bytes], keys: Sequence[bytes] | None) -> None:
        publish, unanswered = self._stream.publish_async, self._unanswered
        if keys is None:
            for value in values:
                unanswered.append(await publish(_STREAM, value))
        else:
            for key, value in zip(keys, values, strict=True):
                unanswered.append(await publish(f"{_STREAM}.{key.decode()}", value))
        if self.sync == "batch":
            await self._wait_for_answers()
        while unanswered and unanswered[0].done():
            unanswered.popleft().result()  # raises what the server refused it for

    async def _wait_for_answers(self) -> None:
        await asyncio.wait_for(self._stream.publish_async_completed(), _ANSWER_S)
        while self._unanswered:
            self._unanswered.popleft().result()

    async def _scan(self, take: Callable[[Msg], None]) -> int:
        expected = (await self._stream.stream_info(_STREAM)).state.messages
        if not expected:
            return 0
        count = 0
        is_done = asyncio.Event()

        # A callback: handing messages to a loop of next_msg() takes thrice as long.
        async def on_message(message: Msg) -> None:
            nonlocal count
            take(message)
            count += 1
            if count == expected:
                is_done.set()

        subscription = await self._stream.subscribe(
            f"{_STREAM}.*" if self.keyed else _STREAM, stream=_STREAM, cb=on_message, ordered_consumer=True
        )
        await is_done.wait()
        await subscription.unsubscribe()
        return count


def _own_folder() -> Path:
    return cache_folder() / "bin"


def _program() -> str | None:
    """Return the server in the cache, or else the one on PATH."""
    own = _own_folder() / "nats-server"
    return str(own) if own.exists() else shutil.which("nats-server")


async def _ignore(_error: Exception) -> None:
    """Errors reach whoever waits for an answer; the client would print them as well."""
