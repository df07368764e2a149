"""A TCP relay that delivers bytes later, in place of a network: ``python -m bench.replication.delayed_link``."""

from __future__ import annotations

import queue
import socket
import sys
import threading
import time


def _relay(source: socket.socket, target: socket.socket, delay_s: float) -> None:
    due: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()

    def deliver() -> None:
        while True:
            at_s, data = due.get()
            left_s = at_s - time.perf_counter()
            if left_s > 0:
                time.sleep(left_s)
            target.sendall(data)

    threading.Thread(target=deliver, daemon=True).start()
    while data := source.recv(1 << 20):
        due.put((time.perf_counter() + delay_s, data))


def main() -> None:
    """Relay connections from PORT to TARGET_PORT, MICROSECONDS later in each direction."""
    port, target_port, delay_us = map(int, sys.argv[1:])
    with socket.create_server(("127.0.0.1", port)) as server:
        while True:
            near, _ = server.accept()
            far = socket.create_connection(("127.0.0.1", target_port))
            for sock in (near, far):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for source, target in ((near, far), (far, near)):
                threading.Thread(target=_relay, args=(source, target, delay_us / 1e6), daemon=True).start()


if __name__ == "__main__":
    main()
