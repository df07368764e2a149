"""Access rules, their filters, and the decisions that follow from them, as in Kafka.

A rule is about one operation. Deny takes precedence over allow; operations without a matching rule are denied. A rule
that allows read, write, delete or alter also allows describe, and one that allows alter-configs also allows
describe-configs. A rule that denies has no such effect.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import IntEnum
from typing import Final, NamedTuple

from segmentlog.security.principals import Operation, Principal, ResourceType

ANYTHING: Final = "*"
"""Name of all resources of a type; address of all hosts."""
ANYBODY: Final = "User:*"


class Permission(IntEnum):
    """Effect of a rule."""

    DENY = 2
    ALLOW = 3


class Pattern(IntEnum):
    """How a rule's name matches resources."""

    LITERAL = 3
    PREFIXED = 4


class Rule(NamedTuple):
    """One rule: whether a principal may perform an operation on resources, and from which address."""

    principal: str
    """``User:name``, or `ANYBODY`."""
    permission: Permission
    operation: Operation
    resource_type: ResourceType
    name: str
    pattern: Pattern = Pattern.LITERAL
    host: str = ANYTHING
    """An address, or `ANYTHING`."""


SUPPORTED: Final = {
    ResourceType.TOPIC: (
        Operation.READ, Operation.WRITE, Operation.CREATE, Operation.DELETE, Operation.ALTER, Operation.DESCRIBE,
        Operation.DESCRIBE_CONFIGS, Operation.ALTER_CONFIGS,
    ),
    ResourceType.GROUP: (
        Operation.READ, Operation.DELETE, Operation.DESCRIBE, Operation.DESCRIBE_CONFIGS, Operation.ALTER_CONFIGS,
    ),
    ResourceType.CLUSTER: (
        Operation.CREATE, Operation.ALTER, Operation.DESCRIBE, Operation.CLUSTER_ACTION, Operation.DESCRIBE_CONFIGS,
        Operation.ALTER_CONFIGS, Operation.IDEMPOTENT_WRITE,
    ),
    ResourceType.TRANSACTIONAL_ID: (Operation.WRITE, Operation.DESCRIBE),
}  # fmt: skip
"""Operations that each type of resource supports."""

_IMPLIED_BY: Final = {
    Operation.DESCRIBE: frozenset((Operation.READ, Operation.WRITE, Operation.DELETE, Operation.ALTER)),
    Operation.DESCRIBE_CONFIGS: frozenset((Operation.ALTER_CONFIGS,)),
}


def applies_to_operation(rule: Rule, operation: Operation) -> bool:
    """Return whether a rule applies to the operation: it names the operation or ALL, or allows one that implies it."""
    return rule.operation in (operation, Operation.ALL) or (
        rule.permission is Permission.ALLOW and rule.operation in _IMPLIED_BY.get(operation, ())
    )


def applies_to_client(rule: Rule, principal: Principal, host: str) -> bool:
    """Return whether a rule applies to the principal and the address."""
    return rule.principal in (ANYBODY, str(principal)) and rule.host in (ANYTHING, host)


class RuleIndex:
    """Rules for one type of resource, indexed by resource name. Immutable."""

    def __init__(self, rules: Iterable[Rule]) -> None:
        self._literal: dict[str, list[Rule]] = {}
        self._prefixed: dict[str, list[Rule]] = {}
        for rule in rules:
            by_name = self._prefixed if rule.pattern is Pattern.PREFIXED else self._literal
            by_name.setdefault(rule.name, []).append(rule)
        self._lengths = sorted({len(prefix) for prefix in self._prefixed})

    def _rules_for_name(self, name: str) -> Iterator[Rule]:
        yield from self._literal.get(name, ())
        if name != ANYTHING:
            yield from self._literal.get(ANYTHING, ())
        for length in self._lengths:
            if length > len(name):
                break
            yield from self._prefixed.get(name[:length], ())

    def allow(self, principal: Principal, host: str, operation: Operation, name: str) -> bool:
        """Return whether the rules allow the operation on the named resource."""
        is_allowed = False
        for rule in self._rules_for_name(name):
            if applies_to_client(rule, principal, host) and applies_to_operation(rule, operation):
                if rule.permission is Permission.DENY:
                    return False
                is_allowed = True
        return is_allowed

    def allow_any(self, principal: Principal, host: str, operation: Operation) -> bool:
        """Return whether the rules allow the operation on at least one resource name.

        They do if a rule allows names that no single rule denies completely.
        """
        allowed: list[Rule] = []
        denied_names, denied_prefixes = set(), set()
        for rule in self._all():
            if applies_to_client(rule, principal, host) and applies_to_operation(rule, operation):
                if rule.permission is Permission.ALLOW:
                    allowed.append(rule)
                elif rule.pattern is Pattern.PREFIXED:
                    denied_prefixes.add(rule.name)
                elif rule.name == ANYTHING:
                    return False
                else:
                    denied_names.add(rule.name)
        return any(
            not any(_common_prefix(rule).startswith(prefix) for prefix in denied_prefixes)
            and not (rule.pattern is Pattern.LITERAL and rule.name in denied_names)
            for rule in allowed
        )

    def _all(self) -> Iterator[Rule]:
        for by_name in (self._literal, self._prefixed):
            for rules in by_name.values():
                yield from rules


def _common_prefix(rule: Rule) -> str:
    """Return the longest common prefix of the resource names to which a rule applies."""
    return "" if rule.pattern is Pattern.LITERAL and rule.name == ANYTHING else rule.name


# ------------------------------------------------------------ filters

_ANY: Final = 1
_MATCH: Final = 2
_PATTERNS: Final = frozenset((_ANY, _MATCH, *Pattern))


class RuleFilter(NamedTuple):
    """Filter of rules. A number of 1 matches every number, and None matches every text."""

    resource_type: int
    name: str | None
    pattern: int
    """A `Pattern`; or 1: every pattern; or 2: every pattern that matches a resource of this name."""
    principal: str | None
    host: str | None
    operation: int
    permission: int

    def is_known(self) -> bool:
        """Return whether this version supports all values of the filter."""
        return (
            self.resource_type in (_ANY, *ResourceType)
            and self.pattern in _PATTERNS
            and self.operation in (_ANY, *Operation)
            and self.permission in (_ANY, *Permission)
        )

    def matches(self, rule: Rule) -> bool:
        """Return whether the filter matches a rule."""
        return (
            self.resource_type in (_ANY, rule.resource_type)
            and self._matches_name(rule)
            and self.principal in (None, rule.principal)
            and self.host in (None, rule.host)
            and self.operation in (_ANY, rule.operation)
            and self.permission in (_ANY, rule.permission)
        )

    def _matches_name(self, rule: Rule) -> bool:
        if self.pattern not in (_ANY, _MATCH, rule.pattern):
            return False
        if self.name is None:
            return True
        if self.pattern != _MATCH:
            return self.name == rule.name
        if rule.pattern is Pattern.PREFIXED:
            return self.name.startswith(rule.name)
        return rule.name in (self.name, ANYTHING)
