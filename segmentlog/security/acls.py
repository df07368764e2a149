"""Authorization: `Authorizer` applies the rules of a file, `OpenAuthorizer` allows everything."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from segmentlog.security.acl_file import Acls, normal_host, parse_acls, with_rules, without_rules
from segmentlog.security.acl_rules import SUPPORTED, Rule, RuleFilter, RuleIndex
from segmentlog.security.file_replacement import change_file
from segmentlog.security.principals import Operation, Principal, ResourceType
from segmentlog.security.security_errors import SecurityFileError
from segmentlog.security.watched_file import LOOK_EVERY_S, WatchedFile, reloads
from segmentlog.storage.fs import FileSystem

_KNOWN_MAX: Final = 20_000
"""Most cached decisions. Beyond that, all are dropped: clients may ask for any names."""


class _CachedDecisions:
    """The rules of one version of the file, with cached decisions."""

    def __init__(self, acls: Acls, super_users: frozenset[str]) -> None:
        self.acls = acls
        self.known: dict[tuple[Principal, str, Operation, ResourceType, str | None], bool] = {}
        self._super_users = acls.super_users | super_users
        self._indexes = {
            kind: RuleIndex(rule for rule in acls.rules if rule.resource_type is kind) for kind in ResourceType
        }

    def decide(
        self, principal: Principal, host: str, operation: Operation, resource_type: ResourceType, name: str | None
    ) -> bool:
        """Return whether the operation is allowed; ``name`` None: on any resource."""
        if str(principal) in self._super_users:
            is_allowed = True
        else:
            index = self._indexes[resource_type]
            normal = normal_host(host) or host
            if name is None:
                is_allowed = index.allow_any(principal, normal, operation)
            else:
                is_allowed = index.allow(principal, normal, operation, name)
        if len(self.known) >= _KNOWN_MAX:
            self.known.clear()
        self.known[principal, host, operation, resource_type, name] = is_allowed
        return is_allowed


def _changes(before: _CachedDecisions, now: _CachedDecisions) -> str:
    _warn(now)
    return now.acls.changes_from(before.acls)


def _warn(decisions: _CachedDecisions) -> None:
    for doubt in decisions.acls.doubts:
        reloads.warning("%s", doubt)


class Authorizer:
    """Authorizes by the rules of a file, which are at most half a second old. Thread-safe.

    Creation raises `SecurityFileError` and OSError for an invalid file. If the file is invalid or missing later, the
    previous rules stay in force, and an error is logged.
    """

    def __init__(
        self, path: str, *, super_users: Iterable[str] = (), fs: FileSystem | None = None,
        look_every_s: float = LOOK_EVERY_S,
    ) -> None:  # fmt: skip
        self.path = path
        self._fs = fs or FileSystem()
        more = frozenset(super_users)
        try:
            self._file = WatchedFile(
                path, lambda data: _CachedDecisions(parse_acls(path, data), more), _changes, fs=self._fs,
                look_every_s=look_every_s,
            )  # fmt: skip
            _warn(self._file.current())
        except FileNotFoundError:
            raise SecurityFileError(path, "there is no such file; an empty file denies everything") from None

    def allows(
        self, principal: Principal, host: str, operation: Operation, resource_type: ResourceType, name: str
    ) -> bool:
        """Return whether a principal at a host may perform the operation on the resource of this name."""
        decisions = self._file.current()
        known = decisions.known.get((principal, host, operation, resource_type, name))
        return decisions.decide(principal, host, operation, resource_type, name) if known is None else known

    def allows_any(self, principal: Principal, host: str, operation: Operation, resource_type: ResourceType) -> bool:
        """Return whether a principal at a host may perform the operation on any resource of this type."""
        decisions = self._file.current()
        known = decisions.known.get((principal, host, operation, resource_type, None))
        return decisions.decide(principal, host, operation, resource_type, None) if known is None else known

    def authorized_operations(self, principal: Principal, host: str, resource_type: ResourceType, name: str) -> int:
        """Return the allowed operations on a resource as a bit set, as Metadata and Describe responses contain it."""
        return sum(
            1 << operation
            for operation in SUPPORTED[resource_type]
            if self.allows(principal, host, operation, resource_type, name)
        )

    # ------------------------------------------------------------ reading and changing rules

    @property
    def is_open(self) -> bool:
        """Return whether everything is allowed, as no file of rules is in use."""
        return False

    def refresh(self) -> None:
        """Read the file if it has changed, as a decision does; for a server without requests."""
        self._file.current()

    def reload(self) -> None:
        """Read the file now if it has changed, instead of within half a second."""
        self._file.reload()

    def rules(self, wanted: RuleFilter) -> list[Rule]:
        """Return the rules that match a filter, without duplicates, as they are on disk now."""
        return list(dict.fromkeys(filter(wanted.matches, self._file.reload().acls.rules)))

    def add(self, rules: Iterable[Rule]) -> None:
        """Add rules, durably; this process applies them at once. Raises `SecurityFileError` and OSError."""
        self._change(lambda before: (with_rules(self.path, before, rules), None))

    def remove(self, unwanted: Iterable[RuleFilter]) -> list[Rule]:
        """Remove the rules that match any of the filters, durably, and return them. Raises as `add` does."""
        filters = list(unwanted)

        def change(before: bytes) -> tuple[bytes, list[Rule]]:
            return without_rules(self.path, before, lambda rule: any(one.matches(rule) for one in filters))

        removed: list[Rule] = self._change(change)
        return removed

    def _change(self, change: Callable[[bytes], tuple[bytes, list[Rule] | None]]) -> list[Rule]:
        def change_what_is_there(before: bytes | None) -> tuple[bytes | None, list[Rule]]:
            if before is None:
                raise SecurityFileError(
                    self.path,
                    "the file was deleted; its rules stay in force until the server is restarted; restore it first",
                )
            after, result = change(before)
            return after, result or []

        result = change_file(self.path, change_what_is_there, fs=self._fs)
        self._file.reload()
        return result


class OpenAuthorizer(Authorizer):
    """The authorizer without a file of rules: it allows everything."""

    def __init__(self) -> None:
        """Create an authorizer without rules."""

    def allows(
        self, principal: Principal, host: str, operation: Operation, resource_type: ResourceType, name: str
    ) -> bool:
        return True

    def allows_any(self, principal: Principal, host: str, operation: Operation, resource_type: ResourceType) -> bool:
        return True

    @property
    def is_open(self) -> bool:
        return True

    def refresh(self) -> None:
        """Do nothing, as no file of rules is in use."""

    def reload(self) -> None:
        """Do nothing, as no file of rules is in use."""
