"""What keeps a server from starting, or from letting somebody in. None of it ever holds a password or a key."""

from __future__ import annotations

from segmentlog.errors import SegmentlogError


class SecurityFileError(SegmentlogError):
    """A file of users, rules, keys or certificates that cannot be used as it is."""

    def __init__(self, path: str, why: str, line: int | None = None) -> None:
        super().__init__(path, why, line)
        self.path, self.why, self.line = path, why, line

    def __str__(self) -> str:
        place = self.path if self.line is None else f"{self.path}, line {self.line}"
        return f"{place}: {self.why}"


class UnsafeListening(SegmentlogError):
    """An address that others can reach, with nothing that keeps them out."""

    def __init__(self, host: str, why: str, option: str = "listen") -> None:
        super().__init__(host, why, option)
        self.host, self.why, self.option = host, why, option

    def __str__(self) -> str:
        return f"--{self.option} {self.host}: {self.why}"


class InvalidUser(SegmentlogError, ValueError):
    """A name or a password that not all clients would send alike, or a count that none would take."""


class AuthenticationFailed(Exception):
    """Somebody has not proved who he is. The message is what a client is told: nothing that helps guessing."""
