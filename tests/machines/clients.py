"""The nursery of the clients of librdkafka, on a host of their own."""

from __future__ import annotations

import signal
from typing import Any

from delivery_process import Process, serve
from ecosystem.protocol.client_jobs import ClientProcess


def make(order: dict[str, Any]) -> Process:
    """Return the client that was ordered."""
    client = ClientProcess(order)
    signal.signal(signal.SIGUSR2, client.go_on)
    return client


if __name__ == "__main__":
    serve(make)
