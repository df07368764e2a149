"""Record a client's messages: ``python -m tools.codec.capture FILE PROXY_PORT BROKER_PORT COMMAND...``.

The broker must advertise the proxy's port. While the command runs, the proxy forwards requests and responses. FILE gets
the shortest and the longest message of each kind and version, a line each: request or response, API key, version, and
the bytes after the size in hexadecimal. Responses that contain folders of the broker are left out.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Final

from segmentlog.server.codec.apis import APIS

_API_VERSIONS: Final = 18
_NAMING_FOLDERS: Final = (32, 35)
_BYTES_MAX: Final = 3000

_Kind = tuple[str, int, int]


class Capture:
    """Shortest and longest message of each kind that the codec supports. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[_Kind, tuple[bytes, bytes]] = {}

    def add(self, kind: _Kind, frame: bytes) -> None:
        """Store a message if it is the shortest or the longest of its kind."""
        if kind[1] not in APIS or len(frame) > _BYTES_MAX or (kind[0] == "response" and kind[1] in _NAMING_FOLDERS):
            return
        with self._lock:
            shortest, longest = self._kept.get(kind, (frame, frame))
            self._kept[kind] = (min(shortest, frame, key=len), max(longest, frame, key=len))

    def lines(self) -> list[str]:
        """Return a line for each stored message, in the order of their kinds."""
        return [
            f"{word} {key} {version} {frame.hex()}"
            for (word, key, version), kept in sorted(self._kept.items(), key=lambda item: (item[0][1:], item[0][0]))
            for frame in dict.fromkeys(kept)
        ]


def serve(capture: Capture, proxy_port: int, broker_port: int) -> None:
    """Accept connections, and forward their messages, until the process ends."""
    with socket.create_server(("127.0.0.1", proxy_port)) as server:
        while True:
            client, _ = server.accept()
            broker = socket.create_connection(("127.0.0.1", broker_port))
            waiting: dict[int, tuple[int, int]] = {}
            for source, sink, word in ((client, broker, "request"), (broker, client, "response")):
                arguments = (capture, source, sink, word, waiting)
                threading.Thread(target=_pump, args=arguments, daemon=True).start()


def _pump(
    capture: Capture, source: socket.socket, sink: socket.socket, word: str, waiting: dict[int, tuple[int, int]]
) -> None:
    with source.makefile("rb") as stream:
        try:
            while len(size := stream.read(4)) == 4:
                frame = stream.read(int.from_bytes(size, "big"))
                if word == "request":
                    key, version = int.from_bytes(frame[:2], "big"), int.from_bytes(frame[2:4], "big")
                    waiting[int.from_bytes(frame[4:8], "big")] = key, version
                else:
                    key, version = waiting.pop(int.from_bytes(frame[:4], "big"))
                    if key == _API_VERSIONS and frame[4:6] == b"\x00\x23":
                        version = 0  # the broker does not support the version of the request
                capture.add((word, key, version), frame)
                sink.sendall(size + frame)
        except OSError:
            pass
    try:
        sink.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass


def main() -> None:
    """Run the command, then write the file, and exit with the status of the command."""
    path, proxy_port, broker_port, *command = sys.argv[1:]
    capture = Capture()
    threading.Thread(target=serve, args=(capture, int(proxy_port), int(broker_port)), daemon=True).start()
    status = subprocess.run(command, check=False).returncode
    Path(path).write_text("\n".join(capture.lines()) + "\n")
    sys.exit(status)


if __name__ == "__main__":
    main()
