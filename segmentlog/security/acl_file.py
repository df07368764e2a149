"""ACL file: access rules in a format for people, one rule a line.

    super User:admin                                                # may do everything, whatever the rules say
    allow User:ann   read,write   topic:clicks
    allow User:ann   read         group:*                           # all groups
    allow User:etl   all          topic:raw-*    from 10.0.0.7      # all topics with this prefix
    deny  User:*     delete       topic:raw-*
    allow User:etl   write        transactional-id:etl-1
    allow User:etl   describe     cluster
    allow "User:CN=Ann Lee,O=Acme"  read  "topic:clicks"

Operations: all read write create delete alter describe cluster-action describe-configs alter-configs idempotent-write.
A word with spaces or quotes, or with a ``#`` at its start, is written as a JSON string. After ``topic:``, a star at the
end of the name means a prefix; ``group=raw*`` means only the group whose name is ``raw*``. Text after ``#`` is a
comment. When a Kafka client adds or deletes rules, comments remain.

A malformed line makes the whole file invalid. A rule that is probably a mistake causes a warning, for example one for a
group name with a comma. A rule that can never apply also causes a warning: its topic name is not valid, or no client
can have its address. Kafka clients cannot add such a rule, but files of older servers contain some.
"""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from typing import Final, NamedTuple

from segmentlog.errors import InvalidTopicName
from segmentlog.format.file_names import MAX_NAME_LENGTH, check_topic_name
from segmentlog.security.acl_rules import ANYTHING, SUPPORTED, Pattern, Permission, Rule
from segmentlog.security.principals import CLUSTER_NAME, Operation, ResourceType
from segmentlog.security.security_errors import SecurityFileError

_WORD: Final = re.compile(
    r'\s*(?:(?P<comment>#.*)|(?P<quoted>"(?:[^"\\]|\\.)*")(?=\s|$)|(?P<plain>[^\s"#][^\s"]*)(?=\s|$)|$)'
)
_PLAIN: Final = re.compile(r'[^\s"#][^\s"]*')
_OPERATIONS: Final = {operation.name.lower().replace("_", "-"): operation for operation in Operation}
_TYPES: Final = {kind.name.lower().replace("_", "-"): kind for kind in ResourceType}
_PERMISSIONS: Final = {"allow": Permission.ALLOW, "deny": Permission.DENY}
_PRINCIPAL: Final = "User:"


class Acls(NamedTuple):
    """Parsed contents of an ACL file."""

    rules: tuple[Rule, ...]
    super_users: frozenset[str]
    warnings: tuple[str, ...] = ()
    """Warnings about rules that are valid but probably a mistake, each with its line."""

    def changes_from(self, before: Acls) -> str:
        """Return how many rules and super users there are now, and how many were added and removed since ``before``.

        The text contains no names.
        """
        rules, had = set(self.rules), set(before.rules)
        return (
            f"{len(self.rules):,} rules, {len(self.super_users):,} super users;"
            f" {len(rules - had):,} rules added, {len(had - rules):,} removed,"
            f" {len(self.super_users - before.super_users):,} super users added,"
            f" {len(before.super_users - self.super_users):,} removed"
        )


class _Malformed(ValueError):
    """A line is malformed; the message is the reason."""


class _Line(NamedTuple):
    rules: tuple[Rule, ...]
    super_users: tuple[str, ...]
    comment: str


def parse_acls(path: str, data: bytes) -> Acls:
    """Return the rules of a file. Raise `SecurityFileError` with the line and a remedy."""
    rules: list[Rule] = []
    super_users: list[str] = []
    warnings: list[str] = []
    for number, line in enumerate(_lines(path, data), 1):
        rules += line.rules
        super_users += line.super_users
        warnings += [f"{path}, line {number}: {warning}" for warning in _warnings(line)]
    return Acls(tuple(rules), frozenset(super_users), tuple(warnings))


def with_rules(path: str, data: bytes, added: Iterable[Rule]) -> bytes:
    """Return the file's text with rules added at its end, except rules that it already contains."""
    existing = set(parse_acls(path, data).rules)
    text = data.decode()
    if text and not text.endswith("\n"):
        text += "\n"
    new = list(dict.fromkeys(rule for rule in added if rule not in existing))
    for _, alike in groupby(new, key=_but_operation):
        text += f"{format_rules(list(alike))}\n"
    return text.encode()


def without_rules(path: str, data: bytes, is_unwanted: Callable[[Rule], bool]) -> tuple[bytes, list[Rule]]:
    """Return (the file's text without the matching rules and otherwise unchanged, the removed rules)."""
    removed: list[Rule] = []
    kept: list[str] = []
    for text, line in zip(data.decode().split("\n"), _lines(path, data), strict=True):
        unwanted = list(filter(is_unwanted, line.rules))
        left = [rule for rule in line.rules if rule not in unwanted]
        removed += unwanted
        if not unwanted:
            kept.append(text)
        elif left:
            kept.append(f"{format_rules(left)}{'  ' if line.comment else ''}{line.comment}")
    return "\n".join(kept).encode(), list(dict.fromkeys(removed))


def check_rule(rule: Rule) -> None:
    """Raise ValueError, with the reason, for a rule that must not be added: it is malformed or can never apply."""
    _check_form(rule)
    _check_applies(rule)


def _check_form(rule: Rule) -> None:
    """Raise `_Malformed` for a rule that a file must not contain."""
    if not rule.principal.startswith(_PRINCIPAL) or rule.principal == _PRINCIPAL:
        raise _Malformed(f"{rule.principal!r} is not a principal; use User:NAME, or User:* for all users")
    if rule.operation is not Operation.ALL and rule.operation not in SUPPORTED[rule.resource_type]:
        possible = ", ".join(map(_text_of, (Operation.ALL, *SUPPORTED[rule.resource_type])))
        what = _text_of(rule.operation)
        raise _Malformed(f"{what} is not an operation of a {_text_of(rule.resource_type)}; use {possible}")
    if not rule.name:
        raise _Malformed("the name is empty")
    if rule.resource_type is ResourceType.CLUSTER and (rule.name, rule.pattern) != (CLUSTER_NAME, Pattern.LITERAL):
        raise _Malformed(f"the only cluster is {CLUSTER_NAME}")
    if rule.host != ANYTHING and (not rule.host or normal_host(rule.host) != rule.host):
        raise _Malformed(f"{rule.host!r} is not an IP address such as 10.0.0.7, or * for all addresses")


def _check_applies(rule: Rule) -> None:
    """Raise `_Malformed` for a rule that can never apply."""
    if rule.resource_type is ResourceType.TOPIC:
        _check_topic(rule)
    if rule.host != ANYTHING and not _may_be_a_client(rule.host):
        raise _Malformed(
            f"no client has the address {rule.host}, so the rule never applies. For all addresses, leave out 'from'."
        )


def _check_topic(rule: Rule) -> None:
    """Raise `_Malformed` for a name or prefix that no topic can have."""
    if rule.name == ANYTHING and rule.pattern is Pattern.LITERAL:
        return
    is_whole = rule.pattern is Pattern.LITERAL or len(rule.name) >= MAX_NAME_LENGTH
    try:
        check_topic_name(rule.name if is_whole else f"{rule.name}a", internal=True)
    except InvalidTopicName as error:
        why = f"no topic has the name {rule.name!r}" if is_whole else f"no topic's name begins with {rule.name!r}"
        advice = ""
        if "," in rule.name:
            parts = [part for part in rule.name.split(",") if part]
            advice = f" A rule has one name: write a line each for {' and '.join(f'topic:{part}' for part in parts)}."
        elif "*" in rule.name:
            advice = " A star is a wildcard only at the end of a name: topic:raw-*; topic:* is all topics."
        raise _Malformed(f"{why} ({error.rule}), so the rule never applies.{advice}") from None


def _may_be_a_client(host: str) -> bool:
    address = ipaddress.ip_address(host)
    return not (address.is_unspecified or address.is_multicast)


def _warnings(line: _Line) -> Iterator[str]:
    """Yield warnings about a line that is valid but probably a mistake."""
    for rule in line.rules[:1]:
        try:
            _check_applies(rule)
        except _Malformed as error:
            yield f"{error} It denies nothing." if rule.permission is Permission.DENY else str(error)
            continue
        if rule.resource_type in (ResourceType.GROUP, ResourceType.TRANSACTIONAL_ID) and "," in rule.name:
            kind = _text_of(rule.resource_type)
            yield f"the rule is about the one {kind} {rule.name!r}; a rule has one name, so write a line for each"
        elif rule.name != ANYTHING and "*" in rule.name:
            yield f"the star in {rule.name!r} is a literal; only at the end, after ':', it is a wildcard"
    for principal in dict.fromkeys((*(rule.principal for rule in line.rules), *line.super_users)):
        if f",{_PRINCIPAL}" in principal:
            yield f"{principal!r} is one user with a comma in the name; write a line for each user"


def normal_host(host: str) -> str:
    """Return the canonical form of an address, IPv4 if it is mapped to IPv6; "" if the text is not an address."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return ""
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)


def format_rules(alike: list[Rule]) -> str:
    """Return one line for rules that differ only in their operations."""
    rule = alike[0]
    words = [
        rule.permission.name.lower(),
        rule.principal,
        ",".join(_text_of(one.operation) for one in alike),
        _resource_text(rule),
        *([] if rule.host == ANYTHING else ["from", rule.host]),
    ]
    return " ".join(map(_quoted, words))


# ------------------------------------------------------------ lines


def _lines(path: str, data: bytes) -> list[_Line]:
    found = []
    try:
        texts = data.decode().split("\n")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise SecurityFileError(path, "not UTF-8", line) from None
    for number, text in enumerate(texts, 1):
        try:
            found.append(_parse_line(text))
        except ValueError as error:
            raise SecurityFileError(path, str(error), number) from None
    return found


def _parse_line(text: str) -> _Line:
    words, comment = _words(text)
    if not words:
        return _Line((), (), comment)
    if words[0] == "super":
        for principal in words[1:]:
            if not principal.startswith(_PRINCIPAL) or principal in (_PRINCIPAL, f"{_PRINCIPAL}*"):
                raise _Malformed(f"{principal!r} is not a single user; use User:NAME")
        if len(words) < 2:
            raise _Malformed("'super' needs a user: super User:NAME")
        return _Line((), tuple(words[1:]), comment)
    return _Line(tuple(_parse_rules(words)), (), comment)


def _parse_rules(words: list[str]) -> list[Rule]:
    has_host = len(words) == 6 and words[4] == "from"
    if words[0] not in _PERMISSIONS or not (len(words) == 4 or has_host):
        raise _Malformed("a rule has the form: allow|deny User:NAME OPERATIONS TYPE:NAME [from ADDRESS]")
    permission, principal, operations, resource = words[:4]
    host = words[5] if has_host else ANYTHING
    resource_type, name, pattern = _parse_resource(resource)
    rules = []
    for text in operations.split(","):
        operation = _OPERATIONS.get(text)
        if operation is None:
            raise _Malformed(f"{text!r} is not an operation; use {', '.join(_OPERATIONS)}")
        host = host if host == ANYTHING else normal_host(host) or host
        rule = Rule(principal, _PERMISSIONS[permission], operation, resource_type, name, pattern, host)
        _check_form(rule)
        rules.append(rule)
    return rules


def _parse_resource(text: str) -> tuple[ResourceType, str, Pattern]:
    if text == "cluster":
        return ResourceType.CLUSTER, CLUSTER_NAME, Pattern.LITERAL
    found = re.match(r"([a-z-]+)([:=])(.+)", text, re.DOTALL)
    if found is None or found[1] not in _TYPES or found[1] == "cluster":
        raise _Malformed(f"{text!r} is not a resource; use topic:NAME, group:NAME, transactional-id:NAME or cluster;"
                         " NAME* for a prefix")  # fmt: skip
    name = found[3]
    if found[2] == ":" and name != ANYTHING and name.endswith("*"):
        return _TYPES[found[1]], name[:-1], Pattern.PREFIXED
    return _TYPES[found[1]], name, Pattern.LITERAL


def _words(text: str) -> tuple[list[str], str]:
    words: list[str] = []
    at = 0
    while at < len(text):
        found = _WORD.match(text, at)
        if found is None:
            raise _Malformed("a quote is not closed, or is inside a word; write such a word as a JSON string")
        if found["comment"]:
            return words, found["comment"]
        if found["quoted"]:
            word = json.loads(found["quoted"])
            word.encode()  # raises for half of a surrogate pair
            words.append(word)
        elif found["plain"]:
            words.append(found["plain"])
        at = found.end()
    return words, ""


def _quoted(word: str) -> str:
    return word if _PLAIN.fullmatch(word) and word.isprintable() else json.dumps(word)


def _resource_text(rule: Rule) -> str:
    if rule.resource_type is ResourceType.CLUSTER:
        return "cluster"
    kind = _text_of(rule.resource_type)
    if rule.pattern is Pattern.PREFIXED:
        return f"{kind}:{rule.name}*"
    return f"{kind}{'=' if rule.name.endswith('*') and rule.name != ANYTHING else ':'}{rule.name}"


def _text_of(word: Operation | ResourceType) -> str:
    return word.name.lower().replace("_", "-")


def _but_operation(rule: Rule) -> Rule:
    return rule._replace(operation=Operation.ALL)
