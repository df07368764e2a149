"""Hosts on a bridge: network namespaces, whose links can be cut in one direction.

    with Network("m1", "m2", "clients") as network:
        subprocess.Popen([*network.command("m1"), "program"])
        network.cut("m1", "m2")     # packets from m1 to m2 are lost silently; those from m2 to m1 arrive
        network.heal()

Needs Linux, ``ip`` (Debian's package ``iproute2``), and either root or the permission to create user namespaces: then
programs on the hosts see themselves as root, and the test is an ordinary user.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Final, Self

_LOST_ADDRESS: Final = "02:00:00:00:00:ff"
"""A hardware address that no host has. A neighbour entry with it loses all packets, and the sender gets no error.

*Rejected:* netfilter and tc, whose kernel modules many machines lack; a blackhole route, which reports an error to the
sender.
"""
_LISTENS: Final = "0A"


class NetworkUnavailable(Exception):
    """This machine cannot create the hosts. The message contains what is missing."""


@cache
def missing_for_network() -> str:
    """Return what this machine lacks for a `Network`; empty if nothing."""
    for program in ("ip", "unshare", "nsenter"):
        if shutil.which(program, path=_PATH) is None:
            return f"{program} is not installed"
    try:
        with Network("a"):
            return ""
    except NetworkUnavailable as error:
        return str(error)


_PATH: Final = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin"))
_ENVIRONMENT: Final = {**os.environ, "PATH": _PATH}


class Network:
    """Hosts with addresses in 10.77.0.0/24, in the order of their names from 10.77.0.1 on. Not thread-safe."""

    def __init__(self, *names: str) -> None:
        self._numbers = {name: number for number, name in enumerate(names, 1)}
        self._holders: dict[str, subprocess.Popen[str]] = {}
        self.cuts: set[tuple[str, str]] = set()
        """Pairs (from, to) whose packets are lost."""

    def __enter__(self) -> Self:
        try:
            self._create()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _create(self) -> None:
        user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
        self._hold("", ["unshare", *user, "--net"])
        self._ip("", "link add bridge type bridge")
        self._ip("", "link set bridge up")
        for name, number in self._numbers.items():
            self._hold(name, [*self.command(""), "unshare", "--net"])
            pid = self._holders[name].pid
            self._ip("", f"link add port{number} type veth peer name uplink netns {pid}")
            self._ip("", f"link set port{number} master bridge up")
            for line in (
                "link set lo up", f"link set uplink address {_hardware_address(number)}",
                f"address add {self.address(name)}/24 dev uplink", "link set uplink up",
            ):  # fmt: skip
                self._ip(name, line)
        self.heal()

    def _hold(self, name: str, command: list[str]) -> None:
        """Start a process that keeps a namespace until its standard input is closed."""
        holder = self._holders[name] = subprocess.Popen(
            [*command, "sh", "-c", "echo ready; exec cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, env=_ENVIRONMENT,
        )  # fmt: skip
        assert holder.stdout is not None
        assert holder.stderr is not None
        if holder.stdout.readline() != "ready\n":
            raise NetworkUnavailable(f"{' '.join(command)}: {holder.stderr.read().strip()}")

    def _ip(self, name: str, arguments: str) -> None:
        command = [*self.command(name), "ip", *arguments.split()]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=_ENVIRONMENT)
        if done.returncode:
            raise NetworkUnavailable(f"ip {arguments}: {done.stderr.strip()}")

    def command(self, name: str) -> list[str]:
        """Return the beginning of a command that runs a program on a host. The program keeps the process id."""
        user = [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]
        return ["nsenter", "--target", str(self._holders[name].pid), *user, "--net", "--"]

    def address(self, name: str) -> str:
        """Return the address of a host."""
        return f"10.77.0.{self._numbers[name]}"

    def listens(self, name: str, port: int) -> bool:
        """Return whether a process on a host listens at a port."""
        lines = Path(f"/proc/{self._holders[name].pid}/net/tcp").read_text().splitlines()[1:]
        fields = [line.split() for line in lines]
        return any(int(one[1].rpartition(":")[2], 16) == port and one[3] == _LISTENS for one in fields)

    def cut(self, source: str, target: str) -> None:
        """Lose all packets from one host to another, in this direction only."""
        self._point(source, target, _LOST_ADDRESS)
        self.cuts.add((source, target))

    def heal(self) -> None:
        """End all cuts."""
        for source in self._numbers:
            for target, number in self._numbers.items():
                if source != target:
                    self._point(source, target, _hardware_address(number))
        self.cuts.clear()

    def _point(self, source: str, target: str, hardware_address: str) -> None:
        self._ip(source, f"neighbour replace {self.address(target)} lladdr {hardware_address} dev uplink nud permanent")

    def close(self) -> None:
        """Remove the hosts. Processes on them must have ended. Idempotent."""
        for holder in self._holders.values():
            with contextlib.suppress(BrokenPipeError):
                holder.communicate()
        self._holders.clear()


def _hardware_address(number: int) -> str:
    return f"02:00:00:00:00:{number:02x}"
