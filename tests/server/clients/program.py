"""Clients that are programs of another language. They read a command a line, and answer in lines.

    create BOOTSTRAP TOPIC PARTITIONS [KEY=VALUE...]
    write BOOTSTRAP TOPIC CODEC ACKS IDEMPOTENT RECORD...   RECORD is PARTITION:TIMESTAMP:KEY:VALUE:HEADERS
    read BOOTSTRAP TOPIC COUNT COMMITTED                    answered by PARTITION:OFFSET:TIMESTAMP:KEY:VALUE:HEADERS
    consume BOOTSTRAP GROUP TOPIC COUNT                     the same
    time BOOTSTRAP TOPIC PARTITION TIMESTAMP                an offset
    lag BOOTSTRAP GROUP TOPIC                               PARTITION:LAG
    trim BOOTSTRAP TOPIC PARTITION OFFSET
    delete BOOTSTRAP TOPIC
    delete_group BOOTSTRAP GROUP

Bytes are `driver.text_of`, HEADERS are ``NAME;BYTES,...``. An answer ends with ``.``, or with ``! `` and an error. With
``member BOOTSTRAP GROUP TOPIC`` as its arguments, a program is a member of a group until it is killed.
"""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Sequence
from typing import ClassVar

from server.clients.driver import WAIT_S, Driver, Got, Header, Sent, bytes_of, text_of


class Program:
    """One that runs. It is killed where an answer takes longer than ``wait_s``."""

    def __init__(self, command: Sequence[str], wait_s: float = 2 * WAIT_S) -> None:
        self._command, self._wait_s = command, wait_s
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def ask(self, *words: object) -> list[str]:
        """Return the lines of an answer."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        too_late = threading.Timer(self._wait_s, process.kill)
        too_late.start()
        try:
            process.stdin.write(" ".join(map(str, words)) + "\n")
            process.stdin.flush()
            lines = []
            for line in process.stdout:
                if line.startswith("!"):
                    raise AssertionError(line.removeprefix("! ").strip())
                if line == ".\n":
                    return lines
                lines.append(line.rstrip("\n"))
            raise AssertionError(f"{self._command[0]} ended at {words[0]}")
        finally:
            too_late.cancel()
            too_late.join()

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.communicate()


class ProgramDriver(Driver):
    """Driver of a client that runs in such a program."""

    program: ClassVar[Program | None] = None
    """It serves all tests of a process."""

    @classmethod
    def command(cls) -> list[str]:
        """Return the command that starts the program."""
        raise NotImplementedError

    def _ask(self, name: str, *words: object) -> list[str]:
        assert self.program is not None
        return self.program.ask(name, self.bootstrap, *words)

    @classmethod
    def start(cls) -> None:
        """Start the program before all tests. Raises `Missing` if it is not available."""
        cls.program = Program(cls.command())

    @classmethod
    def stop(cls) -> None:
        """End the program after all tests."""
        if cls.program is not None:
            cls.program.close()
            cls.program = None

    def create(self, topic: str, partitions: int, config: dict[str, str]) -> None:
        self._ask("create", topic, partitions, *(f"{key}={value}" for key, value in config.items()))

    def write(
        self, topic: str, records: Sequence[Sent], *, codec: str = "none", acks: str = "all", idempotent: bool = False
    ) -> list[tuple[int, int]]:
        words = [
            f"{one.partition}:{one.timestamp}:{text_of(one.key)}:{text_of(one.value)}:{_told(one.headers)}"
            for one in records
        ]
        answers = self._ask("write", topic, codec, acks, int(idempotent), *words)
        return [(int(partition), int(offset)) for partition, offset in (line.split(":") for line in answers)]

    def read(self, topic: str, count: int, *, committed: bool = False) -> list[Got]:
        return [_got(line) for line in self._ask("read", topic, count, int(committed))]

    def consume(self, group: str, topic: str, count: int) -> list[Got]:
        return [_got(line) for line in self._ask("consume", group, topic, count)]

    def member(self, group: str, topic: str) -> list[str]:
        return [*self.command(), "member", self.bootstrap, group, topic]

    def at_time(self, topic: str, partition: int, timestamp: int) -> int:
        (answer,) = self._ask("time", topic, partition, timestamp)
        return int(answer)

    def lag(self, group: str, topic: str) -> dict[int, int]:
        answers = (line.split(":") for line in self._ask("lag", group, topic))
        return {int(partition): int(lag) for partition, lag in answers}

    def trim(self, topic: str, partition: int, before_offset: int) -> None:
        self._ask("trim", topic, partition, before_offset)

    def delete(self, topic: str) -> None:
        self._ask("delete", topic)

    def delete_group(self, group: str) -> None:
        self._ask("delete_group", group)


def _told(headers: Sequence[Header]) -> str:
    return ",".join(f"{name};{text_of(value)}" for name, value in headers)


def _got(line: str) -> Got:
    partition, offset, timestamp, key, value, headers = line.split(":")
    pairs = (header.split(";") for header in headers.split(",") if header)
    return Got(
        int(partition), int(offset), bytes_of(key), bytes_of(value), int(timestamp),
        tuple((name, bytes_of(text)) for name, text in pairs),
    )  # fmt: skip
