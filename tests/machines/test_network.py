"""Hosts whose links are cut in one direction."""

from __future__ import annotations

import subprocess
import sys

import pytest
from machines.network import Network, missing_for_network

_RECEIVE = """
import socket
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sock.bind(("0.0.0.0", 7000))
print("ready", flush=True)
while (text := sock.recv(100).decode()) != "end":
    print(text, flush=True)
"""
_SEND = """
import socket, sys
for text in sys.argv[2:]:
    socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(text.encode(), (sys.argv[1], 7000))
"""


@pytest.mark.long
@pytest.mark.parametrize("cut", [None, ("a", "b"), ("b", "a")])
def test_a_cut_loses_packets_in_one_direction(cut: tuple[str, str] | None) -> None:
    """The sender gets no error, the other direction works, and so do both after `heal`."""
    if missing := missing_for_network():
        pytest.skip(missing)
    received = {}
    with Network("a", "b") as network:
        receivers = {
            name: subprocess.Popen(
                [*network.command(name), sys.executable, "-c", _RECEIVE], stdout=subprocess.PIPE, text=True
            )
            for name in ("a", "b")
        }
        for receiver in receivers.values():
            assert receiver.stdout is not None
            assert receiver.stdout.readline() == "ready\n"
        if cut is not None:
            network.cut(*cut)
        for texts in (["during"], ["after", "end"]):
            for source, target in (("a", "b"), ("b", "a")):
                command = [*network.command(source), sys.executable, "-c", _SEND, network.address(target), *texts]
                subprocess.run(command, check=True)
            network.heal()
        for name, receiver in receivers.items():
            received[name] = receiver.communicate()[0].split()
    both = ["during", "after"]
    assert received == {name: ["after"] if cut is not None and cut[1] == name else both for name in ("a", "b")}
