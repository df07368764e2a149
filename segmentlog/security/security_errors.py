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
    """The number of iterations is invalid, or clients may encode the user name or password differently."""


class AuthenticationFailed(Exception):
    """A client failed to authenticate. The client receives the message, which does not help to guess passwords."""
