"""Authorize operations: `Authorizer` by the rules of an ACL file, `OpenAuthorizer` without a file."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from segmentlog.security.acl_file import Acls, normal_host, parse_acls, with_rules, without_rules
from segmentlog.security.acl_rules import SUPPORTED, Rule, RuleFilter, RuleIndex
from segmentlog.security.file_replacement import change_file
from segmentlog.security.principals import Operation, Principal, ResourceType
from segmentlog.security.security_errors import SecurityFileError
from segmentlog.security.watched_file import CHECK_INTERVAL_S, WatchedFile, reloads
from segmentlog.storage.fs import FileSystem

_CACHED_MAX: Final = 20_000
"""Maximum number of cached decisions: then the cache is cleared, because clients may use any number of names."""


class _CachedDecisions:
    """One state of the ACL file, and a cache of decisions that follow from it."""

    def __init__(self, acls: Acls, super_users: frozenset[str]) -> None:
        self.acls = acls
        self.cached: dict[tuple[Principal, str, Operation, ResourceType, str | None], bool] = {}
        self._super_users = acls.super_users | super_users
        self._indexes = {
            kind: RuleIndex(rule for rule in acls.rules if rule.resource_type is kind) for kind in ResourceType
        }

    def decide(
        self, principal: Principal, host: str, operation: Operation, resource_type: ResourceType, name: str | None
    ) -> bool:
        """Return whether the operation is allowed, and cache this; with ``name`` None, on any resource of the type."""
        if str(principal) in self._super_users:
            is_allowed = True
        else:
            index = self._indexes[resource_type]
            normal = normal_host(host) or host
            if name is None:
                is_allowed = index.allow_any(principal, normal, operation)
            else:
                is_allowed = index.allow(principal, normal, operation, name)
        if len(self.cached) >= _CACHED_MAX:
            self.cached.clear()
        self.cached[principal, host, operation, resource_type, name] = is_allowed
        return is_allowed


def _changes(before: _CachedDecisions, now: _CachedDecisions) -> str:
    _log_warnings(now)
    return now.acls.changes_from(before.acls)


def _log_warnings(decisions: _CachedDecisions) -> None:
    for warning in decisions.acls.warnings:
        reloads.warning("%s", warning)


class Authorizer:
    """Authorizes by the rules of an ACL file, as of at most half a second ago. Thread-safe.

    The constructor raises `SecurityFileError` and OSError for an unusable file. If the file becomes unusable later, the
    previous rules stay in effect, and an error is logged.
    """

    def __init__(
        self, path: str, *, super_users: Iterable[str] = (), fs: FileSystem | None = None,
        check_interval_s: float = CHECK_INTERVAL_S,
    ) -> None:  # fmt: skip
        self.path = path
        self._fs = fs or FileSystem()
        more = frozenset(super_users)
        try:
            self._file = WatchedFile(
                path, lambda data: _CachedDecisions(parse_acls(path, data), more), _changes, fs=self._fs,
                check_interval_s=check_interval_s,
            )  # fmt: skip
            _log_warnings(self._file.current())
        except FileNotFoundError:
            raise SecurityFileError(path, "the file does not exist; an empty file denies everything") from None

    def allows(
        self, principal: Principal, host: str, operation: Operation, resource_type: ResourceType, name: str
    ) -> bool:
        """Return whether the principal may perform the operation on the named resource from this address."""
        decisions = self._file.current()
        cached = decisions.cached.get((principal, host, operation, resource_type, name))
        return decisions.decide(principal, host, operation, resource_type, name) if cached is None else cached

    def allows_any(self, principal: Principal, host: str, operation: Operation, resource_type: ResourceType) -> bool:
        """Return whether the principal may perform the operation on any resource of this type that might exist."""
        decisions = self._file.current()
        cached = decisions.cached.get((principal, host, operation, resource_type, None))
        return decisions.decide(principal, host, operation, resource_type, None) if cached is None else cached

    def authorized_operations(self, principal: Principal, host: str, resource_type: ResourceType, name: str) -> int:
        """Return the operations that the principal may perform on a resource, as the bit field of Kafka's responses."""
        return sum(
            1 << operation
            for operation in SUPPORTED[resource_type]
            if self.allows(principal, host, operation, resource_type, name)
        )

    # ------------------------------------------------------------ rules

    @property
    def is_open(self) -> bool:
        """Whether there is no ACL file, so that everything is allowed."""
        return False

    def refresh(self) -> None:
        """Reload the file if it changed, as each decision does. A server without clients calls this to log changes."""
        self._file.current()

    def reload(self) -> None:
        """Reload the file now, instead of within half a second."""
        self._file.reload()

    def rules(self, rule_filter: RuleFilter) -> list[Rule]:
        """Return the rules that match a filter, without duplicates, from the file's present contents."""
        return list(dict.fromkeys(filter(rule_filter.matches, self._file.reload().acls.rules)))

    def add(self, rules: Iterable[Rule]) -> None:
        """Add rules durably; they apply in this process at once. Raise `SecurityFileError` and OSError."""
        self._change(lambda before: (with_rules(self.path, before, rules), None))

    def remove(self, unwanted: Iterable[RuleFilter]) -> list[Rule]:
        """Remove the rules that match any of the filters, durably, and return them. Raise the errors of `add`."""
        filters = list(unwanted)

        def change(before: bytes) -> tuple[bytes, list[Rule]]:
            return without_rules(self.path, before, lambda rule: any(one.matches(rule) for one in filters))

        removed: list[Rule] = self._change(change)
        return removed

    def _change(self, change: Callable[[bytes], tuple[bytes, list[Rule] | None]]) -> list[Rule]:
        def change_existing(before: bytes | None) -> tuple[bytes | None, list[Rule]]:
            if before is None:
                why = "the file was deleted, so its rules cannot be changed; they stay in effect"
                raise SecurityFileError(self.path, why)
            after, result = change(before)
            return after, result or []

        result = change_file(self.path, change_existing, fs=self._fs)
        self._file.reload()
        return result


class OpenAuthorizer(Authorizer):
    """Authorizer without an ACL file: every client may do everything."""

    def __init__(self) -> None:
        """Create it; it has no state."""

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
        """Do nothing, because there is no file to read."""

    def reload(self) -> None:
        """Do nothing, because there is no file to read."""
