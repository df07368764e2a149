"""Errors of security files, unsafe addresses and authentication. No message contains a password or a key."""

from __future__ import annotations

from segmentlog.errors import SegmentlogError


class SecurityFileError(SegmentlogError):
    """A file of users, rules, keys or certificates cannot be used."""

    def __init__(self, path: str, why: str, line: int | None = None) -> None:
        super().__init__(path, why, line)
        self.path, self.why, self.line = path, why, line

    def __str__(self) -> str:
        place = self.path if self.line is None else f"{self.path}, line {self.line}"
        return f"{place}: {self.why}"


class UnsafeListening(SegmentlogError):
    """A server must not listen on an address that others can reach without protection."""

    def __init__(self, host: str, why: str, option: str = "listen") -> None:
        super().__init__(host, why, option)
        self.host, self.why, self.option = host, why, option

    def __str__(self) -> str:
        return f"--{self.option} {self.host}: {self.why}"


class InvalidUser(SegmentlogError, ValueError):
    """A name or password that clients would send differently, or an iteration count that they do not accept."""


class AuthenticationFailed(Exception):
    """A client has failed to authenticate. The message is sent to the client, and contains nothing that helps
    guessing."""
