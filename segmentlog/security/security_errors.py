"""Errors of security settings and of authentication. None of them contains a password or a key."""

from __future__ import annotations

from segmentlog.errors import SegmentlogError


class SecurityFileError(SegmentlogError):
    """A file of users, ACLs, keys or certificates cannot be used."""

    def __init__(self, path: str, why: str, line: int | None = None) -> None:
        super().__init__(path, why, line)
        self.path, self.why, self.line = path, why, line

    def __str__(self) -> str:
        place = self.path if self.line is None else f"{self.path}, line {self.line}"
        return f"{place}: {self.why}"


class UnsafeListening(SegmentlogError):
    """Other machines can reach the address, and nothing protects it."""

    def __init__(self, host: str, why: str, option: str = "listen") -> None:
        super().__init__(host, why, option)
        self.host, self.why, self.option = host, why, option

    def __str__(self) -> str:
        return f"--{self.option} {self.host}: {self.why}"


class InvalidUser(SegmentlogError, ValueError):
    """A user name or password that clients may encode differently, or an invalid number of iterations."""


class AuthenticationFailed(Exception):
    """A client failed to authenticate. The message is sent to the client, and contains nothing that helps guessing."""
