"""What the HTTP door costs, against the same work without it: ``python -m bench.http``.

produce       JSON, 500 records a request over four connections, against decoding the same bodies and appending their
              values: as one would (``msgspec.json.decode``, and each value encoded again), and as lean as it goes (the
              bodies decoded by a type, the values kept as they came)
lines in      a body of lines, against cutting the same bytes into lines and appending these
lines out     values alone, and whole records, against reading the partition and making the same lines
events        a topic's end to 100 clients at once while it is appended to, against a bare asyncio server that sends
              the same bytes to as many, which it has as a whole

Clients are in a process of their own, on bare sockets. The two sides of a row are alternated; a row shows medians,
the ratio with its range over the rounds, and what it should reach.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

import segmentlog
from bench import machine
from bench.arguments import existing_folder, one_or_more
from bench.measure import Row, RowResult, Side, open_store, print_table
from bench.results import save
from bench.workload import json_records
from segmentlog.http.rest.record_json import lines
from segmentlog.http.serving import HttpServer
from segmentlog.http.settings import HttpSettings

_REQUEST_RECORDS = 500
_CONNECTIONS = 4
_SLICE_S = 1.5
_LINES = 400_000
_CLIENTS = 100
_EVENTS = 20_000
_JSON = "application/vnd.kafka.json.v2+json"


class Load:
    """The clients' process."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.http_load"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> Load:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def ask(self, **command: Any) -> dict[str, Any]:
        """Have something done; what came of it."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """Return the next one."""
        assert self._process.stdout is not None
        found: dict[str, Any] = json.loads(self._process.stdout.readline())
        return found


def _served(load: Load, folder: Path) -> tuple[segmentlog.LogStore, int, HttpServer]:
    store = open_store(folder / "served")
    server = HttpServer(store, "127.0.0.1", 0, settings=HttpSettings(allow_writes=True))
    _servers.append(server)
    return store, int(server.address.rpartition(":")[2]), server


_servers: list[HttpServer] = []


def _request(method: str, path: str, body_bytes: int = 0, **headers: str) -> str:
    fields = {"host": "localhost", "content-length": str(body_bytes), **headers}
    named = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in fields.items())
    return f"{method} {path} HTTP/1.1\r\n{named}\r\n"


# ---------------------------------------------------------------- produce


class _Record(msgspec.Struct, gc=False):
    value: msgspec.Raw


class _Records(msgspec.Struct):
    records: list[_Record]


def _produce(load: Load, lean: bool, folder: Path, scale: float) -> tuple[Side, Side]:
    store, port, _ = _served(load, folder)
    store.create_topic("t")
    direct = open_store(folder / "direct")
    log = direct.create_topic("t").partition(0)
    bodies = [
        b'{"records":[%b]}' % b",".join(b'{"value":%b}' % value for value in values)
        for values in json_records(16, _REQUEST_RECORDS).values
    ]
    paths = []
    for number, body in enumerate(bodies):
        path = folder / f"request-{number}"
        path.write_bytes(_request("POST", "/topics/t", len(body), content_type=_JSON).encode() + body)
        paths.append(str(path))
    seconds = _SLICE_S * scale

    def ours() -> float:
        done = load.ask(do="produce", port=port, requests=paths, connections=_CONNECTIONS, seconds=seconds)
        return float(done["requests"] * _REQUEST_RECORDS / done["seconds"])

    decode_lean, encode = msgspec.json.Decoder(_Records).decode, msgspec.json.Encoder().encode

    def limit() -> float:
        began_s, requests = time.perf_counter(), 0
        while (elapsed_s := time.perf_counter() - began_s) < seconds:
            body = bodies[requests % len(bodies)]
            if lean:
                values = [bytes(record.value) for record in decode_lean(body).records]
            else:
                values = [encode(record["value"]) for record in msgspec.json.decode(body)["records"]]
            log.append(values)
            requests += 1
        return requests * _REQUEST_RECORDS / elapsed_s

    return ours, limit


# ---------------------------------------------------------------- lines


def _lines_of(count: int) -> bytes:
    values = json_records(max(count // 10_000, 1), 10_000).values
    return b"\n".join(value for batch in values for value in batch) + b"\n"


def _lines_in(load: Load, folder: Path, scale: float) -> tuple[Side, Side]:
    store, port, _ = _served(load, folder)
    store.create_topic("t")
    log = open_store(folder / "direct").create_topic("t").partition(0)
    body = _lines_of(int(_LINES * scale))
    count = body.count(b"\n")
    (folder / "body").write_bytes(body)
    head = _request("POST", "/topics/t/records", len(body), content_type="application/x-ndjson")
    (folder / "head").write_text(head, newline="")

    def ours() -> float:
        done = load.ask(do="upload", port=port, request=str(folder / "head"), body=str(folder / "body"))
        return float(count / done["seconds"])

    def limit() -> float:
        began_s, at = time.perf_counter(), 0
        while at < len(body):
            end = body.rfind(b"\n", at, at + (1 << 20)) + 1
            log.append(body[at : end - 1].split(b"\n"))
            at = end
        return count / (time.perf_counter() - began_s)

    return ours, limit


def _lines_out(load: Load, form: str, folder: Path, scale: float) -> tuple[Side, Side]:
    store, port, _ = _served(load, folder)
    log = store.create_topic("t").partition(0)
    for batch in json_records(max(int(_LINES * scale) // 1000, 1), 1000).values:
        log.append(batch)
    count = log.log_end_offset
    request = _request(
        "GET", f"/topics/t/partitions/0/records?form={form}", accept="application/x-ndjson", connection="close"
    )

    def ours() -> float:
        return float(count / load.ask(do="download", port=port, request=request)["seconds"])

    def limit() -> float:
        began_s, size = time.perf_counter(), 0
        for batch in log.read(0):
            if form == "values":
                size += len(b"\n".join(batch.values)) + 1  # type: ignore[arg-type]
            else:
                size += len(lines(batch, "text"))
        return count / (time.perf_counter() - began_s)

    return ours, limit


# ---------------------------------------------------------------- events


def _events(load: Load, folder: Path, scale: float) -> tuple[Side, Side]:
    """Events a second over all clients."""
    store, port, _ = _served(load, folder)
    log = store.create_topic("t").partition(0)
    batches = json_records(max(int(_EVENTS * scale) // 200, 1), 200).values
    count = sum(map(len, batches))
    request = _request("GET", "/topics/t/stream")

    def rate_of(on_port: int, begin: Any) -> float:
        load.ask(do="listen", port=on_port, request=request, clients=_CLIENTS, marks=count, mark="\ndata: ")
        begin()
        done = load.answer()
        sizes.append(done["bytes"] // _CLIENTS)
        return float(count * _CLIENTS / done["seconds"])

    sizes: list[int] = []

    def append() -> None:
        for batch in batches:
            log.append(batch)

    def limit() -> float:
        piece = b"id: 0a1b2c3d:1234567\ndata: " + b"x" * max(sizes[-1] // count - 30, 1) + b"\n\n"
        with _BareServer(piece, count) as server:
            return rate_of(server.port, server.go.set)

    return partial(rate_of, port, append), limit


class _BareServer:
    """Sends the same events to whoever comes, once it may."""

    def __init__(self, piece: bytes, count: int) -> None:
        self._chunk, self._chunks = piece * 200, count // 200
        self.go = threading.Event()
        self._up = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._thread.start()
        self._up.wait()

    def __enter__(self) -> _BareServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()

    async def _serve(self) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._up.set()
        await self._end.wait()
        server.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\n\n\r\n\n")
        while not self.go.is_set():
            await asyncio.sleep(0.005)
        try:
            for _ in range(self._chunks):
                writer.write(b"%x\r\n%b\r\n" % (len(self._chunk), self._chunk))
                await writer.drain()
        except ConnectionError:
            pass  # it has what it wants
        writer.close()


def rows(load: Load) -> list[Row]:
    """All of them."""
    return [
        Row("produce: JSON, 500 a request", "records/s", 0.5, True, partial(_produce, load, False)),
        Row("produce: the leanest decoding", "records/s", 0.3, True, partial(_produce, load, True)),
        Row("lines in", "records/s", 0.5, True, partial(_lines_in, load)),
        Row("lines out: values", "records/s", 0.4, True, partial(_lines_out, load, "values")),
        Row("lines out: records", "records/s", 0.5, True, partial(_lines_out, load, "records")),
        Row("events: to 100 clients", "records/s", 0.5, True, partial(_events, load)),
    ]


def main() -> int:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=one_or_more, default=5, help="rounds of alternation (default 5)")
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--scale", type=float, default=1.0, help="more or less work a round (default 1.0)")
    parser.add_argument("--dir", type=existing_folder, help="folder on the disk to measure (default: a temporary one)")
    parser.add_argument("--out", type=Path, help="folder to write http.json to (default: none is written)")
    options = parser.parse_args()
    started = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="segmentlog-http-", dir=options.dir))
    results: list[RowResult] = []
    try:
        about = machine.describe(folder) if options.out else None
        with Load() as load:
            for row in rows(load):
                if options.only in row.name:
                    print(f"{row.name} ...", file=sys.stderr, end="\r", flush=True)
                    try:
                        results.append(row.measure(folder / "row", options.rounds, options.scale))
                    finally:
                        while _servers:
                            _servers.pop().close()
                    shutil.rmtree(folder / "row", ignore_errors=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if about is not None:
        settings = {"rounds": options.rounds, "scale": options.scale}
        save(options.out, "http", about, time.monotonic() - started, settings, results)
    print_table(results, "the HTTP door against the same work without it")
    return 0


if __name__ == "__main__":
    sys.exit(main())
