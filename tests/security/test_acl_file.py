"""The ACL file: its format, the messages for mistakes, and what stays when programs change it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from segmentlog.security.acl_file import check_rule, format_rules, parse_acls, with_rules, without_rules
from segmentlog.security.acl_rules import SUPPORTED, Pattern, Permission, Rule
from segmentlog.security.principals import CLUSTER_NAME, Operation, ResourceType
from segmentlog.security.security_errors import SecurityFileError

ALLOW, DENY = Permission.ALLOW, Permission.DENY
TOPIC, GROUP, CLUSTER, TRANSACTIONAL_ID = (
    ResourceType.TOPIC, ResourceType.GROUP, ResourceType.CLUSTER, ResourceType.TRANSACTIONAL_ID,
)  # fmt: skip


def parse(text: str) -> list[Rule]:
    """Return the rules of such a file."""
    return list(parse_acls("acls", text.encode()).rules)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("allow User:ann read topic:clicks", Rule("User:ann", ALLOW, Operation.READ, TOPIC, "clicks")),
        ("allow User:ann read topic:*", Rule("User:ann", ALLOW, Operation.READ, TOPIC, "*")),
        ("deny User:* all topic:a-*", Rule("User:*", DENY, Operation.ALL, TOPIC, "a-", Pattern.PREFIXED)),
        ("deny User:* all group:**", Rule("User:*", DENY, Operation.ALL, GROUP, "*", Pattern.PREFIXED)),
        ("allow User:a read group=a*", Rule("User:a", ALLOW, Operation.READ, GROUP, "a*")),
        ("allow User:a read group:a:b", Rule("User:a", ALLOW, Operation.READ, GROUP, "a:b")),
        ("allow User:a create cluster", Rule("User:a", ALLOW, Operation.CREATE, CLUSTER, CLUSTER_NAME)),
        (
            "allow User:a idempotent-write cluster from 10.0.0.7",
            Rule("User:a", ALLOW, Operation.IDEMPOTENT_WRITE, CLUSTER, CLUSTER_NAME, host="10.0.0.7"),
        ),
        (
            "allow User:a read topic:a from ::ffff:10.0.0.7",
            Rule("User:a", ALLOW, Operation.READ, TOPIC, "a", host="10.0.0.7"),
        ),
        ("allow User:a read topic:a from *", Rule("User:a", ALLOW, Operation.READ, TOPIC, "a")),
        (
            "allow User:a write transactional-id:x # why",
            Rule("User:a", ALLOW, Operation.WRITE, TRANSACTIONAL_ID, "x"),
        ),
        (
            r'allow "User:CN=Ann Lee,O=Acme\\, Inc." read "group:my group"',
            Rule(r"User:CN=Ann Lee,O=Acme\, Inc.", ALLOW, Operation.READ, GROUP, "my group"),
        ),
        (r"allow User:CN=a\,b read topic:a", Rule(r"User:CN=a\,b", ALLOW, Operation.READ, TOPIC, "a")),
        ("\tallow\tUser:a#b  read group:a#b\r", Rule("User:a#b", ALLOW, Operation.READ, GROUP, "a#b")),
    ],
)
def test_a_line_is_a_rule(text: str, rule: Rule) -> None:
    """The text of the parsed rule is read as the same rule."""
    assert parse(text) == [rule]
    assert parse(format_rules([rule])) == [rule]


def test_a_line_may_have_several_operations_and_several_super_users() -> None:
    """Each of them becomes a rule; comments and empty lines do not."""
    acls = parse_acls("acls", b"# who\n\nsuper User:a User:b  # admins\nallow User:c read,write topic:t\n")
    assert acls.super_users == {"User:a", "User:b"}
    assert [rule.operation for rule in acls.rules] == [Operation.READ, Operation.WRITE]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("permit User:a read topic:t", "allow|deny"),
        ("allow User:a read", "allow|deny"),
        ("allow User:a read topic:t 10.0.0.1", "allow|deny"),
        ("allow User:a read topic:t from", "allow|deny"),
        ("allow User:a read topic:t from 10.0.0.1 more", "allow|deny"),
        ("allow User:a, read topic:t from 10.0.0.0/8", "address"),
        ("allow User:a read topic:t from localhost", "address"),
        ("allow ann read topic:t", "User:NAME"),
        ("allow User: read topic:t", "User:NAME"),
        ("allow Group:a read topic:t", "User:NAME"),
        ("allow User:a reed topic:t", "'reed' is not an operation"),
        ("allow User:a read, write topic:t", "allow|deny"),
        ("allow User:a read, topic:t", "'' is not an operation"),
        ("allow User:a READ topic:t", "'READ' is not an operation"),
        ("allow User:a read topics:t", "topic:NAME"),
        ("allow User:a read topic:", "topic:NAME"),
        ("allow User:a read t", "topic:NAME"),
        ("allow User:a create cluster:x", "cluster"),
        ("allow User:a read cluster", "not an operation of a cluster"),
        ("allow User:a write group:g", "not an operation of a group"),
        ("allow User:a create transactional-id:g", "not an operation of a transactional-id"),
        ('allow "User:a read topic:t', "quote"),
        ('allow User:"a" read topic:t', "quote"),
        ('allow "User:\\q" read topic:t', "escape"),
        ('allow "User:\\ud800" read topic:t', "surrogates"),
        ("super", "super User:NAME"),
        ("super User:*", "not a single user"),
        ("super ann", "not a single user"),
    ],
)
def test_a_mistake_is_told_with_its_line(line: str, told: str) -> None:
    """The error has the line, the fault and a remedy; no rule of the file applies."""
    with pytest.raises(SecurityFileError) as error:
        parse(f"# one\nsuper User:admin\n{line}\nallow User:b read topic:t")
    assert str(error.value).startswith("acls, line 3: ")
    assert told in str(error.value)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("allow User:a read topic:out,in", "line each for topic:out and topic:in"),
        ("deny User:* all topic:**", "no topic's name begins with '*'"),
        ("deny User:* all topic:*-raw", "no topic has the name '*-raw'"),
        ("allow User:a read topic=raw*", "topic:raw-*"),
        ("allow User:a read topic:a/b", "no topic has the name 'a/b'"),
        ("allow User:a read topic:bücher", "no topic has the name"),
        ("allow User:a read topic:..", "no topic has the name '..'"),
        (f"allow User:a read topic:{'x' * 250}", "1 to 249 characters"),
        (f"allow User:a read topic:{'x' * 250}*", "1 to 249 characters"),
        ("allow User:a read topic:t from 0.0.0.0", "no client has the address 0.0.0.0"),
        ("allow User:a read topic:t from 224.0.0.1", "no client has the address"),
        ("allow User:a read group:one,two", "the one group 'one,two'"),
        ("allow User:a write transactional-id:a,b*", "the one transactional-id 'a,b'"),
        ("allow User:a read group:*-workers", "the star in '*-workers'"),
        ("allow User:a,User:b read topic:t", "one user with a comma"),
        ("super User:a,User:b", "one user with a comma"),
    ],
)
def test_a_rule_that_is_most_likely_a_mistake_is_a_doubt(line: str, told: str) -> None:
    """It counts, and a sentence says what it means and what to write, once a line.

    A rule that can never apply is such a rule: older servers wrote it, and the other lines of the file have to count.
    """
    acls = parse_acls("acls", f"# one\n{line}\nallow User:a read,write topic:t\n".encode())
    assert len(acls.rules) + len(acls.super_users) == 3
    assert ("denies nothing" in acls.warnings[0]) == line.startswith("deny")
    assert len(acls.warnings) == 1
    assert acls.warnings[0].startswith("acls, line 2: ")
    assert told in acls.warnings[0]


def test_usual_rules_raise_no_doubt() -> None:
    """Names at the bounds of what there is: long topics, the store's own, users that certificates name."""
    text = f"""super User:a User:b
    allow User:a read topic:{"x" * 249}
    allow User:a read topic:{"x" * 249}*
    allow User:a read topic:*
    allow User:a read topic:.*
    allow User:a read topic:__consumer_offsets
    allow User:a read group:*
    allow User:a read group:my-*
    allow User:CN=Ann,O=Acme read topic:t from ::1
    """
    acls = parse_acls("acls", text.encode())
    assert len(acls.rules) == 8
    assert acls.warnings == ()


def test_bytes_that_are_no_text_are_told_with_their_line() -> None:
    """A file that is not UTF-8 causes an error with the line."""
    with pytest.raises(SecurityFileError, match="line 2: not UTF-8"):
        parse_acls("acls", b"super User:a\nallow User:\xff read topic:t")


def test_rules_are_added_at_the_end_and_once() -> None:
    """The rest of the file stays, also a last line without a newline; equal rules share a line."""
    before = b"# mine\nsuper User:a # me\n\nallow  User:b   read topic:t"
    added = [
        Rule("User:b", ALLOW, Operation.READ, TOPIC, "t"),
        Rule("User:c", ALLOW, Operation.READ, TOPIC, "u"),
        Rule("User:c", ALLOW, Operation.WRITE, TOPIC, "u"),
        Rule("User:c", ALLOW, Operation.WRITE, TOPIC, "u"),
    ]
    after = with_rules("acls", before, added)
    assert after == before + b"\nallow User:c read,write topic:u\n"
    assert with_rules("acls", after, added) == after


def test_rules_are_removed_and_comments_stay() -> None:
    """A line loses the operations that are taken out of it, and goes with the last of them."""
    before = b"# mine\nallow User:b read,write topic:t  # both\r\ndeny User:b read topic:t\nsuper User:a\n"
    after, removed = without_rules("acls", before, lambda rule: rule.operation is Operation.READ)
    assert after == b"# mine\nallow User:b write topic:t  # both\r\nsuper User:a\n"
    assert removed == [
        Rule("User:b", ALLOW, Operation.READ, TOPIC, "t"),
        Rule("User:b", DENY, Operation.READ, TOPIC, "t"),
    ]
    assert without_rules("acls", after, lambda rule: False) == (after, [])


def test_a_rule_that_can_never_apply_can_be_removed() -> None:
    """New rules of this kind are refused; existing ones are read, shown and can be removed."""
    useless = Rule("User:b", DENY, Operation.READ, TOPIC, "my topic", host="0.0.0.0")
    with pytest.raises(ValueError, match="never applies"):
        check_rule(useless)
    before = b'deny User:b read "topic:my topic" from 0.0.0.0\nallow User:b read topic:t\n'
    assert parse_acls("acls", before).rules[0] == useless
    assert without_rules("acls", before, lambda rule: rule == useless) == (b"allow User:b read topic:t\n", [useless])
    more = with_rules("acls", before, [Rule("User:b", ALLOW, Operation.READ, TOPIC, "u")])
    assert more == before + b"allow User:b read topic:u\n"


_TOPICS = st.text("abcXYZ019._-", min_size=1, max_size=20).filter(lambda name: name not in (".", "..", "store.json"))
_NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)


@st.composite
def rules(draw: st.DrawFn) -> Rule:
    """Draw any rule that Kafka's tools could create."""
    resource_type = draw(st.sampled_from(ResourceType))
    operation = draw(st.sampled_from([Operation.ALL, *SUPPORTED[resource_type]]))
    pattern, name = draw(st.sampled_from(Pattern)), draw(_TOPICS if resource_type is TOPIC else _NAMES)
    if resource_type is CLUSTER:
        pattern, name = Pattern.LITERAL, CLUSTER_NAME
    principal = f"User:{draw(_NAMES)}"
    host = draw(st.one_of(st.just("*"), st.ip_addresses(v=4, network="10.0.0.0/8").map(str)))
    return Rule(principal, draw(st.sampled_from(Permission)), operation, resource_type, name, pattern, host)


@given(st.lists(rules(), max_size=5))
def test_whatever_is_written_is_read_as_the_same(some: list[Rule]) -> None:
    """Names with spaces, stars, quotes, line ends and signs of any script; and each can be taken out again."""
    text = with_rules("acls", b"# there\n", some)
    assert set(parse_acls("acls", text).rules) == set(some)
    for rule in some:
        text, _ = without_rules("acls", text, lambda other, rule=rule: other == rule)  # type: ignore[misc]
    assert text == b"# there\n"
