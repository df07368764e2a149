"""Decisions by ACLs: Kafka's meaning of rules, in tables; and the cache of decisions changes none."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from security.rules import ANN, BOB, CLUSTER, GROUP, HOST, TOPIC, allowed, write_rules
from waiting import wait_until

from segmentlog.security.acl_file import Acls
from segmentlog.security.acl_rules import Pattern, Permission, Rule, RuleFilter
from segmentlog.security.acls import Authorizer, OpenAuthorizer, _CachedDecisions
from segmentlog.security.principals import CLUSTER_NAME, Operation, Principal, ResourceType
from segmentlog.security.security_errors import SecurityFileError

Make = Callable[..., Authorizer]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Return a function that writes rules and returns their authorizer, which reads the file at every decision."""
    return partial(write_rules, tmp_path)


@pytest.mark.parametrize(
    ("lines", "name", "expected"),
    [
        ([], "t", ""),
        (["allow User:ann read topic:t"], "t", "read describe"),
        (["allow User:ann write topic:t"], "t", "write describe"),
        (["allow User:ann delete topic:t"], "t", "delete describe"),
        (["allow User:ann alter topic:t"], "t", "alter describe"),
        (["allow User:ann create topic:t"], "t", "create"),
        (["allow User:ann describe topic:t"], "t", "describe"),
        (["allow User:ann describe-configs topic:t"], "t", "describe_configs"),
        (["allow User:ann alter-configs topic:t"], "t", "describe_configs alter_configs"),
        (["allow User:ann read topic:t"], "tt", ""),
        (["allow User:ann read topic:t*"], "tt", "read describe"),
        (["allow User:ann read topic:t*"], "t", "read describe"),
        (["allow User:ann read topic:tt*"], "t", ""),
        (["allow User:ann read topic:*"], "anything", "read describe"),
        (["allow User:* read topic:t"], "t", "read describe"),
        (["allow User:bob read topic:t"], "t", ""),
        (["allow User:ann read group:t"], "t", ""),
        (["allow User:ann read,write topic:t", "deny User:ann write topic:t"], "t", "read describe"),
        (["deny User:ann write topic:t", "allow User:ann read,write topic:t"], "t", "read describe"),
        # A rule that denies DESCRIBE does not deny READ, and a rule that denies READ does not deny DESCRIBE.
        (["allow User:ann read topic:t", "deny User:ann describe topic:t"], "t", "read"),
        (["allow User:ann read,describe topic:t", "deny User:ann read topic:t"], "t", "describe"),
        (["allow User:ann read topic:t", "deny User:* all topic:t"], "t", ""),
        (["allow User:ann read topic:t", "deny User:ann read topic:*"], "t", "describe"),
        (["allow User:ann read topic:t", "deny User:ann all topic:*"], "t", ""),
        (["allow User:ann read topic:tt", "deny User:ann all topic:t*"], "tt", ""),
        (["allow User:ann read topic:t*", "deny User:ann all topic:tt"], "tt", ""),
        (["allow User:ann read topic:t*", "deny User:ann all topic:tt"], "ttt", "read describe"),
        (["allow User:ann read topic:t from 10.0.0.7"], "t", "read describe"),
        (["allow User:ann read topic:t from 10.0.0.8"], "t", ""),
        (["allow User:ann read topic:t", "deny User:ann all topic:t from 10.0.0.7"], "t", ""),
        (["allow User:ann read topic:t", "deny User:ann all topic:t from 10.0.0.8"], "t", "read describe"),
    ],
)
def test_rules_mean_what_they_mean_in_kafka(make: Make, lines: list[str], name: str, expected: str) -> None:
    """Deny by default, deny beats allow, what is implied, wildcards, prefixes, hosts."""
    assert allowed(make(*lines), ANN, TOPIC, name) == expected


def test_all_is_everything(make: Make) -> None:
    """ALL includes operations that have no rule of their own."""
    everything = " ".join(operation.name.lower() for operation in Operation if operation is not Operation.ALL)
    assert allowed(make("allow User:ann all topic:t"), ANN, TOPIC, "t") == everything


def test_super_users_may_do_everything(make: Make) -> None:
    """Super users of the file and of the server, even if a rule denies everything to all."""
    authorizer = make("super User:ann", "deny User:* all topic:*", super_users=["User:bob"])
    for principal in (ANN, BOB):
        assert authorizer.allows(principal, HOST, Operation.DELETE, TOPIC, "t")
        assert authorizer.allows(principal, HOST, Operation.ALTER, CLUSTER, CLUSTER_NAME)
    assert not authorizer.allows(Principal("User", "carl"), HOST, Operation.READ, TOPIC, "t")
    assert not authorizer.allows(Principal("Role", "ann"), HOST, Operation.READ, TOPIC, "t")


def test_addresses_have_one_spelling(make: Make) -> None:
    """A machine is the same through a socket of IPv6."""
    authorizer = make("allow User:ann read topic:t from 10.0.0.7", "allow User:ann read topic:u from 2001:DB8::0:1")
    assert authorizer.allows(ANN, "::ffff:10.0.0.7", Operation.READ, TOPIC, "t")
    assert authorizer.allows(ANN, "2001:db8::1", Operation.READ, TOPIC, "u")
    assert not authorizer.allows(ANN, "no address", Operation.READ, TOPIC, "t")


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([], False),
        (["allow User:ann write topic:t"], True),
        (["allow User:ann write topic:t*"], True),
        (["allow User:ann write topic:*"], True),
        (["allow User:ann read topic:t"], False),
        (["allow User:bob write topic:t"], False),
        (["allow User:ann write group:t", "allow User:ann read group:t"], False),
        (["allow User:ann write topic:t", "deny User:ann write topic:t"], False),
        (["allow User:ann write topic:t", "deny User:ann write topic:u"], True),
        (["allow User:ann write topic:t", "deny User:ann read topic:t"], True),
        (["allow User:ann write topic:t", "deny User:* all topic:*"], False),
        (["allow User:ann write topic:tt", "deny User:ann all topic:t*"], False),
        (["allow User:ann write topic:tt*", "deny User:ann all topic:t*"], False),
        (["allow User:ann write topic:t*", "deny User:ann all topic:tt*"], True),
        (["allow User:ann write topic:t*", "deny User:ann all topic:t"], True),
        (["allow User:ann write topic:*", "deny User:ann all topic:t*"], True),
    ],
)
def test_whether_anything_may_be_written(make: Make, lines: list[str], expected: bool) -> None:
    """An idempotent producer gets an id if it has WRITE on some topic, unless all that is allowed is also denied."""
    lines = [line for line in lines if "write group" not in line]
    assert make(*lines).allows_any(ANN, HOST, Operation.WRITE, TOPIC) is expected


def test_authorized_operations_are_kafkas_bits(make: Make) -> None:
    """READ is bit 3, DESCRIBE bit 8; only what there is to do with such a resource."""
    authorizer = make("allow User:ann read topic:t", "allow User:ann all group:g", "super User:bob")
    assert authorizer.authorized_operations(ANN, HOST, TOPIC, "t") == 1 << 3 | 1 << 8
    assert authorizer.authorized_operations(ANN, HOST, TOPIC, "u") == 0
    assert authorizer.authorized_operations(ANN, HOST, GROUP, "g") == 1 << 3 | 1 << 6 | 1 << 8 | 1 << 10 | 1 << 11
    assert authorizer.authorized_operations(BOB, HOST, TOPIC, "t") == sum(
        1 << bit for bit in (3, 4, 5, 6, 7, 8, 10, 11)
    )
    assert OpenAuthorizer().authorized_operations(ANN, HOST, CLUSTER, CLUSTER_NAME) == sum(
        1 << bit for bit in (5, 7, 8, 9, 10, 11, 12)
    )


_PRINCIPALS = [ANN, BOB]
_HOSTS = ["10.0.0.7", "10.0.0.8"]
_NAMES = ["a", "ab", "abc", "b", "*"]
_RULES = st.builds(
    Rule,
    st.sampled_from(["User:ann", "User:bob", "User:*"]),
    st.sampled_from(Permission),
    st.sampled_from(Operation),
    st.sampled_from([TOPIC, GROUP]),
    st.sampled_from(_NAMES),
    st.sampled_from(Pattern),
    st.sampled_from([*_HOSTS, "*"]),
)


def naive(
    rules: list[Rule], principal: Principal, host: str, operation: Operation, kind: ResourceType, name: str
) -> bool:
    """Apply every rule in turn, by the sentences of Kafka's documentation."""

    def applies(rule: Rule) -> bool:
        about = rule.name in (name, "*") if rule.pattern is Pattern.LITERAL else name.startswith(rule.name)
        implied = rule.permission is Permission.ALLOW and (
            (operation.name == "DESCRIBE" and rule.operation.name in ("READ", "WRITE", "DELETE", "ALTER"))
            or (operation.name == "DESCRIBE_CONFIGS" and rule.operation.name == "ALTER_CONFIGS")
        )
        return (
            rule.resource_type is kind
            and about
            and rule.principal in (str(principal), "User:*")
            and rule.host in (host, "*")
            and (rule.operation in (operation, Operation.ALL) or implied)
        )

    applying = [rule for rule in rules if applies(rule)]
    return bool(applying) and all(rule.permission is Permission.ALLOW for rule in applying)


_QUESTIONS = st.tuples(
    st.sampled_from(_PRINCIPALS), st.sampled_from(_HOSTS),
    st.sampled_from([one for one in Operation if one is not Operation.ALL]), st.sampled_from([TOPIC, GROUP]),
    st.sampled_from(_NAMES),
)  # fmt: skip


@given(st.lists(_RULES, max_size=8), st.lists(_QUESTIONS, max_size=20))
def test_decisions_are_those_of_a_naive_reading(rules: list[Rule], questions: list[Any]) -> None:
    """Decisions of the index, and of the cache for repeated questions, equal those of a simple reference."""
    decisions = _CachedDecisions(Acls(tuple(rules), frozenset()), frozenset())
    for question in questions + questions:
        expected = naive(rules, *question)
        assert decisions.decide(*question) is expected
        assert decisions.cached[question] is expected


@given(st.lists(_RULES, max_size=6), _QUESTIONS)
def test_any_is_never_less_than_one(rules: list[Rule], question: Any) -> None:
    """If any name is allowed, `allows_any` returns True."""
    decisions = _CachedDecisions(Acls(tuple(rules), frozenset()), frozenset())
    principal, host, operation, kind, _ = question
    names = [*_NAMES, "aa", "abb", "abcd", "c", "*x"]
    some = any(naive(rules, principal, host, operation, kind, name) for name in names)
    assert decisions.decide(principal, host, operation, kind, None) >= some


def test_what_is_remembered_is_bounded(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients that use ever new names do not use up memory."""
    monkeypatch.setattr("segmentlog.security.acls._CACHED_MAX", 100)
    authorizer = make("allow User:ann read topic:t")
    for number in range(1000):
        assert authorizer.allows(ANN, HOST, Operation.READ, TOPIC, f"x{number}") is False
        assert authorizer.allows(ANN, HOST, Operation.READ, TOPIC, "t") is True
    assert len(authorizer._file.current().cached) <= 100


def test_changes_count_at_once_and_mistakes_do_not(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    """A changed file is reloaded; with a broken or missing file the previous rules stay, and one error is logged."""
    authorizer = make("allow User:ann read topic:t")
    assert authorizer.allows(ANN, HOST, Operation.READ, TOPIC, "t")
    Path(authorizer.path).write_text("allow User:bob read topic:t\n")
    assert not authorizer.allows(ANN, HOST, Operation.READ, TOPIC, "t")
    assert authorizer.allows(BOB, HOST, Operation.READ, TOPIC, "t")
    with caplog.at_level(logging.ERROR):
        Path(authorizer.path).write_text("allow User:ann read topic:t\nnonsense\n")
        for _ in range(3):
            assert not authorizer.allows(ANN, HOST, Operation.READ, TOPIC, "t")
            assert authorizer.allows(BOB, HOST, Operation.READ, TOPIC, "t")
        assert len(caplog.records) == 1
        assert "line 2" in caplog.text
        os.unlink(authorizer.path)
        assert authorizer.allows(BOB, HOST, Operation.READ, TOPIC, "t")
        assert len(caplog.records) == 2
    Path(authorizer.path).write_text("")
    assert not authorizer.allows(BOB, HOST, Operation.READ, TOPIC, "t"), "an empty file denies everything"


def test_a_change_is_logged_once_with_counts(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    """The line has the numbers of added and removed rules, and warnings, but no names. No change, no line."""
    caplog.set_level(logging.INFO, "segmentlog.server")
    authorizer = make("allow User:ann read topic:t", "super User:root")
    assert not caplog.records
    Path(authorizer.path).write_text(
        "# mine\nallow User:ann write topic:t\nallow User:bob read group:a,b\nsuper User:root User:other\n"
    )
    for _ in range(3):
        authorizer.refresh()
    (doubt,) = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    assert "line 3" in doubt
    (line,) = [one.getMessage() for one in caplog.records if one.levelno == logging.INFO]
    assert "2 rules, 2 super users; 2 rules added, 1 removed, 1 super users added, 0 removed" in line
    assert not any(name in line.replace(authorizer.path, "") for name in ("ann", "bob", "root"))


def test_a_second_change_within_the_step_of_a_clock_is_seen(make: Make) -> None:
    """File systems' times have steps: a young file is read again, whatever its time says."""
    authorizer = make("allow User:ann read topic:t")
    assert authorizer.allows(ANN, HOST, Operation.READ, TOPIC, "t")
    found = os.stat(authorizer.path)
    with open(authorizer.path, "r+") as file:
        file.write("allow User:bob")
    os.utime(authorizer.path, ns=(found.st_atime_ns, found.st_mtime_ns))
    assert not authorizer.allows(ANN, HOST, Operation.READ, TOPIC, "t")


def test_a_server_does_not_start_with_a_broken_file(make: Make, tmp_path: Path) -> None:
    """Nor with a missing file that it was configured to use."""
    with pytest.raises(SecurityFileError, match="line 1"):
        make("nonsense")
    with pytest.raises(SecurityFileError, match="does not exist"):
        Authorizer(str(tmp_path / "none"))


def _add_many(path: str, name: str) -> None:
    authorizer = Authorizer(path)
    for number in range(20):
        authorizer.add([Rule(f"User:{name}", Permission.ALLOW, Operation.READ, TOPIC, f"{name}-{number}")])


def test_workers_lose_no_rule_of_each_other(make: Make) -> None:
    """Two processes add rules; a third one, which only reads, has all of them soon after."""
    authorizer = make("super User:ann")
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_add_many, args=(authorizer.path, name)) for name in ("one", "two")]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    for name in ("one", "two"):
        for number in range(20):
            assert authorizer.allows(Principal("User", name), HOST, Operation.READ, TOPIC, f"{name}-{number}")


def test_a_reader_looks_every_half_second(tmp_path: Path) -> None:
    """For that time, a worker may use rules that another one has replaced."""
    path = tmp_path / "acls"
    path.write_text("")
    authorizer = Authorizer(str(path))
    path.write_text("allow User:ann read topic:t\n")
    wait_until(lambda: authorizer.allows(ANN, HOST, Operation.READ, TOPIC, "t"))


def test_filters_and_rules_are_plain_values() -> None:
    """They can be logged: they contain no secret."""
    rule = Rule("User:ann", Permission.ALLOW, Operation.READ, TOPIC, "t")
    assert json.dumps(rule) == '["User:ann", 3, 3, 2, "t", 3, "*"]'
    assert RuleFilter(1, None, 1, None, None, 1, 1).matches(rule)
